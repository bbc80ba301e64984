"""req_to_token: the slot of each token of each row, on the host and on the device.

Owns the table; does not know which page belongs to whom, the plan says.
"""

from collections.abc import Sequence

import numpy as np
import torch

from paceline.worker.config import WorkerConfig
from paceline.worker.spec.limits import reserve_len
from paceline.worker.step import KvMoves, ReqStep

# Room behind a full row for a tree under growth or verification.
_MIN_RESERVE = 64


def row_width(config: WorkerConfig) -> int:
    """Slots of a row: the longest req, and a reserve for draft nodes, in whole pages."""
    spec = config.spec
    grown = spec.topk * spec.num_steps + spec.num_draft_tokens
    owned = reserve_len(spec, overlap=True)
    tokens = config.model.max_model_len + max(_MIN_RESERVE, 2 * spec.num_draft_tokens, grown, owned)
    page_size = config.cache.page_size
    return -(-tokens // page_size) * page_size


class ReqToToken:
    """int32 [max_num_seqs + 1, width]. On a CPU, `table` and `host` share their memory."""

    def __init__(self, num_rows: int, width: int, page_size: int, device: str) -> None:
        assert width % page_size == 0
        self.page_size = page_size
        self.host = np.zeros((num_rows, width), dtype=np.int32)
        self.table = torch.from_numpy(self.host)
        self._on_device = torch.device(device).type != "cpu"
        if self._on_device:
            self.table = self.table.to(device)
        self._offsets = np.arange(page_size, dtype=np.int32)
        self._num_pages = [0] * num_rows

    @property
    def num_rows(self) -> int:
        return int(self.host.shape[0])

    @property
    def width(self) -> int:
        return int(self.host.shape[1])

    def write_pages(self, rows: Sequence[ReqStep]) -> None:
        """Puts the slots of each row's `pages` into it from page `page_start` on."""
        written = [row for row in rows if row.pages]
        if not written:
            return
        for row in written:
            assert 0 <= row.req_pool_index < self.num_rows, row.req_pool_index
            start = row.page_start * self.page_size
            stop = start + len(row.pages) * self.page_size
            assert stop <= self.width, (stop, self.width)
            slots = self.host[row.req_pool_index, start:stop]
            pages = np.array(row.pages, dtype=np.int32)
            np.add(
                pages[:, None] * self.page_size, self._offsets, out=slots.reshape(len(pages), -1)
            )
            self._num_pages[row.req_pool_index] = row.page_start + len(row.pages)
        if self._on_device:
            self._upload(written)

    def _upload(self, rows: Sequence[ReqStep]) -> None:
        """One copy for all rows, behind whatever the device still has to do."""
        page_size = self.page_size
        places = np.concatenate(
            [
                row.req_pool_index * self.width
                + np.arange(row.page_start, row.page_start + len(row.pages)) * page_size
                for row in rows
            ]
        )
        indices = (places[:, None] + self._offsets).reshape(-1)  # [num slots], into the flat table
        pairs = torch.from_numpy(np.stack([indices, self.host.reshape(-1)[indices]]))
        pairs = pairs.pin_memory().to(self.table.device, non_blocking=True)
        self.table.view(-1).index_copy_(0, pairs[0], pairs[1].to(torch.int32))

    def owned_len(self, req_pool_index: int) -> int:
        """Tokens that a row has slots for, as plans have given it pages."""
        return self._num_pages[req_pool_index] * self.page_size

    def line_up(self, rows: Sequence[ReqStep], paths: Sequence[tuple[int, ...]]) -> KvMoves:
        """Brings accepted nodes (`paths`, each row's) that branched off into line behind their
        prefix."""
        src: list[int] = []
        tgt: list[int] = []
        for row, path in zip(rows, paths, strict=True):
            slots = self.host[row.req_pool_index]
            for i, node in enumerate(path):
                if node != i:
                    src.append(int(slots[row.prefix_len + node]))
                    tgt.append(int(slots[row.prefix_len + i]))
        return KvMoves(tuple(src), tuple(tgt))
