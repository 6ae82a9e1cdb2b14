"""Every row keeps its own state, whatever objects the rows are given."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import generation as hf

import inference.texts
from drafters import TargetModel
from inference.copies import apart, copied
from inference.generate import plain_generate, speculative_generate
from inference.processors import Sampler, check_processors, fresh
from inference.proposers.ngram import NgramProposer
from inference.sampling import Processor, SamplingParams
from tests.grammar import MARKER, GrammarMatcher, complete
from tests.inference.stateful import (
    NEW,
    NO_END,
    PROMPTS,
    STATEFUL,
    Budget,
    Recorder,
    decode,
    plain,
    stop_of,
    truth,
)
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


# Rows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["match", "coupled"])
@pytest.mark.parametrize("name", STATEFUL)
def test_rows_that_are_given_one_object_keep_their_own_state(
    target: TargetModel, name: str, rule: str, temperature: float
) -> None:
    expected = plain(target, name, temperature)
    shared = STATEFUL[name]()
    params = SamplingParams(temperature, seed=1, processors=(shared,))
    before = dict(vars(shared))
    for proposer in (truth(target, name), NgramProposer()):
        assert decode(target, proposer, name, params, rule=rule).sequences == expected
    assert vars(shared) == before, "the object itself is not called, so it can serve again"
    again = plain_generate(
        target, PROMPTS, max_new_tokens=NEW, sampling=params, stop=stop_of(name)
    ).sequences
    assert again == expected
    if name == "grammar":
        assert all(map(complete, expected))


@pytest.mark.parametrize("name", STATEFUL)
def test_sharing_without_copies_is_noticed(
    target: TargetModel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above would find if rows were not kept apart."""
    monkeypatch.setattr(inference.texts, "apart", list)
    params = SamplingParams(processors=(STATEFUL[name](),))
    proposer = truth(target, name)
    if name == "grammar":
        with pytest.raises(ValueError, match="called at length"):
            decode(target, proposer, name, params)
    else:
        assert decode(target, proposer, name, params).sequences != plain(target, name)


def test_what_only_one_row_is_given_is_used_itself(target: TargetModel) -> None:
    shared, own = Recorder(), [Recorder() for _ in PROMPTS]
    samplings = [SamplingParams(processors=(shared, mine)) for mine in own]
    found = decode(target, NgramProposer(), "budget", samplings)
    assert shared.texts == []
    for prompt, new, mine in zip(PROMPTS, found.sequences, own, strict=True):
        assert mine.texts == [[*prompt, *new[:count]] for count in range(len(new))]


def test_methods_of_one_object_are_the_same_object() -> None:
    """Though each is an object of its own: `grammar.mask is not grammar.mask`."""
    grammar = GrammarMatcher()
    first, second = apart([SamplingParams(processors=(grammar.__call__,)) for _ in range(2)])
    owners = {id(params.processors[0].__self__) for params in (first, second)}  # type: ignore[attr-defined]
    assert len(owners) == 2 and id(grammar) not in owners
    alone = SamplingParams(processors=(grammar.__call__,))
    assert apart([alone, SamplingParams()]) == [alone, SamplingParams()]


def test_processors_of_one_row_stay_together() -> None:
    """One reads what the other writes; the copies do so, too."""
    writer = Recorder()
    reader = functools.partial(read, writer)
    for row in apart([SamplingParams(processors=(writer, reader))] * 2):
        its_writer, its_reader = row.processors
        assert its_writer is its_reader.args[0] is not writer  # type: ignore[attr-defined]


def read(writer: Recorder, input_ids: Tensor, scores: Tensor) -> Tensor:
    assert writer.texts[-1] == input_ids[0].tolist()
    return scores


# What can be copied -----------------------------------------------------------------------------


class Slots:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores


class Holding:
    """Holds something, deep inside."""

    def __init__(self, held: Any) -> None:
        self.held = {"list": [(held,)]}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores

    def method(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


class Forking(Holding):
    """Knows how to copy what `copy.deepcopy` does not."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Forking":
        return Forking(remembering())


def no_vowels(input_ids: Tensor, scores: Tensor) -> Tensor:
    scores[:, [5, 9, 13]] = -torch.inf
    return scores


def with_constants(input_ids: Tensor, scores: Tensor, floor: float = -1.0) -> Tensor:
    return scores.clamp(min=floor)


def with_a_list(input_ids: Tensor, scores: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
    seen.append(input_ids.shape[1])
    return scores


@functools.lru_cache
def cached(length: int) -> int:
    return length % 7


def remembering() -> Processor:
    seen: list[int] = []

    def remember(input_ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(input_ids.shape[1])
        return scores

    return remember


class Cached:
    def __init__(self) -> None:
        self.calls = 0
        self.answer = functools.lru_cache(self.compute)

    def compute(self, length: int) -> int:
        self.calls += 1
        return self.calls

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + self.answer(input_ids.shape[1])


COPYABLE: dict[str, Callable[[], Any]] = {
    "budget": Budget,
    "grammar": GrammarMatcher,
    "slots": Slots,
    "method": lambda: Holding(3).method,
    "function": lambda: no_vowels,
    "function with constants": lambda: with_constants,
    "holds functions": lambda: Holding((no_vowels, cached, max, torch.add, torch.float32)),
    "partial": lambda: functools.partial(read, Recorder()),
    "tensors": lambda: Holding(torch.ones(3)),
    "generator": lambda: hf.WatermarkLogitsProcessor(96, "cpu"),
    "knows how": lambda: Forking(remembering()),
}
UNCOPYABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "closure": (remembering, "remember.* may have variables of its own"),
    "list": (lambda: with_a_list, "with_a_list .*variables of its own"),
    "holds a closure": (lambda: Holding(remembering()), "Holding .*variables of its own"),
    "closure in a partial": (lambda: functools.partial(remembering()), "partial .*variables"),
    "method of a list": (lambda: Holding([].append), "Holding .*append.* variables"),
    "cache of a method": (Cached, "Cached .*variables"),
    "weak reference": (lambda: Holding(weakref.ref(Budget)), "Holding .*weakref"),
    "network": (lambda: Holding(nn.Linear(3, 3)), "Holding .*Linear is a network"),
    "a network itself": (lambda: nn.Identity(), "Identity .*is a network"),
    "guidance": (
        lambda: hf.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, tiny_target().model),
        "UnbatchedClassifierFreeGuidanceLogitsProcessor .*is a network",
    ),
    "iterator": (lambda: Holding(token for token in "abc"), "Holding .*TypeError.*generator"),
}


@pytest.mark.parametrize("name", COPYABLE)
def test_copies_have_nothing_in_common(name: str) -> None:
    original = COPYABLE[name]()
    (copy,) = copied([original], "")
    assert type(copy) is type(original)
    assert (copy is original) == ("function" in name and "holds" not in name)


@pytest.mark.parametrize("name", UNCOPYABLE)
def test_what_a_copy_would_share_is_refused_by_name(name: str) -> None:
    build, message = UNCOPYABLE[name]
    processor = build()
    with pytest.raises(ValueError, match=f"processors: .*{message}.*: no way"):
        copied([no_vowels, processor], "no way")


@pytest.mark.filterwarnings("ignore::inference.rules.lossy.LossyWarning")
def test_what_cannot_be_copied_is_refused_where_it_would_be(target: TargetModel) -> None:
    params = SamplingParams(processors=(Holding(remembering()),))
    options: dict[str, Any] = {"max_new_tokens": 4, "sampling": params, "stop": NO_END}
    for prompts in (PROMPTS, PROMPTS[:2]):
        for call in (
            lambda prompts=prompts: plain_generate(target, prompts, **options),
            lambda prompts=prompts: speculative_generate(
                target, NgramProposer(), prompts, **options
            ),
        ):
            with pytest.raises(ValueError, match=r"Holding cannot .*own SamplingParams"):
                call()
    for rule in ("block", "lossy_typical"):
        with pytest.raises(ValueError, match=r"Holding cannot .*'block' .*use 'match', 'coupled'"):
            check_processors([params], rule, 96)
        with pytest.raises(ValueError, match=r"Holding cannot .*'block' .*use 'match', 'coupled'"):
            speculative_generate(target, NgramProposer(branch=1), PROMPTS[:1], rule=rule, **options)
    for rule in ("match", "coupled", "rejection"):
        speculative_generate(target, NgramProposer(), PROMPTS[:1], rule=rule, **options)


def test_a_fresh_copy_leaves_the_original_unused() -> None:
    params = SamplingParams(processors=(GrammarMatcher(), no_vowels, remembering()))
    copy = fresh(params)
    assert copy.processors[0] is not params.processors[0]
    assert copy.processors[1:] == params.processors[1:]  # functions, and what cannot be copied
    assert fresh(SamplingParams(0.5)) == SamplingParams(0.5)
    Sampler(copy, 1, [], "cpu").scores(torch.randn(96), [MARKER])
    assert params.processors[0].calls == 0 and copy.processors[0].calls == 1  # type: ignore[attr-defined]
