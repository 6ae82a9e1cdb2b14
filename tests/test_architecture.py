"""The house rules of imports and sizes, read from the source with `ast`; nothing is imported.

    interop -> scripts, recipes -> training, inference -> drafters

`training` and `inference` do not know each other: a recipe hands the decoder to the training loop.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# What each folder may import of the others. Tests may import everything.
MAY_IMPORT = {
    "drafters": set(),
    "inference": {"drafters"},
    "training": {"drafters"},
    "recipes": {"drafters", "inference", "training"},
    "scripts": {"drafters", "inference", "training", "recipes"},
    "interop": {"drafters", "inference", "training", "scripts"},
}
FOLDERS = {*MAY_IMPORT, "tests"}

# Nothing but torch, the standard library and each other.
PURE = {
    "drafters.confidence",
    "drafters.vocab",
    "inference.rules.acceptance",
    "inference.scheduling.accounts",
    "inference.scheduling.admission",
    "inference.scheduling.batch_controller",
    "inference.scheduling.batch_round",
    "inference.rules.block",
    "inference.measuring.confidence",
    "inference.scheduling.controller",
    "inference.measuring.conventions",
    "inference.scheduling.cost_calibration",
    "inference.scheduling.costs",
    "inference.files",
    "inference.huge_pages",
    "inference.measuring.intervals",
    "inference.rules.lossy",
    "inference.measuring.pairing",
    "inference.prediction.formulas",
    "inference.prediction.rounds",
    "inference.scheduling.menus",
    "inference.scheduling.pace",
    "inference.scheduling.priors",
    "inference.measuring.run_records",
    "inference.scheduling.schedule",
    "inference.shapes.sequoia",
    "inference.shapes.static_tree",
    "inference.stats",
    "inference.scheduling.survival",
    "inference.tree",
    "inference.verify",
    "training.alignment",
    "training.losses",
    "training.masks",
    "training.weighting",
}
# The one exception: verification draws with the keyed noise of sampling.
PURE_MAY_ALSO_IMPORT = {
    "inference.rules.acceptance": {"inference.sampling"},
    "inference.verify": {"inference.sampling"},
}

# The only files that know how transformers is built inside, so that its releases stay cheap.
KNOW_TRANSFORMERS = {
    "drafters.mtp_native",
    "drafters.native_layer",
    "drafters.target",
    "inference.attention",
    "inference.cache",
    "inference.static.attention",
    "inference.static.cache",
}
TRANSFORMERS_INTERNALS = re.compile(
    r"transformers\.(.+\.)?(cache_utils|masking_utils|modeling_\w+)\b"
)

MAX_FILE_LINES = 420
MAX_FUNCTION_LINES = 70


def modules() -> Iterator[tuple[str, Path]]:
    """Dotted name and path of every module but the tests."""
    for folder in MAY_IMPORT:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imported(source: str, package: str) -> set[str]:
    """Dotted names that a module of `package` imports, inside functions and TYPE_CHECKING too."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: 1 - node.level or None] if node.level else []
            origin = ".".join([*parents, *([node.module] if node.module else [])])
            names |= {f"{origin}.{alias.name}" for alias in node.names}
    return names


def imports_of(path: Path) -> set[str]:
    return imported(path.read_text(encoding="utf-8"), ".".join(path.relative_to(ROOT).parts[:-1]))


def belongs_to(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def test_import_direction() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, path in modules()
        for name in sorted(imports_of(path))
        if (folder := module.split(".")[0]) != (other := name.split(".")[0])
        and other in FOLDERS - MAY_IMPORT[folder]
    ]
    assert wrong == []


@pytest.mark.parametrize("module", sorted(PURE))
def test_pure_files_import_only_torch_and_the_standard_library(module: str) -> None:
    path = ROOT / (module.replace(".", "/") + ".py")
    if not path.exists():
        pytest.skip("not written yet")
    allowed = {"torch", *sys.stdlib_module_names, *PURE, *PURE_MAY_ALSO_IMPORT.get(module, set())}
    wrong = {
        name for name in imports_of(path) if not any(belongs_to(name, other) for other in allowed)
    }
    assert wrong == set()


def test_few_files_touch_the_internals_of_transformers() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, path in modules()
        for name in sorted(imports_of(path))
        if TRANSFORMERS_INTERNALS.match(name) and module not in KNOW_TRANSFORMERS
    ]
    assert wrong == []


def test_no_module_is_named_after_a_dependency() -> None:
    """A file run by path puts its own folder first on `sys.path` and would shadow it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    names = {re.split(r"[^\w-]", requirement)[0] for listed in lists for requirement in listed}
    dependencies = {name.replace("-", "_") for name in names}
    taken = dependencies | set(sys.stdlib_module_names)
    assert {"torch", "datasets"} <= dependencies
    assert [module for module, _ in modules() if module.split(".")[-1] in taken] == []


def test_files_stay_short() -> None:
    lengths = {
        module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in modules()
    }
    assert {module: n for module, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_functions_stay_short() -> None:
    long = {}
    for module, path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                lines = node.end_lineno - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long[f"{module}.{node.name}"] = lines
    assert long == {}


def test_the_import_reader_sees_every_form() -> None:
    source = """
import os, torch.nn as nn
from training import losses
from transformers.models.llama.modeling_llama import LlamaAttention
from . import tree
from .verify import verify
from ..training import masks
if TYPE_CHECKING:
    import recipes.train
def later():
    from transformers import cache_utils
"""
    found = imported(source, "inference.proposers")
    assert found == {
        "os",
        "torch.nn",
        "training.losses",
        "transformers.models.llama.modeling_llama.LlamaAttention",
        "inference.proposers.tree",
        "inference.proposers.verify.verify",
        "inference.training.masks",
        "recipes.train",
        "transformers.cache_utils",
    }
    assert {name for name in found if TRANSFORMERS_INTERNALS.match(name)} == {
        "transformers.models.llama.modeling_llama.LlamaAttention",
        "transformers.cache_utils",
    }
