"""Documents: conversations by the hash of their token ids, and how they are dealt to shards."""

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from training.data.chat import TokenizedRow
from training.store.encoding import KEY_BYTES
from training.store.manifest import Manifest, Pending, Shard, StoreError, keys_digest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Document:
    """One conversation.

    Attributes:
        key: :func:`key_of` its ids.
        ids: token ids.
        supervised: true where the target produced the token.
    """

    key: bytes
    ids: list[int]
    supervised: list[bool]


@dataclass(frozen=True)
class Job:
    """A shard to write."""

    number: int
    documents: list[Document]

    @property
    def tokens(self) -> int:
        """Of all its documents."""
        return sum(len(document.ids) for document in self.documents)


def key_of(ids: Sequence[int] | Tensor) -> bytes:
    """What a document is found by: the same tokens have the same hidden states."""
    flat = torch.as_tensor(ids, dtype=torch.int32)
    return hashlib.sha256(flat.numpy().tobytes()).digest()[:KEY_BYTES]


def documents_of(rows: Iterable[TokenizedRow], max_length: int) -> list[Document]:
    """Rows as documents in the same order, cut at ``max_length``, each text once."""
    found: dict[bytes, Document] = {}
    for row in rows:
        ids, supervised = row.ids[:max_length], row.supervised[:max_length]
        key = key_of(ids)
        found.setdefault(key, Document(key, ids, supervised))
    return list(found.values())


def plan(
    manifest: Manifest,
    folder: Path,
    documents: Sequence[Document],
    shard_tokens: int,
    verify: bool = False,
) -> list[Job]:
    """Deal the documents that the store lacks to shards, the same ones however often it is asked.

    What was planned before and not finished is taken up again, so a stopped extraction continues
    with the very same shards on any number of processes. Documents of other data are added behind
    those that are there; a shard that is gone or has another size is made anew.

    Args:
        manifest: of the store; its planned shards are replaced by those of the jobs.
        folder: of the store.
        documents: all that it is to hold, in the order of the data.
        shard_tokens: a shard is closed before it holds more, unless by a single document.
        verify: read every finished shard and make damaged ones anew, too.

    Returns:
        Shards to write.
    """
    _drop_lost(manifest, folder, verify)
    stored = {key for shard in manifest.shards for key in read_keys(folder, shard)}
    missing = [document for document in documents if document.key not in stored]
    jobs = _planned_before(manifest, missing)
    if jobs is None:
        taken = {shard.number for shard in manifest.shards}
        free = (number for number in range(len(taken) + len(missing)) if number not in taken)
        jobs = [Job(next(free), part) for part in _cut(missing, shard_tokens)]
    manifest.pending = [
        Pending(job.number, len(job.documents), keys_digest([d.key for d in job.documents]))
        for job in jobs
    ]
    return jobs


def read_keys(folder: Path, shard: Shard) -> list[bytes]:
    """Keys of the documents of a shard.

    Raises:
        StoreError: the file is damaged.
    """
    try:
        with safe_open(folder / shard.file, "pt") as file:
            flat = file.get_tensor("keys").numpy().tobytes()
    except (OSError, SafetensorError) as error:
        raise StoreError(
            f"feature store: {folder / shard.file} is damaged ({error}): delete it and extract "
            "again"
        ) from error
    return [flat[at : at + KEY_BYTES] for at in range(0, len(flat), KEY_BYTES)]


def damage(folder: Path, shard: Shard, verify: bool) -> str | None:
    """What is wrong with the file of a shard, None where nothing is.

    Args:
        folder: of the store.
        shard: what was written.
        verify: read the whole file and compare its hash, not its size alone.
    """
    path = folder / shard.file
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    if size != shard.bytes:
        return f"has {size} bytes instead of {shard.bytes}"
    if verify and sha256(path) != shard.sha256:
        return "has other bytes than were written (SHA-256)"
    return None


def sha256(path: Path) -> str:
    """Hash of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _drop_lost(manifest: Manifest, folder: Path, verify: bool) -> None:
    """Forget finished shards whose files are not what was written."""
    kept = []
    for shard in manifest.shards:
        reason = damage(folder, shard, verify)
        if reason is None:
            kept.append(shard)
        else:
            logger.warning("%s %s: it is made anew", folder / shard.file, reason)
    manifest.shards = kept


def _planned_before(manifest: Manifest, missing: Sequence[Document]) -> list[Job] | None:
    """The planned shards over what is missing, None where they are of other documents."""
    jobs, start = [], 0
    for entry in manifest.pending:
        part = list(missing[start : start + entry.documents])
        if keys_digest([document.key for document in part]) != entry.digest:
            return None
        jobs.append(Job(entry.number, part))
        start += entry.documents
    return jobs if start == len(missing) else None


def _cut(documents: Sequence[Document], shard_tokens: int) -> list[list[Document]]:
    """Consecutive documents, at most ``shard_tokens`` together."""
    parts: list[list[Document]] = []
    room = 0
    for document in documents:
        if not parts or len(document.ids) > room:
            parts.append([])
            room = shard_tokens
        parts[-1].append(document)
        room -= len(document.ids)
    return parts
