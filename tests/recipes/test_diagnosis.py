"""Heads broken in every way that users have met, each named rightly; and good ones cleared.

The heads are really trained, for seconds, on a target whose law they can learn: a head that knows
nothing gives no evidence.
"""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters import TargetModel
from drafters.export import write_as, write_native
from drafters.export.dialects.sglang import IDS
from drafters.vocab import to_offsets
from recipes.diagnosis import Evidence, Serving, load_head, variants
from recipes.diagnosis.diagnose import check_passes
from recipes.diagnosis.files import WrongShape
from recipes.diagnosis.static import check_rope, check_sampler, spectrum
from tests.recipes.diagnosing import (
    PROMPT,
    diagnosed,
    edited,
    evidence_of,
    faults,
    field,
    noise,
    small_target,
    trained,
)
from training.features import TargetBatch
from training.objectives import sequential

pytestmark = pytest.mark.slow

Heads = Callable[[str], Path]
Config = dict[str, Any]
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return small_target()


@pytest.fixture(scope="module")
def evidence(target: TargetModel) -> Evidence:
    return evidence_of(target)


def prompts_only(data: TargetBatch) -> TargetBatch:
    """The mask of the prompt in place of the answer's."""
    data.batch.supervised[:, PROMPT:] = False
    return data


RECIPES: dict[str, dict[str, Any]] = {
    "token before": {"family": "medusa", "later": 1},
    "token after": {"family": "eagle1", "later": -1},
    "prompts": {"family": "eagle1", "handed": prompts_only, "words": 12},
    "confident": {"family": "eagle3", "confidence_head": True},
    "whole": {"family": "eagle3", "draft_vocab_size": None},
}


@pytest.fixture(scope="module")
def heads(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Heads:
    """Folders of trained heads by family, by recipe, or by dialect ("sglang")."""
    folder, made = tmp_path_factory.mktemp("heads"), {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = folder / name
            if name == "sglang":
                write_as(
                    "sglang",
                    load_head(get("eagle3"), target).head,
                    made[name],
                    with_embeddings=True,
                )
            else:
                trained(target, **{"family": name, **RECIPES.get(name, {})}).save_pretrained(
                    made[name]
                )
        return made[name]

    return get


# Good heads -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["eagle3", "eagle1", "medusa", "mtp", "confident", "sglang", "whole"]
)
def test_a_good_head_is_cleared(
    name: str, heads: Heads, target: TargetModel, evidence: Evidence
) -> None:
    found = diagnosed(heads(name), target, evidence)
    assert found.faults == []
    assert found.overlap[0] > found.constant + 0.15
    assert found.fixed == found.overlap[0]


# Native files -----------------------------------------------------------------------------------


def shift_layers(by: int) -> Callable[[Config], None]:
    def change(config: Config) -> None:
        config["feature_layers"] = [k + by for k in config["feature_layers"]]

    return change


def swap_halves(*names: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in names:
            tensors[name] = tensors[name].roll(tensors[name].shape[1] // 2, 1)

    return change


def filled(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = value(tensors[name])

    return change


def shuffled(tensor: Tensor) -> Tensor:
    return tensor[torch.randperm(len(tensor), generator=torch.Generator().manual_seed(0))]


def not_finite(tensor: Tensor) -> Tensor:
    return tensor.index_fill(0, torch.tensor([0]), float("nan"))


def clipped(tensor: Tensor) -> Tensor:
    return (tensor * 1e6).clamp(-65504, 65504)


def turned(tensor: Tensor) -> Tensor:
    return tensor.T


def recorded(**prints: str) -> Callable[[Config], None]:
    return field(target_fingerprint=prints)


def dropped(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[name]

    return change


def lowered_norms(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if "norm" in name:
            tensors[name] = tensor - 1.0


UP, O_PROJ = "midlayer.mlp.up_proj.weight", "layers.0.self_attn.o_proj.weight"
BLOCK = "blocks.0.0.linear.weight"
QKV = tuple(f"midlayer.self_attn.{name}_proj.weight" for name in "qkv")
NATIVE: list[tuple[str, str, str, Any, Any]] = [
    # (fault, head, what is named, config, tensors)
    ("layer ids one high", "eagle3", "layer ids", shift_layers(1), None),
    ("layer ids one low", "eagle3", "layer ids", shift_layers(-1), None),
    ("a layer that is not there", "eagle3", "layer ids", field(feature_layers=[2, 3, 7]), None),
    ("q, k, v halves", "eagle3", "concat", None, swap_halves(*QKV)),
    ("fc halves", "eagle1", "concat", None, swap_halves("fc.weight")),
    ("hidden first", "mtp", "concat", field(hidden_first=True), None),
    ("offsets in the map", "eagle3", "vocabulary", None, filled("draft_vocab", to_offsets)),
    ("permuted map", "eagle3", "vocabulary", None, filled("draft_vocab", shuffled)),
    ("random lm_head", "eagle3", "tensors", None, filled("lm_head.weight", noise)),
    ("zero fc", "eagle3", "tensors", None, filled("fc.weight", torch.zeros_like)),
    ("o_proj turned", "eagle1", "transposed", None, filled(O_PROJ, turned)),
    ("fc turned", "eagle1", "transposed", None, filled("fc.weight", turned)),
    ("medusa block turned", "medusa", "transposed", None, filled(BLOCK, turned)),
    ("missing bias", "medusa", "tensors", None, dropped("blocks.1.0.linear.bias")),
    ("extra bias", "eagle1", "tensors", None, lambda t: t.update({"fc.bias": torch.ones(32)})),
    ("not finite", "eagle3", "dtype", None, filled(UP, not_finite)),
    ("clipped by float16", "eagle3", "dtype", None, filled(UP, clipped)),
    ("norm.weight lost", "mtp", "norm", None, lowered_norms),
    ("short range", "eagle3", "rope", field(max_position_embeddings=64), None),
    ("flat drafts", "eagle3", "sampler", field(draft_temperature=6.0), None),
    ("trained on the token before", "token before", "pairing", None, None),
    ("trained on the token after", "token after", "pairing", None, None),
    ("another target", "eagle3", "fingerprint", recorded(weights="0"), None),
    ("another template", "eagle3", "template", recorded(chat_template="0"), None),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "name", "check", "config", "tensors"), NATIVE)
def test_the_planted_fault_is_named(
    fault: str,
    name: str,
    check: str,
    config: Any,
    tensors: Any,
    heads: Heads,
    target: TargetModel,
    evidence: Evidence,
    tmp_path: Path,
) -> None:
    folder = edited(heads(name), tmp_path / "broken", config, tensors)
    found = diagnosed(folder, target, evidence)
    assert faults(found) == {check}, "\n".join(finding.line() for finding in found.faults)


def test_two_faults_are_both_found(
    heads: Heads, target: TargetModel, evidence: Evidence, tmp_path: Path
) -> None:
    folder = edited(heads("eagle3"), tmp_path / "broken", shift_layers(1), swap_halves(*QKV))
    assert faults(diagnosed(folder, target, evidence)) == {"concat", "layer ids"}


def test_a_head_that_learned_prompts_alone(heads: Heads, target: TargetModel) -> None:
    """Prompts of few words, which the target's answers leave behind."""
    text = evidence_of(target, 40, words=12)
    assert "mask" not in faults(diagnosed(heads("eagle1"), target, text))
    assert "mask" in faults(diagnosed(heads("prompts"), target, text))


def test_an_untrained_head_is_no_riddle(
    heads: Heads, target: TargetModel, evidence: Evidence, tmp_path: Path
) -> None:
    def random(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if tensor.ndim == 2:
                tensors[name] = noise(tensor)

    folder = edited(heads("mtp"), tmp_path / "broken", None, random)
    found = diagnosed(folder, target, evidence)
    assert faults(found) == {"tensors"}
    assert [f.verdict for f in found.findings if f.check == "trained"] == ["unknown"]


def test_a_vocabulary_of_other_text_is_named(
    heads: Heads, target: TargetModel, evidence: Evidence, tmp_path: Path
) -> None:
    """The tokens that this target says least."""
    laws = torch.cat([seen.law for seen in evidence.seen]).mean(0)
    rare = laws.argsort()[:8].sort().values
    head = trained(target, "eagle3", draft_vocab_size=8)
    assert head.draft_vocab is not None
    head.draft_vocab.copy_(rare)
    head.save_pretrained(tmp_path / "head")
    found = diagnosed(tmp_path / "head", target, evidence)
    assert "vocabulary" in faults(found)


@pytest.mark.parametrize(
    ("serving", "named"),
    [
        (Serving(1.0, "rejection"), set()),
        (Serving(0.5, "rejection"), {"sampler"}),
        (Serving(0.0, "match"), {"sampler"}),
        (Serving(1.0, "match"), {"sampler"}),
    ],
)
def test_the_sampler_of_the_confidence(
    serving: Serving, named: set[str], heads: Heads, target: TargetModel, evidence: Evidence
) -> None:
    found = check_sampler(load_head(heads("confident"), target), serving)
    assert {finding.check for finding in found if finding.verdict == "FAULT"} == named


def test_a_training_pass_that_differs_from_decoding(
    heads: Heads, target: TargetModel, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = load_head(heads("eagle3"), target).head
    assert check_passes(head, target, evidence).verdict == "ok"
    shifted = sequential.shifted_tokens
    monkeypatch.setattr(sequential, "shifted_tokens", lambda ids, by: shifted(ids, by + 1))
    assert check_passes(head, target, evidence).verdict == "FAULT"


def test_a_head_of_a_larger_target_is_refused(
    heads: Heads, target: TargetModel, tmp_path: Path
) -> None:
    folder = edited(heads("eagle3"), tmp_path / "broken", field(target_num_layers=7))
    with pytest.raises(WrongShape, match="target_num_layers"):
        load_head(folder, target)


def test_another_target_of_the_same_shape(heads: Heads, evidence: Evidence) -> None:
    other = small_target(seed=1)
    found = diagnosed(heads("eagle3"), other, evidence_of(other))
    assert {"fingerprint"} <= faults(found) <= {"fingerprint", "trained"}


def test_an_export_that_was_altered(
    heads: Heads, target: TargetModel, evidence: Evidence, tmp_path: Path
) -> None:
    write_native(load_head(heads("eagle1"), target).head, tmp_path / "head")
    assert diagnosed(tmp_path / "head", target, evidence).faults == []
    edited(tmp_path / "head", tmp_path / "other", None, filled("fc.weight", lambda t: 1.02 * t))
    (tmp_path / "head" / "golden.logits").rename(tmp_path / "other" / "golden.logits")
    found = diagnosed(tmp_path / "other", target, evidence).faults
    assert [(fault.check, "no longer gives the logits" in fault.message) for fault in found] == [
        ("tensors", True)
    ]


def test_another_base_without_effect_is_at_least_mentioned(
    heads: Heads, target: TargetModel, tmp_path: Path
) -> None:
    """So short a text cannot tell; only longer ones could."""
    folder = edited(heads("mtp"), tmp_path / "other", field(rope_theta=100.0))
    found = check_rope(load_head(folder, target), target, longest=32)
    assert [finding.verdict for finding in found] == ["unknown"]
    assert "rope_theta is 100, the target's 10000" in found[0].message


def test_interleaved_rows_are_put_back(heads: Heads, target: TargetModel) -> None:
    head = load_head(heads("mtp"), target).head
    back = variants.changed(head, variants.reordered_rotary(to_halves=False))
    assert back is not None
    again = variants.changed(back, variants.reordered_rotary(to_halves=True))
    assert again is not None
    for name, weight in head.named_parameters():
        assert torch.equal(again.get_parameter(name), weight)
        moved = not torch.equal(back.get_parameter(name), weight)
        assert moved == ("q_proj" in name or "k_proj" in name)


# Files of other trainers ------------------------------------------------------------------------


def flip_layers(config: Config) -> None:
    """Both lists as hidden_states indices."""
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = config[IDS]


def sglang_ids_at_the_top(config: Config) -> None:
    """SGLang's ids, one lower, where vLLM's belong; nothing else in the file."""
    config[IDS] = config.pop("eagle_config")[IDS]


def absolute(tensors: Tensors) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def vllm_names(config: Config, tensors: Tensors) -> None:
    for name in list(tensors):
        tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)
    del config["eagle_config"]


def speculators(config: Config, tensors: Tensors) -> None:
    vllm_names(config, tensors)
    own = {IDS, "draft_vocab_size", "fc_norm", "norm_output", "target_hidden_size"}
    inner = {name: config.pop(name) for name in list(config) if name not in own}
    config |= {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}
    config["transformer_layer_config"] = inner


def sequence(*steps: Any) -> Callable[[Config, Tensors], None]:
    def change(config: Config, tensors: Tensors) -> None:
        for step in steps:
            step(config, tensors)

    return change


SGLANG: list[tuple[str, set[str], Any]] = [
    ("vLLM's names", set(), vllm_names),
    ("speculators", set(), speculators),
    ("lists that contradict", {"layer ids"}, lambda c, t: flip_layers(c)),
    ("SGLang's ids at the top", {"layer ids"}, lambda c, t: sglang_ids_at_the_top(c)),
    ("absolute d2t", {"vocabulary"}, lambda c, t: absolute(t)),
    ("no d2t", {"vocabulary"}, lambda c, t: t.pop("d2t")),
    ("swapped halves", {"concat"}, sequence(lambda c, t: swap_halves(*QKV)(t))),
    (
        "speculators' residual",
        {"norm"},
        sequence(speculators, lambda c, t: c.update(norm_before_residual=True)),
    ),
    ("fc turned", {"transposed"}, lambda c, t: t.update({"fc.weight": t["fc.weight"].T})),
    ("a bias too many", {"tensors"}, lambda c, t: t.update({"fc.bias": torch.ones(32)})),
    ("an unknown layer", {"tensors"}, lambda c, t: t.update({"extra.weight": torch.ones(2, 2)})),
    ("short range", {"rope"}, lambda c, t: c.update(max_position_embeddings=128)),
    (
        "another target's embedding",
        {"fingerprint"},
        lambda c, t: t.update({"embed_tokens.weight": noise(t["embed_tokens.weight"])}),
    ),
    (
        "fc_norm without its switch",
        {"norm"},
        lambda c, t: t.update({f"fc_norm.{i}.weight": torch.ones(32) for i in range(3)}),
    ),
]


@pytest.mark.parametrize(("fault", "named", "change"), SGLANG)
def test_a_file_of_another_trainer(
    fault: str,
    named: set[str],
    change: Any,
    heads: Heads,
    target: TargetModel,
    evidence: Evidence,
    tmp_path: Path,
) -> None:
    """No fingerprint, no template, no export record: only the tensors and the text speak."""
    fields: Config = {}
    weights: Tensors = {}
    edited(heads("sglang"), tmp_path / "plain", fields.update, weights.update)
    change(fields, weights)
    folder = write_foreign(tmp_path / "broken", fields, weights)
    found = diagnosed(folder, target, evidence)
    assert faults(found) == named, "\n".join(finding.line() for finding in found.faults)


def test_layers_that_no_file_records_are_unknown(
    heads: Heads, target: TargetModel, tmp_path: Path
) -> None:
    """The engines' default is taken, and said to be a guess."""

    def silent(config: Config) -> None:
        del config[IDS], config["eagle_config"]

    loaded = load_head(edited(heads("sglang"), tmp_path / "silent", silent), target)
    said = [(found.check, found.verdict) for found in loaded.findings if found.verdict != "ok"]
    assert said == [("layer ids", "unknown")]
    assert loaded.layers == (0, 3, 5)


def write_foreign(folder: Path, config: Config, tensors: Tensors) -> Path:
    """A head's folder without anything of ours."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    kept = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
    save_file(kept, folder / "model.safetensors")
    return folder


MEDUSA = {"medusa_num_heads": 3, "medusa_num_layers": 1, "hidden_size": 32}


def official(tensors: Tensors) -> Tensors:
    """Medusa's own names."""
    renamed = {}
    for name, tensor in tensors.items():
        kind, head, *rest = name.split(".")
        renamed[f"{head}.1.weight" if kind == "lm_heads" else f"{head}.{'.'.join(rest)}"] = tensor
    return renamed


@pytest.mark.parametrize("kind", ["official", "vllm", "no bias", "turned"])
def test_medusa_files(
    kind: str, heads: Heads, target: TargetModel, evidence: Evidence, tmp_path: Path
) -> None:
    tensors, named = official(load_file(heads("medusa") / "model.safetensors")), set()
    if kind in ("vllm", "no bias"):
        renamed = {}
        for name, tensor in tensors.items():
            head, layer, *rest = name.split(".")
            block = f"blocks.{head}.layers.{layer}.{rest[-1]}"
            renamed[block if "linear" in rest else f"lm_heads.{head}.weight"] = tensor
        tensors = renamed
    if kind == "no bias":
        tensors, named = {n: t for n, t in tensors.items() if "bias" not in n}, {"tensors"}
    if kind == "turned":
        tensors["0.0.linear.weight"], named = tensors["0.0.linear.weight"].T, {"transposed"}
    folder = write_foreign(tmp_path / "head", MEDUSA, tensors)
    assert faults(diagnosed(folder, target, evidence)) == named


@pytest.mark.parametrize("swapped", [False, True])
def test_eagle1_files(
    swapped: bool, heads: Heads, target: TargetModel, evidence: Evidence, tmp_path: Path
) -> None:
    config = json.loads((heads("eagle1") / "config.json").read_text())
    shape = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    fields = {name: config[name] for name in (*shape, "rms_norm_eps", "rope_theta", "vocab_size")}
    fields |= {"max_position_embeddings": 512, "architectures": ["LlamaForCausalLM"]}
    tensors = load_file(heads("eagle1") / "model.safetensors")
    if swapped:
        swap_halves("fc.weight")(tensors)
    folder = write_foreign(tmp_path / "head", fields, tensors)
    assert faults(diagnosed(folder, target, evidence)) == ({"concat"} if swapped else set())


# The parts --------------------------------------------------------------------------------------


def test_the_spectrum_of_random_numbers_is_one() -> None:
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(300, 200, generator=generator)
    assert spectrum(flat) == pytest.approx(1.0, abs=0.05)
    assert spectrum(flat + 2 * torch.outer(flat[:, 0], flat[0]) / 10) > 1.5


def test_a_folder_without_a_head(tmp_path: Path, target: TargetModel) -> None:
    folder = write_foreign(tmp_path / "head", {"hidden_size": 32}, {"some.weight": torch.ones(2)})
    with pytest.raises(ValueError, match="no head of a known dialect"):
        load_head(folder, target)


def test_pickles_that_hold_more_than_tensors_are_not_opened(
    tmp_path: Path, target: TargetModel
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Path))
    with pytest.raises(ValueError, match="more than tensors"):
        load_head(tmp_path, target)
