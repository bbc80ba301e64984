"""What the documents say is so: examples run, options exist, the map is the disk."""

import asyncio
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cluster.config import parse_config
from paceline.kernels.api import KernelSet
from tests.dist.conftest import run_front

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[list[str]]:
    """The shell lines of the README, continued lines joined, comments dropped."""
    text = "\n".join(blocks("bash")).replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in text.splitlines() if line.strip()]


def test_the_map_names_every_module_and_no_other() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## The map")[2]
    named: set[str] = set()
    for path in re.findall(r"^((?:kernels|worker|cluster)/\S+\.py) ", text, re.MULTILINE):
        before, _, choice = path.partition("{")
        choices, _, after = choice.partition("}")
        named |= {f"{before}{one}{after}" for one in choices.split(",")} if choice else {path}
    on_disk = {
        file.relative_to(ROOT).as_posix()
        for folder in ("kernels", "worker", "cluster")
        for file in (ROOT / folder).rglob("*.py")
        if file.name != "__init__.py"
    }
    assert sorted(on_disk - named) == [], "modules that CONTRIBUTING.md does not name"
    assert sorted(named - on_disk) == [], "modules that CONTRIBUTING.md names and nobody wrote"


def test_the_kernel_contract_says_which_ops_serving_calls() -> None:
    assert KernelSet.__doc__ is not None
    said = re.findall(r"`(\w+)`", KernelSet.__doc__)
    source = "".join(file.read_text() for file in (ROOT / "worker").rglob("*.py"))
    called = set(re.findall(r"kernels\.(\w+)", source)) & KernelSet.__abstractmethods__
    optional = {"plan_attention"}  # sets without a plan inherit it
    assert set(said) == called | optional
    assert all(f"kernels.{name}" in source for name in optional)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_the_readmes_make_targets_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    asked = [command[1] for command in commands() if command[0] == "make"]
    assert {"demo", "test"} <= set(asked) <= set(targets)


def test_every_option_in_the_readme_exists() -> None:
    asked = [command for command in commands() if command[0] == "paceline"]
    assert asked
    inline = re.findall(r"`(--[a-z-]+)", README)
    known: dict[str, str] = {}
    for command in {command[1] for command in asked} | {"serve", "models get"}:
        line = [sys.executable, "-m", "paceline.cluster.cli.main", *command.split(), "--help"]
        result = subprocess.run(
            line, capture_output=True, text=True, timeout=60, check=True, env={"COLUMNS": "200"}
        )
        known[command] = result.stdout
    for command in asked:
        options = [word.partition("=")[0] for word in command if word.startswith("--")]
        said = known[command[1]] + (known["models get"] if command[1] == "models" else "")
        assert [option for option in options if option not in said] == [], command
    everything = "\n".join(known.values())
    assert [option for option in inline if option not in everything] == []


def test_the_readmes_configuration_is_one() -> None:
    import tomllib

    (text,) = blocks("toml")
    config = parse_config(tomllib.loads(text))
    assert config.draft.model == "auto"


def test_the_readmes_body_is_json_that_curl_sends() -> None:
    (command,) = (command for command in commands() if command[0] == "curl")
    body = json.loads(command[command.index("-d") + 1])
    assert body["messages"][0]["role"] == "user"


def test_the_readmes_client_is_ten_lines_at_most() -> None:
    (client,) = blocks("python")
    assert len(client.splitlines()) <= 10


CHILD = """
import grpc, sys
def of_this_test(address, make=grpc.insecure_channel):
    assert address == "127.0.0.1:50051"
    return make(sys.argv[2])
grpc.insecure_channel = of_this_test
exec(sys.argv[1])
"""


async def run_client(address: str) -> str:
    (client,) = blocks("python")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, client, address, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        said, _ = await process.communicate()
    assert process.returncode == 0
    return said.decode()


async def test_the_readmes_client_streams_an_answer_and_prints_a_receipt(tiny_model: Path) -> None:
    async with run_front(tiny_model) as front:
        said = await run_client(front.grpc_address)
    assert "completion_tokens: 64" in said
    assert "Why is the sky blue?" in said  # the scripted group repeats its prompt


async def test_the_readmes_curl_gets_an_answer(tiny_model: Path) -> None:
    (command,) = (command for command in commands() if command[0] == "curl")
    path = command[1].removeprefix("http://127.0.0.1:8000")
    body = json.loads(command[command.index("-d") + 1]) | {"model": "tiny"}
    async with run_front(tiny_model) as front:
        answer = await front.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 64
