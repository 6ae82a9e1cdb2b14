"""Native MTP modules stitched into a checkpoint: the target stays as it was, its modules do not."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from drafters.export import check_as, format_of, read_head, write_as
from drafters.mtp import MtpDrafter
from drafters.mtp_native import load_native_mtp
from tests.drafters.export.stitched import (
    form,
    is_module,
    opened,
    raw,
    read_config,
    saved,
    tuned,
)
from tests.drafters.export.written import logits
from tests.drafters.test_mtp_native import IDS, teach
from tests.native_mtp import LAYERS, MODULES, save_checkpoint
from training.objectives import ObjectiveOptions, build_objective

pytestmark = pytest.mark.usefixtures("quiet")
THEIRS = [("deepseek_v3", 1), ("deepseek_v3", 2), ("glm4_moe", 3), ("mellum", 1)]
"""What transformers itself can run."""


@pytest.mark.parametrize(("kind", "modules"), MODULES)
def test_modules_come_back_the_same_and_the_target_is_untouched(
    tmp_path: Path, kind: str, modules: int
) -> None:
    target = saved(tmp_path / "target", kind, modules)
    head = tuned(target)
    export = write_as(form(kind), head, tmp_path / "out")
    assert format_of(tmp_path / "out") == form(kind)

    again = read_head(tmp_path / "out", target)
    assert isinstance(again, MtpDrafter)
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert again.config.own_fields() == head.config.own_fields()
    assert torch.equal(logits(again), logits(head))

    before, after = raw(tmp_path / "target"), raw(tmp_path / "out")
    assert set(before) == set(after)
    kept = [name for name in before if not is_module(name)]
    assert all(before[name] == after[name] for name in kept)
    assert len(after) - len(kept) == export.num_tensors
    changed = [name for name in before if before[name] != after[name]]
    assert {
        name for name in changed if "embed_tokens" in name or "shared_head.head" in name
    } == set()
    assert len(changed) >= 12 * modules
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(after)
    assert index["metadata"]["total_size"] == sum(len(data) for *_, data in after.values())


@pytest.mark.parametrize(("kind", "modules"), MODULES)
def test_the_stitched_folder_is_the_same_target(tmp_path: Path, kind: str, modules: int) -> None:
    target = saved(tmp_path / "target", kind, modules)
    write_as(form(kind), tuned(target), tmp_path / "out")
    again = opened(tmp_path / "out")
    ids = torch.tensor([IDS])
    assert torch.equal(again.forward(ids).logits, target.forward(ids).logits)
    assert again.fingerprint() == target.fingerprint()
    assert torch.equal(logits(load_native_mtp(again)), logits(read_head(tmp_path / "out", target)))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {path.name for path in (tmp_path / "target").iterdir()} - names == {
        "model-00002-of-00002.safetensors"  # held nothing but the old modules
    }


@pytest.mark.parametrize(("kind", "modules"), THEIRS)
def test_transformers_computes_the_same_from_the_file(
    tmp_path: Path, kind: str, modules: int
) -> None:
    """Its `MtpModel`, which `generate(use_mtp=True)` drafts with, reads the stitched folder."""
    head = tuned(saved(tmp_path / "target", kind, modules))
    write_as(form(kind), head, tmp_path / "out")
    target = opened(tmp_path / "out")
    target.model._keys_to_ignore_on_load_unexpected = ["mtp.*"] + [
        rf"model\.layers\.{LAYERS + module}.*" for module in range(4)
    ]
    theirs = MtpModel.from_pretrained(target.model)
    ids, length = torch.tensor([IDS]), len(IDS)
    with torch.no_grad():
        drafts, expected, _ = theirs(
            input_ids=ids[:, 1:],
            last_hidden_states=target.forward(ids[:, :-1]).last_hidden,
            attention_mask=None,
            position_ids=torch.arange(length - 1)[None],
            mtp_cache=MtpCache(config=theirs.config),
        )
        objective = build_objective(head, ObjectiveOptions(steps=1 if modules == 1 else None))
        hidden = objective.unroll(teach(target, IDS + drafts[0].tolist()))
        found = [head.logits(rows[0, length - 2], depth) for depth, rows in enumerate(hidden)]
    torch.testing.assert_close(torch.stack(found), expected[0], rtol=1e-4, atol=1e-4)


def test_names_and_keys_of_the_deepseek_form(tmp_path: Path) -> None:
    write_as("mtp-deepseek", tuned(saved(tmp_path / "target", "deepseek_v3")), tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model-mtp.safetensors")
    shapes = {name.removeprefix("model.layers.2."): list(t.shape) for name, t in tensors.items()}
    experts = {f"mlp.experts.{expert}.{part}_proj.weight" for expert in range(4) for part in GATED}
    assert {name: shape for name, shape in shapes.items() if name not in experts} == {
        "embed_tokens.weight": [96, 32],
        "enorm.weight": [32],
        "hnorm.weight": [32],
        "eh_proj.weight": [32, 64],
        "shared_head.norm.weight": [32],
        "shared_head.head.weight": [96, 32],
        "input_layernorm.weight": [32],
        "post_attention_layernorm.weight": [32],
        "self_attn.q_a_proj.weight": [16, 32],
        "self_attn.q_a_layernorm.weight": [16],
        "self_attn.q_b_proj.weight": [64, 16],
        "self_attn.kv_a_proj_with_mqa.weight": [24, 32],
        "self_attn.kv_a_layernorm.weight": [16],
        "self_attn.kv_b_proj.weight": [80, 16],
        "self_attn.o_proj.weight": [32, 48],
        "mlp.gate.weight": [4, 32],
        "mlp.gate.e_score_correction_bias": [4],
        "mlp.shared_experts.gate_proj.weight": [24, 32],
        "mlp.shared_experts.up_proj.weight": [24, 32],
        "mlp.shared_experts.down_proj.weight": [32, 24],
    }
    assert shapes["mlp.experts.3.gate_proj.weight"] == [24, 32]
    assert shapes["mlp.experts.3.down_proj.weight"] == [32, 24]
    config = read_config(tmp_path / "out")
    assert config == {**read_config(tmp_path / "target"), "num_nextn_predict_layers": 1}


GATED = ("gate", "up", "down")


def test_names_and_keys_of_the_qwen_form(tmp_path: Path) -> None:
    write_as("mtp-qwen", tuned(saved(tmp_path / "target", "qwen3_5_text")), tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model-mtp.safetensors")
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {
        "mtp.fc.weight": [32, 64],
        "mtp.pre_fc_norm_embedding.weight": [32],
        "mtp.pre_fc_norm_hidden.weight": [32],
        "mtp.norm.weight": [32],
        "mtp.layers.0.input_layernorm.weight": [32],
        "mtp.layers.0.post_attention_layernorm.weight": [32],
        "mtp.layers.0.self_attn.q_proj.weight": [128, 32],
        "mtp.layers.0.self_attn.k_proj.weight": [32, 32],
        "mtp.layers.0.self_attn.v_proj.weight": [32, 32],
        "mtp.layers.0.self_attn.o_proj.weight": [32, 64],
        "mtp.layers.0.self_attn.q_norm.weight": [16],
        "mtp.layers.0.self_attn.k_norm.weight": [16],
        "mtp.layers.0.mlp.gate_proj.weight": [48, 32],
        "mtp.layers.0.mlp.up_proj.weight": [48, 32],
        "mtp.layers.0.mlp.down_proj.weight": [32, 48],
    }
    config = read_config(tmp_path / "out")
    assert config == {**read_config(tmp_path / "target"), "mtp_num_hidden_layers": 1}


def test_qwen3_next_counts_with_the_other_key(tmp_path: Path) -> None:
    export = write_as("mtp-qwen", tuned(saved(tmp_path / "target", "qwen3_next")), tmp_path / "out")
    assert read_config(tmp_path / "out")["num_nextn_predict_layers"] == 1
    assert export.served == ("vllm", "sglang")


# Other layouts of the target ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["glm4_moe", "qwen3_5_text"])
def test_modules_for_a_target_that_had_none(tmp_path: Path, kind: str) -> None:
    saved(tmp_path / "with", kind)
    bare = saved(tmp_path / "bare", kind, modules=0)
    head = load_native_mtp(bare, tmp_path / "with")
    write_as(form(kind), head, tmp_path / "out")
    assert set(raw(tmp_path / "out")) == set(raw(tmp_path / "with"))
    assert torch.equal(logits(load_native_mtp(opened(tmp_path / "out"))), logits(head))


@pytest.mark.parametrize("kind", ["glm4_moe", "qwen3_next"])
def test_a_target_in_one_file_that_holds_the_old_modules_too(tmp_path: Path, kind: str) -> None:
    folder = save_checkpoint(tmp_path / "target", kind, dtype=torch.float32)
    one_file(folder)
    (folder / ".hidden").write_text("")
    (folder / "extra").mkdir()
    (folder / "extra" / "notes.txt").write_text("kept")
    target = opened(folder)
    head = tuned(target)
    write_as(form(kind), head, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").glob("model*")) == [
        "model-mtp.safetensors",
        "model-target.safetensors",
        "model.safetensors.index.json",
    ]
    before, after = raw(folder), raw(tmp_path / "out")
    assert {name for name in before if before[name] != after[name]} <= set(
        filter(is_module, before)
    )
    again = opened(tmp_path / "out")
    ids = torch.tensor([IDS])
    assert torch.equal(again.forward(ids).logits, target.forward(ids).logits)
    assert torch.equal(logits(load_native_mtp(again)), logits(head))
    assert (tmp_path / "out" / "extra" / "notes.txt").read_text() == "kept"
    assert not (tmp_path / "out" / ".hidden").exists()


def one_file(folder: Path) -> None:
    """Put a checkpoint of two shards into one file."""
    tensors: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
        path.unlink()
    (folder / "model.safetensors.index.json").unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_stitched_checkpoint_is_stitched_again(tmp_path: Path) -> None:
    head = tuned(saved(tmp_path / "target", "glm4_moe"))
    write_as("mtp-deepseek", head, tmp_path / "out")
    second = tuned(opened(tmp_path / "out"))
    write_as("mtp-deepseek", second, tmp_path / "again")
    assert set(raw(tmp_path / "again")) == set(raw(tmp_path / "out"))
    assert torch.equal(logits(load_native_mtp(opened(tmp_path / "again"))), logits(second))
    assert not torch.equal(logits(second), logits(head))


def test_a_nested_config(tmp_path: Path) -> None:
    """A multimodal model keeps the keys of its language model one level down."""
    head = tuned(saved(tmp_path / "target", "qwen3_5_text"))
    nested = {"model_type": "qwen3_5", "text_config": read_config(tmp_path / "target")}
    (tmp_path / "target" / "config.json").write_text(json.dumps(nested))
    write_as("mtp-qwen", head, tmp_path / "out")
    found = read_config(tmp_path / "out")
    assert found["text_config"]["mtp_num_hidden_layers"] == 1
    assert set(found) == set(nested)


def test_a_released_checkpoint_is_a_head_as_it_is(tmp_path: Path) -> None:
    target = saved(tmp_path, "deepseek_v3", 2)
    assert format_of(tmp_path) == "mtp-deepseek"
    assert torch.equal(logits(read_head(tmp_path, target)), logits(load_native_mtp(target)))
    check_as("mtp-deepseek", tmp_path, target)
