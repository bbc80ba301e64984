"""DraftReqs: what a draft holds of each req: committed tokens, their KV, pages and a row. Pure.

It knows no device and no model. Everything in it may be lost at any time at the price of speed:
when rows or pages run out the least recently used req gives up its KV (its tokens are kept, so it
is computed again and not synced again), and of too many reqs the least recently used is forgotten.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from paceline.worker.cache.req_pages import PageCounts, ReqPages
from paceline.worker.link.base import CommitRow, SyncRow
from paceline.worker.step import PageId, ReqId, SamplingParams

# Row 0 is left to padding.
_FIRST_ROW = 1


@dataclass(frozen=True, slots=True)
class ReqKey:
    """Targets name their reqs without knowing of each other."""

    target: str
    req_id: ReqId

    def as_page_owner(self) -> ReqId:
        return ReqId(f"{self.target}\0{self.req_id}")


@dataclass(slots=True)
class DraftReq:
    """Tokens 0 to `kv_len` - 1 of `ids` have KV; `guessed_ids` lie behind them, not committed."""

    key: ReqKey
    params: SamplingParams
    ids: list[int]
    kv_len: int = 0
    guessed_ids: list[int] = field(default_factory=list)
    row: int | None = None  # in req_to_token; None holds no KV and no pages
    num_sent_pages: int = 0  # pages whose slots every rank has written into the row

    def commit(self, token_ids: Iterable[int]) -> None:
        """Appends tokens; those the draft guessed right have their KV already."""
        for token in token_ids:
            if self.guessed_ids and self.kv_len == len(self.ids) and self.guessed_ids[0] == token:
                del self.guessed_ids[0]
                self.kv_len += 1
            else:
                self.guessed_ids.clear()
            self.ids.append(token)

    @property
    def prefix_len(self) -> int:
        """Tokens not to compute again: all with KV, but never the root, whose logits are wanted."""
        return min(self.kv_len, len(self.ids) - 1)


class DraftReqs:
    """All reqs of one draft group, the most recently used last."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_num_reqs: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        self._pages = ReqPages[ReqId](
            num_pages, page_size, enable_prefix_caching=enable_prefix_caching
        )
        self._free_rows = list(range(_FIRST_ROW + max_num_reqs - 1, _FIRST_ROW - 1, -1))
        self._reqs: dict[ReqKey, DraftReq] = {}
        self._max_held = 8 * max_num_reqs

    def __len__(self) -> int:
        return len(self._reqs)

    @property
    def held(self) -> tuple[ReqKey, ...]:
        return tuple(self._reqs)

    def get(self, key: ReqKey) -> DraftReq | None:
        return self._reqs.get(key)

    def counts(self) -> PageCounts:
        return self._pages.counts()

    def check(self) -> None:
        """Proves the page invariants; for tests."""
        self._pages.check()

    # ---- what a target says

    def sync(self, target: str, sync: SyncRow) -> None:
        """Begins a req, or takes its tokens as the target has them; KV of an equal prefix stays."""
        key = ReqKey(target, sync.req_id)
        params = _params(sync)
        req = self._reqs.pop(key, None)
        if req is None:
            req = DraftReq(key, params, list(sync.token_ids))
        elif len(req.ids) <= len(sync.token_ids) and _starts_with(sync.token_ids, req.ids):
            req.params = params
            req.commit(sync.token_ids[len(req.ids) :])
        else:
            req.params = params
            self._rewind(req, sync.token_ids)
        self._reqs[key] = req
        self._forget_unused()

    def commit(self, target: str, row: CommitRow) -> bool:
        """Appends what is new in a row. False when it does not fit what is held: a sync is needed.

        A row that was applied before, wholly or in part, fits: only its rest is appended.
        """
        req = self._reqs.get(ReqKey(target, row.req_id))
        if req is None or not 0 <= row.base_len <= len(req.ids) <= row.commit_len:
            return False
        num_known = len(req.ids) - row.base_len
        if tuple(req.ids[row.base_len :]) != row.token_ids[:num_known]:
            return False
        req.commit(row.token_ids[num_known:])
        self._reqs[req.key] = self._reqs.pop(req.key)
        return True

    def forget(self, key: ReqKey) -> None:
        req = self._reqs.pop(key, None)
        if req is not None:
            self._drop_kv(req)

    # ---- rows and pages

    def reserve(self, req: DraftReq, num_tokens: int, keep: Sequence[DraftReq]) -> bool:
        """Gives the req a row and slots for `num_tokens` tokens, if need be of reqs not in `keep`.

        False when there are not enough; nothing of `keep` or of the req itself is lost then.
        """
        if req.row is None and not self._open(req, keep):
            return False
        owner = req.key.as_page_owner()
        missing = self._pages.pages_for(num_tokens) - len(self._pages.pages_of(owner))
        while missing > self._pages.num_available:
            if not self._evict_one(req, keep):
                return False
        self._pages.grow(owner, num_tokens)
        return True

    def take_unsent_pages(self, req: DraftReq) -> tuple[int, tuple[PageId, ...]]:
        """(page_start, pages) of the req that no plan has carried yet; they count as sent then."""
        pages = self._pages.pages_of(req.key.as_page_owner())
        start = req.num_sent_pages
        req.num_sent_pages = len(pages)
        return start, tuple(pages[start:])

    def share_prefix(self, req: DraftReq) -> None:
        """Lets later reqs use the full pages of the req's committed tokens, from now on final."""
        changed = self._pages.keep_prefix(req.key.as_page_owner(), req.ids, req.prefix_len)
        req.num_sent_pages = min(req.num_sent_pages, changed)

    def _open(self, req: DraftReq, keep: Sequence[DraftReq]) -> bool:
        if not self._free_rows and not self._evict_one(req, keep):
            return False
        req.row = self._free_rows.pop()
        prefix = self._pages.match(req.ids)
        self._pages.open(req.key.as_page_owner(), prefix)
        req.kv_len = len(prefix) * self._pages.page_size
        return True

    def _evict_one(self, req: DraftReq, keep: Sequence[DraftReq]) -> bool:
        kept = {id(other) for other in keep}
        for other in self._reqs.values():
            if other.row is not None and other is not req and id(other) not in kept:
                self._drop_kv(other)
                return True
        return False

    def _drop_kv(self, req: DraftReq) -> None:
        """Gives up row and pages; full pages of committed tokens stay in the prefix tree."""
        if req.row is None:
            return
        self._pages.close(req.key.as_page_owner(), req.ids, req.kv_len)
        self._free_rows.append(req.row)
        req.row, req.kv_len, req.num_sent_pages = None, 0, 0
        req.guessed_ids.clear()

    def _rewind(self, req: DraftReq, token_ids: Sequence[int]) -> None:
        """Replaces tokens that disagree. The pages are given up, since others may share them; what
        was computed for the common prefix is found again in the prefix tree."""
        num_same = 0
        for old, new in zip(req.ids, token_ids, strict=False):
            if old != new:
                break
            num_same += 1
        req.kv_len = min(req.kv_len, num_same)
        self._drop_kv(req)
        req.ids = list(token_ids)

    def _forget_unused(self) -> None:
        while len(self._reqs) > self._max_held:
            self.forget(next(iter(self._reqs)))


def _starts_with(token_ids: Sequence[int], prefix: Sequence[int]) -> bool:
    return list(token_ids[: len(prefix)]) == list(prefix)


def _params(sync: SyncRow) -> SamplingParams:
    return SamplingParams(
        seed=sync.seed,
        max_tokens=1,
        temperature=sync.temperature,
        top_k=sync.top_k,
        top_p=sync.top_p,
        min_p=sync.min_p,
    )
