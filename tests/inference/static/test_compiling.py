"""Compiled forwards: one for each kind, never another engine's."""

import pytest
import torch
from torch import Tensor, nn

from inference.generate import plain_generate
from inference.static.compiling import CompiledKinds, own_code
from inference.static.engine import StaticEngine
from tests.tiny import tiny_target

pytestmark = pytest.mark.slow
PROMPTS = [[1, 2, 3, 4], [5, 6, 7]]


@pytest.fixture(autouse=True)
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made of a graph takes long and is not looked at here."""
    torch._dynamo.reset()
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, **options: compile_(f, backend="eager", **options)
    )


class _Doubling(nn.Module):
    double = True

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if self.double else x


def test_modules_are_what_they_were_when_their_kind_was_compiled() -> None:
    """The price of not looking: a kind has to stand for all that modules may differ in."""
    module = _Doubling()
    kinds = CompiledKinds(lambda x: module(x))
    x = torch.ones(3)
    assert torch.equal(kinds.of("double")(x), 2 * x)
    module.double = False
    assert torch.equal(kinds.of("double")(x), 2 * x)
    assert torch.equal(kinds.of("single")(x), x)
    assert torch.equal(kinds.of("double")(x), 2 * x)


def test_what_is_handed_in_is_looked_at() -> None:
    kinds = CompiledKinds(lambda x, times: x * times)
    x = torch.ones(3)
    assert torch.equal(kinds.of("")(x, 2), 2 * x)
    assert torch.equal(kinds.of("")(x, 3), 3 * x)
    assert torch.equal(kinds.of("")(x.double(), 3), 3 * x.double())
    assert torch.equal(kinds.of("")(torch.ones(2, 5), 3), 3 * torch.ones(2, 5))


def test_functions_share_no_code() -> None:
    made = [own_code(lambda x: x) for _ in range(2)]
    assert made[0].__code__ is not made[1].__code__
    assert made[0](torch.ones(1)) == 1


def test_engines_of_one_shape_have_graphs_of_their_own() -> None:
    """Their modules look alike, to who does not look at them."""
    targets = [tiny_target(torch.float64, layers=2, seed=seed) for seed in (0, 1)]
    expected = [plain_generate(t, PROMPTS, max_new_tokens=8).sequences for t in targets]
    assert expected[0] != expected[1]
    engines = [StaticEngine(target, compiled=True) for target in targets]
    for _ in range(2):
        found = [
            plain_generate(target, PROMPTS, max_new_tokens=8, engine=engine).sequences
            for target, engine in zip(targets, engines, strict=True)
        ]
        assert found == expected


def test_an_engine_that_is_opened_again_sees_other_weights() -> None:
    target = tiny_target(torch.float32, layers=2)
    for _ in range(2):
        expected = plain_generate(target, PROMPTS, max_new_tokens=8).sequences
        engine = StaticEngine(target, compiled=True)
        found = plain_generate(target, PROMPTS, max_new_tokens=8, engine=engine)
        assert found.sequences == expected
        engine.close()
        with torch.no_grad():
            for parameter in target.model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))


def test_plain_and_verifying_steps_take_turns_without_compiling_again() -> None:
    target = tiny_target(torch.float32, layers=2)
    engine = StaticEngine(target, compiled=True)
    engine.least_rows = 1  # measured otherwise
    cache = engine.new_cache(1, 64)

    def step(rows: int) -> Tensor:
        nodes = torch.arange(rows)
        seen = torch.ones(rows, rows, dtype=torch.bool).tril()
        out = engine.append(cache, [nodes], [nodes], [seen])
        cache.commit([range(rows)])
        return out.logits

    with torch.inference_mode():
        for rows in (1, 3, 1, 4, 1):
            step(rows)
        with torch.compiler.set_stance("fail_on_recompile"):
            for rows in (1, 5, 1, 3):
                assert step(rows).shape[1] == rows
    assert engine._kinds is not None and len(engine._kinds.compiled) == 2


def test_an_engine_decodes_on_when_it_was_closed() -> None:
    target = tiny_target(torch.float32, layers=2)
    expected = plain_generate(target, PROMPTS, max_new_tokens=8).sequences
    engine = StaticEngine(target, compiled=True)
    for _ in range(2):
        found = plain_generate(target, PROMPTS, max_new_tokens=8, engine=engine)
        assert found.sequences == expected
        engine.close()


def test_another_number_of_threads_is_another_graph_of_a_kind() -> None:
    kinds, before = CompiledKinds(lambda x: 2 * x), torch.get_num_threads()
    try:
        for count in range(1, 12):
            torch.set_num_threads(count)
            assert torch.equal(kinds.of("")(torch.ones(3)), 2 * torch.ones(3))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("strided", [False, True])
def test_rows_that_enter_come_in_any_layout_and_one_dtype(strided: bool) -> None:
    target = tiny_target(torch.float32, layers=4)
    engine, plain = StaticEngine(target, compiled=True), StaticEngine(target, pack=False)
    nodes, seen = torch.arange(3), torch.ones(3, 3, dtype=torch.bool).tril()
    width = target.hidden_size

    def run(which: StaticEngine, entering: Tensor) -> Tensor:
        cache = which.new_cache(1, 16)
        found = which.append(cache, [nodes], [nodes], [seen], run_layers=(2, 3), entering=entering)
        return found.logits

    with torch.inference_mode():
        run(engine, torch.randn(1, 3, width))
        rows = torch.randn(1, width, 3).mT if strided else torch.randn(1, 3, width)
        torch.testing.assert_close(run(engine, rows), run(plain, rows))
        with pytest.raises(AssertionError, match="as it comes"):
            run(engine, rows.double())
