"""chunked_sum against its slow twin: same value, metrics and gradients, less memory."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.chunked import ChunkLoss, Metrics, chunked_sum, plain_sum

N, D, V = 10, 6, 50


def make(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], nn.Linear]:
    """Two row inputs and an output matrix that both go through."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(N, D, generator=generator, dtype=dtype).requires_grad_() for _ in range(2)]
    matrix = nn.Linear(D, V).to(dtype)
    with torch.no_grad():
        for parameter in matrix.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype))
    return rows, matrix


def loss_of(matrix: nn.Linear, seen: list[slice] | None = None) -> ChunkLoss:
    """A loss in two pieces that both read the matrix, the second also rows of its own by the
    chunk's slice.
    """
    labels = torch.arange(N) * 7 % V

    def loss(chunk: slice, pieces: list[Tensor]) -> Iterator[tuple[Tensor, Metrics]]:
        if seen is not None:
            seen.append(chunk)
        norms = matrix(pieces[1].tanh()).square().sum(-1).to(pieces[1].dtype)
        yield 0.1 * norms.sum(), {"rows_sum": torch.tensor(1)}
        logits = (
            matrix(pieces[0]).float() if pieces[0].dtype == torch.float32 else matrix(pieces[0])
        )
        wanted = labels[chunk]
        value = F.cross_entropy(logits, wanted, reduction="sum")
        hits = (logits.argmax(-1) == wanted).sum()
        yield value, {"hits_sum": hits, "hits_count": torch.tensor(len(wanted))}

    return loss


Sum = Callable[[], tuple[Tensor, Metrics]]


def results(run: Sum, sources: list[Tensor]) -> tuple[float, dict[str, float], list[Tensor]]:
    for source in sources:
        source.grad = None
    value, metrics = run()
    (3 * value).backward()
    return value.item(), {k: float(v) for k, v in metrics.items()}, [s.grad for s in sources]


@pytest.mark.parametrize("chunk", [1, 3, 5, 9, 10, 1000])
def test_value_and_gradients_equal_the_plain_sum(chunk: int) -> None:
    rows, matrix = make()
    parameters = list(matrix.parameters())
    sources = [*rows, *parameters]
    plain = results(lambda: plain_sum(loss_of(matrix), rows), sources)
    chunked = results(lambda: chunked_sum(loss_of(matrix), rows, parameters, chunk), sources)
    assert plain[0] == pytest.approx(chunked[0], rel=1e-12)
    assert plain[1].pop("rows_sum") == 1
    assert chunked[1].pop("rows_sum") == -(-N // chunk)
    assert plain[1] == chunked[1]
    for one, other in zip(plain[2], chunked[2], strict=True):
        assert (one - other).abs().max() < 1e-11
        assert one.abs().max() > 1e-3


@pytest.mark.parametrize("chunk", [1, 4, 10])
def test_under_bfloat16_autocast(chunk: int) -> None:
    """The matrix is cast once a chunk; a cached cast must not carry over to the next graph."""
    rows, matrix = make(dtype=torch.float32)
    parameters = list(matrix.parameters())
    sources = [*rows, *parameters]

    def under_autocast(run: Sum) -> Sum:
        def inside() -> tuple[Tensor, Metrics]:
            with torch.autocast("cpu", torch.bfloat16):
                return run()

        return inside

    plain = results(under_autocast(lambda: plain_sum(loss_of(matrix), rows)), sources)
    chunked = results(
        under_autocast(lambda: chunked_sum(loss_of(matrix), rows, parameters, chunk)), sources
    )
    assert chunked[0] == pytest.approx(plain[0], rel=1e-5)
    for one, other in zip(plain[2], chunked[2], strict=True):
        assert one.dtype == other.dtype == torch.float32
        assert (one - other).abs().max() < 2e-2 * one.abs().max()
    exact = results(lambda: plain_sum(loss_of(matrix), rows), sources)
    assert exact[0] != plain[0], "autocast really casts"


def test_autocast_cast_before_the_sum_does_not_disturb_it() -> None:
    """The unroll has used the same parameters under the same autocast."""
    rows, matrix = make(dtype=torch.float32)
    sources = [*rows, *matrix.parameters()]
    found = []
    for chunk in (0, 3):
        for source in sources:
            source.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            before = matrix(rows[0]).float().mean()
            if chunk:
                value, _ = chunked_sum(loss_of(matrix), rows, list(matrix.parameters()), chunk)
            else:
                value, _ = plain_sum(loss_of(matrix), rows)
            after = matrix(rows[1]).float().mean()
        (before + value + after).backward()
        found.append([source.grad for source in sources])
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() < 2e-2 * one.abs().max()


def test_rows_are_cut_into_chunks_in_order() -> None:
    rows, matrix = make()
    seen: list[slice] = []
    chunked_sum(loss_of(matrix, seen), rows, list(matrix.parameters()), 4)
    assert seen == [slice(0, 4), slice(4, 8), slice(8, 10)]


def test_gradient_flows_on_through_the_inputs() -> None:
    """Inputs are the result of a network, not leaves."""
    rows, matrix = make()
    network = nn.Linear(D, D).double()
    grads = []
    for chunk in (0, 3):
        network.zero_grad()
        inputs = [network(row) for row in rows]
        if chunk:
            value, _ = chunked_sum(loss_of(matrix), inputs, list(matrix.parameters()), chunk)
        else:
            value, _ = plain_sum(loss_of(matrix), inputs)
        value.backward()
        grads.append(network.weight.grad.clone())
    assert (grads[0] - grads[1]).abs().max() < 1e-10
    assert grads[0].abs().max() > 1e-3


def test_frozen_inputs_and_parameters_get_no_gradient() -> None:
    rows, matrix = make()
    rows[1] = rows[1].detach()
    matrix.bias.requires_grad_(False)
    plain = results(lambda: plain_sum(loss_of(matrix), rows), [rows[0], matrix.weight])
    chunked = results(
        lambda: chunked_sum(loss_of(matrix), rows, list(matrix.parameters()), 3),
        [rows[0], matrix.weight],
    )
    for one, other in zip(plain[2], chunked[2], strict=True):
        assert (one - other).abs().max() < 1e-11
    assert rows[1].grad is None
    assert matrix.bias.grad is None


def test_without_gradients_only_the_value_is_computed() -> None:
    rows, matrix = make()
    with torch.no_grad():
        value, metrics = chunked_sum(loss_of(matrix), rows, list(matrix.parameters()), 3)
        plain, _ = plain_sum(loss_of(matrix), rows)
    assert not value.requires_grad
    assert value.item() == pytest.approx(plain.item(), rel=1e-12)
    assert metrics["hits_count"] == N


def test_a_parameter_that_no_chunk_uses_gets_zeros() -> None:
    """Data-parallel wrappers wait for a gradient of every parameter."""
    rows, matrix = make()
    idle = nn.Parameter(torch.ones(3, dtype=torch.float64))
    value, _ = chunked_sum(loss_of(matrix), rows, [*matrix.parameters(), idle], 3)
    value.backward()
    assert idle.grad.tolist() == [0, 0, 0]


class Counted(torch.autograd.Function):
    """How many graphs of its results are alive."""

    count = 0

    @staticmethod
    def forward(ctx, x):
        Counted.count += 1
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Counted.count -= 1
        return grad


@pytest.mark.parametrize("count", [1, 4])
def test_only_one_piece_of_one_chunk_of_the_vocabulary_is_alive(count: int) -> None:
    """What the function is for: the graphs of earlier ones are gone when the next begins."""
    rows, matrix = make()
    alive: list[int] = []

    def loss(chunk: slice, pieces: list[Tensor]) -> Iterator[tuple[Tensor, Metrics]]:
        for _ in range(count):
            alive.append(Counted.count)
            yield Counted.apply(matrix(pieces[0])).square().sum(), {}

    chunked_sum(loss, rows[:1], list(matrix.parameters()), 2)
    assert alive == [0] * 5 * count
    alive.clear()
    plain_sum(loss, rows[:1])
    assert alive == list(range(count)), "negative control: the slow twin keeps them all"
    Counted.count = 0


def test_a_piece_without_a_gradient_adds_its_value() -> None:
    rows, matrix = make()

    def loss(chunk: slice, pieces: list[Tensor]) -> Iterator[tuple[Tensor, Metrics]]:
        yield torch.tensor(2.0, dtype=torch.float64), {}
        yield matrix(pieces[0]).sum(), {}

    value, _ = chunked_sum(loss, rows[:1], list(matrix.parameters()), N)
    value.backward()
    assert value.item() == pytest.approx(2 + matrix(rows[0]).sum().item(), rel=1e-12)
    assert rows[0].grad is not None


def test_parameters_whose_gradients_are_one_tensor() -> None:
    """Autograd hands the same, or an expanded, tensor to both terms of a sum."""
    rows, _ = make()
    one, other = (nn.Parameter(torch.zeros(D, dtype=torch.float64)) for _ in range(2))

    def loss(chunk: slice, pieces: list[Tensor]) -> Iterator[tuple[Tensor, Metrics]]:
        yield ((one + other) * pieces[0].sum(0)).sum(), {}
        yield one.sum() + 2 * other.sum(), {}

    value, _ = chunked_sum(loss, rows[:1], [one, other], 3)
    (3 * value).backward()
    both = 3 * rows[0].detach().sum(0)
    torch.testing.assert_close(one.grad, both + 3 * 4)
    torch.testing.assert_close(other.grad, both + 3 * 8)
