"""ReqPages: the pages of each running req, over one pool and one prefix tree. Pure.

It decides page numbers, never slots: token `i` of a req lies in its page `i // page_size`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.worker.cache.page_pool import PagePool
from paceline.worker.cache.prefix_tree import PrefixTree
from paceline.worker.step import PageId, ReqId


@dataclass(frozen=True, slots=True)
class PageCounts:
    """free + owned + cached + orphaned == num_pages, and orphaned must be 0."""

    num_pages: int
    num_free: int
    num_owned: int
    num_cached: int
    num_orphaned: int


class ReqPages:
    """Gives pages to reqs, keeps finished prefixes, and takes every page back."""

    def __init__(
        self, num_pages: int, page_size: int, *, enable_prefix_caching: bool = True
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self._pool = PagePool(num_pages)
        self._tree = PrefixTree(self._pool, page_size)
        self._enable_prefix_caching = enable_prefix_caching
        self._pages: dict[ReqId, list[PageId]] = {}

    @property
    def num_available(self) -> int:
        """Pages that `grow` can give: the free ones and those only the tree keeps."""
        return self._pool.num_free + self._pool.num_cached

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def match(self, ids: Sequence[int]) -> tuple[PageId, ...]:
        """Pages that hold a prefix of `ids`, one token short of all at most; changes nothing."""
        return self._tree.match(ids) if self._enable_prefix_caching else ()

    def num_unused(self, pages: Sequence[PageId]) -> int:
        """How many of these pages only the tree keeps: using them makes `num_available` smaller."""
        return sum(self._pool.num_refs(page) == 0 for page in pages)

    def open(self, req_id: ReqId, prefix: Sequence[PageId] = ()) -> None:
        """Begins a req on the pages of its matched prefix."""
        assert req_id not in self._pages, f"req {req_id} has pages already"
        self._pool.share(prefix)
        self._pages[req_id] = list(prefix)

    def pages_of(self, req_id: ReqId) -> list[PageId]:
        """The req's own list, read only."""
        return self._pages[req_id]

    def num_exclusive(self, req_id: ReqId) -> int:
        """Pages that become available when the req is closed."""
        return sum(self._pool.num_refs(page) == 1 for page in self._pages[req_id])

    def grow(self, req_id: ReqId, num_tokens: int) -> None:
        """Adds pages until the req owns slots for `num_tokens` tokens; there must be enough."""
        pages = self._pages[req_id]
        missing = self.pages_for(num_tokens) - len(pages)
        if missing <= 0:
            return
        if missing > self._pool.num_free:
            self._tree.evict(missing - self._pool.num_free)
        pages += self._pool.allocate(missing)

    def keep_prefix(self, req_id: ReqId, ids: Sequence[int], committed_len: int) -> int:
        """Puts the pages filled by the first `committed_len` tokens of `ids` into the tree.

        A page the tree already has for the same tokens replaces the req's own.

        Returns: the first page that changed, or the req's number of pages when none did.
        """
        pages = self._pages[req_id]
        if not self._enable_prefix_caching:
            return len(pages)
        full = committed_len // self.page_size
        kept = self._tree.insert(ids, pages[:full])
        changed = [i for i, page in enumerate(kept) if page != pages[i]]
        if not changed:
            return len(pages)
        replaced = [pages[i] for i in changed]
        self._pool.share(kept[i] for i in changed)
        pages[:full] = kept
        self._pool.release(replaced)
        return changed[0]

    def close(self, req_id: ReqId, ids: Sequence[int] = (), committed_len: int = 0) -> None:
        """Ends a req: keeps the full pages of its first `committed_len` tokens, frees the rest."""
        if committed_len >= self.page_size:
            self.keep_prefix(req_id, ids, committed_len)
        pages = self._pages.pop(req_id)
        self._pool.release(reversed(pages))
        self._tree.touch(pages)

    def counts(self) -> PageCounts:
        """Counted through the reqs' own lists: a page none of them has shows as orphaned."""
        num_held = len({page for pages in self._pages.values() for page in pages})
        pool = self._pool
        return PageCounts(
            num_pages=self.num_pages,
            num_free=pool.num_free,
            num_owned=num_held,
            num_cached=pool.num_cached,
            num_orphaned=self.num_pages - pool.num_free - num_held - pool.num_cached,
        )

    def check(self) -> None:
        """Proves the page invariants; for tests and debugging."""
        self._pool.check()
        self._tree.check()
        num_refs: dict[PageId, int] = {}
        for req_id, pages in self._pages.items():
            assert len(set(pages)) == len(pages), f"req {req_id} has a page twice"
            for page in pages:
                num_refs[page] = num_refs.get(page, 0) + 1
        for page, refs in num_refs.items():
            assert self._pool.num_refs(page) == refs, f"page {page} has another count of owners"
            assert refs == 1 or self._pool.is_cached(page), f"page {page} is owned {refs} times"
        counts = self.counts()
        assert counts.num_orphaned == 0, f"{counts.num_orphaned} pages are owned by nobody"
