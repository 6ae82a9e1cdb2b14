"""Options that say where drafts come from: each kind gets its own, and no others."""

import argparse
import json
import shutil

import pytest

from inference.proposers import Eagle3Proposer, MedusaProposer, Proposer
from inference.proposers.compose import ComposedProposer
from inference.proposers.draft_model import DraftModelProposer
from inference.proposers.layer_skip import LayerSkipProposer
from inference.proposers.ngram import NgramProposer
from inference.proposers.suffix import SuffixProposer
from scripts.common import add_options, load_target, parser_for
from scripts.drafting import add_drafting_options, load_proposer
from tests.scripts.heads import save_models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return save_models(tmp_path_factory.mktemp("models"))


def model_args(options: list[str], *more: str) -> argparse.Namespace:
    parser = parser_for("doc")
    add_options(parser, "--target", "--dtype", "--device", "--threads", "--rule", "--temperature")
    add_drafting_options(parser)
    return parser.parse_args([*options, *more])


def without_head(models: list[str], *more: str) -> argparse.Namespace:
    place = models.index("--head")
    return model_args([*models[:place], *models[place + 2 :]], *more)


def tree_of(proposer: Proposer) -> tuple[int, int, int]:
    assert isinstance(proposer, Eagle3Proposer)
    return proposer.options.size, proposer.options.depth, proposer.options.top_k


def test_a_target_and_its_head_are_loaded(models: list[str]) -> None:
    args = model_args(models, "--threads", "1", "--size", "7", "--branch", "1")
    target = load_target(args)
    assert str(target.dtype) == "torch.float64"
    proposer = load_proposer(args, target)
    assert tree_of(proposer) == (7, 5, 1)
    assert str(proposer.drafter.dtype) == "torch.float64"  # type: ignore[attr-defined]


def test_tree_options_that_were_not_given_take_their_defaults_and_record_them(
    models: list[str],
) -> None:
    args = model_args(models)
    proposer = load_proposer(args, load_target(args))
    assert tree_of(proposer) == (32, 5, 8)  # type: ignore[attr-defined]
    assert (args.size, args.depth, args.branch) == (32, 5, 8)


@pytest.fixture(scope="module")
def medusa(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return save_models(tmp_path_factory.mktemp("medusa"), "medusa")


@pytest.fixture(scope="module")
def medusa_with_tree(medusa: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The same head with a tree of its own in its config."""
    folder = tmp_path_factory.mktemp("tree")
    shutil.copytree(medusa[medusa.index("--head") + 1], folder / "head")
    config = json.loads((folder / "head" / "config.json").read_text())
    config["tree"] = [[0], [1], [0, 0]]
    (folder / "head" / "config.json").write_text(json.dumps(config))
    return [*medusa, "--head", str(folder / "head")]


def test_medusa_takes_a_size_and_nothing_else(medusa: list[str]) -> None:
    args = model_args(medusa, "--size", "9")
    proposer = load_proposer(args, load_target(args))
    assert len(proposer.shape.parents) == 9  # type: ignore[attr-defined]
    assert (args.size, args.depth, args.branch) == (9, None, None)
    for option in ("--depth", "--branch"):
        args = model_args(medusa, option, "5")  # the default of other heads, but asked for
        with pytest.raises(ValueError, match=f"{option} has no effect on these drafts"):
            load_proposer(args, load_target(args))


def test_a_tree_in_the_heads_config_leaves_no_choice(medusa_with_tree: list[str]) -> None:
    args = model_args(medusa_with_tree)
    proposer = load_proposer(args, load_target(args))
    assert proposer.shape.parents.tolist() == [-1, 0, 0, 1]  # type: ignore[attr-defined]
    assert (args.size, args.depth, args.branch) == (None, None, None)
    for option in ("--size", "--depth", "--branch"):
        args = model_args(medusa_with_tree, option, "32")
        with pytest.raises(ValueError, match=f"{option} has no effect on these drafts"):
            load_proposer(args, load_target(args))


def test_a_chain_is_medusas_one_other_shape(medusa: list[str]) -> None:
    """Blockwise parallel decoding."""
    args = model_args(medusa, "--branch", "1")
    proposer = load_proposer(args, load_target(args))
    assert isinstance(proposer, MedusaProposer)
    assert proposer.shape.parents.tolist() == list(range(-1, proposer.drafter.config.num_heads))
    args = model_args(medusa, "--branch", "1", "--size", "9")
    with pytest.raises(ValueError, match="--size has no effect"):
        load_proposer(args, load_target(args))


def test_kinds_that_need_no_training(models: list[str]) -> None:
    args = without_head(models, "--proposer", "ngram", "--depth", "4")
    proposer = load_proposer(args, load_target(args))
    assert isinstance(proposer, NgramProposer) and proposer.depth == 4
    args = without_head(models, "--proposer", "suffix")
    assert isinstance(load_proposer(args, load_target(args)), SuffixProposer)
    args = without_head(models, "--proposer", "layer-skip", "--exit-layer", "2")
    assert isinstance(load_proposer(args, load_target(args)), LayerSkipProposer)
    args = without_head(models, "--proposer", "layer-skip", "--draft-layers", "0,1,5")
    assert isinstance(load_proposer(args, load_target(args)), LayerSkipProposer)
    draft = models[models.index("--target") + 1]
    args = without_head(models, "--proposer", "draft-model", "--draft-model", draft)
    assert isinstance(load_proposer(args, load_target(args)), DraftModelProposer)


def test_copied_children_beside_a_heads(models: list[str], medusa: list[str]) -> None:
    """`--size` stays the size of the whole tree."""
    args = model_args(models, "--with-ngram", "--size", "11")
    proposer = load_proposer(args, load_target(args))
    assert isinstance(proposer, ComposedProposer) and proposer.size == 11
    assert tree_of(proposer.proposers[0])[0] == 6
    args = model_args(medusa, "--with-ngram", "--branch", "1")
    proposer = load_proposer(args, load_target(args))
    assert isinstance(proposer, ComposedProposer)
    assert isinstance(chain := proposer.proposers[0], MedusaProposer) and chain.chains
    assert proposer.size == len(chain.shape.parents) + 16


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--draws", "one"], "--draws has an effect"),
        (["--draws", "one", "--rule", "rejection"], "--draws has an effect"),
        (["--draft-temperature", "0.7"], "--draft-temperature has no effect at temperature 0"),
    ],
)
def test_options_of_drawn_drafts_without_any(
    models: list[str], more: list[str], message: str
) -> None:
    args = model_args(models, *more)
    with pytest.raises(ValueError, match=message):
        load_proposer(args, load_target(args))
    args = model_args(models, *more, "--temperature", "1", "--rule", "rejection")
    load_proposer(args, load_target(args))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "--head NAME is needed"),
        (["--proposer", "draft-model"], "--draft-model NAME is needed"),
        (["--proposer", "layer-skip"], "either --exit-layer or --draft-layers"),
        (["--proposer", "ngram", "--head", "x"], "--head has no effect"),
        (["--proposer", "ngram", "--exit-layer", "2"], "belong to --proposer layer-skip"),
        (["--proposer", "ngram", "--draft-temperature", "2"], "--draft-temperature has no effect"),
        (["--proposer", "layer-skip", "--exit-layer", "2", "--with-ngram"], "--with-ngram has no"),
    ],
)
def test_options_that_belong_to_other_kinds(
    models: list[str], more: list[str], message: str
) -> None:
    args = without_head(models, *more)
    with pytest.raises(ValueError, match=message):
        load_proposer(args, load_target(args))


def test_a_head_that_is_not_there_is_named(models: list[str]) -> None:
    args = model_args(models, "--head", "/nowhere")
    with pytest.raises(ValueError, match="head /nowhere"):
        load_proposer(args, load_target(args))
