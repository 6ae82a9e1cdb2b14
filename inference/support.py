"""Does a target do what its mask says? Asked once of every target, before it verifies trees.

Letters: V target vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from drafters import TargetModel, TargetOutput
from inference.attention import mask_for
from inference.cache import TreeCache
from inference.engine import EagerEngine, Engine

_supported: weakref.WeakKeyDictionary[TargetModel, set[str]] = weakref.WeakKeyDictionary()
"""Names of the engines that each target is known to work with."""


def check_tree_support(engine: Engine) -> None:
    """Refuse a target whose output would not be its own when it verifies trees.

    Some models ignore a ready mask, add biases by column (ALiBi), count positions themselves or
    keep a state besides the cache. Eight forwards of a few tokens find out, once per target and
    engine: a
    node's logits must be those of plain decoding along its path, and must not depend on its
    siblings.

    Raises:
        ValueError: naming the model and what happened.
    """
    target = engine.target
    if engine.name in _supported.setdefault(target, set()):
        return
    mask_for(target.config, torch.ones(1, 1, 1, 1, dtype=torch.bool), target.dtype)  # or refuse
    probe = _Probe(engine)
    plain, other = probe.plain([2, 4, 5]), probe.plain([2, 3, 4, 5])
    scale, effect = plain.abs().max().item(), (plain - other).abs().max().item()
    # How far rounding goes depends on the model; what a wrong mask does is as large as `effect`.
    exact = 1e-3 * scale if target.dtype in (torch.float32, torch.float64) else torch.inf
    limit = min(exact, effect / 4)
    tree, changed = probe.tree(sibling=3), probe.tree(sibling=6)
    leak, error = (tree - changed).abs().max().item(), (tree - plain).abs().max().item()
    if not leak <= limit:
        raise _cannot(engine, f"a node's logits change by {leak:.3g} with its sibling's token")
    if not error <= limit:
        raise _cannot(engine, f"a node's logits differ by {error:.3g} from plain decoding")
    _supported[target].add(engine.name)


class _Probe:
    """Two sequences of unequal length, and below each the tree root -> (sibling, 4), 4 -> 5.

    Tokens are eighths of the vocabulary; the first ids are often special and hardly trained.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.target = engine, engine.target
        self.prompts = [[1, 2, 3], [7]]

    def plain(self, path: Sequence[int]) -> Tensor:
        """(2, V) logits behind prompt and path, without cache or mask."""
        target = self.target
        texts = [self._ids([*prompt, *path])[None].to(target.device) for prompt in self.prompts]
        rows = [self._logits(target.forward, text)[:, -1] for text in texts]
        return torch.cat(rows).double()

    def tree(self, sibling: int) -> Tensor:
        """(2, V) logits of the deepest node."""
        cache = self.engine.new_cache(len(self.prompts), 8)
        prompts = [self._ids(prompt) for prompt in self.prompts]
        chains = [torch.ones(len(p), len(p), dtype=torch.bool).tril() for p in prompts]
        self._append(cache, prompts, chains, [torch.arange(len(p)) for p in prompts])
        cache.commit([range(len(prompt)) for prompt in prompts])
        ancestors = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
        depths = torch.tensor([0, 1, 1, 2])
        nodes = self._ids([2, sibling, 4, 5])
        return self._append(cache, [nodes] * 2, [ancestors] * 2, [depths] * 2)[:, -1].double()

    def _append(
        self,
        cache: Any,
        tokens: Sequence[Tensor],
        seen: Sequence[Tensor],
        depths: Sequence[Tensor],
    ) -> Tensor:
        width = max(map(len, tokens))
        logits = self._logits(self.engine.append, cache, tokens, depths, seen)
        if isinstance(cache, TreeCache) and any(x.pending != width for x in cache.layers):
            raise _cannot(
                self.engine, "it does not keep its keys and values in the cache it is given"
            )
        return logits

    def _ids(self, eighths: Sequence[int]) -> Tensor:
        return torch.tensor(eighths) * (self.target.vocab_size // 8)

    def _logits(self, forward: Callable[..., TargetOutput], *args: Any) -> Tensor:
        try:
            with self.engine.probing():
                return forward(*args).logits
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a model raises that did not expect such a mask
            raise _cannot(self.engine, f"its forward fails on a tree: {error!r}") from error


def _cannot(engine: Engine, why: str) -> ValueError:
    target = engine.target
    if not isinstance(engine, EagerEngine):
        return ValueError(
            f"target {target.name!r} ({target.model.config.model_type!r}) does not run on engine "
            f"{engine.name!r}: {why}. Decode it with engine='eager'"
        )
    return ValueError(
        f"target {target.name!r} ({target.model.config.model_type!r}) cannot verify trees of draft "
        f"tokens: {why}. Nothing but its own `model.generate` decodes it losslessly; choose a "
        "target that takes a 4-D attention mask"
    )
