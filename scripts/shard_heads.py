"""Copy trained heads as small files: safetensors shards of a limited size, and a list of hashes.

    python -m scripts.shard_heads outputs/compare/*/head --out outputs/heads --shard-mb 15

Each head goes to a folder of its own, named after the folder its run was in (or after itself where
it is not called `head`), and loads from there like any native head. `manifest.json` holds the size
and SHA-256 of every file. The last line is one JSON object.
"""

import argparse
import hashlib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel

import drafters
from scripts.common import parser_for, print_json, run, write_json_atomic

DTYPES = ("float32", "bfloat16", "float16")


def main(argv: list[str] | None = None) -> None:
    """Write all heads, then the manifest."""
    args = parse_args(argv)
    names = [folder.parent.name if folder.name == "head" else folder.name for folder in args.heads]
    if len(set(names)) != len(names):
        raise ValueError(f"heads: two of them would have the same name: {sorted(names)}")
    for folder, name in zip(args.heads, names, strict=True):
        write_shards(folder, args.out / name, args.shard_mb, getattr(torch, args.dtype))
    manifest = {"files": listed(args.out), "dtype": args.dtype}
    write_json_atomic(args.out / "manifest.json", manifest)
    total = sum(file["bytes"] for file in manifest["files"].values())
    print(f"{len(names)} heads, {len(manifest['files'])} files, {total / 1e6:.1f} MB in {args.out}")
    print_json({"out": str(args.out), "heads": names, "bytes": total})


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for(__doc__)
    parser.add_argument("heads", type=Path, nargs="+", metavar="FOLDER", help="native heads")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to")
    parser.add_argument("--shard-mb", type=float, default=15, metavar="MB", help="largest file")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the copies")
    args = parser.parse_args(argv)
    if not args.shard_mb > 0:
        parser.error(f"--shard-mb must be above 0, got {args.shard_mb}")
    return args


def write_shards(folder: Path, out: Path, shard_mb: float, dtype: torch.dtype) -> None:
    """One head, in ``dtype``.

    Raises:
        ValueError: it is not a native head, or one of its tensors alone is larger than a shard.
    """
    try:
        head = AutoModel.from_pretrained(str(folder), dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"head {folder}: cannot load it: {error}") from error
    if not isinstance(head, drafters.Drafter):
        raise ValueError(f"head {folder} is not one of Headway's heads")
    limit = int(shard_mb * 1e6)
    for name, tensor in head.state_dict().items():
        if tensor.nbytes > limit:
            raise ValueError(
                f"head {folder}: {name} alone is {tensor.nbytes / 1e6:.1f} MB; raise --shard-mb"
            )
    head.save_pretrained(out, max_shard_size=limit)


def listed(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file below ``folder``, by its path there."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if path.name != "manifest.json":
            content = path.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            found[str(path.relative_to(folder))] = {"bytes": len(content), "sha256": digest}
    return found


if __name__ == "__main__":
    run(main)
