"""Rules of the code base that no linter knows: layers, twins, words, who reads the environment."""

import ast
import importlib
import inspect
import io
import os
import re
import shutil
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from paceline.kernels.api import AttentionPlan, KernelSet

ROOT = Path(__file__).parents[1]
FOLDERS = ("protos", "kernels", "worker", "cluster")
PAGED = sorted(
    file.stem for file in (ROOT / "kernels" / "paged").glob("*.py") if file.stem != "__init__"
)


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        for file in (ROOT / folder).rglob("*.py"):
            if "_pb2" not in file.name:
                yield file


# --- imports ----------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the code as the package it is installed as, to plant faults in."""
    for folder in FOLDERS:
        shutil.copytree(
            ROOT / folder,
            tmp_path / "paceline" / folder,
            ignore=lambda _, names: [n for n in names if "." in n and not n.endswith(".py")],
        )
    return tmp_path / "paceline"


def lint_imports(package: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    command += ["--config", str(ROOT / "pyproject.toml")]
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    return subprocess.run(
        command, cwd=package.parent, env=environment, capture_output=True, text=True, timeout=100
    )


def test_imports_go_one_way_and_the_pure_core_is_pure(package: Path) -> None:
    result = lint_imports(package)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("kernels/api.py", "import paceline.worker.step"),
        ("worker/step.py", "import paceline.cluster.config"),
        ("protos/__init__.py", "import paceline.kernels.api"),
        ("cluster/scheduling/planner.py", "import ray"),
        ("cluster/scheduling/planner.py", "import torch"),
        ("cluster/controller/state.py", "import asyncio"),
        ("worker/cache/page_pool.py", "import time"),
        ("worker/spec/tree.py", "import random"),
        ("worker/spec/session.py", "import grpc"),
        ("cluster/placement/bundles.py", "import paceline.cluster.placement.groups"),
    ],
)
def test_a_planted_import_is_caught(package: Path, module: str, line: str) -> None:
    planted = package / module
    planted.write_text(f"{planted.read_text()}\n{line}\n")
    result = lint_imports(package)
    assert result.returncode == 1
    assert "BROKEN" in result.stdout, result.stdout + result.stderr


def test_a_module_that_calls_itself_pure_is_held_to_it() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    held = tuple(contracts["contracts"][1]["source_modules"])
    claims = [
        ".".join(("paceline", *file.relative_to(ROOT).with_suffix("").parts))
        for file in sources()
        if " Pure." in (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n\n")[0]
        and not file.is_relative_to(ROOT / "kernels")
    ]
    assert [
        name for name in claims if not f"{name}.".startswith(tuple(f"{h}." for h in held))
    ] == []


# --- kernels ----------------------------------------------------------------------------------


def ops(module: ModuleType) -> dict[str, inspect.Signature]:
    """The ops a module defines; plans count as one kind, each kernel set has its own."""
    return {
        name: _without_plan_kind(inspect.signature(value, eval_str=True))
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and hasattr(KernelSet, name)
    }


def _without_plan_kind(signature: inspect.Signature) -> inspect.Signature:
    def general(annotation: object) -> object:
        is_plan = inspect.isclass(annotation) and issubclass(annotation, AttentionPlan)
        return AttentionPlan if is_plan else annotation

    parameters = [
        parameter.replace(annotation=general(parameter.annotation))
        for parameter in signature.parameters.values()
    ]
    return signature.replace(
        parameters=parameters, return_annotation=general(signature.return_annotation)
    )


@pytest.mark.parametrize("name", PAGED)
def test_each_triton_file_has_a_reference_of_equal_signatures(name: str) -> None:
    paged = ops(importlib.import_module(f"paceline.kernels.paged.{name}"))
    reference = ops(importlib.import_module(f"paceline.kernels.reference.{name}"))
    assert paged == {op: reference.get(op) for op in paged}


@pytest.mark.parametrize(
    "kernel_set", ["reference.kernel_set:ReferenceKernels", "paged.kernel_set:TritonKernels"]
)
def test_a_kernel_set_keeps_the_signatures_of_the_contract(kernel_set: str) -> None:
    module, _, name = kernel_set.partition(":")
    implementation = getattr(importlib.import_module(f"paceline.kernels.{module}"), name)
    for op in KernelSet.__abstractmethods__:
        assert parameters_of(implementation, op) == parameters_of(KernelSet, op), op


def parameters_of(kernel_set: type, op: str) -> list[inspect.Parameter]:
    """Without self: a set may give the op as a method or as a plain function."""
    signature = inspect.signature(getattr(kernel_set, op), eval_str=True)
    return [p for p in signature.parameters.values() if p.name != "self"]


# --- words ------------------------------------------------------------------------------------

# One word per concept: the handbook's other names for ours.
OTHER_WORDS = re.compile(
    r"^(rid|cu_seqlens\w*|context_lens|slot_mapping|block_tables?|table_idx|forward_mode|"
    r"recovery_token\w*|lookahead|.*retrive.*)$"
)
# What a definition is called when the one before it was left standing.
SECOND_NAME = re.compile(r"_(tmp|new|old|v\d+)$")
MARKERS = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")


def names(file: Path) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


def test_each_concept_has_one_word() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in sources()
        if not file.is_relative_to(ROOT / "kernels" / "sgl")  # where foreign names end
        for line, name in names(file)
        if OTHER_WORDS.match(name)
    ]
    assert found == []


def test_no_definition_stands_beside_the_one_it_replaces() -> None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in sources()
        for name in [
            file.stem,
            *(
                node.name
                for node in ast.walk(ast.parse(file.read_text()))
                if isinstance(node, kinds)
            ),
        ]
        if SECOND_NAME.search(name)
    ]
    assert found == []


def test_nothing_is_left_for_later() -> None:
    found = [
        f"{file.relative_to(ROOT)}: {match.group()}"
        for file in sources()
        if (match := MARKERS.search(file.read_text()))
    ]
    assert found == []


def test_no_module_is_named_like_the_standard_library_or_a_dependency() -> None:
    taken = sys.stdlib_module_names | {"ray", "grpc", "torch", "triton", "typer", "gguf", "msgspec"}
    assert [str(file.relative_to(ROOT)) for file in sources() if file.stem in taken] == []


# --- who may touch what -----------------------------------------------------------------------

# The process entries, the launcher (for what Ray reads when it starts), and what finds the cache or
# a compiler.
TOUCHES_THE_ENVIRONMENT = (
    "worker/entry.py",
    "cluster/cli/",
    "cluster/launch.py",
    "cluster/models/",
    "kernels/native/build.py",
)


def test_only_process_entries_touch_the_environment() -> None:
    found = []
    for file in sources():
        place = file.relative_to(ROOT).as_posix()
        if place.startswith(TOUCHES_THE_ENVIRONMENT):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            if is_attribute and node.value.id == "os" and node.attr in ("environ", "getenv"):
                found.append(f"{place}:{node.lineno}")
    assert found == []


def test_nothing_frozen_is_changed() -> None:
    found = [
        str(file.relative_to(ROOT))
        for file in sources()
        if "object.__setattr__" in file.read_text()
    ]
    assert found == []
