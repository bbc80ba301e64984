"""A leader's messages survive the wire."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.worker.step import KvMoves, Phase, ReqStep, StepPlan, decode_message, encode_message
from tests.tiny import VOCAB_SIZE

ids = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=8).map(tuple)
rows = st.builds(
    ReqStep,
    req_pool_index=st.integers(0, 64),
    phase=st.sampled_from(Phase),
    prefix_len=st.integers(0, 1 << 20),
    input_ids=ids,
    pages=ids,
    parents=st.none() | ids.map(lambda t: tuple(range(-1, len(t) - 1))),
)


@given(st.integers(0, 1 << 40), st.lists(rows, max_size=4).map(tuple))
def test_a_plan_survives_the_wire(step_id: int, plan_rows: tuple[ReqStep, ...]) -> None:
    plan = StepPlan(step_id, plan_rows)
    assert decode_message(encode_message(plan)) == plan


def test_moves_survive_the_wire() -> None:
    moves = KvMoves((3, 4), (1, 2))
    assert decode_message(encode_message(moves)) == moves
