"""The corpus of the n-gram drafter: what is found in it, and when it is followed."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.worker.config import SpecConfig
from paceline.worker.spec.drafter import DraftContext
from paceline.worker.spec.ngram import NgramDrafter, NgramLimits
from paceline.worker.spec.ngram_corpus import Corpus
from paceline.worker.spec.tree import DraftTree
from paceline.worker.step import ReqId, SamplingParams

PARAMS = SamplingParams(seed=1, max_tokens=99)
CHAIN = SpecConfig("ngram", num_steps=4, topk=1, num_draft_tokens=5)
TREE = SpecConfig("ngram", num_steps=3, topk=2, num_draft_tokens=8)
CORPUS = Corpus([[50, 51, 52, 53, 54, 55, 56, 57], [60, 61, 62, 63]])


def propose(
    drafter: NgramDrafter, prompt: list[int], *, req: str = "a", room: int = 99
) -> DraftTree | None:
    (tree,) = drafter.propose([DraftContext(ReqId(req), prompt, [], PARAMS, room)])
    return tree


# ---- what is found


def common_len(ids: Sequence[int], text: Sequence[int], position: int, window: int) -> int:
    length = 0
    while (
        length < min(window, position, len(ids)) and text[position - 1 - length] == ids[-1 - length]
    ):
        length += 1
    return length


@given(
    texts=st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=4),
    ids=st.lists(st.integers(0, 3), max_size=20),
    window=st.integers(1, 13),
    min_len=st.integers(1, 4),
)
def test_what_is_found_is_every_place_of_the_longest_common_past(
    texts: list[list[int]], ids: list[int], window: int, min_len: int
) -> None:
    places = [
        (common_len(ids, text, position, window), text[position : position + 4])
        for text in texts
        for position in range(1, len(text))
    ]
    longest = max((length for length, _ in places), default=0)
    wanted = [following for length, following in places if length == longest >= min_len]
    found = Corpus(texts, window).find(ids, min_len=min_len, max_places=999, max_next=4)
    assert found.past_len == longest
    assert sorted(found.next_ids) == sorted(wanted)


def test_of_many_places_some_of_all_kinds_are_taken() -> None:
    texts = [[i, 1, 2, 3, 10 if i % 2 else 11] for i in range(100, 200)]
    texts.sort(key=lambda text: text[-1])
    found = Corpus(texts).find([1, 2, 3], min_len=3, max_places=8, max_next=1)
    assert len(found.next_ids) == 8
    assert {10, 11} == {next_id for (next_id,) in found.next_ids}


def test_ids_of_several_bytes_are_sorted_as_numbers() -> None:
    texts = [[high + low, 7, 8, high + low + 1] for high in (0, 1 << 8, 1 << 16) for low in (1, 9)]
    corpus = Corpus(texts)
    for text in texts:
        found = corpus.find(text[:3], min_len=3, max_places=8, max_next=4)
        assert found == (3, [[text[3]]])


def test_texts_count_their_tokens_alone() -> None:
    assert CORPUS.num_tokens == 12
    assert Corpus([]).num_tokens == 0


# ---- when it is followed


def test_the_first_req_is_guessed_from_the_corpus() -> None:
    drafter = NgramDrafter(CHAIN, corpus=CORPUS)
    assert propose(drafter, [1, 50, 51, 52]) == DraftTree.chain([53, 54, 55, 56])
    assert propose(NgramDrafter(CHAIN), [1, 50, 51, 52]) is None


def test_a_guess_ends_with_its_text() -> None:
    drafter = NgramDrafter(CHAIN, corpus=CORPUS)
    assert propose(drafter, [54, 55, 56]) == DraftTree.chain([57])
    assert propose(drafter, [55, 56, 57], req="b") is None
    assert propose(drafter, [56, 57, 60, 61], req="c") is None


def test_a_guess_from_the_corpus_keeps_to_the_room_the_req_has() -> None:
    drafter = NgramDrafter(CHAIN, corpus=CORPUS)
    assert propose(drafter, [50, 51, 52], room=3) == DraftTree.chain([53, 54])
    assert propose(drafter, [50, 51, 52], room=1) is None


def test_a_context_the_corpus_does_not_have_has_no_guess() -> None:
    drafter = NgramDrafter(TREE, corpus=CORPUS)
    assert propose(drafter, [1, 2, 3]) is None
    assert propose(drafter, [9, 51, 52], req="b") is None  # two tokens say too little


@pytest.mark.parametrize("spec", [CHAIN, TREE])
def test_the_corpus_is_followed_where_its_common_past_is_longer(spec: SpecConfig) -> None:
    drafter = NgramDrafter(spec, corpus=Corpus([[4, 5, 6, 7, 100, 101]]))
    tree = propose(drafter, [5, 6, 7, 20, 21, 4, 5, 6, 7])
    assert tree is not None
    assert tree.token_ids[0] == 100


@pytest.mark.parametrize("spec", [CHAIN, TREE])
@pytest.mark.parametrize("num_copies", [1, 7, 50])
def test_a_reqs_text_is_followed_where_its_common_past_is_as_long(
    spec: SpecConfig, num_copies: int
) -> None:
    drafter = NgramDrafter(spec, corpus=Corpus([[5, 6, 7, 100, 101]] * num_copies))
    tree = propose(drafter, [9, 5, 6, 7, 20, 21, 8, 5, 6, 7])
    assert tree is not None
    assert tree.token_ids[0] == 20


def test_a_reqs_text_of_the_whole_window_asks_no_corpus() -> None:
    past = list(range(10, 22))
    drafter = NgramDrafter(TREE, corpus=Corpus([[*past, 100]]))
    tree = propose(drafter, [*past, 30, 31, 32, *past])
    assert tree == DraftTree.chain([30, 31, 32])


def test_a_tree_has_the_rivals_of_the_corpus_and_no_padding() -> None:
    drafter = NgramDrafter(TREE, corpus=Corpus([[5, 6, 7, 100], [5, 6, 7, 100], [5, 6, 7, 200]]))
    assert propose(drafter, [5, 6, 7]) == DraftTree((100, 200), (0, 0))


def test_a_corpus_is_never_evicted_and_takes_no_room_of_texts() -> None:
    drafter = NgramDrafter(CHAIN, NgramLimits(max_tokens=20), CORPUS)
    for i in range(20):
        propose(drafter, [300 + 20 * i + j for j in range(20)], req=str(i))
        drafter.close_reqs([ReqId(str(i))])
        assert drafter.num_tokens <= 20
    assert propose(drafter, [50, 51, 52]) == DraftTree.chain([53, 54, 55, 56])


def test_drafters_share_a_corpus_and_one_that_ended_has_none() -> None:
    first, second = (NgramDrafter(CHAIN, corpus=CORPUS) for _ in range(2))
    first.shutdown()
    assert propose(first, [50, 51, 52]) is None
    assert propose(second, [50, 51, 52]) is not None
