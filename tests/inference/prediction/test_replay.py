"""Replays against decoding: the very rounds of fixed sizes, and the very choices of `--size auto`.

The target has few tokens, so that drafts of untrained heads are often accepted.
"""

import functools
import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters import Drafter, TargetModel
from inference.generate import plain_generate, speculative_generate
from inference.prediction.contenders import (
    COPIES,
    PLAIN,
    least_seconds,
    look_up,
    play_fixed,
    sizes_of,
    step_seconds,
)
from inference.prediction.drafts import Grown, Regrowth
from inference.prediction.recording import GREEDY, Recorded, read_records, record, write_records
from inference.prediction.replay import Played, Same, player
from inference.prediction.text import Answer
from inference.proposers import HeadProposer, Proposer, TreeOptions, build_proposer
from inference.proposers.arms import describe
from inference.proposers.draft_model import DraftModelProposer
from inference.proposers.ngram import NgramProposer, by_match
from inference.scheduling.auto import AutoProposer
from inference.scheduling.costs import CostTable
from inference.scheduling.survival import Prior
from tests.blocks import block_head
from tests.inference.scheduling.costs import KEY
from tests.tiny import tiny_target

VOCAB, NEW = 14, 40
PROMPTS = [[5, 6, 7, 8, 5, 6], [9, 3, 9]]
OPTIONS = TreeOptions(size=12, depth=4, top_k=4, grown=True)
CONFIDENT = {"confidence_head": True}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {}),
    "eagle3 confident": ("eagle3", CONFIDENT),
    "mtp": ("mtp", {"num_modules": 3}),
    "hydra confident": ("hydra", CONFIDENT),
    "medusa": ("medusa", {}),
    "medusa confident": ("medusa", CONFIDENT),
    "dflash": ("dflash", {"block_size": 5, "mask_token_id": 13}),
    "dspark confident": ("dspark", {"markov_rank": 8, "mask_token_id": 13, **CONFIDENT}),
    "dspark rnn": ("dspark", {"markov_rank": 8, "markov_type": "rnn", "mask_token_id": 13}),
}


@functools.cache
def target() -> TargetModel:
    return tiny_target(layers=4, vocab=VOCAB)


@functools.cache
def head(name: str) -> Drafter:
    family, config = HEADS[name]
    found = block_head(target(), family, noise=0.3, **config)
    if found.confidence is not None:
        depth = found.num_drafts or OPTIONS.longest
        found.config.confidence_temperatures = [1.0 + 0.3 * level for level in range(depth)]
    return found


def arms(name: str) -> dict[str, Proposer]:
    copies = by_match(NgramProposer(8, 7, 1, max_ngram=6))
    return {"head": build_proposer(head(name), OPTIONS), **copies}


def table(
    rows: float = 0.02, step: float = 0.05, absorbing: float = 0.01, start: float = 1.0
) -> CostTable:
    widths = (1, 2, 3, 4, 6, 8, 12)
    points = {
        (width, context, 1): start + rows * width + context / 1000
        for width in widths
        for context in (0, 512)
    }
    drafts = {("head", deep, k, 1): step * deep for deep in (1, 4) for k in (1, 4)}
    return CostTable(KEY, points, drafts, {1: 0.01}, absorb_points={("head", 64): absorbing})


TABLES = {
    "cheap rows": table(),
    "dear rows": table(rows=0.4, step=0.1),
    "dear drafts": table(rows=0.05, step=0.3, absorbing=0.5),
}
PRIORS = {
    "head": Prior.measured([[0.3, 0.2, 0.1, 0.1]] * 4),
    "ngram1": Prior.measured([[0.4]] * 7),
}


@functools.cache
def recorded(name: str) -> list[Recorded]:
    found = plain_generate(target(), PROMPTS, max_new_tokens=NEW)
    [proposer] = [arm for arm in arms(name).values() if isinstance(arm, HeadProposer)]
    return [
        record(target(), {"head": proposer}, Answer(prompt, tokens, NEW, GREEDY, str(number)))
        for number, (prompt, tokens) in enumerate(zip(PROMPTS, found.sequences, strict=True))
    ]


# Fixed sizes --------------------------------------------------------------------------------------


def fixed_proposer(name: str, does: Same) -> Proposer:
    arm, depth, top_k, size = does
    if arm == COPIES:
        return NgramProposer(depth + 1, depth, 1, max_ngram=6)
    return build_proposer(head(name), TreeOptions(size, depth, top_k, grown=True))


def decoded_rounds(proposer: Proposer, prompt: list[int]) -> list[tuple[int, int, int]]:
    """Accepted drafts, emitted tokens, nodes."""
    found: list[tuple[int, int, int]] = []
    speculative_generate(
        target(),
        proposer,
        [prompt],
        max_new_tokens=NEW,
        on_round=lambda done: found.append(
            (len(done.accepted), len(done.emitted), done.tree.num_nodes)
        ),
    )
    return found


def numbers(rounds: list[Played]) -> list[tuple[int, int, int]]:
    return [(done.accepted, done.emitted, done.nodes) for done in rounds]


@pytest.mark.parametrize("name", list(HEADS))
def test_fixed_sizes_have_the_rounds_of_the_decoder(name: str) -> None:
    """Chains and trees of all depths, and copies."""
    texts, costs = recorded(name), TABLES["cheap rows"]
    sizes = sizes_of([describe(*arm) for arm in arms(name).items()], costs)
    tables = look_up(target(), arms(name), sizes, texts)
    assert sizes[0] == PLAIN and len(sizes) > 20
    tried = [does for does in sizes[1:] if does[3] in (2, 4, 5, 8, 12)]
    assert {COPIES, "head"} == {does[0] for does in tried}
    accepted = 0
    for does in tried:
        proposer = fixed_proposer(name, does)
        for text, steps in zip(texts, tables, strict=True):
            replayed = play_fixed(text, steps, does, costs)
            assert numbers(replayed) == decoded_rounds(proposer, text.answer.prompt), does
            accepted += sum(done.accepted for done in replayed)
    assert accepted > 50  # there is something to compare


def test_plain_decoding_is_a_round_a_token() -> None:
    [text, *_], costs = recorded("eagle3"), TABLES["cheap rows"]
    [steps] = look_up(target(), {}, [PLAIN], [text])
    rounds = play_fixed(text, steps, PLAIN, costs)
    assert len(rounds) == len(text.answer.tokens) - 1
    first = costs.verify(1, len(text.answer.prompt) + 1) + costs.rest()
    assert rounds[0].seconds == first < rounds[-1].seconds


# Auto ---------------------------------------------------------------------------------------------


class Watched(AutoProposer):
    """Tells what was chosen in every round."""

    def start(self, session: Any) -> None:
        super().start(session)
        self.chosen: list[Same] = getattr(self, "chosen", [])

    def propose(self, states: Any) -> Any:
        before = self.made.copy()
        trees = super().propose(states)
        self.chosen += list(self.made - before)
        return trees


def auto_decoded(
    name: str, costs: CostTable, priors: Mapping[str, Prior], texts: list[Recorded]
) -> tuple[list[Same], list[tuple[int, int, int]], AutoProposer]:
    """What the decoder does with all texts, one after the other."""
    proposer = Watched(arms(name), costs, priors, clock=False)
    rounds = [done for text in texts for done in decoded_rounds(proposer, text.answer.prompt)]
    return proposer.chosen, rounds, proposer


CASES = [
    *((name, "cheap rows", False) for name in HEADS),
    *((name, "dear drafts", True) for name in HEADS),
    ("eagle3 confident", "dear rows", False),
    ("dspark confident", "dear rows", True),
]


@pytest.mark.parametrize(("name", "costs", "known"), CASES)
def test_auto_makes_the_choices_of_the_decoder(name: str, costs: str, known: bool) -> None:
    """Arms, sizes, accepted drafts and nodes round by round, and what is expected of them."""
    texts, priors = recorded(name), PRIORS if known else {}
    chosen, rounds, real = auto_decoded(name, TABLES[costs], priors, texts)
    replay = player(target(), arms(name), TABLES[costs], priors)
    played = [done for text in texts for done in replay.play(text)]
    assert [done.does for done in played] == chosen
    assert numbers(played) == rounds
    again = replay.proposer
    assert again.made == real.made and again.confident == real.confident
    assert again.predicted == real.predicted
    assert (again.confident == {"head"}) == ("confident" in name)


def test_the_choices_compared_are_of_many_kinds() -> None:
    """Otherwise the test above would say little."""
    arms_used, kinds, cut = set(), set(), 0
    for name, costs, known in CASES:
        replay = player(target(), arms(name), TABLES[costs], PRIORS if known else {})
        for text in recorded(name):
            for done in replay.play(text):
                arm, _, top_k, size = done.does
                arms_used.add(arm)
                kinds.add((arm == "head", top_k > 1))
                cut += arm == "head" and done.nodes < size
    assert {None, "head", "ngram1"} <= arms_used and len(arms_used) > 4
    assert {(True, True), (True, False), (False, False)} <= kinds
    assert cut > 10


def test_seconds_are_those_of_what_was_done() -> None:
    """Drafting as deep as it went, verifying what was left, and the prompt where a head drafts."""
    costs = TABLES["dear rows"]
    replay = player(target(), arms("eagle3 confident"), costs, PRIORS)
    text = recorded("eagle3 confident")[0]
    context, absorbed = len(text.answer.prompt) + 1, False
    for done in replay.play(text):
        arm, depth, top_k, _ = done.does
        least = costs.verify(done.nodes, context) + costs.rest()
        if arm != "head":
            assert done.seconds == pytest.approx(least)
        else:
            deepest = least + costs.draft("head", depth, top_k)
            if not absorbed:
                deepest += costs.absorb("head", context)
            assert least < done.seconds <= deepest + costs.absorb("head", 70)
            absorbed = True
        context += done.emitted
    assert absorbed


# Thresholds of confidence -------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in HEADS if "confident" in name])
def test_trees_of_any_threshold_are_those_of_the_head(name: str) -> None:
    """Every frontier that a threshold can lead to was expanded."""
    text = recorded(name)[1]
    ids, start = [*text.answer.prompt, *text.answer.tokens], len(text.answer.prompt)
    proposer = build_proposer(head(name), OPTIONS)
    out = target().forward(torch.tensor([ids[:-1]]), feature_layers=proposer.feature_layers)
    sizes = set()
    for place, threshold in itertools.product((0, 17), [n / 30 for n in range(28)]):
        root = start + place
        options = replace(proposer.options, min_survival=threshold)
        features = None if out.features is None else out.features[0, :root]
        state = replace(text.state(place), features=features, hidden=out.last_hidden[0, :root])
        fresh = build_proposer(head(name), options)
        fresh.reset(1)
        with torch.no_grad():
            expected = fresh.grow(0, state)
        found, levels = text.drafts["head"][place].tree(fresh.options, state)
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert found.parents.tolist() == expected.parents.tolist()
        if expected.num_nodes > 1:
            assert found.survival is not None and expected.survival is not None
            torch.testing.assert_close(found.survival.double(), expected.survival.double())
        assert found.depth <= levels <= 4
        sizes.add(found.num_nodes)
    assert len(sizes) >= 3


def test_what_was_not_expanded_is_not_made_up() -> None:
    text = recorded("eagle3")[0]
    drafts = text.drafts["head"][0]
    assert isinstance(drafts, Grown)
    less = Grown(drafts.nodes[:3], drafts.tokens[:3], drafts.scores[:3], None)
    assert Regrowth(less, OPTIONS, text.state(0)).depth == 4
    with pytest.raises(KeyError):
        less.tree(OPTIONS, text.state(0))


# The bound ----------------------------------------------------------------------------------------


def test_nothing_is_faster_than_the_bound_and_some_mixture_is_as_fast() -> None:
    """Against all mixtures of sizes through a short text."""
    costs, sizes = TABLES["cheap rows"], [PLAIN, ("head", 1, 4, 4), ("head", 3, 1, 4)]
    text = recorded("eagle3")[0]
    short = Recorded(replace(text.answer, tokens=text.answer.tokens[:13]), text.drafts)
    [steps] = look_up(target(), arms("eagle3"), [*sizes, (COPIES, 2, 1, 3)], [short])
    start, end = len(short.answer.prompt) + 1, len(steps)

    def seconds(place: int, spent: float) -> list[float]:
        if place >= end:
            return [spent]
        return [
            total
            for does, step in steps[place].items()
            for total in seconds(
                place + step.accepted + 1, spent + step_seconds(costs, does, step, start + place)
            )
        ]

    everything = seconds(0, 0.0)
    assert len(everything) > 50
    assert least_seconds(short, steps, costs) == pytest.approx(min(everything))


def test_auto_and_fixed_sizes_are_slower_than_the_bound() -> None:
    costs = TABLES["cheap rows"]
    sizes = sizes_of([describe(*arm) for arm in arms("mtp").items()], costs)
    tables = look_up(target(), arms("mtp"), sizes, recorded("mtp"))
    replay = player(target(), arms("mtp"), costs)
    for text, steps in zip(recorded("mtp"), tables, strict=True):
        bound = least_seconds(text, steps, costs)
        plays = [play_fixed(text, steps, does, costs) for does in sizes]
        for rounds in [replay.play(text), *plays]:
            assert sum(done.seconds for done in rounds) > bound
            assert sum(done.emitted for done in rounds) == len(steps)


# Records ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eagle3 confident", "medusa confident", "dflash"])
def test_records_are_read_as_they_were_written(name: str, tmp_path: Path) -> None:
    of = {"target": "tiny", "heads": {"head": name}}
    write_records(tmp_path / "records.jsonl", of, recorded(name))
    read = read_records(tmp_path / "records.jsonl", of)
    assert [one.answer for one in read] == [one.answer for one in recorded(name)]
    plays = []
    for texts in (read, recorded(name)):
        replay = player(target(), arms(name), TABLES["dear rows"])
        plays.append([replay.play(text) for text in texts])
    assert plays[0] == plays[1]


def test_records_of_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    write_records(path, {"target": "tiny"}, recorded("medusa"))
    with pytest.raises(ValueError, match="its target is tiny, here it is large"):
        read_records(path, {"target": "large"})
    path.write_text(path.read_text("utf-8").replace('"scores"', '"numbers"'), "utf-8")
    with pytest.raises(ValueError, match="record again"):
        read_records(path, {"target": "tiny"})
    path.write_text("{", "utf-8")
    with pytest.raises(ValueError, match="cannot be replayed"):
        read_records(path, {})


def test_draft_models_are_refused() -> None:
    model = DraftModelProposer(tiny_target(layers=1, vocab=VOCAB), TreeOptions(top_k=1, depth=3))
    with pytest.raises(ValueError, match="'draft' cannot be recorded"):
        player(target(), {"draft": model}, TABLES["cheap rows"])
