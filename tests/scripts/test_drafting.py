"""Options that say where drafts come from: each kind gets its own, and no others."""

import argparse
import json
import shutil
from pathlib import Path

import pytest
import torch

import inference.scheduling.auto as auto_module
import scripts.auto_decided as auto_decided_module
from drafters import TargetModel, build_drafter
from inference.proposers import HeadProposer, MedusaProposer, Proposer, SequentialProposer
from inference.proposers.compose import ComposedProposer
from inference.proposers.draft_model import DraftModelProposer
from inference.proposers.layer_skip import LayerSkipProposer
from inference.proposers.ngram import NgramProposer
from inference.proposers.suffix import SuffixProposer
from inference.scheduling.auto import AutoProposer
from inference.scheduling.costs import CostTable
from inference.shapes.static_tree import StaticTree
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
    assert isinstance(proposer, SequentialProposer)
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
    assert tree_of(proposer) == (32, 5, 8)
    assert (args.size, args.depth, args.branch) == (32, 5, 8)


@pytest.fixture(scope="module")
def medusa(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return save_models(tmp_path_factory.mktemp("medusa"), "medusa")


def test_medusa_drafts_a_static_tree_of_the_asked_size(medusa: list[str]) -> None:
    args = model_args(medusa, "--size", "9")
    shape = shape_of(load_proposer(args, load_target(args)))
    assert shape.num_nodes == 9
    assert (args.size, args.depth, args.branch, args.tree) == (9, 3, None, "static")
    args = model_args(medusa, "--depth", "2")
    assert shape_of(load_proposer(args, load_target(args))).depth == 2
    args = model_args(medusa, "--branch", "5")  # of grown trees
    with pytest.raises(ValueError, match="--branch has no effect on these drafts"):
        load_proposer(args, load_target(args))


def test_medusas_trees_grow_if_asked_to(medusa: list[str]) -> None:
    args = model_args(medusa, "--tree", "grown", "--branch", "5", "--size", "20")
    proposer = load_proposer(args, load_target(args))
    assert isinstance(proposer, MedusaProposer) and proposer.options.shape is None
    options = proposer.options
    assert (options.size, options.depth, options.top_k, options.grown) == (20, 3, 5, True)


def shape_of(proposer: Proposer) -> StaticTree:
    assert isinstance(proposer, HeadProposer | DraftModelProposer)
    assert proposer.options.shape is not None
    return proposer.options.shape


def with_tree(options: list[str], folder: Path) -> list[str]:
    """The same models with a tree in the head's config."""
    shutil.copytree(options[options.index("--head") + 1], folder / "head")
    config = json.loads((folder / "head" / "config.json").read_text())
    config["tree"] = [[0], [1], [0, 0]]
    (folder / "head" / "config.json").write_text(json.dumps(config))
    return [*options, "--head", str(folder / "head")]


def test_a_tree_in_the_heads_config_is_drafted(
    models: list[str], medusa: list[str], tmp_path: Path
) -> None:
    for name, options in (("eagle3", models), ("medusa", medusa)):
        treed = with_tree(options, tmp_path / name)
        for more in ((), ("--tree", "static")):
            args = model_args(treed, *more)
            shape = shape_of(load_proposer(args, load_target(args)))
            assert shape.parents.tolist() == [-1, 0, 0, 1]
            assert (args.size, args.depth, args.branch) == (None, None, None)
            assert args.tree == "static"
        for option in ("--size", "--depth", "--branch"):
            args = model_args(treed, option, "3")
            with pytest.raises(ValueError, match=f"{option} has no effect on these drafts"):
                load_proposer(args, load_target(args))
        args = model_args(treed, "--tree", "grown", "--size", "9", "--depth", "3", "--branch", "2")
        proposer = load_proposer(args, load_target(args))
        assert isinstance(proposer, HeadProposer) and proposer.options.shape is None
        assert (proposer.options.size, proposer.options.top_k) == (9, 2)
        args = model_args(treed, "--branch", "1")  # chains are grown
        assert load_proposer(args, load_target(args)).chains


def test_a_chain_of_heads_is_blockwise_decoding(medusa: list[str]) -> None:
    args = model_args(medusa, "--branch", "1")
    proposer = load_proposer(args, load_target(args))
    assert isinstance(proposer, MedusaProposer) and proposer.chains
    assert (args.tree, args.depth) == ("grown", 3)


def test_a_tree_from_a_file(models: list[str], medusa: list[str], tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    draft = ["--proposer", "draft-model", "--draft-model", models[models.index("--target") + 1]]
    for found in ([[0], [0, 1], [2]], {"tree": [[0], [0, 1], [2]], "size": 4}):
        path.write_text(json.dumps(found))
        for args in (
            model_args(models, "--tree", str(path)),
            model_args(medusa, "--tree", str(path)),
            without_head(models, *draft, "--tree", str(path)),
        ):
            shape = shape_of(load_proposer(args, load_target(args)))
            assert shape.paths() == [(0,), (2,), (0, 1)]
            assert args.size is None and args.tree == str(path)
    args = model_args(models, "--tree", str(path), "--size", "4")
    with pytest.raises(ValueError, match="--size has no effect"):
        load_proposer(args, load_target(args))


def test_a_generic_static_tree_for_any_head(models: list[str]) -> None:
    args = model_args(models, "--tree", "static", "--size", "12", "--depth", "3")
    shape = shape_of(load_proposer(args, load_target(args)))
    assert (shape.num_nodes, shape.depth) == (12, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "neither grown nor static"),
        ("no json", "neither grown nor static"),
        ('{"size": 4}', "neither grown nor static"),
        ("[[1, 0]]", "without its parent"),
        ("[]", "no draft token"),
        ("[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]", "4 deep but the head drafts 3"),
    ],
)
def test_files_that_hold_no_tree(
    medusa: list[str], tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "tree.json"
    if text is not None:
        path.write_text(text)
    args = model_args(medusa, "--tree", str(path))
    with pytest.raises(ValueError, match=message):
        load_proposer(args, load_target(args))


def test_no_deeper_than_the_head(medusa: list[str]) -> None:
    for more in ((), ("--tree", "grown")):
        args = model_args(medusa, "--depth", "4", *more)
        with pytest.raises(ValueError, match="--depth 4: this head drafts 3 tokens"):
            load_proposer(args, load_target(args))


def test_confidence_needs_a_head_that_has_it(models: list[str], tmp_path: Path) -> None:
    args = model_args(models, "--min-confidence", "0.2")
    target = load_target(args)
    with pytest.raises(ValueError, match="--min-confidence needs a head with a confidence output"):
        load_proposer(args, target)
    save_sure_head(target, tmp_path)
    args = model_args([*models, "--head", str(tmp_path)], "--min-confidence", "0.2")
    proposer = load_proposer(args, target)
    assert isinstance(proposer, SequentialProposer) and proposer.options.min_survival == 0.2
    args = model_args([*models, "--head", str(tmp_path)], "--min-confidence", "1.5")
    with pytest.raises(ValueError, match="min_survival"):
        load_proposer(args, target)


def test_confidence_for_another_decoder_is_named(
    models: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The head predicts overlap: what drawn drafts are accepted by, and greedy ones are not."""
    target = load_target(model_args(models))
    save_sure_head(target, tmp_path)
    mine = [*models, "--head", str(tmp_path)]
    drawn = ("--temperature", "1", "--rule", "rejection")
    for more, said in (
        ((), True),
        (drawn, False),
        ((*drawn, "--draws", "none"), True),
        ((*drawn, "--with-ngram"), False),
        (("--temperature", "1", "--rule", "coupled"), True),
    ):
        load_proposer(model_args(mine, "--min-confidence", "0.2", *more), target)
        shown = capsys.readouterr().err
        assert ("--min-confidence: confidence predicts overlap" in shown) == said
        assert shown.count("\n") == said
    load_proposer(model_args(mine), target)  # predictions are not used
    assert not capsys.readouterr().err


def test_auto_itself_tells_how_sure_drafts_must_be(models: list[str], tmp_path: Path) -> None:
    target = load_target(model_args(models))
    save_sure_head(target, tmp_path)
    args = model_args([*models, "--head", str(tmp_path)], "--min-confidence", "0.2")
    args.size = "auto"
    with pytest.raises(ValueError, match="--min-confidence has no effect with --size auto"):
        load_proposer(args, target)


def save_sure_head(target: TargetModel, folder: Path) -> None:
    head = build_drafter("eagle3", target, confidence_head=True)
    head.set_draft_vocab(torch.ones(target.vocab_size))
    head.save_pretrained(folder)


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


def test_copied_children_beside_a_heads(
    models: list[str], medusa: list[str], tmp_path: Path
) -> None:
    """`--size` stays the size of the whole tree."""
    args = model_args(models, "--with-ngram", "--size", "11")
    proposer = load_proposer(args, load_target(args))
    assert isinstance(proposer, ComposedProposer) and proposer.size == 11
    assert tree_of(proposer.proposers[0])[0] == 6
    args = model_args(medusa, "--with-ngram", "--branch", "1")
    proposer = load_proposer(args, load_target(args))
    assert isinstance(proposer, ComposedProposer)
    assert isinstance(chain := proposer.proposers[0], MedusaProposer) and chain.chains
    assert proposer.size == 32 and chain.options.size == 16
    treed = with_tree(medusa, tmp_path)
    args = model_args(treed, "--with-ngram")
    proposer = load_proposer(args, load_target(args))
    assert isinstance(proposer, ComposedProposer) and proposer.size == 4 + 16


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--draws", "one"], "--draws has an effect"),
        (["--draws", "one", "--rule", "rejection"], "--draws has an effect"),
        (["--sharpness", "0.5", "--rule", "coupled"], "--sharpness has an effect"),
        (["--draft-temperature", "0.7"], "--draft-temperature has no effect at temperature 0"),
    ],
)
def test_options_of_drawn_drafts_without_any(
    models: list[str], more: list[str], message: str
) -> None:
    args = model_args(models, *more)
    with pytest.raises(ValueError, match=message):
        load_proposer(args, load_target(args))
    rule = "coupled" if "--sharpness" in more else "rejection"
    args = model_args(models, *more, "--temperature", "1", "--rule", rule)
    load_proposer(args, load_target(args))
    args = model_args(models, *more, "--temperature", "1", "--rule", "match")
    if "--draft-temperature" not in more:
        with pytest.raises(ValueError, match=message):
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
        (["--proposer", "ngram", "--tree", "grown"], "--tree has no effect"),
        (["--proposer", "suffix", "--min-confidence", "0.1"], "--min-confidence has no effect"),
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


def test_auto_measures_and_keeps_what_rounds_cost(
    models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_module, "WIDTHS", (1, 2, 4))
    monkeypatch.setattr(auto_decided_module, "CONTEXTS", (16,))
    monkeypatch.setattr(auto_module, "BUDGET", 0.0)
    path = tmp_path / "costs.json"
    args = model_args(models, "--size", "auto", "--costs", str(path), "--depth", "2")
    proposer = load_proposer(args, load_target(args), batch_size=2)
    assert isinstance(proposer, AutoProposer) and proposer._watch is not None
    args = model_args(models, "--size", "auto", "--costs", str(path), "--depth", "2", "--no-clock")
    unwatched = load_proposer(args, load_target(args), batch_size=2)
    assert isinstance(unwatched, AutoProposer) and unwatched._watch is None and args.no_clock
    assert set(proposer.arms) == {"head", "ngram1", "ngram2", "ngram3", "ngram6"}
    assert proposer.arms["head"].depth == 2
    assert {b for _, _, b in CostTable.load(path).verify_points} == {1, 2}
    assert args.size == "auto"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--tree", "static"], "not with --tree"),
        (["--with-ngram"], "--with-ngram has no effect"),
        (["--proposer", "layer-skip", "--exit-layer", "1"], "layer-skip|draft models"),
    ],
)
def test_auto_refuses_what_has_no_effect(models: list[str], more: list[str], message: str) -> None:
    args = model_args(models, "--size", "auto", *more)
    with pytest.raises(ValueError, match=message):
        load_proposer(args, load_target(args))


def test_costs_without_auto_have_no_effect(models: list[str], tmp_path: Path) -> None:
    for more in (["--costs", str(tmp_path / "costs.json")], ["--no-clock"]):
        args = model_args(models, *more)
        with pytest.raises(ValueError, match=f"{more[0]} has an effect with --size auto only"):
            load_proposer(args, load_target(args))


def test_a_size_is_a_number_or_auto(models: list[str]) -> None:
    with pytest.raises(SystemExit):
        model_args(models, "--size", "large")
