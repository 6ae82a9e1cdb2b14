"""Token for token: equal texts pass, rounding is told from error, wrong decoders are refuted."""

import functools
import math
from collections.abc import Callable, Sequence

import pytest
import torch

from drafters import TargetModel
from inference.decoding import Text
from inference.engine import EagerEngine
from inference.generate import plain_generate
from inference.measuring.evaluation import Prompt
from inference.proofs.token_check import MAX_ULP, TokenChecker, TokenReport, judge
from inference.proofs.verdicts import INCONCLUSIVE, LOSSLESS, NOT_LOSSLESS, overall
from inference.proposers import Proposer, RowState, Session, TreeOptions
from inference.proposers.draft_model import DraftModelProposer
from inference.sampling import SamplingParams
from inference.support import check_tree_support
from inference.tree import TokenTree
from tests.inference import mutants
from tests.inference.drafting import noisy_copy
from tests.tiny import tiny_target

PROMPTS = [Prompt([5, 6, 7, 8], id="one"), Prompt([20, 21], id="two"), Prompt([9] * 7, id="three")]
SAMPLED = SamplingParams(1.0, seed=3, top_p=0.95, presence_penalty=-2.5)
GREEDY = SamplingParams()


def make_target(dtype: torch.dtype = torch.float64) -> TargetModel:
    return tiny_target(dtype, layers=3)


def make_proposer(target: TargetModel) -> DraftModelProposer:
    draft = noisy_copy(target, lambda: make_target(target.dtype), 0.04)
    return DraftModelProposer(draft, TreeOptions(8, 3, 3))


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return make_target()


@pytest.fixture(scope="module")
def proposer(target: TargetModel) -> Proposer:
    return make_proposer(target)


@pytest.fixture
def checker(target: TargetModel, proposer: Proposer) -> TokenChecker:
    return TokenChecker(target, proposer, PROMPTS, 12)


@pytest.mark.parametrize("rule", ["match", "coupled", "rejection"])
def test_texts_are_equal_alone_and_in_a_batch(checker: TokenChecker, rule: str) -> None:
    report = checker.run("greedy", rule, GREEDY)
    assert (report.verdict, report.reason, report.differences) == (LOSSLESS, "", [])
    assert (report.texts, report.batched, report.rule) == (3, 3, rule)
    assert report.num_accepted_tokens > 0
    assert report.tokens == report.exact == 3 * 12 + (6 + 8 + 10)
    assert report.worst_ulp == report.plain_ulp == 0.0


@pytest.mark.parametrize("rule", ["match", "coupled"])
def test_every_text_has_a_seed_of_its_own(
    checker: TokenChecker, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []
    draw = Text.draw_first

    def noted(self: Text, logits: torch.Tensor) -> None:
        seeds.append(self.sampler.params.seed)
        draw(self, logits)

    monkeypatch.setattr(Text, "draw_first", noted)
    report = checker.run("same seed", rule, SAMPLED, turns=2)
    assert report.verdict == LOSSLESS and (report.texts, report.batched) == (6, 6)
    assert set(seeds) == set(range(3, 9)), "turns x prompts, from the given seed on"


def test_one_prompt_makes_no_batch(target: TargetModel, proposer: Proposer) -> None:
    report = TokenChecker(target, proposer, PROMPTS[:1], 12).run("greedy", "match", GREEDY)
    assert (report.texts, report.batched) == (1, 0)


def test_plain_texts_are_decoded_once(
    checker: TokenChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(
        "inference.measuring.compare.plain_generate",
        lambda *args, **options: calls.append(1) or plain_generate(*args, **options),
    )
    for rule in ("match", "coupled", "rejection"):
        checker.run("greedy", rule, GREEDY)
    assert len(calls) == len(PROMPTS)


class DraftsNothing(Proposer):
    """Trees that are only their root."""

    def start(self, session: Session) -> None:
        pass

    def propose(self, states: Sequence[RowState | None]) -> list[TokenTree | None]:
        return [
            None if state is None else TokenTree.chain(torch.tensor(state.tokens[-1:]))
            for state in states
        ]


def test_without_an_accepted_draft_nothing_is_proven(target: TargetModel) -> None:
    report = TokenChecker(target, DraftsNothing(), PROMPTS, 6).run("greedy", "match", GREEDY)
    assert report.verdict == INCONCLUSIVE and "no draft token was ever accepted" in report.reason
    assert report.differences == []


# Wrong decoders ---------------------------------------------------------------------------------

PLANTED = [
    mutants.position_off_by_one,
    mutants.rollback_forgotten,
    mutants.siblings_leak,
    mutants.padding_seen,
    mutants.rows_swapped_after_one_left,
    mutants.seed_of_the_first_row,
    mutants.law_of_the_parent,
    mutants.processors_see_the_root_only,
    mutants.target_not_warped,
]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_bugs_are_refuted(
    target: TargetModel,
    proposer: Proposer,
    plant: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plain decoding, which is compared with, has run before the bug is there."""
    checker = TokenChecker(target, proposer, PROMPTS, 16)
    assert checker.run("same seed", "match", SAMPLED).verdict == LOSSLESS
    plant(monkeypatch)
    report = checker.run("same seed", "match", SAMPLED)
    assert report.verdict == NOT_LOSSLESS
    wrong = [one for one in report.differences if not one["near_tie"]]
    assert wrong and {"id", "seed", "batched", "position", "expected", "found"} <= wrong[0].keys()


def test_bugs_of_batches_show_in_batches_only(
    target: TargetModel, proposer: Proposer, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutants.rows_swapped_after_one_left(monkeypatch)
    report = TokenChecker(target, proposer, PROMPTS, 20).run("same seed", "match", SAMPLED)
    assert report.differences and all(one["batched"] for one in report.differences)


def test_a_text_that_ends_too_early_or_late_is_refuted(
    checker: TokenChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However good its tokens are."""
    mutants.length_overrun(monkeypatch)
    plain = checker.run("greedy", "match", GREEDY)  # the reference overruns, too, and is cut
    assert plain.verdict == NOT_LOSSLESS
    assert all(one["ulp"] is None for one in plain.differences)


# Rounding ---------------------------------------------------------------------------------------


@functools.cache
def checker_in(dtype: torch.dtype, new: int) -> TokenChecker:
    target = make_target(dtype)
    proposer = make_proposer(target)
    check_tree_support(EagerEngine(target))
    check_tree_support(EagerEngine(proposer.draft))
    return TokenChecker(target, proposer, PROMPTS, new)


def run_in(dtype: torch.dtype, new: int = 30) -> TokenReport:
    return checker_in(dtype, new).run("same seed", "coupled", SAMPLED, turns=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_get_a_verdict(dtype: torch.dtype) -> None:
    """Texts differ, and the audit finds that it is rounding."""
    report = run_in(dtype)
    assert report.verdict == LOSSLESS, report
    assert report.worst_ulp is not None and report.plain_ulp is not None
    assert report.worst_ulp <= max(MAX_ULP, report.plain_ulp)
    if dtype == torch.bfloat16:
        assert report.near_ties == len(report.differences) > 0
        assert report.plain_ulp > 0.0


def test_bfloat16_does_not_hide_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_in(torch.bfloat16, 16).verdict == LOSSLESS
    for plant in (mutants.siblings_leak, mutants.rollback_forgotten):
        with monkeypatch.context() as patch:
            plant(patch)
            assert run_in(torch.bfloat16, 16).verdict == NOT_LOSSLESS, plant.__name__


def test_float32_passes() -> None:
    report = run_in(torch.float32)
    assert report.verdict == LOSSLESS and report.tokens >= 300


@pytest.mark.parametrize(
    ("missed", "allowed", "accepted", "verdict"),
    [
        (0.0, 2.0, 5, LOSSLESS),
        (2.0, 2.0, 5, LOSSLESS),
        (2.1, 2.0, 5, INCONCLUSIVE),
        (8.1, 2.0, 5, NOT_LOSSLESS),
        (math.inf, 1e9, 5, NOT_LOSSLESS),
        (0.0, 2.0, 0, INCONCLUSIVE),
        (9.0, 2.0, 0, NOT_LOSSLESS),
    ],
)
def test_verdicts(missed: float, allowed: float, accepted: int, verdict: str) -> None:
    found, reason = judge(missed, allowed, accepted)
    assert found == verdict and (reason == "") == (verdict == LOSSLESS)


@pytest.mark.parametrize(
    ("verdicts", "verdict"),
    [
        ([LOSSLESS, LOSSLESS], LOSSLESS),
        ([LOSSLESS, INCONCLUSIVE], INCONCLUSIVE),
        ([INCONCLUSIVE, NOT_LOSSLESS], NOT_LOSSLESS),
        ([], INCONCLUSIVE),
    ],
)
def test_the_worst_verdict_counts(verdicts: list[str], verdict: str) -> None:
    assert overall(verdicts) == verdict
