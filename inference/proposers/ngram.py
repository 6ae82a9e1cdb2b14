"""Prompt lookup: drafts copied from where the last tokens stood before (no training, no network).

Whatever comes out is a deterministic function of the text, so the proposals are one-hot and every
rule that takes those is lossless.

Legend: L tokens of the text so far, n length of a match, N tree nodes.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch

from inference.proposers.base import Proposer, RowState, Session
from inference.tree import Proposal, TokenTree

OCCURRENCES = ("last", "first")
MATCHES = (2, 3, 6)
"""Shortest matches of the parts of `by_match`, beside the shortest of all."""


def one_hot_tree(
    tokens: Sequence[int], parents: Sequence[int], device: torch.device | str
) -> TokenTree:
    """A tree of deterministically chosen tokens.

    Args:
        tokens: N, the committed token first.
        parents: N, -1 first.
        device: of the tensors.
    """
    return TokenTree(
        torch.tensor(tokens, device=device),
        torch.tensor(parents, device=device),
        Proposal.ONE_HOT,
    )


class NgramIndex:
    """Where every n-gram of one text goes on; grows with the text.

    Absorbing a token costs one dictionary entry for each n, a lookup one probe for each n: neither
    depends on L.

    Args:
        min_ngram: shortest n.
        max_ngram: longest n.
        unless: the n of matches that hide all others; None hides none.
    """

    def __init__(self, min_ngram: int, max_ngram: int, unless: int | None = None) -> None:
        self.unless = unless
        self.sizes = [*range(min_ngram, max_ngram + 1), *([] if unless is None else [unless])]
        self._absorbed = 0
        self._starts: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)

    def absorb(self, tokens: Sequence[int]) -> None:
        """Add what follows the part of the text that is known already.

        Args:
            tokens: the whole text. Its last token has no continuation yet, so that no n-gram
                ending there is added before the next call.
        """
        for start in range(self._absorbed + 1, len(tokens)):
            for size in self.sizes:
                if size <= start:
                    self._starts[tuple(tokens[start - size : start])].append(start)
        self._absorbed = max(self._absorbed, len(tokens) - 1)

    def longest_match(self, tokens: Sequence[int]) -> Sequence[int]:
        """The places, in order, at which the longest known n-gram ending the text goes on; none
        where it is a hidden one.
        """
        for size in reversed(self.sizes):
            if size < len(tokens) and (starts := self._starts.get(tuple(tokens[-size:]))):
                return () if size == self.unless else starts
        return ()


class NgramProposer(Proposer):
    """Prompt lookup with a tree (the idea of transformers' ``prompt_lookup_num_tokens``).

    The longest run of last tokens that has stood in the prompt or the output before is looked up,
    and what followed it there is copied. Up to ``branch`` of its occurrences are merged into a
    trie. What most of them agree on is kept first, and among equals the preferred occurrence.

    Which occurrence is preferred: ``"last"`` is the most recent. What is being written now is more
    like what was written just before (the current paragraph, the latest version of a function) than
    like the beginning of a long prompt. Such a copy may reach the end of the text and then runs
    on into itself, as in LZ77, so that a loop is drafted for as long as the tree is deep.
    ``"first"`` with ``branch=1`` is exactly transformers' chain, for measurements at equal
    settings; its copy stops where the text stops.

    A round costs O(new tokens + branch · depth), whatever the length of the text.

    Args:
        size: nodes the target verifies per round, root included.
        depth: longest drafted path.
        branch: occurrences merged, so no node has more children; 1 drafts a chain.
        max_ngram: longest match looked for.
        min_ngram: shortest match that is drafted from.
        occurrence: ``"last"`` or ``"first"``.
        unless: nothing is drafted where a match of this length exists: it is somebody else's. None
            leaves nothing to others.

    Raises:
        ValueError: an option out of range.
    """

    def __init__(
        self,
        size: int = 32,
        depth: int = 10,
        branch: int = 8,
        max_ngram: int = 3,
        min_ngram: int = 1,
        occurrence: str = "last",
        unless: int | None = None,
    ) -> None:
        if size < 2 or depth < 1 or branch < 1:
            raise ValueError(
                "NgramProposer: size >= 2, depth >= 1 and branch >= 1 are needed, got "
                f"{size}, {depth}, {branch}"
            )
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(
                "NgramProposer: 1 <= min_ngram <= max_ngram is needed, got min_ngram "
                f"{min_ngram}, max_ngram {max_ngram}"
            )
        if occurrence not in OCCURRENCES:
            raise ValueError(
                f"NgramProposer: occurrence must be one of {', '.join(OCCURRENCES)}; "
                f"got {occurrence!r}"
            )
        if unless is not None and unless <= max_ngram:
            raise ValueError(
                f"NgramProposer: unless must be longer than max_ngram {max_ngram}, got {unless}"
            )
        self.size, self.depth, self.branch = size, depth, branch
        self.max_ngram, self.min_ngram, self.occurrence = max_ngram, min_ngram, occurrence
        self.unless = unless
        self._indices: dict[int, NgramIndex] = {}

    @property
    def chains(self) -> bool:
        """Whether no node has a second child."""
        return self.branch == 1

    def start(self, session: Session) -> None:
        """An empty index for each sequence."""
        self._indices = {
            row: NgramIndex(self.min_ngram, self.max_ngram, self.unless)
            for row in range(session.batch_size)
        }

    def propose(self, states: Sequence[RowState | None]) -> list[TokenTree | None]:
        """Absorb the new tokens of each text and look its end up; the root alone if unknown."""
        return [
            None if state is None else self._look_up(self._indices[row], state)
            for row, state in enumerate(states)
        ]

    def finish(self, row: int, tokens: list[int]) -> None:
        """Drop the index of a sequence that has ended."""
        self._indices.pop(row, None)

    def _look_up(self, index: NgramIndex, state: RowState) -> TokenTree:
        tokens, depth = state.tokens, min(self.depth, state.max_depth)
        index.absorb(tokens)
        starts = index.longest_match(tokens)
        last = self.occurrence == "last"
        chosen = starts[-self.branch :][::-1] if last else starts[: self.branch]
        copies = [copy_from(tokens, start, depth, run_on=last) for start in chosen]
        drafts, parents = merge_copies(copies, self.size - 1)
        return one_hot_tree([tokens[-1], *drafts], [-1, *parents], state.hidden.device)


def by_match(proposer: NgramProposer) -> dict[str, NgramProposer]:
    """One that drafts what this one drafts, in parts: by the length of the match, each with a name.

    The longer the match, the likelier its continuation is right: of SmolLM2's answers one token is
    in 20 % of cases followed by what followed it before, three or more in 59 % and ten in 91 %. Who
    has to estimate that had better not take them for one. Just one of the parts has a draft.

    Args:
        proposer: that has decoded nothing yet.
    """
    longest, shortest = proposer.max_ngram, proposer.min_ngram
    starts = [n for n in MATCHES if shortest < n <= longest]
    parts = {}
    for low, beyond in zip([shortest, *starts], [*starts, None], strict=True):
        parts[f"ngram{low}"] = NgramProposer(
            proposer.size,
            proposer.depth,
            proposer.branch,
            max_ngram=longest if beyond is None else beyond - 1,
            min_ngram=low,
            occurrence=proposer.occurrence,
            unless=beyond,
        )
    return parts


def copy_from(tokens: Sequence[int], start: int, length: int, run_on: bool) -> list[int]:
    """Up to ``length`` tokens of the text from ``start`` on.

    Args:
        tokens: the text.
        start: of the copy, at least 1.
        length: wanted.
        run_on: whether a copy that reaches the end of the text goes on with its own beginning.
    """
    copy = list(tokens[start : start + length])
    period = len(tokens) - start
    while run_on and len(copy) < length:
        copy.append(copy[len(copy) - period])
    return copy


def merge_copies(copies: Sequence[Sequence[int]], size: int) -> tuple[list[int], list[int]]:
    """Merge continuations into a trie and keep its best nodes.

    A node that more continuations go through is better, then one of an earlier continuation, then a
    shallower one. A child is never better than its parent, so a parent is always kept.

    Args:
        copies: continuations, preferred ones first.
        size: nodes to keep, root excluded.

    Returns:
        Tokens of the nodes and indices of their parents in the tree, whose root has the index 0.
    """
    index: dict[tuple[int, int], int] = {}  # (parent, token) -> node; the root is node 0
    count, value = [0], [(0, 0)]  # value: (continuation that created it, depth)
    for rank, copy in enumerate(copies):
        node = 0
        for level, token in enumerate(copy):
            node = index.setdefault((node, token), len(count))
            if node == len(count):
                count.append(0)
                value.append((rank, level))
            count[node] += 1
    edges = list(index)
    best = sorted(range(1, len(count)), key=lambda node: (-count[node], value[node]))[:size]
    place = {0: 0} | {node: new for new, node in enumerate(best, start=1)}
    return (
        [edges[node - 1][1] for node in best],
        [place[edges[node - 1][0]] for node in best],
    )
