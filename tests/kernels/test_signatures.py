"""Every Triton file has a reference twin with the same functions and signatures."""

import ast
import inspect
from importlib import import_module
from pathlib import Path

import pytest

import paceline.kernels.paged
from paceline.kernels.api import KernelSet
from paceline.kernels.registry import available_kernel_sets, load_kernels

FOLDER = Path(paceline.kernels.paged.__path__[0])
TWINS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("__init__",))
# What is no op of its own: the classes, and how attention is carried out on each side.
NO_OPS = {"kernel_set", "attend"}


def public_functions(module_name: str) -> dict[str, inspect.Signature]:
    module = import_module(module_name)
    tree = ast.parse(Path(str(module.__file__)).read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {
        name: inspect.signature(getattr(module, name)) for name in names if not name.startswith("_")
    }


@pytest.mark.parametrize("name", [name for name in TWINS if name not in NO_OPS])
def test_each_triton_file_has_a_twin_of_equal_signatures(name: str) -> None:
    ours = public_functions(f"paceline.kernels.paged.{name}")
    reference = public_functions(f"paceline.kernels.reference.{name}")
    assert ours
    assert {op: reference.get(op) for op in ours} == ours


def test_every_set_has_the_arguments_of_the_contract() -> None:
    for set_name in available_kernel_sets():
        kernels = load_kernels(set_name, "cpu")
        for name, op in inspect.getmembers(KernelSet, inspect.isfunction):
            ours = list(inspect.signature(getattr(kernels, name)).parameters)
            assert ours == list(inspect.signature(op).parameters)[1:], name
