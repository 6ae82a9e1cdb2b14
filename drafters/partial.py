"""Some of a model's decoder layers, with the model's own code and weights.

A model calls its layers one by one. Inside :func:`only_layers` the others hand their input on, so
one forward of the unmodified model runs a chosen subset: what self-speculation by layer skipping
drafts with (arXiv:2309.08168).

Legend: B batch, T rows, D hidden.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def only_layers(
    layers: Sequence[nn.Module], run: Collection[int], entering: Tensor | None, outputs: int
) -> Iterator[None]:
    """Inside, layers outside ``run`` hand their input on. Their ``forward`` is replaced and put
    back; weights are not touched.

    Args:
        layers: all decoder layers.
        run: indices of those to run.
        entering: (B, T, D) to put in place of what enters the first of them, or None.
        outputs: how many things a layer returns as a tuple; 0: its hidden states, bare.

    Raises:
        ValueError: ``run`` is empty or names a layer that is not there.
    """
    if not run or min(run) < 0 or max(run) >= len(layers):
        raise ValueError(f"run_layers {sorted(run)} of a target of {len(layers)} layers")
    replaced: dict[nn.Module, Callable] = {
        layer: _hand_on(outputs) for index, layer in enumerate(layers) if index not in run
    }
    if entering is not None:
        first = layers[min(run)]
        replaced[first] = _enter(first.forward, entering)
    before = {layer: layer.__dict__.get("forward") for layer in replaced}
    try:
        for layer, forward in replaced.items():
            layer.forward = forward
        yield
    finally:
        for layer, own in before.items():
            if own is None:
                del layer.__dict__["forward"]
            else:  # accelerate replaces it too, to move weights between devices
                layer.forward = own


def _hand_on(outputs: int) -> Callable:
    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple:
        return (hidden_states, *[None] * (outputs - 1)) if outputs else hidden_states

    return forward


def _enter(forward: Callable, entering: Tensor) -> Callable:
    def entered(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple:
        return forward(entering, *args, **kwargs)

    return entered
