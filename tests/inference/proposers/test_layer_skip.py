"""Drafts from the target's own layers: lossless, and every node runs every layer once."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

import inference.proposers.layer_skip as layer_skip_module
from drafters import TargetModel
from inference.cache import TreeCache
from inference.generate import plain_generate, speculative_generate
from inference.proposers import RowState
from inference.proposers.layer_skip import LayerSkipProposer, check_split
from inference.sampling import SamplingParams
from inference.static.engine import StaticEngine
from inference.tree import TokenTree
from tests.inference.drafting import (
    GREEDY,
    NO_END,
    PROMPTS,
    SAMPLED,
    WARPED,
    Recording,
    assert_allowed,
    assert_laws_are_fresh,
    counted_rows,
    decode,
    decode_alone,
    p_value_of_rejection,
    plain,
)
from tests.tiny import tiny_target
from tests.zoo import float64_throughout, zoo_target

KINDS: dict[str, dict[str, Any]] = {
    "chain": {"exit_layer": 4},
    "tree": {"exit_layer": 4, "width": 3},
    "pruned tree": {"exit_layer": 4, "width": 3, "depth": 4, "size": 7},
    "subset": {"layers": (0, 1, 3, 5), "width": 2},
    "without the first": {"layers": (1, 2, 3, 4, 5), "width": 2},
}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    """Most layers do little, as in a trained model, so that a draft without them is often right."""
    target = tiny_target()
    for index, layer in enumerate(target.model.model.layers):
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            weight.data *= 0.6 ** abs(index - 1)
    return target


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rule", "sampling"), [("match", GREEDY), ("coupled", SAMPLED), ("coupled", WARPED)]
)
def test_output_is_plain_decodings_own(
    target: TargetModel, kind: str, rule: str, sampling: SamplingParams
) -> None:
    """In a batch of unequal prompts and lengths, and alone."""
    expected = plain(target, sampling)
    proposer = LayerSkipProposer(**KINDS[kind])
    batch = decode(target, proposer, sampling=sampling, rule=rule)
    assert batch.sequences == expected
    accepted, drafted = batch.stats.num_accepted_tokens, batch.stats.num_draft_tokens
    assert 5 < accepted < drafted
    assert decode_alone(target, proposer, 1, sampling=sampling, rule=rule) == expected[1]


@pytest.mark.parametrize(
    "name", ["gemma2", "gemma3_text", "gpt_oss", "gpt_neox", "mistral", "qwen3_moe", "gpt2"]
)
def test_other_architectures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed windows (8) that the texts leave, layers that return tuples, mixtures of experts."""
    float64_throughout(monkeypatch)
    target = zoo_target(name)
    expected = plain(target, SAMPLED)
    for options in ({"exit_layer": 3, "width": 2}, {"layers": (0, 1, 3)}):
        result = decode(target, LayerSkipProposer(**options), sampling=SAMPLED, rule="coupled")
        assert result.sequences == expected
        assert result.stats.num_accepted_tokens > 10


@pytest.mark.parametrize("least", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_static_engines_draft_the_same_trees(target: TargetModel, kind: str, least: int) -> None:
    """Keys and values of all layers are one tensor there, single rows may be filled up."""
    engine = StaticEngine(target)
    engine.least_rows = least
    trees = []
    for other in (None, engine):
        options: dict[str, Any] = {"sampling": SAMPLED, "rule": "coupled", "record_rounds": True}
        found = decode(target, LayerSkipProposer(**KINDS[kind]), engine=other, **options)
        assert found.sequences == plain(target, SAMPLED)
        trees.append([(done.tree.tokens.tolist(), done.accepted) for done in found.rounds])
    assert trees[0] == trees[1]


@pytest.mark.parametrize("layers", [(1, 3), (2,)])
def test_static_engines_may_be_the_first_to_run_some_layers(layers: tuple[int, ...]) -> None:
    """Nothing has asked this target yet what its layers return."""
    fresh = tiny_target()
    found = decode(fresh, LayerSkipProposer(layers=layers), engine=StaticEngine(fresh))
    assert found.sequences == plain(fresh, GREEDY)


@pytest.mark.slow
def test_compiled_parts_of_a_target_are_made_once(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs of some layers and of others are told apart, and none is made twice."""
    torch._dynamo.reset()
    counter, compile_ = torch._dynamo.testing.CompileCounter(), torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, **options: compile_(f, backend=counter, **options)
    )
    engine, made = StaticEngine(target, compiled=True), []
    for _ in range(2):
        for kind in ("chain", "subset", "without the first"):
            found = decode(target, LayerSkipProposer(**KINDS[kind]), engine=engine)
            assert found.sequences == plain(target, GREEDY)
        made.append(counter.frame_count)
    assert made[0] == made[1]


@pytest.mark.parametrize("kind", KINDS)
def test_every_node_runs_every_layer_once(target: TargetModel, kind: str) -> None:
    """Layers below the first skipped one while drafting, the others in verification. With a subset
    those above it run once more on what was expanded, as layers of the shortened model.
    """
    options = {**KINDS[kind], "size": 40}  # nothing is pruned
    proposer = LayerSkipProposer(**options)
    first = proposer.first_skipped
    again = [layer for layer in proposer.layers if layer > first]
    accepted = 0
    for prompt in PROMPTS:
        settings: dict[str, Any] = {"max_new_tokens": 20, "stop": NO_END}
        speculative_generate(target, proposer, [prompt], **settings)  # probes are over
        with counted_rows(target) as counts:
            result = speculative_generate(
                target, proposer, [prompt], record_rounds=True, **settings
            )
        trees = [done.tree for done in result.rounds]
        once = len(prompt) + sum(tree.num_nodes for tree in trees)
        expanded = sum(
            len({0} | {node for node in range(tree.num_nodes) if tree.children(node)})
            for tree in trees
        )
        expected = [once + (layer in again) * expanded for layer in range(target.num_layers)]
        assert counts == expected
        accepted += result.stats.num_accepted_tokens
    assert accepted > 5


def test_pruned_nodes_cost_the_shared_layers_only(target: TargetModel) -> None:
    proposer = LayerSkipProposer(**KINDS["pruned tree"])
    decode(target, proposer)
    with counted_rows(target) as counts:
        result = speculative_generate(
            target, proposer, PROMPTS[:1], max_new_tokens=25, record_rounds=True, stop=NO_END
        )
    nodes = sum(done.tree.num_nodes for done in result.rounds)
    assert counts[4:] == [len(PROMPTS[0]) + nodes] * 2
    assert counts[0] > counts[4] and counts[:4] == [counts[0]] * 4
    assert max(done.tree.num_nodes for done in result.rounds) == 7


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_an_early_exit_of_the_text(target: TargetModel, kind: str) -> None:
    """After any rounds of acceptance the draft law at every node is what the shortened model gives
    when it runs the path behind a cache in which the whole target ran the text.
    """
    proposer = LayerSkipProposer(**KINDS[kind])
    recording = Recording(proposer)
    result = decode(target, recording, sampling=SAMPLED, rule="rejection")
    assert result.stats.num_accepted_tokens > 10

    def shortened(committed: int, text: list[int]) -> Tensor:
        cache = TreeCache(target.model.config)
        target.forward(torch.tensor([text[:committed]]), cache=cache)
        cache.commit([range(committed)])
        last = torch.tensor([text[committed:]])
        return target.forward(last, cache=cache, run_layers=proposer.layers).logits[0, -1]

    for one in recording.drafted:
        fresh = functools.partial(shortened, len(one.tokens) - 1)
        assert_laws_are_fresh([one], fresh, at_least=min(one.max_depth, 1))


def test_an_early_exit_needs_nothing_of_the_layers_above(target: TargetModel) -> None:
    recording = Recording(LayerSkipProposer(4))
    decode(target, recording, sampling=SAMPLED, rule="rejection")

    def early_exit(text: list[int]) -> Tensor:
        return target.forward(torch.tensor([text]), run_layers=range(4)).logits[0, -1]

    assert_laws_are_fresh(recording.drafted, early_exit)


def test_nearly_all_layers_are_nearly_always_right() -> None:
    target = tiny_target()
    last = target.model.model.layers[-1]
    for weight in (last.self_attn.o_proj.weight, last.mlp.down_proj.weight):
        weight.data *= 1e-3
    result = decode(target, LayerSkipProposer(target.num_layers - 1))
    assert result.sequences == plain(target, GREEDY)
    assert result.stats.num_accepted_tokens >= 0.9 * result.stats.num_draft_tokens


def test_rejection_keeps_the_targets_law(target: TargetModel) -> None:
    sampling = SamplingParams(0.8, seed=100)
    for draws, width in (("all", 3), ("one", 2)):
        proposer = LayerSkipProposer(4, width=width, depth=2, draws=draws)
        assert p_value_of_rejection(target, proposer, sampling, 400) > 1e-3


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("block", {"width": 1}),
        ("rejection", {"width": 3}),
        ("rejection", {"width": 3, "draws": "one"}),
    ],
)
def test_rejection_emits_allowed_tokens_whatever_the_batch(
    target: TargetModel, rule: str, options: dict[str, Any]
) -> None:
    """Trees of one batch differ in kind, size and depth: greedy rows, truncated laws, near ends."""
    samplings = [WARPED, GREEDY, SAMPLED]
    proposer = Recording(LayerSkipProposer(4, **options))
    together = decode(target, proposer, sampling=samplings, rule=rule).sequences
    assert len({one.tree.num_nodes for one in proposer.drafted}) > 1
    for row, (new, sampling) in enumerate(zip(together, samplings, strict=True)):
        assert decode_alone(target, proposer, row, sampling=sampling, rule=rule) == new
        assert_allowed(target, row, new, sampling)


@pytest.mark.parametrize("bug", ["rows not moved", "no revert", "stream of other rows"])
def test_planted_bugs_are_seen(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    if bug == "rows not moved":
        arrange = TreeCache.arrange

        def kept(cache: TreeCache, rows: Sequence[Sequence[int]], below: int) -> None:
            arrange(cache, [range(len(some)) for some in rows], below)

        monkeypatch.setattr(TreeCache, "arrange", kept)
    elif bug == "no revert":
        monkeypatch.setattr(TreeCache, "revert", lambda self, first_layer=0: None)
    else:
        gather = layer_skip_module.gather_rows
        monkeypatch.setattr(
            layer_skip_module, "gather_rows", lambda hidden, rows: gather(hidden.roll(1, 1), rows)
        )
    try:
        found = decode(target, LayerSkipProposer(**KINDS["subset"])).sequences
    except (RuntimeError, ValueError, AssertionError):
        return
    assert found != plain(target, GREEDY)


def test_drafts_do_not_overrun_the_end(target: TargetModel) -> None:
    recording = Recording(LayerSkipProposer(4, depth=4))
    decode(target, recording)
    depths = [(int(one.tree.depths.max()), one.max_depth) for one in recording.drafted]
    assert all(depth == min(4, room) for depth, room in depths)
    assert len({depth for depth, _ in depths}) > 2, "ends at several distances"


def test_the_last_position_of_the_target_can_be_reached(target: TargetModel) -> None:
    """Learned positions have no room for drafts beyond them."""
    other = zoo_target("gpt2", n_positions=512, max_position_embeddings=512)
    prompt = [5 + place % 80 for place in range(other.max_length - 9)]
    options: dict[str, Any] = {"max_new_tokens": [9, 3], "stop": NO_END}
    prompts = [prompt, PROMPTS[0]]
    expected = plain_generate(other, prompts, **options).sequences
    proposer = LayerSkipProposer(3, width=2, depth=4)
    assert speculative_generate(other, proposer, prompts, **options).sequences == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either exit_layer or layers"),
        ({"exit_layer": 2, "layers": [0, 1]}, "either exit_layer or layers"),
        ({"exit_layer": 0}, "exit_layer must be at least 1, got 0"),
        ({"layers": []}, "different indices from 0, in order"),
        ({"layers": [1, 0]}, "different indices from 0, in order"),
        ({"layers": [1, 1]}, "different indices from 0, in order"),
        ({"layers": [-1, 2]}, "different indices from 0, in order"),
        ({"exit_layer": 2, "width": 0}, "top_k >= 1"),
    ],
)
def test_layers_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LayerSkipProposer(**options)


@pytest.mark.parametrize("options", [{"exit_layer": 6}, {"layers": range(6)}, {"layers": [0, 6]}])
def test_layers_that_the_target_does_not_have(target: TargetModel, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="exit_layer between 1 and 5"):
        decode(target, LayerSkipProposer(**options))


def test_a_target_whose_layers_share_more_than_the_stream_is_refused(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_split(target, 3)
    forward = TargetModel.forward

    def forgetful(self: TargetModel, ids: Tensor, **options: Any) -> Any:
        if options.get("entering") is not None:
            options["entering"] = options["entering"] * 1.1 + 0.1
        return forward(self, ids, **options)

    monkeypatch.setattr(TargetModel, "forward", forgetful)
    with pytest.raises(ValueError, match="cannot be split at layer 4"):
        decode(target, LayerSkipProposer(4))


def test_nothing_is_kept_after_the_end(target: TargetModel) -> None:
    """The target's cache can go as soon as the last sequence has ended."""

    class Watched(LayerSkipProposer):
        def propose(self, states: Sequence[RowState | None]) -> list[TokenTree | None]:
            assert self._session is not None
            return super().propose(states)

    proposer = Watched(4)
    decode(target, proposer)
    assert proposer._session is None and proposer.resume() is None
