"""`paceline generate` and `paceline status` against a real front."""

import asyncio
import json

import pytest

from paceline.cluster.cli import main as cli
from paceline.protos.v1 import common_pb2
from tests.dist.conftest import Front


async def run(*args: str) -> int:
    """The command line in a thread: it starts an event loop of its own."""
    return await asyncio.to_thread(cli.run, args)


async def test_the_answer_goes_to_stdout_and_the_receipt_to_stderr(
    front: Front, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("generate", "hello", "--no-chat", "--max-tokens", "8", "--address", front.grpc_address)
    assert await run(*args) == 0
    captured = capsys.readouterr()
    assert captured.out == "hellohel\n"
    assert "8 tokens" in captured.err
    assert "5/8 drafts accepted" in captured.err


async def test_a_question_is_a_chat_unless_told_otherwise(
    front: Front, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("generate", "hello", "--max-tokens", "24", "--address", front.grpc_address)
    assert await run(*args) == 0
    assert capsys.readouterr().out == "user\nhello\nassistant\n\n"


async def test_json_is_one_object_with_the_receipt(
    front: Front, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("generate", "hi", "--no-chat", "--max-tokens", "4", "--seed", "9", "--json")
    assert await run(*args, "--address", front.grpc_address) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["text"] == "hihi"
    assert found["receipt"]["seed"] == "9"


async def test_a_refusal_is_one_line_and_exit_2(
    front: Front, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run("generate", "hi", "--top-p", "7", "--address", front.grpc_address) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("paceline: top_p is 7")
    assert captured.out == ""


async def test_a_prompt_that_is_not_utf8_is_refused_and_not_an_exception(
    front: Front, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run("generate", "caf\udce9", "--address", front.grpc_address) == 2
    err = capsys.readouterr().err
    assert "not UTF-8" in err
    assert "Error:" not in err


async def test_an_answer_out_of_time_names_the_limit_and_the_option(
    front: Front, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("generate", "hi", "--timeout", "0.001", "--address", front.grpc_address)
    assert await run(*args) == 1
    assert "within 0.001 s; raise --timeout" in capsys.readouterr().err
    assert await run("generate", "hi", "--timeout", "-1", "--address", front.grpc_address) == 2
    assert "--timeout" in capsys.readouterr().err


async def test_status_shows_a_draft_that_is_down_and_why(
    front: Front, capsys: pytest.CaptureFixture[str]
) -> None:
    front.leader.draft = common_pb2.DraftHealth(is_up=True)
    assert await run("status", "--address", front.grpc_address) == 0
    out = capsys.readouterr().out
    assert "draft-0" in out
    assert "down" not in out
    front.leader.draft = common_pb2.DraftHealth(refusal="another vocabulary")
    assert await run("status", "--address", front.grpc_address) == 0
    out = capsys.readouterr().out
    assert "draft-0 (down)" in out
    assert "target-0: its draft refuses it: another vocabulary" in out


async def test_status_shows_the_groups(front: Front, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("status", "--address", front.grpc_address) == 0
    out = capsys.readouterr().out
    assert "target-0" in out
    assert "75/100" in out
    assert await run("status", "--json", "--address", front.grpc_address) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["server"]["groups"][0]["role"] == "target"
    assert found["model"]["served_model_names"] == ["tiny", "tiny-alias"]
