"""Drafts of a chosen quality: each token is right with probability alpha, whatever the text.

The proposer decodes the text without drafts first, and then drafts from it, spoiling each token
with a coin of its own. So acceptance is independent from token to token, as the formulas of
arXiv:2211.17192 assume, and the real decoder must give (1 - alpha^(g+1)) / (1 - alpha) tokens a
round for chains of g drafts. It tests the decoder and the counting, and shows what a head of that
quality would give; its speed means nothing, as it knows the answer.

Letters: g draft tokens, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inference.generate import plain_generate
from inference.proposers.base import Proposer, RowState, Session
from inference.proposers.copying import one_hot_tree
from inference.sampling import Stream, uniform_at
from inference.tree import TokenTree
from inference.verify import SAME_TOKENS


class SimulatedProposer(Proposer):
    """Chains of the text's own tokens, some of them spoiled.

    Args:
        accept: alpha, the chance that a token is right.
        depth: g.

    Raises:
        ValueError: one of them is out of range.
    """

    def __init__(self, accept: float, depth: int = 5) -> None:
        if not 0.0 <= accept <= 1.0:
            raise ValueError(f"accept must lie in [0, 1], got {accept}")
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self.accept, self.depth = accept, depth

    @property
    def chains(self) -> bool:
        """Always."""
        return True

    def start(self, session: Session) -> None:
        """Forget the texts of the last call."""
        self.target, self.rule, self.timer = session.target, session.rule, session.timer
        self.texts: dict[int, list[int]] = {}

    def propose(self, states: Sequence[RowState | None]) -> list[TokenTree | None]:
        """One chain for each running sequence.

        Raises:
            ValueError: a rule that does not promise the tokens of plain decoding.
        """
        return [
            None if state is None else self._chain(row, state) for row, state in enumerate(states)
        ]

    def _chain(self, row: int, state: RowState) -> TokenTree:
        check_simulated(self.rule, state.sampling.temperature)
        if row not in self.texts:
            with self.timer.phase("draft"):
                self.texts[row] = self._text(state)
        place = len(state.tokens)
        drafts = self.texts[row][place : place + min(self.depth, state.max_depth)]
        tokens = [state.tokens[-1]]
        for position, token in enumerate(drafts, start=place):
            coin = uniform_at(state.sampling.seed, Stream.DRAFT, position, torch.zeros(1).long())
            right = float(coin) < self.accept
            tokens.append(token if right else (token + 1) % self.target.vocab_size)
        return one_hot_tree(tokens, range(-1, len(tokens) - 1), self.target.device)

    def _text(self, state: RowState) -> list[int]:
        """The prompt and what plain decoding says."""
        prompt = state.tokens[: state.prompt_length]
        limit = len(state.tokens) + state.max_depth + 1
        result = plain_generate(
            self.target,
            [prompt],
            max_new_tokens=limit - len(prompt),
            sampling=state.sampling,
        )
        return prompt + result.sequences[0]


def check_simulated(rule: str, temperature: float) -> None:
    """Refuse a rule under which the text is not known beforehand.

    Args:
        rule: of acceptance.
        temperature: of the sampling.

    Raises:
        ValueError: it is one.
    """
    if temperature > 0 and rule not in SAME_TOKENS:
        raise ValueError(
            f"simulated drafts know the text that plain decoding gives, and rule {rule!r} at a "
            f"temperature gives another: use rule {' or '.join(SAME_TOKENS)}, or temperature 0"
        )
