"""scripts.calibrate: finds what a draft law and a confidence output lack, and writes it down."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters import Drafter, TargetModel, build_drafter
from drafters.export import read_head
from inference.cache import TreeCache
from inference.engine import EagerEngine
from inference.generate import plain_generate, speculative_generate
from inference.measuring.evaluation import Prompt
from inference.proposers import RowState, Session, TreeOptions, build_proposer
from inference.proposers.draft_model import DraftModelProposer
from inference.sampling import SamplingParams, probabilities
from inference.timing import PhaseTimer
from scripts.calibrate import answer, calibrate, depth_of, main, trained_note, visited
from scripts.calibrate_confidence import (
    Rounds,
    build_teacher,
    calibrate_confidence,
    forced_rounds,
    load_answers,
)
from tests.scripts.heads import save_models
from tests.tiny import save_tiny_target, tiny_target
from training.data.chat import TokenizedRow

PROMPTS = [Prompt([5, 6, 7, 8]), Prompt([11, 12, 13]), Prompt([30] * 6)]


def too_sure(factor: float) -> TargetModel:
    """The tiny target with its logits scaled."""
    target = tiny_target()
    with torch.no_grad():
        target.lm_head.weight *= factor
    return target


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_known_factor_is_found(factor: float) -> None:
    """A draft model that is the target but for the scale of its logits."""
    proposer = DraftModelProposer(too_sure(factor), TreeOptions(4, 3, 1, draft_temperature=1.0))
    sampling = SamplingParams(1.5, top_p=0.95, seed=1)
    fit, count = calibrate(tiny_target(), proposer, PROMPTS, sampling, 20, 50)
    assert count == 50 or count > 30
    assert fit.factor == pytest.approx(factor, rel=0.02)
    assert fit.overlap_after > 0.99 > fit.overlap_before


def test_positions_are_those_that_were_judged() -> None:
    target = tiny_target()
    draft = tiny_target(seed=5, layers=2)
    proposer = DraftModelProposer(draft, TreeOptions(4, 3, 1, draft_temperature=1.0))
    sampling = SamplingParams(1.0, seed=3)
    result = speculative_generate(
        target,
        proposer,
        [PROMPTS[0].ids],
        max_new_tokens=24,
        sampling=sampling,
        rule="rejection",
        output_scores=True,
        record_rounds=True,
    )
    scores, laws = visited(result.rounds, result.scores[0])
    text = PROMPTS[0].ids + result.sequences[0]
    theirs = target.forward(torch.tensor([text])).logits[0]
    ours = draft.forward(torch.tensor([text])).logits[0]
    place, row = len(PROMPTS[0].ids) + 1, 0
    for done in result.rounds:
        for judged in range(min(len(done.accepted) + 1, done.tree.num_draft_tokens)):
            at = place - 1 + judged
            assert torch.allclose(scores[row], theirs[at], atol=1e-9)
            assert torch.allclose(laws[row], probabilities(ours[at], sampling), atol=1e-9)
            row += 1
        place += len(done.emitted)
    assert row == len(scores) == len(laws) > 8


def test_the_head_remembers_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = save_models(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt_ids": prompt.ids} for prompt in PROMPTS]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [*options, "--prompts", str(prompts), "--max-new-tokens", "12"]
    path = tmp_path / "head" / "config.json"
    before = json.loads(path.read_text())
    assert main(command) == 0
    assert json.loads(path.read_text()) == before
    assert main([*command, "--save"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["overlap_after"] >= found["overlap_before"]
    after = json.loads(path.read_text())
    assert after.pop("draft_temperature") == found["draft_temperature"]
    before.pop("draft_temperature", None)
    assert after == before


def test_refusals(tmp_path: Path) -> None:
    options = save_models(tmp_path / "medusa", "medusa")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt_ids": [5, 6, 7]}) + "\n")
    with pytest.raises(ValueError, match="Medusa"):
        main([*options, "--prompts", str(prompts)])
    with pytest.raises(ValueError, match="--temperature must be above 0"):
        main([*options, "--prompts", str(prompts), "--temperature", "0"])
    (tmp_path / "medusa" / "head" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="--save"):
        main([*options, "--prompts", str(prompts), "--save"])


def test_a_calibrated_head_stays_lossless() -> None:
    """Coupled drafts follow the factor; the output does not."""
    target = tiny_target()
    sampling = SamplingParams(1.0, seed=3)
    prompts = [prompt.ids for prompt in PROMPTS]
    plain = plain_generate(target, prompts, max_new_tokens=12, sampling=sampling).sequences
    for factor in (0.3, 1.0, 3.0):
        proposer = DraftModelProposer(too_sure(1.7), TreeOptions(8, 3, 2, draft_temperature=factor))
        found = speculative_generate(
            target, proposer, prompts, max_new_tokens=12, sampling=sampling, rule="coupled"
        )
        assert found.sequences == plain


# Confidence -------------------------------------------------------------------------------------

DEPTH = 3
FAMILIES: dict[str, dict[str, Any]] = {
    "medusa": {"num_heads": DEPTH},
    "hydra": {"num_heads": DEPTH},
    "eagle1": {},
    "eagle3": {"draft_vocab_size": 60},
    "mtp": {},
    "peagle": {"num_drafts": DEPTH},
    "dflash": {"block_size": DEPTH + 1},
    "dspark": {"block_size": DEPTH, "markov_rank": 8},
}


def sure_head(target: TargetModel, family: str = "eagle3", **options: Any) -> Drafter:
    """A head with a confidence output that says something else at every row."""
    head = build_drafter(family, target, confidence_head=True, **{**FAMILIES[family], **options})
    torch.nn.Module.to(head, target.dtype)
    head.set_draft_vocab(torch.arange(target.vocab_size).flip(0))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in head.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight.add_(0.1 * noise)
    return head.eval()


def greedy_row(target: TargetModel, prompt: Prompt, new: int = 40) -> TokenizedRow:
    [text] = plain_generate(target, [prompt.ids], max_new_tokens=new).sequences
    return TokenizedRow(prompt.ids + text, [False] * len(prompt.ids) + [True] * len(text))


@pytest.mark.parametrize("family", FAMILIES)
def test_forced_rounds_are_the_decoder_s(family: str) -> None:
    """In a greedy chain the predictions up to the first rejection and the drafts accepted are those
    of the round that starts at the same token of the answer.
    """
    target = tiny_target()
    head = sure_head(target, family, confidence_rule="agreement")
    row = greedy_row(target, PROMPTS[0])
    start = len(PROMPTS[0].ids)
    found = forced_rounds(build_teacher(head, DEPTH), row, 1.0)
    predicted, survived = found.logits.sigmoid().cumprod(1), found.labels.cumprod(1)
    options = TreeOptions(DEPTH + 1, DEPTH, 1, grown=True)
    result = speculative_generate(
        target,
        build_proposer(head, options),
        [PROMPTS[0].ids],
        max_new_tokens=len(row.ids) - start,
        record_rounds=True,
    )
    assert result.sequences[0] == row.ids[start:]
    place = compared = 0  # the round's root, counted from the answer's first token
    for done in result.rounds:
        judged = min(len(done.accepted) + 1, done.tree.num_draft_tokens)
        if judged and place < len(found.logits) and bool(found.valid[place, :judged].all()):
            assert done.tree.survival is not None
            ours = done.tree.survival[1 : judged + 1].to(predicted)
            assert torch.allclose(ours, predicted[place, :judged], atol=1e-6)
            if done.next_token is not None:
                accepted = int(survived[place, : done.tree.num_draft_tokens].sum())
                assert accepted == len(done.accepted)
            compared += judged
        place += len(done.emitted)
    assert compared > 20


@pytest.mark.parametrize("rule", ["overlap", "draft_mass", "agreement"])
@pytest.mark.parametrize("factor", [1.0, 1.7])
def test_labels_are_those_of_the_served_rule(rule: str, factor: float) -> None:
    target = tiny_target()
    head = sure_head(target, confidence_rule=rule, confidence_at=0.7)
    row = greedy_row(target, PROMPTS[1], 12)
    found = forced_rounds(build_teacher(head, DEPTH), row, factor)
    theirs = target.forward(torch.tensor([row.ids])).logits[0]
    ours = forced_logits(head, row)
    p = (theirs / 0.7).softmax(-1)
    start = len(PROMPTS[1].ids)
    for place in range(len(found.logits)):
        at = start + place  # column of the target's row and of the round's root
        if rule == "overlap":
            q = head.to_target_logits(ours[place] / 0.7 / factor).softmax(-1)
            wanted = torch.minimum(p[at], q).sum()
        elif rule == "draft_mass":
            wanted = p[at, head.to_target_ids(ours[place].argmax())]
        else:
            wanted = (head.to_target_ids(ours[place].argmax()) == theirs[at].argmax()).double()
        assert float(found.labels[place, 0]) == pytest.approx(float(wanted), abs=1e-9)


def test_labels_follow_the_warpers() -> None:
    """Both laws as the decoder warps them."""
    target = tiny_target()
    row = greedy_row(target, PROMPTS[1], 8)
    sampling, start = SamplingParams(0.8, top_k=5, top_p=0.9), len(PROMPTS[1].ids)
    p = probabilities(target.forward(torch.tensor([row.ids])).logits[0], sampling)
    for rule in ("overlap", "draft_mass"):
        head = sure_head(target, confidence_rule=rule)
        found = forced_rounds(build_teacher(head, DEPTH), row, 1.3, sampling)
        ours = forced_logits(head, row)
        for place, logits in enumerate(ours[: len(found.labels)]):
            if rule == "overlap":
                law = probabilities(logits, replace(sampling, temperature=0.8 * 1.3))
                q = torch.zeros_like(p[0])
                q[head.to_target_ids(torch.arange(len(law)))] = law
                wanted = torch.minimum(p[start + place], q).sum()
            else:
                wanted = p[start + place, head.to_target_ids(logits.argmax())]
            assert float(found.labels[place, 0]) == pytest.approx(float(wanted), abs=1e-9)
        greedy = forced_rounds(build_teacher(head, DEPTH), row, 1.0, SamplingParams())
        assert set(greedy.labels.flatten().tolist()) <= {0.0, 1.0}


def test_a_confidence_output_for_another_decoder_is_named() -> None:
    target = tiny_target()
    for rule, cold, warm in (
        ("agreement", False, True),
        ("overlap", True, False),
        ("draft_mass", True, False),
    ):
        head = sure_head(target, confidence_rule=rule)
        assert (trained_note(head, 0.0) is not None) == cold
        assert (trained_note(head, 0.7) is not None) == warm


def test_chains_are_as_long_as_the_head_drafts() -> None:
    target = tiny_target()
    assert depth_of(sure_head(target, "dflash", block_size=9), None) == 8
    assert depth_of(sure_head(target), None) == 5 and depth_of(sure_head(target), 7) == 7


def forced_logits(head: Drafter, row: TokenizedRow) -> torch.Tensor:
    """(n, Vd) first drafts of every round, round by round by the decoder's own proposer."""
    rows = []
    proposer = build_proposer(head, TreeOptions(2, 1, 1, grown=True))
    first = row.supervised.index(True)
    for end in range(first + 1, len(row.ids)):
        rows.append(drafted(head.target, proposer, row.ids[:end]))
    return torch.stack(rows)


def drafted(target: TargetModel, proposer: Any, text: list[int]) -> torch.Tensor:
    """(Vd,) logits behind a text, from an empty cache."""
    cache = TreeCache(target.model.config, 1, 64)
    proposer.start(Session(EagerEngine(target), cache, 1, PhaseTimer(), "match", [0]))
    out = target.forward(torch.tensor([text[:-1]]), feature_layers=proposer.feature_layers)
    features = None if out.features is None else out.features[0]
    state = RowState(text, 0, features, out.last_hidden[0], 64, SamplingParams())
    return proposer.forced(state, [])[0]


def test_rounds_start_and_end_within_an_answer() -> None:
    """Two answers in one conversation: nothing is drafted in the question between them."""
    target = tiny_target()
    head = sure_head(target)
    supervised = [False] * 4 + [True] * 5 + [False] * 3 + [True] * 4
    row = TokenizedRow(list(range(5, 21)), supervised)
    found = forced_rounds(build_teacher(head, DEPTH), row, 1.0)
    assert found.valid.sum(1).tolist() == [3, 3, 2, 1, 3, 2, 1]
    assert found.logits.shape == found.labels.shape == (7, DEPTH)
    silent = forced_rounds(build_teacher(head, DEPTH), TokenizedRow([5, 6], [False, True]), 1.0)
    assert len(silent.logits) == 0


def made_up(rows: int, seed: int) -> Rounds:
    """One conversation of a head that is too sure of itself."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, 2, generator=generator, dtype=torch.float64)
    labels = (logits / 2 - 0.5).sigmoid()
    return Rounds(logits, labels, torch.ones(rows, 2, dtype=torch.bool))


def test_half_of_the_conversations_is_held_out() -> None:
    report = calibrate_confidence([made_up(400, 0), made_up(300, 1), made_up(200, 2)])
    assert (report.fitted_on, report.held_out) == (600, 300)
    assert report.calibration.temperatures == pytest.approx([2.0, 2.0], rel=0.05)
    assert report.calibration.biases == pytest.approx([-0.5, -0.5], abs=0.05)
    assert min(report.product[0]) > 0.05 and max(report.product[1]) < 0.01
    assert min(report.single[0]) > 0.05 and max(report.single[1]) < 0.01
    assert report.mean == pytest.approx([0.4, 0.4], abs=0.05)
    kept = [step.kept for step in report.sweep]
    assert kept == sorted(kept, reverse=True) and kept[0] == 1.0
    rates = [step.acceptance for step in report.sweep if step.acceptance is not None]
    assert len(rates) > 4 and rates == sorted(rates)
    with pytest.raises(ValueError, match="too few answers"):
        calibrate_confidence([made_up(400, 0)])


def save_sure(folder: Path, family: str, **options: Any) -> list[str]:
    """A target and a head with a confidence output; the options that name them."""
    target_folder = save_tiny_target(folder / "target")
    target = TargetModel.load(str(target_folder), torch.float64)
    sure_head(target, family, **options).save_pretrained(folder / "head")
    names = ["--target", str(target_folder), "--head", str(folder / "head")]
    return [*names, "--dtype", "float64", "--device", "cpu", "--depth", str(DEPTH)]


@pytest.mark.parametrize("family", ["eagle3", "medusa", "dflash"])
def test_the_head_remembers_its_calibration(
    tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = save_sure(tmp_path, family)
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt_ids": prompt.ids} for prompt in PROMPTS]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [*options, "--prompts", str(prompts), "--max-new-tokens", "24", "--save"]
    assert main(command) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    confidence = record["confidence"]
    assert (confidence["rule"], confidence["at"]) == ("overlap", 1.0)
    assert confidence["fitted_on"] > confidence["held_out"] > 10
    assert len(confidence["auc"]) == DEPTH and len(confidence["sweep"]) == 10
    assert ("draft_temperature" in record) == (family != "medusa")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    found = confidence["calibration"]
    assert config["confidence_temperatures"] == found["temperatures"]
    assert config["confidence_biases"] == found["biases"]
    target = TargetModel.load(options[1], torch.float64)
    head = read_head(options[3], target, torch.float64)
    hidden = torch.randn(5, head.output_size, dtype=torch.float64)
    assert head.confidence is not None
    wanted = head.confidence(hidden) / found["temperatures"][1] + found["biases"][1]
    chance = head.acceptance(hidden, 1)
    assert chance is not None and torch.allclose(chance, wanted.sigmoid())


def test_answers_of_a_file_are_used_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At temperature 0 nothing is drawn, and the confidence output alone is calibrated."""
    options = save_sure(tmp_path, "eagle3", confidence_rule="agreement")
    target = TargetModel.load(options[1], torch.float64)
    path = tmp_path / "answers.jsonl"
    rows = [greedy_row(target, prompt, 20) for prompt in PROMPTS]
    lines = [
        {"prompt_ids": prompt.ids, "answer_ids": row.ids[len(prompt.ids) :]}
        for prompt, row in zip(PROMPTS, rows, strict=True)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert load_answers(str(path), target) == rows
    assert main([*options, "--answers", str(path), "--temperature", "0"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(record) == {"confidence"}
    with pytest.raises(ValueError, match="no effect here: nothing is drawn"):
        main(
            [
                *save_sure(tmp_path / "m", "medusa", confidence_rule="agreement"),
                "--answers",
                str(path),
                "--top-k",
                "5",
            ]
        )
    path.write_text(json.dumps({"prompt": "hello"}) + "\n")
    with pytest.raises(ValueError, match="row 1"):
        main([*options, "--answers", str(path), "--temperature", "0"])
    with pytest.raises(SystemExit):
        main(options)


def test_prompts_are_answered_as_served() -> None:
    target = tiny_target()
    greedy = sure_head(target, confidence_rule="agreement")
    warm = SamplingParams(2.0, top_k=30, seed=3)
    rows = answer(target, greedy, PROMPTS, 10, warm)
    assert rows == [greedy_row(target, prompt, 10) for prompt in PROMPTS]
    sampled = answer(target, sure_head(target), PROMPTS, 10, warm)
    assert [row.supervised for row in sampled] == [row.supervised for row in rows]
    law = replace(warm, seed=4)
    [wanted] = plain_generate(target, [PROMPTS[1].ids], max_new_tokens=10, sampling=law).sequences
    assert sampled[1].ids == PROMPTS[1].ids + wanted != rows[1].ids
