"""YAML plus overrides: what is read, what is refused, and that refusals name the key."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from training.config import (
    Eagle3Options,
    MedusaOptions,
    TrainConfig,
    dump_config,
    parse_config,
    save_config,
)

ROOT = Path(__file__).resolve().parents[2]
BASE: dict[str, Any] = {
    "target": {"name": "some/target"},
    "drafter": {"type": "eagle3"},
    "data": {"train": ["rows.jsonl"]},
    "run": {"out": "outputs/x"},
}
MEDUSA = {"drafter": {"type": "medusa"}}


def key_of(changes: object) -> str:
    """Test id: the first changed key."""
    if not isinstance(changes, dict):
        return ""
    section, values = next(iter(changes.items()))
    return f"{section}.{list(values)[-1]}={list(values.values())[-1]}"


def merged(changes: dict[str, Any]) -> dict[str, Any]:
    return {key: {**BASE.get(key, {}), **changes.get(key, {})} for key in BASE | changes}


@pytest.fixture
def parse(tmp_path: Path):
    """Write a YAML file with changes to the base and read it with overrides."""

    def inner(changes: dict[str, Any] | None = None, *overrides: str) -> TrainConfig:
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(merged(changes or {})))
        return parse_config(["--config", str(path), *overrides])

    return inner


# --- reading


def test_defaults(parse) -> None:
    config = parse()
    assert config.target.name == "some/target"
    assert isinstance(config.drafter, Eagle3Options)
    assert config.drafter.family == "eagle3"
    assert config.data.train == ["rows.jsonl"]
    assert (config.optim.lr, config.optim.betas) == (6e-4, (0.9, 0.95))
    assert (config.loss.name, config.loss.steps) == ("kl", None)


def test_both_ways_to_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(BASE))
    assert parse_config([f"--config={path}"]) == parse_config(["--config", str(path)])


def test_overrides_win_over_the_file(parse) -> None:
    config = parse(
        {"optim": {"lr": 1.0, "clip": 0.5}, "run": {"seed": 1}},
        "--optim.lr",
        "3e-4",
        "--run.seed=7",
        "--data.train=[a.jsonl, b.jsonl]",
        "--data.pack=false",
        "--evaluate.prompts=held.jsonl",
    )
    assert (config.optim.lr, config.optim.clip) == (3e-4, 0.5)
    assert config.run.seed == 7
    assert config.data.train == ["a.jsonl", "b.jsonl"]
    assert config.data.pack is False
    assert config.evaluate.prompts == "held.jsonl"


def test_everything_on_the_command_line() -> None:
    config = parse_config(
        [
            "--target.name=t",
            "--drafter.type=medusa",
            "--drafter.num_heads=2",
            "--data.train=[x]",
            "--run.out=o",
        ]
    )
    assert config.drafter == MedusaOptions(num_heads=2)


@pytest.mark.parametrize("text", ["3e-4", "3.0e-4", "0.0003", "3E-4"])
def test_floats_in_scientific_notation(tmp_path: Path, text: str) -> None:
    """YAML 1.1 reads 3e-4 as a string; it must arrive as the number it is."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(BASE) + f"optim:\n  lr: {text}\n  warmup: 0\n")
    for config in (
        parse_config(["--config", str(path)]),
        parse_config(["--config", str(path), f"--optim.lr={text}"]),
    ):
        assert config.optim.lr == 3e-4
        assert isinstance(config.optim.lr, float)
        assert config.optim.warmup == 0.0


def test_families_have_their_own_options(parse) -> None:
    config = parse({"drafter": {"type": "medusa", "num_heads": 3, "shared_lm_head": True}})
    assert isinstance(config.drafter, MedusaOptions)
    fields = config.drafter.head_fields()
    assert fields["num_heads"] == 3
    assert fields["shared_lm_head"] is True
    assert "draft_vocab_size" not in fields and "init_from" not in fields
    config = parse({"drafter": {"type": "eagle3", "feature_layers": [1, 2, 3], "fc_norm": True}})
    assert config.drafter.head_fields()["feature_layers"] == [1, 2, 3]


@pytest.mark.parametrize("changes", [{}, MEDUSA, {"optim": {"lr": 1e-5}, "loss": {"steps": 5}}])
def test_resolved_configuration_is_read_back(parse, tmp_path: Path, changes: dict) -> None:
    config = parse(changes, "--run.seed=3")
    save_config(config, tmp_path / "out")
    path = tmp_path / "out" / "config.yaml"
    assert parse_config(["--config", str(path)]) == config
    assert path.read_text() == dump_config(config)
    resolved = yaml.safe_load(path.read_text())
    assert resolved["optim"]["schedule"] == "cosine", "defaults are written out"


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*/*.yaml")), ids=lambda p: p.stem)
def test_recipes_of_the_project_are_valid(path: Path) -> None:
    if path.parent.name == "launch":
        assert yaml.safe_load(path.read_text())
        return
    config = parse_config(["--config", str(path)])
    assert config.target.name
    assert config.run.out.startswith("outputs/")


# --- refusals


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"optim": {"learning_rate": 1e-3}}, "learning_rate"),
        ({"optimizer": {"lr": 1e-3}}, "optimizer"),
        ({"drafter": {"type": "eagle3", "num_heads": 4}}, "num_heads"),
        ({"drafter": {"type": "medusa", "fc_norm": True}}, "fc_norm"),
        ({"run": {"step": 5}}, "step"),
    ],
    ids=key_of,
)
def test_unknown_keys_are_refused(parse, changes: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        parse(changes)


@pytest.mark.parametrize("override", ["--optim.learning_rate=1", "--run.step=3", "--nonsense=1"])
def test_unknown_flags_are_refused(
    parse, capsys: pytest.CaptureFixture[str], override: str
) -> None:
    """Also what could be short for a known one: --run.step is not --run.steps."""
    with pytest.raises((ValueError, SystemExit)) as caught:
        parse({}, override)
    assert override in str(caught.value) + capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"target": {"dtype": "int8"}}, r"target\.dtype"),
        ({"target": {"attn_implementation": "flash_attention_2"}}, "attn_implementation"),
        ({"drafter": {"type": "eagle9"}}, "eagle9"),
        ({"data": {"train": []}}, r"data\.train"),
        ({"data": {"max_length": 2}}, r"data\.max_length"),
        ({"data": {"answers": "a.jsonl"}}, r"data\.answers"),
        ({"data": {"regenerate": True, "answer_tokens": 0}}, r"answer_tokens"),
        ({"data": {"regenerate": True, "answer_batch": 0}}, r"answer_batch"),
        ({"data": {"regenerate": True, "answer_temperature": -1.0}}, r"answer_temperature"),
        ({"loss": {"name": "hinge"}}, r"loss\.name"),
        ({"loss": {"steps": 0}}, r"loss\.steps"),
        ({"loss": {"decay": 0.0}}, r"loss\.decay|decay"),
        ({"loss": {"chunk": -1}}, r"loss\.chunk|chunk"),
        ({"optim": {"lr": 0.0}}, "lr"),
        ({"optim": {"lr": -1e-3}}, "lr"),
        ({"optim": {"warmup": 1.0}}, "warmup"),
        ({"optim": {"clip": -1.0}}, "clip"),
        ({"optim": {"schedule": "step"}}, r"optim\.schedule"),
        ({"run": {"steps": 0}}, r"run\.steps"),
        ({"run": {"epochs": 0.0}}, r"run\.epochs"),
        ({"run": {"batch_size": 0}}, r"run\.batch_size"),
        ({"run": {"micro_batch_size": 0}}, r"run\.micro_batch_size"),
        ({"run": {"log_every": 0}}, r"run\.log_every"),
        ({"run": {"keep": 0}}, r"run\.keep"),
        ({"run": {"save_every": -1}}, r"run\.save_every"),
        ({"run": {"mixed_precision": "fp8"}}, r"run\.mixed_precision"),
        ({"evaluate": {"limit": 0}}, r"evaluate\.limit"),
        ({"evaluate": {"every": -1}}, r"evaluate\.every"),
        ({"evaluate": {"size": 1}}, r"evaluate\.size"),
        ({"evaluate": {"max_new_tokens": 0}}, r"evaluate\.max_new_tokens"),
    ],
    ids=key_of,
)
def test_values_out_of_range_are_refused(parse, changes: dict, named: str) -> None:
    """Before anything is loaded, not after hours of training."""
    with pytest.raises(ValueError, match=named):
        parse(changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"optim": {"lr": "fast"}}, "lr"),
        ({"run": {"steps": "many"}}, "steps"),
        ({"run": {"batch_size": 1.5}}, "batch_size"),
        ({"data": {"train": 3}}, "train"),
    ],
    ids=key_of,
)
def test_wrong_types_are_refused(parse, changes: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        parse(changes)


@pytest.mark.parametrize("missing", [("target", "name"), ("data", "train"), ("run", "out")])
def test_missing_required_keys_are_named(tmp_path: Path, missing: tuple[str, str]) -> None:
    section, key = missing
    left = {name: dict(values) for name, values in BASE.items()}
    del left[section][key]
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(left))
    with pytest.raises(ValueError, match=key):
        parse_config(["--config", str(path)])


def test_contradictions_are_refused(parse) -> None:
    with pytest.raises(ValueError, match=r"loss\.steps .*medusa"):
        parse({**MEDUSA, "loss": {"steps": 3}})
    parse({"loss": {"steps": 3}})
    with pytest.raises(ValueError, match=r"data\.answers .*regenerate"):
        parse({"data": {"answers": "a.jsonl"}})
    parse({"data": {"answers": "a.jsonl", "regenerate": True}})


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing\.yaml"):
        parse_config(["--config", str(tmp_path / "missing.yaml")])


@pytest.mark.parametrize("text", ["target: [", "just words", "", "- a\n- list\n"])
def test_files_that_are_no_configuration_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match="config"):
        parse_config(["--config", str(path)])
