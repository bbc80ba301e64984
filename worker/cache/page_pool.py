"""PagePool: which pages are free, and how many reqs hold each of the others. Pure.

It knows page numbers only, not tokens and not reqs. A page is in one of three states: free; owned,
when a req refers to it; or cached, when the prefix tree alone keeps it. Page 0 takes the writes of
padding and is never given out.
"""

from collections.abc import Iterable

from paceline.worker.step import PageId


class PagePool:
    """Pages 1 to `num_pages`, each with a count of the reqs that refer to it.

    The pages are given out in an order that depends only on the calls made, so that every run of
    the same calls has the same page numbers.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 0, f"a pool of {num_pages} pages"
        self.num_pages = num_pages
        self._free = [PageId(page) for page in range(num_pages, 0, -1)]  # taken from the end
        self._num_refs = [0] * (num_pages + 1)
        self._is_cached = bytearray(num_pages + 1)
        self._num_owned = 0
        self._num_cached = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_owned(self) -> int:
        """Pages that a req refers to, cached as well or not."""
        return self._num_owned

    @property
    def num_cached(self) -> int:
        """Pages that only the prefix tree keeps."""
        return self._num_cached

    @property
    def num_orphaned(self) -> int:
        """Pages in no state at all; anything but 0 is a defect."""
        return self.num_pages - self.num_free - self._num_owned - self._num_cached

    def num_refs(self, page: PageId) -> int:
        return self._num_refs[page]

    def is_cached(self, page: PageId) -> bool:
        return bool(self._is_cached[page])

    def allocate(self, num_pages: int) -> list[PageId]:
        """Takes free pages, each with one reference; there must be enough."""
        assert 0 <= num_pages <= self.num_free, f"{num_pages} pages wanted, {self.num_free} free"
        if num_pages == 0:
            return []
        pages = self._free[: -num_pages - 1 : -1]
        del self._free[-num_pages:]
        for page in pages:
            self._num_refs[page] = 1
        self._num_owned += num_pages
        return pages

    def share(self, pages: Iterable[PageId]) -> None:
        """Adds a reference to pages that are owned or cached."""
        for page in pages:
            if self._num_refs[page] == 0:
                assert self._is_cached[page], f"page {page} is free and cannot be shared"
                self._num_cached -= 1
                self._num_owned += 1
            self._num_refs[page] += 1

    def release(self, pages: Iterable[PageId]) -> None:
        """Drops a reference; a page that nobody keeps becomes free."""
        for page in pages:
            assert self._num_refs[page] > 0, f"page {page} is released but has no owner"
            self._num_refs[page] -= 1
            if self._num_refs[page] == 0:
                self._num_owned -= 1
                if self._is_cached[page]:
                    self._num_cached += 1
                else:
                    self._free.append(page)

    def cache(self, page: PageId) -> None:
        """Marks an owned page as kept by the prefix tree."""
        assert self._num_refs[page] > 0, f"page {page} has no owner and cannot be cached"
        assert not self._is_cached[page], f"page {page} is cached twice"
        self._is_cached[page] = 1

    def uncache(self, page: PageId) -> None:
        """Takes the mark away; a page that no req refers to becomes free."""
        assert self._is_cached[page], f"page {page} is not cached"
        self._is_cached[page] = 0
        if self._num_refs[page] == 0:
            self._num_cached -= 1
            self._free.append(page)

    def check(self) -> None:
        """Recounts everything; for tests and debugging."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is twice on the free list"
        assert 0 not in free, "page 0 is on the free list"
        pages = range(1, self.num_pages + 1)
        owned = sum(self._num_refs[page] > 0 for page in pages)
        cached = sum(self._num_refs[page] == 0 and self._is_cached[page] for page in pages)
        assert owned == self._num_owned, f"{owned} pages owned, {self._num_owned} counted"
        assert cached == self._num_cached, f"{cached} pages cached, {self._num_cached} counted"
        for page in free:
            assert self._num_refs[page] == 0, f"free page {page} has an owner"
            assert not self._is_cached[page], f"free page {page} is cached"
        assert self.num_orphaned == 0, f"{self.num_orphaned} pages are in no state"
