"""NgramDrafter: guesses that what followed the last words before follows them again. No model.

The texts of all reqs, running and lately ended, are kept up to a number of tokens, and an index
finds the places where the last few tokens of a text occurred. The places vote for what comes
next, those with a longer common past with more weight. A corpus, where there is one, votes as well,
together as much as one place of its common past. Pure host values; the leader alone drafts, so
ranks need not agree.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from paceline.worker.config import SpecConfig
from paceline.worker.spec.drafter import DraftContext, Drafter
from paceline.worker.spec.ngram_corpus import Corpus
from paceline.worker.spec.tree import DraftTree
from paceline.worker.step import ReqId


@dataclass(frozen=True, slots=True)
class NgramLimits:
    """How far the drafter looks, and how much it keeps.

    A token of kept text costs about 0.25 KB with its keys.
    """

    max_window: int = 12  # a common past counts up to this many tokens
    key_lens: tuple[int, ...] = (3, 1)  # tokens of a key; the longest known key is followed
    max_places: int = 8  # latest places kept per key
    max_tokens: int = 131_072  # of kept text
    max_indexed_per_call: int = 2_048  # of one req, so that a long prompt stalls no step
    min_corpus_past: int = 3  # with a corpus: a large one has any two tokens, which says little


class NgramDrafter(Drafter):
    """Chains where `spec.topk` is 1, otherwise trees of up to `topk` children per node.

    A tree has only nodes that some text supports: it is smaller than asked for, or None, rather
    than padded.
    """

    def __init__(
        self, spec: SpecConfig, limits: NgramLimits = NgramLimits(), corpus: Corpus | None = None
    ) -> None:
        """`corpus` is only read, never evicted and not counted in the limits."""
        self._spec = spec
        self._limits = limits
        self._corpus = corpus
        self._open: dict[ReqId, _Text] = {}
        self._ended: OrderedDict[int, _Text] = OrderedDict()  # the least recently used first
        self._places: dict[tuple[int, ...], list[_Place]] = {}
        self._serials = count()
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of indexed text without the corpus, never more than the limit."""
        return self._num_tokens

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        return [self._propose_one(context) for context in contexts]

    def _propose_one(self, context: DraftContext) -> DraftTree | None:
        text = self._follow(context)
        num_nodes = min(context.max_draft_tokens, self._spec.num_draft_tokens)
        if num_nodes < 2:
            return None
        votes = self._find(text)
        votes += self._find_in_corpus(text, votes)
        return (
            _grow(votes, text, num_nodes, self._spec.num_steps, self._spec.topk) if votes else None
        )

    def close_reqs(self, req_ids: Iterable[ReqId]) -> None:
        """Their texts stay, for others, until room is needed."""
        for req_id in req_ids:
            text = self._open.pop(req_id, None)
            if text is not None and text.num_indexed:
                self._ended[text.serial] = text

    def shutdown(self) -> None:
        self._open.clear()
        self._ended.clear()
        self._places.clear()
        self._num_tokens = 0
        self._corpus = None

    # ---- texts and their index

    def _follow(self, context: DraftContext) -> "_Text":
        """The req's text, brought up to its committed tokens."""
        text = self._open.get(context.req_id)
        if text is None or len(text.token_ids) > context.commit_len:
            self.close_reqs((context.req_id,))
            text = self._open[context.req_id] = _Text(next(self._serials))
        ids = text.token_ids
        num_prompt = len(context.prompt_ids)
        if len(ids) < num_prompt:
            ids += context.prompt_ids[len(ids) :]
        ids += context.output_ids[len(ids) - num_prompt :]
        self._index(text)
        return text

    def _index(self, text: "_Text") -> None:
        """Adds the places whose next token has become known."""
        start = text.num_indexed
        num_new = min(len(text.token_ids) - start, self._limits.max_indexed_per_call)
        num_new = min(num_new, self._make_room(num_new))
        places, max_places = self._places, self._limits.max_places
        for position in range(max(start, 1), start + num_new):
            place = _Place(text, position)
            for key in self._keys(text.token_ids, position):
                known = places.get(key)
                if known is None:
                    places[key] = [place]
                elif len(known) < max_places:
                    known.append(place)
                else:
                    del known[0]
                    known.append(place)
        text.num_indexed = start + num_new
        self._num_tokens += num_new

    def _make_room(self, num_wanted: int) -> int:
        """Forgets ended texts until `num_wanted` tokens fit; returns how many do."""
        while self._ended and self._num_tokens + num_wanted > self._limits.max_tokens:
            _, text = self._ended.popitem(last=False)
            self._forget(text)
        return self._limits.max_tokens - self._num_tokens

    def _forget(self, text: "_Text") -> None:
        for position in range(1, text.num_indexed):
            for key in self._keys(text.token_ids, position):
                known = self._places.get(key)
                if known is not None:
                    known[:] = [place for place in known if place.text is not text]
                    if not known:
                        del self._places[key]
        self._num_tokens -= text.num_indexed

    def _keys(self, token_ids: list[int], position: int) -> list[tuple[int, ...]]:
        """The last tokens before `position`, longest first."""
        return [
            tuple(token_ids[position - length : position])
            for length in self._limits.key_lens
            if length <= position
        ]

    def _find(self, text: "_Text") -> list["_Vote"]:
        """The places where the text's last tokens stood before."""
        ids = text.token_ids
        for key in self._keys(ids, len(ids)):
            known = self._places.get(key)
            if known is None:
                continue
            votes = []
            for rank, place in enumerate(known):
                length = _common_past(ids, place, len(key), self._limits.max_window)
                votes.append(_Vote(place, _weight(length, rank)))
                if place.text.serial in self._ended:
                    self._ended.move_to_end(place.text.serial)
            return votes
        return []

    def _find_in_corpus(self, text: "_Text", votes: list["_Vote"]) -> list["_Vote"]:
        """The corpus's places of the longest common past.

        Together they weigh as much as one place of a text, so that of equal pasts that of a req is
        followed, however often the corpus goes on in another way.
        """
        max_window = self._limits.max_window
        if self._corpus is None or any(vote.weight >= _weight(max_window, 0) for vote in votes):
            return []  # no common past counts more than that of the votes
        found = self._corpus.find(
            text.token_ids,
            min_len=self._limits.min_corpus_past,
            max_places=self._limits.max_places,
            max_next=self._spec.num_steps,
        )
        weight = _weight(min(found.past_len, max_window), 0) / max(len(found.next_ids), 1)
        return [_Vote(_Place(_Text(-1, next_ids), 0), weight) for next_ids in found.next_ids]


@dataclass(slots=True, eq=False)
class _Text:
    serial: int
    token_ids: list[int] = field(default_factory=list)
    num_indexed: int = 0  # positions whose keys are in the index


class _Place(NamedTuple):
    """In front of `text.token_ids[position]`."""

    text: _Text
    position: int


class _Vote(NamedTuple):
    place: _Place
    weight: float


def _common_past(ids: list[int], place: _Place, known: int, most: int) -> int:
    """How many tokens before the place equal the last of `ids`; `known` of them do."""
    source, position = place.text.token_ids, place.position
    most = min(most, position, len(ids))
    length = known
    while length < most and source[position - 1 - length] == ids[-1 - length]:
        length += 1
    return length


def _weight(length: int, rank: int) -> float:
    return 4.0**length * (1 + rank / 16)


def _grow(votes: list[_Vote], text: _Text, num_nodes: int, num_steps: int, topk: int) -> DraftTree:
    """The likeliest `num_nodes` nodes: a node's share is its part of the weight at its parent,
    times its parent's share. Ties go to the node that was offered first."""
    token_ids: list[int] = []
    parents: list[int] = []
    order = count()
    heap: list[tuple[float, int, int, tuple[int, ...], list[_Vote]]] = []

    def offer(parent: int, path: tuple[int, ...], share: float, voters: list[_Vote]) -> None:
        """Puts the children of a node up for choice."""
        by_token: dict[int, list[_Vote]] = {}
        for vote in voters:
            token_id = _next_token(vote.place, text, path)
            if token_id is not None:
                by_token.setdefault(token_id, []).append(vote)
        weights = {token_id: sum(v.weight for v in same) for token_id, same in by_token.items()}
        total = sum(weights.values())
        for token_id in sorted(weights, key=lambda t: -weights[t])[:topk]:
            child_share = share * weights[token_id] / total
            entry = (-child_share, next(order), parent, (*path, token_id), by_token[token_id])
            heapq.heappush(heap, entry)

    offer(0, (), 1.0, votes)
    while heap and len(token_ids) < num_nodes - 1:
        share, _, parent, path, voters = heapq.heappop(heap)
        token_ids.append(path[-1])
        parents.append(parent)
        if len(path) < num_steps:
            offer(len(token_ids), path, -share, voters)
    return DraftTree(tuple(token_ids), tuple(parents))


def _next_token(place: _Place, text: _Text, path: tuple[int, ...]) -> int | None:
    """What follows at the place after `path`; a text that repeats itself runs on into the path."""
    source, position = place.text.token_ids, place.position + len(path)
    if position < len(source):
        return source[position]
    return path[position - len(source)] if place.text is text else None
