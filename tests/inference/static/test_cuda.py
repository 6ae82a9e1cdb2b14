"""Real captures, where there is a GPU."""

import pytest
import torch

from drafters import TargetModel, build_drafter
from inference.generate import plain_generate, speculative_generate
from inference.proposers import TreeOptions, build_proposer
from inference.static.decoding import DeviceEngine
from inference.static.engine import StaticEngine
from inference.static.sizes import SizedProposer
from inference.stopping import Stop
from tests.inference.static.test_engine import PROMPTS
from tests.inference.static.test_graphs import appended, outputs
from tests.inference.static.test_sizes import Scheduled
from tests.tiny import tiny_target
from tests.zoo import zoo_target

pytestmark = pytest.mark.gpu
NO_END = Stop(token_ids=())


def on_cuda(target: TargetModel) -> TargetModel:
    return TargetModel(target.model.to("cuda"), target.tokenizer, name=target.name)


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral", "gpt2"])
def test_replays_give_the_bias_path_s_outputs(name: str) -> None:
    target = on_cuda(zoo_target(name, torch.float32))
    engine = StaticEngine(target)
    expected, found = outputs(StaticEngine(target, graphs=False)), outputs(engine)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    assert engine.graphs is not None and len(engine.graphs) == 2
    assert engine.warm_up_seconds > 0


@pytest.mark.parametrize("family", ["eagle3", "medusa", "mtp"])
def test_captured_rounds_decode_what_plain_decoding_does(family: str) -> None:
    target = on_cuda(tiny_target(torch.float32))
    head = build_drafter(family, target).to(target.dtype).eval()
    plain = plain_generate(target, PROMPTS, max_new_tokens=40, stop=NO_END)
    engine = DeviceEngine(target)
    for _ in range(2):
        found = speculative_generate(
            target,
            build_proposer(head, TreeOptions(size=12, depth=3, top_k=3)),
            PROMPTS,
            max_new_tokens=40,
            stop=NO_END,
            engine=engine,
        )
        assert found.sequences == plain.sequences
    [rounds] = engine._rounds.values()
    assert 0 in rounds._replays


@pytest.mark.parametrize("family", ["eagle3", "medusa", "mtp"])
def test_captured_sizes_in_any_order_too(family: str) -> None:
    target = on_cuda(tiny_target(torch.float32))
    head = build_proposer(build_drafter(family, target).to(target.dtype).eval())
    plain = plain_generate(target, PROMPTS, max_new_tokens=90, stop=NO_END)
    engine, kinds = DeviceEngine(target), [0, None, 1, *[None] * 17, 2, 0]
    forms = [(1, 1, 2), (3, 1, 4), (3, 3, 12)]
    for _ in range(3):
        proposer = SizedProposer(head, forms, Scheduled(kinds))
        found = speculative_generate(
            target, proposer, PROMPTS, max_new_tokens=90, stop=NO_END, engine=engine
        )
        assert found.sequences == plain.sequences
    [rounds] = engine._rounds.values()
    assert set(rounds._replays) == {None, 0, 1, 2, "absorb"}


def test_a_model_that_reads_its_results_is_refused() -> None:
    target = on_cuda(tiny_target(torch.float32))
    read: list[float] = []
    layer = target.decoder_layers()[0]
    layer.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].sum().item()))
    engine = StaticEngine(target)
    with pytest.raises(ValueError, match="graphs=False"):
        appended(engine, engine.new_cache(1, 8), 3)
    assert len(read) > 0
