"""`paceline generate`: one question to a running server, the answer to stdout as it comes."""

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from paceline.cluster.client import PacelineClient
    from paceline.protos.v1 import common_pb2, generation_pb2

Address = Annotated[
    str, typer.Option("--address", envvar="PACELINE_ADDRESS", help="host:port of a front's gRPC.")
]
ApiKey = Annotated[str, typer.Option("--api-key", envvar="PACELINE_API_KEY", show_default=False)]


def generate(
    prompt: Annotated[str, typer.Argument(help="The question; - reads it from stdin.")],
    *,
    address: Address = "127.0.0.1:50051",
    chat: Annotated[bool, typer.Option(help="Ask as a chat, or continue the text.")] = True,
    system: Annotated[str, typer.Option(help="A system message before the question.")] = "",
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
    seed: Annotated[int | None, typer.Option(min=0)] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Repeatable.")] = None,
    model: Annotated[str, typer.Option(help="A served model's name.")] = "",
    timeout: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds for the whole answer.")
    ] = None,
    api_key: ApiKey = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Ask a running server; the answer streams to stdout, its receipt goes to stderr."""
    from paceline.cluster.client import PacelineClient
    from paceline.worker.errors import DeadlineExceeded, InvalidRequest

    text = sys.stdin.read() if prompt == "-" else prompt
    if not all(_is_unicode(given) for given in (text, system, model, *(stop or ()))):
        raise InvalidRequest("the prompt, or an option, holds bytes that are not UTF-8", "prompt")
    asked: dict[str, Any] = {  # Any: arguments of several types
        "model": model,
        "timeout_s": timeout,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": stop or None,
    }
    if chat:
        messages = [{"role": "system", "content": system}] if system else []
        asked["messages"] = [*messages, {"role": "user", "content": text}]
    else:
        asked["prompt"] = text

    async def ask() -> None:
        async with PacelineClient(address, api_key=api_key) as client:
            complete = await _stream(client, asked, is_quiet=as_json)
        if as_json:
            print(json.dumps(_as_dict(complete)))
        else:
            print(describe_receipt(complete.receipt), file=sys.stderr)

    try:
        asyncio.run(ask())
    except DeadlineExceeded:
        if timeout is None:
            raise
        raise DeadlineExceeded(
            f"the answer did not end within {timeout:g} s; raise --timeout or lower --max-tokens"
        ) from None


def _is_unicode(text: str) -> bool:
    """False if it holds bytes that Python kept as they were."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


async def _stream(
    client: "PacelineClient",
    asked: dict[str, Any],  # Any: as above
    *,
    is_quiet: bool,
) -> "generation_pb2.GenerateComplete":
    from paceline.worker.errors import InternalError

    complete = None
    has_text = False
    try:
        async for piece in client.generate(**asked):
            if piece.text and not is_quiet:
                has_text = True
                print(piece.text, end="", flush=True)
            complete = piece.complete
    finally:
        if has_text:
            print(flush=True)
    if complete is None:
        raise InternalError("the stream ended without an answer; is the address a front's?")
    return complete


def describe_receipt(receipt: "common_pb2.Receipt") -> str:
    """One line: what the answer cost and what speculation gained."""
    num_tokens = receipt.completion_tokens
    steps = max(1, receipt.num_steps)
    decode_s = receipt.total_s - receipt.time_to_first_token_s
    parts = [f"{num_tokens} tokens", f"{num_tokens / steps:.2f} tokens/step"]
    if receipt.proposed_tokens:
        parts.append(f"{receipt.accepted_tokens}/{receipt.proposed_tokens} drafts accepted")
    if receipt.is_simulated:
        parts.append("ACCEPTANCE SIMULATED")
    if receipt.cached_tokens:
        parts.append(f"{receipt.cached_tokens}/{receipt.prompt_tokens} prompt tokens cached")
    parts.append(f"first token {receipt.time_to_first_token_s:.2f} s")
    if num_tokens > 1 and decode_s > 0:
        parts.append(f"{(num_tokens - 1) / decode_s:.1f} tokens/s")
    return ", ".join(parts)


def _as_dict(complete: "generation_pb2.GenerateComplete") -> dict[str, Any]:  # Any: JSON
    from google.protobuf.json_format import MessageToDict

    found: dict[str, Any] = MessageToDict(
        complete, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return found
