"""Draft trees at the edges: ties, NaN, missing children, several reqs at once."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.kernels.api import TreeLinks, TreeMaskMode
from paceline.kernels.reference.kernel_set import ReferenceKernels
from paceline.worker.spec.selection import (
    Candidates,
    build_trees,
    organise,
    organise_tensors,
    select_top_k_tokens,
)

NAN = float("nan")
INF = float("inf")


def grow(levels: list[Tensor], topk: int) -> list[Candidates]:
    """Levels of probabilities, [bs, topk] and then [bs * topk, topk]; ids number a level."""
    scores = None
    steps = []
    for step, probs in enumerate(levels):
        ids = torch.arange(topk).expand(probs.shape) + 100 * (step + 1)
        selection = select_top_k_tokens(step, probs, ids, scores, topk)
        scores = selection.scores
        steps.append(selection.candidates)
    return steps


def test_a_certain_only_child_never_displaces_its_parent() -> None:
    """Its score ties with the parent's; the cut between them keeps the parent."""
    levels = [torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]])]
    (organised,) = organise(grow(levels, 2), [4])
    assert organised.selected == (0, 1, 2)
    (organised,) = organise(grow(levels, 2), [3])
    assert organised.selected == (0, 1)


def test_nan_ranks_last_and_is_never_drafted() -> None:
    levels = [torch.tensor([[0.9, NAN]]), torch.tensor([[NAN, 0.5], [0.9, 0.8]])]
    (tree,) = build_trees(grow(levels, 2), [7], 2)
    assert tree.token_ids == (100, 201)
    assert tree.parents == (0, 1)
    levels = [torch.full((1, 2), NAN), torch.full((2, 2), NAN)]
    (tree,) = build_trees(grow(levels, 2), [7], 2)
    assert tree.num_nodes == 1


def test_children_of_a_missing_lane_are_missing() -> None:
    levels = [torch.tensor([[0.9, -INF]]), torch.tensor([[0.5, -INF], [0.9, 0.0]])]
    (tree,) = build_trees(grow(levels, 2), [7], 2)
    assert tree.token_ids == (100, 200)


def test_reqs_of_a_batch_have_trees_of_their_own_sizes() -> None:
    levels = [
        torch.tensor([[0.6, 0.3], [0.5, 0.4]]),
        torch.tensor([[0.5, 0.4], [0.9, 0.05], [0.1, 0.1], [0.9, 0.1]]),
    ]
    wide, narrow = build_trees(grow(levels, 2), [4, 2], 2)
    assert wide.parents == (0, 0, 1)
    assert narrow.parents == (0,)
    # The second req's lanes continue its own nodes, not the first's.
    selection = select_top_k_tokens(
        1, levels[1], torch.arange(8).view(4, 2), torch.tensor([[0.6, 0.3], [0.5, 0.4]]), 2
    )
    assert selection.parent_lanes.tolist() == [[0, 1], [1, 0]]
    assert selection.input_ids.tolist() == [[0, 2], [6, 4]]


def test_no_room_for_a_guess_gives_the_root_alone() -> None:
    assert build_trees(grow([torch.tensor([[0.6, 0.3]])], 2), [1], 2)[0].num_nodes == 1


@st.composite
def growths(draw: st.DrawFn) -> tuple[list[Candidates], int, list[int]]:
    topk = draw(st.integers(1, 4))
    num_steps = draw(st.integers(1, 4))
    bs = draw(st.integers(1, 3))
    prob = st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0, NAN, -INF])
    levels = []
    for step in range(num_steps):
        rows = bs if step == 0 else bs * topk
        cells = draw(st.lists(prob, min_size=rows * topk, max_size=rows * topk))
        probs = torch.tensor(cells).view(rows, topk)
        levels.append(probs.nan_to_num(nan=-2.0, neginf=-INF).sort(descending=True).values)
        levels[-1][levels[-1] == -2.0] = NAN
    return grow(levels, topk), topk, draw(st.lists(st.integers(1, 60), min_size=bs, max_size=bs))


@settings(max_examples=200, deadline=None)
@given(growths())
def test_a_chosen_childs_parent_is_chosen_and_stands_before_it(
    growth: tuple[list[Candidates], int, list[int]],
) -> None:
    steps, topk, wanted = growth
    scores = torch.cat([step.scores for step in steps], 1)
    for b, organised in enumerate(organise(steps, wanted)):
        chosen = set(organised.selected)
        for gid in organised.selected:
            if gid >= topk:
                assert organised.parents[gid // topk] in chosen
        others = set(range(scores.shape[1])) - chosen
        real = [float(scores[b, gid]) for gid in others if scores[b, gid] > -INF]
        if real:
            assert len(chosen) == wanted[b] - 1
            assert all(float(scores[b, gid]) >= max(real) for gid in chosen)
    for tree, num_nodes in zip(build_trees(steps, wanted, topk), wanted, strict=True):
        assert tree.num_nodes <= num_nodes  # DraftTree itself refuses orphans and repeats


@settings(max_examples=200, deadline=None)
@given(growths())
def test_trees_as_tensors_are_those_of_the_host_filled_up_with_nodes_linked_nowhere(
    growth: tuple[list[Candidates], int, list[int]],
) -> None:
    steps, topk, wanted = growth
    num_candidates = sum(step.scores.shape[1] for step in steps)
    num_nodes = min(wanted[0], num_candidates + 1)
    host = organise(steps, [num_nodes] * len(wanted))
    tensors = organise_tensors(steps, num_nodes)
    for b, organised in enumerate(host):
        num_real = len(organised.selected)
        assert int(tensors.num_real[b]) == num_real
        assert tuple(tensors.parents[b].tolist()) == organised.parents
        assert tuple(tensors.selected[b, :num_real].tolist()) == organised.selected
        assert tuple(tensors.draft_ids[b, :num_real].tolist()) == organised.draft_ids
    built = ReferenceKernels().build_tree(
        torch.zeros(len(wanted), dtype=torch.int64),
        tensors.parents,
        tensors.selected,
        tensors.draft_ids,
        torch.zeros(len(wanted), dtype=torch.int64),
        topk,
        TreeMaskMode.QLEN_ONLY,
    )
    for b, organised in enumerate(host):
        tree = organised.tree(topk)
        for node in range(num_nodes):
            children = [i + 1 for i, parent in enumerate(tree.parents) if parent == node]
            assert linked_below(built.links, b, node) == (children if node < tree.num_nodes else [])


def linked_below(links: TreeLinks, b: int, node: int) -> list[int]:
    found = []
    child = int(links.retrieve_next_token[b, node])
    while child >= 0:
        found.append(child)
        child = int(links.retrieve_next_sibling[b, child])
    return found
