"""Names that must not be taken, and imports that must stay cheap."""

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("protos", "kernels", "worker", "cluster")
HEAVY = ("torch", "ray", "grpc", "transformers", "triton", "numpy", "fastapi")


def is_ours(name: str) -> bool:
    """Whether a top-level import of `name` would find a folder of this repository."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        return False
    places = [spec.origin or "", *(spec.submodule_search_locations or ())]
    return any(Path(place).is_relative_to(ROOT) for place in places if place)


def python(code: str, *arguments: str, cwd: Path | None = None) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("name", FOLDERS)
def test_our_folders_are_not_top_level_packages(name: str) -> None:
    assert not is_ours(name)


def test_the_command_starts_without_the_heavy_packages() -> None:
    code = "import sys, paceline.cluster.cli.main\nprint(*sys.modules)"
    assert set(python(code).split()) & set(HEAVY) == set()


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["models", "list"]])
def test_help_and_lists_load_none_of_the_heavy_packages(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from paceline.cluster.cli.main import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as done:\n"
        "    assert not done.code, done.code\n"
        "print('MODULES', *sys.modules)\n"
    )
    modules = python(code, *arguments).rpartition("MODULES")[2].split()
    assert set(modules) & set(HEAVY) == set()


IN_A_WORKER = """
import importlib.util, json
import ray
from paceline.cluster.config import load_config
from paceline.cluster.launch import _RaySession

config = load_config(None, {"model": "none", "ray.num_cpus": 1, "ray.namespace": "test-imports"})
session = _RaySession(config, lambda process, stage, fraction: None)

@ray.remote
def places(names):
    import paceline.kernels.api
    specs = [importlib.util.find_spec(name) for name in names]
    return [[s.origin or "", *(s.submodule_search_locations or ())] for s in specs if s]

session.open()
try:
    found = ray.get(places.remote(%r), timeout=60)
finally:
    session.close()
print("PLACES", json.dumps(sum(found, [])))
"""


@pytest.mark.dist
def test_our_folders_are_not_top_level_packages_in_a_ray_worker() -> None:
    """Started from here: Ray would put this folder first on its workers' path."""
    said = python(IN_A_WORKER % (FOLDERS,), cwd=ROOT)
    places = json.loads(said.rpartition("PLACES")[2])
    assert [place for place in places if Path(place).is_relative_to(ROOT)] == []


def test_every_module_imports() -> None:
    """A module that nothing imports yet still has to be importable on a machine without a GPU."""
    names = [
        ".".join(("paceline", *file.relative_to(ROOT).with_suffix("").parts))
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*.py")
        if file.name != "__main__.py"
    ]
    for name in names:
        importlib.import_module(name.removesuffix(".__init__"))
