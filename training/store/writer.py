"""Writing a feature store: the target's hidden states, one shard at a time.

A shard is computed in memory, written under a temporary name, synced and renamed; then a small
record says that it is finished, and the main process takes the records into the manifest. Whatever
is killed at whatever moment, the folder is a valid store and the same command continues it.

Legend: n tokens, D hidden.
"""

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from drafters import TargetModel
from training import locks
from training.store.documents import Document, Job, sha256
from training.store.encoding import (
    LAST,
    SCALES,
    checksum,
    encode,
    part_names,
    predicted_bytes,
    row_tensors,
)
from training.store.manifest import (
    Manifest,
    Shard,
    StoreError,
    finished_records,
    put,
    record_path,
    shard_file,
    write_json,
)

logger = logging.getLogger(__name__)


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Make the folder and keep other extractions out of it while the body runs.

    Raises:
        StoreError: another one is writing there, or the folder is not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise StoreError(
            f"feature store: cannot write to {folder} ({error}): name another folder"
        ) from error
    with lock:
        if not locks.lock(lock):
            raise StoreError(
                f"feature store: another extraction is writing to {folder}: wait for its end, or "
                "name another folder"
            )
        yield


def begin(folder: Path, manifest: Manifest) -> None:
    """Write the plan down, and clear what a killed extraction left half-written."""
    finished = {shard.number for shard in manifest.shards}
    for path, shard in list(finished_records(folder)):
        if shard.number not in finished:
            path.unlink()
    whole = {shard.file for shard in manifest.shards}
    for path in [*folder.glob("*.tmp"), *folder.glob("shard-*.safetensors")]:
        if path.name not in whole:
            path.unlink()
    merge(folder, manifest)


def merge(folder: Path, manifest: Manifest) -> None:
    """Take the records of finished shards into the manifest."""
    records = list(finished_records(folder))
    manifest.finish(shard for _, shard in records)
    manifest.write(folder)
    for path, _ in records:
        path.unlink()


def write_shards(
    target: TargetModel,
    folder: Path,
    manifest: Manifest,
    jobs: Sequence[Job],
    batch_tokens: int,
    finished: Callable[[Job], None],
) -> None:
    """Compute and write shards; the next one is computed while the last one is written.

    Args:
        target: the teacher.
        folder: of the store.
        manifest: layers and dtype are taken from it.
        jobs: this process's.
        batch_tokens: tokens, with padding, that go through the target together.
        finished: called with each shard that is safely on disk.

    Raises:
        StoreError: the disk is full or not writable, or hidden states are not finite; what is
            finished is kept.
    """
    waiting: Future[None] | None = None
    with ThreadPoolExecutor(1) as pool:
        for job in jobs:
            tensors = compute(target, job.documents, manifest.layers, manifest.dtype, batch_tokens)
            if waiting is not None:
                waiting.result()
            waiting = pool.submit(_write, folder, job, tensors, finished)
            del tensors
        if waiting is not None:
            waiting.result()


@torch.no_grad()
def compute(
    target: TargetModel,
    documents: Sequence[Document],
    layers: Sequence[int],
    dtype: str,
    batch_tokens: int,
) -> dict[str, Tensor]:
    """The tensors of a shard, but for those that describe its documents.

    Documents go through the target alone in their row, with padding behind them that a causal model
    never sees: packing cannot leak into the store, whatever the model.

    Raises:
        StoreError: hidden states that are not finite or do not fit the dtype.
    """
    sizes = torch.tensor([len(document.ids) for document in documents])
    starts = (sizes.cumsum(0) - sizes).tolist()
    total = int(sizes.sum())
    found = {
        name: torch.empty((total, width), dtype=kind)
        for name, (kind, width) in row_tensors(layers, target.hidden_size, dtype).items()
        if name not in ("ids", "supervised")
    }
    for batch in similar(documents, batch_tokens, target.rotary_switch):
        states = run_alone(target, [documents[place].ids for place in batch], layers)
        for name, values in states.items():
            try:
                encoded = encode(name, values.flatten(0, 1), dtype)
            except ValueError as error:
                raise StoreError(f"feature store: {error}") from error
            for key, part in encoded.items():
                rows = part.cpu().unflatten(0, values.shape[:2])
                for row, place in enumerate(batch):
                    size = len(documents[place].ids)
                    found[key][starts[place] : starts[place] + size] = rows[row, :size]
    found["ids"] = torch.tensor([i for d in documents for i in d.ids], dtype=torch.int32)
    found["supervised"] = torch.tensor([s for d in documents for s in d.supervised]).byte()
    return found


def run_alone(
    target: TargetModel, texts: Sequence[Sequence[int]], layers: Sequence[int]
) -> dict[str, Tensor]:
    """Hidden states of texts in rows of their own.

    Returns:
        Part -> (texts, longest, D).
    """
    ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int64)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
    out = target.forward(ids.to(target.device), feature_layers=layers, logits_to_keep=1)
    parts = [] if out.features is None else out.features.split(target.hidden_size, dim=-1)
    return dict(zip(part_names(layers), [*parts, out.last_hidden], strict=True))


def similar(
    documents: Sequence[Document], batch_tokens: int, switch: int | None = None
) -> list[list[int]]:
    """Places of documents in batches of similar length, longest first.

    Args:
        documents: to batch.
        batch_tokens: at most so many tokens with padding, unless a single document has more.
        switch: no batch has documents on both sides of this length.
    """
    batches: list[list[int]] = []
    order = sorted(range(len(documents)), key=lambda place: -len(documents[place].ids))
    for place in order:
        size = len(documents[place].ids)
        width = len(documents[batches[-1][0]].ids) if batches else 0
        crosses = switch is not None and size <= switch < width
        if not batches or crosses or width * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
        batches[-1].append(place)
    return batches


def _write(
    folder: Path, job: Job, tensors: dict[str, Tensor], finished: Callable[[Job], None]
) -> None:
    try:
        shard = write_shard(folder, job, tensors)
        write_json(record_path(folder, job.number), asdict(shard))
        finished(job)
    except (OSError, SafetensorError) as error:
        for leftover in folder.glob(f"shard-{job.number:05d}.*.tmp"):
            leftover.unlink(missing_ok=True)
        raise StoreError(
            f"feature store: cannot write {shard_file(job.number)} in {folder}: {error}. The "
            "shards before it are safe: free disk space or make the folder writable, then start "
            "the same command again"
        ) from error


def write_shard(folder: Path, job: Job, tensors: dict[str, Tensor]) -> Shard:
    """Write one shard file under its final name.

    Args:
        folder: of the store.
        job: number and documents.
        tensors: of :func:`compute`.

    Raises:
        OSError, SafetensorError: it cannot be written.
    """
    sizes = torch.tensor([0, *(len(document.ids) for document in job.documents)])
    offsets = sizes.cumsum(0)
    parts = [name for name in tensors if name == LAST or name.startswith("layer_")]
    parts = [name for name in parts if not name.endswith(SCALES)]
    checks = []
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        rows = {name: tensor[start:stop] for name, tensor in tensors.items()}
        checks.append([checksum(part, rows) for part in parts])
    keys = torch.frombuffer(
        bytearray(b"".join(document.key for document in job.documents)), dtype=torch.uint8
    )
    described = {
        "offsets": offsets,
        "keys": keys.view(len(job.documents), -1),
        "checks": torch.tensor(checks, dtype=torch.int64),
    }
    final = folder / shard_file(job.number)
    temporary = final.with_name(final.name + ".tmp")
    save_file(tensors | described, temporary)
    temporary.chmod(0o644)  # safetensors keeps files to their owner
    size, digest = temporary.stat().st_size, sha256(temporary)
    put(temporary, final)
    return Shard(
        number=job.number,
        documents=len(job.documents),
        tokens=job.tokens,
        supervised=sum(sum(document.supervised) for document in job.documents),
        bytes=size,
        sha256=digest,
    )


# Estimates --------------------------------------------------------------------------------------


def predict_bytes(manifest: Manifest, jobs: Sequence[Job]) -> int:
    """Bytes that these shards will take."""
    tensors = row_tensors(manifest.layers, manifest.hidden_size, manifest.dtype)
    return sum(predicted_bytes(tensors, len(job.documents), job.tokens) for job in jobs)


def predict_seconds(
    target: TargetModel, manifest: Manifest, jobs: Sequence[Job], batch_tokens: int, timed: int = 4
) -> float:
    """Seconds that one process will need, from a few batches of different lengths.

    Args:
        target: the teacher.
        manifest: of the store.
        jobs: all of them.
        batch_tokens: see :func:`write_shards`.
        timed: how many batches to run.
    """
    batches = [
        [job.documents[place] for place in batch]
        for job in jobs
        for batch in similar(job.documents, batch_tokens, target.rotary_switch)
    ]
    if not batches:
        return 0.0
    batches.sort(key=lambda batch: len(batch[0].ids))
    places = [round(i * (len(batches) - 1) / max(1, timed - 1)) for i in range(timed)]
    compute(target, batches[0], manifest.layers, manifest.dtype, batch_tokens)  # warm up
    rates = []
    for place in sorted(set(places)):
        start = time.perf_counter()
        compute(target, batches[place], manifest.layers, manifest.dtype, batch_tokens)
        width = len(batches[place][0].ids)
        rates.append((width, (time.perf_counter() - start) / (width * len(batches[place]))))
    total = 0.0
    for batch in batches:
        width = len(batch[0].ids)
        nearest = min(rates, key=lambda rate: abs(rate[0] - width))
        total += nearest[1] * width * len(batch)
    return total


def check_room(folder: Path, needed: int, present: int, quota_bytes: float | None) -> None:
    """Refuse what does not fit before anything is written.

    Args:
        folder: of the store; need not exist yet.
        needed: bytes to write.
        present: bytes of the shards that are there.
        quota_bytes: the whole store may take so many; None is no limit.

    Raises:
        StoreError: above the quota, or above what the disk has left.
    """
    if quota_bytes is not None and present + needed > quota_bytes:
        raise StoreError(
            f"feature store: {(present + needed) / 1e9:.3f} GB would exceed the quota of "
            f"{quota_bytes / 1e9:.3f} GB: raise --quota-gb, or use fp8, fewer layers or fewer rows"
        )
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise StoreError(
            f"feature store: {needed / 1e9:.3f} GB are needed and the disk of {place} has "
            f"{free / 1e9:.3f} GB left: free some, or use fp8, fewer layers or fewer rows"
        )
