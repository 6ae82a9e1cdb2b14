"""The head that a run trains: new, warm, imported or the target's own, and what is refused."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters import FAMILIES, Drafter, TargetModel, build_drafter
from drafters.export import write_as, write_native
from drafters.mtp_native import load_native_mtp
from recipes.heads import make_drafter
from tests.native_mtp import load_checkpoint, save_checkpoint
from tests.tiny import tiny_target
from training.config import DataOptions, RunOptions, TargetOptions, TrainConfig
from training.data.batches import PackedDataset
from training.data.chat import TokenizedRow
from training.features import run_target
from training.loop import Trainer
from training.objectives import ObjectiveOptions, build_objective
from training.options.drafter import DrafterOptions
from training.processes import make_accelerator

IDS = torch.randint(3, 40, (32,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(torch.float32)


@pytest.fixture(scope="module")
def dataset() -> PackedDataset:
    """Its answers use the tokens 3..39 only."""
    return PackedDataset([TokenizedRow(IDS, [False] * 4 + [True] * 28)] * 4, 64, 1)


def options(family: str, **given: Any) -> DrafterOptions:
    small: dict[str, Any] = {}
    if family in ("medusa", "hydra"):
        small = {"num_heads": 2}
    elif family == "dspark":
        small = {"markov_rank": 8}
    if given.get("init_from") is not None:
        small = {}
    found: DrafterOptions = DrafterOptions.get_choice_class(family)(**{**small, **given})
    return found


def make(
    target: TargetModel, dataset: PackedDataset, drafter: DrafterOptions, seed: int = 0
) -> Any:
    config = TrainConfig(
        TargetOptions("tiny"), drafter, DataOptions(["rows"]), RunOptions("out", seed=seed)
    )
    return make_drafter(config, target, dataset)


def weights(drafter: Drafter) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in drafter.named_parameters()}


def differing(one: Drafter, other: Drafter) -> set[str]:
    theirs = weights(other)
    return {name for name, weight in weights(one).items() if not torch.equal(weight, theirs[name])}


# --- new heads


@pytest.mark.parametrize(
    ("family", "start"),
    [
        (family, start)
        for family in FAMILIES
        for start in ("target", "random")
        if (family, start) != ("medusa", "random")  # refused, see below
    ],
)
def test_an_untrained_head_of_every_family_gives_a_finite_loss(
    target: TargetModel, dataset: PackedDataset, family: str, start: str
) -> None:
    given = {"num_layers": 1} if family == "hydra" else {}
    head = make(target, dataset, options(family, start=start, draft_vocab_size=40, **given))
    objective = build_objective(head, ObjectiveOptions())
    batch = next(dataset.micro_batches(0, 0, 1, 1))
    loss, metrics = objective(run_target(target, batch, head.feature_layers))
    assert loss.isfinite()
    assert metrics["loss_0_sum" if "loss_0_sum" in metrics else "loss_sum"].isfinite()
    assert head.training
    assert all(weight.requires_grad for weight in head.parameters())


STARTED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "hydra": ({"num_layers": 1}, {"prefix"}),
    "eagle1": ({}, {"fc", "layers"}),
    "eagle3": ({"num_layers": 2}, {"fc", "midlayer", "layers", "norm"}),
    "mtp": ({"num_modules": 2}, {"mtp"}),
    "peagle": ({"num_layers": 1}, {"fc", "midlayer", "norm", "mask_embedding"}),
    "dflash": ({"num_layers": 2}, {"fc", "layers", "norm", "hidden_norm"}),
    "dspark": ({}, {"fc", "layers", "norm", "hidden_norm"}),
}
"""By family: options, and the modules that `start: target` gives other values than `random`."""


@pytest.mark.parametrize("family", STARTED)
def test_start_target_changes_the_layers_and_random_leaves_them(
    dataset: PackedDataset, family: str
) -> None:
    target = tiny_target(torch.float32)
    with torch.no_grad():  # norms of one would hide a copy
        for name, weight in target.model.named_parameters():
            if "norm" in name:
                weight.add_(0.3 * torch.rand_like(weight))
    given, modules = STARTED[family]
    started = make(target, dataset, options(family, **given))
    random = make(target, dataset, options(family, start="random", **given))
    assert {name.split(".")[0] for name in differing(started, random)} == modules
    bare = build_drafter(family, target, 0, **options(family, **given).head_fields())
    outputs = ("lm_head", "lm_heads")
    assert {name.split(".")[0] for name in differing(random, bare)} <= set(outputs)


@pytest.mark.parametrize(
    ("family", "given", "pairs"),
    [
        ("hydra", {"num_layers": 1}, {"prefix.self_attn.q_proj": (-1, "self_attn.q_proj")}),
        ("eagle3", {}, {"midlayer.mlp.up_proj": (-1, "mlp.up_proj"), "norm": (-1, "norm")}),
        (
            "eagle3",
            {"num_layers": 2},
            {
                "midlayer.mlp.up_proj": (-2, "mlp.up_proj"),
                "layers.1.self_attn.k_proj": (-1, "self_attn.k_proj"),
            },
        ),
        ("peagle", {"num_layers": 2}, {"layers.1.mlp.gate_proj": (-1, "mlp.gate_proj")}),
        (
            "dflash",
            {"num_layers": 2},
            {
                "layers.0.self_attn.v_proj": (-2, "self_attn.v_proj"),
                "layers.1.self_attn.o_proj": (-1, "self_attn.o_proj"),
                "hidden_norm": (-2, "input_layernorm"),
            },
        ),
        (
            "dspark",
            {"num_layers": 1},
            {"layers.0.mlp.up_proj": (-1, "mlp.up_proj")},
        ),
    ],
)
def test_layers_are_the_targets_last_ones(
    target: TargetModel,
    dataset: PackedDataset,
    family: str,
    given: dict[str, Any],
    pairs: dict[str, tuple[int, str]],
) -> None:
    head = make(target, dataset, options(family, **given))
    for mine, (layer, theirs) in pairs.items():
        copied = weights(head)[f"{mine}.weight"]
        assert torch.equal(copied, target.block(layer)[f"{theirs}.weight"]), mine


@pytest.mark.parametrize(("family", "given"), [("medusa", {}), ("hydra", {})])
def test_random_is_refused_where_it_has_no_effect(
    target: TargetModel, dataset: PackedDataset, family: str, given: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"drafter.start=random has no effect.*Drop it"):
        make(target, dataset, options(family, start="random", **given))


def test_the_vocabulary_is_that_of_the_answers(
    target: TargetModel, dataset: PackedDataset, caplog: pytest.LogCaptureFixture
) -> None:
    head = make(target, dataset, options("dflash", draft_vocab_size=20))
    counts = dataset.token_counts(target.vocab_size)
    inside = counts[head.draft_vocab]
    outside = counts.clone()
    outside[head.draft_vocab] = 0
    assert inside.numel() == 20
    assert outside.max() <= min(c for c in inside.tolist() if c)
    with caplog.at_level(logging.INFO):
        covering = make(target, dataset, options("eagle1", draft_vocab_coverage=0.9))
    size = covering.config.draft_vocab_size
    kept = counts[covering.draft_vocab].sum()
    assert kept >= 0.9 * counts.sum() > kept - counts[covering.draft_vocab].max()
    assert f"{size} tokens cover 90.0 %" in caplog.text


# --- warm


def test_a_smaller_head_starts_from_a_larger_one(
    target: TargetModel, dataset: PackedDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    large = make(target, dataset, options("dflash", num_layers=2, start="random"), seed=1)
    write_native(large.eval(), tmp_path / "large")
    with caplog.at_level(logging.INFO):
        head = make(
            target, dataset, options("dflash", num_layers=1, warm_from=str(tmp_path / "large"))
        )
    assert not {name for name in differing(head, large)}
    assert "tensors start from" in caplog.text
    other = options("eagle3", warm_from=str(tmp_path / "large"))
    with pytest.raises(ValueError, match=r"warm_from is a dflash head but drafter.type is eagle3"):
        make(target, dataset, other)


# --- continued


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_of_every_family_is_continued(
    target: TargetModel, dataset: PackedDataset, tmp_path: Path, family: str
) -> None:
    old = make(target, dataset, options(family, draft_vocab_size=40), seed=1)
    write_native(old.eval(), tmp_path / "head")
    head = make(target, dataset, options(family, init_from=str(tmp_path / "head")))
    assert not differing(head, old)
    assert head.draft_vocab.tolist() == old.draft_vocab.tolist()
    assert head.training
    assert all(weight.requires_grad for weight in head.parameters())


def test_a_head_of_the_engines_format_is_continued(
    target: TargetModel, dataset: PackedDataset, tmp_path: Path
) -> None:
    old = make(
        target, dataset, options("eagle3", draft_vocab_size=40, confidence_head=False), seed=1
    )
    write_as("sglang", old.eval(), tmp_path / "head")
    head = make(target, dataset, options("eagle3", init_from=str(tmp_path / "head")))
    assert not differing(head, old)
    assert head.draft_vocab.tolist() == old.draft_vocab.tolist()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"start": "random"}, r"drafter.start=random has no effect on a head that is read"),
        ({"draft_vocab_coverage": 0.9}, r"drafter.draft_vocab_coverage=0.9 has no effect"),
        ({"draft_vocab_size": 50}, r"drafter.draft_vocab_size=50 has no effect.* has 40"),
        ({"num_layers": 2}, r"drafter.num_layers=2 has no effect.* has 1"),
        ({"confidence_head": False}, r"drafter.confidence_head=False has no effect"),
        ({"feature_layers": [1]}, r"drafter.feature_layers=\[1\] has no effect"),
    ],
)
def test_options_that_the_head_contradicts_are_refused(
    target: TargetModel,
    dataset: PackedDataset,
    tmp_path: Path,
    given: dict[str, Any],
    message: str,
) -> None:
    old = make(target, dataset, options("eagle3", draft_vocab_size=40))
    write_native(old.eval(), tmp_path / "head")
    with pytest.raises(ValueError, match=message):
        make(target, dataset, options("eagle3", init_from=str(tmp_path / "head"), **given))


def test_options_that_the_head_agrees_with_are_taken(
    target: TargetModel, dataset: PackedDataset, tmp_path: Path
) -> None:
    old = make(target, dataset, options("eagle3", draft_vocab_size=40))
    write_native(old.eval(), tmp_path / "head")
    same = options(
        "eagle3", init_from=str(tmp_path / "head"), draft_vocab_size=40, feature_layers=[2, 3, 4]
    )
    same = replace(same, feature_layers=list(old.feature_layers))
    assert not differing(make(target, dataset, same), old)


def test_what_was_fitted_to_the_old_weights_is_dropped(
    target: TargetModel, dataset: PackedDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It would be saved with, and decoded by, weights that it was not fitted to."""
    old = make(target, dataset, options("medusa"))
    fitted = {
        "confidence_temperatures": [2.0, 3.0],
        "confidence_biases": [0.1, 0.2],
        "draft_temperature": 0.7,
        "tree": [[0], [0, 0], [1]],
    }
    for name, value in fitted.items():
        setattr(old.config, name, value)
    write_native(old.eval(), tmp_path / "head")
    with caplog.at_level(logging.INFO):
        head = make(target, dataset, options("medusa", init_from=str(tmp_path / "head")))
    found = [record.message for record in caplog.records if "dropped" in record.message]
    assert len(found) == 1
    for name in fitted:
        assert getattr(head.config, name) == getattr(type(head.config)(), name), name
        assert name in found[0]
    assert not differing(head, old)


def test_nothing_is_said_where_nothing_was_fitted(
    target: TargetModel, dataset: PackedDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_native(make(target, dataset, options("medusa")).eval(), tmp_path / "head")
    with caplog.at_level(logging.INFO):
        make(target, dataset, options("medusa", init_from=str(tmp_path / "head")))
    assert "dropped" not in caplog.text
    assert "confidence" not in caplog.text


def test_a_continued_head_without_a_confidence_output_gets_none(
    target: TargetModel, dataset: PackedDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = make(target, dataset, options("medusa", confidence_head=False))
    write_native(old.eval(), tmp_path / "head")
    head = make(target, dataset, options("medusa", init_from=str(tmp_path / "head")))
    assert head.confidence is None
    assert "no confidence output" in caplog.text
    caplog.clear()
    agreed = options("medusa", init_from=str(tmp_path / "head"), confidence_head=False)
    make(target, dataset, agreed)
    assert "confidence" not in caplog.text


def test_another_family_is_refused(
    target: TargetModel, dataset: PackedDataset, tmp_path: Path
) -> None:
    old = make(target, dataset, options("medusa"))
    write_native(old.eval(), tmp_path / "head")
    wrong = options("eagle3", init_from=str(tmp_path / "head"))
    with pytest.raises(ValueError, match=r"init_from is a medusa head but drafter.type is eagle3"):
        make(target, dataset, wrong)


# --- native


@pytest.fixture(scope="module")
def native_target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    folder = save_checkpoint(tmp_path_factory.mktemp("models") / "qwen", "qwen3_5_text")
    return load_checkpoint(folder)


def test_native_modules_with_a_draft_vocabulary(
    native_target: TargetModel, dataset: PackedDataset
) -> None:
    given = options("mtp", init_from="native", draft_vocab_size=40)
    head = make(native_target, dataset, given)
    bare = load_native_mtp(native_target)
    assert {name.split(".")[0] for name, _ in head.named_parameters()} == {"confidence", "mtp"}
    for name, weight in weights(bare).items():
        assert torch.equal(weights(head)[name], weight), name
    rows = torch.randn(3, head.output_size, generator=torch.Generator().manual_seed(0))
    wanted = native_target.project(rows.double())[:, head.draft_vocab]
    torch.testing.assert_close(head.logits(rows).double(), wanted, atol=1e-5, rtol=1e-5)
    counts = dataset.token_counts(native_target.vocab_size)
    assert set(counts.nonzero().flatten().tolist()) <= set(head.draft_vocab.tolist())
    assert head.training


def test_a_run_on_native_modules_is_resumed(
    native_target: TargetModel, dataset: PackedDataset, tmp_path: Path
) -> None:
    """What the checkpoint's file gives back is what a new process reads out of the target."""
    given = options("mtp", init_from="native", draft_vocab_size=40)
    for _ in range(2):
        config = TrainConfig(
            TargetOptions("tiny"),
            given,
            DataOptions(["rows"], max_length=64),
            RunOptions(str(tmp_path), steps=1, resume="auto"),
            ObjectiveOptions(steps=2),
        )
        head = make_drafter(config, native_target, dataset)
        objective = build_objective(head, config.loss)
        accelerator = make_accelerator(config.run, "cpu")
        trainer = Trainer(config, accelerator, native_target, objective, dataset)
        trainer.prepare()
        if not trainer.step:
            trainer._train_step()
            trainer._save()
            trained = weights(head)
    assert trainer.step == 1
    assert all(torch.equal(weights(head)[name], weight) for name, weight in trained.items())


@pytest.mark.parametrize(
    ("family", "given", "message"),
    [
        ("eagle3", {}, "init_from=native needs drafter.type mtp"),
        ("mtp", {"start": "random"}, "start=random has no effect.*native are trained"),
        ("mtp", {"num_modules": 2}, "num_modules is the native module's own"),
        ("mtp", {"num_layers": 1}, "num_layers is the native module's own"),
        ("mtp", {"intermediate_size": 64}, "intermediate_size is the native module's own"),
        ("mtp", {"qk_norm": True}, "qk_norm is the native module's own"),
        ("mtp", {"sliding_window": 8}, "sliding_window is the native module's own"),
    ],
)
def test_what_native_modules_cannot_be_asked(
    native_target: TargetModel,
    dataset: PackedDataset,
    family: str,
    given: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        make(native_target, dataset, options(family, init_from="native", **given))
