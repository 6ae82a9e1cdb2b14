"""Measuring how often drafts are accepted, of every arm, along texts of the target.

What `size: auto` learns while it decodes is of the drafts that it made. Here a text is gone through
once and at every position a round of each arm is drafted along it, with all depths and ranks, so
that nothing is left out because it looked bad at first.

Letters: K depths, R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from inference.engine import Engine
from inference.generate import plain_generate
from inference.proposers.arms import describe, outcome_of
from inference.proposers.base import Proposer, RowState, Session
from inference.proposers.heads import HeadProposer
from inference.sampling import SamplingParams
from inference.scheduling.priors import Counts
from inference.scheduling.survival import SurvivalEstimator
from inference.shapes.rates import Rates, measure_rates
from inference.timing import PhaseTimer

SEED = 2**40
"""The first of the seeds that calibration decodes with: coins that no other run tosses."""


@dataclass
class SurvivalCalibration:
    """Counts the accepted drafts of arms.

    Attributes:
        engine: decodes the texts.
        arms: proposers by name; of draft models nothing is counted.
        sampling: of the texts; its seed has no effect.
        rule: of acceptance.
        positions: to stop at, over all texts.
    """

    engine: Engine
    arms: Mapping[str, Proposer]
    sampling: SamplingParams
    rule: str
    positions: int
    seen: int = 0
    _rates: dict[str, Rates] = field(default_factory=dict)
    _copied: dict[str, SurvivalEstimator] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Nothing is counted yet."""
        for name, proposer in self.arms.items():
            arm = describe(name, proposer)
            if isinstance(proposer, HeadProposer):
                self._rates[name] = Rates.none(arm.depth, arm.top_k)
            elif arm.copies:
                self._copied[name] = SurvivalEstimator(arm.depth, arm.top_k)

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> dict[str, Counts]:
        """Decode texts and count along them.

        Args:
            prompts: token ids.
            new_tokens: to decode of each.

        Returns:
            By arm (K, R) accepted and tried.
        """
        for number, prompt in enumerate(prompts):
            if self.seen >= self.positions:
                break
            own = replace(self.sampling, seed=SEED + number)
            made = plain_generate(
                self.engine.target,
                [list(prompt)],
                max_new_tokens=new_tokens,
                sampling=own,
                engine=self.engine,
            )
            self._along([*prompt, *made.sequences[0]], len(prompt), own)
        return self.counts()

    def counts(self) -> dict[str, Counts]:
        """By arm (K, R) accepted and tried."""
        found: dict[str, Counts] = {}
        for name, rates in self._rates.items():
            ranks = rates.accepted.shape[1]
            found[name] = (rates.accepted.tolist(), [[n] * ranks for n in rates.reached.tolist()])
        return found | {name: one.counts() for name, one in self._copied.items()}

    def _along(self, ids: list[int], prompt_length: int, sampling: SamplingParams) -> None:
        """Every position of one text."""
        target, left = self.engine.target, self.positions - self.seen
        places = range(prompt_length, min(len(ids) - 1, prompt_length + left))
        self.seen += len(places)
        for name, rates in self._rates.items():
            head, most = self.arms[name], rates.rounds + left
            assert isinstance(head, HeadProposer)
            measure_rates(rates, target, head, ids, prompt_length, sampling, self.rule, most)
        for name, counter in self._copied.items():
            proposer = self.arms[name]
            cache = self.engine.new_cache(1, 1)
            proposer.start(Session(self.engine, cache, 1, PhaseTimer(), self.rule, [0]))
            for root in places:
                self._copy(proposer, counter, ids, root, prompt_length, sampling)
            proposer.finish(0, ids)

    def _copy(
        self,
        proposer: Proposer,
        counter: SurvivalEstimator,
        ids: list[int],
        root: int,
        prompt_length: int,
        sampling: SamplingParams,
    ) -> None:
        """One round of copied drafts."""
        hidden = torch.zeros(1, self.engine.target.hidden_size)
        following = ids[root + 1 :]
        state = RowState(ids[: root + 1], prompt_length, None, hidden, len(following), sampling)
        [tree] = proposer.propose([state])
        assert tree is not None, "no tree for a running sequence"
        counter.observe(outcome_of(tree, following, verified=False))
