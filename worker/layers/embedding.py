"""The vocabulary-parallel ends of a model: token ids in, logits out."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from paceline.worker.layers.linear import Linear
from paceline.worker.layers.row_tiles import RowTiles
from paceline.worker.models.weights import WeightReader
from paceline.worker.parallel.collective import Collective
from paceline.worker.parallel.shards import Span, split_evenly

# Rows of a vocabulary are cut at multiples of this, a cache line or two of any dtype.
_VOCAB_MULTIPLE = 64


def vocab_spans(vocab_size: int, tp_size: int) -> tuple[Span, ...]:
    """The rows of a vocabulary that each rank holds."""
    return split_evenly(vocab_size, tp_size, _VOCAB_MULTIPLE)


class VocabEmbedding:
    """input_ids [T] int64 -> [T, hidden]: each rank looks up its own rows, then all sum."""

    def __init__(
        self, reader: WeightReader, name: str, vocab_size: int, hidden: int, collective: Collective
    ) -> None:
        self._span = vocab_spans(vocab_size, collective.tp_size)[collective.tp_rank]
        self.weight = reader.read(name, (vocab_size, hidden), rows=self._span)
        self._collective = collective

    def __call__(self, input_ids: Tensor) -> Tensor:
        if self._collective.tp_size == 1:
            return functional.embedding(input_ids, self.weight)
        local = input_ids - self._span.start
        outside = (local < 0) | (local >= len(self._span))
        x = functional.embedding(local.masked_fill(outside, 0), self.weight)
        return self._collective.all_reduce(x.masked_fill(outside.unsqueeze(-1), 0.0))


class LmHead:
    """x [n, hidden] -> logits [n, vocab_size] fp32 on rank 0, None elsewhere."""

    def __init__(
        self,
        weight: Tensor,
        vocab_size: int,
        collective: Collective,
        tiles: RowTiles | None = None,
    ) -> None:
        """weight: this rank's rows of the head, split as `vocab_spans` splits."""
        self._collective = collective
        self.vocab_size = vocab_size
        self._sizes = [len(span) for span in vocab_spans(vocab_size, collective.tp_size)]
        self._multiply = _make_product(weight, tiles)

    @classmethod
    def load(
        cls, reader: WeightReader, name: str, vocab_size: int, hidden: int, collective: Collective
    ) -> "LmHead":
        rows = vocab_spans(vocab_size, collective.tp_size)[collective.tp_rank]
        weight = reader.read(name, (vocab_size, hidden), rows=rows)
        return cls(weight, vocab_size, collective, reader.tiles)

    def __call__(self, x: Tensor) -> Tensor | None:
        if x.shape[0] == 0:
            if self._collective.tp_rank != 0:
                return None
            return torch.empty(0, self.vocab_size, dtype=torch.float32, device=x.device)
        logits = self._collective.gather_last_dim(self._multiply(x), self._sizes)
        return None if logits is None else logits.float()


def _make_product(weight: Tensor, tiles: RowTiles | None) -> Callable[[Tensor], Tensor]:
    """x -> x W^T, in fp32 where torch can write its sums out as they are.

    On a CPU it cannot: a product of bfloat16 is rounded to it, unless W is widened, which would
    double the head's time.
    """
    if weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16):
        return lambda x: torch.mm(x, weight.t(), out_dtype=torch.float32)
    return Linear(weight, None, tiles)
