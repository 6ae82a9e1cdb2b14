"""Acceptance length by the real decoder while a head is trained, shared out over the processes."""

from accelerate.utils import gather_object

from drafters import Drafter, TargetModel
from inference.measuring.evaluation import Prompt, Report, measure
from inference.proposers import TreeOptions, build_proposer
from inference.sampling import SamplingParams
from training.answers.conversations import prompt_messages
from training.config import TrainConfig
from training.data.chat import encode_prompt
from training.data.sources import load_rows
from training.loop import Evaluate
from training.options.run import EvalOptions

NAMES = ("acceptance_length", "accepted_per_round", "confidence_auc", "confidence_error")


def make_evaluate(
    config: TrainConfig, target: TargetModel, rank: int = 0, world: int = 1
) -> Evaluate | None:
    """Acceptance length on held-out prompts; None without prompts.

    Args:
        config: of the run.
        target: decodes.
        rank: of this process among
        world: processes that share the prompts out. Where processes hold one target together, they
            must run the same forward passes, so all decode all prompts.
    """
    options = config.evaluate
    if options.prompts is None:
        return None
    rows = load_rows(options.prompts)
    rows = rows[:: max(1, len(rows) // options.limit)][: options.limit]
    prompts = [
        Prompt(encode_prompt(target.tokenizer, prompt_messages(row)), id=str(number))
        for number, row in enumerate(rows)
    ]
    if config.target.parallel != "none":
        rank, world = 0, 1

    def evaluate(drafter: Drafter, step: int) -> dict[str, float]:
        mine = prompts[rank::world]
        reports = [_measure(target, drafter, mine, options, config.run.seed)] if mine else []
        if world > 1:
            reports = gather_object(reports)
        return metrics(merged(reports))

    return evaluate


def _measure(
    target: TargetModel, drafter: Drafter, prompts: list[Prompt], options: EvalOptions, seed: int
) -> Report:
    return measure(
        target,
        build_proposer(drafter, TreeOptions(size=options.size)),
        prompts,
        max_new_tokens=options.max_new_tokens,
        sampling=SamplingParams(temperature=options.temperature, seed=seed),
        rule="coupled" if options.temperature else "match",
        compare=None,
    )


def merged(reports: list[Report]) -> Report:
    """The prompts of several processes as one report."""
    first = reports[0]
    requests = [request for report in reports for request in report.requests]
    skipped = [prompt for report in reports for prompt in report.skipped]
    return Report(first.greedy, first.comparable, first.batch_size, skipped, requests)


def metrics(report: Report) -> dict[str, float]:
    """What is logged: both conventions of the acceptance length, conditional acceptance by
    position, and how well confidence is calibrated where the head has it.
    """
    found = report.summary()
    chosen = {name: found[name] for name in NAMES if found.get(name) is not None}
    rates = found["acceptance_by_position"]["conditional"]
    by_position = {f"acceptance_{k}": rate for k, rate in enumerate(rates) if rate is not None}
    return {**chosen, **by_position}
