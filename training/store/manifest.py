"""The manifest of a feature store: what the shards hold, and files that are whole or not there."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from drafters import TargetModel

FORMAT = 1
CONVENTION = "layer_k is hidden_states[k]: the residual stream that enters decoder layer k"
NAME = "manifest.json"


class StoreError(ValueError):
    """A feature store cannot be written, read or used here; the message says what to do."""


@dataclass(frozen=True)
class Shard:
    """A finished shard.

    Attributes:
        number: from 0.
        documents, tokens, supervised: what it holds.
        bytes: size of its file.
        sha256: of its file.
    """

    number: int
    documents: int
    tokens: int
    supervised: int
    bytes: int
    sha256: str

    @property
    def file(self) -> str:
        """Its file in the folder of the store."""
        return shard_file(self.number)


@dataclass(frozen=True)
class Pending:
    """A shard that is planned but not finished.

    Attributes:
        number: from 0.
        documents: how many it will hold.
        digest: of their keys.
    """

    number: int
    documents: int
    digest: str


@dataclass
class Manifest:
    """What a store holds, and of which target.

    Attributes:
        target_name: as it was given, for people.
        target_fingerprint: hashes of its shape, weights, tokenizer and chat template.
        target_dtype: that it was run in.
        hidden_size: D.
        layers: ``hidden_states`` indices beside the last hidden state.
        dtype: of the values, a key of ``training.store.encoding.DTYPES``.
        max_length: documents were cut at so many tokens.
        shards: finished ones, by number.
        pending: planned ones, by number.
    """

    target_name: str
    target_fingerprint: dict[str, str]
    target_dtype: str
    hidden_size: int
    layers: list[int]
    dtype: str
    max_length: int
    shards: list[Shard] = field(default_factory=list)
    pending: list[Pending] = field(default_factory=list)

    @classmethod
    def of(
        cls, target: TargetModel, layers: Sequence[int], dtype: str, max_length: int | None = None
    ) -> "Manifest":
        """The manifest of an empty store.

        Args:
            target: the teacher.
            layers: ``hidden_states`` indices to keep.
            dtype: of the values.
            max_length: cut documents at so many tokens; None is the target's own limit.

        Raises:
            StoreError: layers that the target does not have, or an option without effect.
        """
        layers = list(layers)
        if sorted(set(layers)) != layers or not set(layers) <= set(range(target.num_layers)):
            raise StoreError(
                f"layers must rise and lie in 0..{target.num_layers - 1}, got {layers}"
            )
        if dtype == "fp8" and not layers:
            raise StoreError(
                "fp8 has no effect without layers: the last hidden state is kept in bfloat16. "
                "Use bfloat16"
            )
        if max_length is not None and max_length < 2:
            raise StoreError(f"max_length must be at least 2, got {max_length}")
        return cls(
            target_name=target.shape_fields()["target_name"],
            target_fingerprint=target.fingerprint(),
            target_dtype=str(target.dtype).removeprefix("torch."),
            hidden_size=target.hidden_size,
            layers=layers,
            dtype=dtype,
            max_length=min(max_length or target.max_length, target.max_length),
        )

    def counts(self) -> dict[str, int]:
        """Documents, tokens, supervised tokens and bytes of all shards."""
        names = ("documents", "tokens", "supervised", "bytes")
        return {name: sum(getattr(shard, name) for shard in self.shards) for name in names}

    def write(self, folder: Path) -> None:
        """Put it into its folder, whole or not at all.

        Raises:
            OSError: the folder is full or not writable.
        """
        record = {"format": FORMAT, "convention": CONVENTION, **asdict(self)}
        record |= {"counts": self.counts()}
        for shard in record["shards"]:
            shard["file"] = shard_file(shard["number"])
        write_json(folder / NAME, record)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """The manifest of a store, with shards that other processes finished since it was written.

        Raises:
            StoreError: there is none, or it cannot be read here.
        """
        path = folder / NAME
        if not path.is_file():
            raise StoreError(
                f"feature store: {folder} has no {NAME}: name a folder that "
                "scripts.extract_features wrote"
            )
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            version = record["format"]
            if version == FORMAT:
                own = {item.name: record[item.name] for item in fields(cls)}
                own["shards"] = [_shard(entry) for entry in own["shards"]]
                own["pending"] = [Pending(**entry) for entry in own["pending"]]
                found = cls(**own)
                found.finish(shard for _, shard in finished_records(folder))
                return found
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"feature store: {path} is damaged ({error!r}): restore it, or delete the folder "
                "and extract again"
            ) from error
        raise StoreError(
            f"feature store: {path} has format {version}, this version reads {FORMAT}: extract "
            "again"
        )

    @classmethod
    def take(cls, folder: Path, wanted: "Manifest") -> "Manifest":
        """The manifest of a store that is to be extended, or ``wanted`` where there is none yet.

        Raises:
            StoreError: the folder holds something else.
        """
        if not (folder / NAME).exists():
            if next(folder.glob("shard-*"), None) is not None:
                raise StoreError(
                    f"feature store: {folder} has shards but no {NAME}: restore it, or name "
                    "another folder"
                )
            return wanted
        found = cls.read(folder)
        found.check_same(wanted, folder)
        return found

    def finish(self, shards: Iterator[Shard]) -> None:
        """Move shards from the planned to the finished ones."""
        known = {shard.number: shard for shard in self.shards}
        known |= {shard.number: shard for shard in shards}
        self.shards = [known[number] for number in sorted(known)]
        self.pending = [entry for entry in self.pending if entry.number not in known]

    def check_same(self, wanted: "Manifest", folder: Path) -> None:
        """Refuse to add what another target, or other settings, would give.

        Raises:
            StoreError: naming what differs, with both values.
        """
        for name in ("hidden_size", "layers", "dtype", "target_dtype", "max_length"):
            have, want = getattr(self, name), getattr(wanted, name)
            if have != want:
                raise StoreError(
                    f"feature store {folder}: its {name} is {have}, now it would be {want}: use "
                    "the same, or another folder"
                )
        check_fingerprint(self, wanted.target_fingerprint, wanted.target_name, folder)


def check_fingerprint(
    manifest: Manifest, fingerprint: dict[str, str], name: str, folder: Path
) -> None:
    """Refuse another target.

    Raises:
        StoreError: naming what differs, with both values.
    """
    for key in sorted(manifest.target_fingerprint.keys() & fingerprint.keys()):
        have, want = manifest.target_fingerprint[key], fingerprint[key]
        if have != want:
            fix = "give the same data.chat_template" if key == "chat_template" else "extract again"
            raise StoreError(
                f"feature store {folder} is of another target: its {key} hash is {have} "
                f"({manifest.target_name!r}), this target's is {want} ({name!r}): {fix}"
            )


def shard_file(number: int) -> str:
    """Name of a shard's file."""
    return f"shard-{number:05d}.safetensors"


def record_path(folder: Path, number: int) -> Path:
    """Where a process says that a shard is finished, until the manifest does."""
    return folder / f"shard-{number:05d}.json"


def finished_records(folder: Path) -> Iterator[tuple[Path, Shard]]:
    """Shards that are finished but not yet in the manifest."""
    for path in sorted(folder.glob("shard-*.json")):
        yield path, _shard(json.loads(path.read_text(encoding="utf-8")))


def keys_digest(keys: Sequence[bytes]) -> str:
    """Hash of the keys of some documents in their order."""
    return hashlib.sha256(b"".join(keys)).hexdigest()[:16]


def write_json(path: Path, record: dict[str, Any]) -> None:
    """A JSON file that is whole or not there."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    put(temporary, path)


def put(temporary: Path, final: Path) -> None:
    """Give a written file its name; from here on both survive a power cut."""
    _sync(temporary)
    os.replace(temporary, final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _shard(entry: dict[str, Any]) -> Shard:
    return Shard(**{item.name: entry[item.name] for item in fields(Shard)})
