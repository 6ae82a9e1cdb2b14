"""Figures of a measurement against counts by hand, and that it notices a changed output."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.generation import LogitsProcessor

import inference.decoding as decoding_module
import inference.generate as generate
import inference.measuring.evaluation as evaluation_module
from drafters import TargetModel, build_drafter
from inference.engines import build_engine
from inference.generate import plain_generate
from inference.measuring.evaluation import (
    Cell,
    Prompt,
    Report,
    measure,
    measure_cells,
    request_seed,
)
from inference.proposers import Proposer, TreeOptions, build_proposer
from inference.sampling import SamplingParams
from inference.shapes.static_tree import static_tree
from inference.verify import Verdict, verify
from tests.scripts.heads import tiny_head
from tests.tiny import tiny_target

PROMPTS = [
    Prompt([5, 6, 7], "short", "one"),
    Prompt([9, 8, 7, 6, 5, 4], "long", "two"),
    Prompt([40, 41], "short", "three"),
]
SAMPLED = SamplingParams(temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


@pytest.fixture(scope="module")
def proposer(target: TargetModel) -> Proposer:
    return build_proposer(tiny_head(target), TreeOptions(8, 3, 3))


def run(target: TargetModel, proposer: Proposer, **options: Any) -> Report:
    return measure(target, proposer, PROMPTS, **{"max_new_tokens": 16, **options})


def wrong_verify(*args: Any, **kwargs: Any) -> Verdict:
    """The rule, but the token it emits is off by one."""
    verdict = verify(*args, **kwargs)
    assert verdict.next_token is not None
    return Verdict(verdict.path, (verdict.next_token + 1) % 96)


@pytest.mark.parametrize("family", ["eagle3", "medusa"])
@pytest.mark.parametrize("compare", ["plain", "generate"])
def test_an_untrained_head_leaves_greedy_output_identical(
    target: TargetModel, family: str, compare: str
) -> None:
    proposer = build_proposer(tiny_head(target, family), TreeOptions(8, 3, 3))
    report = run(target, proposer, compare=compare)
    assert report.identical is True
    result = report.to_dict()
    assert result["greedy_identical"] is True
    assert (result["near_ties"], result["differences"]) == (0, [])
    plain = plain_generate(target, [p.ids for p in PROMPTS], max_new_tokens=16).sequences
    assert {r.prompt.id: r.tokens for r in report.requests} == dict(
        zip(("one", "two", "three"), plain, strict=True)
    )


@pytest.mark.parametrize("rule", ["match", "coupled"])
def test_sampling_with_the_same_seed_is_compared_too(
    target: TargetModel, proposer: Proposer, rule: str
) -> None:
    result = run(target, proposer, sampling=SAMPLED, rule=rule).to_dict()
    assert result["identical"] is True and result["greedy_identical"] is None


def test_rejection_promises_no_tokens(target: TargetModel, proposer: Proposer) -> None:
    sampled = run(target, proposer, sampling=SAMPLED, rule="rejection")
    assert sampled.identical is None and sampled.to_dict()["speedup"] > 0
    assert run(target, proposer, rule="rejection").identical is True


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED])
def test_a_wrong_verifier_is_found_out(
    target: TargetModel,
    proposer: Proposer,
    monkeypatch: pytest.MonkeyPatch,
    sampling: SamplingParams,
) -> None:
    monkeypatch.setattr(decoding_module, "verify", wrong_verify)
    report = run(target, proposer, sampling=sampling)
    assert report.identical is False
    result = report.to_dict()
    assert result["greedy_identical"] is (False if sampling.temperature == 0 else None)
    assert [d["id"] for d in result["differences"]] == ["one", "three", "two"]
    assert not any(d["near_tie"] for d in result["differences"]) and result["near_ties"] == 0


def test_figures_equal_counts_by_hand(target: TargetModel, proposer: Proposer) -> None:
    report = run(target, proposer)
    result = report.to_dict()
    rounds = [r.emitted for r in report.requests]
    emitted, forwards = sum(map(sum, rounds)), sum(map(len, rounds))
    assert emitted == sum(len(r.tokens) - 1 for r in report.requests)  # the prefill's is no round's
    assert emitted > forwards, "no draft was ever accepted: the test would show nothing"
    assert result["num_drafts"] == forwards
    assert result["acceptance_length"] == pytest.approx(emitted / forwards)
    means = [sum(request) / len(request) for request in rounds]
    assert result["acceptance_length_per_request"] == pytest.approx(sum(means) / 3)
    low, high = result["acceptance_length_interval"]
    assert low < result["acceptance_length"] < high
    rates = result["acceptance_by_position"]
    assert sum(rates["survival"]) == pytest.approx(result["accepted_per_round"])
    assert len(rates["survival"]) == len(rates["conditional"]) == 3
    seconds = result["seconds"]
    assert result["tokens_per_second"] == pytest.approx(emitted / seconds["total"])
    assert seconds["target"] + seconds["draft"] + seconds["other"] == pytest.approx(
        seconds["total"]
    )
    assert result["other_share"] == pytest.approx(seconds["other"] / seconds["total"])
    assert 0 < result["other_share"] < 1
    texts = [r.reference for r in report.requests if r.reference is not None]
    plain = sum(len(t.tokens) - 1 for t in texts) / sum(t.decoding for t in texts)
    assert result["plain_tokens_per_second"] == pytest.approx(plain)
    assert result["speedup"] == pytest.approx(result["tokens_per_second"] / plain)


def test_categories_add_up(target: TargetModel, proposer: Proposer) -> None:
    result = run(target, proposer).to_dict()
    groups = result["by_category"]
    assert {name: group["num_prompts"] for name, group in groups.items()} == {"short": 2, "long": 1}
    for key in ("num_drafts", "num_emitted", "num_accepted_tokens", "num_draft_tokens"):
        assert sum(group[key] for group in groups.values()) == result[key]
    for key, total in result["seconds"].items():
        assert sum(group["seconds"][key] for group in groups.values()) == pytest.approx(total)


def test_batches_hold_one_category_and_give_the_same_texts(
    target: TargetModel, proposer: Proposer, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = run(target, proposer)
    sizes = []
    decode = generate.speculative_generate

    def spy(*args: Any, **kwargs: Any) -> Any:
        sizes.append(len(args[2]))
        return decode(*args, **kwargs)

    monkeypatch.setattr("inference.measuring.evaluation.speculative_generate", spy)
    together = run(target, proposer, batch_size=3)
    assert sizes == [1, 2, 1]  # warm-up, short, long
    assert [r.tokens for r in together.requests] == [r.tokens for r in alone.requests]
    assert [r.emitted for r in together.requests] == [r.emitted for r in alone.requests]
    result = together.to_dict()
    assert result["identical"] is True and result["batch_size"] == 3
    assert result["speedup"] > 0, "the reference is decoded in the same batches"
    apart = run(target, proposer, batch_size=3, compare="generate").to_dict()
    assert apart["speedup"] is None, "generate decodes one text after the other"


def test_without_reference(target: TargetModel, proposer: Proposer) -> None:
    report = run(target, proposer, compare=None)
    result = report.to_dict()
    assert (report.identical, result["speedup"], result["plain_tokens_per_second"]) == (None,) * 3
    assert result["tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("options", "decoding"),
    [
        (TreeOptions(8, 3, 1), {}),
        (TreeOptions(8, 3, 3), {}),
        (TreeOptions(shape=static_tree([(0,), (1,), (0, 0), (0, 0, 0)])), {}),
        (TreeOptions(8, 3, 2), {"sampling": SAMPLED, "rule": "rejection"}),
    ],
)
def test_predictions_of_the_confidence_output_are_judged(
    target: TargetModel, options: TreeOptions, decoding: dict[str, Any]
) -> None:
    """A head that says 0.9, 0.7, 0.7 of its three drafts."""
    head = build_drafter("eagle3", target, confidence_head=True).eval()
    torch.nn.Module.to(head, target.dtype)
    assert head.confidence is not None
    with torch.no_grad():
        head.confidence.proj.weight.zero_()
        head.confidence.proj.bias.zero_()
    head.config.confidence_temperatures = [1.0, 1.0]
    head.config.confidence_biases = [math.log(9), math.log(7 / 3)]
    report = run(target, build_proposer(head, options), **decoding)
    result = report.to_dict()
    predicted = [value for request in report.requests for value in request.judged.predicted]
    survived = [value for request in report.requests for value in request.judged.survived]
    assert {0.9, 0.63} <= set(rounded(predicted)) <= {0.9, 0.63, 0.441}
    assert result["confidence_drafts"] == len(predicted) > 30
    gaps = [
        sum(p - hit for p, hit in zip(predicted, survived, strict=True) if abs(p - level) < 1e-6)
        for level in (0.9, 0.63, 0.441)
    ]
    wanted = sum(map(abs, gaps)) / len(predicted)
    assert result["confidence_error"] == pytest.approx(wanted, abs=1e-6)
    accepted = sum(r.stats.num_accepted_tokens for r in report.requests)
    assert sum(survived) <= accepted and (sum(survived) == accepted or options.top_k > 1)
    groups = result["by_category"].values()
    assert sum(group["confidence_drafts"] for group in groups) == len(predicted)


def rounded(values: list[float]) -> list[float]:
    return [round(value, 6) for value in values]


def test_without_a_confidence_output_there_is_nothing_to_judge(
    target: TargetModel, proposer: Proposer
) -> None:
    result = run(target, proposer).to_dict()
    assert (result["confidence_auc"], result["confidence_error"]) == (None, None)
    assert result["confidence_drafts"] == 0


def test_every_result_is_json(target: TargetModel, proposer: Proposer) -> None:
    """One token each: no round, nothing to divide by."""
    result = run(target, proposer, max_new_tokens=1).to_dict()
    assert json.loads(json.dumps(result, allow_nan=False))["acceptance_length"] is None
    json.dumps(run(target, proposer).to_dict(), allow_nan=False)


def test_prompts_that_are_too_long_are_skipped_and_counted(
    target: TargetModel, proposer: Proposer
) -> None:
    fits, long = Prompt([5] * 4, "a", "fits"), Prompt([5] * 505, "a", "long")
    report = measure(target, proposer, [long, fits], max_new_tokens=8)
    assert [r.prompt.id for r in report.requests] == ["fits"]
    assert report.skipped == [long] and report.to_dict()["num_skipped"] == 1
    with pytest.raises(ValueError, match="none of 1 leaves room"):
        measure(target, proposer, [long], max_new_tokens=8)


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"max_new_tokens": 0}, {"compare": "x"}])
def test_options_out_of_range_are_refused(
    target: TargetModel, proposer: Proposer, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        run(target, proposer, **options)


def test_the_seed_of_a_request_is_its_own(target: TargetModel, proposer: Proposer) -> None:
    """Equal prompts get texts of their own, and the same ones again in another order."""
    prompts = [Prompt([5, 6, 7], id=name) for name in "abc"]

    def texts(given: list[Prompt]) -> dict[str, list[int]]:
        report = measure(target, proposer, given, max_new_tokens=12, sampling=SAMPLED)
        return {request.prompt.id: request.tokens for request in report.requests}

    found = texts(prompts)
    assert len(set(map(tuple, found.values()))) == 3
    assert texts(prompts[::-1]) == found
    turns = {request_seed(3, Prompt([5], id="a", turn=turn)) for turn in range(3)}
    assert len(turns) == 3 and request_seed(4, Prompt([5], id="a")) not in turns


def test_cells_share_references_and_are_asked_the_same(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []
    plain = evaluation_module.reference_texts

    def spy(target: TargetModel, prompts: Any, new: int, samplings: Any, *rest: Any) -> Any:
        decoded.append((len(prompts[0]), samplings[0].temperature))
        return plain(target, prompts, new, samplings, *rest)

    monkeypatch.setattr(evaluation_module, "reference_texts", spy)
    head = tiny_head(target)
    small, large = (build_proposer(head, TreeOptions(size, 3, 3)) for size in (4, 8))
    cells = [
        Cell(small),
        Cell(large, "match", SAMPLED),
        Cell(large),
        Cell(small, "coupled", SAMPLED),
    ]
    reports = measure_cells(target, cells, PROMPTS, max_new_tokens=16)
    measured = [
        (len(prompt.ids), t) for prompt in (PROMPTS[0], PROMPTS[2], PROMPTS[1]) for t in (0, 1)
    ]
    assert decoded == [(3, 0.0), (3, 1.0), *measured]  # warming up first
    for report in reports:
        assert report.identical is True and len(report.requests) == 3
    first, sampled, second, coupled = ([r.tokens for r in report.requests] for report in reports)
    assert first == second and sampled == coupled != first
    assert {each.width for r in reports[0].requests for each in r.rounds} != {
        each.width for r in reports[2].requests for each in r.rounds
    }
    alone = run(target, build_proposer(head, TreeOptions(4, 3, 3)))
    assert [r.emitted for r in alone.requests] == [r.emitted for r in reports[0].requests]
    assert [each.cell for report in reports for each in report.requests[0].rounds[:1]] == [
        0,
        1,
        2,
        3,
    ]


def talk(turns: int, seen: list[list[int]]) -> Prompt:
    """A conversation whose next turn is what was said, the answer, and a 9."""

    def turn(ids: list[int], number: int) -> Prompt:
        def follow(answer: Sequence[int]) -> Prompt:
            seen.append(list(answer))
            return turn([*ids, *answer, 9], number + 1)

        return Prompt(ids, "talk", "t", number, follow if number + 1 < turns else None)

    return turn([5, 6], 0)


@pytest.mark.parametrize("compare", ["plain", None])
def test_conversations_go_on_with_the_answers(
    target: TargetModel, proposer: Proposer, compare: str | None
) -> None:
    seen: list[list[int]] = []
    report = measure(target, proposer, [talk(3, seen)], max_new_tokens=8, compare=compare)
    requests = report.requests
    assert [r.prompt.turn for r in requests] == [0, 1, 2]
    assert seen == [r.tokens for r in requests[:2]]
    history = [5, 6]
    for request in requests:
        assert request.prompt.ids == history
        history = [*history, *request.tokens, 9]
    result = report.to_dict()
    assert (result["num_prompts"], result["num_conversations"]) == (3, 1)
    assert result["acceptance_length_interval"] is None, "one conversation tells nothing of others"


def test_turns_that_no_longer_fit_are_skipped(target: TargetModel, proposer: Proposer) -> None:
    def follow(answer: Sequence[int]) -> Prompt:
        return Prompt([5] * 510, "a", "long", 1)

    prompt = Prompt([5, 6], "a", "long", follow=follow)
    report = measure(target, proposer, [prompt], max_new_tokens=8)
    assert len(report.requests) == 1
    assert [(one.id, one.turn) for one in report.skipped] == [("long", 1)]


def test_a_trace_recounts_both_conventions(target: TargetModel) -> None:
    """From the target's chances alone: at temperature 0 the walk follows the nodes with p = 1."""
    proposer = build_proposer(tiny_head(target), TreeOptions(8, 3, 3))
    (report,) = measure_cells(target, [Cell(proposer)], PROMPTS, max_new_tokens=16, trace=2)
    traced, rest = report.requests[:2], report.requests[2]
    assert all(each.trace is None for each in rest.rounds)
    accepted = emitted = rounds = 0
    for request in traced:
        text = request.tokens[1:]
        for each in request.rounds:
            assert each.trace is not None
            node, path = 0, []
            while below := [n for n in each.trace.children(node) if each.trace.p[n] == 1.0]:
                (node,) = below
                path.append(node)
            taken = [each.trace.tokens[n] for n in path][: len(text)]
            assert each.trace.path == path[: len(taken)] and taken == text[: len(taken)]
            given = min(len(taken) + 1, len(text))
            assert text[:given] == each.emitted
            text, rounds = text[given:], rounds + 1
            accepted, emitted = accepted + len(taken), emitted + given
            for n, parent in enumerate(each.trace.parents[1:], start=1):
                assert 0 < (each.trace.q[n] or 0) <= 1 and parent < n
        assert text == []
    assert accepted, "nothing was accepted: the test would show nothing"
    both = replace(report, requests=traced).to_dict()
    assert both["acceptance_length"] == pytest.approx(emitted / rounds)
    assert both["accepted_per_round"] == pytest.approx(accepted / rounds)


@pytest.mark.parametrize(("rule", "branch"), [("match", 3), ("rejection", 2), ("block", 1)])
def test_chances_are_those_of_the_laws(target: TargetModel, rule: str, branch: int) -> None:
    """p is the target's law behind the path to the parent, q the draft's own."""
    proposer = build_proposer(tiny_head(target), TreeOptions(6, 3, branch))
    cells = [Cell(proposer, rule, SAMPLED)]
    (report,) = measure_cells(target, cells, PROMPTS[:1], max_new_tokens=8, trace=1)
    (request,) = report.requests
    text = [*request.prompt.ids, *request.tokens[:1]]
    for each in request.rounds:
        assert each.trace is not None and len(text) == each.context
        for node, parent in enumerate(each.trace.parents):
            if parent < 0:
                assert each.trace.p[node] is None and each.trace.q[node] is None
                continue
            path, above = [], parent
            while above > 0:
                path.insert(0, each.trace.tokens[above])
                above = each.trace.parents[above]
            ids = torch.tensor([text + path])
            law = target.forward(ids, logits_to_keep=1).logits[0, -1].softmax(-1)
            chance = each.trace.p[node]
            assert chance == pytest.approx(float(law[each.trace.tokens[node]]), abs=1e-9)
            assert each.trace.q[node] is not None
        text += each.emitted


class Counted(LogitsProcessor):
    """Changes nothing, and counts its calls, of copies too."""

    calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        Counted.calls += 1
        return scores


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_a_trace_does_not_call_processors_once_more(target: TargetModel, rule: str) -> None:
    """They may keep state; chances that the rule did not ask for stay unknown."""
    proposer = build_proposer(tiny_head(target), TreeOptions(6, 3, 1 if rule == "block" else 3))
    cells = [Cell(proposer, rule, SamplingParams(1.0, seed=3, processors=(Counted(),)))]
    calls, texts = [], []
    for trace in (0, 1):
        Counted.calls = 0
        (report,) = measure_cells(
            target, cells, PROMPTS[:1], max_new_tokens=12, compare=None, trace=trace
        )
        calls.append(Counted.calls)
        texts.append(report.requests[0].tokens)
    assert calls[0] == calls[1] > 0 and texts[0] == texts[1]
    known = [each.trace.p[1:] for each in report.requests[0].rounds if each.trace is not None]
    assert any(chance is not None for chances in known for chance in chances)
    assert rule == "block" or any(chance is None for chances in known for chance in chances)


@pytest.mark.slow
def test_an_engine_that_keeps_its_trees_is_counted_alike(
    target: TargetModel, proposer: Proposer
) -> None:
    engine = build_engine(target, "device")
    report = run(target, proposer, engine=engine)
    eager = run(target, proposer)
    assert report.identical is True
    assert [r.emitted for r in report.requests] == [r.emitted for r in eager.requests]
    assert [r.stats for r in report.requests] == [r.stats for r in eager.requests]
    result = report.to_dict()
    assert result["seconds"]["round"] > 0 and 0 <= result["other_share"] < 1
