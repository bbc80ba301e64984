"""DenseRows: reqs known by their rows, everything of them on the device; a GPU is not waited for.

Whole vocabularies and batches at once, every node of every tree. Its results are those of the host
(worker/target/tree_walk.py), or distributed as those are where the rule draws by chance.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.api import BuiltTrees, KernelSet, TreeLinks, VerifyResult
from paceline.worker.config import SpecConfig
from paceline.worker.dense_sampler import (
    NO_TOKEN,
    DenseParams,
    choose_dense,
    rank_dense,
    target_probs_dense,
)
from paceline.worker.logit_stages import (
    NodeRows,
    ProcessedRows,
    apply_mask,
    apply_processors,
    token_logprobs,
)
from paceline.worker.noise import FINAL_COIN, WALK_COIN, coins
from paceline.worker.step import SamplingRow
from paceline.worker.target.row_tables import RowTables

_NO_DRAFT = -2  # in place of a draft token that must not be accepted


@dataclass(frozen=True, slots=True)
class _Nodes:
    """Rows of logits of a batch of trees of n nodes; plain rows are trees of their root."""

    logits: Tensor  # [bs * n, V], through stage 3 of worker/logit_stages.py
    params: DenseParams | None  # None where all are greedy
    draft_ids: Tensor  # [bs, n]
    links: TreeLinks


class DenseRows:
    """As `DeviceSampler`, which see."""

    def __init__(
        self,
        kernels: KernelSet,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        num_rows: int,
        device: torch.device,
        spec: SpecConfig,
    ) -> None:
        self._kernels = kernels
        self._vocab_size = vocab_size
        self._device = device
        self._spec = spec
        self._tables = RowTables(vocab_size, eos_token_ids, num_rows, device)
        self._reqs: dict[int, SamplingRow] = {}  # what of a req stays on the host, by row

    def open(self, rows: Sequence[int], sampling: Sequence[SamplingRow]) -> None:
        self._tables.open(rows, sampling)
        self._reqs.update(zip(rows, sampling, strict=True))

    def commit(self, rows: Tensor, new_ids: Tensor, num_new_tokens: Tensor) -> None:
        self._tables.commit(rows, new_ids, num_new_tokens)

    def draw(
        self,
        logits: Tensor,
        rows: Tensor,
        rows_cpu: Sequence[int],
        positions: Tensor,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """(tokens [n], their log-probabilities [n] where a req wants any)."""
        bs = len(rows_cpu)
        roots = torch.zeros(bs, 1, dtype=torch.int64, device=self._device)
        none = torch.full_like(roots, -1)
        links = TreeLinks(torch.arange(bs, device=self._device).unsqueeze(1), none, none)
        nodes = self._nodes(logits, rows, rows_cpu, positions.view(bs, 1), roots, links, None, mask)
        ids = self._walk(nodes, 0, None).predict
        return ids, self._logprobs(nodes, rows_cpu, ids)

    def kind(self, rows_cpu: Sequence[int]) -> Hashable | None:
        """As `DeviceSampler.kind`."""
        tables, reqs = self._tables, [self._reqs[row] for row in rows_cpu if row in self._reqs]
        if tables.is_adjusted(rows_cpu) or any(r.processors or r.wants_logprobs for r in reqs):
            return None
        return tables.is_noisy(rows_cpu), tables.is_sorted(rows_cpu)

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
        cells = trees.tree_mask[: bs * n * n].view(bs, n, n)
        positions = trees.positions[: bs * n].view(bs, n) + 1  # of the token behind each node
        nodes = self._nodes(
            logits, rows, rows_cpu, positions, trees.draft_ids, trees.links, cells, mask
        )
        result = self._walk(nodes, max_depth, cells)
        if num_simulated:
            result = simulate(result, trees.draft_ids, min(num_simulated, n))
        logprobs = self._logprobs(nodes, rows_cpu, result.predict)
        if logprobs is not None:
            is_behind = result.accept_index < 0
            logprobs = logprobs[result.accept_index.clamp(min=0)]
            logprobs = logprobs.masked_fill(is_behind, -torch.inf)
        return result, logprobs

    def top_children(
        self,
        logits: Tensor,
        rows: Tensor,
        rows_cpu: Sequence[int],
        positions: Tensor,
        topk: int,
        hot_token_id: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        num_columns = self._vocab_size if hot_token_id is None else len(hot_token_id)
        return rank_dense(
            self._kernels,
            logits.detach()[:, :num_columns].float(),
            self._tables.params(rows, rows_cpu, positions, len(logits) // len(rows_cpu)),
            topk,
            token_ids=hot_token_id,
            is_coupled=self._spec.rule == "coupled",
        )

    def _nodes(
        self,
        logits: Tensor,
        rows: Tensor,
        rows_cpu: Sequence[int],
        positions: Tensor,
        draft_ids: Tensor,
        links: TreeLinks,
        cells: Tensor | None,
        mask: Tensor | None,
    ) -> _Nodes:
        """Stages 1 to 3; positions, draft_ids [bs, n], cells [bs, n, n] or None without drafts."""
        bs, n = positions.shape
        logits = logits.detach()[:, : self._vocab_size].float()
        if self.kind(rows_cpu) is None:
            is_on_path = cells
            if cells is not None:
                is_on_path = cells & (torch.arange(n, device=self._device) > 0)
            logits = apply_processors(logits, self._processed(rows_cpu, draft_ids, is_on_path))
            trees = logits.view(bs, n, self._vocab_size)
            adjust = self._tables.adjust
            logits = adjust(trees, rows, rows_cpu, positions, draft_ids, is_on_path).flatten(0, 1)
        params = self._tables.params(rows, rows_cpu, positions, n)
        return _Nodes(apply_mask(logits, mask), params, draft_ids, links)

    def _processed(
        self, rows_cpu: Sequence[int], draft_ids: Tensor, is_on_path: Tensor | None
    ) -> list[ProcessedRows]:
        n = draft_ids.shape[1]
        processed = []
        for b, row in enumerate(rows_cpu):
            if row in self._reqs and self._reqs[row].processors:
                nodes = NodeRows.of_root(self._device)
                if is_on_path is not None:
                    nodes = NodeRows(draft_ids[b], is_on_path[b])
                processed.append(ProcessedRows(b * n, nodes, self._reqs[row].processors))
        return processed

    def _walk(self, nodes: _Nodes, max_depth: int, cells: Tensor | None) -> VerifyResult:
        # A draft "token" equal to NO_TOKEN would match a node from which none can be chosen.
        draft_ids = nodes.draft_ids.masked_fill(nodes.draft_ids < 0, _NO_DRAFT)
        if self._spec.rule == "coupled":
            targets = choose_dense(self._kernels, nodes.logits, nodes.params)
            return self._kernels.verify_tree_greedy(
                draft_ids, nodes.links, targets.view(draft_ids.shape), max_depth
            )
        return self._walk_by_chance(nodes, draft_ids, max_depth, cells)

    def _walk_by_chance(
        self, nodes: _Nodes, draft_ids: Tensor, max_depth: int, cells: Tensor | None
    ) -> VerifyResult:
        params, kernels = nodes.params, self._kernels
        bs, n = draft_ids.shape
        probs, is_unusable = target_probs_dense(nodes.logits, params)
        if cells is not None:
            draft_ids = draft_ids.masked_fill(is_repeated(draft_ids, cells), _NO_DRAFT)
        walk_coins = torch.zeros(bs, n, device=self._device)  # any do where all is certain
        final_coins = walk_coins[:, 0]
        if params is not None:
            seeds, positions = params.seeds.view(bs, n), params.positions.view(bs, n)
            walk_coins = coins(kernels, seeds, positions, WALK_COIN)
            final_coins = coins(kernels, seeds[:, 0], positions[:, 0], FINAL_COIN)
        result = kernels.tree_speculative_sampling_target_only(
            draft_ids,
            nodes.links,
            probs.view(bs, n, -1),
            walk_coins,
            final_coins,
            max_depth,
            self._spec.threshold_single,
            self._spec.threshold_acc,
        )
        last = result.accept_index.gather(1, result.accept_length.unsqueeze(1)).squeeze(1)
        tokens = result.predict[last].masked_fill(is_unusable[last], NO_TOKEN)
        predict = result.predict.index_copy(0, last, tokens)
        return VerifyResult(predict, result.accept_index, result.accept_length)

    def _logprobs(self, nodes: _Nodes, rows_cpu: Sequence[int], token_ids: Tensor) -> Tensor | None:
        """Of one token behind each node, [bs * n] fp32; None where no req wants any."""
        if not any(row in self._reqs and self._reqs[row].wants_logprobs for row in rows_cpu):
            return None
        logits, params = nodes.logits, nodes.params
        temperatures = logits.new_ones(len(logits)) if params is None else params.temperature
        return token_logprobs(logits, temperatures, token_ids)


def is_repeated(draft_ids: Tensor, cells: Tensor) -> Tensor:
    """Whether a sibling before each node holds its token: it would be tried twice. [bs, n] bool.

    draft_ids [bs, n]; cells [bs, n, n], node i attends to node j.
    """
    n = draft_ids.shape[1]
    nodes = torch.arange(n, device=draft_ids.device)
    # Ancestors stand in ascending order, so that the last of them is the parent.
    parents = torch.where(cells & (nodes != nodes.unsqueeze(1)), nodes, -1).amax(-1)
    is_sibling = parents.unsqueeze(1) == parents.unsqueeze(2)
    is_equal = draft_ids.unsqueeze(1) == draft_ids.unsqueeze(2)
    return (is_sibling & is_equal & (nodes < nodes.unsqueeze(1))).any(-1)


def simulate(result: VerifyResult, draft_ids: Tensor, num_new_tokens: int) -> VerifyResult:
    """The same batch as if its first `num_new_tokens` nodes, in a row, had been accepted.

    The new tokens are draft tokens of the tree, then what the target chose behind the root, or
    NO_TOKEN where it could choose nothing: ids of the vocabulary, which make no text.
    """
    bs, n = draft_ids.shape
    first = result.accept_index[:, :1]
    places = torch.arange(result.accept_index.shape[1], device=first.device)
    accept_index = (first + places).masked_fill(places >= num_new_tokens, -1)
    predict = torch.zeros_like(result.predict).view(bs, n)
    predict[:, : num_new_tokens - 1] = draft_ids[:, 1:num_new_tokens]
    predict[:, num_new_tokens - 1] = result.predict[first.squeeze(1)]
    accept_length = torch.full_like(result.accept_length, num_new_tokens - 1)
    return VerifyResult(predict.flatten(), accept_index, accept_length)
