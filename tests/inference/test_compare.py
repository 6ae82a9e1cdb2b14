"""What explains a difference between two texts: rounding, or a fault."""

import pytest
import torch

from drafters import TargetModel
from inference.compare import NEAR_TIE, explain_difference, reference_text
from inference.sampling import SamplingParams, gumbel, probabilities
from tests.tiny import tiny_target

GREEDY = SamplingParams()
PROMPT = [5, 9, 7, 20]


def logits_after(target: TargetModel, ids: list[int]) -> torch.Tensor:
    return target.forward(torch.tensor([ids])).logits[0, -1]


def tied_target(gap: float) -> tuple[TargetModel, int, int]:
    """A target whose two best tokens after PROMPT are `gap` apart, and these tokens."""
    target = tiny_target()
    state = target.forward(torch.tensor([PROMPT])).last_hidden[0, -1]
    direction = state / state.norm() ** 2  # adds 1 to a logit after PROMPT
    top = float(logits_after(target, PROMPT).max()) + 1.0
    for token, logit in ((30, top), (31, top - gap)):
        target.lm_head.weight[token] = direction * logit
    return target, 30, 31


def test_equal_texts_have_no_difference() -> None:
    assert explain_difference(tiny_target(), PROMPT, [4, 5], [4, 5], GREEDY) is None


@pytest.mark.parametrize(("gap", "near"), [(NEAR_TIE / 10, True), (NEAR_TIE * 10, False)])
def test_a_near_tie_is_told_by_the_gap_of_the_best_two(gap: float, near: bool) -> None:
    target, best, second = tied_target(gap)
    found = explain_difference(target, PROMPT, [best, 1, 2], [second, 1, 2], GREEDY)
    assert found is not None and found.position == 0
    assert found.gap == pytest.approx(gap, rel=1e-6)
    assert found.near_tie is near


def test_a_third_token_is_no_near_tie_although_the_best_two_are_close() -> None:
    target, best, _ = tied_target(NEAR_TIE / 10)
    found = explain_difference(target, PROMPT, [best], [50], GREEDY)
    assert found is not None and found.gap is not None and found.gap > 0.1 and not found.near_tie


def test_the_common_prefix_is_taken_into_account() -> None:
    target = tiny_target()
    logits = logits_after(target, [*PROMPT, 11, 12])
    first, second = logits.topk(2).indices.tolist()
    found = explain_difference(target, PROMPT, [11, 12, first], [11, 12, second], GREEDY)
    assert found is not None and found.position == 2
    assert found.gap == pytest.approx(float(logits[first] - logits[second]), rel=1e-9)


def test_a_text_that_ends_early_is_a_failure() -> None:
    found = explain_difference(tiny_target(), PROMPT, [4, 5, 6], [4, 5], GREEDY)
    assert found is not None and (found.position, found.expected, found.found) == (2, 6, None)
    assert not found.near_tie


def test_sampled_texts_are_compared_by_the_perturbed_scores() -> None:
    target, sampling = tiny_target(), SamplingParams(temperature=0.7, top_k=20, seed=5)
    drawn = reference_text(target, PROMPT, 1, sampling).tokens[0]
    law = probabilities(logits_after(target, PROMPT), sampling)
    scores = law.log() + gumbel(5, len(PROMPT), 96)
    best, second = scores.topk(2).indices.tolist()
    assert drawn == best
    found = explain_difference(target, PROMPT, [best], [second], sampling)
    assert found is not None
    assert found.gap == pytest.approx(float(scores[best] - scores[second]), rel=1e-9)
    outside = int((law == 0).nonzero()[0])
    impossible = explain_difference(target, PROMPT, [best], [outside], sampling)
    assert impossible is not None and impossible.gap is None and not impossible.near_tie


def test_both_references_decode_the_same_text_and_time_it() -> None:
    target = tiny_target()
    plain, theirs = (
        reference_text(target, PROMPT, 12, GREEDY, kind) for kind in ("plain", "generate")
    )
    assert plain.tokens == theirs.tokens and len(plain.tokens) == 12
    assert min(plain.prefill, plain.decoding, theirs.prefill, theirs.decoding) > 0


def test_generate_is_asked_for_plain_greedy_decoding() -> None:
    """Whatever the model's generation config would have it do."""
    target = tiny_target()
    target.model.generation_config.repetition_penalty = 5.0
    target.model.generation_config.do_sample = True
    theirs = reference_text(target, PROMPT, 12, GREEDY, "generate")
    assert theirs.tokens == reference_text(target, PROMPT, 12, GREEDY).tokens


def test_references_that_cannot_work_are_refused() -> None:
    target = tiny_target()
    with pytest.raises(ValueError, match="plain, generate"):
        reference_text(target, PROMPT, 4, GREEDY, "beam")
    with pytest.raises(ValueError, match="temperature 0"):
        reference_text(target, PROMPT, 4, SamplingParams(temperature=1.0), "generate")
