"""req_to_token: the slot of each token of each row, on the host and on the device.

Owns the table; does not know which page belongs to whom, the plan says.
"""

import numpy as np
import torch

from paceline.worker.config import WorkerConfig
from paceline.worker.step import ReqStep

# Room behind a full row for a tree under growth or verification.
_MIN_RESERVE = 64


def row_width(config: WorkerConfig) -> int:
    """Slots of a row: the longest req, and a reserve for draft nodes, in whole pages."""
    spec = config.spec
    grown = spec.topk * spec.num_steps + spec.num_draft_tokens
    tokens = config.model.max_model_len + max(_MIN_RESERVE, 2 * spec.num_draft_tokens, grown)
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

    @property
    def num_rows(self) -> int:
        return int(self.host.shape[0])

    @property
    def width(self) -> int:
        return int(self.host.shape[1])

    def write_pages(self, row: ReqStep) -> None:
        """Puts the slots of `row.pages` into the row from page `row.page_start` on."""
        if not row.pages:
            return
        start = row.page_start * self.page_size
        stop = start + len(row.pages) * self.page_size
        assert 0 <= row.req_pool_index < self.num_rows, row.req_pool_index
        assert stop <= self.width, (stop, self.width)
        slots = self.host[row.req_pool_index, start:stop]
        pages = np.array(row.pages, dtype=np.int32)
        np.add(pages[:, None] * self.page_size, self._offsets, out=slots.reshape(len(pages), -1))
        if self._on_device:
            self.table[row.req_pool_index, start:stop] = torch.from_numpy(slots).to(
                self.table.device, non_blocking=True
            )
