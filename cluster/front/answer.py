"""The text of one answer as its tokens arrive. Pure: no clock, no network."""

from dataclasses import dataclass

from paceline.cluster.front.detokenize import Detokenizer
from paceline.cluster.front.stops import StopChecker
from paceline.protos.v1 import common_pb2
from paceline.worker.step import FinishReason


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens, and the text that may be sent now: either can be empty."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Complete:
    """The end of an answer."""

    output_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    matched_token_id: int | None
    matched_stop: str | None
    receipt: common_pb2.Receipt


class Answer:
    """Takes token by token, so that a run of several stops where single tokens would have."""

    def __init__(
        self, detokenizer: Detokenizer, stops: StopChecker, *, min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._has_no_stops = stops.is_empty
        self._min_tokens = min_tokens
        self._pieces: list[str] = []
        self.output_ids: list[int] = []

    @property
    def matched_stop(self) -> str | None:
        return self._stops.matched

    @property
    def text(self) -> str:
        """All that may be sent so far."""
        return "".join(self._pieces)

    def push(self, token_ids: list[int]) -> Chunk:
        """Stops at the token that completes a stop string; those behind it are dropped."""
        if self._has_no_stops:
            self.output_ids += token_ids
            return self._chunk(tuple(token_ids), [*map(self._detokenizer.push, token_ids)])
        pieces = []
        num_used = 0
        for token_id in token_ids:
            num_used += 1
            self.output_ids.append(token_id)
            is_active = len(self.output_ids) > self._min_tokens
            piece = self._detokenizer.push(token_id)
            pieces.append(self._stops.push(piece, is_active=is_active))
            if self._stops.matched is not None:
                break
        return self._chunk(tuple(token_ids[:num_used]), pieces)

    def finish(self) -> Chunk:
        """What was held back, once no token follows."""
        if self._stops.matched is not None:
            return Chunk((), "")
        pieces = [self._stops.push(self._detokenizer.finish())]
        if self._stops.matched is None:
            pieces.append(self._stops.finish())
        return self._chunk((), pieces)

    def _chunk(self, token_ids: tuple[int, ...], pieces: list[str]) -> Chunk:
        text = "".join(pieces)
        if text:
            self._pieces.append(text)
        return Chunk(token_ids, text)
