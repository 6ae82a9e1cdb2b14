"""Reading a feature store: documents in any order, memory-mapped, every byte checked.

Opening a store looks at the size and the index of each shard. What is read later is compared with
the checksums of the document (CRC-32, about 1 GB/s of one core), so damage anywhere is noticed when
it would first matter, and nothing is read that is not used. Only ``skip_damaged``, which must know
before training what is left, reads and hashes every shard at the start (about 0.5 to 2 GB/s).

Legend: n tokens, D hidden.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafters import TargetModel
from training.data.chat import TokenizedRow
from training.store.documents import damage, key_of
from training.store.encoding import KEY_BYTES, SCALES, checksum, decode, part_names
from training.store.manifest import Manifest, Shard, StoreError, check_fingerprint
from training.store.writer import run_alone

logger = logging.getLogger(__name__)
OPEN_FILES = 128


class Place(NamedTuple):
    """Where a document is: which of the readable shards, and which of its documents."""

    shard: int
    document: int


class _Index(NamedTuple):
    shard: Shard
    offsets: Tensor  # (documents + 1,)
    checks: Tensor  # (documents, parts)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Of rows (n, D), averaged over rows: a few rows of most models are a hundred times as long as
    the others and would hide them.
    """
    return ((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).mean().item()


class FeatureStore:
    """An open store, for rows of at most so many tokens.

    Args:
        folder: that ``scripts.extract_features`` wrote.
        target: must be the one that it holds; its dtype is that of what is read.
        length: rows are cut at so many tokens; one that is cut has the hidden states of the
            beginning of a stored document, which a causal model cannot tell from the whole.
        skip_damaged: leave damaged shards out instead of refusing; reads all of them.

    Raises:
        StoreError: no store, of another target, or damaged.
    """

    def __init__(
        self, folder: Path, target: TargetModel, length: int, skip_damaged: bool = False
    ) -> None:
        self.folder, self.length, self.dtype = folder, length, target.dtype
        self.manifest = Manifest.read(folder)
        own = target.shape_fields()
        check_fingerprint(self.manifest, own["target_fingerprint"], own["target_name"], folder)
        run_in = str(target.dtype).removeprefix("torch.")
        if run_in != self.manifest.target_dtype:
            logger.warning(
                "feature store %s: the target was run in %s, now it is in %s: hidden states differ "
                "by rounding",
                folder,
                self.manifest.target_dtype,
                run_in,
            )
        self.parts = part_names(self.manifest.layers)
        self.damaged: list[Shard] = []
        self._shards: list[_Index] = []
        self._places: dict[bytes, Place] = {}
        self._files: OrderedDict[int, Any] = OrderedDict()
        for shard in self.manifest.shards:
            try:
                self._open(shard, skip_damaged)
            except StoreError as error:
                if not skip_damaged:
                    raise
                logger.warning("left out: %s", error)
                self.damaged.append(shard)

    def _open(self, shard: Shard, verify: bool) -> None:
        """Take a shard into the index."""
        if (reason := damage(self.folder, shard, verify)) is not None:
            raise self._damage(shard, reason)
        try:
            with safe_open(self.folder / shard.file, "pt") as file:
                offsets, checks = file.get_tensor("offsets"), file.get_tensor("checks")
                keys = file.get_tensor("keys").numpy().tobytes()
                sizes = offsets.diff().tolist()
                shapes = (len(sizes), len(keys) // KEY_BYTES, tuple(checks.shape))
                expected = (shard.documents, shard.documents, (shard.documents, len(self.parts)))
                ends = (int(offsets[0]), int(offsets[-1]))
                if shapes != expected or min(sizes) < 1 or ends != (0, shard.tokens):
                    raise self._damage(shard, "has an index that does not fit its contents")
                for number, size in enumerate(sizes):
                    key = keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]
                    if size > self.length:
                        start = int(offsets[number])
                        key = key_of(file.get_slice("ids")[start : start + self.length])
                    self._places.setdefault(key, Place(len(self._shards), number))
        except (OSError, SafetensorError) as error:
            raise self._damage(shard, f"cannot be read ({error})") from error
        self._shards.append(_Index(shard, offsets, checks))

    @property
    def documents(self) -> int:
        """That can be found."""
        return len(self._places)

    def find(self, ids: Sequence[int]) -> Place:
        """The document that a row is, or is the beginning of.

        Args:
            ids: token ids, at most ``length``.

        Raises:
            KeyError: it is not here.
        """
        return self._places[key_of(ids)]

    def present(self, rows: Iterable[TokenizedRow]) -> list[TokenizedRow]:
        """The rows whose documents are here: all of them, but for those of damaged shards that were
        left out.

        Raises:
            StoreError: a row was never extracted; the message names it.
        """
        kept: list[TokenizedRow] = []
        missing: list[tuple[int, TokenizedRow]] = []
        for number, row in enumerate(rows):
            if key_of(row.ids[: self.length]) in self._places:
                kept.append(row)
            else:
                missing.append((number, row))
        lost = sum(shard.documents for shard in self.damaged)
        distinct = {key_of(row.ids[: self.length]) for _, row in missing}
        if len(distinct) > lost:
            number, row = missing[0]
            raise StoreError(
                f"feature store {self.folder} lacks {len(distinct)} of the rows, the first is row "
                f"{row.number if row.number >= 0 else number} ({len(row.ids)} tokens; documents "
                f"were cut at {self.manifest.max_length}). Add them: python -m "
                f"scripts.extract_features --recipe <this run's config> --out {self.folder}"
            )
        if missing:
            logger.warning(
                "data: left out %d rows of damaged shards of the feature store %s",
                len(missing),
                self.folder,
            )
        if not kept:
            raise StoreError(f"feature store {self.folder}: no row is left, all shards are damaged")
        return kept

    def read(self, place: Place, size: int, parts: Sequence[str]) -> dict[str, Tensor]:
        """Hidden states of the first tokens of a document, whose checksums are compared.

        Args:
            place: of the document.
            size: n.
            parts: some of ``parts``.

        Returns:
            Part -> (n, D), in the target's dtype.

        Raises:
            StoreError: damaged.
        """
        index = self._shards[place.shard]
        start, stop = index.offsets[place.document : place.document + 2].tolist()
        found = {}
        for part in parts:
            try:
                file = self._file(place.shard)
                kept = {part: file.get_slice(part)[start:stop]}
                if self.manifest.dtype == "fp8" and part != self.parts[-1]:
                    kept[part + SCALES] = file.get_slice(part + SCALES)[start:stop]
            except (OSError, SafetensorError) as error:
                raise self._damage(index.shard, f"cannot be read ({error})") from error
            if checksum(part, kept) != int(index.checks[place.document, self.parts.index(part)]):
                raise self._damage(
                    index.shard, f"has a wrong checksum at {part} of document {place.document}"
                )
            cut = {name: tensor[:size] for name, tensor in kept.items()}
            found[part] = decode(part, cut, self.dtype)
        return found

    def check(self, target: TargetModel, ids: Sequence[int], tokens: int = 64) -> float:
        """What is stored must be what the target says now, here of the beginning of one row.

        Catches what no hash can: a release of transformers that captures other layers, other
        attention, weights that differ where the fingerprint does not look.

        Returns:
            The largest difference, relative to each token's hidden state and averaged over tokens.

        Raises:
            StoreError: above what the dtypes explain.
        """
        ids = ids[: self.length]
        size = min(tokens, len(ids))
        stored = self.read(self.find(ids), size, self.parts)
        said = run_alone(target, [ids[:size]], self.manifest.layers)
        errors = {
            part: relative_error(stored[part].double(), said[part][0].cpu().double())
            for part in self.parts
        }
        worst = max(errors, key=lambda part: errors[part])
        exact = {self.manifest.dtype, self.manifest.target_dtype, str(self.dtype)[6:]}
        tolerance = 1e-3 if exact <= {"float32", "float64"} else 5e-2
        if not errors[worst] <= tolerance:
            raise StoreError(
                f"feature store {self.folder}: its {worst} differs by {errors[worst]:.2g} (allowed "
                f"{tolerance}) from what the target says now: it was extracted with other weights, "
                "attention or another release of transformers; extract again"
            )
        return errors[worst]

    def _file(self, number: int) -> Any:
        """A memory-mapped shard; the last few stay open."""
        if number not in self._files:
            if len(self._files) >= OPEN_FILES:
                self._files.popitem(last=False)
            path = self.folder / self._shards[number].shard.file
            self._files[number] = safe_open(path, "pt").__enter__()
        self._files.move_to_end(number)
        return self._files[number]

    def _damage(self, shard: Shard, reason: str) -> StoreError:
        return StoreError(
            f"feature store: {self.folder / shard.file} {reason}: delete this file and start the "
            "same scripts.extract_features command again, which makes it anew, or train without "
            f"its {shard.documents} documents with data.skip_damaged=true"
        )
