"""TargetModel against the model it wraps: features, logits, fingerprints, refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

from drafters import TargetModel, build_drafter
from tests.tiny import CHATML, save_tiny_target, tiny_target, tiny_tokenizer
from tests.zoo import ZOO, zoo_target

IDS = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(0))
SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


def llama(**options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **options})).double()


def gemma2(cap: float = 3.0) -> PreTrainedModel:
    """Soft-capped logits and scaled embeddings; small enough a cap to bend every logit."""
    torch.manual_seed(0)
    config = Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=cap, sliding_window=4)
    return Gemma2ForCausalLM(config).double()


def granite() -> PreTrainedModel:
    torch.manual_seed(0)
    config = GraniteConfig(
        **SHAPE,
        logits_scaling=8.0,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.3,
    )
    return GraniteForCausalLM(config).double()


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "tied": lambda: llama(tie_word_embeddings=True),
    "gemma2": gemma2,
    "granite": granite,
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return MODELS[request.param]()


def entering_streams(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """What each decoder layer is given, by forward hooks."""
    found: list[Tensor] = []

    def record(module: nn.Module, args: tuple, kwargs: dict) -> None:
        found.append((args[0] if args else kwargs["hidden_states"]).clone())

    hooks = [
        layer.register_forward_pre_hook(record, with_kwargs=True) for layer in model.model.layers
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return found


# --- what a forward gives


def test_features_are_the_streams_entering_their_layers(model: PreTrainedModel) -> None:
    target = TargetModel(model)
    streams = entering_streams(model, IDS)
    assert len(streams) == target.num_layers == 3
    for k, stream in enumerate(streams):
        assert torch.equal(target.forward(IDS, feature_layers=[k]).features, stream)
    out = target.forward(IDS, feature_layers=[0, 2])
    assert torch.equal(out.features, torch.cat((streams[0], streams[2]), dim=-1))
    for k, other in ((0, 1), (1, 2)):
        assert not torch.equal(streams[k], streams[other])


def test_last_hidden_is_what_the_output_matrix_sees(model: PreTrainedModel) -> None:
    target, seen = TargetModel(model), []
    hook = target.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    out = target.forward(IDS)
    hook.remove()
    assert torch.equal(out.last_hidden, seen[0])
    with torch.no_grad():
        assert torch.equal(out.logits, model(IDS).logits)
    assert out.features is None


def test_projection_of_the_last_hidden_is_the_logits(model: PreTrainedModel) -> None:
    target = TargetModel(model)
    out = target.forward(IDS)
    assert (target.project(out.last_hidden) - out.logits).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["gemma2", "granite"])
def test_scaled_logits_are_not_the_bare_product(name: str) -> None:
    """Negative control: caps and scales of these models really do something."""
    target = TargetModel(MODELS[name]())
    out = target.forward(IDS)
    with torch.no_grad():
        bare = target.lm_head(out.last_hidden)
    assert (bare - out.logits).abs().max() > 0.5


def test_embeddings_are_what_the_first_layer_gets(model: PreTrainedModel) -> None:
    """Heads are fed ``embed``; a scale the model applies belongs to it."""
    target = TargetModel(model)
    assert torch.equal(target.embed(IDS), target.forward(IDS, feature_layers=[0]).features)


@pytest.mark.parametrize("name", ZOO)
def test_every_architecture(name: str) -> None:
    """Embeddings, captured streams and logits are the model's own; layers are found by shape."""
    target = zoo_target(name)
    seen: list[Tensor] = []
    hooks = [target.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))]
    streams: dict[int, Tensor] = {}
    for index, layer in enumerate(target.decoder_layers()):

        def record(module: nn.Module, args: tuple, out: Any, index: int = index) -> None:
            streams[index + 1] = out[0] if isinstance(out, tuple) else out

        hooks.append(layer.register_forward_hook(record))
    out = target.forward(IDS, feature_layers=[0, 1, 3])
    for hook in hooks:
        hook.remove()
    if name != "gpt2":  # which adds embeddings of positions
        assert torch.equal(out.features[..., : target.hidden_size], target.embed(IDS))
    assert torch.equal(
        out.features[..., target.hidden_size :], torch.cat((streams[1], streams[3]), -1)
    )
    assert torch.equal(out.last_hidden, seen[0])
    assert (target.project(out.last_hidden) - out.logits).abs().max() < 1e-12
    with torch.no_grad():
        assert torch.equal(out.logits, target.model(IDS).logits)


@pytest.mark.parametrize("kept", [1, 3, torch.tensor([2, 5])])
def test_logits_of_some_rows(kept: int | Tensor) -> None:
    target = TargetModel(llama())
    everything, some = target.forward(IDS), target.forward(IDS, logits_to_keep=kept)
    rows = everything.logits[:, -kept:] if isinstance(kept, int) else everything.logits[:, kept]
    assert (some.logits - rows).abs().max() < 1e-12
    assert torch.equal(some.last_hidden, everything.last_hidden), "hidden states are never cut"


def test_a_cache_is_read_and_extended() -> None:
    target = TargetModel(llama())
    cache = DynamicCache(config=target.model.config)
    first = target.forward(IDS[:, :5], cache=cache, feature_layers=[1])
    second = target.forward(IDS[:, 5:], cache=cache, feature_layers=[1])
    whole = target.forward(IDS, feature_layers=[1])
    assert (torch.cat((first.logits, second.logits), 1) - whole.logits).abs().max() < 1e-10
    assert (torch.cat((first.features, second.features), 1) - whole.features).abs().max() < 1e-10


def test_padding_mask_and_positions_are_passed_on() -> None:
    target = TargetModel(llama())
    padded = torch.cat((torch.zeros(2, 3, dtype=torch.long), IDS), dim=1)
    mask = torch.ones_like(padded)
    mask[:, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    out = target.forward(padded, attention_mask=mask, position_ids=positions)
    assert (out.logits[:, 3:] - target.forward(IDS).logits).abs().max() < 1e-10
    unmasked = target.forward(padded)
    assert (unmasked.logits[:, 3:] - target.forward(IDS).logits).abs().max() > 1e-2


def test_nothing_is_trained() -> None:
    target = TargetModel(llama())
    assert not target.model.training
    out = target.forward(IDS, feature_layers=[1])
    assert not any(p.requires_grad for p in target.model.parameters())
    assert not (out.logits.requires_grad or out.features.requires_grad)


# --- what it is


def test_shape() -> None:
    target = tiny_target(layers=4)
    assert (target.hidden_size, target.vocab_size, target.num_layers) == (32, 96, 4)
    assert target.eos_token_ids == (2,)
    assert target.max_length == 512
    assert target.dtype == torch.float64
    fields = target.shape_fields()
    assert {k: fields[k] for k in ("hidden_size", "vocab_size", "target_num_layers")} == {
        "hidden_size": 32,
        "vocab_size": 96,
        "target_num_layers": 4,
    }
    assert fields["target_name"] == "tiny"
    assert fields["target_fingerprint"] == target.fingerprint()


@pytest.mark.parametrize(
    ("eos", "wanted"), [(5, (5,)), ([5, 7], (5, 7)), (None, ())], ids=["one", "many", "none"]
)
def test_end_of_sequence_tokens(eos: Any, wanted: tuple[int, ...]) -> None:
    assert TargetModel(llama(eos_token_id=eos)).eos_token_ids == wanted


def test_layer_types() -> None:
    assert tiny_target(layers=3).layer_types == ["full_attention"] * 3
    assert TargetModel(gemma2()).layer_types == [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
    ]
    mistral = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=8))
    assert TargetModel(mistral).layer_types == ["sliding_attention"] * 3
    whole = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None))
    assert TargetModel(whole).layer_types == ["full_attention"] * 3
    qwen = Qwen2ForCausalLM(Qwen2Config(**SHAPE, sliding_window=8, use_sliding_window=False))
    assert TargetModel(qwen).layer_types == ["full_attention"] * 3


def test_last_block_is_named_as_in_llama() -> None:
    target = tiny_target(layers=3)
    block = target.block()
    layer = target.model.model.layers[2]
    assert torch.equal(block["self_attn.q_proj.weight"], layer.self_attn.q_proj.weight)
    assert torch.equal(block["mlp.down_proj.weight"], layer.mlp.down_proj.weight)
    assert (block["norm.weight"] - target.model.model.norm.weight).abs().max() < 1e-4
    assert len(block) == 10


def test_blocks_are_counted_from_either_end() -> None:
    target = tiny_target(layers=3)
    for index, layer in ((0, 0), (2, 2), (-1, 2), (-3, 0)):
        wanted = target.model.model.layers[layer].mlp.up_proj.weight
        assert torch.equal(target.block(index)["mlp.up_proj.weight"], wanted)


def test_norms_of_queries_and_keys_belong_to_the_block() -> None:
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8))
    attention = model.model.layers[1].self_attn
    with torch.no_grad():
        attention.q_norm.weight.uniform_()
    block = TargetModel(model).block(1)
    assert torch.allclose(block["self_attn.q_norm.weight"], attention.q_norm.weight, atol=1e-5)
    assert len(block) == 12


def test_logits_of_some_tokens_are_rows_of_all() -> None:
    """With every scale that a target puts on its logits."""
    for model in (gemma2(), tiny_target().model):
        target = TargetModel(model)
        ids, hidden = (
            torch.tensor([5, 0, 40]),
            torch.randn(2, target.hidden_size, dtype=target.dtype),
        )
        found = target.project_rows(hidden, target.lm_head.weight[ids], ids)
        assert (found - target.project(hidden)[:, ids]).abs().max() < 1e-5


def test_layouts_whose_norms_stand_elsewhere_have_no_last_block() -> None:
    """Gemma 2 has a norm of the same name, but behind the attention, not before the MLP."""
    assert TargetModel(gemma2()).block() == {}
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=3, n_head=4))
    assert TargetModel(gpt2).block() == {}


@pytest.mark.parametrize(
    "kind", [(OlmoConfig, OlmoForCausalLM), (StableLmConfig, StableLmForCausalLM)]
)
def test_norms_that_take_the_mean_away_are_no_llamas(kind: tuple[Any, Any]) -> None:
    """With weights or without; ones, of which other norms tell their scale, they map to nothing."""
    torch.manual_seed(0)
    config, model = kind
    target = TargetModel(model(config(**SHAPE)))
    assert target.block() == {}
    head = build_drafter("eagle3", target, feature_layers=[0, 1, 2])
    head.set_draft_vocab(torch.arange(target.vocab_size))
    assert torch.equal(head.norm.weight, torch.ones(32))


# --- fingerprint


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_fingerprint_does_not_depend_on_the_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    """Of a target published in float32; a head trained in float32 is served in half precision."""
    save_tiny_target(tmp_path, dtype=torch.float32)
    wanted = TargetModel.load(str(tmp_path), torch.float32).fingerprint()
    assert set(wanted) == {"shape", "weights", "tokenizer", "chat_template"}
    if dtype == torch.float16:  # its rounding hides the bits that the others agree on
        del wanted["weights"]
    assert TargetModel.load(str(tmp_path), dtype).fingerprint() == wanted


def test_fingerprint_does_not_depend_on_name_or_attention(tmp_path: Path) -> None:
    one, other = tiny_target(attn="sdpa"), tiny_target(attn="eager")
    other.name = "elsewhere"
    assert one.fingerprint() == other.fingerprint()


def differing(one: TargetModel, other: TargetModel) -> set[str]:
    a, b = one.fingerprint(), other.fingerprint()
    return {key for key in a.keys() | b.keys() if a.get(key) != b.get(key)}


def test_fingerprint_tells_what_changed() -> None:
    base = tiny_target()
    assert differing(base, tiny_target(seed=1)) == {"weights"}
    assert "shape" in differing(base, tiny_target(layers=5))
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["more"])
    assert differing(base, TargetModel(tiny_target().model, tokenizer)) == {"tokenizer"}
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHATML + " "
    assert differing(base, TargetModel(tiny_target().model, tokenizer)) == {"chat_template"}
    bare = TargetModel(tiny_target().model)
    assert set(bare.fingerprint()) == {"shape", "weights"}


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.2.mlp.up_proj.weight", "lm_head.weight"]
)
def test_fingerprint_sees_a_small_fine_tune(name: str) -> None:
    tuned = tiny_target()
    with torch.no_grad():
        parameter = dict(tuned.model.named_parameters())[name]
        parameter *= 1.01
    assert differing(tiny_target(), tuned) == {"weights"}


# --- loading


def test_loaded_from_a_folder(tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path / "tiny", attn="eager")
    target = TargetModel.load(str(folder), torch.float64, attn_implementation="eager")
    assert target.dtype == torch.float64
    assert target.model.config._attn_implementation == "eager"
    wanted = tiny_target(attn="eager")
    assert torch.equal(target.forward(IDS).logits, wanted.forward(IDS).logits)
    assert target.tokenizer.chat_template == CHATML
    assert target.shape_fields()["target_name"] == "tiny", "no machine's path is recorded"


@pytest.mark.parametrize(
    ("model", "chosen"), [(llama, "sdpa"), (gemma2, "eager")], ids=["llama", "gemma2"]
)
def test_transformers_chooses_the_attention(
    tmp_path: Path, model: Callable[[], PreTrainedModel], chosen: str
) -> None:
    """sdpa cannot cap the scores of Gemma 2."""
    model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    target = TargetModel.load(str(tmp_path), torch.float64)
    assert target.model.config._attn_implementation == chosen
    wanted = TargetModel(model()).forward(IDS).logits
    assert (target.forward(IDS).logits - wanted).abs().max() < 1e-5
    if chosen == "eager":
        with pytest.raises(ValueError, match=r"cannot load.*scaled_dot_product_attention"):
            TargetModel.load(str(tmp_path), attn_implementation="sdpa")


def no_folder(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def unknown_model(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "no-such-model"}))


def no_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


@pytest.mark.parametrize(
    "damage",
    [no_folder, cut_weights, no_weights, no_config, broken_config, unknown_model, no_tokenizer],
)
def test_load_errors_name_the_target(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder = save_tiny_target(tmp_path / "tiny")
    damage(folder)
    with pytest.raises(ValueError, match=r"target '.*tiny': cannot load this (folder|name)"):
        TargetModel.load(str(folder))


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    """transformers would go on with random ones."""
    folder = save_tiny_target(tmp_path / "tiny")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="up_proj"):
        TargetModel.load(str(folder))


def test_flash_attention_is_refused() -> None:
    with pytest.raises(ValueError, match=r"attn_implementation must be 'sdpa' or 'eager'.*flash"):
        TargetModel.load("anything", attn_implementation="flash_attention_2")


def test_a_tokenizer_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="without a tokenizer"):
        _ = TargetModel(llama()).tokenizer


def test_unknown_rule_of_logits_is_refused() -> None:
    """A model whose logits are not what ``project`` computes must not be drafted for."""
    model = llama()
    model.register_forward_hook(lambda m, args, out: setattr(out, "logits", out.logits + 1.0))
    with pytest.raises(ValueError, match="logits are not a known function"):
        TargetModel(model)


def test_logits_that_are_not_finite_are_refused() -> None:
    model = llama()
    with torch.no_grad():
        model.lm_head.weight[0] = torch.nan
    with pytest.raises(ValueError, match="logits are not a known function"):
        TargetModel(model)


def test_model_without_an_output_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match="no linear output matrix"):
        TargetModel(llama().model)


def test_blocks_whose_norms_are_no_root_mean_squares_are_not_copied() -> None:
    """OLMo's norms have no weight; a LayerNorm maps ones to its bias, not to its scale."""
    target = TargetModel(zoo_target("olmo").model)
    assert target.block() == {}
    for family in ("eagle3", "dflash", "mtp", "eagle1"):
        options = {"feature_layers": [1, 2]} if family in ("eagle3", "dflash") else {}
        options |= {"mask_token_id": 3} if family == "dflash" else {}
        head = build_drafter(family, target, **options)
        head.set_draft_vocab(torch.arange(target.vocab_size))
        assert all(parameter.isfinite().all() for parameter in head.parameters())
