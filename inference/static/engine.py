"""The target over a `StaticCache`: fused attention, packed weights on a CPU, compiled if asked for.

* ``packed``: transformers' own forward with two parts replaced, attention and, on a CPU, the linear
  layers. Ready at once.
* ``compiled``: the same, and what is between those parts fused by torch's compiler. The two parts
  are closed operators to it, so neither the number of rows nor the length of the text is built into
  what it makes: one row and several rows are two graphs, and a batch two more
  (`inference.static.compiling`).

On CUDA the rows of trees run as CUDA graphs (`inference.static.graphs`); prompts, and everything on
a CPU, with a bias that the host makes.

Letters: B sequences, F new rows of each (padded to the most), m rows pending, C columns in use.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.nn import functional as F

from drafters import Drafter, TargetModel, TargetOutput
from inference.attention import narrow, row_mask
from inference.cache import BLOCK
from inference.engine import EagerEngine, Engine
from inference.freed_memory import keep_freed
from inference.static.attention import NAME, TreeRows, as_bias
from inference.static.cache import PassingCache, StaticCache, kv_shape
from inference.static.compiling import CompiledKinds
from inference.static.graphs import BUCKETS, WARM_UPS, CudaCapture, Graphs
from inference.static.inputs import row_inputs
from inference.static.packing import PackedLinears, best_rows, cannot_pack
from inference.static.words import MOST_ROWS
from inference.support import check_tree_support


class Kind(NamedTuple):
    """What tells two forwards apart, to torch's compiler and to a clock.

    Attributes:
        batched: several sequences.
        several: several rows of each.
        layers: whose features are captured.
        part: the layers that run; None for all.
        enters: rows are brought to the first of them.
        tree: logits of all rows, not of a prompt's last.
    """

    batched: bool
    several: bool
    layers: tuple[int, ...]
    part: tuple[int, ...] | None = None
    enters: bool = False
    tree: bool = True


class StaticEngine(Engine):
    """Runs a target over caches of one tensor.

    Args:
        target: whose weights do not change while the engine is open.
        compiled: fuse what is between attention and linear layers.
        pack: lay the weights of linear layers out for oneDNN; None: where that is possible.
        graphs: capture forwards of trees in CUDA graphs; None: on CUDA.

    Attributes:
        least_rows: a forward of fewer rows is filled up to so many, where that is faster.
        graphs: the captured forwards; None runs all of them operation by operation.
        warm_up_seconds: spent in first forwards of a kind, compilation and captures included.

    Raises:
        ValueError: a target whose layers differ in shape, or ``pack`` or ``graphs`` where it is
            not possible.
    """

    def __init__(
        self,
        target: TargetModel,
        compiled: bool = False,
        pack: bool | None = None,
        graphs: bool | None = None,
    ) -> None:
        super().__init__(target)
        self.name, self._compiled = "compiled" if compiled else "packed", compiled
        self.shape = kv_shape(target)
        reason = cannot_pack(target.lm_head.weight)
        if pack and reason:
            raise ValueError(f"pack: {reason}")
        self._packed: PackedLinears | None = None
        if pack or (pack is None and reason is None):
            keep_freed()
            self._packed = self._pack([target.model])
        self.least_rows = 1
        self._beside: list[Engine] = []
        self.tune()
        self._heads: list[tuple[Drafter, PackedLinears]] = []
        self._passing = PassingCache(self.shape.num_layers)
        self._kinds = CompiledKinds(self._forward) if compiled else None
        self._warm: set[tuple[Any, ...]] = set()
        self.warm_up_seconds = 0.0
        self.graphs = self._new_graphs(graphs)

    def _new_graphs(self, wanted: bool | None) -> Graphs | None:
        device = self.shape.device
        if device.type != "cuda":
            if wanted:
                raise ValueError(
                    f"graphs: CUDA graphs need a target on a CUDA device, not on {device.type}"
                )
            return None
        if wanted is False:
            return None
        capture = CudaCapture(
            device,
            f"graphs: the forward of target {self.target.name!r}",
            "give graphs=False to the engine, or decode with engine='eager'",
            WARM_UPS,
        )
        return Graphs(self.run, capture)

    @property
    def widths(self) -> tuple[int, ...] | None:
        """The graphs' buckets."""
        return None if self.graphs is None else BUCKETS

    @property
    def pages(self) -> str:
        """ "huge" where most packed weights lie in such pages."""
        return "huge" if self._packed is not None and self._packed.huge_share > 0.9 else ""

    @property
    def captured_seconds(self) -> float:
        """Of its graphs, and of the engines of draft models."""
        own = 0.0 if self.graphs is None else self.graphs.seconds
        return own + sum(engine.captured_seconds for engine in self._beside)

    def tune(self) -> None:
        """Measure what depends on the number of threads: how far single rows are filled up."""
        self.least_rows = 1 if self._packed is None else best_rows(self.target.lm_head)
        for engine in self._beside:
            engine.tune()

    def _pack(self, modules: Sequence[nn.Module]) -> PackedLinears:
        """Packed layers that are given back with the engine, closed or not."""
        packed = PackedLinears(modules)
        weakref.finalize(self, packed.close)
        return packed

    def prepare(self, drafter: Drafter) -> None:
        """Pack a head's linear layers too, where the target's are and the head's can be packed.

        Args:
            drafter: attached head that will draft for this engine.
        """
        if self._packed is None or any(drafter is head for head, _ in self._heads):
            return
        if cannot_pack(next(drafter.parameters())) is not None:
            return
        self._heads.append((drafter, self._pack([drafter])))

    def beside(self, model: TargetModel) -> Engine:
        """As the interface says; models that it does not suit run eagerly, and a warning says so.

        Args:
            model: that drafts.
        """
        if model is self.target:
            return self
        found = next((engine for engine in self._beside if engine.target is model), None)
        if found is None:
            found = self._engine_like_this(model)
            self._beside.append(found)
        return found

    def _engine_like_this(self, model: TargetModel) -> Engine:
        uncaptured = self.graphs is None and self.shape.device.type == "cuda"
        engine = None
        try:
            engine = StaticEngine(model, self._compiled, graphs=False if uncaptured else None)
            check_tree_support(engine)
        except ValueError as error:
            if engine is not None:
                engine.close()
            warnings.warn(f"the draft model runs on engine 'eager': {error}", stacklevel=4)
            return EagerEngine(model)
        return engine

    def close(self) -> None:
        """Unpack all linear layers, and free graphs, which have packed weights built in."""
        if self._kinds is not None:
            self._kinds.compiled.clear()
        for engine in self._beside:
            engine.close()
        self._beside.clear()
        if self.graphs is not None:
            self.graphs.clear()
        for _, packed in self._heads:
            packed.close()
        self._heads.clear()
        if self._packed is not None:
            self._packed.close()
            self._packed = None

    def new_cache(self, batch_size: int, capacity: int) -> StaticCache:
        """One tensor for all layers.

        With graphs it has room for padding, and sizes are rounded: where the next text's cache
        comes to lie where this one's was, its graphs still fit.
        """
        if self.graphs is not None:
            capacity = -(-(capacity + MOST_ROWS) // BLOCK) * BLOCK
        return StaticCache(self.shape, batch_size, capacity)

    def append(
        self,
        cache: StaticCache,
        tokens: Sequence[Tensor],
        depths: Sequence[Tensor],
        seen: Sequence[Tensor],
        *,
        feature_layers: Sequence[int] = (),
        logits_to_keep: int | Tensor = 0,
        run_layers: Collection[int] | None = None,
        entering: Tensor | None = None,
    ) -> TargetOutput:
        """As the interface says. Forwards of some layers are not captured."""
        part = None if run_layers is None else tuple(run_layers)
        # Prompts, of which the last logits are asked for, take their time in matrix products.
        tree = isinstance(logits_to_keep, int) and logits_to_keep == 0
        width, layers, graphs = max(map(len, tokens)), tuple(feature_layers), self.graphs
        if tree and part is None and graphs is not None and graphs.serves(cache, width):
            return self._replayed(graphs, cache, tokens, depths, seen, feature_layers)
        least = 1 if isinstance(logits_to_keep, Tensor) else self.least_rows
        if not tree and width < least:  # the last rows are those that were asked for
            assert isinstance(logits_to_keep, int)
            kept = torch.arange(width - logits_to_keep, width, device=self.shape.device)
            logits_to_keep = kept
        ids, positions = row_inputs(cache.lengths, tokens, depths, max(width, least))
        ids, positions = ids.to(self.shape.device), positions.to(self.shape.device)
        rows = self.rows(cache, depths, seen, ids.shape[1])
        cache.pending += width
        kind = Kind(len(ids) > 1, ids.shape[1] > 1, layers, part, entering is not None, tree)
        run = self._run_of(kind)
        if entering is not None:
            assert part is not None and part[0] not in layers, "who brings rows has their features"
            assert entering.dtype == self.shape.dtype, "compiled forwards take it as it comes"
            entering = F.pad(entering, (0, 0, 0, ids.shape[1] - width)).contiguous()
        with (
            self._timed(kind),
            self.target.only(part, entering),  # may ask the model first, as it is without rows
            tree_attention_of(self.target),
        ):
            out = self._checked(run, ids, positions, rows, layers, logits_to_keep)
        return first_rows(out, width)

    def _checked(self, run: Callable[..., TargetOutput], *inputs: Any) -> TargetOutput:
        """Run, and say what to do about a model that the compiler cannot take whole."""
        try:
            return run(*inputs)
        except TorchDynamoException as error:
            raise ValueError(
                f"target {self.target.name!r} ({self.target.model.config.model_type!r}) cannot be "
                f"compiled as one graph: use engine='packed' ({str(error).splitlines()[0]}); "
                "mixtures of experts need model.set_experts_implementation('grouped_mm')"
            ) from error

    def _replayed(self, graphs: Graphs, *rows: Any) -> TargetOutput:
        """A forward by graphs; the arguments are theirs."""
        before = graphs.seconds
        try:
            return graphs.append(*rows)
        finally:
            self.warm_up_seconds += graphs.seconds - before

    def run(
        self, ids: Tensor, positions: Tensor, rows: TreeRows, feature_layers: Sequence[int] = ()
    ) -> TargetOutput:
        """A forward whose rows are described by tensors alone.

        Args:
            ids: (B, N).
            positions: (B, N).
            rows: of the trees.
            feature_layers: as in `TargetModel.forward`.
        """
        kind = Kind(len(ids) > 1, ids.shape[1] > 1, tuple(feature_layers))
        with tree_attention_of(self.target):
            return self._run_of(kind)(ids, positions, rows, kind.layers, 0)

    def _run_of(self, kind: Kind) -> Callable[..., TargetOutput]:
        return self._kinds.of(kind) if self._kinds is not None and kind.tree else self._forward

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Compile and capture nothing meanwhile."""
        kinds, graphs = self._kinds, self.graphs
        self._kinds = None
        self.graphs = None if graphs is None else graphs.eager()
        try:
            yield
        finally:
            self._kinds, self.graphs = kinds, graphs

    def rows(
        self, cache: StaticCache, depths: Sequence[Tensor], seen: Sequence[Tensor], width: int
    ) -> TreeRows:
        """What attention needs; room is made in the cache.

        Args:
            cache: of this engine.
            depths: as in `append`.
            seen: as in `append`.
            width: F.
        """
        device = self.shape.device
        count = cache.columns(width)
        cache.reserve(count)
        seen, depths = [mask.to(device) for mask in seen], [depth.to(device) for depth in depths]
        starts = torch.tensor(cache.lengths, device=device) + cache.pending
        mask = row_mask(cache.lengths, seen, count, cache.pending)
        rows = TreeRows(
            cache.kv,
            starts[:, None] + torch.arange(width, device=device),
            self.shape.windows,
            as_bias(mask, self.shape.dtype),
        )
        window = next((window for window in self.shape.windows if window is not None), None)
        if window is not None:
            narrow(mask, cache.lengths, depths, cache.pending, window)
            rows.window_bias = as_bias(mask, self.shape.dtype)
        return rows

    def _forward(
        self,
        ids: Tensor,
        positions: Tensor,
        rows: TreeRows,
        feature_layers: tuple[int, ...],
        logits_to_keep: int | Tensor,
    ) -> TargetOutput:
        return self.target.forward(
            ids,
            position_ids=positions,
            cache=self._passing,
            feature_layers=feature_layers,
            logits_to_keep=logits_to_keep,
            handed={"rows": rows},
        )

    @contextmanager
    def _timed(self, kind: Kind) -> Iterator[None]:
        """Count the first forward of a kind as warming up."""
        form, start = (kind, self._kinds is None), time.perf_counter()
        yield
        if form not in self._warm:
            self._warm.add(form)
            self.warm_up_seconds += time.perf_counter() - start


def first_rows(out: TargetOutput, width: int) -> TargetOutput:
    """A forward's output without what its rows were filled up with.

    Args:
        out: of all rows.
        width: rows that were asked for.
    """
    features = None if out.features is None else out.features[:, :width]
    return TargetOutput(out.logits[:, :width], features, out.last_hidden[:, :width])


@contextmanager
def tree_attention_of(target: TargetModel) -> Iterator[None]:
    """Have a target attend by `inference.static.attention` meanwhile."""
    config = target.config
    own = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = own
