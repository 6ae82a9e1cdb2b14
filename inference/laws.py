"""The target's laws at the nodes of a tree, each on its own path, as the rules ask for them.

A processor of the user may keep state, so it must be called for the emitted tokens alone, in order.
Rules of `TOP_DOWN` ask for laws just so. The others ask about tokens that may never be emitted:
there copies answer, and the processors themselves are called afterwards, along what is emitted.

Letters: N tree nodes, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inference.processors import TOP_DOWN, Sampler
from inference.sampling import score_dtype
from inference.tree import TokenTree


class TreeLaws:
    """Laws for a rule that asks for them in the order of the text, at emitted tokens only.

    Args:
        sampler: of the sequence.
        tree: drafted.
        logits: (N, V) of its nodes.
        text: prompt and committed tokens, the root included.
    """

    def __init__(
        self, sampler: Sampler, tree: TokenTree, logits: Tensor, text: Sequence[int]
    ) -> None:
        self.sampler, self.tree, self.logits, self.text = sampler, tree, logits, list(text)
        self.scores: dict[int, Tensor] = {}
        """(V,) by node, once it was asked about; final once it is settled."""

    def law(self, node: int) -> Tensor:
        """(V,) target probabilities of the token behind a node."""
        self.scores[node] = self._ask(self.sampler, node)
        return self.sampler.law(self.scores[node])

    def draw(self, node: int, position: int) -> int:
        """The token that plain sampling draws behind a node.

        Args:
            node: of the tree.
            position: absolute, of the token.
        """
        self.scores[node] = self._ask(self.sampler, node)
        return self.sampler.draw(self.scores[node], position)

    def settle(self, node: int) -> None:
        """Told of each node, in order, before the token behind it is emitted."""

    def chances(self) -> list[float | None]:
        """Per node the probability of its token behind its parent; None for the root.

        For reports, after the rule has decided. Processors that may keep state are not called for
        tokens that were not emitted, so there nodes that the rule did not come to have None.
        """
        found: list[float | None] = [None] * self.tree.num_nodes
        for node in range(self.tree.num_nodes):
            children = self.tree.children(node)
            if children and (node in self.scores or not self.sampler.may_keep_state):
                law = self.sampler.law(self.scores[node]) if node in self.scores else self.law(node)
                for child in children:
                    found[child] = float(law[self.tree.token(child)])
        return found

    def _ask(self, sampler: Sampler, node: int) -> Tensor:
        path = [self.tree.token(above) for above in self.tree.path(node)[1:]]
        return sampler.scores(self.logits[node], self.text + path)


class LookAhead(TreeLaws):
    """Laws for a rule that asks about any node after its parent, whether it is emitted or not.

    Copies of the processors answer, each with the state that the path to its node leaves behind.
    Where they fail, the text may end, as when a grammar is complete. So nothing is accepted behind
    such a node, and the error is one only if a token would be emitted there.
    """

    def __init__(
        self, sampler: Sampler, tree: TokenTree, logits: Tensor, text: Sequence[int]
    ) -> None:
        super().__init__(sampler, tree, logits, text)
        self._samplers: dict[int, Sampler] = {}
        self._errors: dict[int, Exception] = {}

    def law(self, node: int) -> Tensor:
        """(V,) target probabilities of the token behind a node."""
        try:
            self.scores[node] = self._ask(self._sampler_at(node), node)
            law = self.sampler.law(self.scores[node])
            if bool(law.isnan().any()):  # a softmax over nothing
                raise ValueError("no law: check whether the processors leave any token")
            return law
        except Exception as error:  # whatever a processor throws
            self._errors[node] = error
            return self._no_child(node)

    def settle(self, node: int) -> None:
        """Ask the processors themselves."""
        self.scores[node] = self._ask(self.sampler, node)
        if node in self._errors:
            raise self._errors[node]

    def _sampler_at(self, node: int) -> Sampler:
        if node == 0:
            found = self.sampler.ahead()
        else:
            parent = self.tree.path(node)[-2]
            found = self._samplers[parent]
            if len(self.tree.children(parent)) > 1:
                found = found.ahead()
        self._samplers[node] = found
        return found

    def _no_child(self, node: int) -> Tensor:
        """A law that excludes all drafts."""
        token = 0
        while self.tree.child_with_token(node, token) is not None:
            token += 1
        logits = self.logits[node]
        law = torch.zeros_like(logits, dtype=score_dtype(logits))
        law[token] = 1.0
        return law


def tree_laws(
    sampler: Sampler, tree: TokenTree, logits: Tensor, text: Sequence[int], rule: str
) -> TreeLaws:
    """The laws as a rule of acceptance asks for them; see `TreeLaws` for the others."""
    ahead = rule not in TOP_DOWN and sampler.may_keep_state
    return (LookAhead if ahead else TreeLaws)(sampler, tree, logits, text)
