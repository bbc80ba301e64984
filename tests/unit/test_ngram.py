"""The n-gram drafter: what it guesses, from which texts, and how much it keeps."""

from paceline.worker.config import SpecConfig
from paceline.worker.spec.drafter import DraftContext
from paceline.worker.spec.ngram import NgramDrafter, NgramLimits
from paceline.worker.spec.tree import DraftTree
from paceline.worker.step import ReqId, SamplingParams

PARAMS = SamplingParams(seed=1, max_tokens=99)
CHAIN = SpecConfig("ngram", num_steps=4, topk=1, num_draft_tokens=5)
TREE = SpecConfig("ngram", num_steps=3, topk=2, num_draft_tokens=8)


def context(
    prompt: list[int], output: list[int] | None = None, *, req: str = "a", room: int = 99
) -> DraftContext:
    return DraftContext(ReqId(req), prompt, output or [], PARAMS, room)


def propose(drafter: NgramDrafter, prompt: list[int], **kw: object) -> DraftTree | None:
    (tree,) = drafter.propose([context(prompt, **kw)])  # type: ignore[arg-type]  # test keywords
    return tree


def test_a_context_never_seen_has_no_guess() -> None:
    assert propose(NgramDrafter(CHAIN), [1, 2, 3, 4, 5]) is None


def test_a_repeat_is_continued_as_it_went_on_before() -> None:
    tree = propose(NgramDrafter(CHAIN), [1, 2, 3, 4, 5, 6, 7, 1, 2, 3])
    assert tree == DraftTree.chain([4, 5, 6, 7])


def test_the_longest_common_past_decides() -> None:
    text = [5, 1, 2, 3, 10, 0, 6, 1, 2, 3, 11, 0, 5, 1, 2, 3]
    tree = propose(NgramDrafter(CHAIN), text)
    assert tree is not None
    assert tree.token_ids[0] == 10


def test_of_equal_pasts_the_more_frequent_continuation_wins() -> None:
    text = [1, 2, 3, 10, 0, 1, 2, 3, 10, 0, 1, 2, 3, 11, 9, 1, 2, 3]
    drafter = NgramDrafter(CHAIN, NgramLimits(max_window=3))
    tree = propose(drafter, text)
    assert tree is not None
    assert tree.token_ids[0] == 10


def test_of_equal_pasts_and_counts_the_later_continuation_wins() -> None:
    tree = propose(NgramDrafter(CHAIN), [0, 1, 2, 3, 10, 0, 1, 2, 3, 11, 0, 1, 2, 3])
    assert tree is not None
    assert tree.token_ids[0] == 11


def test_a_text_that_repeats_itself_runs_on_into_the_guess() -> None:
    tree = propose(NgramDrafter(CHAIN), [9, 1, 2, 1, 2])
    assert tree == DraftTree.chain([1, 2, 1, 2])


def test_a_guess_keeps_to_the_room_the_req_has() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]
    assert propose(NgramDrafter(CHAIN), prompt, room=3) == DraftTree.chain([4, 5])
    assert propose(NgramDrafter(CHAIN), prompt, room=1) is None


def test_a_tree_offers_rival_continuations_the_likelier_first() -> None:
    text = [1, 2, 3, 10, 20, 0, 1, 2, 3, 10, 21, 0, 1, 2, 3, 11, 0, 1, 2, 3]
    tree = propose(NgramDrafter(TREE, NgramLimits(max_window=3)), text)
    assert tree is not None
    assert tree.num_nodes == 8
    children = [t for t, p in zip(tree.token_ids, tree.parents, strict=True) if p == 0]
    assert children == [10, 11]
    below_10 = [t for t, p in zip(tree.token_ids, tree.parents, strict=True) if p == 1]
    assert below_10 == [21, 20]
    assert max(tree.depths()) <= 3


def test_a_tree_is_never_padded() -> None:
    tree = propose(NgramDrafter(TREE), [7, 8, 9, 30, 31, 7, 8, 9], room=50)
    assert tree == DraftTree.chain([30, 31, 7])


def test_a_req_learns_from_what_another_wrote() -> None:
    drafter = NgramDrafter(CHAIN)
    assert propose(drafter, [1, 2, 3, 4, 5, 6, 7], req="a") is None
    assert propose(drafter, [9, 2, 3], req="b") == DraftTree.chain([4, 5, 6, 7])


def test_an_ended_req_goes_on_teaching_until_room_is_needed() -> None:
    drafter = NgramDrafter(CHAIN, NgramLimits(max_tokens=20))
    propose(drafter, [1, 2, 3, 4, 5, 6, 7], req="a")
    drafter.close_reqs([ReqId("a"), ReqId("unknown")])
    assert propose(drafter, [9, 2, 3], req="b") == DraftTree.chain([4, 5, 6, 7])
    propose(drafter, list(range(100, 117)), req="c")
    assert drafter.num_tokens == 20
    assert propose(drafter, [9, 2, 3], req="d") is None


def test_the_least_recently_used_text_is_forgotten_first() -> None:
    drafter = NgramDrafter(CHAIN, NgramLimits(max_tokens=20))
    propose(drafter, [1, 2, 3, 4], req="a")
    propose(drafter, [11, 12, 13, 14], req="b")
    drafter.close_reqs([ReqId("a"), ReqId("b")])
    assert propose(drafter, [1, 2], req="c") is not None  # uses a
    propose(drafter, list(range(100, 112)), req="d")  # takes the room of b
    assert propose(drafter, [12], req="e") is None
    assert propose(drafter, [2], req="f") is not None


def test_running_reqs_never_outgrow_the_limit() -> None:
    drafter = NgramDrafter(CHAIN, NgramLimits(max_tokens=100))
    output: list[int] = []
    for i in range(300):
        output.append(i % 37)
        drafter.propose([context([1, 2], output, req=req) for req in ("a", "b")])
        assert drafter.num_tokens <= 100
    assert propose(drafter, [1, 2], output=output) is not None


def test_a_long_prompt_is_indexed_over_several_steps() -> None:
    drafter = NgramDrafter(CHAIN, NgramLimits(max_indexed_per_call=50))
    prompt = [*range(1000, 1120), 1060, 1061, 1062]
    assert propose(drafter, prompt) is None
    assert drafter.num_tokens == 50
    assert propose(drafter, prompt) == DraftTree.chain([1063, 1064, 1065, 1066])


def test_a_req_that_comes_back_shorter_begins_anew() -> None:
    drafter = NgramDrafter(CHAIN)
    propose(drafter, [1, 2, 3, 4, 5, 6])
    assert propose(drafter, [8, 2, 3]) == DraftTree.chain([4, 5, 6])


def test_nothing_is_left_after_shutdown() -> None:
    drafter = NgramDrafter(CHAIN)
    propose(drafter, [1, 2, 3, 4, 5, 6], req="a")
    drafter.shutdown()
    assert drafter.num_tokens == 0
    assert propose(drafter, [9, 2, 3], req="b") is None
