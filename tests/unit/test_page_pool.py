"""The page pool: exact counts, a fixed order, and no silent double free."""

import pytest

from paceline.worker.cache.page_pool import PagePool


def counts(pool: PagePool) -> tuple[int, int, int, int]:
    return pool.num_free, pool.num_owned, pool.num_cached, pool.num_orphaned


def test_pages_come_out_in_order_and_page_0_never_does() -> None:
    pool = PagePool(4)
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.allocate(1) == [4]
    assert pool.allocate(0) == []
    assert counts(pool) == (0, 4, 0, 0)


def test_the_same_calls_give_the_same_pages() -> None:
    def play() -> list[list[int]]:
        pool = PagePool(8)
        first, second = pool.allocate(3), pool.allocate(2)
        pool.release(first)
        third = pool.allocate(4)
        return [list(pages) for pages in (first, second, third)]

    assert play() == play()


def test_more_pages_than_are_free_are_an_error_that_changes_nothing() -> None:
    pool = PagePool(2)
    with pytest.raises(AssertionError, match="3 pages wanted, 2 free"):
        pool.allocate(3)
    assert counts(pool) == (2, 0, 0, 0)


def test_a_page_is_free_after_its_last_owner_left() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.share(pages)
    pool.release(pages)
    assert counts(pool) == (1, 1, 0, 0)
    pool.release(pages)
    assert counts(pool) == (2, 0, 0, 0)
    pool.check()


def test_a_second_release_is_an_error() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="has no owner"):
        pool.release(pages)


def test_a_cached_page_outlives_its_owner_until_it_is_uncached() -> None:
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.cache(page)
    assert counts(pool) == (1, 1, 0, 0)
    pool.release([page])
    assert counts(pool) == (1, 0, 1, 0)
    pool.share([page])
    assert counts(pool) == (1, 1, 0, 0)
    pool.release([page])
    pool.uncache(page)
    assert counts(pool) == (2, 0, 0, 0)
    pool.check()


def test_a_free_page_can_be_neither_shared_nor_cached() -> None:
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.release([page])
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share([page])
    with pytest.raises(AssertionError, match="cannot be cached"):
        pool.cache(page)
