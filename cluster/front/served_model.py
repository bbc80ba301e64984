"""What a front knows of its model, and what of a request can be told from that alone. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cluster.front.quoting import shown, shown_int
from paceline.worker.errors import InvalidRequest, NotFound


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a front must know of its model."""

    names: tuple[str, ...]
    path: str
    architecture: str
    max_model_len: int  # tokens of prompt and output together
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    num_positions: int = 0  # that the checkpoint has; 0 where that is not known

    def check_name(self, name: str) -> None:
        if name and name not in self.names:
            raise NotFound(
                f"model '{shown(name)}' is not served here; served: {', '.join(self.names)}",
                "model",
            )

    def check_ids(self, name: str, ids: Sequence[int]) -> None:
        """Raises: InvalidRequest: an id is outside the vocabulary."""
        vocab_size = self.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            i = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)
            raise InvalidRequest(
                f"{name}[{i}] is {shown_int(ids[i])}, outside the vocabulary of model "
                f"'{self.names[0]}'; use ids from 0 to {vocab_size - 1}",
                name,
            )

    def check_prompt_len(self, num_tokens: int, name: str, *, at_least: bool = False) -> None:
        if num_tokens == 0:
            raise InvalidRequest(f"{name} is empty; send at least one token", name)
        limit = self.max_model_len - 1
        if num_tokens > limit:
            raise InvalidRequest(
                f"prompt has {'at least ' if at_least else ''}{num_tokens} tokens, model "
                f"'{self.names[0]}' accepts {limit} (its context of "
                f"{self.max_model_len} less one for the answer); {self._way_out()}",
                name,
            )

    def _way_out(self) -> str:
        if self.num_positions > self.max_model_len:
            return (
                f"shorten it, or have the server started with a --max-model-len of up to "
                f"{self.num_positions}"
            )
        reason = ": the model has no more positions" if self.num_positions else ""
        return f"shorten it{reason}"
