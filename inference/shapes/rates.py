"""How often the drafts of a head are right, by depth and rank, and what drafting takes.

A text of the target is gone through once; at every position of it a round is drafted along the
text, by the code that the decoder drafts with.

Letters: K depths, R ranks, T tokens, V target vocabulary, Vd draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from drafters import TargetModel
from inference.proposers import HeadProposer, RowState
from inference.proposers.laws import draft_law, node_scores, proposal_kind
from inference.rules.acceptance import accept_probability, residual_law
from inference.sampling import SamplingParams, Stream, draw_top, gumbel, probabilities
from inference.timing import PhaseTimer
from inference.tree import Proposal

DRAWS = 4
"""Sets of drawn children per position that the rates of drawn drafts are averaged over."""


@dataclass
class Rates:
    """Counts of rounds, or their weights where drafts are drawn.

    Attributes:
        accepted: (K, R) rounds in which the child of this rank was the accepted one.
        reached: (K,) rounds in which the path to this depth was accepted.
        rounds: in all.
        seconds: of drafting K levels, per round that drafted so many.
    """

    accepted: Tensor
    reached: Tensor
    rounds: int = 0
    seconds: list[float] = field(default_factory=list)

    @classmethod
    def none(cls, depths: int, ranks: int) -> "Rates":
        """Before anything is counted."""
        return cls(
            torch.zeros(depths, ranks, dtype=torch.float64),
            torch.zeros(depths, dtype=torch.float64),
        )

    @property
    def table(self) -> Tensor:
        """(K, R) chance that the child of a rank is the accepted one, given that the path to its
        parent is accepted, all of it within R ranks; 0 where that never happened.
        """
        return self.accepted / self.reached.clamp(min=1e-30)[:, None]

    def draft_seconds(self, by_level: bool) -> list[float]:
        """Seconds to draft trees of depth 1 to K.

        Args:
            by_level: each level takes a step of the head; otherwise one pass drafts them all.

        Raises:
            ValueError: no round drafted K levels.
        """
        depths = len(self.reached)
        if not self.seconds:
            raise ValueError(f"no answer is long enough for {depths} drafts: give more new tokens")
        whole = median(self.seconds)
        return [whole * depth / depths if by_level else whole for depth in range(1, depths + 1)]


@torch.no_grad()
def measure_rates(
    rates: Rates,
    target: TargetModel,
    proposer: HeadProposer,
    ids: Sequence[int],
    prompt_length: int,
    sampling: SamplingParams,
    rule: str,
    most: int,
) -> None:
    """Count the rounds of one text.

    Args:
        rates: added to.
        target: the model.
        proposer: of the head; its cache is emptied.
        ids: (T,) prompt and answer of the target.
        prompt_length: tokens that were given, at least 1.
        sampling: that the answer was drawn with, seed included.
        rule: "match", "coupled" or "rejection". Under the last the children are drawn if this
            head's are in the decoder, and its likeliest ones if not.
        most: rounds to stop at, over all texts.

    Raises:
        ValueError: one child of a node is drawn beside its likeliest.
    """
    depths, ranks = rates.accepted.shape
    options, vocab = proposer.options, proposer.drafter.draft_vocab
    law = draft_law(sampling, options.draft_temperature or 1.0)
    kind = proposal_kind(rule, sampling, proposer.draws)
    if kind is Proposal.MIXED:
        raise ValueError("rates are measured of drafts that are all drawn or none: draws all, none")
    out = target.forward(
        torch.tensor([list(ids[:-1])], device=target.device),
        feature_layers=proposer.feature_layers,
        logits_to_keep=0 if kind is Proposal.DENSE else 1,  # 0 keeps all
    )
    proposer.reset(1)
    known = 0
    for root in range(prompt_length, len(ids) - 1):  # the first new token comes from the prefill
        if rates.rounds >= most:
            return
        features = None if out.features is None else out.features[0, known:root]
        hidden = out.last_hidden[0, known:root]
        text, following = list(ids[: root + 1]), list(ids[root + 1 : root + 1 + depths])
        state = RowState(text, prompt_length, features, hidden, len(following), sampling)
        timer = PhaseTimer(target.device)
        with timer.phase("draft"):
            drafts = proposer.forced(state, following[: depths - 1])
        if len(drafts) == depths:
            rates.seconds.append(timer.seconds["draft"])
        known, rates.rounds = root, rates.rounds + 1
        weight = 1.0
        for depth, (logits, token) in enumerate(zip(drafts, following, strict=False)):
            rates.reached[depth] += weight
            place = root + 1 + depth
            if kind is Proposal.DENSE:
                theirs = probabilities(out.logits[0, place - 1], sampling)
                chances, passed = drawn_chances(theirs, logits, vocab, law, ranks, token, place)
                rates.accepted[depth] += weight * chances
                weight *= passed
            else:
                rank = rank_of(logits, token, vocab, law, kind, place, options.sharpness)
                if rank is None or rank >= ranks:
                    break
                rates.accepted[depth, rank] += 1.0


def rank_of(
    logits: Tensor,
    token: int,
    draft_vocab: Tensor | None,
    law: SamplingParams,
    kind: Proposal,
    position: int,
    sharpness: float,
) -> int | None:
    """Rank of a token among a node's children; None if it cannot be one.

    Args:
        logits: (Vd,) of the draft.
        token: absolute id.
        draft_vocab: (Vd,) absolute ids of the columns, or None for all.
        law: sampling parameters of the draft law.
        kind: ONE_HOT or COUPLED.
        position: absolute position of the children.
        sharpness: see `node_scores`.
    """
    ids = torch.arange(len(logits), device=logits.device) if draft_vocab is None else draft_vocab
    scores = node_scores(logits[None], draft_vocab, law, kind, position, sharpness)[0]
    [score] = scores[ids == token].tolist() or [-torch.inf]
    return None if score == -torch.inf else int((scores > score).sum())


def drawn_chances(
    theirs: Tensor,
    logits: Tensor,
    draft_vocab: Tensor | None,
    law: SamplingParams,
    count: int,
    token: int,
    position: int,
) -> tuple[Tensor, float]:
    """What becomes of children drawn at a node of a text that goes on with `token`.

    Args:
        theirs: (V,) target law p.
        logits: (Vd,) of the draft.
        draft_vocab: (Vd,) absolute ids of the columns, or None for all.
        law: sampling parameters of the draft law.
        count: R children.
        token: absolute id.
        position: absolute position of the children.

    Returns:
        (R,) the chance that the j-th is the accepted one; and the chance that the text's token is
        an accepted child, given that it is the token emitted. Both are means over draws of the
        children: the second is P(a child is accepted and is x) / p(x), without bias.
    """
    law_of_drafts = probabilities(logits, law)
    chances, passed = torch.zeros(count, dtype=torch.float64), 0.0
    for turn in range(DRAWS):
        place = (position << 8) + turn
        noise = gumbel(law.seed, place, len(logits), logits.device, Stream.DRAFT)
        drawn = draw_top(law_of_drafts, noise, count)
        ids = drawn if draft_vocab is None else draft_vocab[drawn]
        owed, draft = theirs.double(), torch.zeros_like(theirs, dtype=torch.float64)
        draft[slice(None) if draft_vocab is None else draft_vocab] = law_of_drafts.double()
        left = 1.0
        for rank, child in enumerate(ids.tolist()):
            accepted = left * accept_probability(owed, draft, child)
            chances[rank] += accepted / DRAWS
            if child == token:
                passed += accepted / DRAWS / float(theirs[token])
            left -= accepted
            owed = residual_law(owed, draft)
            draft[child] = 0.0
            if left <= 0.0 or not float(draft.sum()) > 0.0:
                break
            draft = draft / draft.sum()
    return chances, passed
