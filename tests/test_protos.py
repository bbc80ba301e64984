"""The wire contract: generated code is fresh, every field is explained, names follow the rules."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

ROOT = Path(__file__).parents[1]
PROTOS = ROOT / "protos"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[FileDescriptorProto]:
    out = tmp_path_factory.mktemp("descriptors") / "set.binpb"
    sources = sorted(f"protos/v1/{file.name}" for file in (PROTOS / "v1").glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Ipaceline/protos=protos"]
    command += ["--include_source_info", f"--descriptor_set_out={out}", *sources]
    subprocess.run(command, cwd=ROOT, check=True, timeout=100)
    return list(FileDescriptorSet.FromString(out.read_bytes()).file)


def messages(file: FileDescriptorProto) -> Iterator[tuple[tuple[int, ...], DescriptorProto]]:
    """Each message with its path in the file, as source_code_info spells paths."""
    todo = [((4, i), message) for i, message in enumerate(file.message_type)]
    while todo:
        path, message = todo.pop()
        yield path, message
        todo += [((*path, 3, i), nested) for i, nested in enumerate(message.nested_type)]


def enums(file: FileDescriptorProto) -> Iterator[EnumDescriptorProto]:
    yield from file.enum_type
    for _, message in messages(file):
        yield from message.enum_type


def test_the_generated_code_is_that_of_the_protos(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [str(PROTOS / "generate.sh"), str(tmp_path)]
    subprocess.run(command, check=True, timeout=100, env=environment)
    fresh = {file.name: file.read_text() for file in (tmp_path / "v1").iterdir()}
    committed = {
        file.name: file.read_text()
        for file in (PROTOS / "v1").iterdir()
        if "_pb2" in file.name and file.is_file()
    }
    assert sorted(fresh) == sorted(committed)
    stale = [name for name, text in fresh.items() if text != committed[name]]
    assert stale == [], "run `make protos`"


def test_every_field_has_a_comment(files: list[FileDescriptorProto]) -> None:
    silent = []
    for file in files:
        said = {
            tuple(location.path): location.leading_comments + location.trailing_comments
            for location in file.source_code_info.location
        }
        for path, message in messages(file):
            if message.options.map_entry:
                continue
            silent += [
                f"{file.name}: {message.name}.{field.name}"
                for i, field in enumerate(message.field)
                if not said.get((*path, 2, i), "").strip()
            ]
    assert silent == []


def test_enums_begin_unspecified_and_prefix_their_values(files: list[FileDescriptorProto]) -> None:
    for file in files:
        for enum in enums(file):
            prefix = "".join(f"_{c}" if c.isupper() else c.upper() for c in enum.name).lstrip("_")
            assert enum.value[0].number == 0
            assert enum.value[0].name == f"{prefix}_UNSPECIFIED"
            assert all(value.name.startswith(f"{prefix}_") for value in enum.value)


def test_rpcs_take_a_request_and_answer_a_response(files: list[FileDescriptorProto]) -> None:
    rpcs = [method for file in files for service in file.service for method in service.method]
    assert rpcs
    for rpc in rpcs:
        assert rpc.input_type.endswith("Request"), rpc.name
        assert rpc.output_type.endswith("Response"), rpc.name


def test_every_file_is_of_the_package(files: list[FileDescriptorProto]) -> None:
    assert {file.package for file in files} == {"paceline.v1"}
