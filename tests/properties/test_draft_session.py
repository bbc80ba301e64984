"""Whatever happens to its messages, a draft changes which rows have a guess and nothing else."""

from collections.abc import Iterable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.worker.config import SpecConfig
from paceline.worker.link.base import Commit, DraftLink, ProposalRow, Proposals
from paceline.worker.spec.breaker import CircuitBreaker
from paceline.worker.spec.drafter import DraftContext, Drafter
from paceline.worker.spec.link_drafter import LinkDrafter
from paceline.worker.spec.session import DraftSession
from paceline.worker.spec.tree import DraftTree
from paceline.worker.step import Epoch, ReqId, SamplingParams
from tests.faults import Faults, FaultyLink

VOCAB_SIZE = 97
SPEC = SpecConfig(method="standalone", num_steps=4, num_draft_tokens=5)
PARAMS = SamplingParams(seed=1, max_tokens=40)


def next_token(ids: Sequence[int]) -> int:
    return (sum(ids[-3:]) * 31 + len(ids)) % VOCAB_SIZE


class ToyLink(DraftLink):
    """A draft that knows the target's rule and takes messages as the real one does."""

    def __init__(self) -> None:
        self.reqs: dict[ReqId, list[int]] = {}
        self.asked: list[Commit] = []

    @property
    def epoch(self) -> Epoch:
        return Epoch(1)

    @property
    def is_up(self) -> bool:
        return True

    def exchange(self, commit: Commit, timeout_s: float) -> Proposals | None:
        self.asked.append(commit)
        for sync in commit.syncs:
            self.reqs[sync.req_id] = list(sync.token_ids)
        rows, needs_sync = [], []
        for row in commit.rows:
            ids = self.reqs.get(row.req_id)
            if ids is None or not 0 < row.base_len <= len(ids) <= row.commit_len:
                needs_sync.append(row.req_id)
                continue
            ids += row.token_ids[len(ids) - row.base_len :]
            guesses: list[int] = []
            for _ in range(row.num_draft_tokens - 1):
                guesses.append(next_token([*ids, *guesses]))
            rows.append(ProposalRow(row.req_id, len(ids), DraftTree.chain(guesses)))
        return Proposals(commit.epoch, commit.round, tuple(rows), tuple(needs_sync))

    def close_reqs(self, req_ids: Iterable[ReqId]) -> None:
        for req_id in req_ids:
            self.reqs.pop(req_id, None)

    def shutdown(self) -> None:
        self.reqs.clear()


def generate(drafter: Drafter | None, num_reqs: int = 3) -> list[list[int]]:
    """Greedy decoding by `next_token` with exact verification."""
    contexts = [
        DraftContext(ReqId(f"r{i}"), [i + 1] * (2 + i), [next_token([i + 1] * (2 + i))], PARAMS, 5)
        for i in range(num_reqs)
    ]
    while running := [c for c in contexts if len(c.output_ids) < PARAMS.max_tokens]:
        trees = drafter.propose(running) if drafter else [None] * len(running)
        assert len(trees) == len(running)
        for context, tree in zip(running, trees, strict=True):
            if tree is not None:
                assert tree.num_nodes <= context.max_draft_tokens
                assert all(0 <= token < VOCAB_SIZE for token in tree.token_ids)
            guesses = list(tree.token_ids) if tree else []
            while True:
                token = next_token([*context.prompt_ids, *context.output_ids])
                context.output_ids.append(token)
                if not guesses or guesses.pop(0) != token:
                    break
    if drafter:
        drafter.close_reqs([context.req_id for context in contexts])
    return [context.output_ids[: PARAMS.max_tokens] for context in contexts]


def never_open() -> CircuitBreaker:
    return CircuitBreaker(max_failures=1 << 30)


chances = st.sampled_from([0.0, 0.05, 0.3, 0.7])


@settings(deadline=None, max_examples=150)
@given(
    faults=st.builds(Faults, *[chances] * 8),
    seed=st.integers(0, 1 << 16),
)
def test_faulty_messages_change_no_token_and_leave_nothing_behind(
    faults: Faults, seed: int
) -> None:
    toy = ToyLink()
    link = FaultyLink(toy, faults, seed, VOCAB_SIZE)
    drafter = LinkDrafter(link, SPEC, vocab_size=VOCAB_SIZE, breaker=never_open())
    assert generate(drafter) == generate(None)
    assert toy.reqs.keys() <= {ReqId("nobody")}


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 1 << 16), chance=st.sampled_from([0.1, 0.5, 0.9]))
def test_every_tree_is_behind_the_length_that_was_asked_for(seed: int, chance: float) -> None:
    session = DraftSession(SPEC, vocab_size=VOCAB_SIZE)
    link = FaultyLink(ToyLink(), Faults.all(chance), seed, VOCAB_SIZE)
    context = DraftContext(ReqId("r"), [3, 1, 4], [1], PARAMS, 5)
    for _ in range(30):
        commit = session.begin_round(link.epoch, [context])
        answer = link.exchange(commit, 1.0)
        tree = session.finish_round([context], commit, answer).trees[0]
        if tree is not None:
            assert answer is not None
            assert (answer.epoch, answer.round) == (commit.epoch, commit.round)
            assert any(
                row.commit_len == context.commit_len and row.tree.truncate(5) == tree
                for row in answer.rows
            )
        context.output_ids.append(next_token(context.output_ids))


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 1 << 16))
def test_a_link_that_is_well_again_gives_trees_again(seed: int) -> None:
    toy = ToyLink()
    session = DraftSession(SPEC, vocab_size=VOCAB_SIZE)
    link = FaultyLink(toy, Faults.all(0.4), seed, VOCAB_SIZE)
    context = DraftContext(ReqId("r"), [3, 1, 4], [1], PARAMS, 5)
    for _ in range(20):
        commit = session.begin_round(link.epoch, [context])
        session.finish_round([context], commit, link.exchange(commit, 1.0))
        context.output_ids.append(next_token(context.output_ids))
    trees = []
    for _ in range(70):  # a req that was bad over and over is left out for 64 rounds at most
        commit = session.begin_round(Epoch(1), [context])
        trees.append(session.finish_round([context], commit, toy.exchange(commit, 1.0)).trees[0])
    assert trees[-1] is not None


@given(st.lists(st.sampled_from(["answer", "lose", "new epoch"]), max_size=12))
def test_a_round_repeats_exactly_what_the_draft_may_not_know(events: list[str]) -> None:
    """Syncs go out once per epoch; after that, tokens since the last acknowledged length."""
    session = DraftSession(SPEC)
    toy = ToyLink()
    context = DraftContext(ReqId("r"), [3, 1, 4], [1], PARAMS, 5)
    epoch, acknowledged, is_synced = 1, 0, False
    for event in events:
        if event == "new epoch":
            epoch, is_synced = epoch + 1, False
        commit = session.begin_round(Epoch(epoch), [context])
        assert bool(commit.syncs) == (not is_synced)
        ids = (*context.prompt_ids, *context.output_ids)
        if not is_synced:
            assert commit.syncs[0].token_ids == ids
            acknowledged, is_synced = len(ids), True
        row = commit.rows[0]
        assert (row.base_len, row.token_ids) == (acknowledged, ids[acknowledged:])
        answer = toy.exchange(commit, 1.0) if event == "answer" else None
        if answer is not None and not answer.needs_sync:
            acknowledged = len(ids)
        elif answer is not None:
            is_synced = False
        session.finish_round([context], commit, answer)
        context.output_ids.append(next_token(context.output_ids))


def test_a_round_syncs_within_its_budget_and_always_one_req() -> None:
    session = DraftSession(SPEC, max_sync_tokens=10)
    contexts = [DraftContext(ReqId(f"r{i}"), [1] * 8, [2], PARAMS, 5) for i in range(3)]
    synced = []
    for _ in range(3):
        commit = session.begin_round(Epoch(1), contexts)
        assert len(commit.syncs) == 1
        synced.append(commit.syncs[0].req_id)
        session.finish_round(contexts, commit, None)
    assert sorted(synced) == [context.req_id for context in contexts]


def test_views_are_bounded() -> None:
    session = DraftSession(SPEC, max_reqs=4)
    for i in range(20):
        session.begin_round(Epoch(1), [DraftContext(ReqId(f"r{i}"), [1], [2], PARAMS, 5)])
    assert session.num_reqs == 4


def test_a_req_that_no_sync_helps_is_asked_ever_less() -> None:
    session = DraftSession(SPEC)
    context = DraftContext(ReqId("r"), [1], [2], PARAMS, 5)
    num_asked = 0
    for _ in range(100):
        commit = session.begin_round(Epoch(1), [context])
        num_asked += len(commit.rows)
        answer = Proposals(commit.epoch, commit.round, (), needs_sync=(ReqId("r"),))
        assert session.finish_round([context], commit, answer).trees == (None,)
    assert 3 < num_asked < 12


def test_a_row_without_room_for_a_guess_is_not_asked() -> None:
    session = DraftSession(SPEC)
    context = DraftContext(ReqId("r"), [1], [2], PARAMS, 1)
    assert session.begin_round(Epoch(1), [context]).rows == ()
