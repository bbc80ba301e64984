"""What speculation asks of a forward: hidden states, and a batch of trees to verify. Pure."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import torch
from torch import Tensor

from paceline.kernels.api import TreeLinks


class CaptureHiddenMode(IntEnum):
    """Of which tokens a forward hands back hidden states."""

    NULL = 0
    LAST = 1  # of those whose logits are wanted
    FULL = 2  # of all


@dataclass(frozen=True, slots=True, eq=False)
class EagleVerifyInput:
    """A batch of trees that the target verifies. It lives within one step: never filtered.

    Args:
        draft_token: [bs * num_draft_tokens] int64, node 0 of each req its verified_id.
        custom_mask: as its TreeMaskMode lays it out; may be longer than that needs.
        positions: [bs * num_draft_tokens] int64, seq_len + depth.
        retrieve_index, retrieve_next_token, retrieve_next_sibling: as in TreeLinks.
        num_steps, topk, num_draft_tokens: the shape of the trees.
        capture_hidden_mode: what the verifying forward hands back; None leaves it to the batch.
        seq_lens_sum, seq_lens_cpu: where the host knows them, int and [bs] int64; None where the
            step was planned ahead of them.
        grammar: any grammar of the batch: how its masks are applied is the same for all.
        hidden_states: [bs * num_draft_tokens, width], the target's features of the nodes.
        last_loc: [bs] int64, the slot before the first node, for pages of several tokens.
    Raises: ValueError: a field has not the length that the links imply.
    """

    draft_token: Tensor
    custom_mask: Tensor
    positions: Tensor
    retrieve_index: Tensor
    retrieve_next_token: Tensor
    retrieve_next_sibling: Tensor
    num_steps: int
    topk: int
    num_draft_tokens: int
    capture_hidden_mode: CaptureHiddenMode | None = CaptureHiddenMode.FULL
    seq_lens_sum: int | None = None
    seq_lens_cpu: Tensor | None = None
    grammar: object | None = None
    hidden_states: Tensor | None = None
    last_loc: Tensor | None = None

    def __post_init__(self) -> None:
        bs, num_nodes = self.bs, self.bs * self.num_draft_tokens
        for name in ("retrieve_index", "retrieve_next_token", "retrieve_next_sibling"):
            shape = tuple(getattr(self, name).shape)
            if shape != (bs, self.num_draft_tokens):
                raise ValueError(f"{name} is {shape}, must be {(bs, self.num_draft_tokens)}")
        lens = {"draft_token": num_nodes, "positions": num_nodes, "hidden_states": num_nodes}
        for name, want in (lens | {"seq_lens_cpu": bs, "last_loc": bs}).items():
            value = getattr(self, name)
            if value is not None and len(value) != want:
                raise ValueError(f"{name} has {len(value)} entries, must have {want}")

    @classmethod
    def create_idle_input(
        cls, *, num_steps: int, topk: int, num_draft_tokens: int, device: torch.device | str
    ) -> Self:
        """Of no req, for a step in which only others compute."""
        ids = torch.empty(0, dtype=torch.int64, device=device)
        links = torch.empty(0, num_draft_tokens, dtype=torch.int64, device=device)
        return cls(
            draft_token=ids,
            custom_mask=torch.empty(0, dtype=torch.bool, device=device),
            positions=ids,
            retrieve_index=links,
            retrieve_next_token=links,
            retrieve_next_sibling=links,
            num_steps=num_steps,
            topk=topk,
            num_draft_tokens=num_draft_tokens,
            seq_lens_sum=0,
            seq_lens_cpu=torch.empty(0, dtype=torch.int64),
        )

    @property
    def bs(self) -> int:
        return len(self.retrieve_index)

    @property
    def links(self) -> TreeLinks:
        return TreeLinks(self.retrieve_index, self.retrieve_next_token, self.retrieve_next_sibling)
