"""Small stores of a tiny random target."""

from collections.abc import Sequence
from pathlib import Path

import torch

from drafters import TargetModel
from training.data.chat import TokenizedRow
from training.store import Manifest
from training.store.documents import Job, documents_of, plan
from training.store.writer import begin, claim, merge, write_shards

LAYERS = (1, 3, 4)
SIZES = (5, 9, 30, 4, 17, 12, 8, 22, 6, 11)
SHARD_TOKENS = 40


def row(length: int, seed: int) -> TokenizedRow:
    ids = torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return TokenizedRow(ids, [False, False] + [True] * (length - 2), seed)


ROWS = [row(size, number) for number, size in enumerate(SIZES)]


def planned(
    folder: Path,
    target: TargetModel,
    rows: Sequence[TokenizedRow] = ROWS,
    dtype: str = "float64",
    layers: Sequence[int] = LAYERS,
    verify: bool = False,
) -> tuple[Manifest, list[Job]]:
    """The plan of an extraction, written down."""
    manifest = Manifest.take(folder, Manifest.of(target, layers, dtype))
    documents = documents_of(rows, manifest.max_length)
    jobs = plan(manifest, folder, documents, SHARD_TOKENS, verify)
    begin(folder, manifest)
    return manifest, jobs


def extract(
    folder: Path,
    target: TargetModel,
    rows: Sequence[TokenizedRow] = ROWS,
    dtype: str = "float64",
    layers: Sequence[int] = LAYERS,
    verify: bool = False,
) -> list[int]:
    """Make or continue a store; the numbers of the shards that were written."""
    with claim(folder):
        manifest, jobs = planned(folder, target, rows, dtype, layers, verify)
        write_shards(target, folder, manifest, jobs, 64, lambda job: merge(folder, manifest))
    return [job.number for job in jobs]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a store but its lock."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def flip(path: Path, place: int) -> None:
    """Change one bit of a file, ``place`` bytes from its end."""
    data = bytearray(path.read_bytes())
    data[-place] ^= 1
    path.write_bytes(data)
