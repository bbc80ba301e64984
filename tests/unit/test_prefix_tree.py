"""The prefix tree over whole pages: what matches, what is kept, what goes first."""

import pytest

from paceline.worker.cache.page_pool import PagePool
from paceline.worker.cache.prefix_tree import PrefixTree
from paceline.worker.cache.req_pages import ReqPages
from paceline.worker.step import PageId, ReqId


def keep(pool: PagePool, tree: PrefixTree, ids: list[int], page_size: int) -> list[PageId]:
    """Pages of `ids` that only the tree keeps."""
    pages = pool.allocate(len(ids) // page_size)
    kept = tree.insert(ids, pages)
    pool.share(page for page, own in zip(kept, pages, strict=True) if page != own)
    pool.release(page for page, own in zip(pages, kept, strict=True) if page != own)
    pool.release(kept)
    tree.touch(kept)
    return kept


@pytest.mark.parametrize("page_size", [1, 16, 32, 64])
def test_a_prefix_is_found_in_whole_pages_and_one_token_is_left(page_size: int) -> None:
    pool = PagePool(8)
    tree = PrefixTree(pool, page_size)
    ids = list(range(4 * page_size))
    pages = tuple(keep(pool, tree, ids, page_size))
    assert tree.match([*ids, 9]) == pages
    assert tree.match(ids) == pages[:3]
    assert tree.match([*ids[: 2 * page_size], -1, *ids]) == pages[:2]
    assert tree.match(ids[: page_size + 1]) == pages[:1]
    assert tree.match(ids[:page_size]) == ()
    assert tree.match([]) == ()
    assert tree.match([-1, *ids]) == ()


def test_prefixes_that_part_share_their_common_pages() -> None:
    pool = PagePool(8)
    tree = PrefixTree(pool, 2)
    first = keep(pool, tree, [1, 2, 3, 4], 2)
    second = keep(pool, tree, [1, 2, 5, 6], 2)
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert tree.num_pages == pool.num_cached == 3
    tree.check()
    pool.check()


def test_the_leaf_used_longest_ago_goes_first_and_parents_after_their_children() -> None:
    pool = PagePool(8)
    tree = PrefixTree(pool, 1)
    keep(pool, tree, [1, 2], 1)
    keep(pool, tree, [3, 4], 1)
    tree.touch(tree.match([1, 2, 0]))
    assert tree.evict(1) == 1
    assert len(tree.match([3, 4, 0])) == 1
    assert tree.evict(2) == 2
    assert tree.match([3, 4, 0]) == ()
    assert len(tree.match([1, 2, 0])) == 1
    assert tree.evict(9) == 1
    assert pool.num_free == 8


def test_pages_in_use_are_never_evicted() -> None:
    pool = PagePool(8)
    tree = PrefixTree(pool, 1)
    pages = keep(pool, tree, [1, 2, 3], 1)
    pool.share(pages[:2])
    assert tree.evict(8) == 1
    assert tree.match([1, 2, 3, 0]) == tuple(pages[:2])
    pool.release(pages[:2])
    tree.touch(pages[:2])
    assert tree.evict(8) == 2


def test_many_uses_do_not_pile_up() -> None:
    pool = PagePool(4)
    tree = PrefixTree(pool, 1)
    pages = keep(pool, tree, [1, 2, 3, 4], 1)
    for _ in range(1000):
        pool.share(pages)
        pool.release(pages)
        tree.touch(pages)
    assert len(tree._evictable) < 100
    tree.check()


def test_a_req_gives_a_page_back_for_the_one_the_tree_has_already() -> None:
    pages = ReqPages(8, 2)
    first, second = ReqId("first"), ReqId("second")
    for req_id in (first, second):
        pages.open(req_id)
        pages.grow(req_id, 5)
    assert pages.keep_prefix(first, [1, 2, 3, 4, 5], 5) == 3
    assert pages.keep_prefix(second, [1, 2, 3, 4, 6], 5) == 0
    assert pages.pages_of(second)[:2] == pages.pages_of(first)[:2]
    assert pages.counts().num_free == 8 - 4
    pages.check()
    pages.close(first)
    pages.close(second)
    assert pages.counts().num_cached == 2
    assert pages.num_available == 8


def test_without_caching_nothing_is_kept() -> None:
    pages = ReqPages(4, 2, enable_prefix_caching=False)
    req_id = ReqId("a")
    pages.open(req_id)
    pages.grow(req_id, 4)
    pages.close(req_id, [1, 2, 3, 4], 4)
    assert pages.match([1, 2, 3, 4, 5]) == ()
    assert pages.counts().num_free == 4


def test_only_the_committed_pages_of_a_closed_req_are_kept() -> None:
    pages = ReqPages(4, 2)
    req_id = ReqId("a")
    pages.open(req_id)
    pages.grow(req_id, 8)
    pages.close(req_id, [1, 2, 3, 4, 5], 3)
    assert len(pages.match([1, 2, 3, 4, 5, 6, 7, 8])) == 1
    counts = pages.counts()
    assert (counts.num_free, counts.num_cached, counts.num_owned) == (3, 1, 0)


def test_an_owned_page_that_no_req_lists_is_reported_as_orphaned() -> None:
    pages = ReqPages(4, 2)
    pages.open(ReqId("a"))
    pages.grow(ReqId("a"), 4)
    pages.pages_of(ReqId("a")).pop()
    assert pages.counts().num_orphaned == 1
    with pytest.raises(AssertionError, match="owned by nobody"):
        pages.check()


def test_with_shifted_keys_the_token_behind_a_page_is_part_of_it() -> None:
    """Of 10 shared tokens 9 pairs are shared, so 9 pages of one token at most."""
    pages = ReqPages[ReqId](40, 1, key_shift=1)
    ids = list(range(20))
    first = ReqId("first")
    pages.open(first)
    pages.grow(first, 20)
    pages.close(first, ids, 19)
    assert len(pages.match([*ids[:10], 99, 98])) == 9
    assert len(pages.match(ids[:10])) == 9
    assert len(pages.match(ids)) == 19
    assert pages.counts().num_cached == 19
    pages.check()


@pytest.mark.parametrize(
    ("num_ids", "committed_len", "num_kept"), [(8, 8, 1), (9, 8, 2), (9, 7, 1)]
)
def test_a_page_is_kept_once_its_whole_key_is_known(
    num_ids: int, committed_len: int, num_kept: int
) -> None:
    pages = ReqPages[ReqId](8, 4, key_shift=1)
    req_id = ReqId("a")
    pages.open(req_id)
    pages.grow(req_id, 12)
    pages.keep_prefix(req_id, list(range(num_ids)), committed_len)
    assert len(pages.match(list(range(20)))) == num_kept
    pages.close(req_id, list(range(13)), 12)
    assert len(pages.match(list(range(20)))) == 3
    pages.check()
