"""ReqPages: the pages of each running req, over one pool and one prefix tree. Pure.

It decides page numbers, never slots: token `i` of a req lies in its page `i // page_size`. A req
goes by whatever key its owner gives it, such as its id or its row of `req_to_token`.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from paceline.worker.cache.page_pool import PagePool
from paceline.worker.cache.prefix_tree import PrefixTree
from paceline.worker.step import PageId

ReqKey = TypeVar("ReqKey", bound=Hashable)


@dataclass(frozen=True, slots=True)
class PageCounts:
    """free + owned + cached + orphaned == num_pages, and orphaned must be 0."""

    num_pages: int
    num_free: int
    num_owned: int
    num_cached: int
    num_orphaned: int


class ReqPages(Generic[ReqKey]):
    """Gives pages to reqs, keeps finished prefixes, and takes every page back.

    Args:
        key_shift: tokens behind a page that its content depends on, as of PrefixTree.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        enable_prefix_caching: bool = True,
        key_shift: int = 0,
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self._pool = PagePool(num_pages)
        self._tree = PrefixTree(self._pool, page_size, key_shift=key_shift)
        self._enable_prefix_caching = enable_prefix_caching
        self._pages: dict[ReqKey, list[PageId]] = {}

    @property
    def num_available(self) -> int:
        """Pages that `grow` can give: the free ones and those only the tree keeps."""
        return self._pool.num_free + self._pool.num_cached

    @property
    def num_changes(self) -> int:
        """`match` says the same of the same tokens while this stays."""
        return self._tree.num_changes

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def match(self, ids: Sequence[int]) -> tuple[PageId, ...]:
        """Pages that hold a prefix of `ids`, one token short of all at most; changes nothing."""
        return self._tree.match(ids) if self._enable_prefix_caching else ()

    def num_unused(self, pages: Sequence[PageId]) -> int:
        """How many of these pages only the tree keeps: using them makes `num_available` smaller."""
        return sum(self._pool.num_refs(page) == 0 for page in pages)

    def open(self, key: ReqKey, prefix: Sequence[PageId] = ()) -> None:
        """Begins a req on the pages of its matched prefix."""
        assert key not in self._pages, f"req {key} has pages already"
        self._pool.share(prefix)
        self._pages[key] = list(prefix)

    def pages_of(self, key: ReqKey) -> list[PageId]:
        """The req's own list, read only."""
        return self._pages[key]

    def num_exclusive(self, key: ReqKey) -> int:
        """Pages that become available when the req is closed."""
        return sum(self._pool.num_refs(page) == 1 for page in self._pages[key])

    def grow(self, key: ReqKey, num_tokens: int) -> None:
        """Adds pages until the req owns slots for `num_tokens` tokens; there must be enough."""
        pages = self._pages[key]
        missing = self.pages_for(num_tokens) - len(pages)
        if missing <= 0:
            return
        if missing > self._pool.num_free:
            self._tree.evict(missing - self._pool.num_free)
        pages += self._pool.allocate(missing)

    def keep_prefix(self, key: ReqKey, ids: Sequence[int], committed_len: int) -> int:
        """Puts the pages filled by the first `committed_len` tokens of `ids` into the tree.

        With shifted keys a page waits until the token behind it is among `ids`. A page the tree
        already has for the same tokens replaces the req's own.

        Returns: the first page that changed, or the req's number of pages when none did.
        """
        pages = self._pages[key]
        if not self._enable_prefix_caching:
            return len(pages)
        full = self._tree.num_keyed(len(ids), committed_len)
        kept = self._tree.insert(ids, pages[:full])
        changed = [i for i, page in enumerate(kept) if page != pages[i]]
        if not changed:
            return len(pages)
        replaced = [pages[i] for i in changed]
        self._pool.share(kept[i] for i in changed)
        pages[:full] = kept
        self._pool.release(replaced)
        return changed[0]

    def close(self, key: ReqKey, ids: Sequence[int] = (), committed_len: int = 0) -> None:
        """Ends a req: keeps the full pages of its first `committed_len` tokens, frees the rest."""
        if committed_len >= self.page_size:
            self.keep_prefix(key, ids, committed_len)
        pages = self._pages.pop(key)
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
        for key, pages in self._pages.items():
            assert len(set(pages)) == len(pages), f"req {key} has a page twice"
            for page in pages:
                num_refs[page] = num_refs.get(page, 0) + 1
        for page, refs in num_refs.items():
            assert self._pool.num_refs(page) == refs, f"page {page} has another count of owners"
            assert refs == 1 or self._pool.is_cached(page), f"page {page} is owned {refs} times"
        counts = self.counts()
        assert counts.num_orphaned == 0, f"{counts.num_orphaned} pages are owned by nobody"
