"""The cluster's dataclasses survive their messages."""

import dataclasses

import pytest

from paceline.cluster.group.req_state import ReqReceipt
from paceline.cluster.scheduling.dispatch import GroupLoad
from paceline.cluster.wire import (
    finish_reason_from_pb,
    finish_reason_to_pb,
    load_from_pb,
    load_to_pb,
    receipt_to_pb,
    sampling_params_from_pb,
    sampling_params_to_pb,
)
from paceline.protos.v1 import common_pb2, controller_pb2
from paceline.worker.errors import Unavailable
from paceline.worker.spec.drafter import DraftHealth
from paceline.worker.step import FinishReason, ReqId, SamplingParams

LOAD = GroupLoad(
    group_id="target-0",
    page_size=16,
    num_pages=9,
    num_free_pages=8,
    num_running_reqs=7,
    num_waiting_reqs=6,
    max_num_reqs=5,
    num_pending_prefill_tokens=4,
    draining=True,
    address="127.0.0.1:1",
    step_id=3,
    epoch=2,
    req_ids=(ReqId("a"), ReqId("b")),
    draft=DraftHealth(True, "no", 9, 8, 7, 6, 0.5),
)


def test_a_load_report_arrives_as_it_was_sent() -> None:
    assert load_from_pb(load_to_pb(LOAD)) == LOAD
    without = dataclasses.replace(LOAD, draft=None)
    assert load_from_pb(load_to_pb(without)) == without


def test_a_report_without_a_page_size_is_refused() -> None:
    with pytest.raises(Unavailable, match="page_size 0"):
        load_from_pb(controller_pb2.ReportRequest(group_id="target-0"))


def test_sampling_params_arrive_as_they_were_sent() -> None:
    params = SamplingParams(
        seed=2**64 - 1,
        max_tokens=9,
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        frequency_penalty=-1.0,
        presence_penalty=1.5,
        repetition_penalty=1.25,
        min_tokens=2,
        stop_token_ids=(4, 5),
        ignore_eos=True,
        logit_bias=((6, -2.0), (7, 8.0)),
    )
    changed = [f.name for f in dataclasses.fields(params) if getattr(params, f.name) != f.default]
    assert len(changed) == len(dataclasses.fields(params)), "a field at its default proves nothing"
    assert sampling_params_from_pb(sampling_params_to_pb(params)) == params


@pytest.mark.parametrize("missing", ["seed", "max_tokens"])
def test_params_that_no_front_resolved_are_refused(missing: str) -> None:
    message = common_pb2.SamplingParams(seed=1, max_tokens=1)
    message.ClearField(missing)  # type: ignore[arg-type]  # one of two fields
    with pytest.raises(ValueError, match="a front resolves both"):
        sampling_params_from_pb(message)


@pytest.mark.parametrize("reason", FinishReason)
def test_every_finish_reason_has_its_message(reason: FinishReason) -> None:
    assert finish_reason_from_pb(finish_reason_to_pb(reason)) is reason
    assert finish_reason_from_pb(common_pb2.FINISH_REASON_UNSPECIFIED) is None


def test_every_field_of_a_groups_receipt_is_sent() -> None:
    names = [f.name for f in dataclasses.fields(ReqReceipt)]
    receipt = ReqReceipt(**{name: i for i, name in enumerate(names, 1)})
    message = receipt_to_pb(receipt, group_id="target-0")
    assert [getattr(message, name) for name in names] == list(range(1, len(names) + 1))
    assert message.group_id == "target-0"
