"""Forwards of fixed form are the engine's own, padding, pending rows and windows included.

Everything but the capture itself runs here: functions are called where graphs would be replayed.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from inference.engine import EagerEngine
from inference.generate import plain_generate, speculative_generate
from inference.proposers.ngram import NgramProposer
from inference.static import graphs as graphs_module
from inference.static.engine import StaticEngine
from inference.static.graphs import BUCKETS, CudaCapture, Form, Graphs, called_each_time, padded
from tests.inference.static.test_engine import KINDS, PROMPTS, trees
from tests.inference.static.valueless import Mover
from tests.tiny import tiny_target
from tests.zoo import float64_throughout, zoo_target


class Counting:
    """Calls each time, and counts captures and replays."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, function: Callable[[], Any]) -> Callable[[], Any]:
        self.captures += 1

        def replay() -> Any:
            self.replays += 1
            return function()

        return replay


def graphed(target: Any, kept: int = 32) -> tuple[StaticEngine, Counting]:
    engine, capture = StaticEngine(target), Counting()
    engine.graphs = Graphs(engine.run, capture, kept)
    return engine, capture


@torch.inference_mode()
def outputs(engine: Any, rounds: int = 2) -> list[torch.Tensor]:
    """Of trees in a ragged batch, level by level: the second append finds rows pending."""
    cache = engine.new_cache(len(PROMPTS), 4)
    tokens = [torch.tensor(prompt) for prompt in PROMPTS]
    chains = [torch.ones(len(p), len(p), dtype=torch.bool).tril() for p in PROMPTS]
    last = torch.tensor([0])
    positions = [torch.arange(len(p)) for p in PROMPTS]
    engine.append(cache, tokens, positions, chains, logits_to_keep=last)
    cache.commit([range(len(prompt)) for prompt in PROMPTS])
    found = []

    def run(nodes: list, depths: list, seen: list) -> None:
        out = engine.append(cache, nodes, depths, seen, feature_layers=(1, 3))
        for b, some in enumerate(nodes):
            parts = (out.logits, out.features, out.last_hidden)
            found.extend(part[b, : len(some)] for part in parts)

    for number in range(rounds):
        masks, depths = zip(*trees(), strict=True)
        nodes = [torch.arange(len(depth)) + 10 + number for depth in depths]
        run(nodes, list(depths), list(masks))
        before = cache.pending
        seen = []
        for mask in masks:  # a child of each sequence's last node
            row = torch.zeros(1, before + 1, dtype=torch.bool)
            row[0, : len(mask)], row[0, -1] = mask[-1], True
            seen.append(row)
        deeper = [torch.zeros(before + 1, dtype=torch.int64) for _ in depths]
        for some, depth in zip(deeper, depths, strict=True):
            some[: len(depth)], some[-1] = depth, depth[-1] + 1
        run([torch.tensor([30 + number])] * 3, deeper, seen)
        cache.commit([[0, 2, 3], [0, 1], [0]])
    return found


@pytest.mark.parametrize("name", KINDS)
def test_outputs_are_the_engines(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    float64_throughout(monkeypatch)
    target = zoo_target(name)
    expected = outputs(StaticEngine(target))
    engine, capture = graphed(target)
    found = outputs(engine)
    assert (capture.captures, capture.replays) == (2, 4)
    assert len(found) == len(expected)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", KINDS)
def test_forwards_read_nothing_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without values, in the way they go on CUDA while they are captured."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    engine, _ = graphed(zoo_target(name, torch.bfloat16))
    cache, rows = engine.new_cache(2, 16), [torch.arange(3), torch.arange(2)]
    seen = [torch.ones(len(row), len(row), dtype=torch.bool).tril() for row in rows]
    assert engine.graphs is not None
    forward = engine.graphs.loaded(cache, rows, rows, seen, (1, 3))
    Mover()([engine, cache, *inner(forward.replay)])
    with torch.no_grad():
        out = forward.replay()
    assert out.logits.is_meta and out.logits.shape == (2, 4, 96)


def inner(function: Callable[[], Any]) -> list[Any]:
    """What a function closes over, at any depth."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return [x for c in cells for x in (inner(c) if inspect.isfunction(c) else [c])]


def test_a_batch_decodes_the_same_tokens() -> None:
    target = tiny_target()
    engine, capture = graphed(target)
    new = [20, 33, 7]
    plain = plain_generate(target, PROMPTS, max_new_tokens=new)
    again = plain_generate(target, PROMPTS, max_new_tokens=new, engine=engine)
    assert again.sequences == plain.sequences
    assert capture.captures == 3 and capture.replays == again.num_forwards  # one per batch size
    drafted = speculative_generate(
        target, NgramProposer(8, 4, 2), PROMPTS, max_new_tokens=new, engine=engine
    )
    assert drafted.sequences == plain.sequences
    assert engine.warm_up_seconds > 0


def appended(engine: Any, cache: Any, width: int) -> torch.Tensor:
    """Logits of a chain."""
    rows = torch.arange(width)
    seen = torch.ones(width, width, dtype=torch.bool).tril()
    logits = engine.append(cache, [rows % 90], [rows], [seen]).logits
    cache.revert()
    return logits


def test_widths_share_buckets_up_to_all_that_words_hold() -> None:
    assert [padded(rows) for rows in (1, 2, 3, 9, 64, 65, 128)] == [1, 2, 4, 16, 64, 128, 128]
    target = tiny_target()
    (engine, capture), eager = graphed(target), EagerEngine(target)
    cache, other = engine.new_cache(1, 200), eager.new_cache(1, 200)
    for width in (1, 3, 4, 100, 128):
        found = appended(engine, cache, width)
        assert found.shape[1] == width
        torch.testing.assert_close(found, appended(eager, other, width))
    assert capture.captures == len(engine.graphs or ()) == 3
    appended(engine, cache, 129)  # more than words tell apart
    assert capture.captures == 3


def test_padding_does_not_pass_the_last_row_that_words_hold() -> None:
    engine, _ = graphed(tiny_target())
    cache, rows = engine.new_cache(1, 8), torch.arange(100)
    seen = torch.ones(100, 120, dtype=torch.bool).tril()
    engine.append(cache, [rows % 90], [rows], [seen[:, :100]])
    depths = torch.arange(120)
    more = torch.ones(20, 120, dtype=torch.bool).tril(100)
    found = engine.append(cache, [rows[:20]], [depths], [more]).logits
    cache.revert()
    both = torch.cat([rows % 90, rows[:20]])
    whole = engine.append(cache, [both], [depths], [torch.ones(120, 120).bool().tril()]).logits
    torch.testing.assert_close(found, whole[:, 100:])


def test_a_cache_that_has_moved_is_another_form() -> None:
    engine, capture = graphed(tiny_target())
    cache = engine.new_cache(1, 8)
    before = Form.of(cache, 3, ())
    appended(engine, cache, 3)
    cache.lengths[0] = cache.capacity - 1
    appended(engine, cache, 3)
    assert capture.captures == 2
    after = Form.of(cache, 3, ())
    assert after.rows == before.rows == 4 and after != before


def test_the_latest_forms_are_kept() -> None:
    engine, capture = graphed(tiny_target(), kept=2)
    cache = engine.new_cache(1, 8)
    for width in (1, 2, 1, 4, 1, 2):  # 4 takes the place of 2, which comes back
        appended(engine, cache, width)
    assert capture.captures == 4
    assert len(engine.graphs or ()) == 2
    engine.close()
    assert len(engine.graphs or ()) == 0


def test_outputs_outlive_the_next_forward() -> None:
    engine, _ = graphed(tiny_target())
    replayed: list[torch.Tensor] = []

    def in_place(function: Callable[[], Any]) -> Callable[[], Any]:
        out = function()

        def replay() -> Any:
            new = function()
            out.logits.copy_(new.logits)
            replayed.append(out.logits)
            return out

        return replay

    engine.graphs = Graphs(engine.run, in_place)
    cache = engine.new_cache(1, 8)
    with torch.inference_mode():
        first = appended(engine, cache, 3)
        kept = first.clone()
        cache.lengths[0] = 5
        second = appended(engine, cache, 3)
    assert replayed[0].data_ptr() == replayed[1].data_ptr() and not torch.equal(first, second)
    assert torch.equal(first, kept)


def test_making_one_leaves_the_committed_text_alone() -> None:
    engine, _ = graphed(tiny_target())
    cache = engine.new_cache(1, 8)
    cache.kv.normal_()
    cache.lengths[0] = 5
    before = cache.kv[..., :5, :].clone()
    appended(engine, cache, 3)
    assert torch.equal(cache.kv[..., :5, :], before)


def test_probes_are_not_captured() -> None:
    engine, capture = graphed(tiny_target())
    cache = engine.new_cache(1, 8)
    expected = appended(engine, cache, 3)
    with engine.probing():
        torch.testing.assert_close(appended(engine, cache, 3), expected)
    assert (capture.captures, capture.replays) == (1, 1)


def test_without_cuda_there_are_none() -> None:
    target = tiny_target()
    assert StaticEngine(target).graphs is None
    assert StaticEngine(target, graphs=False).graphs is None
    with pytest.raises(ValueError, match="graphs: CUDA graphs need a target on a CUDA device"):
        StaticEngine(target, graphs=True)


class FakeCuda:
    """Stands for `torch.cuda`: records what is asked of it; captures fail if told to."""

    OutOfMemoryError = torch.OutOfMemoryError

    def __init__(self, error: Exception | None) -> None:
        self.error, self.done = error, list[str]()
        self.stream = self.device = lambda which: nullcontext()
        self.graph_pool_handle = object
        self.Stream = self.CUDAGraph = lambda *where: self
        self.current_stream = lambda: self

    def wait_stream(self, other: Any) -> None:
        self.done.append("wait")

    def set_stream(self, stream: Any) -> None:
        self.done.append("restored")

    def replay(self) -> None:
        self.done.append("replay")

    @contextmanager
    def graph(self, graph: Any, pool: Any, stream: Any) -> Iterator[None]:
        self.done.append("capture")
        yield
        if self.error is not None:
            raise self.error


def with_fake_cuda(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> FakeCuda:
    fake = FakeCuda(error)
    monkeypatch.setattr(graphs_module.torch, "cuda", fake)
    return fake


def test_a_capture_warms_up_first_and_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = with_fake_cuda(monkeypatch, None)
    capture = CudaCapture(torch.device("cpu"), "it", "do something else", warm_ups=2)

    def function() -> str:
        fake.done.append("run")
        return "result"

    replay = capture(function)
    assert fake.done == ["wait", "run", "run", "wait", "capture", "run"]
    assert replay() == "result"
    assert fake.done[-1] == "replay"


@pytest.mark.parametrize("error", [RuntimeError("not permitted\nwhen"), torch.OutOfMemoryError()])
def test_what_cannot_be_captured(error: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = with_fake_cuda(monkeypatch, error)
    capture = CudaCapture(torch.device("cpu"), "it", "do something else")
    if isinstance(error, torch.OutOfMemoryError):
        with pytest.raises(torch.OutOfMemoryError):
            capture(dict)
        return
    message = r"it cannot be captured in a CUDA graph \(not permitted\): do something else"
    with pytest.raises(ValueError, match=message):
        capture(dict)
    assert fake.done[-1] == "restored"


def test_the_stand_in_for_captures() -> None:
    assert called_each_time(dict) is dict
    assert BUCKETS[-1] == 128
