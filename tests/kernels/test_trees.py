"""Tree links and greedy verification: worked trees, then random ones against naive walks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.kernels.api import KernelSet, TreeLinks
from paceline.kernels.reference.build_tree import build_tree_links
from paceline.kernels.reference.verify_tree import verify_tree_greedy
from tests.kernels.rows import i64

TREE_A = [-1, 0, 0, 1, 1, 2]
IDS_A = [7, 10, 20, 11, 12, 21]
CHAIN_B = [-1, 0, 1, 2]
IDS_B = [9, 5, 6, 7]


def links_of(kernels: KernelSet, parents: list[list[int]], device: str) -> TreeLinks:
    return kernels.build_tree_links(torch.tensor(parents, device=device))


@pytest.mark.parametrize(
    ("parents", "next_token", "next_sibling"),
    [
        (TREE_A, [1, 3, 5, -1, -1, -1], [-1, 2, -1, 4, -1, -1]),
        (CHAIN_B, [1, 2, 3, -1], [-1, -1, -1, -1]),
        ([-1, 0, 0], [1, -1, -1], [-1, 2, -1]),
        ([-1, 0, -2, 0], [1, -1, -1, -1], [-1, 3, -1, -1]),
        ([-1], [-1], [-1]),
    ],
)
def test_links_of_worked_trees(
    kernels: KernelSet,
    device: str,
    parents: list[int],
    next_token: list[int],
    next_sibling: list[int],
) -> None:
    links = links_of(kernels, [parents, parents], device)
    assert links.retrieve_next_token.tolist() == [next_token] * 2
    assert links.retrieve_next_sibling.tolist() == [next_sibling] * 2
    n = len(parents)
    assert links.retrieve_index.tolist() == [list(range(n)), list(range(n, 2 * n))]


@pytest.mark.parametrize(
    ("targets", "path", "predict"),
    [
        ({0: 20, 2: 21, 5: 41}, [0, 2, 5, -1], {0: 20, 2: 21, 5: 41}),
        ({0: 77}, [0, -1, -1, -1], {0: 77}),
        ({0: 10, 1: 12, 4: 50}, [0, 1, 4, -1], {0: 10, 1: 12, 4: 50}),
        ({0: 10, 1: 11, 3: 31}, [0, 1, 3, -1], {0: 10, 1: 11, 3: 31}),
    ],
)
def test_worked_walks_of_a_tree(
    kernels: KernelSet,
    device: str,
    targets: dict[int, int],
    path: list[int],
    predict: dict[int, int],
) -> None:
    target_ids = i64([targets.get(i, -5) for i in range(6)], device).view(1, 6)
    result = kernels.verify_tree_greedy(
        i64(IDS_A, device).view(1, 6), links_of(kernels, [TREE_A], device), target_ids, 3
    )
    assert result.accept_index.tolist() == [path]
    assert result.accept_length.tolist() == [len(predict) - 1]
    assert result.predict.tolist() == [predict.get(i, 0) for i in range(6)]


def test_reqs_of_a_batch_walk_apart(kernels: KernelSet, device: str) -> None:
    targets = [[20, 0, 21, 0, 0, 41], [77, 0, 0, 0, 0, 0]]
    result = kernels.verify_tree_greedy(
        torch.tensor([IDS_A, IDS_A], device=device),
        links_of(kernels, [TREE_A, TREE_A], device),
        torch.tensor(targets, device=device),
        3,
    )
    assert result.accept_index.tolist() == [[0, 2, 5, -1], [6, -1, -1, -1]]
    assert result.accept_length.tolist() == [2, 0]
    assert result.predict.tolist() == [20, 0, 21, 0, 0, 41, 77, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("targets", "accepted"), [([5, 6, 7, 8], 3), ([5, 6, 0, 8], 2), ([1, 6, 7, 8], 0)]
)
def test_worked_walks_of_a_chain(
    kernels: KernelSet, device: str, targets: list[int], accepted: int
) -> None:
    result = kernels.verify_tree_greedy(
        i64(IDS_B, device).view(1, 4),
        links_of(kernels, [CHAIN_B], device),
        i64(targets, device).view(1, 4),
        3,
    )
    assert result.accept_length.tolist() == [accepted]
    assert result.predict.tolist() == targets[: accepted + 1] + [0] * (3 - accepted)


def test_depth_is_bounded(kernels: KernelSet, device: str) -> None:
    result = kernels.verify_tree_greedy(
        i64(IDS_B, device).view(1, 4),
        links_of(kernels, [CHAIN_B], device),
        i64([5, 6, 7, 8], device).view(1, 4),
        2,
    )
    assert result.accept_index.tolist() == [[0, 1, 2]]
    assert result.accept_length.tolist() == [2]


def test_an_empty_batch_is_no_error(kernels: KernelSet, device: str) -> None:
    none = torch.zeros(0, 4, dtype=torch.int64, device=device)
    result = kernels.verify_tree_greedy(none, kernels.build_tree_links(none), none, 3)
    assert result.accept_index.shape == (0, 4)
    assert result.predict.shape == result.accept_length.shape == (0,)


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """(parents, draft_ids, target_ids); siblings distinct, padding anywhere but at the root."""
    n = draw(st.integers(1, 12))
    parents = [-1]
    for node in range(1, n):
        live = [-2, *(i for i in range(node) if parents[i] != -2)]
        parents.append(draw(st.sampled_from(live)))
    ids = [0] * n
    for node in range(1, n):
        taken = {ids[i] for i in range(1, node) if parents[i] == parents[node]}
        ids[node] = draw(st.sampled_from([t for t in range(20) if t not in taken]))
    # a target likely to agree somewhere
    targets = [draw(st.sampled_from([*ids[1:], 99])) for _ in range(n)]
    return parents, ids, targets


def naive_path(parents: list[int], ids: list[int], targets: list[int], node: int) -> list[int]:
    for child, parent in enumerate(parents):
        if parent == node and ids[child] == targets[node]:
            return [node, *naive_path(parents, ids, targets, child)]
    return [node]


@settings(max_examples=150, deadline=None)
@given(tree=trees())
def test_links_are_what_a_naive_walk_finds(tree: tuple[list[int], list[int], list[int]]) -> None:
    parents = tree[0]
    n = len(parents)
    links = build_tree_links(i64(parents).view(1, n))
    for node in range(n):
        children = [i for i in range(n) if parents[i] == node]
        found = []
        child = int(links.retrieve_next_token[0, node])
        while child != -1:
            found.append(child)
            child = int(links.retrieve_next_sibling[0, child])
        assert found == children
        if parents[node] == -2:
            assert int(links.retrieve_next_sibling[0, node]) == -1


@settings(max_examples=150, deadline=None)
@given(tree=trees())
def test_verify_accepts_the_naive_path_and_never_padding(
    tree: tuple[list[int], list[int], list[int]],
) -> None:
    parents, ids, targets = tree
    n = len(parents)
    links = build_tree_links(i64(parents).view(1, n))
    result = verify_tree_greedy(i64(ids).view(1, n), links, i64(targets).view(1, n), n)
    path = naive_path(parents, ids, targets, 0)
    assert result.accept_index[0].tolist() == path + [-1] * (n + 1 - len(path))
    assert int(result.accept_length) == len(path) - 1
    assert all(parents[node] != -2 for node in path)
    expected = [targets[i] if i in path else 0 for i in range(n)]
    assert result.predict.tolist() == expected


def test_random_trees_agree_across_sets(kernels: KernelSet, device: str) -> None:
    parents = torch.tensor(
        [[-1, *(int(torch.randint(0, i, ())) for i in range(1, 9))] for _ in range(33)]
    )
    ids = torch.arange(9).repeat(33, 1)  # distinct, so siblings are too
    targets = torch.randint(0, 9, (33, 9))
    expected = verify_tree_greedy(ids, build_tree_links(parents), targets, 8)
    ours = kernels.verify_tree_greedy(
        ids.to(device), kernels.build_tree_links(parents.to(device)), targets.to(device), 8
    )
    assert ours.accept_index.tolist() == expected.accept_index.tolist()
    assert ours.accept_length.tolist() == expected.accept_length.tolist()
    assert ours.predict.tolist() == expected.predict.tolist()
    assert int(expected.accept_length.max()) > 0
