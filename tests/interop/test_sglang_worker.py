"""What stands in for missing packages in SGLang's worker, which itself can be imported only where
SGLang is.
"""

import ast
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from interop.sglang_check import WORKER

PARTS = ("STANDS_IN", "WITH_PARTS", "StandIn", "StandInFinder", "missing")


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Its stand-ins, under names that no package here has."""
    tree = ast.parse(WORKER.read_text(encoding="utf-8"))
    body = [
        node
        for node in tree.body
        if (isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in PARTS)
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in PARTS)
    ]
    names = {"importlib": importlib, "types": types, "Any": Any, "Callable": Callable}
    exec(compile(ast.Module(body, []), str(WORKER), "exec"), names)
    assert set(PARTS) <= names.keys()
    names |= {"STANDS_IN": ("absent_kernels", "absent_vision"), "WITH_PARTS": ("absent_vision",)}
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, names["StandInFinder"]()])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return names


def test_every_name_is_there_and_nothing_can_be_called(worker: dict[str, Any]) -> None:
    vision = importlib.import_module("absent_vision.transforms.v2")
    for found in (vision.Resize, importlib.import_module("absent_kernels").rmsnorm):
        with pytest.raises(RuntimeError, match="is a stand-in and cannot be called"):
            found(1)
    with pytest.raises(AttributeError):
        vision.__version__  # noqa: B018


def test_parts_of_a_plain_module_are_missing(worker: dict[str, Any]) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("absent_kernels.scalar_type")


def test_other_packages_are_left_alone(worker: dict[str, Any]) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("absent_elsewhere")


def test_the_worker_imports_nothing_of_headway() -> None:
    tree = ast.parse(WORKER.read_text(encoding="utf-8"))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert "sglang" in imported
    assert not imported & {"drafters", "inference", "training", "scripts", "recipes", "interop"}
