"""Drafts from a separate, smaller causal LM with the same tokenizer (arXiv:2211.17192, 2302.01318).

The draft model has an engine of the kind that runs the target, and a cache of its own. What it ran
of the last round's trees is pending there when the next round starts: rows on the accepted path are
committed, the others are forgotten, and only tokens that it has not seen yet are run. Nothing is
computed twice.

Legend: B sequences still running, V target vocabulary, Vd draft vocabulary.
"""

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from drafters import TargetModel
from inference.append import append_text, stretches
from inference.engine import Engine
from inference.proposers.base import Proposer, RowState, Session
from inference.proposers.growth import new_tree
from inference.proposers.levels import Branches, expand_nodes, run_nodes
from inference.proposers.options import TreeOptions
from inference.support import check_tree_support
from inference.tree import TokenTree

FEW = 8
"""Tokens up to which new text is run as a tree is, all of its logits included."""


class DraftModelProposer(Proposer):
    """Grows trees with a draft model, all sequences together, one draft forward per level.

    Where a text leaves the positions of the draft model it is decoded without drafts, and a warning
    says so.

    Args:
        draft: the draft model; of any architecture that can verify trees.
        options: of the tree; ``top_k=1`` drafts chains.

    Raises:
        ValueError: options that need a confidence output.
    """

    def __init__(self, draft: TargetModel, options: TreeOptions | None = None) -> None:
        self.draft, self.options = draft, options or TreeOptions()
        if self.options.min_survival > 0.0:
            raise ValueError("min_survival: a draft model has no confidence output; leave it out")
        self._fits: weakref.WeakSet[TargetModel] = weakref.WeakSet()
        self._trees: dict[int, Branches] = {}
        self._engine: Engine
        self._cache: Any = None
        self._session: Session
        self._draft_vocab: Tensor | None = None
        self._warned = False

    @property
    def chains(self) -> bool:
        """Whether no node has a second child."""
        return self.options.chains

    def start(self, session: Session) -> None:
        """An empty draft cache.

        Raises:
            ValueError: the draft model has another tokenizer, or cannot draft trees.
        """
        if session.target not in self._fits:
            check_same_tokenizer(session.target, self.draft)
            self._fits.add(session.target)
        self._engine = session.engine.beside(self.draft)
        check_tree_support(self._engine)
        self._cache = self._engine.new_cache(session.batch_size, session.cache.capacity)
        self._session, self._trees, self._warned = session, {}, False
        self._live = list(range(session.batch_size))
        self._draft_vocab = None
        if self.draft.vocab_size < session.target.vocab_size:
            self._draft_vocab = torch.arange(self.draft.vocab_size, device=session.target.device)

    def finish(self, row: int, tokens: list[int]) -> None:
        """The sequence leaves the draft cache."""
        still = [place for place, other in enumerate(self._live) if other != row]
        if not still:
            self._cache = None
        elif self._cache is not None:
            self._cache.select(still)
        self._live = [self._live[place] for place in still]
        self._trees.pop(row, None)

    @torch.no_grad()
    def propose(self, states: Sequence[RowState | None]) -> list[TokenTree | None]:
        """Commit what was accepted, run what is new, grow."""
        cache = self._cache
        assert cache is not None, "propose() before start()"
        live = [self._within_positions(states[row]) for row in self._live]
        self._commit_accepted(cache, live)
        behind = self._catch_up(cache, live)
        device, vocab_size = self._session.target.device, self._session.target.vocab_size
        trees = [
            Branches(
                new_tree(
                    self.options,
                    state,
                    self._session.rule,
                    device,
                    vocab_size,
                    self._draft_vocab,
                )
            )
            for state in live
        ]
        root = torch.zeros(1, dtype=torch.int64, device=device)
        for tree, logits in zip(trees, behind, strict=True):
            if logits is not None:
                tree.growth.add_children(root, self._columns(logits[None]))
        self._grow(cache, trees)
        self._trees = dict(zip(self._live, trees, strict=True))
        found: list[TokenTree | None] = [None] * len(states)
        for row, tree in self._trees.items():
            found[row] = tree.growth.finish()[0]
        return found

    def _grow(self, cache: Any, trees: Sequence[Branches]) -> None:
        """Level by level, below the children of the roots."""
        while True:
            nodes = [tree.frontier() for tree in trees]
            if not any(map(len, nodes)):
                return
            with self._session.timer.phase("draft"):
                out = run_nodes(self._engine, cache, trees, nodes)
            expand_nodes(trees, nodes, self._columns(out.logits))

    def _within_positions(self, state: RowState | None) -> RowState:
        """The state, drafting no deeper than the draft model has positions.

        Children of a node at position n - 1 of n can be proposed, those below them cannot.
        """
        assert state is not None, "a sequence that has ended was not reported to finish()"
        room = max(0, self.draft.max_length - (len(state.tokens) - 1))
        if room >= min(state.max_depth, self.options.longest):
            return state
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"a text of {len(state.tokens)} tokens reaches the end of the draft model's "
                f"{self.draft.max_length} positions (max_position_embeddings): drafts get shorter "
                "there and then end; the output stays the target's",
                stacklevel=2,
            )
        return replace(state, max_depth=min(room, state.max_depth))

    def _commit_accepted(self, cache: Any, states: Sequence[RowState]) -> None:
        """Keep the rows of the last trees that became text.

        The last token of a text is always left to be run: its logits are wanted.
        """
        if not cache.pending:
            return
        cache.commit(
            [
                self._trees[row].spelled(state.tokens[length:-1])
                for row, state, length in zip(self._live, states, cache.lengths, strict=True)
            ]
        )

    def _catch_up(self, cache: Any, states: Sequence[RowState]) -> list[Tensor | None]:
        """Run what is new of every text that is to be drafted for.

        A token id that the draft model has no embedding for, which may exist where its matrices
        are padded less than the target's, is shown to it as the last one it has.

        Returns:
            Per sequence the logits (Vd,) behind its last token, None if it is not drafted for.
        """
        lengths, last = cache.lengths, self.draft.vocab_size - 1
        new = [
            [min(token, last) for token in state.tokens[length:]] if state.max_depth else []
            for state, length in zip(states, lengths, strict=True)
        ]
        behind: list[Tensor | None] = [None] * len(states)
        append, longest = self._engine.append, max(map(len, new))
        if 0 < longest <= FEW:
            return self._run_few(cache, new)
        for part in stretches(self.draft, longest):
            with self._session.timer.phase("draft"):
                found = append_text(self.draft, cache, [some[part] for some in new], append=append)
            for row, out in enumerate(found):
                behind[row] = behind[row] if out is None else out.logits[0]
        return behind

    def _run_few(self, cache: Any, new: Sequence[Sequence[int]]) -> list[Tensor | None]:
        """The same for some tokens, by the kind of forward that the levels of trees have."""
        with self._session.timer.phase("draft"):
            out = self._engine.append(
                cache,
                [torch.tensor(some, dtype=torch.int64) for some in new],
                [torch.arange(len(some)) for some in new],
                [torch.ones(len(some), len(some), dtype=torch.bool).tril() for some in new],
            )
        cache.commit([range(len(some)) for some in new])
        rows = zip(out.logits, new, strict=True)
        return [row[len(some) - 1] if some else None for row, some in rows]

    def _columns(self, logits: Tensor) -> Tensor:
        """Draft logits (..., Vd) of tokens that the target has, where it is, in its precision."""
        target = self._session.target
        columns = logits[..., : target.vocab_size].to(target.device)
        return columns.to(torch.float64 if target.dtype == torch.float64 else torch.float32)


def check_same_tokenizer(target: TargetModel, draft: TargetModel) -> None:
    """Refuse a draft model whose token ids mean something else.

    Output matrices may be padded to different sizes. Models without a tokenizer must at least have
    output matrices of one size.

    Args:
        target: the model whose output it is.
        draft: the model that drafts.

    Raises:
        ValueError: naming the first token id that differs.
    """
    ours, theirs = _tokenizer(target), _tokenizer(draft)
    if ours is None or theirs is None:
        if target.vocab_size != draft.vocab_size:
            raise ValueError(
                f"draft model: its vocabulary_size is {draft.vocab_size}, the target's "
                f"{target.vocab_size}, and without both tokenizers (TargetModel(..., tokenizer=)) "
                "it cannot be checked that token ids mean the same"
            )
        return
    one = {index: token for token, index in ours.get_vocab().items()}
    other = {index: token for token, index in theirs.get_vocab().items()}
    different = [index for index in one.keys() | other.keys() if one.get(index) != other.get(index)]
    if different:
        index = min(different)
        raise ValueError(
            f"draft model: its tokenizer is not the target's: token {index} is "
            f"{_shown(other.get(index))} there and {_shown(one.get(index))} here (one of "
            f"{len(different)} that differ); draft with a model of the target's own family"
        )


def _tokenizer(model: TargetModel) -> PreTrainedTokenizerBase | None:
    try:
        return model.tokenizer
    except ValueError:  # built without one
        return None


def _shown(token: str | None) -> str:
    return "no token" if token is None else repr(token)
