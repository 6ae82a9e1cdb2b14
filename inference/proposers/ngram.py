"""Prompt lookup: drafts copied from where the last tokens stood before (no training, no network).

Whatever comes out is a deterministic function of the text, so the proposals are one-hot and every
rule that takes those is lossless.

Legend: L tokens of the text so far, n length of a match, N tree nodes.
"""

from collections import defaultdict
from collections.abc import Sequence

from inference.proposers.base import RowState, Session
from inference.proposers.copying import CopyingProposer, one_hot_tree
from inference.tree import TokenTree

OCCURRENCES = ("last", "first")
MATCHES = (2, 3, 6)
"""Shortest matches of the parts of `by_match`, beside the shortest of all."""


class NgramIndex:
    """Where every n-gram of one text goes on; grows with the text.

    Absorbing a token costs one dictionary entry for each n, a lookup one probe for each n: neither
    depends on L.

    Args:
        min_ngram: shortest n.
        max_ngram: longest n.
    """

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self.sizes = range(min_ngram, max_ngram + 1)
        self._absorbed = 0
        self._starts: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        self._last: tuple[int, tuple[int, Sequence[int]]] = (0, (0, ()))

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

    def longest_match(self, tokens: Sequence[int]) -> tuple[int, Sequence[int]]:
        """The length of the longest known n-gram ending the text, and the places, in order, at
        which it goes on; (0, ()) where none is known.

        Args:
            tokens: the whole text, absorbed.
        """
        if self._last[0] != len(tokens):  # whoever shares an index asks for the same text
            self._last = (len(tokens), self._longest(tokens))
        return self._last[1]

    def _longest(self, tokens: Sequence[int]) -> tuple[int, Sequence[int]]:
        for size in reversed(self.sizes):
            if size < len(tokens) and (starts := self._starts.get(tuple(tokens[-size:]))):
                return size, starts
        return 0, ()


class Indices:
    """The indices of the texts of a call. Proposers of matches of different lengths share them.

    Args:
        min_ngram: shortest n.
        max_ngram: longest n.
    """

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self.min_ngram, self.max_ngram = min_ngram, max_ngram
        self._of_row: dict[int, NgramIndex] = {}

    def start(self, batch_size: int) -> None:
        """Other texts, of which nothing is known."""
        self._of_row = {
            row: NgramIndex(self.min_ngram, self.max_ngram) for row in range(batch_size)
        }

    def finish(self, row: int) -> None:
        """Drop the index of a sequence that has ended."""
        self._of_row.pop(row, None)

    def longest_match(self, row: int, tokens: Sequence[int]) -> tuple[int, Sequence[int]]:
        """See `NgramIndex.longest_match`; what is new of the text is absorbed.

        Args:
            row: of the batch.
            tokens: its whole text.
        """
        index = self._of_row[row]
        index.absorb(tokens)
        return index.longest_match(tokens)


class NgramProposer(CopyingProposer):
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
        indices: shared with others that draft from matches of other lengths, so that only one of
            them drafts: where the longest match is longer than ``max_ngram`` this one does not.
            None has its own, in which no longer match is looked for.

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
        indices: Indices | None = None,
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
        if indices is not None and not (
            indices.min_ngram <= min_ngram and max_ngram <= indices.max_ngram
        ):
            raise ValueError(
                f"NgramProposer: indices hold matches of {indices.min_ngram} to "
                f"{indices.max_ngram} tokens, not of {min_ngram} to {max_ngram}"
            )
        self.size, self.depth, self.branch = size, depth, branch
        self.max_ngram, self.min_ngram, self.occurrence = max_ngram, min_ngram, occurrence
        self.indices = Indices(min_ngram, max_ngram) if indices is None else indices

    @property
    def chains(self) -> bool:
        """Whether no node has a second child."""
        return self.branch == 1

    def start(self, session: Session) -> None:
        """An empty index for each sequence."""
        self.indices.start(session.batch_size)

    def finish(self, row: int, tokens: list[int]) -> None:
        """Drop the index of a sequence that has ended."""
        self.indices.finish(row)

    def copy(self, row: int, state: RowState) -> TokenTree | None:
        """Absorb the new tokens of the text and look its end up."""
        tokens, depth = state.tokens, min(self.depth, state.max_depth)
        size, starts = self.indices.longest_match(row, tokens)
        if not self.min_ngram <= size <= self.max_ngram or depth < 1:
            return None
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
    shared, parts = Indices(shortest, longest), {}
    for low, beyond in zip([shortest, *starts], [*starts, longest + 1], strict=True):
        parts[f"ngram{low}"] = NgramProposer(
            proposer.size,
            proposer.depth,
            proposer.branch,
            max_ngram=beyond - 1,
            min_ngram=low,
            occurrence=proposer.occurrence,
            indices=shared,
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
