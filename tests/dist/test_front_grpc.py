"""The front's gRPC face, through a real server: answers, limits, cancellation, health."""

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from paceline.cluster.client import PacelineClient
from paceline.cluster.front.errors import Cancelled
from paceline.cluster.front.sampling import seed_of
from paceline.cluster.front.text import TextCodec
from paceline.protos.v1 import admin_pb2, common_pb2, generation_pb2
from paceline.protos.v1.admin_pb2_grpc import AdminServiceStub
from paceline.worker.errors import DeadlineExceeded, InternalError, Overloaded, Unavailable
from tests.dist.conftest import Front
from tests.fake_cluster import DEADLINE_ERROR, FakeLeader, poll

GENERATION = "paceline.v1.GenerationService"


def ask(
    text: str = "hello", *, request_id: str = "", stream: bool = True, **sampling: Any
) -> generation_pb2.GenerateRequest:
    sampling.setdefault("max_tokens", 8)
    return generation_pb2.GenerateRequest(
        request_id=request_id,
        text=text,
        stream=stream,
        sampling_params=common_pb2.SamplingParams(**sampling),
    )


async def collect(call: Any) -> tuple[list[Any], generation_pb2.GenerateComplete]:
    """(chunks, complete) of one answer."""
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    chunks = [r.chunk for r in responses if r.HasField("chunk")]
    assert [r.HasField("complete") for r in responses] == [False] * len(chunks) + [True]
    return chunks, responses[-1].complete


async def _read_all(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def refusal(awaitable: Any) -> tuple[grpc.StatusCode, str, dict[str, Any]]:
    """(code, message, details by name) of a call that must fail."""
    end = _read_all(awaitable) if hasattr(awaitable, "read") else awaitable
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await end
    error = caught.value
    found: dict[str, Any] = {}
    for key, value in error.trailing_metadata():
        if key == "grpc-status-details-bin":
            assert len(value) <= 4096
            status = status_pb2.Status.FromString(value)
            assert status.code == error.code().value[0]
            for detail in status.details:
                for kind in (
                    error_details_pb2.ErrorInfo,
                    error_details_pb2.BadRequest,
                    error_details_pb2.RetryInfo,
                ):
                    if detail.Is(kind.DESCRIPTOR):
                        found[kind.DESCRIPTOR.name] = kind.FromString(detail.value)
    assert "Traceback" not in (error.details() or "")
    return error.code(), error.details() or "", found


async def test_chunks_join_to_the_complete_answer(front: Front) -> None:
    front.leader.script.per_step = 3
    chunks, complete = await collect(front.stub.Generate(ask("hello", request_id="a1")))
    assert complete.text == "hellohel" == "".join(c.text for c in chunks)
    assert list(complete.output_ids) == [i for c in chunks for i in c.token_ids]
    assert complete.finish_reason == common_pb2.FINISH_REASON_LENGTH
    receipt = complete.receipt
    assert (receipt.prompt_tokens, receipt.completion_tokens, receipt.cached_tokens) == (5, 8, 3)
    assert (receipt.proposed_tokens, receipt.accepted_tokens) == (8, 5)
    assert receipt.group_id == "target-0"
    assert receipt.queue_s == 0.25
    assert 0 < receipt.time_to_first_token_s <= receipt.total_s


async def test_without_stream_only_the_complete_answer_comes(front: Front) -> None:
    responses = [r async for r in front.stub.Generate(ask(stream=False))]
    assert len(responses) == 1
    assert responses[0].complete.text == "hellohel"


async def test_the_leader_gets_resolved_parameters(front: Front) -> None:
    request = ask(request_id="p1", temperature=0.5, top_k=-1, stop_token_ids=[7], logit_bias={9: 2})
    await collect(front.stub.Generate(request))
    run = front.leader.requests[0]
    assert run.req_id == "p1"
    assert run.sampling_params.seed == seed_of("p1")
    assert (run.sampling_params.temperature, run.sampling_params.top_k) == (0.5, 0)
    assert (list(run.sampling_params.stop_token_ids), dict(run.sampling_params.logit_bias)) == (
        [7],
        {9: 2.0},
    )
    assert not run.sampling_params.stop
    submit = front.controller.submitted[0]
    assert (submit.num_prompt_tokens, submit.max_tokens) == (5, 8)
    assert submit.deadline_unix_s == run.deadline_unix_s


async def test_an_absent_request_id_is_chosen_and_its_seed_returned(front: Front) -> None:
    call = front.stub.Generate(ask())
    responses = [r async for r in call]
    req_id = responses[0].request_id
    assert req_id
    assert responses[-1].complete.receipt.seed == seed_of(req_id)
    assert (await collect(front.stub.Generate(ask(seed=42))))[1].receipt.seed == 42


async def test_chat_is_rendered_by_the_models_template(front: Front) -> None:
    chat = generation_pb2.ChatInput(
        messages=[generation_pb2.ChatMessage(role="user", content="hi")]
    )
    request = generation_pb2.GenerateRequest(
        chat=chat, sampling_params=common_pb2.SamplingParams(max_tokens=1)
    )
    await collect(front.stub.Generate(request))
    codec = TextCodec.load(front.settings.model_dir)
    text = codec.decode(list(front.leader.requests[0].prompt_ids))
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_token_ids_in_are_not_tokenized_again(front: Front) -> None:
    request = generation_pb2.GenerateRequest(
        tokenized=generation_pb2.TokenizedInput(input_ids=[0, 5, 263]),
        sampling_params=common_pb2.SamplingParams(max_tokens=2),
    )
    await collect(front.stub.Generate(request))
    assert list(front.leader.requests[0].prompt_ids) == [0, 5, 263]


async def test_a_character_cut_across_tokens_is_sent_whole(front: Front) -> None:
    text = "é😀漢 ok"
    num_bytes = len(text.encode())
    chunks, complete = await collect(front.stub.Generate(ask(text, max_tokens=num_bytes)))
    assert complete.text == text == "".join(c.text for c in chunks)
    assert len(chunks) == num_bytes
    assert not any("\ufffd" in c.text for c in chunks)


async def test_an_answer_that_ends_inside_a_character_says_so_at_the_end(front: Front) -> None:
    chunks, complete = await collect(front.stub.Generate(ask("😀", max_tokens=2)))
    assert complete.text == "\ufffd" == "".join(c.text for c in chunks)


async def test_special_tokens_are_dropped_from_text_unless_asked_for(front: Front) -> None:
    front.leader.script.token_ids = TextCodec.load(front.settings.model_dir).encode("a<|im_end|>b")
    _, without = await collect(front.stub.Generate(ask(max_tokens=3)))
    _, with_them = await collect(front.stub.Generate(ask(max_tokens=3, skip_special_tokens=False)))
    assert (without.text, with_them.text) == ("ab", "a<|im_end|>b")


@pytest.mark.parametrize("per_step", [1, 4])
async def test_a_stop_string_ends_the_answer_and_the_run(front: Front, per_step: int) -> None:
    front.leader.script.per_step = per_step
    front.leader.script.never_ends = True
    chunks, complete = await collect(
        front.stub.Generate(ask("one, two; ", max_tokens=50, stop=["o; o", "wo;"], request_id="s1"))
    )
    assert complete.text == "one, t" == "".join(c.text for c in chunks)
    assert complete.finish_reason == common_pb2.FINISH_REASON_STOP
    assert complete.matched_stop_str == "wo;"
    # The tokens go as far as the one that completed the stop string, whatever the step's width.
    assert len(complete.output_ids) == complete.receipt.completion_tokens == 9
    assert complete.receipt.cached_tokens == 3  # the leader's share arrived although it was cut
    await poll(lambda: not front.leader.running)
    assert front.leader.aborts == ["s1"]


async def test_a_stop_string_that_ends_with_the_last_token_keeps_the_receipt(front: Front) -> None:
    front.leader.script.per_step = 2
    _, complete = await collect(front.stub.Generate(ask("abcd", max_tokens=4, stop=["d"])))
    assert (complete.text, complete.matched_stop_str) == ("abc", "d")
    assert complete.finish_reason == common_pb2.FINISH_REASON_STOP
    assert complete.receipt.cached_tokens == 3
    assert not front.leader.aborts


async def test_a_leader_that_does_not_settle_costs_its_receipt_only(front: Front) -> None:
    front.leader.script.ignores_abort = True
    front.leader.script.never_ends = True
    front.leader.script.gate.clear()
    call = front.stub.Generate(ask("abc", max_tokens=50, stop=["c"], request_id="s2"))
    await poll(lambda: bool(front.leader.running))
    front.leader.script.per_step = 3
    front.leader.script.gate.set()
    await poll(lambda: bool(front.leader.aborts))
    front.leader.script.gate.clear()
    _, complete = await collect(call)
    assert (complete.text, complete.matched_stop_str) == ("ab", "c")
    front.leader.script.never_ends = False
    front.leader.script.gate.set()  # what it says now is nobody's
    _, complete = await collect(front.stub.Generate(ask("xyz", max_tokens=3)))
    assert complete.text == "xyz"
    assert front.leader.num_streams == 1


async def test_the_stop_string_is_kept_when_asked_for(front: Front) -> None:
    request = ask("abc", max_tokens=9, stop=["bc"], include_stop_str_in_output=True)
    _, complete = await collect(front.stub.Generate(request))
    assert complete.text == "abc"


async def test_min_tokens_come_before_any_stop(front: Front) -> None:
    request = ask("abc", max_tokens=9, min_tokens=4, stop=["b"])
    _, complete = await collect(front.stub.Generate(request))
    assert complete.text == "abca"


async def test_held_back_text_comes_out_at_the_end(front: Front) -> None:
    chunks, complete = await collect(front.stub.Generate(ask("abc", max_tokens=3, stop=["bcd"])))
    assert complete.text == "abc" == "".join(c.text for c in chunks)
    assert [c.text for c in chunks] == ["a", "", "bc"]


async def test_every_request_is_released_at_the_controller(front: Front) -> None:
    await collect(front.stub.Generate(ask(request_id="r1")))
    await poll(lambda: front.controller.released == ["r1"])


async def test_a_running_id_is_refused_and_a_finished_one_is_welcome(front: Front) -> None:
    front.leader.script.gate.clear()
    first = front.stub.Generate(ask(request_id="dup"))
    await poll(lambda: "dup" in front.leader.running)
    code, message, details = await refusal(front.stub.Generate(ask(request_id="dup")))
    assert code is grpc.StatusCode.ALREADY_EXISTS
    assert "'dup'" in message
    assert "another id" in message
    assert details["ErrorInfo"].reason == "ALREADY_EXISTS"
    front.leader.script.gate.set()
    await collect(first)
    await collect(front.stub.Generate(ask(request_id="dup")))


async def test_a_client_cancel_reaches_the_leader_and_the_controller(front: Front) -> None:
    front.leader.script.never_ends = True
    call = front.stub.Generate(ask(request_id="c1", max_tokens=100))
    await call.read()
    call.cancel()
    await poll(lambda: front.leader.aborts == ["c1"] and front.controller.released == ["c1"])
    assert front.server.core.req_ids() == ([], [])


async def test_a_client_cancel_in_the_queue_reaches_the_controller(front: Front) -> None:
    front.controller.gate.clear()
    call = front.stub.Generate(ask(request_id="c2"))
    await poll(lambda: bool(front.controller.submitted))
    read = asyncio.ensure_future(call.read())
    call.cancel()
    await poll(lambda: front.controller.released == ["c2"])
    assert front.controller.cancelled == ["c2"]
    assert not front.leader.requests
    with pytest.raises(asyncio.CancelledError):
        await read


async def test_the_clients_deadline_ends_a_run(front: Front) -> None:
    front.leader.script.gate.clear()
    code, _, _ = await refusal(front.stub.Generate(ask(request_id="d1"), timeout=0.3))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    await poll(lambda: front.leader.aborts == ["d1"] and front.controller.released == ["d1"])


async def test_the_clients_deadline_ends_a_wait_in_the_queue(front: Front) -> None:
    front.controller.gate.clear()
    code, _, _ = await refusal(front.stub.Generate(ask(request_id="d2"), timeout=0.3))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    await poll(lambda: front.controller.released == ["d2"])


async def test_a_deadline_that_the_leader_saw_keeps_its_phase(front: Front) -> None:
    front.leader.script.error_after = 0
    front.leader.script.error = DEADLINE_ERROR
    code, message, details = await refusal(front.stub.Generate(ask()))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "600 s" in message
    assert "later deadline" in message
    assert details["ErrorInfo"].metadata["phase"] == "prefill"


async def test_abort_ends_a_running_request_with_its_receipt(front: Front) -> None:
    front.leader.script.never_ends = True
    call = front.stub.Generate(ask("ab", request_id="x1", max_tokens=100))
    await call.read()
    reply = await front.stub.Abort(generation_pb2.AbortRequest(request_id="x1"))
    assert reply.found
    _, complete = await collect(call)
    assert complete.finish_reason == common_pb2.FINISH_REASON_ABORT
    assert complete.receipt.cached_tokens == 3
    again = await front.stub.Abort(generation_pb2.AbortRequest(request_id="x1"))
    assert not again.found


async def test_abort_ends_a_waiting_request(front: Front) -> None:
    front.controller.gate.clear()
    call = front.stub.Generate(ask(request_id="x2"))
    await poll(lambda: bool(front.controller.submitted))
    reply = await front.stub.Abort(generation_pb2.AbortRequest(request_id="x2"))
    assert reply.found
    chunks, complete = await collect(call)
    assert not chunks
    assert complete.finish_reason == common_pb2.FINISH_REASON_ABORT
    await poll(lambda: front.controller.released == ["x2"])


async def test_abort_ends_a_request_whose_leader_does_not_answer(front: Front) -> None:
    front.leader.script.ignores_abort = True
    front.leader.script.gate.clear()
    call = front.stub.Generate(ask(request_id="x3"))
    await poll(lambda: "x3" in front.leader.running)
    assert (await front.stub.Abort(generation_pb2.AbortRequest(request_id="x3"))).found
    _, complete = await collect(call)
    assert complete.finish_reason == common_pb2.FINISH_REASON_ABORT
    assert set(front.leader.aborts) == {"x3"}


async def test_abort_is_not_lost_while_the_controller_is_looked_up(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = front.server.core._controller

    async def resolve() -> str:
        await front.server.core.abort("x4")
        return front.controller.address

    monkeypatch.setattr(controller, "_address", "")
    monkeypatch.setattr(controller, "_resolve_address", resolve)
    front.controller.gate.clear()
    _, complete = await collect(front.stub.Generate(ask(request_id="x4"), timeout=5.0))
    assert complete.finish_reason == common_pb2.FINISH_REASON_ABORT
    assert not front.controller.submitted


async def test_abort_is_not_lost_between_the_queue_and_the_leader(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place is found already, so there is no wait in the queue left to cancel."""
    core = front.server.core
    submit = core._controller.submit

    async def aborted_on_the_way(*args: Any) -> Any:
        place = await submit(*args)
        assert await core.abort("x5")
        return place

    monkeypatch.setattr(core._controller, "submit", aborted_on_the_way)
    _, complete = await collect(front.stub.Generate(ask(request_id="x5")))
    assert complete.finish_reason == common_pb2.FINISH_REASON_ABORT
    assert not front.leader.requests
    await poll(lambda: front.controller.released == ["x5"])


async def test_abort_finds_another_fronts_request_at_its_leader(front: Front) -> None:
    front.leader.running["elsewhere"] = asyncio.Event()
    reply = await front.stub.Abort(generation_pb2.AbortRequest(request_id="elsewhere"))
    assert reply.found
    assert front.leader.aborts == ["elsewhere"]
    assert front.controller.released == ["elsewhere"]


async def test_abort_through_another_front_ends_a_waiting_request(front: Front) -> None:
    front.controller.error = Cancelled("request 'x6' was aborted in the queue")
    chunks, complete = await collect(front.stub.Generate(ask(request_id="x6")))
    assert not chunks
    assert complete.finish_reason == common_pb2.FINISH_REASON_ABORT


async def test_overload_says_when_to_come_back(front: Front) -> None:
    front.controller.error = Overloaded("the queue has 9 requests, its limit is 9", 2.5)
    code, message, details = await refusal(front.stub.Generate(ask()))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "limit is 9" in message
    assert details["RetryInfo"].retry_delay.ToTimedelta().total_seconds() == 2.5
    assert details["ErrorInfo"].metadata["safe_to_retry"] == "true"


async def test_a_leader_lost_before_the_first_token_costs_nothing(front: Front) -> None:
    dead = FakeLeader("target-dead")
    await dead.start()
    await dead.stop()
    front.controller.leaders.insert(0, dead)
    front.controller.drops_released_leader = True  # as the real one does once it sees the loss
    _, complete = await collect(front.stub.Generate(ask(request_id="l1")))
    assert complete.text == "hellohel"
    assert complete.receipt.group_id == "target-0"


async def test_a_leader_lost_again_and_again_is_unavailable(front: Front) -> None:
    front.leader.script.error_after = 0
    code, message, details = await refusal(front.stub.Generate(ask(request_id="l2")))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "before the first token" in message
    assert "again" in message
    assert details["ErrorInfo"].metadata["safe_to_retry"] == "true"
    assert len(front.leader.requests) == 3


async def test_a_leader_lost_in_mid_stream_says_how_far_it_came(front: Front) -> None:
    front.leader.script.error_after = 3
    code, message, details = await refusal(front.stub.Generate(ask(request_id="l3")))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "'target-0'" in message
    assert "after 3 tokens" in message
    assert details["ErrorInfo"].metadata["safe_to_retry"] == "false"
    assert details["ErrorInfo"].metadata["num_tokens_sent"] == "3"
    assert len(front.leader.requests) == 1


async def test_an_internal_error_keeps_its_words_but_no_traceback(front: Front) -> None:
    front.leader.script.error_after = 0
    front.leader.script.error = InternalError("page 7 is owned twice " + "x" * 9000)
    code, message, _ = await refusal(front.stub.Generate(ask()))
    assert code is grpc.StatusCode.INTERNAL
    assert message.startswith("page 7 is owned twice")
    assert len(message) <= 1024


async def test_new_requests_wait_for_a_controller_that_comes_back(front: Front) -> None:
    await front.controller.stop()
    call = front.stub.Generate(ask())
    await poll(lambda: front.server.core.req_ids()[1] != [])
    await front.controller.start()
    _, complete = await collect(call)
    assert complete.text == "hellohel"


async def test_running_requests_outlive_the_controller(front: Front) -> None:
    front.leader.script.gate.clear()
    call = front.stub.Generate(ask())
    await poll(lambda: bool(front.leader.running))
    await front.controller.stop()
    front.leader.script.gate.set()
    _, complete = await collect(call)
    assert complete.text == "hellohel"


async def test_fifty_streams_at_once_get_their_own_answers(front: Front) -> None:
    async def one(i: int) -> None:
        text = f"<{i}>é"
        num = len(text.encode())
        _, complete = await collect(
            front.stub.Generate(ask(text, request_id=f"many-{i}", max_tokens=2 * num))
        )
        assert complete.text == text * 2

    async with asyncio.TaskGroup() as group:
        for i in range(50):
            group.create_task(one(i))
    await poll(lambda: len(front.controller.released) == 50)


async def test_a_message_over_the_limit_is_refused_with_the_limit(front: Front) -> None:
    code, message, _ = await refusal(front.stub.Generate(ask("x" * (2 << 20))))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(1 << 20) in message


async def test_health_tells_liveness_from_readiness(front: Front) -> None:
    stub = health_pb2_grpc.HealthStub(front.channel)
    serving = health_pb2.HealthCheckResponse.SERVING
    not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
    for name in ("", GENERATION):
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == serving
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=GENERATION))
    assert (await watch.read()).status == serving
    await front.server.begin_drain()
    assert (await watch.read()).status == not_serving
    assert (await stub.Check(health_pb2.HealthCheckRequest(service=""))).status == serving
    watch.cancel()


async def test_readiness_follows_the_groups(front: Front) -> None:
    leaders, front.controller.leaders = front.controller.leaders, []
    await poll(lambda: not front.server.is_ready)
    front.controller.leaders = leaders
    await poll(lambda: front.server.is_ready)


async def test_reflection_lists_every_service(front: Front) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(front.channel)
    call = stub.ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    )
    reply = await call.read()
    names = {service.name for service in reply.list_services_response.service}
    assert {GENERATION, "paceline.v1.AdminService", "grpc.health.v1.Health"} <= names
    call.cancel()


async def test_drain_refuses_new_requests_and_waits_for_the_running(front: Front) -> None:
    front.leader.script.gate.clear()
    call = front.stub.Generate(ask(request_id="run"))
    await poll(lambda: bool(front.leader.running))
    admin = AdminServiceStub(front.channel)
    drain = asyncio.ensure_future(admin.Drain(admin_pb2.DrainRequest(timeout_s=10)))
    await poll(lambda: front.server.core.is_draining)
    code, message, details = await refusal(front.stub.Generate(ask()))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "draining" in message
    assert "RetryInfo" in details
    front.leader.script.gate.set()
    await collect(call)
    assert (await drain).num_aborted == 0


async def test_drain_aborts_what_outlasts_its_limit(front: Front) -> None:
    front.leader.script.gate.clear()
    call = front.stub.Generate(ask(request_id="slow"))
    await poll(lambda: bool(front.leader.running))
    admin = AdminServiceStub(front.channel)
    snapshot = await admin.Snapshot(admin_pb2.SnapshotRequest())
    assert list(snapshot.running_req_ids) == ["slow"]
    reply = await admin.Drain(admin_pb2.DrainRequest(timeout_s=0.05))
    assert reply.num_aborted == 1
    code, message, _ = await refusal(call)
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "again" in message
    await poll(lambda: front.leader.aborts == ["slow"])


async def test_a_drain_does_not_take_the_end_from_an_answer_that_is_settled(front: Front) -> None:
    script = front.leader.script
    script.ignores_abort = script.never_ends = True
    script.per_step = 3
    script.gate.clear()
    call = front.stub.Generate(ask("abc", max_tokens=50, stop=["c"], request_id="late"))
    await poll(lambda: bool(front.leader.running))
    script.gate.set()
    await poll(lambda: front.leader.aborts == ["late"])
    script.gate.clear()
    await front.server.core.drain(0.0)
    _, complete = await collect(call)
    assert (complete.text, complete.matched_stop_str) == ("ab", "c")


async def test_a_front_has_no_draft_to_attach(front: Front) -> None:
    admin = AdminServiceStub(front.channel)
    code, message, _ = await refusal(admin.AttachDraft(admin_pb2.AttachDraftRequest()))
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert "leader" in message


async def test_the_front_bounds_its_own_requests(front: Front) -> None:
    core = front.server.core
    core._live._max_reqs = 1
    front.leader.script.gate.clear()
    call = front.stub.Generate(ask())
    await poll(lambda: bool(front.leader.running))
    code, message, details = await refusal(front.stub.Generate(ask()))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "limit is 1" in message
    assert "RetryInfo" in details
    front.leader.script.gate.set()
    await collect(call)


async def test_model_and_server_info_describe_what_is_served(front: Front) -> None:
    async with PacelineClient(front.grpc_address) as client:
        model = await client.model_info()
        server = await client.server_info()
    assert list(model.served_model_names) == ["tiny", "tiny-alias"]
    assert (model.vocab_size, model.max_model_len, list(model.eos_token_ids)) == (264, 512, [2])
    assert (model.architecture, model.has_chat_template) == ("LlamaForCausalLM", True)
    assert server.groups[0].group_id == "target-0"
    assert (server.max_message_bytes, server.num_queued_reqs) == (1 << 20, 2)


async def test_server_info_without_a_controller_is_unavailable(front: Front) -> None:
    await front.controller.stop()
    async with PacelineClient(front.grpc_address) as client:
        with pytest.raises(Unavailable, match="controller"):
            await client.server_info()


async def test_tokenize_and_detokenize_are_inverse(front: Front) -> None:
    reply = await front.stub.Tokenize(generation_pb2.TokenizeRequest(text="héllo"))
    back = await front.stub.Detokenize(generation_pb2.DetokenizeRequest(token_ids=reply.token_ids))
    assert back.text == "héllo"
    assert reply.max_model_len == 512


async def test_the_client_streams_and_raises_our_errors(front: Front) -> None:
    async with PacelineClient(front.grpc_address) as client:
        pieces = [p async for p in client.generate("hello", max_tokens=8, temperature=0)]
        assert "".join(p.text for p in pieces) == "hellohel"
        assert pieces[-1].complete is not None
        front.leader.script.error_after = 0
        front.leader.script.error = DEADLINE_ERROR
        with pytest.raises(DeadlineExceeded) as caught:
            await client.generate_text(messages=[{"role": "user", "content": "hi"}], max_tokens=1)
        assert caught.value.phase == "prefill"


async def test_an_id_that_the_leader_has_not_forgotten_yet_is_tried_again(front: Front) -> None:
    front.leader.running["early"] = asyncio.Event()
    call = front.stub.Generate(ask(request_id="early"))
    await poll(lambda: front.controller.released == ["early"])
    del front.leader.running["early"]
    _, complete = await collect(call)
    assert complete.text == "hellohel"


async def test_an_id_that_runs_through_another_front_is_refused(front: Front) -> None:
    front.leader.running["theirs"] = asyncio.Event()
    code, message, _ = await refusal(front.stub.Generate(ask(request_id="theirs")))
    assert code is grpc.StatusCode.ALREADY_EXISTS
    assert "'theirs'" in message


async def test_text_longer_than_the_context_can_be_counted_but_not_asked(front: Front) -> None:
    reply = await front.stub.Tokenize(generation_pb2.TokenizeRequest(text="x" * 600))
    assert len(reply.token_ids) == 600
    code, _, _ = await refusal(
        front.stub.Tokenize(generation_pb2.TokenizeRequest(text="x" * 500_000))
    )
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    code, message, _ = await refusal(
        front.stub.Detokenize(generation_pb2.DetokenizeRequest(token_ids=[5] * 513))
    )
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "at most 512" in message
