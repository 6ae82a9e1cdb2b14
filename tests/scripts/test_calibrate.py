"""scripts.calibrate: finds the temperature that a draft law lacks, and writes it down."""

import json
from pathlib import Path

import pytest
import torch

from drafters import TargetModel
from inference.evaluation import Prompt
from inference.generate import plain_generate, speculative_generate
from inference.proposers import TreeOptions
from inference.proposers.draft_model import DraftModelProposer
from inference.sampling import SamplingParams, probabilities
from scripts.calibrate import calibrate, main, visited
from tests.scripts.heads import save_models
from tests.tiny import tiny_target

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
