"""The engines' loaders, simulated: what is said to be served is used whole, and faults are seen."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from drafters import Drafter, TargetModel
from drafters.export import read_as, write_as
from drafters.export.engines import LOADERS, Loader, engine_problems, loaders_for
from drafters.export.engines.loader import load
from tests.drafters.export.written import Written, make_head
from tests.tiny import tiny_target

REDUCED = {"draft_vocab_size": 40}
BLOCK = {"num_layers": 2}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("eagle3", "sglang", {}),
    ("eagle3", "sglang", {**REDUCED, "fc_norm": True, "norm_output": True}),
    ("eagle3", "sglang", {**REDUCED, "norm_before_fc": True}),
    ("eagle3", "vllm", {**REDUCED, "norm_before_residual": True, "num_layers": 2}),
    ("eagle3", "vllm", {"norm_before_fc": True, "feature_layers": [1, 2, 3, 4]}),
    ("eagle3", "modelopt", REDUCED),
    ("eagle3", "speculators-eagle3", {**REDUCED, "norm_before_residual": True}),
    ("eagle3", "speculators-eagle3", {"qk_norm": True, "feature_layers": [1, 2, 3, 4]}),
    ("peagle", "vllm-peagle", {**REDUCED, "num_layers": 2}),
    ("peagle", "speculators-peagle", {"num_layers": 1}),
    ("eagle1", "eagle1", {}),
    ("eagle1", "eagle1", {"attention_bias": True}),
    ("eagle1", "eagle1-sglang", {"fc_bias": True}),
    ("medusa", "medusa", {}),
    ("medusa", "vllm-medusa", {"shared_lm_head": True, **REDUCED}),
    ("dflash", "dflash", {**BLOCK, "causal": True}),
    ("dflash", "dflash", {**BLOCK, "sliding_window": 16, "window_layers": [0]}),
    ("dflash", "dflash-vllm", {**BLOCK, **REDUCED}),
    ("dflash", "speculators-dflash", {**BLOCK, "causal": True}),
    ("dspark", "dspark", {**BLOCK, "markov_type": "gated"}),
    ("dspark", "dspark", {**BLOCK, "sample_from_anchor": False}),
    ("dspark", "dspark-specforge", BLOCK),
    ("dspark", "speculators-dspark", {**BLOCK, **REDUCED}),
]


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(dtype=torch.float32)


def newest(problems: dict[Loader, list[str]], engine: str) -> list[str]:
    """Of the latest version of an engine that takes the folder."""
    return [found for loader, found in problems.items() if loader.engine == engine][-1]


def written(
    family: str, dialect: str, target: TargetModel, tmp_path: Path, **options: Any
) -> tuple[Written, Drafter]:
    head = make_head(family, target, **options)
    export = write_as(dialect, head, tmp_path / "head")
    names = ("model.safetensors", "medusa_lm_head.safetensors")
    weights = next(name for name in names if (export.folder / name).is_file())
    return Written(export.folder, weights), read_as(dialect, export.folder, target)


@pytest.mark.parametrize(("family", "dialect", "options"), CASES)
def test_engines_use_all_of_what_is_said_to_be_served(
    family: str, dialect: str, options: dict[str, Any], target: TargetModel, tmp_path: Path
) -> None:
    head = make_head(family, target, **options)
    export = write_as(dialect, head, tmp_path / "head")
    again = read_as(dialect, export.folder, target)
    problems = engine_problems(export.folder, again)

    simulated = set(export.served) & {"sglang", "vllm"}
    assert simulated
    assert simulated <= {loader.engine for loader in problems}
    assert [newest(problems, engine) for engine in simulated] == [[]] * len(simulated)


def faults(folder: Written, head: Drafter, engine: str) -> list[str]:
    return newest(engine_problems(folder.save(), head), engine)


def test_a_renamed_tensor_is_ignored_by_one_engine_and_refused_by_the_other(
    target: TargetModel, tmp_path: Path
) -> None:
    folder, head = written("eagle3", "sglang", target, tmp_path)
    folder.tensors["midlayer.self_attn.query.weight"] = folder.tensors.pop(
        "midlayer.self_attn.q_proj.weight"
    )
    lost = "model.layers.0.self_attn.q_proj.weight is filled by no tensor of the file"
    ignored, kept = faults(folder, head, "sglang")
    assert "query.weight is ignored without a word" in ignored and lost in kept
    refused, kept = faults(folder, head, "vllm")
    assert "query.weight is refused" in refused and lost in kept


def test_a_bias_is_dropped_unless_it_is_zero(target: TargetModel, tmp_path: Path) -> None:
    folder, head = written("eagle1", "eagle1", target, tmp_path)
    folder.tensors["fc.bias"] = torch.zeros(32)
    assert faults(folder, head, "vllm") == []
    folder.tensors["fc.bias"] = torch.ones(32)
    assert faults(folder, head, "vllm") == ["fc.bias is dropped without a word"]


def test_sglang_needs_a_bias_for_eagle_1(target: TargetModel, tmp_path: Path) -> None:
    folder, head = written("eagle1", "eagle1-sglang", target, tmp_path)
    del folder.tensors["fc.bias"]
    assert "model.fc.bias is filled by no tensor" in faults(folder, head, "sglang")[0]


def test_another_safetensors_file_is_read_too(target: TargetModel, tmp_path: Path) -> None:
    folder, head = written("eagle3", "sglang", target, tmp_path)
    save_file({"logits": torch.ones(2)}, folder.path / "golden.safetensors")
    assert faults(folder, head, "vllm") == [
        "logits is refused: the engine has no parameter model.logits"
    ]


def test_layer_ids_of_the_wrong_convention(target: TargetModel, tmp_path: Path) -> None:
    folder, head = written("eagle3", "sglang", target, tmp_path, feature_layers=[1, 3, 4])
    ids = "eagle_aux_hidden_state_layer_ids"
    folder.config["eagle_config"][ids] = folder.config[ids]
    assert faults(folder, head, "vllm") == []
    assert faults(folder, head, "sglang") == [
        "feature_layers: the engine takes (2, 4, 5) from config.json, the head needs (1, 3, 4)"
    ]
    del folder.config[ids]
    assert "feature_layers: the engine takes (2, 3, 3)" in faults(folder, head, "vllm")[0]


@pytest.mark.parametrize(
    ("key", "changed"),
    [("rope_parameters", {"rope_theta": 1.0}), ("norm_output", False), ("rms_norm_eps", 1e-3)],
)
def test_a_config_that_says_something_else(
    key: str, changed: Any, target: TargetModel, tmp_path: Path
) -> None:
    folder, head = written("eagle3", "sglang", target, tmp_path, norm_output=True)
    folder.config |= {key: changed, "rope_theta": None}
    name = "rope_theta" if key == "rope_parameters" else key
    assert any(found.startswith(name) for found in faults(folder, head, "sglang"))


def test_switches_that_sglang_does_not_know(target: TargetModel, tmp_path: Path) -> None:
    folder, head = written("eagle3", "vllm", target, tmp_path, norm_before_residual=True)
    assert faults(folder, head, "sglang") == [
        "norm_before_residual: the engine takes False from config.json, the head needs True"
    ]


def test_an_older_sglang_has_no_norm_before_the_fusion(target: TargetModel, tmp_path: Path) -> None:
    folder, head = written("eagle3", "sglang", target, tmp_path, norm_before_fc=True)
    problems = engine_problems(folder.path, head)
    older = [found for loader, found in problems.items() if loader.versions == ("0.5.12",)]
    assert older == [
        ["norm_before_fc: the engine takes False from config.json, the head needs True"]
    ]


def test_sglang_does_not_load_an_output_matrix_beside_no_draft_vocabulary(
    target: TargetModel, tmp_path: Path
) -> None:
    folder, head = written("eagle3", "sglang", target, tmp_path)
    folder.config["draft_vocab_size"] = None
    assert "lm_head.weight is ignored without a word" in faults(folder, head, "sglang")[0]
    assert faults(folder, head, "vllm") == []
    del folder.tensors["lm_head.weight"]
    assert faults(folder, head, "sglang") == []


def test_a_vocabulary_map_that_is_missing(target: TargetModel, tmp_path: Path) -> None:
    folder, head = written("eagle3", "sglang", target, tmp_path, **REDUCED)
    del folder.tensors["d2t"]
    assert "hot_token_id is filled by no tensor" in faults(folder, head, "sglang")[0]
    assert "draft_id_to_target_id is filled by no tensor" in faults(folder, head, "vllm")[0]


def test_sglang_reads_windows_as_transformers_leaves_them(
    target: TargetModel, tmp_path: Path
) -> None:
    windows = {"sliding_window": 8, "window_layers": [1], "causal": True}
    folder, head = written("dflash", "dflash", target, tmp_path, **BLOCK, **windows)
    assert faults(folder, head, "sglang") == []
    del folder.config["layer_types"]
    folder.config["max_window_layers"] = 0
    assert "windows: the engine takes (8, 8)" in faults(folder, head, "sglang")[0]
    folder.config |= {"max_window_layers": 1}
    assert faults(folder, head, "sglang") == []
    folder.config |= {"layer_types": ["full_attention", "sliding_attention"]}
    folder.config["use_sliding_window"] = False
    assert "need sliding_window and use_sliding_window" in faults(folder, head, "sglang")[0]


def test_what_sglang_stops_at(target: TargetModel, tmp_path: Path) -> None:
    folder, head = written("eagle1", "eagle1-sglang", target, tmp_path)
    for key, said in (
        ("tie_word_embeddings", "it stops as it shares the target's matrices"),
        ("attention_bias", "its projections have biases then"),
    ):
        folder.config[key] = True
        (found,) = faults(folder, head, "sglang")
        assert said in found
        folder.config[key] = False
    del folder.config["model_type"]
    assert faults(folder, head, "sglang") == ["model_type is missing at the top level"]


def test_causality_is_read_at_the_top_level_by_sglang(target: TargetModel, tmp_path: Path) -> None:
    folder, head = written("dflash", "dflash", target, tmp_path, **BLOCK, causal=True)
    older = [x for x in engine_problems(folder.path, head) if x.versions == ("0.5.12",)]
    told = engine_problems(folder.path, head)[older[0]]
    assert [problem.split(":")[0] for problem in told] == ["rope_theta", "causal"]
    assert "the engine takes 1000000.0 from config.json" in told[0]
    del folder.config["is_causal"]
    assert "causal: the engine takes (False, False)" in faults(folder, head, "sglang")[0]
    assert faults(folder, head, "vllm") == []
    del folder.config["dflash_config"]["causal"]
    assert "causal: the engine takes (False, False)" in faults(folder, head, "vllm")[0]


def test_dspark_keys_that_are_only_nested(target: TargetModel, tmp_path: Path) -> None:
    folder, head = written("dspark", "dspark", target, tmp_path, **BLOCK)
    folder.config["dflash_config"]["markov_rank"] = folder.config.pop("markov_rank")
    for engine in ("sglang", "vllm"):
        assert "markov_rank is missing at the top level" in faults(folder, head, engine)[0]


def test_the_last_key_that_could_mean_heads_counts(target: TargetModel, tmp_path: Path) -> None:
    folder, head = written("medusa", "vllm-medusa", target, tmp_path)
    folder.config["num_attention_heads"] = 2
    problems = faults(folder, head, "vllm")
    assert any("num_heads: the engine takes 2" in found for found in problems)


def test_a_wrapped_config_is_unwrapped(target: TargetModel, tmp_path: Path) -> None:
    folder, head = written("eagle1", "eagle1", target, tmp_path)
    folder.config = {"model_type": "eagle", "model": folder.config}
    assert faults(folder, head, "vllm") == []


def test_parameters_are_fused_as_the_engine_holds_them(target: TargetModel, tmp_path: Path) -> None:
    folder, head = written("eagle3", "sglang", target, tmp_path)
    loader = loaders_for(folder.config, "eagle3")[0]
    loaded = load(loader, folder.config, folder.tensors, head.target)
    parts = [folder.tensors[f"midlayer.self_attn.{x}_proj.weight"] for x in "qkv"]
    assert torch.equal(
        loaded.parameters["model.layers.0.self_attn.qkv_proj.weight"], torch.cat(parts)
    )
    assert not any(
        "q_proj" in name or "up_proj." in name.replace("gate_up_", "") for name in loaded.parameters
    )


def test_every_loader_says_where_it_was_read() -> None:
    assert {loader.engine for loader in LOADERS} == {"sglang", "vllm"}
    assert all(loader.source.startswith(f"{loader.engine}/") for loader in LOADERS)
    assert all(loader.versions and loader.families for loader in LOADERS)
