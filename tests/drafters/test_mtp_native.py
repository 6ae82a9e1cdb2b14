"""The modules that came with a target compute what transformers, or its own layers, compute."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

from drafters import TargetModel, load_drafter, mtp_native
from drafters.mtp import MtpDrafter
from drafters.mtp_native import load_native_mtp
from drafters.native_layer import attention_windows
from inference.generate import speculative_generate
from inference.proposers import TreeOptions, build_proposer
from tests.native_mtp import KINDS, LAYERS, load_checkpoint, save_checkpoint
from tests.zoo import float64_throughout
from training.data.batches import collate
from training.data.chat import TokenizedRow
from training.features import TargetBatch, run_target
from training.objectives import ObjectiveOptions, build_objective

IDS = torch.randint(3, 96, (14,), generator=torch.Generator().manual_seed(0)).tolist()
THEIRS = [("deepseek_v3", 1), ("deepseek_v3", 2), ("glm4_moe", 1), ("glm4_moe", 3), ("mellum", 1)]
"""What transformers itself can run."""
PROJECTIONS = ("eh_proj.weight", "mtp.fc.weight")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reports the modules' tensors as unexpected where layer numbers are not those of
    the released model.
    """
    monkeypatch.setattr(logging.getLogger("transformers.modeling_utils"), "disabled", True)


def native(target: TargetModel, **options: object) -> MtpDrafter:
    return load_native_mtp(target, dtype=torch.float64, **options)


def teach(target: TargetModel, ids: list[int]) -> TargetBatch:
    batch = collate([[TokenizedRow(ids, [True] * len(ids))]], len(ids))
    return run_target(target, batch, ())


@torch.no_grad()
def unrolled(drafter: MtpDrafter, ids: list[int], steps: int | None = None) -> list[Tensor]:
    """Draft logits (T, V) of every depth, out of the training pass."""
    objective = build_objective(drafter, ObjectiveOptions(steps=steps))
    hidden = objective.unroll(teach(drafter.target, ids))
    return [drafter.logits(rows[0], depth) for depth, rows in enumerate(hidden)]


def their_model(target: TargetModel) -> MtpModel:
    target.model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS}.*", "mtp.*"] + [
        rf"model\.layers\.{LAYERS + module}.*" for module in range(1, 4)
    ]
    return MtpModel.from_pretrained(target.model)


@pytest.mark.parametrize(("kind", "modules"), THEIRS)
def test_logits_are_transformers_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, modules: int
) -> None:
    """Its `MtpModel` over a whole text: module k's first draft, given the drafts before it."""
    float64_throughout(monkeypatch)
    target = load_checkpoint(save_checkpoint(tmp_path, kind, modules))
    theirs, drafter = their_model(target), native(target)
    ids, length = torch.tensor([IDS]), len(IDS)
    hidden = target.forward(ids[:, :-1]).last_hidden
    with torch.no_grad():
        drafts, logits, _ = theirs(
            input_ids=ids[:, 1:],
            last_hidden_states=hidden,
            attention_mask=None,
            position_ids=torch.arange(length - 1)[None],  # theirs count from 1; only gaps matter
            mtp_cache=MtpCache(config=theirs.config),
        )
    text = IDS + drafts[0].tolist()
    own = unrolled(drafter, text, 1 if modules == 1 else None)
    found = torch.stack([rows[length - 2] for rows in own])
    assert (found - logits[0]).abs().max() < 1e-9
    assert logits.abs().max() > 1.0


@pytest.mark.parametrize(("kind", "modules"), THEIRS)
def test_drafts_are_those_of_generate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, modules: int
) -> None:
    """`generate(use_mtp=True)` drafts, round by round, what our proposer drafts."""
    float64_throughout(monkeypatch)
    target = load_checkpoint(save_checkpoint(tmp_path, kind, modules))
    their_model(target)
    seen: dict[int, list[int]] = {}
    forward = MtpModel.forward

    def recording(self, *args, full_input_ids, **kwargs):
        out = forward(self, *args, full_input_ids=full_input_ids, **kwargs)
        seen[full_input_ids.shape[1]] = out[0][0].tolist()
        return out

    monkeypatch.setattr(MtpModel, "forward", recording)
    prompt = torch.tensor([IDS])
    text = target.model.generate(
        prompt, use_mtp=True, do_sample=False, max_new_tokens=16, min_new_tokens=16
    )[0].tolist()
    proposer = build_proposer(native(target), TreeOptions(1 + modules, modules, 1))
    found = speculative_generate(
        target, proposer, [IDS], max_new_tokens=len(text) - len(IDS), record_rounds=True
    )
    assert found.sequences[0] == text[len(IDS) :]
    place, compared = len(IDS) + 1, 0
    for round_ in found.rounds:
        if place in seen and len(round_.tree.tokens) == 1 + modules:
            assert seen[place] == round_.tree.tokens[1:].tolist()
            compared += 1
        place += len(round_.emitted)
    assert compared > 4


def test_qwens_modules_are_its_own_layer_behind_its_own_norms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers does not run these; written out from its parts, they are this."""
    float64_throughout(monkeypatch)
    folder = save_checkpoint(tmp_path, "qwen3_5_text")
    target = load_checkpoint(folder)
    stored = load_file(folder / "model-00002-of-00002.safetensors")
    layer = Qwen3_5DecoderLayer(target.config, LAYERS - 1).double()
    layer.load_state_dict(
        {
            name.removeprefix("mtp.layers.0."): tensor
            for name, tensor in stored.items()
            if ".layers." in name
        }
    )

    def norm(name: str, x: Tensor) -> Tensor:
        module = Qwen3_5RMSNorm(x.shape[-1], eps=target.config.rms_norm_eps)
        module.weight.data = stored[f"mtp.{name}.weight"]
        return module(x)

    ids, places = torch.tensor([IDS]), torch.arange(len(IDS) - 1)[None]
    with torch.no_grad():
        hidden = target.forward(ids[:, :-1]).last_hidden
        embeds = norm("pre_fc_norm_embedding", target.model.model.embed_tokens(ids[:, 1:]))
        pair = torch.cat((embeds, norm("pre_fc_norm_hidden", hidden)), dim=-1)
        out = layer(
            nn.functional.linear(pair, stored["mtp.fc.weight"]),
            position_embeddings=target.model.model.rotary_emb(hidden, places),
            attention_mask=torch.full((len(IDS) - 1,) * 2, -torch.inf).triu(1)[None, None].double(),
        )
        expected = target.model.lm_head(norm("norm", out))[0]
    found = unrolled(native(target), IDS, 1)[0]
    assert (found[:-1] - expected).abs().max() < 1e-9


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_save_and_load_need_no_shards(tmp_path: Path, kind: str) -> None:
    target = load_checkpoint(save_checkpoint(tmp_path / "target", kind))
    drafter = native(target, draft_vocab_size=40)
    drafter.set_draft_vocab(torch.arange(96))
    drafter.save_pretrained(tmp_path / "head")
    for shard in (tmp_path / "target").glob("*.safetensors"):
        shard.unlink()
    again = load_drafter(tmp_path / "head", target, dtype=torch.float64)
    assert isinstance(again, MtpDrafter)
    assert again.config.own_fields() == drafter.config.own_fields()
    there, here = (unrolled(d, IDS, 3) for d in (drafter, again))
    assert all(torch.equal(a, b) for a, b in zip(there, here, strict=True))


def test_only_the_modules_tensors_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_checkpoint(save_checkpoint(tmp_path, "glm4_moe"))
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    assert native(target).config.num_modules == 1


def test_one_file_without_an_index(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "qwen3_5_text")
    target = load_checkpoint(folder)
    expected = native(target)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00002-of-00002.safetensors").rename(folder / "model.safetensors")
    found = load_native_mtp(target, folder, torch.float64)
    for name, tensor in found.state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[name])
    assert found.mtp[0].eh_proj.weight.dtype == torch.float64


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_in_single_precision_experts_run_as_the_targets_do(tmp_path: Path, kind: str) -> None:
    folder = save_checkpoint(tmp_path, kind)
    loaded = TargetModel.load(str(folder))
    drafter = load_native_mtp(loaded)
    assert next(drafter.parameters()).dtype == torch.float32
    exact = unrolled(native(load_checkpoint(folder)), IDS, 2)
    for rough, fine in zip(unrolled(drafter, IDS, 2), exact, strict=True):
        assert (rough - fine).abs().max() < 1e-3 * fine.abs().max()


def test_the_heads_config_says_what_it_is(tmp_path: Path) -> None:
    target = load_checkpoint(save_checkpoint(tmp_path, "qwen3_5_text"))
    config = native(target).config
    assert config.native_config["layer"] == "Qwen3_5DecoderLayer"
    assert config.native_config["model_type"] == "qwen3_5_text"
    assert (config.num_modules, config.sliding_window, config.hidden_first) == (1, None, False)
    assert json.loads(json.dumps(config.own_fields())) == config.own_fields()
    assert not {"id2label", "label2id", "problem_type"} & set(config.native_config["config"])


# --- what is refused


def test_a_target_without_modules(tmp_path: Path) -> None:
    target = load_checkpoint(save_checkpoint(tmp_path, "glm4_moe", modules=0))
    with pytest.raises(ValueError, match=r"holds no MTP modules \(no tensors named layers.2.*"):
        native(target)


def test_a_place_without_weights(tmp_path: Path) -> None:
    target = load_checkpoint(save_checkpoint(tmp_path / "a", "glm4_moe"))
    (tmp_path / "b").mkdir()
    with pytest.raises(ValueError, match="holds no model"):
        load_native_mtp(target, tmp_path / "b")


@pytest.mark.parametrize(
    ("kind", "drop", "named"),
    [
        ("deepseek_v3", "eh_proj.weight", "layers.0.eh_proj.weight"),
        ("glm4_moe", "shared_head.norm.weight", "post_norm.weight"),
        ("qwen3_5_text", "mlp.up_proj.weight", "mlp.up_proj.weight"),
    ],
)
def test_missing_tensors_are_named(tmp_path: Path, kind: str, drop: str, named: str) -> None:
    target = load_checkpoint(save_checkpoint(tmp_path, kind, drop=drop))
    with pytest.raises(ValueError, match=named):
        native(target)


def test_a_shard_that_was_cut_short(tmp_path: Path) -> None:
    target = load_checkpoint(save_checkpoint(tmp_path, "glm4_moe"))
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ValueError, match="native MTP of"):
        native(target)


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_5_text"])
def test_quantised_modules(tmp_path: Path, kind: str) -> None:
    target = load_checkpoint(save_checkpoint(tmp_path, kind))
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = next(name for name in index["weight_map"] if name.endswith(PROJECTIONS))
    index["weight_map"][f"{name}_scale_inv"] = index["weight_map"][name]
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"are quantised \(.*weight_scale_inv\)"):
        native(target)


def test_options_that_are_the_modules_own(tmp_path: Path) -> None:
    target = load_checkpoint(save_checkpoint(tmp_path, "glm4_moe"))
    with pytest.raises(ValueError, match=r"drafter\.num_modules is the native module's own"):
        native(target, num_modules=2)


@pytest.mark.parametrize("kind", ["linear_attention", "hybrid"])
def test_layers_without_attention_of_their_own(tmp_path: Path, kind: str) -> None:
    target = load_checkpoint(save_checkpoint(tmp_path, "qwen3_5_text"))
    target.config.layer_types = [kind] * LAYERS
    with pytest.raises(ValueError, match=f"draft layers cannot have {kind}"):
        attention_windows(target.config)


def test_models_that_do_not_say_what_their_modules_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mtp_native, "FULL_ATTENTION_MTP", ())
    target = load_checkpoint(save_checkpoint(tmp_path, "qwen3_5_text"))
    with pytest.raises(ValueError, match="without `mtp_layer_types` is ambiguous"):
        native(target)


def test_rotary_embeddings_that_change_with_length(tmp_path: Path) -> None:
    target = load_checkpoint(save_checkpoint(tmp_path, "glm4_moe"))
    target.config.rope_parameters["rope_type"] = "dynamic"
    with pytest.raises(ValueError, match=r"changes with the length \(dynamic\)"):
        native(target)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"softcap": 5.0}, "soft-capped scores"),
        ({"s_aux": torch.zeros(4)}, "attention sinks"),
        ({"sliding_window": 9}, "a window of 9"),
    ],
)
def test_what_attend_cannot_say_is_refused(tmp_path: Path, option: dict, message: str) -> None:
    target = load_checkpoint(save_checkpoint(tmp_path, "glm4_moe"))
    layer = native(target).mtp[0].layers[0]
    forward = layer.block.forward
    layer.block.forward = lambda *args, **kwargs: forward(*args, **kwargs, **option)
    with pytest.raises(ValueError, match=message):
        layer(torch.zeros(1, 2, 32, dtype=torch.float64), torch.arange(2)[None], lambda *_: None)


def test_another_scale_is_folded_into_the_queries(tmp_path: Path) -> None:
    target = load_checkpoint(save_checkpoint(tmp_path, "glm4_moe"))
    layer = native(target).mtp[0].layers[0]
    seen: list[Tensor] = []

    def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append(q)
        return torch.zeros_like(q)

    for factor in (1.0, 3.0):
        layer.block.self_attn.scaling = factor * 8**-0.5
        layer(torch.ones(1, 2, 32, dtype=torch.float64), torch.arange(2)[None], attend)
    assert (seen[1] - 3 * seen[0]).abs().max() < 1e-12
