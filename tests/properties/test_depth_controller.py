"""The depth of drafting: near the best there is, never far below plain, and few probes."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.worker.config import SpecConfig
from paceline.worker.spec.adapt import (
    PLAIN,
    PROBE_PERIOD,
    PROBES_AT_FIRST,
    DepthController,
    band_of,
    candidate_shapes,
)
from paceline.worker.spec.limits import alloc_len_per_decode, max_tree_nodes
from paceline.worker.step import SpecShape

CHAIN = SpecConfig("eagle3", num_steps=5, topk=1, num_draft_tokens=6)
TREE = SpecConfig("eagle3", num_steps=5, topk=4, num_draft_tokens=8)
CHAT = (0.65, 0.69, 0.66, 0.66, 0.6)  # of each depth where the one above it was accepted


@dataclass
class Machine:
    """What a step costs and what it yields, by chance.

    A step of a target with `num_rows` rows takes 1 + `per_token` for each token beyond the first,
    a forward of the draft `per_draft`.
    """

    rates: tuple[float, ...] = CHAT
    per_token: float = 0.04
    per_draft: float = 0.05
    noise: float = 0.0
    scale: Callable[[int], float] = lambda step: 1.0
    hiccup_every: int = 0
    seed: int = 0
    rand: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rand = random.Random(self.seed)

    def cost(self, num_rows: int, shape: SpecShape) -> float:
        tokens = num_rows * shape.num_draft_tokens
        return 1.0 + self.per_token * (tokens - 1) + self.per_draft * shape.num_steps

    def rate(self, shape: SpecShape, depth: int) -> float:
        miss = 1.0 - self.rates[depth]
        return 1.0 - miss ** (1 if shape.topk == 1 else 1.5 + 0.05 * shape.num_draft_tokens)

    def gain(self, shape: SpecShape) -> float:
        total = reached = 1.0
        for depth in range(shape.num_steps):
            reached *= self.rate(shape, depth)
            total += reached
        return total

    def accept_length(self, shape: SpecShape) -> int:
        for depth in range(shape.num_steps):
            if self.rand.random() >= self.rate(shape, depth):
                return depth
        return shape.num_steps

    def seconds(self, step: int, num_rows: int, shape: SpecShape) -> float:
        noise = self.rand.lognormvariate(0.0, self.noise)
        hiccup = 10.0 if self.hiccup_every and step % self.hiccup_every == 0 else 1.0
        return 0.02 * self.cost(num_rows, shape) * self.scale(step) * noise * hiccup

    def best(self, spec: SpecConfig, num_rows: int) -> float:
        """Tokens of a row per unit of cost."""
        return max(self.value(num_rows, shape) for shape in candidate_shapes(spec))

    def value(self, num_rows: int, shape: SpecShape) -> float:
        return self.gain(shape) / self.cost(num_rows, shape)


def drive(
    controller: DepthController, machine: Machine, num_rows: int, num_steps: int, start: int = 0
) -> Iterator[SpecShape]:
    for step in range(start, start + num_steps):
        shape = controller.choose(num_rows)
        lengths = [machine.accept_length(shape) for _ in range(num_rows)]
        controller.observe(num_rows, shape, lengths, machine.seconds(step, num_rows, shape))
        yield shape


def efficiency(machine: Machine, num_rows: int, shapes: list[SpecShape]) -> float:
    """Expected tokens over expected cost: what the choices are worth, without luck."""
    gain = sum(machine.gain(shape) for shape in shapes)
    return gain / sum(machine.cost(num_rows, shape) for shape in shapes)


MACHINES = {
    "verifying is nearly free": Machine(per_token=0.01, per_draft=0.02),
    "as measured at one row": Machine(per_token=0.03, per_draft=0.04),
    "rows cost linearly": Machine(per_token=0.7, per_draft=0.1),
    "drafts are seldom right": Machine(rates=(0.1, 0.1, 0.1, 0.1, 0.1), per_token=0.1),
    "drafts are always right": Machine(rates=(1.0,) * 5, per_token=0.2, per_draft=0.2),
    "only the first is right": Machine(rates=(0.9, 0.05, 0.05, 0.05, 0.05), per_token=0.08),
    "a slow draft": Machine(per_token=0.02, per_draft=0.4),
}


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("num_rows", [1, 6])
@pytest.mark.parametrize("name", MACHINES)
def test_it_comes_near_the_best_shape_and_never_far_below_plain(
    name: str, num_rows: int, spec: SpecConfig
) -> None:
    machine = replace(MACHINES[name], noise=0.1, hiccup_every=37, seed=len(name))
    shapes = list(drive(DepthController(spec), machine, num_rows, 1500))
    settled = efficiency(machine, num_rows, shapes[500:])
    assert settled >= 0.92 * machine.best(spec, num_rows)
    assert settled >= 0.97 * machine.value(num_rows, PLAIN)
    assert efficiency(machine, num_rows, shapes) >= 0.9 * machine.value(num_rows, PLAIN)


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_it_follows_a_change_of_the_text_both_ways(spec: SpecConfig) -> None:
    good = Machine(per_token=0.08, per_draft=0.08, noise=0.05)
    bad = replace(good, rates=(0.02,) * 5, seed=1)
    controller = DepthController(spec)
    for machine in (good, bad, good, bad):
        shapes = list(drive(controller, machine, 1, 2000))
        assert efficiency(machine, 1, shapes[1000:]) >= 0.92 * machine.best(spec, 1)


def test_it_follows_a_change_of_what_rows_cost() -> None:
    cheap, dear = Machine(noise=0.05), Machine(per_token=0.9, noise=0.05, seed=1)
    controller = DepthController(CHAIN)
    for machine in (cheap, dear, cheap):
        shapes = list(drive(controller, machine, 2, 3000))
        assert efficiency(machine, 2, shapes[2000:]) >= 0.92 * machine.best(CHAIN, 2)


def test_a_machine_that_slows_down_for_all_shapes_alike_changes_nothing() -> None:
    steady = Machine(per_token=0.12, per_draft=0.12)
    drifting = replace(steady, scale=lambda step: 1.0 + step / 500)
    jumping = replace(steady, scale=lambda step: 3.0 if step // 400 % 2 else 1.0)
    for machine in (drifting, jumping):
        shapes = list(drive(DepthController(CHAIN), machine, 1, 3000))
        assert efficiency(machine, 1, shapes[500:]) >= 0.94 * machine.best(CHAIN, 1)


@settings(max_examples=25, deadline=None)
@given(
    rates=st.tuples(*[st.floats(0.0, 1.0)] * 5),
    per_token=st.floats(0.0, 2.0),
    per_draft=st.floats(0.0, 2.0),
    noise=st.sampled_from([0.0, 0.1, 0.5]),
    rows=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    spec=st.sampled_from([CHAIN, TREE]),
    seed=st.integers(0, 1000),
)
def test_whatever_happens_probes_are_few_and_shapes_fit_what_was_reserved(
    rates: tuple[float, ...],
    per_token: float,
    per_draft: float,
    noise: float,
    rows: list[int],
    spec: SpecConfig,
    seed: int,
) -> None:
    machine = Machine(rates, per_token, per_draft, noise, seed=seed)
    controller = DepthController(spec)
    num_probes = num_steps = 0
    for num_rows in rows:
        for shape in drive(controller, machine, num_rows, 150):
            assert max(shape.topk * shape.num_steps, shape.num_draft_tokens) <= (
                alloc_len_per_decode(spec)
            )
            assert shape.num_draft_tokens <= max_tree_nodes(shape.num_steps, shape.topk)
            num_probes += shape != controller.current(num_rows)
            num_steps += 1
    num_bands = len({band_of(num_rows) for num_rows in rows})
    # A switch just before a probe makes the shape that is left look like one.
    assert num_probes <= num_steps / PROBE_PERIOD + PROBES_AT_FIRST * num_bands + 1


def test_a_new_number_of_rows_begins_with_what_its_neighbour_learnt() -> None:
    machine = MACHINES["drafts are seldom right"]
    controller = DepthController(CHAIN)
    assert list(drive(controller, machine, 1, 500))[-1] == PLAIN
    assert controller.choose(2) == PLAIN
    assert DepthController(CHAIN).choose(2) == SpecShape(5, 1, 6)


@pytest.mark.parametrize(
    "spec",
    [
        replace(TREE, adaptive=False),
        replace(TREE, simulated_accept_length=2.5),
    ],
    ids=["not adaptive", "simulated"],
)
def test_where_it_shall_not_adapt_the_shape_is_the_configured_one(spec: SpecConfig) -> None:
    shapes = drive(DepthController(spec), MACHINES["drafts are seldom right"], 3, 500)
    assert set(shapes) == {SpecShape(5, 4, 8)}


def test_the_same_steps_lead_to_the_same_choices() -> None:
    machine = Machine(noise=0.3)
    first = list(drive(DepthController(TREE), machine, 2, 500))
    again = list(drive(DepthController(TREE), replace(machine), 2, 500))
    assert first == again


def test_steps_without_a_time_or_of_no_row_teach_no_cost() -> None:
    controller = DepthController(CHAIN)
    for _ in range(500):
        shape = controller.choose(1)
        controller.observe(1, shape, [0], None)
        assert shape == controller.choose(0) == SpecShape(5, 1, 6)
        controller.observe(0, shape, [], 0.1)


def test_a_shape_of_other_trees_is_not_learnt_from() -> None:
    controller = DepthController(CHAIN)
    controller.observe(1, SpecShape(40, 1, 41), [40], 0.1)
    assert controller.choose(1) == SpecShape(5, 1, 6)


def test_candidates_are_plain_chains_and_smaller_trees() -> None:
    chains = [PLAIN, *(SpecShape(depth, 1, depth + 1) for depth in range(1, 6))]
    assert list(candidate_shapes(CHAIN)) == chains
    trees = [SpecShape(3, 4, 8), SpecShape(5, 4, 8)]
    assert sorted(candidate_shapes(TREE), key=str) == sorted([*chains, *trees], key=str)
    deep = replace(CHAIN, num_steps=64, num_draft_tokens=65)
    assert len(candidate_shapes(deep)) < 20


def test_memory_is_bounded_by_the_doublings_of_rows() -> None:
    bands = [band_of(num_rows) for num_rows in range(1, 4097)]
    assert bands == sorted(bands)
    assert set(bands) == set(range(1, max(bands) + 1))
    assert max(bands) <= 8 + 4 * 9
