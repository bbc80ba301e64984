"""HostRows: reqs known by their rows whose logits are on a CPU, where waiting costs nothing.

Every req keeps a copy of its text here, and tokens are chosen as `decide` chooses them: one argmax
for plain greedy rows, and elsewhere the transforms of only those nodes that a walk comes to.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.kernels.api import BuiltTrees, KernelSet, TreeLinks, VerifyResult
from paceline.worker.sampler import LogitRow, Sampler
from paceline.worker.step import SamplingRow
from paceline.worker.target.tree_walk import UNLINKED, NodeTree, Walk, walk_trees


class HostRows:
    """As `DeviceSampler`, which see; all tensors are on the host."""

    def __init__(self, sampler: Sampler, kernels: KernelSet) -> None:
        self._sampler = sampler
        self._kernels = kernels
        self._reqs: dict[int, SamplingRow] = {}

    def open(self, rows: Sequence[int], sampling: Sequence[SamplingRow]) -> None:
        for row, req in zip(rows, sampling, strict=True):
            self._reqs[row] = replace(req, output_ids=list(req.output_ids))

    def kind(self, rows_cpu: Sequence[int]) -> Hashable | None:
        """As `DeviceSampler.kind`."""
        return None

    def commit(self, rows: Tensor, new_ids: Tensor, num_new_tokens: Tensor) -> None:
        given = zip(rows.tolist(), new_ids.tolist(), num_new_tokens.tolist(), strict=True)
        for row, ids, num_new in given:
            self._reqs[row].output_ids.extend(ids[:num_new])

    def draw(
        self,
        logits: Tensor,
        rows: Tensor,
        rows_cpu: Sequence[int],
        positions: Tensor,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """(tokens [n], their log-probabilities [n] where a req wants any)."""
        trees = [
            NodeTree(i, (0,), (-1,), self._req(row, position))
            for i, (row, position) in enumerate(zip(rows_cpu, positions.tolist(), strict=True))
        ]
        walks = walk_trees(trees, logits, self._sampler, self._kernels, mask=mask)
        ids = torch.tensor([walk.new_ids[0] for walk in walks], dtype=torch.int64)
        logprobs = self._logprobs(walks, rows_cpu, 1)
        return ids, None if logprobs is None else logprobs[:, 0]

    def verify(
        self,
        logits: Tensor,
        trees: BuiltTrees,
        rows: Tensor,
        rows_cpu: Sequence[int],
        seq_lens: Tensor,
        max_depth: int,
        mask: Tensor | None,
        num_simulated: int,
    ) -> tuple[VerifyResult, Tensor | None]:
        """(the verdict, the log-probabilities of new tokens [bs, max_depth + 1])."""
        bs, n = trees.draft_ids.shape
        text_lens = (seq_lens + 1).tolist()  # with the root, which is committed
        all_ids, all_parents = trees.draft_ids.tolist(), parents_of(trees.links)
        walks = walk_trees(
            [
                NodeTree(b * n, tuple(all_ids[b]), all_parents[b], self._req(row, text_lens[b]))
                for b, row in enumerate(rows_cpu)
            ],
            logits,
            self._sampler,
            self._kernels,
            mask=mask,
            max_depth=max_depth,
            num_simulated=num_simulated,
        )
        predict = torch.zeros(bs * n, dtype=torch.int64)
        accept_index = torch.full((bs, max_depth + 1), -1)
        for b, walk in enumerate(walks):
            nodes = torch.tensor(walk.path) + b * n
            predict[nodes] = torch.tensor(walk.new_ids)
            accept_index[b, : len(nodes)] = nodes
        accept_length = torch.tensor([len(walk.path) - 1 for walk in walks], dtype=torch.int64)
        result = VerifyResult(predict, accept_index, accept_length)
        return result, self._logprobs(walks, rows_cpu, max_depth + 1)

    def top_children(
        self,
        logits: Tensor,
        rows: Tensor,
        rows_cpu: Sequence[int],
        positions: Tensor,
        topk: int,
        hot_token_id: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        num_lanes = len(logits) // len(rows_cpu)
        reqs = [self._reqs[row] for row in rows_cpu for _ in range(num_lanes)]
        logit_rows = [
            LogitRow(req.params, range(position), ())
            for req, position in zip(reqs, positions.flatten().tolist(), strict=True)
        ]
        return self._sampler.top_children(logits, logit_rows, topk, hot_token_id)

    def _logprobs(
        self, walks: Sequence[Walk], rows_cpu: Sequence[int], width: int
    ) -> Tensor | None:
        """[bs, width] fp32, -inf where a req wants none."""
        if not any(self._reqs[row].wants_logprobs for row in rows_cpu):
            return None
        logprobs = torch.full((len(walks), width), -torch.inf)
        for b, walk in enumerate(walks):
            logprobs[b, : len(walk.logprobs)] = torch.tensor(walk.logprobs)
        return logprobs

    def _req(self, row: int, text_len: int) -> SamplingRow:
        req = self._reqs[row]
        known = len(req.prompt_ids) + len(req.output_ids)
        assert known == text_len, (
            f"row {row} has {known} tokens committed, its step says {text_len}"
        )
        return req


def parents_of(links: TreeLinks) -> list[tuple[int, ...]]:
    """The parent of each node of each tree: -1 for the root, UNLINKED for nodes linked nowhere."""
    all_parents = []
    first_children = links.retrieve_next_token.tolist()
    siblings = links.retrieve_next_sibling.tolist()
    for children, next_sibling in zip(first_children, siblings, strict=True):
        parents = [UNLINKED] * len(children)
        parents[0] = -1
        for node, first in enumerate(children):
            child = first
            while child >= 0:
                parents[child] = node
                child = next_sibling[child]
        all_parents.append(tuple(parents))
    return all_parents
