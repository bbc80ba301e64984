"""What is on the disk is what is declared, and what a wheel carries."""

import ast
import importlib.metadata
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FOLDERS = ("protos", "kernels", "worker", "cluster")


def shipped_files() -> set[str]:
    """Paths under the four folders, as a wheel should name them."""
    return {
        f"paceline/{file.relative_to(ROOT).as_posix()}"
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*")
        if file.is_file()
        and "__pycache__" not in file.parts
        and file.suffix in {".py", ".pyi", ".cpp", ".proto", ".typed", ".json", ".safetensors", ""}
    }


def settings() -> dict[str, dict[str, object]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_the_declared_packages_are_the_folders_that_hold_python() -> None:
    on_disk = {
        ".".join(("paceline", *init.parent.relative_to(ROOT).parts))
        for folder in FOLDERS
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert set(settings()["packages"]) == on_disk


def test_every_python_file_lies_in_a_package() -> None:
    lost = [
        file.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*.py")
        if not (file.parent / "__init__.py").exists()
    ]
    assert lost == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    """A wheel built from a copy: setuptools leaves its work beside what it builds."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    for folder in FOLDERS:
        shutil.copytree(
            ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--wheel-dir", str(work), str(source)]
    subprocess.run(command, check=True, timeout=100, cwd=work)
    (built,) = work.glob("*.whl")
    return zipfile.Path(built)


def test_a_wheel_carries_every_file_and_no_other(wheel: zipfile.Path) -> None:
    names = (name for name in wheel.root.namelist() if not name.endswith("/"))
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == shipped_files()


def test_a_wheel_marks_each_folder_as_typed_and_ships_the_draft(wheel: zipfile.Path) -> None:
    inside = set(wheel.root.namelist())
    assert {f"paceline/{folder}/py.typed" for folder in FOLDERS} <= inside
    draft = "paceline/cluster/models/data/smollm2-135m-draft"
    assert {f"{draft}/{name}" for name in ("config.json", "model.int8.safetensors", "NOTICE")} <= (
        inside
    )


def test_a_wheel_installs_the_command_and_the_licence(wheel: zipfile.Path) -> None:
    (info,) = (path for path in wheel.iterdir() if path.name.endswith(".dist-info"))
    entry_points = (info / "entry_points.txt").read_text(encoding="utf-8")
    assert "paceline = paceline.cluster.cli.main:main" in entry_points
    assert "Apache License" in (info / "licenses" / "LICENSE").read_text(encoding="utf-8")


def test_the_pinned_versions_satisfy_what_is_declared() -> None:
    """Each declared dependency has an exact pin, and the pin is within the declared range."""
    lines = (ROOT / "deploy" / "constraints.txt").read_text().splitlines()
    pins = dict(_pin(line) for line in lines if line and not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["dependencies"] + project["optional-dependencies"]["dev"]
    for text in declared:
        needed = Requirement(text)
        pin = pins[canonicalize_name(needed.name)]
        assert needed.specifier.contains(pin, prereleases=True), f"{text}: pinned is {pin}"


# Imported by one command only, which says so when it is missing.
OPTIONAL = {"transformers"}


def test_what_is_imported_is_declared() -> None:
    """Nothing works only because another dependency happens to bring it along."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {
        canonicalize_name(Requirement(text).name)
        for text in project["dependencies"] + project["optional-dependencies"]["cuda"]
    } | OPTIONAL
    of_module = importlib.metadata.packages_distributions() | {"sgl_kernel": ["sglang-kernel"]}
    missing = {
        f"{file.relative_to(ROOT)}: {module}"
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*.py")
        for module in _imported(file)
        if not declared & {canonicalize_name(name) for name in of_module.get(module, [module])}
    }
    assert sorted(missing) == []


def _imported(file: Path) -> set[str]:
    """Top-level names a file imports, anywhere in it, beyond the standard library and ours."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"paceline"}


def _pin(line: str) -> tuple[str, str]:
    name, _, version = line.partition("==")
    return canonicalize_name(name), version
