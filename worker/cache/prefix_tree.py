"""PrefixTree: which pages already hold the KV of a prefix of tokens. Pure.

A radix tree over whole pages: an edge is the tuple of the `page_size` tokens of one page, and of
`key_shift` tokens behind it. It keeps pages through a `PagePool` and does not know reqs. A req that
uses the pages of a path holds a reference to each of them, from the root on, so a page without
references has none below it.
"""

import heapq
from collections.abc import Iterable, Sequence

from paceline.worker.cache.page_pool import PagePool
from paceline.worker.step import PageId


class PrefixTree:
    """Finds, keeps and evicts prefixes; the least recently used leaf goes first.

    Args:
        key_shift: 1 where a page also holds the KV of a draft that is one token ahead: its slot i
            was computed from tokens i and i + 1, so the last slot of a page depends on the token
            behind it. Such keys are bigrams in steps of pages.
    """

    def __init__(self, pool: PagePool, page_size: int, *, key_shift: int = 0) -> None:
        assert page_size >= 1, f"pages of {page_size} tokens"
        assert 0 <= key_shift <= 1, f"keys shifted by {key_shift}"  # `match` leaves one token
        self._pool = pool
        self._page_size = page_size
        self._key_shift = key_shift
        self._root = _Node(page=PageId(0), key=(), parent=None)
        self._nodes: dict[PageId, _Node] = {}
        self.num_changes = 0  # `match` says the same while this stays
        self._tick = 0
        # (last use, page) of leaves that nobody referred to when they were pushed. An entry whose
        # leaf was used, extended or evicted since is dropped when it comes up.
        self._evictable: list[tuple[int, PageId]] = []

    @property
    def num_pages(self) -> int:
        return len(self._nodes)

    def match(self, ids: Sequence[int]) -> tuple[PageId, ...]:
        """The pages of the longest known prefix of `ids`; changes nothing.

        They cover `len(ids) - 1` tokens at most, so that at least one is left to compute.
        """
        pages: list[PageId] = []
        node = self._root
        size = self._page_size
        for start in range(0, len(ids) - size, size):
            child = node.children.get(self._key(ids, start))
            if child is None:
                break
            pages.append(child.page)
            node = child
        return tuple(pages)

    def num_keyed(self, num_ids: int, committed_len: int) -> int:
        """Pages full of the first `committed_len` of `num_ids` tokens whose whole key is known."""
        return max(min(committed_len, num_ids - self._key_shift), 0) // self._page_size

    def insert(self, ids: Sequence[int], pages: Sequence[PageId]) -> list[PageId]:
        """Keeps a req's own pages, which hold the final KV of `ids` from the first token on.

        `ids` go on for `key_shift` tokens behind the pages at least.

        Returns: the page the tree has for each of these places. Where it already had another one
        for the same tokens, the req should use that and give its own back.
        """
        size = self._page_size
        num_keyed = self.num_keyed(len(ids), len(ids))
        assert len(pages) <= num_keyed, f"{len(pages)} pages, but {len(ids)} tokens"
        kept: list[PageId] = []
        node = self._root
        for i, page in enumerate(pages):
            key = self._key(ids, i * size)
            child = node.children.get(key)
            if child is None:
                child = _Node(page=page, key=key, parent=node)
                self._pool.cache(page)
                node.children[key] = child
                self._nodes[page] = child
                self.num_changes += 1
            kept.append(child.page)
            node = child
        return kept

    def touch(self, pages: Iterable[PageId]) -> None:
        """Marks the pages of a path as used now, after their references have been dropped."""
        self._tick += 1
        for page in pages:
            node = self._nodes.get(page)
            if node is not None:
                node.last_used = self._tick
                self._offer(node)
        if len(self._evictable) > 2 * len(self._nodes) + 64:
            self._rebuild()

    def evict(self, num_pages: int) -> int:
        """Gives up to `num_pages` unreferenced pages back to the pool; returns how many."""
        num_evicted = 0
        while num_evicted < num_pages and self._evictable:
            last_used, page = heapq.heappop(self._evictable)
            node = self._nodes.get(page)
            if node is None or node.last_used != last_used or not self._is_evictable(node):
                continue
            self._remove(node)
            num_evicted += 1
        return num_evicted

    def check(self) -> None:
        """Looks at every node; for tests and debugging."""
        for page, node in self._nodes.items():
            assert node.page == page, f"page {page} leads to the node of page {node.page}"
            assert self._pool.is_cached(page), f"page {page} is in the tree and not cached"
            assert node.parent is not None
            assert node.parent.children[node.key] is node
            if node.parent is not self._root:
                refs, parent_refs = self._pool.num_refs(page), self._pool.num_refs(node.parent.page)
                assert parent_refs >= refs, f"page {page} has {refs} owners, its parent fewer"
            if self._is_evictable(node):
                assert (node.last_used, page) in self._evictable, f"page {page} would never go"

    def _key(self, ids: Sequence[int], start: int) -> tuple[int, ...]:
        return tuple(ids[start : start + self._page_size + self._key_shift])

    def _remove(self, node: "_Node") -> None:
        assert node.parent is not None
        del node.parent.children[node.key]
        del self._nodes[node.page]
        self.num_changes += 1
        self._pool.uncache(node.page)
        if node.parent is not self._root:
            self._offer(node.parent)

    def _offer(self, node: "_Node") -> None:
        if self._is_evictable(node):
            heapq.heappush(self._evictable, (node.last_used, node.page))

    def _is_evictable(self, node: "_Node") -> bool:
        return not node.children and self._pool.num_refs(node.page) == 0

    def _rebuild(self) -> None:
        self._evictable = [
            (node.last_used, page) for page, node in self._nodes.items() if self._is_evictable(node)
        ]
        heapq.heapify(self._evictable)


class _Node:
    __slots__ = ("children", "key", "last_used", "page", "parent")

    def __init__(self, page: PageId, key: tuple[int, ...], parent: "_Node | None") -> None:
        self.page = page
        self.key = key
        self.parent = parent
        self.children: dict[tuple[int, ...], _Node] = {}
        self.last_used = 0
