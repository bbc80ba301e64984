"""Pool and tree together under any sequence of calls: nothing lost, nothing owned twice."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from paceline.worker.cache.req_pages import ReqPages
from paceline.worker.step import PageId, ReqId

NUM_PAGES = 12


class PagesMachine(RuleBasedStateMachine):
    """Reqs come with few different tokens, so that prefixes are often shared."""

    @initialize(page_size=st.sampled_from([1, 2, 4]), key_shift=st.integers(0, 1))
    def begin(self, page_size: int, key_shift: int) -> None:
        self.page_size = page_size
        self.key_shift = key_shift
        self.pages = ReqPages[ReqId](NUM_PAGES, page_size, key_shift=key_shift)
        self.ids: dict[ReqId, list[int]] = {}
        self.num_opened = 0
        # What the KV of each page was computed for: all tokens up to its end, and those behind it
        # that a shifted draft reads with them.
        self.contents: dict[PageId, tuple[int, ...]] = {}

    @rule(ids=st.lists(st.integers(0, 1), min_size=1, max_size=24))
    def open(self, ids: list[int]) -> None:
        prefix = self.pages.match(ids)
        assert len(prefix) * self.page_size < len(ids)
        for i, page in enumerate(prefix):
            assert self.contents[page] == self._content(ids, i)
        needed = self.pages.pages_for(len(ids)) - len(prefix) + self.pages.num_unused(prefix)
        if needed > self.pages.num_available:
            return
        req_id = ReqId(str(self.num_opened))
        self.num_opened += 1
        self.pages.open(req_id, prefix)
        self.ids[req_id] = ids
        self.pages.grow(req_id, len(ids))
        self._compute(req_id)

    @precondition(lambda self: self.ids)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def extend(self, data: st.DataObject, more: list[int]) -> None:
        req_id = data.draw(st.sampled_from(sorted(self.ids)))
        ids = self.ids[req_id] + more
        missing = self.pages.pages_for(len(ids)) - len(self.pages.pages_of(req_id))
        if missing > self.pages.num_available:
            return
        self.pages.grow(req_id, len(ids))
        self.ids[req_id] = ids
        self._compute(req_id)

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def keep_prefix(self, data: st.DataObject) -> None:
        req_id = data.draw(st.sampled_from(sorted(self.ids)))
        before = list(self.pages.pages_of(req_id))
        first_changed = self.pages.keep_prefix(req_id, self.ids[req_id], len(self.ids[req_id]))
        after = self.pages.pages_of(req_id)
        assert before[:first_changed] == after[:first_changed]

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        req_id = data.draw(st.sampled_from(sorted(self.ids)))
        ids = self.ids.pop(req_id)
        freed = self.pages.num_exclusive(req_id)
        before = self.pages.num_available
        self.pages.close(req_id, ids, data.draw(st.integers(0, len(ids))))
        assert self.pages.num_available >= before + freed

    @invariant()
    def nothing_is_lost_or_shared_wrongly(self) -> None:
        if not hasattr(self, "pages"):
            return
        self.pages.check()
        counts = self.pages.counts()
        assert counts.num_free + counts.num_owned + counts.num_cached == NUM_PAGES
        for req_id, ids in self.ids.items():
            for i, page in enumerate(self.pages.pages_of(req_id)):
                wanted = self._content(ids, i)
                assert self.contents[page] == wanted, "another req wrote into this page"

    def teardown(self) -> None:
        if not hasattr(self, "pages"):
            return
        for req_id, ids in self.ids.items():
            self.pages.close(req_id, ids, len(ids))
        assert self.pages.num_available == NUM_PAGES
        # Even all of it at once can be had: every cached page is evictable.
        self.pages.open(ReqId("all"))
        self.pages.grow(ReqId("all"), NUM_PAGES * self.page_size)
        assert len(set(self.pages.pages_of(ReqId("all")))) == NUM_PAGES

    def _compute(self, req_id: ReqId) -> None:
        ids = self.ids[req_id]
        for i, page in enumerate(self.pages.pages_of(req_id)):
            self.contents[page] = self._content(ids, i)

    def _content(self, ids: list[int], page: int) -> tuple[int, ...]:
        return tuple(ids[: (page + 1) * self.page_size + self.key_shift])


TestPages = PagesMachine.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
