"""Figures of a measurement against counts by hand, and that it notices a changed output."""

import json
import math
from typing import Any

import pytest
import torch

import inference.decoding as decoding_module
import inference.generate as generate
from drafters import TargetModel, build_drafter
from inference.evaluation import Prompt, Report, measure
from inference.generate import plain_generate
from inference.proposers import Proposer, TreeOptions, build_proposer
from inference.sampling import SamplingParams
from inference.static_tree import static_tree
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

    monkeypatch.setattr("inference.evaluation.speculative_generate", spy)
    together = run(target, proposer, batch_size=3)
    assert sizes == [1, 2, 1]  # warm-up, short, long
    assert [r.tokens for r in together.requests] == [r.tokens for r in alone.requests]
    assert [r.emitted for r in together.requests] == [r.emitted for r in alone.requests]
    result = together.to_dict()
    assert result["identical"] is True and result["batch_size"] == 3
    assert result["speedup"] is None, "the reference is not batched"


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
