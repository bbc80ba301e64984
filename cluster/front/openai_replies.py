"""Answers in OpenAI's shapes, whole and as chunks of a stream. Pure."""

from dataclasses import dataclass
from typing import Any

from paceline.cluster.front.answer import Complete
from paceline.protos.v1 import common_pb2

Json = dict[str, Any]  # Any: JSON


@dataclass(frozen=True, slots=True)
class ReplyShape:
    """What every object of one answer repeats."""

    req_id: str
    model: str
    created: int  # seconds since the Unix epoch
    is_chat: bool

    @property
    def id(self) -> str:
        return f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.req_id}"

    def whole(self, complete: Complete) -> Json:
        choice: Json = {"index": 0, "logprobs": None, "finish_reason": finish_reason(complete)}
        if self.is_chat:
            choice["message"] = {"role": "assistant", "content": complete.text}
        else:
            choice["text"] = complete.text
        return self._object(
            "chat.completion" if self.is_chat else "text_completion",
            choices=[choice],
            usage=usage(complete.receipt),
            paceline=receipt_json(complete.receipt),
        )

    def first(self) -> Json | None:
        """A chat's first chunk says who speaks; a completion has none."""
        if not self.is_chat:
            return None
        return self._chunk({"delta": {"role": "assistant", "content": ""}}, None)

    def text(self, text: str) -> Json:
        return self._chunk({"delta": {"content": text}} if self.is_chat else {"text": text}, None)

    def last(self, complete: Complete) -> Json:
        content: Json = {"delta": {}} if self.is_chat else {"text": ""}
        chunk = self._chunk(content, finish_reason(complete))
        return chunk | {"paceline": receipt_json(complete.receipt)}

    def usage(self, complete: Complete) -> Json:
        return self._object(self._chunk_name, choices=[], usage=usage(complete.receipt))

    @property
    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _chunk(self, content: Json, reason: str | None) -> Json:
        choice = {"index": 0, "logprobs": None, "finish_reason": reason} | content
        return self._object(self._chunk_name, choices=[choice])

    def _object(self, name: str, **rest: Any) -> Json:
        head = {"id": self.id, "object": name, "created": self.created, "model": self.model}
        return head | rest


def finish_reason(complete: Complete) -> str:
    return complete.finish_reason.name.lower()


def usage(receipt: common_pb2.Receipt) -> Json:
    """OpenAI's two fields for predicted outputs carry the draft's tokens."""
    return {
        "prompt_tokens": receipt.prompt_tokens,
        "completion_tokens": receipt.completion_tokens,
        "total_tokens": receipt.prompt_tokens + receipt.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": receipt.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": receipt.accepted_tokens,
            "rejected_prediction_tokens": receipt.proposed_tokens - receipt.accepted_tokens,
        },
    }


def receipt_json(receipt: common_pb2.Receipt) -> Json:
    """What the request cost and gained, beyond OpenAI's usage."""
    return {
        "num_steps": receipt.num_steps,
        "fallback_steps": receipt.fallback_steps,
        "queue_s": receipt.queue_s,
        "time_to_first_token_s": receipt.time_to_first_token_s,
        "total_s": receipt.total_s,
        "seed": receipt.seed,
        "group_id": receipt.group_id,
        "num_preemptions": receipt.num_preemptions,
        "is_simulated": receipt.is_simulated,
    }
