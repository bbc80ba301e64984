"""The places around a req's own parameters where its logits are changed or told of.

The order, for every path of execution and every token:

1. a req's logits processors, each given all rows of the req;
2. penalties, min_tokens, logit_bias (worker/logit_filters.py);
3. the mask of a grammar;
4. temperature, top_k, top_p, min_p, and the choice;
5. log-probabilities of the tokens chosen, from what 3 left and the temperature.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.worker.errors import InternalError
from paceline.worker.step import LogitsProcessor

_WORD_BITS = 32


@dataclass(frozen=True, slots=True, eq=False)
class NodeRows:
    """What the n rows of logits of one req stand behind, on the device of the logits.

    token_ids: [n] int64, the draft token of each node; entry 0 is the committed root's and means
        nothing. A row without a tree is its root alone.
    is_on_path: [n, n] bool, whether node j is a draft token on the way to node i, i among them.
    """

    token_ids: Tensor
    is_on_path: Tensor

    @classmethod
    def of_root(cls, device: torch.device) -> "NodeRows":
        return cls(
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.zeros(1, 1, dtype=torch.bool, device=device),
        )

    def path_ids(self) -> list[tuple[int, ...]]:
        """The draft tokens behind the root that lead to each row; waits for the device."""
        token_ids = self.token_ids.tolist()
        return [
            tuple(token_ids[j] for j, is_on in enumerate(cells) if is_on)
            for cells in self.is_on_path.tolist()
        ]


@dataclass(frozen=True, slots=True)
class ProcessedRows:
    """Which rows of logits the processors of one req are given: `num_rows` from `first` on."""

    first: int
    nodes: NodeRows
    processors: Sequence[LogitsProcessor]


def apply_processors(logits: Tensor, reqs: Sequence[ProcessedRows]) -> Tensor:
    """logits [n, V] fp32, rewritten by each req's processors in turn; those given stay as they are.

    Raises: InternalError: a processor returns another shape than it got.
    """
    if not reqs:
        return logits
    logits = logits.clone()
    for req in reqs:
        rows = logits[req.first : req.first + len(req.nodes.token_ids)]
        for processor in req.processors:
            changed = processor(rows.clone(), req.nodes)
            if changed.shape != rows.shape:
                raise InternalError(
                    f"logits processor {processor!r} made {tuple(changed.shape)} of logits "
                    f"{tuple(rows.shape)}"
                )
            rows.copy_(changed)
    return logits


def apply_mask(logits: Tensor, mask: Tensor | None) -> Tensor:
    """logits [n, V] with -inf for the tokens that a grammar forbids.

    mask: [n, ceil(V / 32)] int32, bit t % 32 of word t // 32 set where token t is allowed; all bits
        of a row that nothing constrains. None allows everything.
    """
    if mask is None:
        return logits
    bits = torch.arange(_WORD_BITS, dtype=torch.int32, device=mask.device)
    is_allowed = (mask.unsqueeze(-1) >> bits) & 1  # [n, words, 32]
    return logits.masked_fill(is_allowed.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)


def token_logprobs(logits: Tensor, temperatures: Tensor, token_ids: Tensor) -> Tensor:
    """The log-probability of each row's token, before any cut: [n] fp32; -inf for a negative id.

    logits: [n, V], after stage 3; temperatures [n] fp32, 1 where greedy; token_ids [n] int64.
    """
    logits = logits.masked_fill(logits.isnan(), -torch.inf)
    logprobs = (logits / temperatures.unsqueeze(-1)).log_softmax(-1)
    chosen = logprobs.gather(-1, token_ids.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return chosen.masked_fill(token_ids < 0, -torch.inf)
