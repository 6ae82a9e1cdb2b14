"""Native MTP modules stitched into a checkpoint: the target stays as it was, its modules do not."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from drafters import TargetModel, build_drafter
from drafters.export import (
    ExportError,
    check_as,
    format_of,
    golden_inputs,
    golden_logits,
    read_as,
    read_head,
    write_as,
)
from drafters.export.stitched.checkpoint import read_header
from drafters.mtp import MtpDrafter
from drafters.mtp_native import load_native_mtp
from scripts import convert
from scripts import export as export_script
from tests.drafters.test_mtp_native import IDS, teach
from tests.native_mtp import LAYERS, MODULES, load_checkpoint, save_checkpoint
from tests.tiny import tiny_target
from training.objectives import ObjectiveOptions, build_objective

FORMS = {"deepseek_v3": "mtp-deepseek", "glm4_moe": "mtp-deepseek"}
THEIRS = [("deepseek_v3", 1), ("deepseek_v3", 2), ("glm4_moe", 3), ("mellum", 1)]
"""What transformers itself can run."""


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reports the modules' tensors as unexpected in the target."""
    for name in ("transformers.modeling_utils", "transformers.modeling_layers"):
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)


def saved(folder: Path, kind: str, modules: int = 1) -> TargetModel:
    """A target in float32, from files."""
    return opened(save_checkpoint(folder, kind, modules, dtype=torch.float32))


def opened(folder: Path) -> TargetModel:
    return load_checkpoint(folder, torch.float32)


def tuned(target: TargetModel, **options: Any) -> MtpDrafter:
    """The target's modules, moved away from where they were."""
    head = load_native_mtp(target, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return head


def form(kind: str) -> str:
    return FORMS.get(kind, "mtp-qwen")


def raw(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Dtype, shape and bytes of every tensor of a folder, whatever file it is in."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in folder.glob("model*.safetensors"):
        header, start = read_header(path)
        content = path.read_bytes()
        for name, entry in header.items():
            assert name not in found, f"{name} is there twice"
            first, last = entry["data_offsets"]
            found[name] = (entry["dtype"], entry["shape"], content[start + first : start + last])
    return found


def is_module(name: str) -> bool:
    return name.startswith("mtp.") or any(f"layers.{LAYERS + k}." in name for k in range(3))


def logits(head: Any) -> Tensor:
    return golden_logits(head, golden_inputs(head))


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


# Writing and reading --------------------------------------------------------------------------


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
    vllm, sglang = export.notes[-2:]
    assert vllm.startswith(f"serve it with: vllm serve {tmp_path / 'out'} --speculative-config")
    assert '"method": "mtp", "num_speculative_tokens": 5' in vllm
    assert f"--model-path {tmp_path / 'out'} --speculative-algorithm NEXTN --spec" in sglang
    assert "draft-model-path" not in sglang


# Other layouts of the target ------------------------------------------------------------------


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


# What the file has no place for -----------------------------------------------------------------


def test_the_stream_before_the_norm_is_remembered_and_said(tmp_path: Path) -> None:
    target = saved(tmp_path / "target", "deepseek_v3")
    notes = {}
    for norm_output in (True, False):
        head = tuned(target, norm_output=norm_output)
        export = write_as("mtp-deepseek", head, tmp_path / "out")
        again = read_head(tmp_path / "out", target)
        assert again.config.norm_output == norm_output
        assert torch.equal(logits(again), logits(head))
        notes[norm_output] = " ".join(export.notes)
    assert "its normed output, as SGLang does; vLLM hands on" in notes[True]
    assert "the stream before its norm, as vLLM does; SGLang hands on" in notes[False]


def test_a_draft_vocabulary_and_a_confidence_output_are_left_out_and_said(tmp_path: Path) -> None:
    target = saved(tmp_path / "target", "glm4_moe")
    head = tuned(target, draft_vocab_size=40, confidence_head=True)
    head.set_draft_vocab(torch.arange(96))
    head.config.tree = [[0], [0, 0]]
    export = write_as("mtp-deepseek", head, tmp_path / "out")
    assert export.left_out == ("confidence.proj.bias", "confidence.proj.weight", "draft_vocab")
    said = " ".join(export.notes)
    for part in ("reduced vocabulary", "confidence output", "fitted tree"):
        assert part in said
    again = read_head(tmp_path / "out", target)
    assert torch.allclose(logits(again)[:, head.draft_vocab], logits(head), atol=1e-5)


def test_several_modules_and_unknown_models_are_said(tmp_path: Path) -> None:
    two = write_as("mtp-deepseek", tuned(saved(tmp_path / "a", "deepseek_v3", 2)), tmp_path / "two")
    assert two.served == ("vllm",)
    assert "SGLang runs one" in " ".join(two.notes)
    other = write_as("mtp-qwen", tuned(saved(tmp_path / "b", "mellum")), tmp_path / "other")
    assert other.served == ()
    assert "no engine is known to have MTP code for 'mellum'" in " ".join(other.notes)


def test_half_precision(tmp_path: Path) -> None:
    target = saved(tmp_path / "target", "glm4_moe")
    head = tuned(target)
    nn.Module.to(head, dtype=torch.bfloat16)
    export = write_as("mtp-deepseek", head, tmp_path / "out")
    assert "modules are written in bfloat16" in " ".join(export.notes)
    again = read_as("mtp-deepseek", tmp_path / "out", target)
    assert next(again.parameters()).dtype == torch.bfloat16
    assert torch.equal(logits(again), logits(head))


# Refused ----------------------------------------------------------------------------------------


def test_modules_trained_from_scratch_are_served_by_nobody(tmp_path: Path) -> None:
    target = saved(tmp_path / "target", "glm4_moe")
    head = build_drafter("mtp", target)
    with pytest.raises(ExportError, match=r"No engine loads that.*Decode it with Headway"):
        write_as("mtp-deepseek", head, tmp_path / "out")
    with pytest.raises(ExportError, match="EAGLE-1 has neither norm"):
        write_as("mtp-qwen", build_drafter("mtp", tiny_target(torch.float32)), tmp_path / "out")
    export = write_as("native", head, tmp_path / "own")
    assert "no engine serves MTP modules that were trained from scratch" in export.notes[0]
    assert "mtp-deepseek" in write_as("native", tuned(target), tmp_path / "own").notes[0]


def test_other_heads_forms_and_places(tmp_path: Path) -> None:
    target = saved(tmp_path / "target", "glm4_moe")
    head = tuned(target)
    with pytest.raises(ExportError, match="this is a medusa head"):
        write_as("mtp-deepseek", build_drafter("medusa", target), tmp_path / "out")
    with pytest.raises(ExportError, match="use --to mtp-deepseek"):
        write_as("mtp-qwen", head, tmp_path / "out")
    with pytest.raises(ExportError, match="with_embeddings has no effect"):
        write_as("mtp-deepseek", head, tmp_path / "out", with_embeddings=True)
    with pytest.raises(ExportError, match="is not an export"):
        write_as("mtp-deepseek", head, tmp_path / "target")
    nn.Module.to(head, dtype=torch.float64)
    with pytest.raises(ExportError, match=r"do not load torch\.float64 heads"):
        write_as("mtp-deepseek", head, tmp_path / "out")
    unknown = saved(tmp_path / "mellum", "mellum")
    with pytest.raises(ExportError, match="another form: use --to mtp-qwen"):
        write_as("mtp-deepseek", tuned(unknown), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_quantised_target(tmp_path: Path) -> None:
    target = saved(tmp_path / "target", "deepseek_v3")
    head = tuned(target)
    config = read_config(tmp_path / "target") | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "target" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ExportError, match="is quantised"):
        write_as("mtp-deepseek", head, tmp_path / "out")


# Damage -----------------------------------------------------------------------------------------


class Edit:
    """A stitched checkpoint, changed in place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.added = folder / "model-mtp.safetensors"
        self.tensors = load_file(self.added)

    def save(self) -> None:
        save_file(self.tensors, self.added)

    def json(self, name: str, change: Callable[[dict[str, Any]], object]) -> None:
        content = json.loads((self.folder / name).read_text())
        change(content)
        (self.folder / name).write_text(json.dumps(content))

    def name(self, end: str) -> str:
        return next(name for name in self.tensors if name.endswith(end))

    def index(self, change: Callable[[dict[str, str]], object]) -> None:
        self.json("model.safetensors.index.json", lambda content: change(content["weight_map"]))


def put(end: str, change: Callable[[Tensor], Tensor]) -> Callable[[Edit], None]:
    def edit(folder: Edit) -> None:
        name = folder.name(end)
        folder.tensors[name] = change(folder.tensors[name].clone()).contiguous()
        folder.save()

    return edit


def spoil(tensor: Tensor) -> Tensor:
    tensor.view(-1)[3] = torch.nan
    return tensor


def drop_shard(edit: Edit) -> None:
    (edit.folder / "model-00001-of-00002.safetensors").unlink()


def cut(edit: Edit) -> None:
    edit.added.write_bytes(edit.added.read_bytes()[:-64])


def unlisted(edit: Edit) -> None:
    edit.index(lambda places: places.pop(edit.name("enorm.weight")))


def twice(edit: Edit) -> None:
    path = edit.folder / "model-00001-of-00002.safetensors"
    name = edit.name("enorm.weight")
    save_file({**load_file(path), name: edit.tensors[name]}, path, metadata={"format": "pt"})


def stranger(edit: Edit) -> None:
    name = edit.name("enorm.weight").replace("enorm", "xnorm")
    edit.tensors[name] = torch.ones(32)
    edit.index(lambda places: places.update({name: edit.added.name}))
    edit.save()


def renamed(edit: Edit) -> None:
    old = edit.name("hnorm.weight")
    new = old.replace("hnorm", "norm")
    edit.tensors[new] = edit.tensors.pop(old)
    edit.index(lambda places: (places.pop(old), places.update({new: edit.added.name})))
    edit.save()


DAMAGE: dict[str, tuple[Callable[[Edit], None], str]] = {
    "not finite": (put("eh_proj.weight", spoil), "eh_proj.weight holds values that are not finite"),
    "never trained": (put("o_proj.weight", torch.zeros_like), "o_proj.weight is all zeros"),
    "transposed": (
        put("eh_proj.weight", lambda t: t.T),
        r"eh_proj.weight has shape \[64, 32\], the config asks for \[32, 64\] \(that is its tr",
    ),
    "another embedding": (
        put("embed_tokens.weight", lambda t: t + 1),
        "embed_tokens.weight is not the target's",
    ),
    "another output matrix": (
        put("shared_head.head.weight", torch.zeros_like),
        "shared_head.head.weight is not the target's",
    ),
    "swapped halves": (
        put("eh_proj.weight", lambda t: t.roll(32, dims=1)),
        "logits of this head differ",
    ),
    "random weights": (put("mlp.gate.weight", torch.randn_like), "logits of this head differ"),
    "missing shard": (drop_shard, "model-00001-of-00002.safetensors is missing"),
    "cut short": (cut, "cut short"),
    "not in the index": (unlisted, "enorm.weight, which the index puts nowhere"),
    "in two files": (twice, "also holds .*enorm.weight, which the index puts elsewhere"),
    "unknown tensor": (stranger, "unknown tensor model.layers.2.xnorm.weight"),
    "renamed": (
        renamed,
        "unknown tensor model.layers.2.norm.weight; missing tensor model.layers.2.hnorm.weight",
    ),
    "wrong count": (
        lambda edit: edit.json("config.json", lambda c: c.update(num_nextn_predict_layers=3)),
        "num_nextn_predict_layers is 3 and the file has 1 modules",
    ),
    "no count": (
        lambda edit: edit.json("config.json", lambda c: c.pop("num_nextn_predict_layers")),
        "none of num_nextn_predict_layers, .* says how many modules",
    ),
}


@pytest.fixture(scope="module")
def stitched(tmp_path_factory: pytest.TempPathFactory) -> tuple[TargetModel, Path]:
    folder = tmp_path_factory.mktemp("stitched")
    target = saved(folder / "target", "glm4_moe")
    write_as("mtp-deepseek", tuned(target), folder / "out")
    return target, folder / "out"


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(stitched: tuple[TargetModel, Path], tmp_path: Path, name: str) -> None:
    target, whole = stitched
    shutil.copytree(whole, tmp_path / "out")
    check_as("mtp-deepseek", tmp_path / "out", target)
    change, message = DAMAGE[name]
    change(Edit(tmp_path / "out"))
    with pytest.raises(ValueError, match=message):
        check_as("mtp-deepseek", tmp_path / "out", target)


def test_another_target(stitched: tuple[TargetModel, Path], tmp_path: Path) -> None:
    other = opened(save_checkpoint(tmp_path, "glm4_moe", seed=5, dtype=torch.float32))
    with pytest.raises(ValueError, match="wrong target: weights"):
        read_head(stitched[1], other)


# The scripts ------------------------------------------------------------------------------------


def test_the_scripts_stitch_check_and_take_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_checkpoint(tmp_path / "target", "qwen3_5_text", dtype=torch.float32)
    target = TargetModel.load(str(folder))
    write_as("native", tuned(target), tmp_path / "head")
    common = ["--target", str(folder), "--device", "cpu"]
    out = str(tmp_path / "out")
    export_script.main([str(tmp_path / "head"), "--to", "mtp-qwen", "--out", out, *common])
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (record["format"], record["logits_equal"]) == ("mtp-qwen", True)
    export_script.main([out, "--check", *common])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["golden"] < 1e-5
    convert.main([out, "--to", "native", "--out", str(tmp_path / "back"), *common])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["logits_equal"]
    with pytest.raises(ValueError, match="wrong target"):  # a released one has no record
        read_head(tmp_path / "back", tiny_target(torch.float32))


def test_a_released_checkpoint_is_a_head_as_it_is(tmp_path: Path) -> None:
    target = saved(tmp_path, "deepseek_v3", 2)
    assert format_of(tmp_path) == "mtp-deepseek"
    assert torch.equal(logits(read_head(tmp_path, target)), logits(load_native_mtp(target)))
    check_as("mtp-deepseek", tmp_path, target)


def test_a_checkpoint_without_modules_is_no_head(tmp_path: Path) -> None:
    target = saved(tmp_path, "glm4_moe", 0)
    with pytest.raises(ExportError, match="no head of a known dialect"):
        read_head(tmp_path, target)
    with pytest.raises(ExportError, match="holds no MTP modules in the mtp-deepseek form"):
        read_as("mtp-deepseek", tmp_path, target)
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path), nn.Module)
