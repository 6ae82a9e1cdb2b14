"""Compact checks of the decoder, each of which must pass, and fail on some planted bugs.

A detector takes nothing and raises AssertionError or ValueError. Plain decoding's texts are
computed once, before anything is planted (`prepare`).

Letters: V vocabulary, B sequences.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from unittest import mock

import torch
from torch import Tensor

import inference.cache as cache_module
import inference.proposers.growth as growth_module
import inference.sampling as sampling_module
from drafters import TargetModel, build_drafter
from inference.engine import EagerEngine
from inference.generate import plain_generate, speculative_generate
from inference.proposers import Proposer, RowState, SequentialProposer, Session, TreeOptions
from inference.proposers.draft_model import DraftModelProposer
from inference.proposers.growth import new_tree
from inference.proposers.layer_skip import LayerSkipProposer
from inference.rules.acceptance import Coins, Verdict
from inference.sampling import SamplingParams, Stream, warp
from inference.shapes.static_tree import static_tree
from inference.stopping import Stop
from inference.support import check_tree_support
from inference.tree import Proposal, TokenTree
from inference.verify import verify
from tests.inference.drafting import Recording, assert_laws_are_fresh, noisy_copy
from tests.inference.oracles import (
    EXACT,
    by_depth,
    drafted_trees,
    drawn_trees,
    greedy_draft,
    outcomes,
    prefix_of,
    random_laws,
    random_logits,
    sequence_law,
    total_variation,
    warped,
)
from tests.oracle import NoisyOracle
from tests.tiny import tiny_target
from tests.zoo import zoo_target

PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13], [20] * 11]
LENGTHS = [8, 22, 15]
SAMPLINGS = [
    SamplingParams(1.0, seed=7),
    SamplingParams(1.2, top_k=20, seed=8),
    SamplingParams(0.9, top_p=0.8, seed=9, repetition_penalty=1.3, frequency_penalty=0.5),
]
NO_END = Stop(token_ids=())
GREEDY = SamplingParams()


# What is compared with --------------------------------------------------------------------------


@functools.cache
def target() -> TargetModel:
    return tiny_target(layers=3)


@functools.cache
def sliding_target() -> TargetModel:
    """Every layer sees 8 tokens back."""
    return zoo_target("mistral", num_hidden_layers=2)


@functools.cache
def shallow_target() -> TargetModel:
    """Its later layers hardly change what the first one says, so that skipping them often works."""
    model = tiny_target(layers=3)
    for layer in model.model.model.layers[1:]:
        layer.self_attn.o_proj.weight.data *= 0.3
        layer.mlp.down_proj.weight.data *= 0.3
    return model


TARGETS = {"full": target, "sliding": sliding_target, "shallow": shallow_target}


@functools.cache
def draft_model() -> TargetModel:
    return noisy_copy(target(), lambda: tiny_target(layers=3), 0.04)


@functools.cache
def head() -> SequentialProposer:
    drafter = build_drafter("eagle3", target(), seed=1).double()
    drafter.set_draft_vocab(torch.arange(96))
    return SequentialProposer(drafter.eval(), TreeOptions(12, 4, 3))


@functools.cache
def texts(name: str = "full", greedy: bool = False) -> list[list[int]]:
    """Prompts with what plain decoding makes of them."""
    new = plain_generate(
        TARGETS[name](),
        PROMPTS,
        max_new_tokens=LENGTHS,
        sampling=GREEDY if greedy else SAMPLINGS,
        stop=NO_END,
    ).sequences
    return [prompt + text for prompt, text in zip(PROMPTS, new, strict=True)]


@functools.cache
def plain_scores() -> list[Tensor]:
    return plain_generate(
        target(),
        PROMPTS,
        max_new_tokens=LENGTHS,
        sampling=SAMPLINGS,
        stop=NO_END,
        output_scores=True,
    ).scores


@functools.cache
def prepare() -> None:
    """Compute all of the above."""
    for name, model in TARGETS.items():
        check_tree_support(EagerEngine(model()))
        for greedy in (False, True):
            texts(name, greedy)
    check_tree_support(EagerEngine(draft_model()))
    plain_scores()
    head()


def decode_rows(
    rows: Sequence[int],
    make: Callable[[list[list[int]]], Proposer] = NoisyOracle,
    rule: str = "match",
    name: str = "full",
    greedy: bool = False,
) -> None:
    """Decode some prompts in one call; every text must be plain decoding's.

    Args:
        rows: of `PROMPTS`.
        make: proposer, from the true texts of the rows.
        rule: of acceptance.
        name: of the target.
        greedy: at temperature 0, and otherwise with `SAMPLINGS`.
    """
    truth = [texts(name, greedy)[row] for row in rows]
    result = speculative_generate(
        TARGETS[name](),
        make(truth),
        [PROMPTS[row] for row in rows],
        max_new_tokens=[LENGTHS[row] for row in rows],
        sampling=[GREEDY if greedy else SAMPLINGS[row] for row in rows],
        rule=rule,
        stop=NO_END,
    )
    expected = [text[len(PROMPTS[row]) :] for row, text in zip(rows, truth, strict=True)]
    assert result.sequences == expected, "not plain decoding's text"
    assert result.stats.num_accepted_tokens > 0


# Texts ------------------------------------------------------------------------------------------


def tokens_alone() -> None:
    """One sequence at a time, sampled and greedy: the tokens of plain decoding."""
    for row in range(3):
        decode_rows([row])
    decode_rows([1], rule="rejection", greedy=True)


def tokens_in_a_batch() -> None:
    """Rows with laws, seeds and lengths of their own, of which the first leaves first."""
    decode_rows([0, 1, 2], rule="coupled")


def tokens_behind_a_window() -> None:
    """Layers that see 8 tokens back, with a cache that cuts off what they cannot see."""
    with mock.patch.object(cache_module, "BLOCK", 4):
        decode_rows([0, 1, 2], name="sliding")


def tokens_with_skipped_layers() -> None:
    """Drafts and verification share the target's cache."""
    for skip in (
        LayerSkipProposer(exit_layer=2, width=3, depth=4, size=9),
        LayerSkipProposer(layers=[0, 2], width=3, depth=4, size=9),
    ):
        decode_rows([0, 1, 2], lambda _, skip=skip: skip, rule="coupled", name="shallow")


def ends_inside_runs() -> None:
    """An end of text or a length inside an accepted run cuts it there, and is what it is called."""
    text = texts(greedy=True)[1]
    new = text[len(PROMPTS[1]) :]
    places = [place for place in range(1, 10) if new.index(new[place]) == place]
    for stop, limit in (*((new[place], 20) for place in places), (None, 7), (None, 8)):
        expected = new[:limit] if stop is None else new[: new.index(stop) + 1]
        result = speculative_generate(
            target(),
            NoisyOracle([text], wrong=False),
            [PROMPTS[1]],
            max_new_tokens=limit,
            stop=Stop(token_ids=() if stop is None else (stop,)),
        )
        assert result.sequences == [expected]
        assert result.reasons == ["length" if stop is None else "eos"]
        assert result.stats.num_emitted == len(expected) - 1


def scores_are_plain() -> None:
    """What each token was chosen by, with penalties that look at the text so far."""
    result = speculative_generate(
        target(),
        NoisyOracle(texts()),
        PROMPTS,
        max_new_tokens=LENGTHS,
        sampling=SAMPLINGS,
        stop=NO_END,
        output_scores=True,
    )
    for found, expected in zip(result.scores, plain_scores(), strict=True):
        assert found.shape == expected.shape and torch.allclose(found, expected, atol=1e-9)


def rejection_stays_in_the_nucleus() -> None:
    """With top-k 2 no other token is ever emitted."""
    sampling = SamplingParams(1.5, top_k=2)
    for seed in range(3):
        result = speculative_generate(
            target(),
            head(),
            PROMPTS,
            max_new_tokens=10,
            sampling=SamplingParams(1.5, top_k=2, seed=seed),
            rule="rejection",
            stop=NO_END,
        )
        for prompt, new in zip(PROMPTS, result.sequences, strict=True):
            logits = target().forward(torch.tensor([prompt + new])).logits[0]
            scores = warp(logits[len(prompt) - 1 : -1], sampling)
            assert bool((scores[torch.arange(len(new)), torch.tensor(new)] > -torch.inf).all())


# Laws, by exact enumeration ---------------------------------------------------------------------


def law_of_rejection() -> None:
    """Trees of drawn children, some of which the draft cannot draw or the target excludes."""
    for vocab, widths, hole in ((3, (1, 1), True), (3, (2, 1), False), (5, (3,), True)):
        target_law = random_laws(1, vocab, sharpness=0.8, hole=hole)
        draft = random_laws(2, vocab, sharpness=0.8)
        trees = drawn_trees(draft, by_depth(*widths))
        assert total_variation(trees, target_law, "rejection", len(widths) + 1) < EXACT


def law_of_mixed_trees() -> None:
    """One drawn child beside the likeliest ones."""
    trees = drafted_trees(greedy_draft(random_laws(4, 4), 3, 1), Proposal.MIXED)
    assert total_variation(trees, random_laws(3, 4), "rejection", 3) < EXACT


def law_of_block() -> None:
    """Chains judged as a whole."""
    trees = drawn_trees(random_laws(6, 3), by_depth(1, 1, 1))
    assert total_variation(trees, random_laws(5, 3), "block", 4) < EXACT


DRAFT_VOCAB = [0, 2, 3]


def law_of_grown_trees() -> None:
    """Trees as the proposers grow them, with warpers and a reduced vocabulary: every draw that
    they can make, and every choice of the verifier.
    """
    for options in (TreeOptions(3, 2, 1), TreeOptions(5, 2, 2), TreeOptions(3, 1, 2, draws="one")):
        law_of(options, SamplingParams(0.9, top_k=2))


def law_of_static_trees() -> None:
    """Trees that fill a shape, where a node has more to draw from than it draws."""
    law_of(TreeOptions(shape=static_tree([(0,), (1,), (0, 0)])), SamplingParams(0.9))


def law_of_confident_trees() -> None:
    """Trees, grown and static, in which some nodes get no children by the confidence output."""
    for options in (
        TreeOptions(5, 2, 2, min_survival=0.3),
        TreeOptions(shape=static_tree([(0,), (1,), (0, 0), (1, 0)]), min_survival=0.3),
    ):
        law_of(options, SamplingParams(0.9), lambda path: 0.2 if 2 in path else 0.9)


def law_of(
    options: TreeOptions,
    sampling: SamplingParams,
    chance: Callable[[tuple[int, ...]], float] | None = None,
) -> None:
    """The law of drawn trees of these options, judged by `rejection`, is the target's.

    Args:
        options: of the trees.
        sampling: of target and drafts.
        chance: of acceptance behind a path, by a confidence output; None without one.
    """
    target_law = warped(random_logits(7, 4), sampling)
    draft_logits = random_logits(8, len(DRAFT_VOCAB))
    length = options.longest + 1
    found: Counter[tuple[int, ...]] = Counter()

    def walk(coins: Coins) -> tuple[TokenTree, Verdict]:
        tree = grow(options, sampling, draft_logits, coins, chance)
        laws = {node: target_law(prefix_of(tree, node)) for node in range(tree.num_nodes)}
        return tree, verify(tree, laws.__getitem__, "rejection", 0, 0, coins)

    for probability, (tree, verdict) in outcomes(walk):  # type: ignore[arg-type, misc]
        text = (*(tree.token(node) for node in verdict.path), verdict.next_token)
        for whole, rest in sequence_law(target_law, length - len(text), text).items():
            found[whole] += probability * rest  # type: ignore[assignment]
    expected = sequence_law(target_law, length)
    distance = sum(abs(found[text] - expected.get(text, 0.0)) for text in {*found, *expected})
    assert distance / 2 < EXACT, f"total variation {distance / 2:.3g}"


def grow(
    options: TreeOptions,
    sampling: SamplingParams,
    logits: Callable[[tuple[int, ...]], Tensor],
    coins: Coins,
    chance: Callable[[tuple[int, ...]], float] | None = None,
) -> TokenTree:
    """A tree of `new_tree` whose draws are choices of the coins; see `law_of`."""

    def draw_top(law: Tensor, noise: Tensor, count: int) -> Tensor:
        left, taken = law.clone(), []
        for _ in range(min(count, int((law > 0).sum()))):
            support = left.nonzero().flatten()
            taken.append(int(support[coins.draw(left[support], 0)]))
            left[taken[-1]] = 0.0
        return torch.tensor(taken, dtype=torch.int64)

    state = RowState([0], 1, None, torch.zeros(0, 1), options.longest, sampling)
    columns = torch.tensor(DRAFT_VOCAB)
    growth = new_tree(options, state, "rejection", torch.device("cpu"), 4, columns)
    with mock.patch.object(growth_module, "draw_top", draw_top):
        frontier = torch.zeros(1, dtype=torch.int64)
        while len(frontier):
            so_far = growth.candidates
            paths = [prefix(so_far.tokens, so_far.parents, int(node)) for node in frontier]
            chances = None if chance is None else torch.tensor([chance(path) for path in paths])
            growth.add_children(frontier, torch.stack([logits(path) for path in paths]), chances)
            frontier = growth.frontier() if growth.levels < growth.depth else frontier[:0]
        return growth.finish()[0]


def prefix(tokens: Tensor, parents: Tensor, node: int) -> tuple[int, ...]:
    """The path to a node, the root excluded."""
    path: list[int] = []
    while node > 0:
        path.append(int(tokens[node]))
        node = int(parents[node])
    return tuple(path[::-1])


# Noise ------------------------------------------------------------------------------------------


def noise_is_used_once() -> None:
    """In one text no number of the noise decides two things."""
    for rule, options in (("rejection", TreeOptions(9, 3, 2)), ("block", TreeOptions(4, 3, 1))):
        used: Counter[tuple[int, int, int]] = Counter()
        hashed = sampling_module._hash

        def spy(
            seed: int, stream: int, position: int, index: Tensor, used=used, hashed=hashed
        ) -> Tensor:
            used.update((stream, position, int(i)) for i in index.flatten())
            return hashed(seed, stream, position, index)

        with mock.patch.object(sampling_module, "_hash", spy):
            result = speculative_generate(
                target(),
                DraftModelProposer(draft_model(), options),
                PROMPTS[:1],
                max_new_tokens=60,
                sampling=SamplingParams(1.5, seed=3),
                rule=rule,
                stop=NO_END,
            )
        assert result.stats.num_accepted_tokens > 0
        twice = [key for key, count in used.items() if count > 1]
        assert not twice, f"noise used twice under {rule}: {twice[:5]}"
        assert {stream for stream, *_ in used} == set(Stream), "a stream of noise is missing"


# What proposers are given -----------------------------------------------------------------------


class StateWatcher(NoisyOracle):
    """Compares all that it is handed with a forward over the text."""

    feature_layers = (1, 3)  # type: ignore[assignment]

    def propose(self, states: Sequence[RowState | None]) -> list[TokenTree | None]:
        for state in states:
            if state is None:
                continue
            text = torch.tensor([state.tokens[:-1]])
            out = target().forward(text, feature_layers=self.feature_layers)
            assert out.features is not None and state.features is not None
            new = len(state.hidden)
            assert torch.allclose(state.features, out.features[0, -new:], atol=1e-9)
            assert torch.allclose(state.hidden, out.last_hidden[0, -new:], atol=1e-9)
        return super().propose(states)


def states_are_the_texts() -> None:
    """Features and hidden states of the committed positions, and of no others."""
    decode_rows([1], StateWatcher)
    decode_rows([0, 1, 2], StateWatcher)


class FreshWatcher(Proposer):
    """A head whose every tree must be that of a head that starts anew with the text."""

    def __init__(self) -> None:
        self.inner, self.fresh = head(), SequentialProposer(head().drafter, head().options)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.inner.feature_layers

    def start(self, session: Session) -> None:
        self.session = session
        self.inner.start(session)

    def propose(self, states: Sequence[RowState | None]) -> list[TokenTree | None]:
        trees = self.inner.propose(states)
        for state, tree in zip(states, trees, strict=True):
            if state is None or tree is None:
                continue
            out = target().forward(
                torch.tensor([state.tokens[:-1]]), feature_layers=self.feature_layers
            )
            assert out.features is not None
            whole = RowState(
                state.tokens,
                state.prompt_length,
                out.features[0],
                out.last_hidden[0],
                state.max_depth,
                state.sampling,
            )
            self.fresh.start(self.session)
            (expected,) = self.fresh.propose([whole])
            assert expected is not None
            assert torch.equal(tree.tokens, expected.tokens), "drafts depend on rejected ones"
            assert torch.equal(tree.parents, expected.parents)
        return trees


def drafts_are_fresh() -> None:
    """A head's drafts are a function of the text: nothing of rejected drafts is left behind."""
    decode_rows([0, 1, 2], lambda _: FreshWatcher(), "coupled")


def draft_model_is_fresh() -> None:
    """So are the laws of a draft model with a cache of its own."""
    watched = Recording(DraftModelProposer(draft_model(), TreeOptions(10, 3, 3)))
    speculative_generate(
        target(),
        watched,
        PROMPTS,
        max_new_tokens=LENGTHS,
        sampling=SAMPLINGS[0],
        rule="rejection",
        stop=NO_END,
    )
    assert_laws_are_fresh(
        watched.drafted,
        lambda text: draft_model().forward(torch.tensor([text])).logits[0, -1],
    )


DETECTORS: tuple[Callable[[], None], ...] = (
    tokens_alone,
    tokens_in_a_batch,
    tokens_behind_a_window,
    tokens_with_skipped_layers,
    ends_inside_runs,
    scores_are_plain,
    rejection_stays_in_the_nucleus,
    law_of_rejection,
    law_of_mixed_trees,
    law_of_block,
    law_of_grown_trees,
    law_of_static_trees,
    law_of_confident_trees,
    noise_is_used_once,
    states_are_the_texts,
    drafts_are_fresh,
    draft_model_is_fresh,
)
