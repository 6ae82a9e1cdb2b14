"""Predictions against decoding, closed forms, and a fault that is planted in the decoder.

Letters: V vocabulary, K depths, m tokens that rounds emit.
"""

import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import inference.decoding as decoding_module
from drafters import TargetModel, TargetOutput
from inference.generate import plain_generate, speculative_generate
from inference.prediction.alarms import Decoded, compare, warnings_of
from inference.prediction.formulas import expected_tokens
from inference.prediction.predict import Answer, Prediction, predict
from inference.prediction.rounds import walk
from inference.proposers import HeadProposer, Proposer, RowState, TreeOptions, build_proposer
from inference.proposers.growth import new_tree
from inference.sampling import SamplingParams
from inference.stats import AcceptanceStats
from inference.tree import TokenTree
from tests.scripts.heads import tiny_head
from tests.tiny import tiny_target

PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13], [61, 7, 8, 61]]
GREEDY, SAMPLED = SamplingParams(), SamplingParams(0.9, seed=3)
NEW = 13
CHAIN, TREE = TreeOptions(5, 4, 1), TreeOptions(12, 3, 4)


def answers_of(target: TargetModel, sampling: SamplingParams, new: int = NEW) -> list[Answer]:
    found = []
    for number, prompt in enumerate(PROMPTS):
        own = replace(sampling, seed=sampling.seed + number)
        [tokens] = plain_generate(target, [prompt], max_new_tokens=new, sampling=own).sequences
        found.append(Answer(prompt, tokens, new, own, str(number)))
    return found


def decoded(
    target: TargetModel, proposer: Proposer, answers: list[Answer], rule: str
) -> tuple[list[Decoded], AcceptanceStats]:
    found, stats = [], AcceptanceStats()
    for answer in answers:
        emitted: list[int] = []
        result = speculative_generate(
            target,
            proposer,
            [answer.prompt],
            max_new_tokens=answer.max_new_tokens,
            sampling=answer.sampling,
            rule=rule,
            on_round=lambda done, emitted=emitted: emitted.append(len(done.emitted)),  # type: ignore[misc]
        )
        found.append(Decoded(answer.id, result.sequences[0], emitted))
        stats = stats.merge(result.stats)
    return found, stats


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(layers=4)


@pytest.mark.parametrize("options", [CHAIN, TREE])
@pytest.mark.parametrize("family", ["eagle3", "medusa"])
@pytest.mark.parametrize(
    ("rule", "sampling"), [("match", GREEDY), ("match", SAMPLED), ("coupled", SAMPLED)]
)
def test_rounds_are_predicted_exactly_where_the_text_is_known(
    target: TargetModel, family: str, rule: str, sampling: SamplingParams, options: TreeOptions
) -> None:
    proposer = build_proposer(tiny_head(target, family), options)
    answers = answers_of(target, sampling)
    prediction = predict(target, proposer, answers, rule)
    texts, stats = decoded(target, proposer, answers, rule)
    assert prediction.tau.value == pytest.approx(stats.acceptance_length, abs=1e-12)
    record = prediction.to_dict()
    assert record["exact"] and record["tokens"] == stats.num_emitted
    assert record["accepted_per_round"] == pytest.approx(stats.accepted_per_round)
    for row, survival, conditional in zip(
        record["by_depth"], stats.survival, stats.conditional, strict=False
    ):
        assert row["survival"] == pytest.approx(survival)
        assert (row["conditional"] or 0.0) == pytest.approx(conditional, nan_ok=True) or (
            not stats.reached_by_depth[row["depth"]]
        )
    counts = Counter(number for one in texts for number in one.emitted)
    assert {n: r for n, r in enumerate(record["emitted_histogram"]) if r} == counts
    assert compare(prediction, texts, identical=True)["rounds_agree"] == 1.0
    assert prediction.comparison is not None and prediction.comparison["warnings"] == []
    rows = record["configuration"]["rows"]
    assert rows == pytest.approx(1 + stats.num_draft_tokens / stats.num_drafts)


def test_the_proposer_is_left_as_it_was(target: TargetModel) -> None:
    """A prediction between two decodes changes neither of them."""
    proposer = build_proposer(tiny_head(target), TREE)
    answers = answers_of(target, GREEDY)[:2]
    before = decoded(target, proposer, answers, "match")[0]
    options = proposer.options
    predict(target, proposer, answers, "match", sizes=(4,))
    assert decoded(target, proposer, answers, "match")[0] == before and proposer.options == options


def test_other_sizes_are_those_of_a_decode_with_them(target: TargetModel) -> None:
    """Grown trees, shorter chains, and the static tree that is fitted."""
    head, answers = tiny_head(target), answers_of(target, GREEDY)
    wide = predict(target, build_proposer(head, TREE), answers, "match", sizes=(6,)).best
    [grown] = [way for way in wide.trees if way.drafts == "grown"]
    small = build_proposer(head, replace(TREE, size=6))
    assert grown.tau == pytest.approx(decoded(target, small, answers, "match")[1].acceptance_length)
    for way in wide.chains:
        chain = build_proposer(head, TreeOptions(way.size, way.depth, 1))
        stats = decoded(target, chain, answers, "match")[1]
        assert way.tau == pytest.approx(stats.acceptance_length)


# Known laws ---------------------------------------------------------------------------------------

LAW = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0], dtype=torch.float64)
DRAFT = torch.tensor([0.2, 0.5, 0.1, 0.1, 0.1], dtype=torch.float64)
OVERLAP = 0.7


class FlatTarget:
    """Every token is drawn from the same law."""

    device, eos_token_ids, vocab_size = torch.device("cpu"), (), 5

    def forward(self, ids: Tensor, logits_to_keep: Tensor, **_: Any) -> TargetOutput:
        rows = LAW.log().expand(1, len(logits_to_keep), -1)
        return TargetOutput(rows, None, torch.zeros(1, ids.shape[1], 1))


class FlatHead(HeadProposer):
    """Every draft is drawn from the same law."""

    def __init__(self, options: TreeOptions) -> None:
        shape = SimpleNamespace(draft_vocab=None, feature_layers=(), family="flat")
        shape.shape = "sequential"
        self.drafter: Any = shape
        self.options, self._rule = options, "match"

    def reset(self, batch_size: int) -> None:
        pass

    def forced(self, state: RowState, tokens: list[int]) -> list[Tensor]:
        return [DRAFT.log()] * (len(tokens) + 1)

    def grow(self, row: int, state: RowState) -> TokenTree:
        tree = new_tree(self.options, state, self._rule, torch.device("cpu"), 5)
        frontier = torch.zeros(1, dtype=torch.int64)
        while len(frontier) and tree.depth:
            tree.add_children(frontier, DRAFT.log().expand(len(frontier), -1))
            frontier = tree.frontier()
        return tree.finish()[0]


def flat_prediction(
    rule: str, options: TreeOptions, count: int = 12, length: int = 60, seed: int = 1
) -> Prediction:
    generator = torch.Generator().manual_seed(seed)
    sampling = SamplingParams(1.0)
    answers = [
        Answer(
            [1],
            torch.multinomial(LAW, length, True, generator=generator).tolist(),
            length,
            replace(sampling, seed=1000 * seed + number),
            str(number),
        )
        for number in range(count)
    ]
    return predict(FlatTarget(), FlatHead(options), answers, rule)  # type: ignore[arg-type]


def truth(alpha: float, depth: int, length: int = 60) -> float:
    """Tokens per round of texts so long: the formula, but for the last rounds, which are cut."""
    survival = [
        [alpha**d for d in range(1, min(depth, length - 2 - place) + 1)]
        for place in range(length - 1)
    ]
    return (length - 1) / walk(survival, [float(depth)] * (length - 1)).rounds


def test_only_the_ends_of_texts_divide_truth_and_formula() -> None:
    assert 0.0 < expected_tokens(0.7, 2) - truth(0.7, 2) < 0.05
    assert truth(0.7, 2, 2000) == pytest.approx(expected_tokens(0.7, 2), abs=2e-3)


@pytest.mark.parametrize("depth", [1, 3])
def test_drawn_chains_of_known_laws_follow_the_formula(depth: int) -> None:
    found = flat_prediction("rejection", TreeOptions(depth + 1, depth, 1, draft_temperature=1.0))
    record = found.to_dict()
    rows = record["by_depth"]
    assert [row["overlap"]["value"] for row in rows] == pytest.approx([OVERLAP] * depth)
    assert [row["p_of_draft"]["value"] for row in rows] == pytest.approx([0.3] * depth)
    assert [row["agreement"]["value"] for row in rows] == [0.0] * depth
    entropy = float(torch.special.entr(LAW).sum())
    assert record["text"]["entropy"] == pytest.approx(entropy, abs=1e-6)
    assert abs(record["text"]["z"]) < 3.5
    assert found.tau.value == pytest.approx(truth(OVERLAP, depth), rel=0.03)
    assert rows[-1]["acceptance"]["value"] == pytest.approx(OVERLAP, abs=0.05)
    steps = {step["name"]: step["value"] for step in record["steps"]}
    assert steps["depths"] == pytest.approx(expected_tokens(OVERLAP, depth))
    assert steps["paths"] == pytest.approx(expected_tokens(OVERLAP, depth), rel=0.05)


def test_chosen_drafts_of_known_laws_follow_the_formula() -> None:
    """A chain accepts with p of the likeliest draft, a tree with that of its children."""
    chain = flat_prediction("match", TreeOptions(4, 3, 1, draft_temperature=1.0))
    assert chain.tau.value == pytest.approx(truth(0.3, 3), rel=0.04)
    tree = flat_prediction("match", TreeOptions(3, 1, 2, draft_temperature=1.0))
    assert tree.tau.value == pytest.approx(truth(0.7, 1), rel=0.04)
    assert tree.alpha == pytest.approx(0.7, abs=0.05)


def test_drawn_trees_of_known_laws_follow_the_lemma() -> None:
    """Two children without replacement: the second one has its chance if the first is rejected."""
    found = flat_prediction("rejection", TreeOptions(3, 1, 2, draft_temperature=1.0))
    owed, rejected = (LAW - DRAFT).clamp(min=0.0) / 0.3, (DRAFT - LAW).clamp(min=0.0)
    alpha = OVERLAP
    for token in range(5):
        rest = DRAFT.clone()
        rest[token] = 0.0
        alpha += float(rejected[token] * torch.minimum(owed, rest / rest.sum()).sum())
    assert found.tau.value == pytest.approx(truth(alpha, 1), rel=0.015)


def test_block_accepts_more_than_rejection() -> None:
    options = TreeOptions(6, 5, 1, draft_temperature=1.0)
    assert (
        flat_prediction("block", options).tau.value
        > flat_prediction("rejection", options).tau.value
    )


@pytest.mark.slow
def test_the_interval_covers_the_truth() -> None:
    """By simulation of whole predictions."""
    options, runs, held = TreeOptions(3, 2, 1, draft_temperature=1.0), 150, 0
    expected = truth(OVERLAP, 2, 24)
    for seed in range(runs):
        held += flat_prediction("rejection", options, 8, 24, seed + 2).tau.holds(expected)
    assert held / runs >= 0.9


# Faults -------------------------------------------------------------------------------------------


class MemoryHead(HeadProposer):
    """Finds the hidden state in a table and drafts what followed there; every fourth is wrong."""

    def __init__(self, target: TargetModel, answers: list[Answer], options: TreeOptions) -> None:
        shape = SimpleNamespace(draft_vocab=None, feature_layers=(), family="memory")
        shape.shape = "sequential"
        self.drafter: Any = shape
        self.options, self._rule = options, "match"
        keys, self.following = [], []
        for answer in answers:
            text = [*answer.prompt, *answer.tokens]
            hidden = target.forward(torch.tensor([text])).last_hidden[0]
            for place in range(len(text) - 2):
                keys.append(hidden[place])
                self.following.append([(t + (t % 4 == 0)) % 96 for t in text[place + 2 :][:4]])
        self.keys = torch.stack(keys)

    def reset(self, batch_size: int) -> None:
        pass

    def chain(self, state: RowState) -> list[int]:
        return self.following[int((self.keys - state.hidden[-1]).norm(dim=1).argmin())]

    def forced(self, state: RowState, tokens: list[int]) -> list[Tensor]:
        drafts = self.chain(state)[: len(tokens) + 1]
        return [torch.zeros(96).index_fill(0, torch.tensor([token]), 9.0) for token in drafts]

    def grow(self, row: int, state: RowState) -> TokenTree:
        drafts = self.chain(state)[: max(min(self.options.longest, state.max_depth), 0)]
        return TokenTree.chain(torch.tensor([state.tokens[-1], *drafts]))


def one_state_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder hands every hidden state over one position late."""
    last: dict[str, Tensor] = {}

    def shifted(
        tokens: list[int], given: int, features: Any, hidden: Tensor, *rest: Any
    ) -> RowState:
        before = hidden[:1] if len(hidden) == len(tokens) - 1 else last["row"]
        last["row"] = hidden[-1:]
        return RowState(tokens, given, features, torch.cat((before, hidden))[:-1], *rest)

    monkeypatch.setattr(decoding_module, "RowState", shifted)


def test_a_fault_of_the_decoder_alone_is_noticed(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = answers_of(target, GREEDY)
    head = MemoryHead(target, answers, TreeOptions(4, 3, 1))
    sound = predict(target, head, answers, "match")
    assert sound.tau.value > 1.8
    assert warnings_of(sound, decoded(target, head, answers, "match")[0], True) == []
    one_state_late(monkeypatch)
    texts, stats = decoded(target, head, answers, "match")
    found = compare(sound, texts, identical=True)
    assert not found["within"] and found["texts_differ"] == 0
    assert found["tau"]["value"] == pytest.approx(stats.acceptance_length)
    assert found["gap"]["high"] < 0 and found["rounds_agree"] < 0.9
    assert found["warnings"][0]["cause"] == "parity"
    assert "first rounds included" in found["warnings"][0]["message"]


def test_texts_that_are_not_the_targets_are_noticed(target: TargetModel) -> None:
    proposer = build_proposer(tiny_head(target), CHAIN)
    foreign = [
        Answer([5, 6], [(7 * n + k) % 90 for n in range(12)], 12, GREEDY, str(k)) for k in range(3)
    ]
    prediction = predict(target, proposer, foreign, "match")
    texts, _ = decoded(target, proposer, foreign, "match")
    found = compare(prediction, texts, identical=True)
    assert found["warnings"][0]["cause"] == "texts"
    sampled = [replace(one, sampling=replace(SAMPLED, temperature=0.2)) for one in foreign]
    z = predict(target, proposer, sampled, "match").text()["z"]
    assert z is not None and z > 4.0


# Refusals and records -----------------------------------------------------------------------------


def test_what_cannot_be_predicted_is_refused(target: TargetModel) -> None:
    proposer = build_proposer(tiny_head(target), CHAIN)
    answers = answers_of(target, GREEDY)[:1]
    with pytest.raises(ValueError, match="changes the output"):
        predict(target, proposer, answers, "lossy_typical")
    with pytest.raises(ValueError, match="no text has a second new token"):
        predict(target, proposer, [Answer([5], [6], 1)], "match")
    medusa = build_proposer(tiny_head(target, "medusa"), TREE)
    with pytest.raises(ValueError, match="only grown trees"):
        predict(target, medusa, answers, "match", sizes=(4,))
    sound = predict(target, proposer, answers, "match")
    with pytest.raises(ValueError, match="none of these requests"):
        compare(sound, [Decoded("else", [1, 2], [1])])


def test_turns_of_one_request_are_resampled_together(target: TargetModel) -> None:
    proposer = build_proposer(tiny_head(target), TREE)
    answers = answers_of(target, GREEDY)
    turns = [replace(one, id="same", turn=n) for n, one in enumerate(answers)]
    prediction = predict(target, proposer, turns, "match")
    assert len(prediction.requests) == 1 and prediction.tau.low is None
    assert prediction.tau.value == predict(target, proposer, answers, "match").tau.value


def test_the_record_is_plain(target: TargetModel) -> None:
    proposer = build_proposer(tiny_head(target), CHAIN)
    record = predict(target, proposer, answers_of(target, SAMPLED), "rejection").to_dict()
    assert json.loads(json.dumps(record, allow_nan=False))["configuration"]["proposal"] == "dense"
    assert not record["exact"] and record["comparison"] is None
    assert [row["rounds"] for row in record["per_request"]] != []
    assert record["curves"]["point"]["gamma"] == 4
    assert [way["depth"] for way in record["best"]["chains"]] == [1, 2, 3, 4]
    assert record["best"]["trees"] == [] and record["best"]["choice"] is None
