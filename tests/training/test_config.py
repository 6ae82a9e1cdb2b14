"""YAML plus overrides: what is read, what is refused, and that refusals name the key."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from drafters import FAMILIES
from drafters.families import DFlashConfig
from training.config import TrainConfig, dump_config, parse_config, save_config
from training.objectives import ObjectiveOptions
from training.objectives.options import ALL, ONLY
from training.options.drafter import NOT_IN_CONFIG, DrafterOptions, Eagle3Options, MedusaOptions

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
    assert config.loss == ObjectiveOptions()
    assert (config.loss.terms, config.loss.steps) == (None, None)
    resolved = config.loss.resolved(config.drafter.family)
    assert (resolved.terms, resolved.steps, resolved.decay) == ({"kl": 1.0}, 3, 0.8)


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
        "--loss.terms={kl: 0.5, tv: 1e-1}",
        "--loss.final={tv: 1.0}",
        "--loss.ramp=[0.1, 0.2]",
    )
    assert config.loss.terms == {"kl": 0.5, "tv": 0.1}
    assert config.loss.ramp == (0.1, 0.2)
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


MIXED = {"terms": {"kl": 1.0}, "final": {"lk_hybrid": 1.0, "ce": 0.1}, "ramp": [0.2, 0.4]}


@pytest.mark.parametrize("family", ALL)
def test_every_family_can_be_asked_for_by_its_fields(parse, family: str) -> None:
    """Every key of a family is a field of its config, with its default where it is not null."""
    config = parse({"drafter": {"type": family}})
    assert config.drafter.family == family
    known = FAMILIES[family].config_class
    fields = config.drafter.head_fields()
    assert set(vars(config.drafter)) - set(NOT_IN_CONFIG) <= set(known.__dataclass_fields__)
    for name, value in fields.items():
        if name != "confidence_head":  # on for training, off in what was never trained
            assert getattr(known, name) == value, name


def test_the_families_are_those_of_the_drafters() -> None:
    assert set(ALL) == set(FAMILIES) == set(DrafterOptions.get_known_choices())
    assert issubclass(FAMILIES["dflash"].config_class, DFlashConfig)


@pytest.mark.parametrize("name", ONLY)
def test_options_of_some_families_are_refused_by_the_others(parse, name: str) -> None:
    value = {"detach": True, "steps": 2, "anchors": 4}.get(name, 0.5)
    for family in ALL:
        changes = {"drafter": {"type": family}, "loss": {name: value}}
        if family in ONLY[name]:
            assert getattr(parse(changes).loss, name) == value
        else:
            with pytest.raises(ValueError, match=rf"loss\.{name} has no effect on {family}"):
                parse(changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        MEDUSA,
        {"optim": {"lr": 1e-5}, "loss": {"steps": 5}},
        {"loss": MIXED},
        *({"drafter": {"type": family}} for family in ALL),
    ],
    ids=str,
)
def test_resolved_configuration_is_read_back(parse, tmp_path: Path, changes: dict) -> None:
    config = parse(changes, "--run.seed=3")
    save_config(config, tmp_path / "out")
    path = tmp_path / "out" / "config.yaml"
    assert parse_config(["--config", str(path)]) == config
    assert path.read_text() == dump_config(config)
    resolved = yaml.safe_load(path.read_text())
    assert resolved["optim"]["schedule"] == "cosine", "defaults are written out"


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").rglob("*.yaml")), ids=lambda p: p.stem)
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
        ({"data": {"regenerate": True, "answer_temperatures": [-1.0]}}, r"answer_temperatures"),
        ({"data": {"regenerate": True, "answer_temperatures": [1.0, 1.0]}}, r"answer_temperatures"),
        ({"data": {"answer_temperatures": [1.0]}}, r"answer_temperatures.*regenerate"),
        ({"data": {"answer_server": "http://h"}}, r"answer_server.*regenerate"),
        ({"data": {"regenerate": True, "answer_model": "m"}}, r"answer_model.*answer_server"),
        ({"loss": {"terms": {"hinge": 1.0}}}, r"loss\.terms"),
        ({"loss": {"terms": {"kl": -1.0}}}, r"loss\.terms\.kl"),
        ({"loss": {"terms": {}}}, r"loss\.terms"),
        ({"loss": {"terms": {"smooth_l1": 1.0}}}, r"loss\.terms.*eagle1"),
        ({"loss": {"final": {"hinge": 1.0}}}, r"loss\.final"),
        ({"loss": {"ramp": [0.9, 0.1]}}, r"loss\.ramp"),
        ({"loss": {"weighting": "dice"}}, r"loss\.weighting"),
        ({"loss": {"on_policy": -1}}, r"loss\.on_policy"),
        ({"loss": {"top": 0}}, r"loss\.top"),
        ({"drafter": {"type": "eagle3", "start": "zero"}}, r"drafter\.start"),
        ({"drafter": {"type": "eagle3", "draft_vocab_coverage": 1.5}}, "draft_vocab_coverage"),
        ({"loss": {"steps": 0}}, r"loss\.steps"),
        ({"loss": {"decay": 0.0}}, r"loss\.decay"),
        ({"loss": {"chunk": -1}}, r"loss\.chunk"),
        ({"loss": {"confidence_weight": -1.0}}, r"loss\.confidence_weight"),
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
    with pytest.raises(ValueError, match=r"loss\.decay .*dpace"):
        parse({"loss": {"decay": 0.5, "weighting": "dpace"}})
    parse({"loss": {"weighting": "dpace"}})
    with pytest.raises(ValueError, match=r"loss\.ramp .*loss\.final"):
        parse({"loss": {"ramp": [0.1, 0.2]}})
    with pytest.raises(ValueError, match=r"loss\.top .*top_k"):
        parse({"loss": {"top": 4}})
    parse({"loss": {"top": 4, "terms": {"kl": 1.0}, "final": {"top_k": 1.0}}})
    with pytest.raises(ValueError, match=r"loss\.on_policy.*single draft"):
        parse({"loss": {"steps": 1, "on_policy": 1}})
    with pytest.raises(ValueError, match=r"confidence_at .*agreement"):
        parse({"drafter": {"confidence_rule": "agreement", "confidence_at": 0.7}})
    parse({"drafter": {"confidence_rule": "draft_mass", "confidence_at": 0.7}})
    with pytest.raises(ValueError, match=r"loss\.confidence_weight .*confidence_head"):
        parse({"drafter": {"confidence_head": False}, "loss": {"confidence_weight": 0.5}})
    parse({"loss": {"confidence_weight": 0.5}})
    with pytest.raises(ValueError, match=r"confidence_rule .*confidence_head"):
        parse({"drafter": {"confidence_head": False, "confidence_rule": "agreement"}})
    with pytest.raises(ValueError, match=r"init_from and drafter\.warm_from"):
        parse({"drafter": {"init_from": "a", "warm_from": "b"}})
    with pytest.raises(ValueError, match=r"draft_vocab_coverage .*draft_vocab_size"):
        parse({"drafter": {"draft_vocab_size": 5, "draft_vocab_coverage": 0.9}})
    with pytest.raises(ValueError, match=r"data\.answers .*regenerate"):
        parse({"data": {"answers": "a.jsonl"}})
    parse({"data": {"answers": "a.jsonl", "regenerate": True}})


@pytest.mark.parametrize(
    ("drafter", "named"),
    [
        ({"type": "dspark", "markov_type": "none", "markov_rank": 8}, r"drafter\.markov_rank"),
        ({"type": "hydra", "intermediate_size": 64}, r"drafter\.intermediate_size .*num_layers=1"),
        ({"type": "hydra", "num_layers": 0, "intermediate_size": 64}, "intermediate_size"),
    ],
)
def test_options_of_parts_that_are_not_there_are_refused(drafter: dict, named: str) -> None:
    given = dict(drafter)
    choice = DrafterOptions.get_choice_class(given.pop("type"))
    with pytest.raises(ValueError, match=named):
        choice(**given)
    there = {"num_layers": 1} if "intermediate_size" in given else {"markov_type": "rnn"}
    choice(**{**given, **there})


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing\.yaml"):
        parse_config(["--config", str(tmp_path / "missing.yaml")])


@pytest.mark.parametrize("text", ["target: [", "just words", "", "- a\n- list\n"])
def test_files_that_are_no_configuration_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match="config"):
        parse_config(["--config", str(path)])
