"""Saving, loading, attaching: what is in a head's file, and which targets it accepts."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM

from drafters import Drafter, Eagle3Drafter, MedusaDrafter, TargetModel, build_drafter, load_drafter
from drafters.export import golden_inputs, golden_logits
from tests.tiny import tiny_target, tiny_tokenizer

VOCAB, HIDDEN = 96, 32
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {}),
    "eagle3 reduced": ("eagle3", {"draft_vocab_size": 40}),
    "eagle3.1": ("eagle3", {"fc_norm": True, "norm_output": True, "confidence_head": True}),
    "medusa": ("medusa", {"num_heads": 3, "num_layers": 2}),
    "medusa reduced": ("medusa", {"num_heads": 2, "draft_vocab_size": 40}),
    "medusa shared": (
        "medusa",
        {"num_heads": 2, "shared_lm_head": True, "confidence_head": True, "tree": [[0], [0, 1]]},
    ),
    "medusa shared reduced": (
        "medusa",
        {"num_heads": 2, "shared_lm_head": True, "draft_vocab_size": 40},
    ),
    "eagle1": ("eagle1", {"confidence_head": True, "draft_vocab_size": 40}),
    "hydra": ("hydra", {"num_heads": 3, "num_layers": 1}),
    "mtp": ("mtp", {"num_modules": 2, "draft_vocab_size": 40}),
    "peagle": ("peagle", {"num_drafts": 3}),
    "dflash": ("dflash", {"draft_vocab_size": 40}),
    "dspark": ("dspark", {"markov_rank": 5, "confidence_head": True}),
}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(torch.float32)


def make_head(target: TargetModel, name: str) -> Drafter:
    """A head that is nowhere at its initial values, draft vocabulary included."""
    family, options = HEADS[name]
    drafter = build_drafter(family, target, **options)
    counts = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(4))
    drafter.set_draft_vocab(counts)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return drafter.eval()


def everything(drafter: Drafter) -> list[torch.Tensor]:
    """All that a head can say about fixed inputs."""
    generator = torch.Generator().manual_seed(8)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    with torch.no_grad():
        if drafter.family not in ("eagle3", "medusa"):
            return [golden_logits(drafter, golden_inputs(drafter))]
        if isinstance(drafter, Eagle3Drafter):
            size = HIDDEN * len(drafter.feature_layers)
            features = torch.randn(1, 5, size, generator=generator)
            ids = torch.randint(VOCAB, (1, 5), generator=generator)
            hidden, following = drafter(drafter.fuse(features), ids, torch.arange(5)[None], attend)
            logits = drafter.logits(hidden)
            found = [hidden, following, logits]
        else:
            hidden = drafter(torch.randn(5, HIDDEN, generator=generator))
            logits = torch.stack([drafter.logits(h, i) for i, h in enumerate(hidden)])
            found = [hidden, logits]
        found += [drafter.to_target_logits(logits), drafter.to_target_ids(logits.argmax(-1))]
        if drafter.confidence is not None:
            found.append(drafter.confidence(hidden))
    return found


@pytest.fixture
def saved(tmp_path: Path, target: TargetModel) -> Path:
    make_head(target, "eagle3 reduced").save_pretrained(tmp_path / "head")
    return tmp_path / "head"


# --- save, load, equal outputs


@pytest.mark.parametrize("name", HEADS)
def test_saved_and_loaded_heads_are_equal(tmp_path: Path, target: TargetModel, name: str) -> None:
    drafter = make_head(target, name)
    drafter.save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path, target)
    assert type(loaded) is type(drafter)
    assert not loaded.training
    assert loaded.config.own_fields() == drafter.config.own_fields()
    state, wanted = loaded.state_dict(), drafter.state_dict()
    assert state.keys() == wanted.keys()
    for key, value in wanted.items():
        assert state[key].dtype == value.dtype
        assert torch.equal(state[key], value), key
    for one, other in zip(everything(drafter), everything(loaded), strict=True):
        assert torch.equal(one, other)


def test_outputs_depend_on_what_is_saved(tmp_path: Path, target: TargetModel) -> None:
    """Negative control: another head says something else everywhere."""
    drafter = make_head(target, "eagle3 reduced")
    other = build_drafter("eagle3", target, 1, **HEADS["eagle3 reduced"][1])
    for one, two in zip(everything(drafter), everything(other), strict=True):
        assert not torch.equal(one, two)


@pytest.mark.parametrize("name", HEADS)
def test_files_are_the_same_when_saved_again(
    tmp_path: Path, target: TargetModel, name: str
) -> None:
    make_head(target, name).save_pretrained(tmp_path / "one")
    load_drafter(tmp_path / "one", target).save_pretrained(tmp_path / "two")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_is_loaded_in_the_dtype_asked_for(
    saved: Path, target: TargetModel, dtype: torch.dtype
) -> None:
    loaded = load_drafter(saved, target, dtype=dtype)
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    assert loaded.draft_vocab.dtype == torch.int64
    expected = make_head(target, "eagle3 reduced").draft_vocab
    assert torch.equal(loaded.draft_vocab, expected)


def test_auto_classes_know_the_heads(tmp_path: Path, target: TargetModel) -> None:
    for name in ("eagle3", "medusa"):
        make_head(target, name).save_pretrained(tmp_path / name)
        head = AutoModel.from_pretrained(tmp_path / name)
        assert type(head) is {"eagle3": Eagle3Drafter, "medusa": MedusaDrafter}[name]
        with pytest.raises(ValueError, match=r"attach\(target\)"):
            _ = head.target
        first, second = everything(head.attach(target).eval()), everything(make_head(target, name))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# --- what is in the file


@pytest.mark.parametrize("name", HEADS)
def test_no_borrowed_tensor_is_in_the_file(tmp_path: Path, target: TargetModel, name: str) -> None:
    """Exactly the head's own parameters and its draft vocabulary, nothing of the target's."""
    drafter = make_head(target, name)
    drafter.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    own = {key for key, _ in drafter.named_parameters()}
    own |= {"draft_vocab"} if drafter.draft_vocab is not None else set()
    assert set(tensors) == own
    others = set(tensors) - {"mask_embedding"}  # P-EAGLE's own
    assert not any("embed" in key or "target" in key for key in others)
    borrowed = [target.embedding.weight, target.lm_head.weight]
    for key, tensor in tensors.items():
        same = [b for b in borrowed if b.shape == tensor.shape and torch.equal(b, tensor)]
        assert not same, key
    if name.startswith(("medusa", "hydra")):
        heads = [key for key in tensors if key.startswith("lm_heads")]
        assert len(heads) == (0 if "shared" in name else drafter.config.num_heads)


def test_attaching_adds_no_parameters(target: TargetModel) -> None:
    drafter = build_drafter("medusa", target, num_heads=2, shared_lm_head=True)
    expected = 2 * (HIDDEN * HIDDEN + HIDDEN)
    assert drafter.num_parameters_trained() == expected
    assert drafter.target is target
    assert not any(m is target.lm_head for m in drafter.modules())


def test_moving_a_head_leaves_the_target_where_it_is(target: TargetModel) -> None:
    drafter = build_drafter("medusa", target, num_heads=2, shared_lm_head=True)
    drafter.double()
    assert target.dtype == torch.float32
    assert target.lm_head.weight.dtype == torch.float32


# --- initial values


def test_building_is_seeded_and_leaves_the_generator_alone(target: TargetModel) -> None:
    torch.manual_seed(1)
    first = build_drafter("eagle3", target, seed=5)
    drawn = torch.rand(1)
    second = build_drafter("eagle3", target, seed=5)
    other = build_drafter("eagle3", target, seed=6)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(1))
    assert torch.equal(first.fc.weight, second.fc.weight)
    assert not torch.equal(first.fc.weight, other.fc.weight)


def test_zero_blocks_survive_construction_on_the_meta_device(
    tmp_path: Path, target: TargetModel
) -> None:
    """from_pretrained builds on the meta device and initialises what the file lacks."""
    make_head(target, "medusa").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    kept = {k: v for k, v in load_file(file).items() if not k.startswith("blocks.1")}
    save_file(kept, file, metadata={"format": "pt"})
    head = MedusaDrafter.from_pretrained(tmp_path)
    for name, parameter in head.blocks[1].named_parameters():
        assert (parameter == 0).all(), name
    assert (head.blocks[0][0].linear.weight != 0).any()
    hidden = torch.randn(3, HIDDEN)
    assert torch.equal(head(hidden)[1], hidden)


def test_reduced_vocabulary_follows_the_counts(target: TargetModel) -> None:
    """The most frequent tokens and the end of sequence, as sorted absolute ids."""
    drafter = build_drafter("eagle3", target, draft_vocab_size=5)
    counts = torch.zeros(VOCAB, dtype=torch.int64)
    counts[[90, 7, 50, 33]] = torch.tensor([9, 8, 7, 6])
    drafter.set_draft_vocab(counts)
    assert target.eos_token_ids == (2,)
    assert drafter.draft_vocab.tolist() == [2, 7, 33, 50, 90]
    assert torch.equal(drafter.lm_head.weight, target.lm_head.weight[[2, 7, 33, 50, 90]])
    assert torch.equal(drafter.head_rows(), target.lm_head.weight[[2, 7, 33, 50, 90]])
    assert drafter.to_target_ids(torch.tensor([[4, 0]])).tolist() == [[90, 2]]
    logits = drafter.to_target_logits(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert logits[[2, 7, 33, 50, 90]].tolist() == [1, 2, 3, 4, 5]
    assert logits.isinf().sum() == VOCAB - 5 and (logits[logits.isinf()] < 0).all()


def test_a_random_start_copies_output_matrices_only(target: TargetModel) -> None:
    counts = torch.arange(VOCAB)
    for family in ("eagle3", "hydra", "medusa"):
        built, random, warm = (build_drafter(family, target, seed=5) for _ in range(3))
        random.set_draft_vocab(counts, start="random")
        warm.set_draft_vocab(counts)
        outputs = [p for m in random.output_modules() if m is not None for p in m.parameters()]
        assert outputs and all(torch.equal(p, target.lm_head.weight) for p in outputs)
        changed = {
            name: not torch.equal(value, built.state_dict()[name])
            for name, value in random.state_dict().items()
        }
        assert all(name.startswith("lm_head") for name in changed if changed[name]), family
        if family == "eagle3":
            assert not torch.equal(
                warm.midlayer.mlp.up_proj.weight, random.midlayer.mlp.up_proj.weight
            )


def test_borrowed_logits_of_a_reduced_vocabulary(target: TargetModel) -> None:
    """The target's rows, whatever the dtype, and after another choice of tokens."""
    drafter = build_drafter("medusa", target, shared_lm_head=True, draft_vocab_size=40)
    hidden = torch.randn(2, 3, HIDDEN)
    for counts in (torch.arange(VOCAB), torch.arange(VOCAB).flip(0)):
        drafter.set_draft_vocab(counts)
        whole = target.project(hidden)
        assert (
            drafter.borrowed_logits(hidden) - whole[..., drafter.draft_vocab]
        ).abs().max() < 1e-5
        double = drafter.borrowed_logits(hidden.double())
        assert double.dtype == torch.float64
        assert (double - whole[..., drafter.draft_vocab]).abs().max() < 1e-4
    other = tiny_target(torch.float32, seed=1)
    drafter.attach(other, allow_other_target=True)
    found, wanted = drafter.borrowed_logits(hidden), other.project(hidden)
    assert (found - wanted[..., drafter.draft_vocab]).abs().max() < 1e-5


def test_whole_vocabulary_needs_no_map(target: TargetModel) -> None:
    drafter = build_drafter("eagle3", target)
    assert drafter.draft_vocab is None
    ids, logits = torch.tensor([3, 5]), torch.randn(2, VOCAB)
    assert drafter.to_target_ids(ids) is ids
    assert drafter.to_target_logits(logits) is logits


# --- wrong targets


def other_tokenizer() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["another"])
    return tokenizer


def other_template() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template += "{# v2 #}"
    return tokenizer


def tuned() -> LlamaForCausalLM:
    model = tiny_target(torch.float32).model
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight += 0.01
    return model


WRONG: dict[str, Callable[[], TargetModel]] = {
    "hidden_size": lambda: tiny_target(torch.float32, hidden=48),
    "vocab_size": lambda: tiny_target(torch.float32, vocab=100),
    "target_num_layers": lambda: tiny_target(torch.float32, layers=5),
    "weights": lambda: tiny_target(torch.float32, seed=1),
    "tokenizer": lambda: TargetModel(tiny_target(torch.float32).model, other_tokenizer()),
}


@pytest.mark.parametrize("field", WRONG)
def test_wrong_target_is_refused(saved: Path, field: str) -> None:
    with pytest.raises(ValueError, match=rf"wrong target.*{field}"):
        load_drafter(saved, WRONG[field]())


def test_fine_tuned_target_is_told_from_its_base(saved: Path) -> None:
    with pytest.raises(ValueError, match="wrong target: weights"):
        load_drafter(saved, TargetModel(tuned(), tiny_tokenizer()))


def test_same_target_in_another_dtype_is_accepted(saved: Path) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        assert load_drafter(saved, cast(dtype)).target.dtype == dtype


def cast(dtype: torch.dtype) -> TargetModel:
    """The float32 target, loaded in another dtype."""
    return TargetModel(tiny_target(torch.float32).model.to(dtype), tiny_tokenizer(), "tiny")


def test_chat_template_difference_only_warns(
    saved: Path, target: TargetModel, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="drafters"):
        load_drafter(saved, target)
        assert not caplog.records
        load_drafter(saved, TargetModel(tiny_target(torch.float32).model, other_template(), "v2"))
    assert [r.getMessage() for r in caplog.records if "chat template" in r.getMessage()]


def test_other_target_may_be_allowed_with_a_warning(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = AutoModel.from_pretrained(saved)
    with caplog.at_level(logging.WARNING, logger="drafters"):
        head.attach(WRONG["weights"](), allow_other_target=True)
    assert "runs on" in caplog.text
    with pytest.raises(ValueError, match="hidden_size"):
        head.attach(WRONG["hidden_size"](), allow_other_target=True)


# --- damaged and foreign folders


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def cut_to_nothing(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut, cut_to_nothing, Path.unlink])
def test_damaged_weights_are_refused(
    saved: Path, target: TargetModel, damage: Callable[[Path], None]
) -> None:
    damage(saved / "model.safetensors")
    with pytest.raises(ValueError, match=r"head .*(damaged|cannot load)"):
        load_drafter(saved, target)


@pytest.mark.parametrize(
    "missing", ["fc.weight", "draft_vocab", "midlayer.self_attn.q_proj.weight"]
)
def test_missing_tensors_are_refused(saved: Path, target: TargetModel, missing: str) -> None:
    """Buffers too: transformers would fill them with whatever memory holds."""
    tensors = load_file(saved / "model.safetensors")
    del tensors[missing]
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"missing_keys.*{missing}"):
        load_drafter(saved, target)


def test_unexpected_tensors_are_refused(saved: Path, target: TargetModel) -> None:
    tensors = load_file(saved / "model.safetensors") | {"embed_tokens.weight": torch.zeros(3)}
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"unexpected_keys.*embed_tokens"):
        load_drafter(saved, target)


def test_tensors_of_another_shape_are_refused(saved: Path, target: TargetModel) -> None:
    tensors = load_file(saved / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"][:, 1:].contiguous()
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"fc\.weight|shape"):
        load_drafter(saved, target)


def test_config_that_does_not_fit_the_file_is_refused(saved: Path, target: TargetModel) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"fc_norm": True}))
    with pytest.raises(ValueError, match=r"fc_norm"):
        load_drafter(saved, target)


@pytest.mark.parametrize("content", [None, "{", "{}", '{"model_type": "no-such-model"}'])
def test_folders_that_are_no_heads_are_refused(
    tmp_path: Path, target: TargetModel, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match="head "):
        load_drafter(tmp_path, target)


def test_a_target_is_no_head(tmp_path: Path, target: TargetModel) -> None:
    LlamaConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'llama' is not one of Headway's heads"):
        load_drafter(tmp_path, target)


def test_build_refuses_what_it_does_not_know(target: TargetModel) -> None:
    with pytest.raises(ValueError, match=r"drafter\.type 'eagle9' is unknown.*eagle3"):
        build_drafter("eagle9", target)
    with pytest.raises(ValueError, match=r"drafter\.steps: the medusa head has no such option"):
        build_drafter("medusa", target, steps=3)
