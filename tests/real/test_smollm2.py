"""On a real model in float32: decoding is lossless to rounding, and both passes of the heads agree.

Nothing is timed. Texts may differ only where the target itself hardly prefers one token; such near
ties are counted.
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters import Drafter, TargetModel, build_drafter
from inference.generate import speculative_generate
from inference.hf import speculative
from inference.measuring.compare import explain_difference, reference_text
from inference.proposers import Proposer, TreeOptions, build_proposer
from inference.proposers.layer_skip import LayerSkipProposer
from inference.proposers.ngram import NgramProposer
from inference.sampling import SamplingParams
from recipes.parity import TOLERANCE, check_parity
from training.data.chat import TokenizedRow, encode_prompt
from training.objectives import ObjectiveOptions, build_objective
from training.objectives.options import RECURSIVE

QUESTIONS = ("Count from one to ten.", "What is the capital of France?", "Name three colours.")
NEW = 24
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=1.0, seed=5)
HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "medusa": {"num_heads": 3},
    "hydra": {"num_heads": 3, "num_layers": 1},
    "eagle1": {},
    "mtp": {},
    "peagle": {"num_drafts": 3},
    "dflash": {"block_size": 4},
    "dspark": {"block_size": 3},
}


@pytest.fixture(scope="session")
def target(smollm2: Path) -> TargetModel:
    return TargetModel.load(str(smollm2))


@pytest.fixture(scope="session")
def prompts(target: TargetModel) -> list[list[int]]:
    """Of unequal lengths; the second answer is short and ends by itself."""
    return [
        encode_prompt(target.tokenizer, [{"role": "user", "content": question}])
        for question in QUESTIONS
    ]


@pytest.fixture(scope="session")
def greedy(target: TargetModel, prompts: list[list[int]]) -> list[list[int]]:
    """What `model.generate` says."""
    return [reference_text(target, prompt, NEW, GREEDY, "generate").tokens for prompt in prompts]


@pytest.fixture(scope="session")
def sampled(target: TargetModel, prompts: list[list[int]]) -> list[list[int]]:
    """Plain sampling with the same seed."""
    return [reference_text(target, prompt, NEW, SAMPLED).tokens for prompt in prompts]


def untrained_head(target: TargetModel, family: str, texts: Sequence[list[int]]) -> Drafter:
    """A head as training starts with it, whose draft vocabulary holds the tokens of `texts`."""
    head = build_drafter(family, target, draft_vocab_size=4096, **HEADS[family])
    tokens = torch.tensor(list(itertools.chain(*texts)))
    head.set_draft_vocab(torch.bincount(tokens, minlength=target.vocab_size))
    return head.eval()


@pytest.mark.parametrize(
    ("rule", "sampling", "reference"),
    [("match", GREEDY, "greedy"), ("coupled", SAMPLED, "sampled")],
)
def test_an_untrained_head_changes_nothing(
    target: TargetModel,
    prompts: list[list[int]],
    rule: str,
    sampling: SamplingParams,
    reference: str,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    """The three prompts in one batch, against the reference that decodes them alone."""
    expected: list[list[int]] = request.getfixturevalue(reference)
    head = untrained_head(target, "eagle3", [*prompts, *expected])
    found = speculative_generate(
        target,
        build_proposer(head, TreeOptions(size=8)),
        prompts,
        max_new_tokens=NEW,
        sampling=sampling,
        rule=rule,
    )
    assert found.stats.num_accepted_tokens > 0, "no draft was accepted: nothing was tried"
    differences = [
        explain_difference(target, prompt, plain, drafted, sampling)
        for prompt, plain, drafted in zip(prompts, expected, found.sequences, strict=True)
    ]
    different = [difference for difference in differences if difference is not None]
    record_property("near_ties", len(different))
    assert all(difference.near_tie for difference in different), different


@pytest.mark.parametrize(
    "proposer",
    [NgramProposer(), LayerSkipProposer(24, depth=2)],
    ids=["ngram", "layer skip"],
)
def test_untrained_drafts_through_generate(
    target: TargetModel, prompts: list[list[int]], greedy: list[list[int]], proposer: Proposer
) -> None:
    """`model.generate` with two more arguments, the three prompts padded into one batch."""
    width = max(map(len, prompts))
    pad = target.eos_token_ids[0]
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = target.model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=pad,
        custom_generate=speculative,
        drafter=proposer,
        return_dict_in_generate=True,
    )
    assert out.stats.num_accepted_tokens > 0, "no draft was accepted: nothing was tried"
    for prompt, expected, row in zip(prompts, greedy, out.sequences.tolist(), strict=True):
        found = row[width : width + len(expected)]
        difference = explain_difference(target, prompt, expected, found, GREEDY)
        assert difference is None or difference.near_tie, difference


def test_the_texts_are_worth_comparing(greedy: list[list[int]], sampled: list[list[int]]) -> None:
    """One ends early and the others do not; sampling says something else."""
    assert sorted(map(len, greedy))[0] < NEW == max(map(len, greedy))
    assert all(text != other for text, other in zip(greedy, sampled, strict=True))


@pytest.mark.parametrize("family", HEADS)
def test_training_and_decoding_compute_the_same(
    target: TargetModel, prompts: list[list[int]], greedy: list[list[int]], family: str
) -> None:
    ids = prompts[0] + greedy[0]
    options = ObjectiveOptions(steps=3 if family in RECURSIVE else None)
    objective = build_objective(untrained_head(target, family, [ids]), options)
    report = check_parity(target, objective, TokenizedRow(ids, [True] * len(ids)), max_tokens=48)
    assert report.positions > 40 and report.error < TOLERANCE[torch.float32] / 10
