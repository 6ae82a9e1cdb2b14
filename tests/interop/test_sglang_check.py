"""The checks with SGLang, its worker played by what the simulation says it should hold, read and
compute.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters import TargetModel
from drafters.export import read_as, write_as
from drafters.export.engines import engine_tensors, loaders_for
from drafters.export.engines.loader import load
from drafters.export.golden import GOLDEN
from interop import sglang_check
from interop.results import FAILED, LOADED, PASSED, REFUSED, SKIPPED, Entry
from interop.setting import CannotRun, Setting
from interop.speculators_check import random_head
from tests.tiny import save_tiny_target

HEADS = {
    "one": ("eagle3", {"draft_vocab_size": 48}),
    "wide": ("eagle3", {"num_layers": 2}),
    "fused": ("eagle1", {}),
    "block": ("dflash", {"num_layers": 1}),
    "reduced": ("dspark", {"num_layers": 1, "markov_rank": 8, "draft_vocab_size": 48}),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"), torch.float32)


@pytest.fixture(scope="module")
def heads(place: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    target = TargetModel.load(str(place))
    for label, (family, options) in HEADS.items():
        random_head(family, target, **options).save_pretrained(folder / label)
    return {label: folder / label for label in HEADS}


@dataclass
class Row:
    """What the worker finds of one job, before it is written.

    Attributes:
        found: tensors.
        said: of its line.
    """

    found: dict[str, Tensor]
    said: dict[str, Any]


Spoil = Callable[[Row], None]


def worker(target: TargetModel, spoil: Spoil = lambda row: None) -> Callable[..., str]:
    """SGLang's side; another line is an engine's log."""

    def done(job: dict[str, Any]) -> str:
        folder = Path(job["export"])
        written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        dialect = json.loads((folder / "export.json").read_text(encoding="utf-8"))["format"]
        head = read_as(dialect, folder, target)
        loader = [x for x in loaders_for(written, head.family) if x.engine == "sglang"][-1]
        held = load(loader, loader.flat(written), engine_tensors(folder), target).parameters
        found = {name: tensor.clone().contiguous() for name, tensor in held.items()}
        if "hot_token_id" in found:  # ids, as SGLang makes of the file's offsets
            assert head.draft_vocab is not None
            found["hot_token_id"] = head.draft_vocab.clone()
        found["of_the_target"] = torch.full((3,), torch.nan)
        golden = load_file(folder / GOLDEN)
        out = target.forward(golden["token_ids"][None], feature_layers=head.feature_layers)
        captured = out.last_hidden if out.features is None else out.features
        logits = sglang_check._wanted(head, golden)
        found |= {"captured": captured[0].clone(), "logits": logits.clone()}
        reads = loader.reads(loader.flat(written), target)
        said = {"name": job["name"], "model": "Theirs", "reads": dict(reads)}
        said |= {"rows_unasked": reads.get("block_size"), "replaced": ["kernels"]}
        said["versions"] = {"sglang": "0", "torch": "1"}
        row = Row(found, said)
        spoil(row)
        save_file(row.found, job["result"])
        return json.dumps(row.said)

    def run(command: list[str], **_: Any) -> str:
        asked = json.loads(Path(command[-1]).read_text(encoding="utf-8"))
        with torch.no_grad():
            return "\n".join(["INFO of an engine", *map(done, asked["jobs"])])

    return run


def checked(
    place: Path,
    work: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Spoil = lambda row: None,
    heads: dict[str, Path] | None = None,
    families: tuple[str, ...] = ("eagle3",),
) -> list[Entry]:
    """Entries of some families, with SGLang's side played."""
    forms = tuple(form for form in sglang_check.FORMS if form[0] in families)
    monkeypatch.setattr(sglang_check, "FORMS", forms)
    monkeypatch.setattr(sglang_check, "output", worker(TargetModel.load(str(place)), spoil))
    setting = Setting(place, heads or {}, work, {"sglang": Path("python")})
    return list(sglang_check.check(setting))


def test_everything_as_simulated_passes(
    place: Path, heads: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    families = ("eagle3", "eagle1", "dflash", "dspark")
    entries = checked(place, tmp_path, monkeypatch, heads=heads, families=families)
    found = {(entry.dialect, entry.head): entry for entry in entries}
    assert {entry.check for entry in entries} == {LOADED}
    statuses = {key: entry.status for key, entry in found.items()}
    assert statuses == {
        ("sglang", "one"): PASSED,
        ("sglang", "wide"): REFUSED,
        ("eagle1-sglang", "fused"): PASSED,
        ("dflash", "block"): PASSED,
        ("dspark", "reduced"): REFUSED,
        ("dspark-specforge", "reduced"): REFUSED,
        **dict.fromkeys([(dialect, "random") for dialect in sglang_check.DIALECTS], PASSED),
    }
    assert "logits 0.0e+00 of the largest" in found["sglang", "one"].detail
    assert found["sglang", "one"].detail.endswith("not called: kernels")
    for name in sglang_check.VARIANTS["dspark"]:
        assert f"{name}: Theirs" in found["dspark", "random"].detail
    versions = found["sglang", "one"].versions
    assert (versions["sglang"], versions["their torch"]) == ("0", "1")
    assert versions["torch"] == torch.__version__
    assert "the export names what serves this head" in found["dspark", "reduced"].detail


def spoil_logits(row: Row) -> None:
    row.found["logits"][0, 0] += 0.01 * row.found["logits"].abs().max()


def spoil_captured(row: Row) -> None:
    row.found["captured"] = row.found["captured"].roll(1, dims=-1)


def spoil_shape(row: Row) -> None:
    row.found["captured"] = row.found["captured"][:, 1:].contiguous()


def spoil_parameter(row: Row) -> None:
    row.found["model.norm.weight"][0] += 1


def lose_parameter(row: Row) -> None:
    del row.found["model.fc.weight"]


def fill_another(row: Row) -> None:
    row.found["of_the_target"][1] = 0


def spoil_vocabulary(row: Row) -> None:
    ids = row.found.get("hot_token_id")
    if ids is not None:
        row.found["hot_token_id"] = ids - torch.arange(len(ids))


def spoil_reading(row: Row) -> None:
    row.said["reads"]["rope_theta"] += 1


def raise_error(row: Row) -> None:
    row.said = {"name": row.said["name"], "error": "KeyError: 'd2t'", "versions": {}}


def end_early(row: Row) -> None:
    row.said["name"] = "another"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (spoil_logits, "logits differ by 1.0e-02 of the largest"),
        (spoil_captured, "what the target captures differ by"),
        (spoil_shape, "what the target captures differ by inf"),
        (spoil_parameter, "model.norm.weight does not hold what the file has for it"),
        (lose_parameter, "model.fc.weight does not hold what the file has for it"),
        (fill_another, "of_the_target is filled, which the simulation does not say"),
        (spoil_vocabulary, "hot_token_id does not hold what the file has for it"),
        (spoil_reading, "rope_theta: SGLang has 10001.0, the simulation 10000.0"),
        (raise_error, "KeyError: 'd2t'"),
        (end_early, "its process ended before this one"),
    ],
)
def test_what_differs_fails(
    spoil: Spoil, said: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (entry,) = checked(place, tmp_path, monkeypatch, spoil)
    assert (entry.status, entry.head) == (FAILED, "random")
    assert said in entry.detail


def test_windows_are_felt_where_they_bite(place: Path, tmp_path: Path) -> None:
    target = TargetModel.load(str(place))
    options = {"num_layers": 2, "window_layers": [0], "causal": True}
    logits = []
    for window in (8, 14):  # of 6 rows of text and 8 of the block
        head = random_head("dflash", target, sliding_window=window, **options)
        write_as("dflash", head, tmp_path / str(window))
        golden = load_file(tmp_path / str(window) / GOLDEN)
        logits.append((golden["logits"], sglang_check._wanted(head, golden)))
    assert sglang_check.difference(*logits[1]) < 1e-6
    assert sglang_check.difference(*logits[0]) > 1e-3


def test_blocks_that_sglang_must_be_told_are_said(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_more(row: Row) -> None:
        row.said["rows_unasked"] += not row.said["reads"]["sample_from_anchor"]

    entry = checked(place, tmp_path, monkeypatch, one_more, families=("dspark",))[0]
    details = dict(detail.split(": ", 1) for detail in entry.detail.split("; "))
    assert "blocks of 8 rows unless it is told 7" in details.pop("in place")
    assert not any("unless" in said for said in details.values())


def test_a_missing_environment_is_a_gap(
    place: Path, heads: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_check, "FORMS", sglang_check.FORMS[:1])
    setting = Setting(place, {"one": heads["one"]}, tmp_path, install=False)
    entries = list(sglang_check.check(setting))
    assert [(entry.status, entry.head) for entry in entries] == [
        (SKIPPED, "one"),
        (SKIPPED, "random"),
    ]
    assert all("'sglang' is missing" in entry.detail for entry in entries)


def test_a_program_that_cannot_run_is_a_gap(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: Any, **__: Any) -> str:
        raise CannotRun("python ended with 1: No module named 'sglang'")

    monkeypatch.setattr(sglang_check, "FORMS", sglang_check.FORMS[:1])
    monkeypatch.setattr(sglang_check, "output", run)
    setting = Setting(place, {}, tmp_path, {"sglang": Path("python")})
    (entry,) = sglang_check.check(setting)
    assert (entry.status, entry.detail) == (
        SKIPPED,
        "python ended with 1: No module named 'sglang'",
    )
