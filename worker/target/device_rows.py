"""DeviceSampler: tokens of reqs that are known by their rows alone, their counts kept here.

For steps that are launched before the last one is read: on a GPU everything stays there and nothing
waits for it. It chooses what `decide` (worker/target/verify.py) chooses from the reqs' own lists; a
test holds the two equal.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.api import BuiltTrees, KernelSet
from paceline.worker.config import SpecConfig
from paceline.worker.sampler import Sampler
from paceline.worker.spec.simulation import simulated_num_new_tokens
from paceline.worker.step import SamplingRow
from paceline.worker.target.dense_rows import DenseRows
from paceline.worker.target.host_rows import HostRows


@dataclass(frozen=True, slots=True)
class Verdict:
    """A VerifyResult of which `predict` may hold NO_TOKEN at the end of a path: its logits have no
    finite maximum, and the req gets the tokens before it.

    predict, accept_index, accept_length: as in VerifyResult.
    logprobs: [bs, max_depth + 1] fp32 of the new tokens, which stand at predict[accept_index];
        -inf behind them. None where no req of the batch wants them.
    """

    predict: Tensor
    accept_index: Tensor
    accept_length: Tensor
    logprobs: Tensor | None = None


class DeviceSampler:
    """Not thread-safe: it belongs to the device thread."""

    def __init__(
        self,
        kernels: KernelSet,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        num_rows: int,
        device: torch.device,
        spec: SpecConfig,
        *,
        is_dense: bool | None = None,
    ) -> None:
        """
        Args:
            num_rows: those of `req_to_token`.
            spec: by which rule trees are verified.
            is_dense: whether whole batches are transformed at once and nothing is read back; None:
                unless the device is a CPU, which is quicker node by node.
        """
        self._spec = spec
        self._num_simulated_steps = 0
        self._rows: DenseRows | HostRows
        device = torch.device(device)
        if device.type != "cpu" if is_dense is None else is_dense:
            self._rows = DenseRows(kernels, vocab_size, eos_token_ids, num_rows, device, spec)
        else:
            self._rows = HostRows(Sampler(kernels, vocab_size, eos_token_ids, spec), kernels)

    @property
    def is_simulated(self) -> bool:
        """Whether acceptance is made up, for a benchmark."""
        return self._spec.is_simulated

    def simulate_step(self, max_depth: int) -> int:
        """How many tokens the next step's trees are to yield, drawn anew; 0 where none are made up.

        max_depth: most draft tokens accepted per req.
        """
        if not self.is_simulated:
            return 0
        self._num_simulated_steps += 1
        return simulated_num_new_tokens(self._spec, self._num_simulated_steps - 1, max_depth)

    def kind(self, rows_cpu: Sequence[int]) -> Hashable | None:
        """Equal for batches of one size on which `verify` and `top_children` run the same
        operations, so that those of one may be repeated for another. None: they may differ."""
        return self._rows.kind(rows_cpu)

    def open_rows(self, rows: Sequence[int], sampling: Sequence[SamplingRow]) -> None:
        """Takes reqs in at their last prompt chunk; what the rows held before is forgotten.

        The lists of `sampling` are read now and never again: later tokens come by `commit`.
        """
        self._rows.open(rows, sampling)

    def draw(
        self,
        logits: Tensor,
        rows: Tensor,
        rows_cpu: Sequence[int],
        positions: Tensor,
        mask: Tensor | None = None,
    ) -> Tensor:
        """The next token of each row, or NO_TOKEN: [n] int64. It counts once it is committed.

        Args:
            logits: [n, V], V >= vocab_size; NaN counts as -inf. Not changed.
            rows: [n] int64, the reqs' req_pool_index; rows_cpu: the same on the host.
            positions: [n] int64, absolute, of the tokens drawn: the lengths of the texts so far.
            mask: [n, ceil(vocab_size / 32)] int32, see `apply_mask`.
        """
        return self.draw_with_logprobs(logits, rows, rows_cpu, positions, mask)[0]

    def draw_with_logprobs(
        self,
        logits: Tensor,
        rows: Tensor,
        rows_cpu: Sequence[int],
        positions: Tensor,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(`draw`, the log-probabilities of its tokens [n] fp32; None where no req wants them)."""
        return self._rows.draw(logits, rows, rows_cpu, positions, mask)

    def verify(
        self,
        logits: Tensor,
        trees: BuiltTrees,
        rows: Tensor,
        rows_cpu: Sequence[int],
        seq_lens: Tensor,
        max_depth: int,
        mask: Tensor | None = None,
        *,
        num_simulated: int = 0,
    ) -> Verdict:
        """Walks each tree by the configured rule. Nothing counts before it is committed.

        Args:
            logits: [bs * num_draft_tokens, V], as for `draw`.
            trees: their mask as QLEN_ONLY, whatever buffer it lies in.
            rows, rows_cpu: [bs], as for `draw`.
            seq_lens: [bs], tokens before the root.
            max_depth: most draft tokens accepted per req.
            mask: [bs * num_draft_tokens, ceil(vocab_size / 32)] int32, see `apply_mask`.
            num_simulated: what `simulate_step` said; 0 verifies for real.
        """
        result, logprobs = self._rows.verify(
            logits, trees, rows, rows_cpu, seq_lens, max_depth, mask, num_simulated
        )
        return Verdict(result.predict, result.accept_index, result.accept_length, logprobs)

    def commit(self, rows: Tensor, new_ids: Tensor, num_new_tokens: Tensor) -> None:
        """Counts emitted tokens: the first num_new_tokens [bs] of new_ids [bs, n] int64."""
        self._rows.commit(rows, new_ids, num_new_tokens)

    def top_children(
        self,
        logits: Tensor,
        rows: Tensor,
        rows_cpu: Sequence[int],
        positions: Tensor,
        topk: int,
        hot_token_id: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`Sampler.top_children` on the device: (probabilities [n, topk] fp32, columns int64).

        Where topk is 1, any number above -inf stands for the probability of the only child.

        Args:
            logits: [n, V_draft], of any dtype; n is a multiple of the rows.
            rows, rows_cpu: the reqs, each with as many lanes, one behind the other.
            positions: n int64 in any shape, absolute, of the children.
            hot_token_id: [V_draft] int64, the target's tokens behind the columns; None: their
                numbers, of which those from vocab_size on are padding.
        """
        return self._rows.top_children(logits, rows, rows_cpu, positions, topk, hot_token_id)
