"""Keys and values of the text for heads that draft a round in one pass.

Only what belongs to committed text is kept, row after row, so it is never cropped; the rows of a
block are seen by the pass they are made in and by nothing else.

Legend: H query heads, Hkv key/value heads, n new rows, S committed rows, d head size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafters.layers import Attend
from inference.proposers.draft_cache import LayerCache, attend_rows


class ContextCache:
    """Draft KV of one sequence; a row's number is its position.

    A pass writes its rows behind what is committed, in place, and those that belong to the text
    stay where they are: nothing that is kept is copied but when room runs out.

    Args:
        windows: sliding window of each layer, or None.
    """

    def __init__(self, windows: Sequence[int | None]) -> None:
        self._layers = [LayerCache(window) for window in windows]

    @property
    def length(self) -> int:
        """Committed rows."""
        return self._layers[-1].length

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Commit keys and values (1, Hkv, n, d) of a layer."""
        if k.shape[2]:
            self._layers[layer].store(k, v)
            self._layers[layer].length += k.shape[2]

    def rows(self, commit: int, causal: Sequence[bool]) -> Attend:
        """Attention of n rows at the positions behind what is committed.

        Args:
            commit: how many of the first of them belong to the text and are kept.
            causal: of each layer, whether rows see only earlier ones of the same pass; otherwise
                all of them.
        """

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            own = self._layers[layer]
            keys, values = own.store(k, v)  # (1, Hkv, S + n, d)
            own.length += min(commit, k.shape[2])
            places = torch.arange(keys.shape[2], device=k.device)
            rows = places[-k.shape[2] :]
            mask = torch.ones(len(rows), len(places), dtype=torch.bool, device=k.device)
            if causal[layer]:
                mask = places <= rows[:, None]
            return attend_rows(q, keys, values, own.windowed(mask, rows, places))

        return attend
