"""The numbers that others print, computed from the records of a run.

"Acceptance length" means several things in papers and programs: with the target's own token or
without, pooled over rounds or averaged over requests, with the token of the prefill or without.
Each function here is one of these conventions; `docs/evaluation.md` has the table and says which
facts are certain. All take the records of one cell. A request is one decoded turn.

One thing cannot be recomputed: some programs count, in the last round of a text, accepted tokens
that lie behind its end. Records hold only what reached the text.

Pure: the standard library.

Letters: k positions of a draft, from 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from inference.measuring.run_records import RequestRecord, RoundRecord, Run

Rounds = Sequence[RoundRecord]


def rounds_by_request(run: Run, cell: int = 0) -> list[tuple[RequestRecord, Rounds]]:
    """Each decoded turn of a cell with its rounds, which are none where one token was the text."""
    return [(request, run.rounds_of(request)) for request in run.requests_of(cell)]


def rounds_of_cell(run: Run, cell: int = 0) -> list[RoundRecord]:
    """All rounds of a cell."""
    return [each for _, rounds in rounds_by_request(run, cell) for each in rounds]


# Ours -----------------------------------------------------------------------------------------


def acceptance_length(rounds: Rounds) -> float:
    """Ours: tokens emitted per target forward, bonus included, pooled."""
    return sum(len(each.emitted) for each in rounds) / _some(rounds)


def accepted_per_round(rounds: Rounds) -> float:
    """Ours without the bonus: draft tokens accepted per target forward, pooled."""
    return sum(each.accepted for each in rounds) / _some(rounds)


def acceptance_length_per_request(run: Run, cell: int = 0) -> float:
    """Mean over requests of each one's acceptance length."""
    found = [acceptance_length(rounds) for _, rounds in rounds_by_request(run, cell) if rounds]
    _some(found)
    return fmean(found)


def survival(rounds: Rounds) -> list[float]:
    """By k: share of rounds that accepted position k, and so all before it."""
    count, deepest = _some(rounds), max(each.depth for each in rounds)
    return [sum(each.accepted >= k for each in rounds) / count for k in _positions(deepest)]


def conditional(rounds: Rounds) -> list[float | None]:
    """By k: of the rounds with a draft at k that accepted all before it, the share that accepted k;
    None where no round came so far.
    """
    found: list[float | None] = []
    _some(rounds)
    for k in _positions(max(each.depth for each in rounds)):
        reached = [each for each in rounds if each.depth >= k and each.accepted >= k - 1]
        rate = sum(each.accepted >= k for each in reached) / len(reached) if reached else None
        found.append(rate)
    return found


# Papers and benchmarks --------------------------------------------------------------------------


def eagle_tau(rounds: Rounds) -> float:
    """EAGLE papers' τ: accepted per round plus one, over rounds (arXiv:2401.15077)."""
    return 1 + accepted_per_round(rounds)


def eagle_n_alpha(rounds: Rounds) -> list[float | None]:
    """EAGLE papers' n-α, n = 0, 1, ...: acceptance of the token drafted from n drafted features,
    given that all before it were accepted.

    Raises:
        ValueError: the drafts are trees; n-α is defined on chains.
    """
    _only_chains(rounds, "n-alpha")
    return conditional(rounds)


def spec_bench_mean_accepted_tokens(rounds: Rounds) -> float:
    """Spec-Bench's "#Mean accepted tokens" (arXiv:2401.07851): by how much the text grows in a
    step, pooled over the steps of all turns; plain decoding is 1.
    """
    return 1 + accepted_per_round(rounds)


def spec_bench_speedup(run: Run, cell: int = 0) -> float:
    """Spec-Bench's speed-up: mean over questions of tokens per second, prefill included, over the
    same of plain decoding. (It counts the baseline's tokens by tokenising its text again.)

    Raises:
        ValueError: the run has no plain decoding, or none of the same kind.
    """
    if run.cells[cell]["speedup"] is None:
        raise ValueError(
            "this cell has no speed-up: it takes plain decoding of the same kind (no --no-plain, "
            "no --simulate, in batches --reference plain)"
        )
    fast: dict[str, list[float]] = {}
    plain: dict[str, list[float]] = {}
    for request in run.requests_of(cell):
        if request.plain_seconds is None or request.plain_tokens is None:
            raise ValueError(
                "Spec-Bench's speed-up needs plain decoding: evaluate without --no-plain"
            )
        for into, tokens, seconds in (
            (fast, len(request.tokens), request.seconds),
            (plain, request.plain_tokens, request.plain_seconds),
        ):
            sums = into.setdefault(request.id, [0.0, 0.0])
            sums[0] += tokens
            sums[1] += seconds["prefill"] + seconds["total"]
    speeds = [fmean(tokens / seconds for tokens, seconds in one.values()) for one in (fast, plain)]
    return speeds[0] / speeds[1]


def speed_bench_average_al(run: Run, cell: int = 0) -> float:
    """SPEED-Bench's average acceptance length (arXiv:2604.09557): mean over requests of each one's
    tokens per step.
    """
    return acceptance_length_per_request(run, cell)


def speed_bench_joint_rates(rounds: Rounds) -> list[float]:
    """SPEED-Bench's joint acceptance rates: by k, the share of steps that accepted k or more."""
    return survival(rounds)


def speed_bench_conditional_rates(rounds: Rounds) -> list[float | None]:
    """SPEED-Bench's conditional acceptance rates: P(at least k) / P(at least k - 1). Where rounds
    draft fewer than k tokens, as at the end of a text, this is below `conditional`.
    """
    pairs = pairwise([1.0, *survival(rounds)])
    return [after / before if before else None for before, after in pairs]


def dflash_average_acceptance_length(run: Run, cell: int = 0) -> float:
    """DFlash's: tokens produced per verification, cut at the end of the text, mean over requests
    of each one's mean (arXiv:2602.06036).
    """
    return acceptance_length_per_request(run, cell)


# Trainers ---------------------------------------------------------------------------------------


def deepspec_tau(run: Run, cell: int = 0) -> float:
    """DeepSpec's tau_greedy (of a cell at temperature 0) and tau_probabilistic (at temperature 1):
    chains, first turns, bonus included, here pooled.

    Raises:
        ValueError: the drafts are trees, or another temperature.
    """
    if run.cells[cell]["temperature"] not in (0.0, 1.0):
        raise ValueError(
            "DeepSpec measures at temperature 0 (tau_greedy) and 1 (tau_probabilistic)"
        )
    found = rounds_by_request(run, cell)
    rounds = [each for request, mine in found if request.turn == 0 for each in mine]
    _only_chains(rounds, "DeepSpec's tau")
    return acceptance_length(rounds)


def specforge_simulated_acc_len(rounds: Rounds) -> float:
    """SpecForge's simulated_acc_len, bonus excluded: a_1 + a_1·a_2 + ... of the conditional rates.
    It takes them from teacher-forced training passes; here they are those of real decoding.
    """
    total, product = 0.0, 1.0
    for rate in conditional(rounds):
        product *= rate or 0.0
        total += product
    return total


def automodel_tau_sim(rounds: Rounds) -> float:
    """NeMo AutoModel's tau_sim: the same with the bonus."""
    return 1 + specforge_simulated_acc_len(rounds)


# Engines ----------------------------------------------------------------------------------------


def vllm_mean_acceptance_length(rounds: Rounds) -> float:
    """vLLM's mean acceptance length: 1 + accepted / drafts, of the rounds with draft tokens."""
    drafts = _with_drafts(rounds)
    return 1 + sum(each.accepted for each in drafts) / _some(drafts)


def vllm_per_position_acceptance_rates(rounds: Rounds) -> list[float]:
    """vLLM's per-position acceptance rates: by k, accepted at k / drafts; so survival, and not
    conditional on k having been reached.
    """
    return survival(_with_drafts(rounds))


def vllm_draft_acceptance_rate(rounds: Rounds) -> float:
    """vLLM's draft acceptance rate: accepted / draft tokens."""
    drafts = _with_drafts(rounds)
    _some(drafts)
    return sum(each.accepted for each in drafts) / sum(each.draft_tokens for each in drafts)


def sglang_accept_length(run: Run, cell: int = 0) -> float:
    """SGLang's accept length: completion tokens / verifications, pooled over requests. The token of
    the prefill is among the completion tokens.
    """
    pairs = rounds_by_request(run, cell)
    return sum(len(one.tokens) for one, _ in pairs) / _some(rounds_of_cell(run, cell))


def _some(found: Sequence[object]) -> int:
    """How many; none have no number.

    Raises:
        ValueError: none.
    """
    if not found:
        raise ValueError(
            "there is no such round: every text ended with its first token, or nothing was drafted"
        )
    return len(found)


def _positions(deepest: int) -> range:
    return range(1, deepest + 1)


def _with_drafts(rounds: Rounds) -> list[RoundRecord]:
    return [each for each in rounds if each.draft_tokens]


def _only_chains(rounds: Rounds, name: str) -> None:
    if any(each.draft_tokens != each.depth for each in rounds):
        raise ValueError(f"{name} is defined on chains, and these rounds drafted trees: --branch 1")
