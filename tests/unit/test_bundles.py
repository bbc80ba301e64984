"""Placement plans and the text a person gets when there is none."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.placement.bundles import (
    GroupRequest,
    NodeView,
    Resources,
    could_ever_fit,
    explain,
    plan_groups,
)


def node(name: str, cpus: float, gpus: float = 0.0, free: Resources | None = None) -> NodeView:
    total = Resources(cpus, gpus)
    return NodeView(name, f"10.0.0.{name}", total, total if free is None else free)


def test_group_that_fits_one_node_is_packed_strictly() -> None:
    placement = plan_groups(
        [GroupRequest("target-0", 4, Resources(1, 1))], [node("1", 8, 2), node("2", 8, 4)]
    )
    (plan,) = placement.plans
    assert plan.strategy == "STRICT_PACK"
    assert plan.node_ids == ("2",) * 4


def test_small_group_takes_the_fullest_node_that_holds_it() -> None:
    placement = plan_groups(
        [GroupRequest("draft-0", 1, Resources(1, 1))], [node("1", 8, 8), node("2", 8, 2)]
    )
    assert placement.plans[0].node_ids == ("2",)


def test_group_larger_than_any_node_spreads_over_few() -> None:
    placement = plan_groups(
        [GroupRequest("target-0", 6, Resources(1, 1))],
        [node("1", 8, 2), node("2", 8, 4), node("3", 8, 2)],
    )
    (plan,) = placement.plans
    assert plan.strategy == "PACK"
    assert sorted(plan.node_ids) == ["1", "1", "2", "2", "2", "2"]


def test_later_groups_see_what_earlier_ones_took() -> None:
    placement = plan_groups(
        [GroupRequest("target-0", 2, Resources(1)), GroupRequest("draft-0", 1, Resources(1))],
        [node("1", 2)],
    )
    assert [p.group_id for p in placement.plans] == ["target-0"]
    assert [s.request.group_id for s in placement.shortfalls] == ["draft-0"]
    assert "stop what holds" not in explain(placement.shortfalls)  # it is this start itself


def test_shortfall_names_bundles_nodes_and_the_way_out() -> None:
    placement = plan_groups(
        [GroupRequest("target-0", 64, Resources(0.5))], [node("1", 2), node("2", 1)]
    )
    (shortfall,) = placement.shortfalls
    assert not shortfall.others_hold_some
    text = explain(placement.shortfalls)
    assert "group target-0: 64 ranks asked, 6 can be placed" in text
    assert "bundle 6 asks CPU 0.5: fits on no node" in text
    assert "bundles 10..63: the same" in text
    assert (
        "node 10.0.0.1: lacks CPU 0.5 (left CPU 0; free before this start CPU 2; in all CPU 2)"
        in text
    )
    assert "node 10.0.0.2: lacks CPU 0.5" in text
    assert "lower --tensor-parallel-size to 6" in text
    assert "add nodes with CPU 29" in text


def test_missing_gpu_is_named_as_such() -> None:
    text = explain(plan_groups([GroupRequest("t", 1, Resources(1, 1))], [node("1", 4)]).shortfalls)
    assert "lacks GPU 1" in text
    assert "lower --tensor-parallel-size" not in text  # not even one rank fits
    assert "add nodes with CPU 1, GPU 1" in text


def test_busy_node_is_told_from_a_small_one() -> None:
    busy = node("1", 4, free=Resources(0.5))
    request = GroupRequest("t", 2, Resources(1))
    (shortfall,) = plan_groups([request], [busy]).shortfalls
    assert "stop what holds the other resources" in explain([shortfall])
    assert could_ever_fit([request], [busy])
    assert not could_ever_fit([request, request, request], [busy])


def test_empty_cluster_says_so() -> None:
    text = explain(plan_groups([GroupRequest("t", 1, Resources(1))], []).shortfalls)
    assert "no live node" in text


_cpus = st.integers(0, 8).map(lambda quarters: quarters / 4)
_resources = st.builds(Resources, _cpus, st.integers(0, 4).map(float))


@given(
    st.lists(st.tuples(st.integers(1, 6), _resources), min_size=1, max_size=5),
    st.lists(_resources, max_size=4),
)
def test_no_node_is_ever_overbooked(
    asked: list[tuple[int, Resources]], free: list[Resources]
) -> None:
    nodes = [node(str(i), r.cpus, r.gpus) for i, r in enumerate(free)]
    requests = [GroupRequest(f"g{i}", num, each) for i, (num, each) in enumerate(asked)]
    placement = plan_groups(requests, nodes)
    placed = {plan.group_id: plan for plan in placement.plans}
    short = {s.request.group_id for s in placement.shortfalls}
    assert placed.keys() | short == {r.group_id for r in requests}
    assert not placed.keys() & short
    for view in nodes:
        bundles = [
            bundle
            for plan in placement.plans
            for bundle, node_id in zip(plan.bundles, plan.node_ids, strict=True)
            if node_id == view.node_id
        ]
        assert sum(b.cpus for b in bundles) <= view.total.cpus + 1e-4
        assert sum(b.gpus for b in bundles) <= view.total.gpus + 1e-4
    for plan in placement.plans:
        assert (plan.strategy == "STRICT_PACK") == (len(set(plan.node_ids)) == 1)
