"""Processors are called along the emitted text only; copies of them look ahead."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MaxLengthCriteria
from transformers.generation import LogitsProcessor, StoppingCriteria

import inference.copies
from drafters import TargetModel
from inference.generate import plain_generate, speculative_generate
from inference.laws import LookAhead, TreeLaws
from inference.processors import Sampler
from inference.proposers import TreeOptions
from inference.proposers.draft_model import DraftModelProposer
from inference.proposers.ngram import NgramProposer
from inference.sampling import SamplingParams
from inference.stopping import Stop
from inference.tree import Proposal, TokenTree
from inference.verify import SAME_TOKENS, verify
from tests.inference.stateful import (
    CHAINS,
    NEW,
    NO_END,
    PROMPTS,
    STATEFUL,
    Recorder,
    Trigger,
    decode,
    near,
    plain,
    truth,
)
from tests.oracle import NoisyOracle
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


@pytest.fixture(scope="module")
def draft() -> TargetModel:
    return near()


@pytest.mark.parametrize("name", STATEFUL)
def test_block_at_temperature_zero_is_plain_decoding(
    target: TargetModel, draft: TargetModel, name: str
) -> None:
    """The matcher and its copies raise when they are called out of order."""
    expected = plain(target, name)
    params = SamplingParams(processors=(STATEFUL[name](),))
    for proposer in (DraftModelProposer(draft, CHAINS), truth(target, name, wrong=False)):
        found = decode(target, proposer, name, params, rule="block")
        assert found.sequences == expected
    assert found.stats.num_accepted_tokens > 0


@pytest.mark.filterwarnings("ignore::inference.rules.lossy.LossyWarning")
@pytest.mark.parametrize("name", STATEFUL)
def test_typical_acceptance_at_temperature_zero_is_plain_decoding(
    target: TargetModel, name: str
) -> None:
    params = SamplingParams(processors=(STATEFUL[name](),))
    found = decode(target, truth(target, name), name, params, rule="lossy_typical")
    assert found.sequences == plain(target, name) and found.stats.num_accepted_tokens > 0


@pytest.mark.filterwarnings("ignore::inference.rules.lossy.LossyWarning")
@pytest.mark.parametrize("rule", ["match", "rejection", "block", "lossy_typical"])
@pytest.mark.parametrize("seed", range(4))
def test_the_object_itself_is_asked_about_the_emitted_text_only(
    target: TargetModel, draft: TargetModel, rule: str, seed: int
) -> None:
    """Once per token, in order, whatever copies are asked."""
    own = [Recorder() for _ in PROMPTS]
    samplings = [SamplingParams(2.0, seed=seed, processors=(mine,)) for mine in own]
    proposer = DraftModelProposer(draft, TreeOptions(5, 4, 2) if "typ" in rule else CHAINS)
    Recorder.everywhere.clear()
    found = decode(target, proposer, "budget", samplings, rule=rule)
    emitted = []
    for prompt, new, mine in zip(PROMPTS, found.sequences, own, strict=True):
        expected = [[*prompt, *new[:count]] for count in range(len(new))]
        assert mine.texts == expected
        emitted += expected
    assert found.stats.num_accepted_tokens > 0
    elsewhere = [text for text in Recorder.everywhere if text not in emitted]
    assert bool(elsewhere) == (rule in ("block", "lossy_typical"))


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("seed", range(8))
def test_tokens_that_were_never_emitted_switch_nothing(
    target: TargetModel, draft: TargetModel, rule: str, seed: int
) -> None:
    own = [Trigger(range(20 + 3 * seed + row, 96, 24)) for row in range(len(PROMPTS))]
    samplings = [SamplingParams(2.0, seed=seed, processors=(mine,)) for mine in own]
    proposer = DraftModelProposer(draft, CHAINS)
    for prompt, new, mine in zip(
        PROMPTS,
        decode(target, proposer, "trigger", samplings, rule=rule).sequences,
        own,
        strict=True,
    ):
        hit = [token in mine.tokens for token in [prompt[-1], *new[:-1]]]
        assert mine.on == any(hit)
        odd = [token % 2 for token in new]
        assert all(odd[hit.index(True) :] if any(hit) else [True])


@pytest.mark.parametrize(
    "check",
    [
        test_the_object_itself_is_asked_about_the_emitted_text_only,
        test_tokens_that_were_never_emitted_switch_nothing,
    ],
)
def test_looking_ahead_without_copies_is_noticed(
    target: TargetModel, draft: TargetModel, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tests above would find if the processors themselves were asked ahead."""
    monkeypatch.setattr(Sampler, "ahead", lambda self: self)
    with pytest.raises(AssertionError):
        for seed in range(8):
            check(target, draft, "block", seed)


def test_the_kept_scores_are_those_of_the_object_itself(target: TargetModel) -> None:
    params = SamplingParams(processors=(Trigger(),))
    options: dict[str, Any] = {"max_new_tokens": NEW, "stop": NO_END, "output_scores": True}
    plainly = plain_generate(target, PROMPTS, sampling=params, **options)
    proposer = truth(target, "trigger", wrong=False)
    found = speculative_generate(
        target, proposer, PROMPTS, sampling=params, rule="block", **options
    )
    for one, other in zip(found.scores, plainly.scores, strict=True):
        torch.testing.assert_close(one, other)


class Watch(StoppingCriteria):
    """Looks at a processor, which is one token behind."""

    def __init__(self, watched: Recorder) -> None:
        self.watched = watched

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        assert self.watched.texts[-1] == input_ids[0, :-1].tolist()
        return torch.tensor([input_ids.shape[1] >= len(PROMPTS[0]) + 10])


@pytest.mark.parametrize("rule", ["match", "block"])
def test_criteria_find_processors_where_plain_decoding_has_them(
    target: TargetModel, rule: str
) -> None:
    for proposer in (NgramProposer(branch=1), truth(target, "budget", wrong=False)):
        if isinstance(proposer, NoisyOracle):
            proposer.texts = proposer.texts[:1]
        recorder = Recorder()
        found = speculative_generate(
            target,
            proposer,
            PROMPTS[:1],
            max_new_tokens=NEW,
            sampling=SamplingParams(processors=(recorder,)),
            stop=Stop(token_ids=(), criteria=(Watch(recorder),)),
            rule=rule,
        )
        assert len(found.sequences[0]) == len(recorder.texts) == 10


FORK = TokenTree(torch.tensor([2, 3, 4, 5, 6]), torch.tensor([-1, 0, 0, 1, 2]), Proposal.ONE_HOT)
"""2 to 3 to 5, and 2 to 4 to 6."""


def test_each_node_is_asked_with_the_state_of_its_path() -> None:
    """A copy where paths part, and none along a chain."""
    recorder = Recorder()
    sampler = Sampler(SamplingParams(processors=(recorder,)), 1, [], "cpu")
    sampler.scores(torch.zeros(9), [1])
    laws, seen = LookAhead(sampler, FORK, torch.zeros(5, 9), [1, 2]), {}
    for node in range(5):
        laws.law(node)
        path = [FORK.token(above) for above in FORK.path(node)]
        (copy,) = laws._samplers[node]._given
        assert copy.texts == [[1], *([1, *path[: n + 1]] for n in range(len(path)))]  # type: ignore[attr-defined]
        seen[node] = copy
    assert seen[3] is seen[1] and seen[4] is seen[2] and seen[1] is not seen[2]
    assert recorder.texts == [[1]]
    for node in (0, 2):
        laws.settle(node)
    assert recorder.texts == [[1], [1, 2], [1, 2, 4]]


class Ends:
    """Fails behind a token, as a matcher does that is through."""

    def __init__(self, token: int, how: str) -> None:
        self.token, self.how = token, how

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if int(input_ids[0, -1]) != self.token:
            return scores
        if self.how == "raises":
            raise RuntimeError("the matcher is through")
        return torch.full_like(scores, -torch.inf)


@pytest.mark.parametrize("how", ["raises", "leaves no token"])
def test_a_processor_may_fail_behind_the_end_and_only_there(how: str) -> None:
    sampler = Sampler(SamplingParams(1.0, processors=(Ends(3, how),)), 1, [], "cpu")
    laws = LookAhead(sampler, FORK, torch.zeros(5, 9, dtype=torch.bfloat16), [1, 2])
    for node in range(3):
        law = laws.law(node)
        assert law.dtype == torch.float32 and float(law.sum()) == pytest.approx(1.0)
        assert (float(law[FORK.token(node + 2)]) == 0.0) == (node == 1)
    laws.settle(0)
    with pytest.raises((RuntimeError, ValueError), match=r"through|leave any token"):
        laws.settle(1)


@pytest.mark.parametrize("how", ["raises", "leaves no token"])
@pytest.mark.parametrize("rule", ["match", "block"])
@pytest.mark.parametrize("temperature", [0.0, 0.01])
def test_a_text_that_goes_on_where_a_processor_fails_is_an_error(
    target: TargetModel, rule: str, how: str, temperature: float
) -> None:
    new = plain_generate(target, PROMPTS, max_new_tokens=NEW, stop=NO_END).sequences
    place = next(place for place in range(5, NEW) if new[0][place] not in new[0][:place])
    proposer = NoisyOracle([[*PROMPTS[0], *new[0]]], wrong=False)
    for length in (place + 1, place + 2):
        options: dict[str, Any] = {
            "max_new_tokens": NEW,
            "sampling": SamplingParams(temperature, processors=(Ends(new[0][place], how),)),
            "stop": Stop((), (), (MaxLengthCriteria(len(PROMPTS[0]) + length),)),
            "rule": rule,
        }
        if length == place + 1:
            found = speculative_generate(target, proposer, PROMPTS[:1], **options)
            assert found.sequences == [new[0][:length]]
        else:
            with pytest.raises((RuntimeError, ValueError), match=r"through|leave any token"):
                speculative_generate(target, proposer, PROMPTS[:1], **options)


def test_without_processors_of_the_user_nothing_is_copied_or_asked_again(
    target: TargetModel, draft: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(1.0, seed=3, repetition_penalty=1.2)
    proposer = DraftModelProposer(draft, CHAINS)
    expected = decode(target, proposer, "budget", params, rule="block").sequences
    monkeypatch.setattr(inference.copies.copy, "deepcopy", None)
    monkeypatch.setattr(Sampler, "ahead", None)
    calls: list[int] = []
    scores = Sampler.scores

    def counted(self: Sampler, logits: Tensor, text: Sequence[int]) -> Tensor:
        calls.append(hash(tuple(text)))
        return scores(self, logits, text)

    monkeypatch.setattr(Sampler, "scores", counted)
    assert decode(target, proposer, "budget", params, rule="block").sequences == expected
    rounds = len(calls) - len(set(calls))  # a round may draft what an earlier one threw away
    assert rounds < len(calls) / 4


def test_what_comes_to_hold_something_uncopyable_is_an_error_not_a_wrong_text(
    target: TargetModel,
) -> None:
    class Late(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            self.helper = lambda: scores
            return scores

    with pytest.raises(ValueError, match=r"Late cannot be copied .*lambda"):
        speculative_generate(
            target,
            NgramProposer(branch=1),
            PROMPTS[:1],
            max_new_tokens=4,
            sampling=SamplingParams(processors=(Late(),)),
            rule="block",
            stop=NO_END,
        )


@pytest.mark.parametrize("rule", SAME_TOKENS)
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(0.8, seed=3, top_k=4)])
def test_draws_without_laws_are_those_from_them(params: SamplingParams, rule: str) -> None:
    noise = torch.Generator().manual_seed(5)
    accepted = 0
    for _ in range(40):
        tokens = torch.tensor([1, *torch.randperm(6, generator=noise)[:5].tolist()])
        tree = TokenTree(tokens, torch.tensor([-1, 0, 0, 1, 1, 3]), Proposal.ONE_HOT)
        logits = torch.randn(6, 6, generator=noise).round()  # with ties
        drawn, slow = (
            TreeLaws(Sampler(params, 1, [], "cpu"), tree, logits, [3, 1]) for _ in range(2)
        )
        found = verify(tree, drawn.law, rule, params.seed, 1, draw=drawn.draw)
        assert found == verify(tree, slow.law, rule, params.seed, 1)
        assert drawn.scores.keys() == slow.scores.keys()
        assert all(torch.equal(drawn.scores[node], slow.scores[node]) for node in slow.scores)
        accepted += len(found.path)
    assert accepted > 5  # not by leaves alone
