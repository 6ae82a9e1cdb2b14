"""Exports: what is written comes back, what an engine would miss is caught, nothing is lost."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from drafters import FAMILIES, Drafter, Eagle3Drafter, TargetModel, build_drafter
from drafters.export import (
    Export,
    ExportError,
    check_golden,
    golden_inputs,
    golden_logits,
    read_head,
    read_native,
    write_as,
    write_native,
)
from drafters.export import check_folder as check_as
from drafters.export import folder as folder_module
from drafters.export.dialects.sglang import SGLANG, engine_parameters
from drafters.export.fields import from_outputs
from drafters.export.reading import read_folder
from drafters.layers import repeat_heads, rotate
from drafters.vocab import from_offsets
from tests.tiny import tiny_target

VARIANTS: dict[str, dict[str, Any]] = {
    "whole vocabulary": {},
    "reduced vocabulary": {"draft_vocab_size": 40},
    "EAGLE-3.1": {"draft_vocab_size": 40, "fc_norm": True, "norm_output": True},
}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(dtype=torch.float32)


def make_head(target: TargetModel, **options: Any) -> Eagle3Drafter:
    """A head whose every tensor, norms included, is random."""
    options = {"feature_layers": [1, 3, 5], **options}
    head = build_drafter("eagle3", target, **options)
    assert isinstance(head, Eagle3Drafter)
    generator = torch.Generator().manual_seed(1)
    head.set_draft_vocab(torch.randint(100, (target.vocab_size,), generator=generator))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return head


@pytest.fixture(params=VARIANTS)
def head(request: pytest.FixtureRequest, target: TargetModel) -> Eagle3Drafter:
    return make_head(target, **VARIANTS[request.param])


def write_sglang(head: Drafter, folder: Path, **options: Any) -> Export:
    return write_as("sglang", head, folder, **options)


def read_sglang(folder: Path, target: TargetModel) -> Eagle3Drafter:
    head = read_folder(folder, target, SGLANG)
    assert isinstance(head, Eagle3Drafter)
    return head


def check_folder(folder: Path, target: TargetModel | None = None) -> dict[str, Tensor]:
    return check_as(folder, target, SGLANG)


def logits(head: Drafter) -> Tensor:
    return golden_logits(head, golden_inputs(head))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# Round trip -------------------------------------------------------------------------------------


def test_a_head_comes_back_the_same(
    head: Eagle3Drafter, target: TargetModel, tmp_path: Path
) -> None:
    write_sglang(head, tmp_path / "head")
    again = read_sglang(tmp_path / "head", target)

    assert again.state_dict().keys() == head.state_dict().keys()
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert torch.equal(logits(again), logits(head))
    assert again.config.own_fields() == head.config.own_fields()
    assert check_golden(again, tmp_path / "head") == 0


def engine_logits(engine: dict[str, Tensor], config: dict[str, Any], embedding: Tensor) -> Tensor:
    """The golden chain as SGLang computes it: fused projections, the residual carried beside."""
    weights = engine
    layer = {k.removeprefix("model.layers.0."): v for k, v in weights.items()}
    heads, groups, size = (
        config["num_attention_heads"],
        config["num_attention_heads"] // config["num_key_value_heads"],
        config["head_dim"],
    )
    theta = config["rope_parameters"]["rope_theta"]
    widths = [heads * size, heads // groups * size, heads // groups * size]

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.shape, weight, config["rms_norm_eps"])

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 3 * config["target_hidden_size"], generator=generator)
    tokens = torch.randint(config["vocab_size"], (8,), generator=generator)
    if config["fc_norm"]:
        parts = enumerate(hidden.chunk(3, dim=-1))
        hidden = torch.cat([norm(x, weights[f"model.fc_norm.{i}.weight"]) for i, x in parts], -1)
    hidden = hidden @ weights["model.fc.weight"].T
    keys, values, out = torch.zeros(0), torch.zeros(0), []
    for start, end in ((0, 6), (6, 7), (7, 8)):
        residual = hidden
        pair = norm(embedding[tokens[start:end]], layer["input_layernorm.weight"])
        pair = torch.cat([pair, norm(hidden, layer["hidden_norm.weight"])], dim=-1)
        qkv = (pair @ layer["self_attn.qkv_proj.weight"].T).split(widths, dim=-1)
        q, k, v = (x.view(1, end - start, -1, size).transpose(1, 2) for x in qkv)
        where = torch.arange(start, end)[None]
        q, k = rotate(q, where, theta), rotate(k, where, theta)
        keys = torch.cat([keys, k], dim=2) if start else k
        values = torch.cat([values, v], dim=2) if start else v
        scores = q @ repeat_heads(keys, groups).transpose(2, 3) / size**0.5
        hide = torch.arange(end)[None] > torch.arange(start, end)[:, None]
        mixed = scores.masked_fill(hide, -torch.inf).softmax(-1) @ repeat_heads(values, groups)
        mixed = mixed.transpose(1, 2).reshape(end - start, -1)
        residual = residual + mixed @ layer["self_attn.o_proj.weight"].T
        gate, up = (
            norm(residual, layer["post_attention_layernorm.weight"])
            @ layer["mlp.gate_up_proj.weight"].T
        ).chunk(2, dim=-1)
        residual = residual + (silu(gate) * up) @ layer["mlp.down_proj.weight"].T
        normed = norm(residual, weights["model.norm.weight"])
        out.append(normed[-1] @ weights["lm_head.weight"].T)
        hidden = (normed if config["norm_output"] else residual)[-1:]
    return torch.stack(out)


def test_an_engine_computes_the_same_logits(
    head: Eagle3Drafter, target: TargetModel, tmp_path: Path
) -> None:
    write_sglang(head, tmp_path / "head")
    tensors = check_folder(tmp_path / "head", target)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    engine = engine_parameters(SGLANG, config, tensors)
    found = engine_logits(engine, config, target.embedding.weight)

    torch.testing.assert_close(found, logits(head), rtol=1e-4, atol=1e-4)
    drafted = found.argmax(-1)
    if "d2t" in tensors:
        drafted = from_offsets(tensors["d2t"])[drafted]
    assert drafted.tolist() == head.to_target_ids(logits(head).argmax(-1)).tolist()


def test_the_file_holds_what_the_dialect_names(target: TargetModel, tmp_path: Path) -> None:
    head = make_head(target, draft_vocab_size=40, fc_norm=True)
    export = write_sglang(head, tmp_path / "head", provenance={"commit": "abc"})
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    config = json.loads((tmp_path / "head" / "config.json").read_text())

    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": [32, 96],
        "fc_norm.0.weight": [32],
        "fc_norm.1.weight": [32],
        "fc_norm.2.weight": [32],
        "midlayer.self_attn.q_proj.weight": [32, 64],
        "midlayer.self_attn.k_proj.weight": [16, 64],
        "midlayer.self_attn.v_proj.weight": [16, 64],
        "midlayer.self_attn.o_proj.weight": [32, 32],
        "midlayer.mlp.gate_proj.weight": [48, 32],
        "midlayer.mlp.up_proj.weight": [48, 32],
        "midlayer.mlp.down_proj.weight": [32, 48],
        "midlayer.hidden_norm.weight": [32],
        "midlayer.input_layernorm.weight": [32],
        "midlayer.post_attention_layernorm.weight": [32],
        "norm.weight": [32],
        "lm_head.weight": [40, 32],
        "d2t": [40],
        "t2d": [96],
    }
    assert export.num_tensors == len(tensors)
    assert export.bytes == sum(map(len, contents(tmp_path / "head").values()))
    kept = (tensors["d2t"] + torch.arange(40)).tolist()
    assert kept == head.draft_vocab.tolist()
    assert tensors["t2d"].nonzero().flatten().tolist() == kept
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["draft_vocab_size"], config["vocab_size"]) == (40, 96)
    assert config["tie_word_embeddings"] is False
    assert config["max_position_embeddings"] == 512
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    manifest = json.loads((tmp_path / "head" / "export.json").read_text())
    assert manifest["provenance"] == {"commit": "abc"}


def test_the_confidence_head_is_left_out_and_named(target: TargetModel, tmp_path: Path) -> None:
    export = write_sglang(make_head(target, confidence_head=True), tmp_path / "head")
    assert export.left_out == ("confidence.proj.bias", "confidence.proj.weight")
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert not any("confidence" in name for name in tensors)


@pytest.mark.parametrize(
    ("options", "served"),
    [({}, ("sglang", "vllm", "llama.cpp")), ({"norm_output": True}, ("sglang", "vllm"))],
)
def test_engines_are_named(
    target: TargetModel, tmp_path: Path, options: dict[str, Any], served: tuple[str, ...]
) -> None:
    export = write_sglang(make_head(target, **options), tmp_path / "head")
    assert export.served == served
    assert bool(export.notes) == bool(options)


def test_capturing_the_embedding_is_noted(target: TargetModel, tmp_path: Path) -> None:
    export = write_sglang(make_head(target, feature_layers=[0, 3, 5]), tmp_path / "head")
    assert "layer id -1" in export.notes[0]


def test_embeddings_on_request(target: TargetModel, tmp_path: Path) -> None:
    write_sglang(make_head(target), tmp_path / "head", with_embeddings=True)
    path = tmp_path / "head" / "model.safetensors"
    tensors = load_file(path)
    assert torch.equal(tensors["embed_tokens.weight"], target.embedding.weight)
    read_sglang(tmp_path / "head", target)
    tensors["embed_tokens.weight"][0] += 1
    save_file(tensors, path)
    with pytest.raises(ExportError, match="not the embedding of 'tiny'"):
        read_sglang(tmp_path / "head", target)


def test_half_precision(target: TargetModel, tmp_path: Path) -> None:
    head = make_head(target, draft_vocab_size=40).bfloat16()
    write_sglang(head, tmp_path / "head")
    again = read_sglang(tmp_path / "head", target)
    assert again.fc.weight.dtype == torch.bfloat16
    assert torch.equal(logits(again), logits(head))


# Heads of other trainers ------------------------------------------------------------------------


def test_a_foreign_config_with_only_the_nested_layer_ids(
    target: TargetModel, tmp_path: Path
) -> None:
    head = make_head(target, draft_vocab_size=40)
    write_sglang(head, tmp_path / "head")
    edit = Edit(tmp_path / "head")
    for key in ("eagle_aux_hidden_state_layer_ids", "rope_parameters", "fc_norm", "norm_output"):
        del edit.config[key]
    edit.config |= {"rope_theta": 10000, "max_position_embeddings": 2048}
    edit.save()
    (tmp_path / "head" / "export.json").unlink()

    again = read_sglang(tmp_path / "head", target)
    assert again.feature_layers == (1, 3, 5)
    assert torch.equal(logits(again), logits(head))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_before_residual": True}, "norm_before_residual=True is not supported"),
        (
            {"rope_parameters": None, "rope_scaling": {"rope_type": "dynamic", "factor": 8.0}},
            "'dynamic' RoPE",
        ),
        ({"vocab_size": 97}, "vocab_size is 97 but the target has 96"),
    ],
)
def test_a_foreign_head_of_another_kind_is_refused(
    target: TargetModel, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_sglang(make_head(target), tmp_path / "head")
    edit = Edit(tmp_path / "head")
    edit.config |= changes
    edit.save()
    with pytest.raises(ExportError, match=message):
        read_sglang(tmp_path / "head", target)


def test_another_target_is_refused(target: TargetModel, tmp_path: Path) -> None:
    write_sglang(make_head(target), tmp_path / "head")
    with pytest.raises(ValueError, match=r"wrong target: weights"):
        read_sglang(tmp_path / "head", tiny_target(dtype=torch.float32, seed=1))


# What an engine would not tell ------------------------------------------------------------------


class Edit:
    """Change an export in place, to see whether the checks notice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors = load_file(folder / "model.safetensors")
        self.config = json.loads((folder / "config.json").read_text())

    def save(self) -> None:
        save_file(self.tensors, self.folder / "model.safetensors")
        (self.folder / "config.json").write_text(json.dumps(self.config))


def drop(name: str) -> Callable[[Edit], object]:
    return lambda edit: edit.tensors.pop(name)


def put(name: str, tensor: Tensor) -> Callable[[Edit], object]:
    return lambda edit: edit.tensors.update({name: tensor})


def configure(**changes: Any) -> Callable[[Edit], object]:
    return lambda edit: edit.config.update(changes)


def rename(old: str, new: str) -> Callable[[Edit], object]:
    return lambda edit: edit.tensors.update({new: edit.tensors.pop(old)})


def poison(edit: Edit) -> None:
    edit.tensors["norm.weight"][3] = torch.nan


def absolute_ids(edit: Edit) -> None:
    edit.tensors["d2t"] += torch.arange(40)


def repeated_target(edit: Edit) -> None:
    edit.tensors["d2t"][1] = edit.tensors["d2t"][0] - 1


def wrong_t2d(edit: Edit) -> None:
    edit.tensors["t2d"] = edit.tensors["t2d"].roll(1)


def disagree(edit: Edit) -> None:
    edit.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 3, 5]


VIOLATIONS: dict[str, tuple[Callable[[Edit], object], str]] = {
    "missing tensor": (drop("midlayer.mlp.up_proj.weight"), "missing tensor midlayer.mlp.up_proj"),
    "missing norm": (drop("fc_norm.1.weight"), "missing tensor fc_norm.1.weight"),
    "unknown tensor": (put("fc.bias", torch.ones(32)), "unknown tensor fc.bias"),
    "unmapped name": (
        rename("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"),
        "unknown tensor layers.0.hidden_norm.weight.*missing tensor midlayer.hidden_norm.weight",
    ),
    "wrong shape": (
        put("midlayer.self_attn.q_proj.weight", torch.ones(32, 32)),
        r"q_proj.weight has shape \[32, 32\], the config asks for \[32, 64\]",
    ),
    "wrong dtype": (put("norm.weight", torch.ones(32).half()), "norm.weight is float16, expected"),
    "not finite": (poison, "norm.weight holds values that are not finite"),
    "never trained": (
        put("midlayer.self_attn.o_proj.weight", torch.zeros(32, 32)),
        "o_proj.weight is all zeros",
    ),
    "d2t missing": (drop("d2t"), "missing tensor d2t: draft_vocab_size is below vocab_size"),
    "t2d missing": (drop("t2d"), "missing tensor t2d"),
    "d2t of a whole vocabulary": (
        lambda edit: (
            put("lm_head.weight", torch.ones(96, 32))(edit),
            configure(draft_vocab_size=96)(edit),
        ),
        "unknown tensor d2t.*equal to vocab_size",
    ),
    "absolute ids in d2t": (absolute_ids, "d2t leads out of the target's vocabulary"),
    "two draft ids for one": (repeated_target, "two draft ids to one"),
    "t2d of other tokens": (wrong_t2d, "t2d does not mark"),
    "tied": (configure(tie_word_embeddings=True), "tie_word_embeddings must be False"),
    "layer ids disagree": (disagree, "layer ids disagree"),
    "top-level layer ids missing": (
        lambda edit: edit.config.pop("eagle_aux_hidden_state_layer_ids"),
        "key eagle_aux_hidden_state_layer_ids is missing",
    ),
    "two layers": (configure(eagle_aux_hidden_state_layer_ids=[1, 3]), "must be 3 layer ids"),
    "features not used": (
        lambda edit: edit.config["eagle_config"].update(use_aux_hidden_state=False),
        "use_aux_hidden_state must be true",
    ),
    "short context": (
        configure(max_position_embeddings=64),
        "max_position_embeddings is 64 but the target has 512",
    ),
    "another vocabulary": (configure(vocab_size=97), "vocab_size is 97 but the target has 96"),
    "no number": (configure(hidden_size="32"), "hidden_size must be int"),
    "a truth value": (configure(hidden_size=True), "hidden_size must be int"),
    "not positive": (configure(head_dim=0), "head_dim must be positive"),
    "rope disagrees": (configure(rope_theta=5.0), "rope_theta is 5.0 but rope_parameters says"),
    "other rope": (configure(rope_scaling={"rope_type": "yarn"}), "yarn RoPE needs a positive"),
    "other engine dtype": (configure(torch_dtype="float64"), "torch_dtype float64 is not one of"),
    "more draft tokens": (configure(draft_vocab_size=97), "larger than vocab_size"),
    "another activation": (configure(hidden_act="gelu"), "hidden_act must be 'silu'"),
}


@pytest.fixture(scope="module")
def exported(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("export") / "head"
    write_sglang(make_head(target, draft_vocab_size=40, fc_norm=True), folder)
    return contents(folder)


@pytest.mark.parametrize("name", VIOLATIONS)
def test_violations_are_named(
    name: str, exported: dict[str, bytes], target: TargetModel, tmp_path: Path
) -> None:
    for file, content in exported.items():
        (tmp_path / file).write_bytes(content)
    check_folder(tmp_path, target)
    violate, message = VIOLATIONS[name]
    edit = Edit(tmp_path)
    violate(edit)
    edit.save()
    with pytest.raises(ExportError, match=message):
        check_folder(tmp_path, target)


@pytest.mark.parametrize("key", [spec.name for spec in SGLANG.keys])
def test_every_key_is_required(key: str, exported: dict[str, bytes]) -> None:
    config = json.loads(exported["config.json"])
    SGLANG.check_config(config)
    del config[key]
    with pytest.raises(ExportError, match=f"key {key} is missing"):
        SGLANG.check_config(config)


def test_a_truncated_file_is_named(target: TargetModel, tmp_path: Path) -> None:
    write_sglang(make_head(target), tmp_path / "head")
    path = tmp_path / "head" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    for read in (lambda: check_folder(tmp_path / "head"), lambda: read_sglang(path.parent, target)):
        with pytest.raises(ExportError, match=r"model.safetensors: .*cut short"):
            read()


@pytest.mark.parametrize(("content", "message"), [("{", "cannot read"), ("[]", "JSON object")])
def test_a_damaged_config_is_named(
    target: TargetModel, tmp_path: Path, content: str, message: str
) -> None:
    write_sglang(make_head(target), tmp_path / "head")
    (tmp_path / "head" / "config.json").write_text(content)
    with pytest.raises(ExportError, match=message):
        read_sglang(tmp_path / "head", target)


def test_layer_ids_shift_by_one() -> None:
    assert from_outputs([1, 14, 26]) == [2, 15, 27]


# What the dialect cannot say --------------------------------------------------------------------


def test_medusa_is_refused(target: TargetModel, tmp_path: Path) -> None:
    head = build_drafter("medusa", target)
    with pytest.raises(ValueError, match=r"for eagle3 heads and this is a medusa head.*native"):
        write_sglang(head, tmp_path / "head")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"eagle3"}))
def test_other_families_are_refused(target: TargetModel, tmp_path: Path, family: str) -> None:
    """P-EAGLE too, which is made of EAGLE-3's parts."""
    with pytest.raises(ExportError, match=rf"for eagle3 heads and this is a {family} head"):
        write_sglang(build_drafter(family, target), tmp_path / "head")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": 2}, "num_layers=2: .* only num_layers=1; .*native"),
        ({"qk_norm": True}, "qk_norm=True: .* only qk_norm=False; .*native"),
        ({"sliding_window": 8}, "sliding_window=8: .* only sliding_window=None; .*native"),
    ],
)
def test_other_layers_are_refused(
    target: TargetModel, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    """SGLang's EAGLE-3 has one Llama layer; what it does not know it would leave out in silence."""
    head = make_head(target, **options)
    with pytest.raises(ExportError, match=message):
        write_sglang(head, tmp_path / "head")
    write_native(head, tmp_path / "native")
    assert torch.equal(logits(read_head(tmp_path / "native", target)), logits(head))


def test_other_numbers_of_layers_are_refused(target: TargetModel, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="exactly 3 layers"):
        write_sglang(make_head(target, feature_layers=[2, 4]), tmp_path / "head")


def test_double_precision_is_refused(target: TargetModel, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"do not load torch\.float64"):
        write_sglang(make_head(target).double(), tmp_path / "head")


def test_a_scaled_embedding_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(dtype=torch.float32)
    head = make_head(target)
    target.embedding.register_forward_hook(lambda module, inputs, output: output * 2)
    with pytest.raises(ExportError, match="scales its input embeddings"):
        write_sglang(head, tmp_path / "head")


def test_a_diverged_head_never_replaces_a_good_one(target: TargetModel, tmp_path: Path) -> None:
    write_sglang(make_head(target), tmp_path / "head")
    before = contents(tmp_path / "head")
    bad = make_head(target)
    torch.nn.init.constant_(bad.norm.weight, torch.inf)
    with pytest.raises(ExportError, match=r"norm.weight holds values that are not finite"):
        write_sglang(bad, tmp_path / "head")
    assert contents(tmp_path / "head") == before


# Nothing is lost --------------------------------------------------------------------------------


def write(head: Drafter, folder: Path, dialect: str) -> None:
    write_sglang(head, folder) if dialect == "sglang" else write_native(head, folder)


def full_disk(*args: Any) -> None:
    raise SafetensorError(
        "Error while serializing: I/O error: No space left on device (os error 28)"
    )


def full_disk_by_number(*args: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("dialect", ["sglang", "native"])
@pytest.mark.parametrize("failure", [full_disk, full_disk_by_number])
@pytest.mark.parametrize("step", ["save_file", "_sync"])
def test_a_full_disk_leaves_the_former_export(
    target: TargetModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dialect: str,
    failure: Callable[..., None],
    step: str,
) -> None:
    write(make_head(target), tmp_path / "head", dialect)
    before = contents(tmp_path / "head")
    monkeypatch.setattr(folder_module, step, failure)
    with pytest.raises(ExportError, match=r"no space left .*untouched"):
        write(make_head(target, fc_norm=True), tmp_path / "head", dialect)
    assert contents(tmp_path / "head") == before
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


@pytest.mark.parametrize("step", ["save_file", "_sync"])
def test_an_interrupt_leaves_the_former_export(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    write_sglang(make_head(target), tmp_path / "head")
    before = contents(tmp_path / "head")
    monkeypatch.setattr(folder_module, step, interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_sglang(make_head(target, fc_norm=True), tmp_path / "head")
    assert contents(tmp_path / "head") == before
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_a_failing_rename_brings_the_former_export_back(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sglang(make_head(target), tmp_path / "head")
    before = contents(tmp_path / "head")
    replace = os.replace

    def fail_to_publish(source: Path, destination: Path) -> None:
        if source.name == ".head.writing":
            raise OSError(errno.EIO, "Input/output error")
        replace(source, destination)

    monkeypatch.setattr(os, "replace", fail_to_publish)
    with pytest.raises(ExportError, match=r"cannot write .*Input/output error"):
        write_sglang(make_head(target, fc_norm=True), tmp_path / "head")
    assert contents(tmp_path / "head") == before
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


@pytest.mark.parametrize("dialect", ["sglang", "native"])
def test_files_are_readable_for_the_server(
    target: TargetModel, tmp_path: Path, dialect: str
) -> None:
    write(make_head(target), tmp_path / "head", dialect)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "head").iterdir()}
    assert modes == {(tmp_path / "head").stat().st_mode & 0o666}


def test_a_kill_while_replacing_is_mended(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the two renames, with the new export still under its working name."""
    write_sglang(make_head(target), tmp_path / "head")
    before = contents(tmp_path / "head")
    (tmp_path / "head").rename(tmp_path / ".head.former")
    (tmp_path / ".head.writing").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(folder_module, "save_file", full_disk)
        with pytest.raises(ExportError):
            write_sglang(make_head(target), tmp_path / "head")
    assert contents(tmp_path / "head") == before
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_an_export_is_replaced_by_the_next(target: TargetModel, tmp_path: Path) -> None:
    write_sglang(make_head(target, draft_vocab_size=40), tmp_path / "deep" / "head")
    second = make_head(target)
    write_native(second, tmp_path / "deep" / "head")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["head"]
    again = read_native(tmp_path / "deep" / "head", target)
    assert torch.equal(logits(again), logits(second))


@pytest.mark.parametrize("dialect", ["sglang", "native"])
def test_a_folder_of_the_user_is_never_touched(
    target: TargetModel, tmp_path: Path, dialect: str
) -> None:
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text("mine")
    with pytest.raises(ExportError, match=r"is not an export .*remove it or choose"):
        write(make_head(target), tmp_path / "head", dialect)
    assert contents(tmp_path / "head") == {"config.json": b"mine"}


# Native, and golden logits ----------------------------------------------------------------------


def test_the_format_is_told_from_the_folder(target: TargetModel, tmp_path: Path) -> None:
    head = make_head(target)
    for dialect in ("sglang", "native"):
        write(head, tmp_path / dialect, dialect)
        again = read_head(tmp_path / dialect, target)
        assert torch.equal(logits(again), logits(head))
        assert read_head(tmp_path / dialect, target, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("config", [None, "{", "[]", "{}"])
def test_what_is_no_head_is_refused(
    target: TargetModel, tmp_path: Path, config: str | None
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match=r"head .*no readable config|no tensors in it"):
        read_head(tmp_path, target)


def random_head(target: TargetModel, family: str, **options: Any) -> Drafter:
    """Any head, nowhere at its initial values."""
    head = build_drafter(family, target, seed=3, **options)
    head.set_draft_vocab(torch.arange(target.vocab_size))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return head


@pytest.mark.parametrize("family", FAMILIES)
def test_native_heads_of_every_family(target: TargetModel, tmp_path: Path, family: str) -> None:
    head = random_head(target, family, confidence_head=True)
    export = write_native(head, tmp_path / "head")
    again = read_native(tmp_path / "head", target)
    assert (export.served, export.left_out) == (("headway",), ())
    assert export.num_tensors == len(head.state_dict())
    assert again.family == family
    assert torch.equal(logits(again), logits(head))
    assert check_golden(again, tmp_path / "head") == 0


EVERY_TENSOR: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ("eagle3", options) for name, options in VARIANTS.items()},
    "two layers": ("eagle3", {"num_layers": 2, "qk_norm": True}),
    "medusa": ("medusa", {"num_heads": 5, "num_layers": 2}),
    "eagle1": ("eagle1", {"fc_bias": True, "num_layers": 2}),
    "hydra": ("hydra", {"num_heads": 5, "mlp_layers": 2, "num_layers": 1}),
    "mtp": ("mtp", {}),
    "mtp modules": ("mtp", {"num_modules": 3, "num_layers": 2}),
    "peagle": ("peagle", {"num_layers": 2, "num_drafts": 4}),
    "dflash": ("dflash", {"num_layers": 2}),
    "causal dflash": ("dflash", {"num_layers": 2, "causal": True}),
    "dspark": ("dspark", {"markov_rank": 8, "draft_vocab_size": 40}),
    "dspark gated": ("dspark", {"markov_rank": 8, "markov_type": "gated"}),
    "dspark rnn": ("dspark", {"markov_rank": 8, "markov_type": "rnn"}),
}


@pytest.mark.parametrize("name", EVERY_TENSOR)
def test_golden_logits_feel_every_tensor(target: TargetModel, name: str) -> None:
    family, options = EVERY_TENSOR[name]
    head = random_head(target, family, **options)
    expected = logits(head)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in head.named_parameters():
        saved = parameter.detach().clone()
        with torch.no_grad():  # a factor would be lost on queries and keys that are normalised
            parameter.add_(torch.randn(parameter.shape, generator=generator))
        assert not torch.allclose(logits(head), expected, rtol=1e-3), name
        with torch.no_grad():
            parameter.copy_(saved)
    assert torch.equal(logits(head), expected)


def test_golden_logits_tell_another_head(target: TargetModel, tmp_path: Path) -> None:
    head = make_head(target)
    write_sglang(head, tmp_path / "head")
    assert check_golden(make_head(target), tmp_path / "head") == 0
    with pytest.raises(ExportError, match="does not fit this head"):
        check_golden(build_drafter("medusa", target), tmp_path / "head")
    with pytest.raises(ExportError, match=r"logits of shape \[3, 96\], this head gives \[3, 40\]"):
        check_golden(make_head(target, draft_vocab_size=40), tmp_path / "head")
    with torch.no_grad():
        head.midlayer.self_attn.k_proj.weight.mul_(1.01)
    with pytest.raises(ExportError, match="logits of this head differ"):
        check_golden(head, tmp_path / "head")
    assert check_golden(head, tmp_path / "head", tolerance=1) > 1e-4
