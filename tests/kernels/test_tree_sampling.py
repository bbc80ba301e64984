"""Verification by chance: worked walks, edges of the coins, and the distribution of the tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.kernels.api import KernelSet, TreeLinks, VerifyResult
from paceline.kernels.reference.build_tree import build_tree_links
from paceline.kernels.reference.renorm import top_k_renorm
from paceline.kernels.reference.tree_sampling import tree_speculative_sampling_target_only
from paceline.kernels.reference.verify_tree import verify_tree_greedy
from tests.kernels.rows import i32, i64

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "tree_kernels.json").read_text())
TREE = GOLDEN["sampling"]
ALMOST_1 = 1.0 - 2.0**-24


def links_of(parents: list[int], bs: int, device: str) -> TreeLinks:
    links = build_tree_links(i64(parents).expand(bs, -1))
    return TreeLinks(
        links.retrieve_index.to(device),
        links.retrieve_next_token.to(device),
        links.retrieve_next_sibling.to(device),
    )


def sample(
    kernels: KernelSet,
    device: str,
    parents: list[int],
    draft_ids: list[int],
    target_probs: list[list[float]],
    coins: list[list[float]],
    final_coins: list[float],
    max_depth: int,
    **thresholds: float,
) -> VerifyResult:
    """One tree and as many reqs as coins."""
    bs, n = len(coins), len(parents)
    padded = [row + [0.0] * (n - len(row)) for row in coins]
    return kernels.tree_speculative_sampling_target_only(
        i64(draft_ids, device).expand(bs, -1).contiguous(),
        links_of(parents, bs, device),
        torch.tensor(target_probs, device=device).expand(bs, -1, -1).contiguous(),
        torch.tensor(padded, device=device),
        torch.tensor(final_coins, device=device),
        max_depth,
        **thresholds,
    )


@pytest.mark.parametrize("walk", TREE["walks"], ids=lambda walk: walk["note"])
def test_worked_walks(kernels: KernelSet, device: str, walk: dict[str, Any]) -> None:
    single, acc = walk["thresholds"]
    result = sample(
        kernels,
        device,
        TREE["parents"],
        TREE["draft_ids"],
        TREE["target_probs"],
        [walk["coins"]],
        [walk["final"]],
        TREE["max_depth"],
        threshold_single=single,
        threshold_acc=acc,
    )
    path = walk["accept_index"]
    assert result.accept_index.tolist() == [path]
    assert result.accept_length.tolist() == [2 - path.count(-1)]
    assert result.predict.tolist() == walk["predict"]


@pytest.mark.parametrize("thresholds", [(1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_a_token_of_probability_zero_is_never_accepted(
    kernels: KernelSet, device: str, thresholds: tuple[float, float]
) -> None:
    """Not even at coin 0, or where thresholds accept everything: it may be masked by a grammar."""
    single, acc = thresholds
    result = sample(
        kernels,
        device,
        [-1, 0, 0],
        [0, 1, 2],
        [[0.5, 0.0, 0.0, 0.5]] * 3,
        [[0.0], [ALMOST_1]],
        [0.0, ALMOST_1],
        2,
        threshold_single=single,
        threshold_acc=acc,
    )
    assert result.accept_length.tolist() == [0, 0]
    assert result.predict.tolist() == [0, 0, 0, 3, 0, 0]


def test_a_draft_token_of_no_vocabulary_is_refused(kernels: KernelSet, device: str) -> None:
    result = sample(
        kernels, device, [-1, 0, 0, 0], [0, 4, -2, 1], [[0.5, 0.5, 0, 0]] * 4, [[0.4]], [0.0], 3
    )
    assert result.accept_index.tolist() == [[0, 3, -1, -1]]


def test_the_last_token_left_is_drawn_by_a_coin_of_almost_one(
    kernels: KernelSet, device: str
) -> None:
    probs = [[0.3, 0.3, 0.4, 0.0], [0.1, 0.2, 0.7, 0.0]]
    result = sample(kernels, device, [-1, 0], [0, 2], probs, [[0.5]], [ALMOST_1], 1)
    assert result.predict.tolist() == [1, 0]


def test_a_row_whose_mass_was_all_refused_still_gives_a_token_of_it(
    kernels: KernelSet, device: str
) -> None:
    """Rows sum to less than 1 by rounding, and a coin may fall behind them."""
    probs = [[0.0, 0.25, 0.5, 0.0]] * 3
    result = sample(kernels, device, [-1, 0, 0], [0, 1, 2], probs, [[0.9]], [0.5], 1)
    assert result.accept_length.tolist() == [0]
    assert result.predict.tolist() == [2, 0, 0]


@pytest.mark.parametrize("thresholds", [(-0.1, 1.0), (1.1, 1.0), (1.0, float("nan"))])
def test_thresholds_outside_the_unit_interval_are_refused(
    kernels: KernelSet, device: str, thresholds: tuple[float, float]
) -> None:
    with pytest.raises(ValueError, match=r"must be in \[0, 1\]"):
        sample(
            kernels,
            device,
            [-1],
            [0],
            [[1.0]],
            [[0.0]],
            [0.0],
            1,
            threshold_single=thresholds[0],
            threshold_acc=thresholds[1],
        )


def test_a_greedy_req_in_a_sampled_batch_gets_the_argmax(kernels: KernelSet, device: str) -> None:
    logits = torch.randn(2, 4, 8)
    probs = top_k_renorm(logits.softmax(-1).view(8, 8), i32([1] * 4 + [8] * 4)).view(2, 4, 8)
    targets = logits.argmax(-1)
    draft_ids = torch.stack((i64([0]), *(targets[:1, i] for i in range(3))), 1).repeat(2, 1)
    chain = links_of([-1, 0, 1, 2], 2, device)
    greedy = verify_tree_greedy(draft_ids, links_of([-1, 0, 1, 2], 2, "cpu"), targets, 3)
    for coin in (0.0, 0.5, ALMOST_1):
        ours = kernels.tree_speculative_sampling_target_only(
            draft_ids.to(device),
            chain,
            probs.to(device),
            torch.full((2, 4), coin, device=device),
            torch.full((2,), coin, device=device),
            3,
        )
        assert ours.accept_index[0].tolist() == greedy.accept_index[0].tolist() == [0, 1, 2, 3]
        assert ours.predict[:4].tolist() == greedy.predict[:4].tolist()


def test_tokens_are_distributed_as_the_targets() -> None:
    """40 000 walks of the worked tree: the first token, and the second where there is one."""
    bs = 40_000
    generator = torch.Generator().manual_seed(1)
    probs = torch.tensor(TREE["target_probs"])
    result = tree_speculative_sampling_target_only(
        i64(TREE["draft_ids"]).expand(bs, -1),
        links_of(TREE["parents"], bs, "cpu"),
        probs.expand(bs, -1, -1),
        torch.rand(bs, 4, generator=generator),
        torch.rand(bs, generator=generator),
        TREE["max_depth"],
    )
    tokens = result.predict.view(bs, 4)
    first = tokens[:, 0].bincount(minlength=4) / bs
    assert (first - probs[0]).abs().max() < 0.01
    for node in (1, 2):  # tokens 1 and 2 lead to these nodes
        went = (result.accept_index[:, 1] % 4 == node) & (result.accept_length > 0)
        assert torch.equal(went, tokens[:, 0] == node)
        second = tokens[went, node].bincount(minlength=4) / int(went.sum())
        assert (second - probs[node]).abs().max() < 0.02


def test_a_biased_walk_would_be_noticed() -> None:
    bs = 40_000
    probs = torch.tensor(TREE["target_probs"])
    result = tree_speculative_sampling_target_only(
        i64(TREE["draft_ids"]).expand(bs, -1),
        links_of(TREE["parents"], bs, "cpu"),
        probs.expand(bs, -1, -1),
        torch.rand(bs, 4),
        torch.rand(bs),
        TREE["max_depth"],
        threshold_acc=0.9,
    )
    first = result.predict.view(bs, 4)[:, 0].bincount(minlength=4) / bs
    assert (first - probs[0]).abs().max() > 0.02


def naive_walk(
    parents: list[int], ids: list[int], q: Tensor, coins: list[float], final: float, depth: int
) -> tuple[list[int], list[int]]:
    """(path, tokens) by the definition; q [n, V] of exact numbers."""
    path, tokens = [0], []
    while True:
        node = path[-1]
        children = [i for i, parent in enumerate(parents) if parent == node]
        if len(path) > depth:
            children = []
        sums = [
            float(q[node, ids[: child + 1]][[i in children for i in range(child + 1)]].sum())
            for child in children
        ]
        chosen = next(
            (
                c
                for c, acc in zip(children, sums, strict=True)
                if coins[node] < acc and q[node, ids[c]] > 0
            ),
            None,
        )
        if chosen is None:
            left = q[node].clone()
            left[[ids[c] for c in children]] = 0
            wanted = final * float(left.sum())
            hits = (left.cumsum(0) > wanted).nonzero()
            return path, [*tokens, int(hits[0])]
        path.append(chosen)
        tokens.append(ids[chosen])


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[int], Tensor, list[float], float, int]:
    n, vocab_size = draw(st.integers(1, 8)), 6
    parents, ids = [-1], [0]
    for node in range(1, n):
        parents.append(draw(st.integers(0, node - 1)))
        taken = {ids[i] for i in range(1, node) if parents[i] == parents[node]}
        free = [t for t in range(vocab_size) if t not in taken]
        if not free:
            parents[node], free = -2, [0]
        ids.append(draw(st.sampled_from(free)))
    weights = st.lists(st.integers(0, 8), min_size=vocab_size, max_size=vocab_size).filter(any)
    counts = torch.tensor([draw(weights) for _ in range(n)], dtype=torch.float64)
    # Sixty-fourths, the rest of the whole on the last token: every sum is exact.
    counts[:, -1] += 64 - counts.sum(-1)
    coins = [draw(st.integers(0, 127)) / 128 for _ in range(n)]
    return (
        parents,
        ids,
        counts / 64,
        coins,
        draw(st.integers(0, 127)) / 128,
        draw(st.integers(0, n)),
    )


@settings(max_examples=100, deadline=None)
@given(case=cases())
def test_walks_are_those_of_the_definition(
    case: tuple[list[int], list[int], Tensor, list[float], float, int],
) -> None:
    parents, ids, q, coins, final, depth = case
    path, tokens = naive_walk(*case)
    n = len(parents)
    result = tree_speculative_sampling_target_only(
        torch.tensor([ids]),
        build_tree_links(torch.tensor([parents])),
        q.float()[None],
        torch.tensor([coins]),
        torch.tensor([final]),
        depth,
    )
    assert result.accept_index[0].tolist() == path + [-1] * (depth + 1 - len(path))
    assert result.accept_length.tolist() == [len(path) - 1]
    predict = [0] * n
    for node, token in zip(path, tokens, strict=True):
        predict[node] = token
    assert result.predict.tolist() == predict


@pytest.mark.parametrize(("bs", "num_nodes", "vocab_size"), [(1, 1, 5), (7, 6, 33), (3, 5, 5000)])
@pytest.mark.parametrize("thresholds", [(1.0, 1.0), (0.2, 0.5)])
def test_sets_agree_on_random_trees(
    kernels: KernelSet,
    device: str,
    bs: int,
    num_nodes: int,
    vocab_size: int,
    thresholds: tuple[float, float],
) -> None:
    parents = torch.tensor(
        [[-1, *(int(torch.randint(0, i, ())) for i in range(1, num_nodes))] for _ in range(bs)]
    )
    ids = torch.stack([torch.randperm(vocab_size)[:num_nodes] for _ in range(bs)])
    probs = (torch.randn(bs, num_nodes, vocab_size)).softmax(-1)
    # Half of the mass on draft tokens, so that some are accepted.
    on_draft = torch.zeros_like(probs).scatter_(2, ids[:, None].expand(-1, num_nodes, -1), 1.0)
    probs = (probs + on_draft / num_nodes) / 2
    given = (probs, torch.rand(bs, num_nodes), torch.rand(bs, 2)[:, 0])  # coins with strides
    links = build_tree_links(parents)
    expected = tree_speculative_sampling_target_only(ids, links, *given, 3, *thresholds)
    on_device = TreeLinks(
        links.retrieve_index.to(device),
        links.retrieve_next_token.to(device),
        links.retrieve_next_sibling.to(device),
    )
    ours = kernels.tree_speculative_sampling_target_only(
        ids.to(device), on_device, *(x.to(device) for x in given), 3, *thresholds
    )
    assert ours.accept_index.tolist() == expected.accept_index.tolist()
    assert ours.accept_length.tolist() == expected.accept_length.tolist()
    assert ours.predict.tolist() == expected.predict.tolist()


def test_an_empty_batch_is_no_error(kernels: KernelSet, device: str) -> None:
    none = torch.zeros(0, 3, dtype=torch.int64, device=device)
    links = TreeLinks(none, none, none)
    probs = torch.zeros(0, 3, 5, device=device)
    result = kernels.tree_speculative_sampling_target_only(
        none, links, probs, probs[:, :, 0], probs[:, 0, 0], 2
    )
    assert result.accept_index.shape == (0, 3)
    assert result.predict.shape == result.accept_length.shape == (0,)
