"""The cluster's dataclasses and their protobuf messages; the only module that knows both.

Fronts, controller and leaders speak through it, so that a parameter has one spelling on the wire.
What a user may leave out is resolved by the front: an internal message always carries every field.
"""

from dataclasses import asdict, fields
from typing import Any

from paceline.cluster.group.req_state import ReqReceipt
from paceline.cluster.scheduling.dispatch import GroupLoad
from paceline.protos.v1 import common_pb2, controller_pb2
from paceline.worker.errors import Unavailable
from paceline.worker.spec.drafter import DraftHealth
from paceline.worker.step import FinishReason, ReqId, SamplingParams

_FINISH_TO_PB = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT,
}
_FINISH_FROM_PB = {number: reason for reason, number in _FINISH_TO_PB.items()}


def finish_reason_to_pb(reason: FinishReason) -> "common_pb2.FinishReason.ValueType":
    return _FINISH_TO_PB[reason]


def finish_reason_from_pb(number: int) -> FinishReason | None:
    """None for UNSPECIFIED: the stream goes on."""
    return _FINISH_FROM_PB.get(common_pb2.FinishReason.ValueType(number))


def sampling_params_to_pb(params: SamplingParams) -> common_pb2.SamplingParams:
    """The group's share of the parameters; stop strings stay at the front."""
    return common_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        seed=params.seed,
        logit_bias=dict(params.logit_bias),
    )


def sampling_params_from_pb(message: common_pb2.SamplingParams) -> SamplingParams:
    """The inverse, for a message whose seed and max_tokens are resolved.

    Raises: ValueError: seed or max_tokens is absent, so the sender was not a front.
    """
    if not message.HasField("seed") or not message.HasField("max_tokens"):
        raise ValueError("sampling_params without seed or max_tokens; a front resolves both")
    defaults = SamplingParams(seed=message.seed, max_tokens=message.max_tokens)

    def pick(name: Any) -> Any:  # Any: fields of several types, by name
        return getattr(message if message.HasField(name) else defaults, name)

    return SamplingParams(
        seed=message.seed,
        max_tokens=message.max_tokens,
        temperature=pick("temperature"),
        top_p=pick("top_p"),
        top_k=max(0, pick("top_k")),  # -1 keeps all, as 0 does
        min_p=pick("min_p"),
        frequency_penalty=pick("frequency_penalty"),
        presence_penalty=pick("presence_penalty"),
        repetition_penalty=pick("repetition_penalty"),
        min_tokens=pick("min_tokens"),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=pick("ignore_eos"),
        logit_bias=tuple(sorted(message.logit_bias.items())),
    )


def receipt_to_pb(receipt: ReqReceipt, *, group_id: str) -> common_pb2.Receipt:
    """A group's share of the receipt; the front adds what only it can measure."""
    return common_pb2.Receipt(
        prompt_tokens=receipt.prompt_tokens,
        completion_tokens=receipt.completion_tokens,
        cached_tokens=receipt.cached_tokens,
        proposed_tokens=receipt.proposed_tokens,
        accepted_tokens=receipt.accepted_tokens,
        num_steps=receipt.num_steps,
        fallback_steps=receipt.fallback_steps,
        time_to_first_token_s=receipt.time_to_first_token_s,
        total_s=receipt.total_s,
        seed=receipt.seed,
        group_id=group_id,
        num_preemptions=receipt.num_preemptions,
    )


def draft_health_to_pb(health: DraftHealth | None) -> common_pb2.DraftHealth | None:
    return None if health is None else common_pb2.DraftHealth(**asdict(health))


def draft_health_from_pb(message: common_pb2.DraftHealth) -> DraftHealth:
    return DraftHealth(**{f.name: getattr(message, f.name) for f in fields(DraftHealth)})


def load_to_pb(load: GroupLoad) -> controller_pb2.ReportRequest:
    return controller_pb2.ReportRequest(
        group_id=load.group_id,
        address=load.address,
        page_size=load.page_size,
        num_pages=load.num_pages,
        num_free_pages=max(load.num_free_pages, 0),
        num_running_reqs=load.num_running_reqs,
        num_waiting_reqs=load.num_waiting_reqs,
        max_num_reqs=load.max_num_reqs,
        num_pending_prefill_tokens=load.num_pending_prefill_tokens,
        step_id=load.step_id,
        draining=load.draining,
        epoch=load.epoch,
        req_ids=load.req_ids,
        draft=draft_health_to_pb(load.draft),
    )


def load_from_pb(request: controller_pb2.ReportRequest) -> GroupLoad:
    """Raises: Unavailable: a report that cannot be a leader's."""
    if request.page_size < 1:
        raise Unavailable(f"report of '{request.group_id}' has page_size {request.page_size}")
    return GroupLoad(
        group_id=request.group_id,
        page_size=request.page_size,
        num_pages=request.num_pages,
        num_free_pages=request.num_free_pages,
        num_running_reqs=request.num_running_reqs,
        num_waiting_reqs=request.num_waiting_reqs,
        max_num_reqs=request.max_num_reqs,
        num_pending_prefill_tokens=request.num_pending_prefill_tokens,
        draining=request.draining,
        address=request.address,
        step_id=request.step_id,
        epoch=request.epoch,
        req_ids=tuple(ReqId(req_id) for req_id in request.req_ids),
        draft=draft_health_from_pb(request.draft) if request.HasField("draft") else None,
    )
