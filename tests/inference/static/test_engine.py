"""The static engines decode what the eager one does, over every kind of attention."""

import gc

import pytest
import torch
import torch._dynamo.testing
from torch._dynamo.exc import TorchDynamoException

from drafters import TargetModel
from inference.engine import EagerEngine
from inference.engines import ENGINES, build_engine
from inference.generate import plain_generate, speculative_generate
from inference.proposers.ngram import NgramProposer
from inference.sampling import SamplingParams
from inference.static.engine import StaticEngine
from tests.tiny import tiny_target
from tests.zoo import ZOO, float64_throughout, zoo_target

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9], [3]]
REFUSED = ("deepseek_v3", "falcon", "nemotron", "stablelm")
"""Keys and values of unequal size; attention of their own; attention without keyword arguments."""
KINDS = sorted(ZOO.keys() - set(REFUSED))


def trees() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ancestor masks and depths of a branching tree, a chain and a root."""
    branching = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    chain = torch.ones(3, 3, dtype=torch.bool).tril()
    masks = [branching, chain, torch.ones(1, 1, dtype=torch.bool)]
    return [(mask, mask.sum(1) - 1) for mask in masks]


@torch.inference_mode()
def logits(engine: object, rounds: int = 3) -> list[torch.Tensor]:
    """Of the nodes of three trees at once, over several rounds of commits."""
    cache = engine.new_cache(len(PROMPTS), 4)
    tokens = [torch.tensor(prompt) for prompt in PROMPTS]
    chains = [torch.ones(len(p), len(p), dtype=torch.bool).tril() for p in PROMPTS]
    engine.append(cache, tokens, [torch.arange(len(p)) for p in PROMPTS], chains)
    cache.commit([range(len(prompt)) for prompt in PROMPTS])
    found = []
    for number in range(rounds):
        masks, depths = zip(*trees(), strict=True)
        nodes = [torch.arange(len(depth)) + 10 + number for depth in depths]
        out = engine.append(cache, nodes, depths, masks, feature_layers=(1,))
        found += [out.logits[b, : len(depth)] for b, depth in enumerate(depths)]
        found += [out.features[b, : len(depth)] for b, depth in enumerate(depths)]
        cache.commit([[0, 2, 3], [0, 1], [0]])
    return found


@pytest.mark.parametrize("name", KINDS)
def test_logits_of_trees_equal_the_eager_engines(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    float64_throughout(monkeypatch)
    target = zoo_target(name)
    expected = logits(EagerEngine(target))
    found = logits(StaticEngine(target))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", REFUSED)
def test_other_targets_are_sent_to_the_eager_engine(name: str) -> None:
    target = zoo_target(name)
    with pytest.raises(ValueError, match="engine='eager'"):
        plain_generate(target, PROMPTS, max_new_tokens=4, engine=StaticEngine(target))
    assert plain_generate(target, PROMPTS, max_new_tokens=4).sequences


def test_packed_weights_give_the_same_logits() -> None:
    target = tiny_target(torch.float32)
    expected = logits(EagerEngine(target))
    engine = StaticEngine(target, pack=True)
    found = logits(engine)
    engine.close()
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    after = logits(EagerEngine(target))
    assert all(torch.equal(one, other) for one, other in zip(expected, after, strict=True))


@pytest.mark.parametrize("sampling", [None, SamplingParams(temperature=0.8, seed=3)])
def test_a_ragged_batch_decodes_the_same_tokens(sampling: SamplingParams | None) -> None:
    target = tiny_target(torch.float64)
    engine, new = StaticEngine(target), [20, 33, 7]
    plain = plain_generate(target, PROMPTS, max_new_tokens=new, sampling=sampling)
    again = plain_generate(target, PROMPTS, max_new_tokens=new, sampling=sampling, engine=engine)
    drafted = speculative_generate(
        target,
        NgramProposer(8, 4, 2),
        PROMPTS,
        max_new_tokens=new,
        sampling=sampling,
        engine=engine,
    )
    assert again.sequences == plain.sequences
    assert drafted.sequences == plain.sequences
    assert sampling is not None or drafted.num_forwards < again.num_forwards


@pytest.mark.slow
def test_one_compiled_graph_serves_all_widths_and_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(torch.float64, layers=2)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, **options: compile_(f, backend=counter, **options)
    )
    engine = StaticEngine(target, compiled=True)
    expected = plain_generate(target, PROMPTS[:1], max_new_tokens=400).sequences
    for depth in (2, 3, 5):
        found = speculative_generate(
            target, NgramProposer(8, depth, 2), PROMPTS[:1], max_new_tokens=400, engine=engine
        )
        assert found.sequences == expected
    assert counter.frame_count == 2  # one row, and several


def test_what_runs_beside_is_an_engine_of_the_same_kind_made_once() -> None:
    target, draft = tiny_target(torch.float32), tiny_target(torch.float32, layers=2)
    engine = StaticEngine(target)
    assert engine.beside(target) is engine
    beside = engine.beside(draft)
    assert beside.name == "packed" and beside is engine.beside(draft)
    assert "forward" in vars(draft.lm_head)
    engine.close()
    assert "forward" not in vars(draft.lm_head)
    assert EagerEngine(target).beside(draft).name == "eager"


def test_a_draft_model_that_static_engines_do_not_suit_runs_eagerly() -> None:
    target, draft = tiny_target(torch.float32), zoo_target("stablelm")
    engine = StaticEngine(target)
    with pytest.warns(UserWarning, match="draft model runs on engine 'eager': target"):
        assert engine.beside(draft).name == "eager"
    assert "forward" not in vars(draft.lm_head), "what was packed to try it is given back"


def test_an_engine_of_another_target_is_refused() -> None:
    target = tiny_target(torch.float64)
    other: TargetModel = tiny_target(torch.float64, seed=1)
    with pytest.raises(ValueError, match="another target"):
        plain_generate(target, PROMPTS[:1], max_new_tokens=4, engine=StaticEngine(other))


def test_engines_by_name() -> None:
    target = tiny_target(torch.float64)
    assert [build_engine(target, name).name for name in ENGINES] == list(ENGINES)
    with pytest.raises(ValueError, match="engine must be one of"):
        build_engine(target, "fast")


def test_weights_of_a_kind_without_kernels_are_not_packed() -> None:
    with pytest.raises(ValueError, match="float64"):
        StaticEngine(tiny_target(torch.float64), pack=True)


@pytest.mark.parametrize("least", [1, 4])
def test_rows_that_are_filled_up_do_not_count(least: int) -> None:
    """Two appends of one and two rows behind each other, as trees that are grown level by level."""
    target = tiny_target(torch.float64)
    expected = grown(EagerEngine(target))
    engine = StaticEngine(target)
    engine.least_rows = least
    for one, other in zip(expected, grown(engine), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@torch.inference_mode()
def grown(engine: object) -> list[torch.Tensor]:
    cache = engine.new_cache(1, 4)
    prompt = torch.tensor(PROMPTS[0])
    chain = torch.ones(len(prompt), len(prompt), dtype=torch.bool).tril()
    engine.append(cache, [prompt], [torch.arange(len(prompt))], [chain])
    cache.commit([range(len(prompt))])
    first = engine.append(
        cache, [torch.tensor([3])], [torch.tensor([0])], [torch.ones(1, 1, dtype=torch.bool)]
    )
    seen = torch.tensor([[1, 1, 0], [1, 0, 1]]).bool()
    second = engine.append(cache, [torch.tensor([4, 5])], [torch.tensor([0, 1, 1])], [seen])
    cache.commit([[0, 2]])
    third = engine.append(
        cache, [torch.tensor([6])], [torch.tensor([0])], [torch.ones(1, 1, dtype=torch.bool)]
    )
    return [first.logits, second.logits, third.logits]


def test_an_engine_that_is_dropped_gives_the_target_back() -> None:
    target = tiny_target(torch.float32)
    for _ in range(2):
        engine = StaticEngine(target, pack=True)
        assert "forward" in vars(target.lm_head)
        del engine
        gc.collect()
        assert "forward" not in vars(target.lm_head)


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", ["gpt_oss", "mixtral", "qwen3_moe"])
def test_mixtures_of_experts_compile(
    name: str, experts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers runs them unless told otherwise, and as products of gathered weights."""
    torch._dynamo.reset()
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, **options: compile_(f, backend="eager", **options)
    )
    target = zoo_target(name, torch.float32)
    assert target.model.config._experts_implementation == "grouped_mm"
    target.model.set_experts_implementation(experts)
    expected = plain_generate(target, PROMPTS, max_new_tokens=8).sequences
    engine = StaticEngine(target, compiled=True)
    found = plain_generate(target, PROMPTS, max_new_tokens=8, engine=engine)
    assert found.sequences == expected


@pytest.mark.slow
def test_experts_that_loop_on_the_host_do_not_compile() -> None:
    torch._dynamo.reset()
    target = zoo_target("mixtral", torch.float32)
    target.model.set_experts_implementation("eager")
    with pytest.raises(ValueError, match="set_experts_implementation"):
        plain_generate(
            target, PROMPTS, max_new_tokens=8, engine=StaticEngine(target, compiled=True)
        )


@pytest.mark.slow
def test_engines_that_come_and_go_do_not_use_up_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tiny_target(torch.float64, layers=2)
    torch._dynamo.reset()
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, **options: compile_(f, backend="eager", **options)
    )
    expected = plain_generate(target, PROMPTS, max_new_tokens=8).sequences
    for _ in range(4):
        engine = StaticEngine(target, compiled=True)
        for rows in (PROMPTS, PROMPTS[:1]):
            found = speculative_generate(
                target, NgramProposer(8, 4, 2), rows, max_new_tokens=8, engine=engine
            )
            assert found.sequences == expected[: len(rows)]
        engine.close()


def test_a_target_that_cannot_be_compiled_is_sent_to_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object, **options: object) -> object:
        raise TorchDynamoException("data-dependent shape\nand more")

    monkeypatch.setattr(torch, "compile", lambda forward, **options: refuse)
    target = tiny_target(torch.float32)
    engine = StaticEngine(target, compiled=True)
    with pytest.raises(ValueError, match=r"engine='packed' \(data-dependent shape\)"):
        plain_generate(target, PROMPTS[:1], max_new_tokens=4, engine=engine)
