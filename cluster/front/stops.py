"""Stop strings over a growing text: what may be sent, what must wait, where it ends."""

from collections.abc import Sequence


class StopChecker:
    """Finds the stop string that completes first, however the text is cut into pieces.

    Of two that complete at the same character, the longer one counts. Text that may yet grow
    into a stop string is held back.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    @property
    def is_empty(self) -> bool:
        """No text is ever held or matched."""
        return not self._stops

    def push(self, piece: str, *, is_active: bool = True) -> str:
        """The text that may be sent now; sets `matched` when a stop string is complete.

        While not active, a stop string that completes is ordinary text.
        """
        if not self._stops or not piece:
            return piece
        text = self._held + piece
        if is_active:
            end, stop = self._first_match(text, len(self._held))
            if stop is not None:
                self.matched = stop
                self._held = ""
                return text[: end if self._include_stop else end - len(stop)]
        num_held = self._open_len(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str, old_len: int) -> tuple[int, str | None]:
        """The match with the least end behind `old_len`; a match inside the old text was let go."""
        best_end, best = len(text) + 1, None
        for stop in self._stops:  # longest first: it wins at an equal end
            start = text.find(stop, max(0, old_len - len(stop) + 1))
            if start >= 0 and start + len(stop) < best_end:
                best_end, best = start + len(stop), stop
        return best_end, best

    def _open_len(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(text), len(stop) - 1), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
