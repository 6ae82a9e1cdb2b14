"""Bugs that decoders have had, or could have, each planted by a small patch.

A mutant names the detector of `tests.inference.detectors` that catches it. A bug that changes what
is drafted and nothing else costs speed but leaves the output alone: its detector looks at drafts.

Letters: N tree nodes, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import inference.attention as attention_module
import inference.decoding as decoding_module
import inference.generate as generate_module
import inference.processors as processors_module
import inference.proposers.growth as growth_module
import inference.proposers.layer_skip as layer_skip_module
import inference.rules.block as block_module
import inference.sampling as sampling_module
import inference.verify as verify_module
from drafters import TargetModel
from inference.cache import TreeCache, TreeLayer
from inference.decoding import Text
from inference.engine import EagerEngine
from inference.processors import Sampler
from inference.proposers.draft_cache import DraftCache
from inference.proposers.growth import Growth, StaticGrowth
from inference.proposers.levels import Branches
from inference.rules.acceptance import KeyedCoins, Verdict
from inference.sampling import Stream, uniform_at
from inference.stopping import Stopper
from inference.tree import TokenTree, ancestor_mask
from tests.inference import detectors

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutant:
    """A planted bug.

    Attributes:
        plant: patches the decoder.
        caught_by: detector that must fail.
        shows: what the bug does.
    """

    plant: Plant
    caught_by: Callable[[], None]
    shows: str

    @property
    def name(self) -> str:
        """Of the patch."""
        return self.plant.__name__


MUTANTS: list[Mutant] = []


def mutant(caught_by: Callable[[], None], shows: str) -> Callable[[Plant], Plant]:
    """Register a bug."""

    def register(plant: Plant) -> Plant:
        MUTANTS.append(Mutant(plant, caught_by, shows))
        return plant

    return register


# Positions --------------------------------------------------------------------------------------


def shift_positions(patch: pytest.MonkeyPatch, wrong: Callable[[Tensor], Tensor]) -> None:
    """Other position ids (B, N) for the rows of trees; prompts keep theirs."""
    forward = TargetModel.forward

    def shifted(self: TargetModel, ids: Tensor, **options: Any) -> Any:
        cache = options.get("cache")
        if isinstance(cache, TreeCache) and max(cache.lengths):
            options["position_ids"] = wrong(options["position_ids"])
        return forward(self, ids, **options)

    patch.setattr(TargetModel, "forward", shifted)


@mutant(detectors.tokens_alone, "every tree row one position too far (of all rows: no difference)")
def position_off_by_one(patch: pytest.MonkeyPatch) -> None:
    shift_positions(patch, lambda positions: positions + 1)


@mutant(detectors.tokens_alone, "all nodes at the root's position")
def depth_not_added(patch: pytest.MonkeyPatch) -> None:
    shift_positions(patch, lambda positions: positions[:, :1].expand_as(positions))


@mutant(detectors.tokens_alone, "positions by row instead of depth: right on chains only")
def position_by_row(patch: pytest.MonkeyPatch) -> None:
    shift_positions(
        patch, lambda positions: positions[:, :1] + torch.arange(positions.shape[1])[None]
    )


# Cache ------------------------------------------------------------------------------------------


def change_commit(
    patch: pytest.MonkeyPatch,
    wrong: Callable[[TreeCache, Sequence[Sequence[int]]], list[Sequence[int]]],
) -> None:
    """Other rows are kept of a tree; prompts are kept whole."""
    commit = TreeCache.commit

    def changed(self: TreeCache, paths: Sequence[Sequence[int]]) -> None:
        commit(self, wrong(self, paths) if max(self.lengths) else paths)

    patch.setattr(TreeCache, "commit", changed)


@mutant(detectors.tokens_alone, "rejected rows stay in the cache: the rollback is forgotten")
def rollback_forgotten(patch: pytest.MonkeyPatch) -> None:
    change_commit(patch, lambda cache, paths: [range(cache.layers[0].pending) for _ in paths])


@mutant(detectors.tokens_alone, "as many rows as were accepted, but the first ones")
def first_rows_committed(patch: pytest.MonkeyPatch) -> None:
    change_commit(patch, lambda cache, paths: [range(len(path)) for path in paths])


@mutant(detectors.tokens_alone, "the last accepted row is not committed")
def commit_one_short(patch: pytest.MonkeyPatch) -> None:
    change_commit(patch, lambda cache, paths: [path[:-1] or path for path in paths])


@mutant(detectors.tokens_alone, "rows are moved from the last to the first, over sources")
def moves_overwrite_their_sources(patch: pytest.MonkeyPatch) -> None:
    def move(self: TreeLayer, sequences: Tensor, sources: Tensor, targets: Tensor) -> None:
        for buffer in (self.keys, self.values):
            for row, source, to in reversed(list(zip(sequences, sources, targets, strict=True))):
                buffer[row, :, to] = buffer[row, :, source]

    patch.setattr(TreeLayer, "move", move)


@mutant(detectors.tokens_in_a_batch, "the rows that stay are in another order than their texts")
def rows_swapped_after_one_left(patch: pytest.MonkeyPatch) -> None:
    select = TreeCache.select
    patch.setattr(TreeCache, "select", lambda self, rows: select(self, rows[::-1]))


@mutant(detectors.tokens_behind_a_window, "a token is cut off that the window still sees")
def window_trimmed_too_far(patch: pytest.MonkeyPatch) -> None:
    trim = TreeLayer.trim

    def short(self: TreeLayer) -> None:
        if self.window is not None:
            self.window -= 1
            trim(self)
            self.window += 1

    patch.setattr(TreeLayer, "trim", short)


# Masks ------------------------------------------------------------------------------------------


@mutant(detectors.tokens_alone, "nodes see all earlier nodes, siblings and their children too")
def siblings_leak(patch: pytest.MonkeyPatch) -> None:
    def causal(self: TokenTree) -> Tensor:
        return torch.ones(self.num_nodes, self.num_nodes, dtype=torch.bool).tril()

    patch.setattr(TokenTree, "ancestor_mask", causal)


@mutant(detectors.tokens_alone, "nodes do not see their grandparent")
def grandparent_unseen(patch: pytest.MonkeyPatch) -> None:
    def masked(self: TokenTree) -> Tensor:
        seen = ancestor_mask(self.parents)
        for node in range(self.num_nodes):
            above = self.path(node)
            if len(above) > 2:
                seen[node, above[-3]] = False
        return seen

    patch.setattr(TokenTree, "ancestor_mask", masked)


@mutant(detectors.tokens_in_a_batch, "stale and padding rows behind a short sequence are seen")
def padding_seen(patch: pytest.MonkeyPatch) -> None:
    mask_of = attention_module.row_mask

    def leaky(starts: Any, ancestors: Any, columns: int, pending: int) -> Tensor:
        mask = mask_of(starts, ancestors, columns, pending)
        for row, (start, some) in enumerate(zip(starts, ancestors, strict=True)):
            mask[row, 0, : len(some), start + some.shape[1] :] = True
        return mask

    patch.setattr(attention_module, "row_mask", leaky)


@mutant(detectors.tokens_in_a_batch, "each row is masked by the length of another")
def lengths_swapped_in_the_mask(patch: pytest.MonkeyPatch) -> None:
    mask_of = attention_module.row_mask
    patch.setattr(attention_module, "row_mask", lambda starts, *rest: mask_of(starts[::-1], *rest))


@mutant(detectors.tokens_behind_a_window, "the window is one token too wide")
def window_off_by_one(patch: pytest.MonkeyPatch) -> None:
    narrow = attention_module.narrow

    def wide(mask: Any, starts: Any, depths: Any, pending: int, window: int) -> None:
        narrow(mask, starts, depths, pending, window + 1)

    patch.setattr(attention_module, "narrow", wide)


@mutant(detectors.tokens_behind_a_window, "the window counts rows instead of positions on the path")
def window_counts_rows(patch: pytest.MonkeyPatch) -> None:
    narrow = attention_module.narrow

    def by_row(mask: Any, starts: Any, depths: Any, pending: int, window: int) -> None:
        narrow(mask, starts, [torch.arange(len(depth)) for depth in depths], pending, window)

    patch.setattr(attention_module, "narrow", by_row)


# Verification -----------------------------------------------------------------------------------


@mutant(detectors.tokens_alone, "a node's children are judged by the law of the node above it")
def law_of_the_parent(patch: pytest.MonkeyPatch) -> None:
    verify = decoding_module.verify

    def wrong(tree: TokenTree, law: Any, *rest: Any, **options: Any) -> Verdict:
        above = [max(parent, 0) for parent in tree.parents.tolist()]
        known: dict[int, Tensor] = {}

        def law_above(node: int) -> Tensor:
            known[node] = law(node)
            return known.get(above[node], known[node])

        return verify(tree, law_above, *rest, **{**options, "draw": None})

    patch.setattr(decoding_module, "verify", wrong)


@mutant(detectors.law_of_rejection, "too small a residual: later siblings are rejected too often")
def residual_not_renormalised(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verify_module, "residual_law", lambda owed, draft: (owed - draft).clamp(min=0.0))


@mutant(detectors.law_of_rejection, "after a rejection the token comes from the target's law")
def residual_not_subtracted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verify_module, "residual_law", lambda owed, draft: owed)


@mutant(detectors.law_of_rejection, "the law of a second draw still holds the first")
def drawn_siblings_not_taken_out(patch: pytest.MonkeyPatch) -> None:
    def with_replacement(tree: TokenTree, node: int, like: Tensor) -> Any:
        for child in tree.children(node):
            yield child, tree.draft_probs[node].to(like)

    patch.setattr(verify_module, "proposals", with_replacement)


@mutant(detectors.law_of_mixed_trees, "the chosen children of a node are taken for drawn ones")
def chosen_taken_for_drawn(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TokenTree, "is_drawn", lambda self, node: node > 0)


@mutant(detectors.law_of_block, "each draft of a chain is weighed without those before it")
def block_weight_not_carried(patch: pytest.MonkeyPatch) -> None:
    accept = block_module.accept_probability

    def alone(owed: Tensor, draft: Tensor, token: int) -> float:
        return accept(owed / owed.sum(), draft, token)

    patch.setattr(block_module, "accept_probability", alone)


@mutant(detectors.law_of_block, "the residual behind a chain cut short forgets the weight")
def block_residual_without_weight(patch: pytest.MonkeyPatch) -> None:
    residual = block_module.residual_law
    patch.setattr(
        block_module, "residual_law", lambda owed, draft: residual(owed / owed.sum(), draft)
    )


# Warpers and processors -------------------------------------------------------------------------


def unwarped(params: Any) -> Any:
    """The same temperature and nothing else."""
    return sampling_module.SamplingParams(params.temperature, seed=params.seed)


@mutant(detectors.tokens_alone, "top-k and top-p apply to drafts and not to the target")
def target_not_warped(patch: pytest.MonkeyPatch) -> None:
    warp = processors_module.warp
    patch.setattr(processors_module, "warp", lambda logits, params: warp(logits, unwarped(params)))


@mutant(detectors.rejection_stays_in_the_nucleus, "drafts are accepted by the unwarped law")
def warper_after_the_ratio(patch: pytest.MonkeyPatch) -> None:
    verify, draw = Text.verify, KeyedCoins.draw
    warp = processors_module.warp

    def plain_ratio(self: Text, *args: Any) -> Verdict:
        params = self.sampler.params
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(
                processors_module, "warp", lambda logits, params: warp(logits, unwarped(params))
            )
            inner.setattr(
                KeyedCoins,
                "draw",
                lambda coins, probs, position: draw(
                    coins, warp(probs.log(), params).softmax(-1), position
                ),
            )
            return verify(self, *args)

    patch.setattr(Text, "verify", plain_ratio)


@mutant(detectors.law_of_grown_trees, "the recorded draft law is the one before the warpers")
def unwarped_law_recorded(patch: pytest.MonkeyPatch) -> None:
    draw_children = Growth._draw_children

    def recorded(self: Growth, frontier: Tensor, logits: Tensor) -> None:
        draw_children(self, frontier, logits)
        for node, row in zip(frontier.tolist(), logits, strict=True):
            if node in self.laws:
                self.laws[node] = (row / self.law.temperature).softmax(-1)

    patch.setattr(Growth, "_draw_children", recorded)


@mutant(detectors.law_of_grown_trees, "of more draws the likeliest are kept")
def drawn_and_then_dropped(patch: pytest.MonkeyPatch) -> None:
    choose = Growth._choose

    def dropping(self: Growth, node: int, law: Tensor, count: int) -> tuple[Tensor, Tensor]:
        chosen, drawn_from = choose(self, node, law, count + 1)
        order = drawn_from[chosen].sort(descending=True, stable=True).indices
        return chosen[order[:count]], drawn_from

    patch.setattr(Growth, "_choose", dropping)


@mutant(detectors.law_of_static_trees, "a place stays empty where what was drawn is unlikely")
def static_place_left_empty(patch: pytest.MonkeyPatch) -> None:
    choose = StaticGrowth._choose

    def dropping(self: StaticGrowth, node: int, law: Tensor, count: int) -> tuple[Tensor, Tensor]:
        chosen, drawn_from = choose(self, node, law, count)
        return chosen[law[chosen] > 0.3], drawn_from

    patch.setattr(StaticGrowth, "_choose", dropping)


@mutant(detectors.law_of_confident_trees, "confidence cuts the drafts themselves, once drawn")
def confidence_after_the_draw(patch: pytest.MonkeyPatch) -> None:
    worth, choose = Growth._worth_children, Growth._choose

    def all_of_them(self: Growth, frontier: Tensor, acceptance: Tensor | None) -> Tensor | slice:
        worth(self, frontier, acceptance)
        return slice(None)

    def late(self: Growth, node: int, law: Tensor, count: int) -> tuple[Tensor, Tensor]:
        chosen, drawn_from = choose(self, node, law, count)
        sure = self.survival.get(node, 1.0) * law[chosen] >= self.options.min_survival
        return chosen[sure], drawn_from

    patch.setattr(Growth, "_worth_children", all_of_them)
    patch.setattr(Growth, "_choose", late)


@mutant(detectors.law_of_grown_trees, "a reduced vocabulary's law is left at its own columns")
def draft_law_not_scattered(patch: pytest.MonkeyPatch) -> None:
    drawn_tree = Growth._drawn_tree

    def unscattered(self: Growth) -> TokenTree:
        ids, self.draft_vocab = self.draft_vocab, torch.arange(len(self.draft_vocab))
        try:
            return drawn_tree(self)
        finally:
            self.draft_vocab = ids

    patch.setattr(Growth, "_drawn_tree", unscattered)


@mutant(detectors.scores_are_plain, "penalties look at the committed text, not at a node's path")
def processors_see_the_root_only(patch: pytest.MonkeyPatch) -> None:
    verify, scores = Text.verify, Sampler.scores

    def noted(self: Text, *args: Any) -> Verdict:
        self.sampler.committed = len(self.tokens)  # type: ignore[attr-defined]
        return verify(self, *args)

    def at_the_root(self: Sampler, logits: Tensor, text: Sequence[int]) -> Tensor:
        return scores(self, logits, text[: getattr(self, "committed", None)])

    patch.setattr(Text, "verify", noted)
    patch.setattr(Sampler, "scores", at_the_root)


@mutant(detectors.scores_are_plain, "the scores that are kept are those before the processors")
def raw_scores_kept(patch: pytest.MonkeyPatch) -> None:
    record = Text.record
    patch.setattr(
        Text, "record", lambda self, token, scores, logits: record(self, token, logits, logits)
    )


# Noise ------------------------------------------------------------------------------------------


@mutant(detectors.noise_is_used_once, "a rejection and the token drawn after it share a number")
def coin_from_the_draws(patch: pytest.MonkeyPatch) -> None:
    def accept(self: KeyedCoins, probability: float, position: int, index: int) -> bool:
        coin = uniform_at(self.seed, Stream.RESIDUAL, position, torch.tensor(index))
        return float(coin) < probability

    patch.setattr(KeyedCoins, "accept", accept)


@mutant(detectors.noise_is_used_once, "siblings share one coin")
def one_coin_for_all_siblings(patch: pytest.MonkeyPatch) -> None:
    accept = KeyedCoins.accept
    patch.setattr(
        KeyedCoins, "accept", lambda self, chance, position, _: accept(self, chance, position, 0)
    )


@mutant(detectors.noise_is_used_once, "every position has the same noise")
def same_noise_everywhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        sampling_module,
        "uniform_at",
        lambda seed, stream, position, index: uniform_at(seed, stream, 0, index),
    )


@mutant(detectors.noise_is_used_once, "drafts are drawn with the noise of the verifier's own draws")
def draft_noise_is_the_verifiers(patch: pytest.MonkeyPatch) -> None:
    gumbel = growth_module.gumbel

    def shared(seed: int, place: int, size: int, device: Any, stream: int) -> Tensor:
        return gumbel(seed, (place >> 20) + 1, size, device, Stream.RESIDUAL)

    patch.setattr(growth_module, "gumbel", shared)


@mutant(detectors.noise_is_used_once, "block's coins belong to positions, which come in two rounds")
def block_coins_by_position(patch: pytest.MonkeyPatch) -> None:
    accept = KeyedCoins.accept

    def by_position(self: KeyedCoins, chance: float, position: int, index: int) -> bool:
        return accept(self, chance, position + index, 0)

    def block(tree: TokenTree, law: Any, *rest: Any) -> Verdict:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(KeyedCoins, "accept", by_position)
            return block_module.block(tree, law, *rest)

    patch.setattr(verify_module, "block", block)


@mutant(detectors.tokens_in_a_batch, "all rows draw with the seed of the first")
def seed_of_the_first_row(patch: pytest.MonkeyPatch) -> None:
    make = generate_module.new_texts

    def same_seed(*args: Any) -> list[Text]:
        made = make(*args)
        seed = made[0].sampler.params.seed
        for text in made:
            text.sampler.params = replace(text.sampler.params, seed=seed)
        return made

    patch.setattr(generate_module, "new_texts", same_seed)


# Ends -------------------------------------------------------------------------------------------


@mutant(detectors.ends_inside_runs, "an end of text inside an accepted run is passed over")
def end_inside_a_run_missed(patch: pytest.MonkeyPatch) -> None:
    verify = decoding_module.verify
    patch.setattr(
        decoding_module, "verify", lambda *args, ended, **options: verify(*args, **options)
    )


@mutant(detectors.ends_inside_runs, "one token more than allowed")
def length_overrun(patch: pytest.MonkeyPatch) -> None:
    start = Stopper.__init__

    def longer(self: Stopper, stop: Any, prompt_length: int, new: int, target: Any) -> None:
        start(self, stop, prompt_length, new + 1, target)

    patch.setattr(Stopper, "__init__", longer)


# What proposers are given and keep --------------------------------------------------------------


@mutant(detectors.states_are_the_texts, "features of the tree's first rows, rejected or not")
def features_of_rejected_rows(patch: pytest.MonkeyPatch) -> None:
    append, hand_over = EagerEngine.append, Text.hand_over
    last: list[Any] = []

    def noted(*args: Any, **options: Any) -> Any:
        last[:] = [append(*args, **options)]
        return last[0]

    def first_rows(self: Text, features: Tensor, hidden: Tensor) -> None:
        if last and len(last[0].features) == 1:  # of a round, and of one sequence
            features = last[0].features[0, : len(features)]
        hand_over(self, features, hidden)

    patch.setattr(EagerEngine, "append", noted)
    patch.setattr(Text, "hand_over", first_rows)


@mutant(detectors.states_are_the_texts, "hidden states of one position earlier")
def hidden_states_one_off(patch: pytest.MonkeyPatch) -> None:
    hand_over = Text.hand_over
    patch.setattr(
        Text,
        "hand_over",
        lambda self, features, hidden: hand_over(self, features, hidden.roll(1, 0)),
    )


@mutant(
    detectors.drafts_are_fresh, "rows of the last tree stay in the head's cache; output is equal"
)
def draft_rows_not_cropped(patch: pytest.MonkeyPatch) -> None:
    begin_round, extend = DraftCache.begin_round, DraftCache.extend

    def uncropped(self: DraftCache) -> None:
        self.left = [layer.tail for layer in self._layers]  # type: ignore[attr-defined]
        begin_round(self)

    def stale(self: DraftCache, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own, left = self._layers[layer], self.left  # type: ignore[attr-defined]
        kept, left[layer] = min(left[layer], k.shape[2]), 0
        if kept:
            rows = slice(own.length, own.length + kept)
            k = torch.cat([own._keys[:, :, rows], k[:, :, kept:]], dim=2)  # type: ignore[index]
            v = torch.cat([own._values[:, :, rows], v[:, :, kept:]], dim=2)  # type: ignore[index]
        return extend(self, layer, q, k, v)

    patch.setattr(DraftCache, "begin_round", uncropped)
    patch.setattr(DraftCache, "extend", stale)


@mutant(
    detectors.draft_model_is_fresh, "the draft model keeps rows of rejected drafts; output equal"
)
def draft_model_keeps_first_rows(patch: pytest.MonkeyPatch) -> None:
    spelled = Branches.spelled
    patch.setattr(Branches, "spelled", lambda self, tokens: list(range(len(spelled(self, tokens)))))


@mutant(detectors.tokens_with_skipped_layers, "verification goes on from rows in drafting's order")
def resumed_in_drafting_order(patch: pytest.MonkeyPatch) -> None:
    gather = layer_skip_module.gather_rows
    patch.setattr(
        layer_skip_module,
        "gather_rows",
        lambda hidden, rows: gather(hidden, [range(len(some)) for some in rows]),
    )


@mutant(detectors.tokens_with_skipped_layers, "the lower layers' rows stay in drafting's order")
def lower_rows_not_arranged(patch: pytest.MonkeyPatch) -> None:
    arrange = TreeCache.arrange
    patch.setattr(
        TreeCache,
        "arrange",
        lambda self, rows, below: arrange(self, [range(len(some)) for some in rows], below),
    )
