"""Planted bugs are caught: the tests of the decoder can fail.

Every mutant of `tests.inference.mutants` is planted in turn, and the detector it names must fail on
it with what a failing test raises; a crash would not count. Without a bug all detectors pass.
"""

from collections.abc import Callable

import pytest
import torch

from drafters import TargetModel
from inference.proposers.growth import StaticGrowth
from inference.sampling import Stream, gumbel_at
from inference.verify import verify
from tests.inference import detectors
from tests.inference.mutants import MUTANTS, Mutant
from tests.inference.oracles import EXACT, by_depth, drawn_trees, random_laws, total_variation


@pytest.fixture(scope="module", autouse=True)
def _plain_texts() -> None:
    detectors.prepare()


def test_there_are_as_many_as_listed() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names)) == 45
    assert {mutant.caught_by for mutant in MUTANTS} == set(detectors.DETECTORS), "a detector idles"
    assert all(mutant.shows for mutant in MUTANTS)


@pytest.mark.parametrize("detector", detectors.DETECTORS, ids=lambda detector: detector.__name__)
def test_without_a_bug_every_detector_passes(detector: Callable[[], None]) -> None:
    detector()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_bug_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        mutant.caught_by()


# What looks like a bug and is none --------------------------------------------------------------


def test_equivalent_all_positions_shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary positions are relative: with the prompt's shifted as well, nothing changes."""
    forward = TargetModel.forward

    def shifted(self, ids, **options):  # type: ignore[no-untyped-def]
        if options.get("position_ids") is not None:
            options["position_ids"] = options["position_ids"] + 1
        return forward(self, ids, **options)

    monkeypatch.setattr(TargetModel, "forward", shifted)
    detectors.tokens_alone()
    detectors.tokens_in_a_batch()


def test_equivalent_unnormalised_residual_on_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draw does not care for the size of what it draws from; only a second sibling does."""
    monkeypatch.setitem(
        verify.__globals__, "residual_law", lambda owed, draft: (owed - draft).clamp(min=0.0)
    )
    trees = drawn_trees(random_laws(2, 3), by_depth(1, 1))
    assert total_variation(trees, random_laws(1, 3), "rejection", 3) < EXACT


def test_equivalent_fewer_children_by_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a later child is drawn may depend on its elder siblings, not on what it is itself."""
    choose = StaticGrowth._choose

    def content(self: StaticGrowth, node: int, law: torch.Tensor, count: int):  # type: ignore[no-untyped-def]
        chosen, drawn_from = choose(self, node, law, count)
        return (chosen[:1] if law[chosen[0]] > 0.3 else chosen), drawn_from

    monkeypatch.setattr(StaticGrowth, "_choose", content)
    detectors.law_of_static_trees()


def test_equivalent_other_noise_in_coupled_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coupled drafts with other noise are accepted less often; the text stays plain sampling's."""
    monkeypatch.setattr(
        "inference.proposers.laws.gumbel_at",
        lambda seed, position, index: gumbel_at(seed, position, index, Stream.DRAFT),
    )
    detectors.drafts_are_fresh()
    detectors.tokens_with_skipped_layers()


def test_detectors_see_what_they_should() -> None:
    """The texts differ between rows and laws, and leave the window and the batch."""
    texts = [tuple(text) for name in detectors.TARGETS for text in detectors.texts(name)]
    assert len(set(texts)) == len(texts)
    assert min(map(len, texts)) > 8 and len(set(detectors.LENGTHS)) == 3
    assert torch.equal(torch.tensor(detectors.texts()[0][:5]), torch.tensor(detectors.PROMPTS[0]))
