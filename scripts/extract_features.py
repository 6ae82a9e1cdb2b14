"""Run the target over a data set once and keep its hidden states for training.

    python -m scripts.extract_features --recipe recipes/smollm2-135m/eagle3.yaml --out store
    python -m scripts.extract_features --target T --data answers.jsonl --layers 2 15 27 --out store
    accelerate launch -m scripts.extract_features --recipe FILE --out store --quota-gb 200

Size and time are estimated before anything is written; --estimate stops there. With --recipe the
target, the data and the layers are those of a training recipe, whose keys can be overridden as for
recipes.train (--data.limit 100). Train with data.features=STORE.

Documents are stored whole and once, whatever the recipe's packing, length or seed. The same command
continues an extraction that was stopped, with any number of processes, and other data is added to
what is there; another target, other layers or another dtype are refused. All processes write into
one folder. The last line is one JSON object.
"""

import argparse
import json
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list
from tqdm.auto import tqdm

from drafters import TargetModel
from recipes.heads import make_drafter
from recipes.rows import encode_for, load_answers
from recipes.train import load_target, show_progress
from scripts.common import add_options, parser_for, print_json, run
from training.config import TrainConfig, parse_config
from training.data.batches import PackedDataset
from training.data.chat import TokenizedRow
from training.data.encoding import encode_all
from training.store.documents import Document, Job, documents_of, plan
from training.store.encoding import DTYPES, row_tensors
from training.store.manifest import Manifest
from training.store.writer import (
    begin,
    check_room,
    claim,
    merge,
    predict_bytes,
    predict_seconds,
    write_shards,
)

logger = logging.getLogger(__name__)


def parse_args(argv: list[str] | None) -> tuple[argparse.Namespace, TrainConfig]:
    """The command line, and the recipe that it names or amounts to.

    Raises:
        ValueError: neither a recipe nor target, data and layers, or both.
    """
    parser = parser_for(__doc__)
    parser.add_argument("--recipe", metavar="FILE", help="a training recipe (YAML)")
    add_options(parser, "--target", target=None)
    parser.add_argument("--data", nargs="+", metavar="NAME", help="files, folders or hub ids")
    parser.add_argument(
        "--layers", type=int, nargs="*", metavar="K", help="hidden_states indices (default: recipe)"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: data.features")
    parser.add_argument(
        "--store-dtype",
        choices=tuple(DTYPES),
        default="bfloat16",
        help="of what is stored; fp8 has scales and leaves the last hidden state in bfloat16 "
        "(default: %(default)s)",
    )
    add_options(parser, "--dtype", "--device", "--threads", dtype=None, device=None)
    parser.add_argument("--max-length", type=int, metavar="N", help="cut documents at N tokens")
    parser.add_argument("--quota-gb", type=float, metavar="X", help="refuse a larger store")
    parser.add_argument("--shard-mb", type=float, default=512, metavar="X", help="size of a shard")
    parser.add_argument(
        "--batch-tokens",
        type=int,
        default=8192,
        metavar="N",
        help="that go through the target together (default: %(default)s)",
    )
    parser.add_argument("--estimate", action="store_true", help="predict size and time, then stop")
    parser.add_argument("--verify", action="store_true", help="read finished shards, mend damage")
    args, rest = parser.parse_known_args(argv)
    keys = [word.partition("=")[0] for word in rest if word.startswith("--")]
    if unknown := [key for key in keys if "." not in key]:
        raise ValueError(f"{unknown[0]} is no option: see --help; a recipe's keys have a dot")
    for name in ("shard_mb", "batch_tokens"):
        if getattr(args, name) <= 0:
            raise ValueError(f"--{name.replace('_', '-')} must be positive")
    if args.recipe is not None:
        for name in ("target", "data", "dtype", "device"):
            if getattr(args, name) is not None:
                raise ValueError(f"--{name} is the recipe's: drop it, or override the recipe's key")
        config = parse_config(["--config", args.recipe, *rest])
    else:
        config = parse_config([*_as_recipe(args), *rest])
    args.out = args.out or (Path(config.data.features) if config.data.features else None)
    if args.out is None:
        raise ValueError("--out is missing: name a folder, or set data.features in the recipe")
    if config.target.parallel != "none":
        raise ValueError(
            "target.parallel has no meaning here: each process writes shards of its own; use "
            "target.parallel=none, and target.device_map for a target larger than a device"
        )
    return args, config


def _as_recipe(args: argparse.Namespace) -> list[str]:
    """Overrides that make a recipe of --target, --data and --layers."""
    for name in ("target", "data", "layers"):
        if getattr(args, name) is None:
            raise ValueError(f"--{name} is missing: name it, or give a --recipe")
    found = {"target.name": args.target, "data.train": args.data, "run.out": str(args.out)}
    found |= {"target.dtype": args.dtype or "float32", "target.device": args.device or "auto"}
    return ["--drafter.type=medusa", *(f"--{key}={json.dumps(v)}" for key, v in found.items())]


@dataclass(frozen=True)
class Work:
    """What is to be done, the same in every process.

    Attributes:
        manifest: of the store, with the plan.
        jobs: number and documents, as places among those of the data, of every shard to write.
        predicted_bytes: of the whole store when done.
        predicted_seconds: until then.
    """

    manifest: Manifest
    jobs: list[tuple[int, list[int]]]
    predicted_bytes: int
    predicted_seconds: float


def main(argv: list[str] | None = None) -> None:
    """Estimate, write what is missing, print the counts."""
    args, config = parse_args(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    patience = InitProcessGroupKwargs(timeout=timedelta(days=1))  # others wait for the slowest
    accelerator = Accelerator(cpu=config.target.device == "cpu", kwargs_handlers=[patience])
    show_progress(accelerator.is_main_process)
    target = load_target(config, accelerator)
    rows = encode_all(
        load_answers(config, target, accelerator), encode_for(target), config.data.skip_bad_rows
    )
    layers = chosen_layers(args, config, target, rows)
    empty = Manifest.of(target, layers, args.store_dtype, args.max_length)
    documents = documents_of(rows, empty.max_length)
    with ExitStack() as stack:
        work = agree(
            accelerator,
            lambda: prepare(args, target, empty, documents, accelerator.num_processes, stack),
        )
        seconds = 0.0 if args.estimate else extract(args, target, work, documents, accelerator)
    if accelerator.is_main_process:
        report(args, work, documents, seconds)
    accelerator.end_training()


def chosen_layers(
    args: argparse.Namespace, config: TrainConfig, target: TargetModel, rows: list[TokenizedRow]
) -> list[int]:
    """--layers, or those that the recipe's head reads."""
    if args.layers is not None:
        return list(args.layers)
    dataset = PackedDataset(rows, config.data.max_length, config.run.batch_size)
    return list(make_drafter(config, target, dataset).feature_layers)


def agree(accelerator: Accelerator, make: Callable[[], Work]) -> Work:
    """What the main process makes, or its error, in every process.

    Raises:
        ValueError: what it raised.
    """
    result: list[Any] = [None, None]  # an error, or the work
    if accelerator.is_main_process:
        try:
            result[1] = make()
        except (ValueError, OSError) as error:
            result[0] = str(error)
    broadcast_object_list(result)
    if result[0] is not None:
        raise ValueError(result[0])
    return result[1]


def prepare(
    args: argparse.Namespace,
    target: TargetModel,
    empty: Manifest,
    documents: list[Document],
    world: int,
    stack: ExitStack,
) -> Work:
    """Plan, estimate, and open the store for writing.

    Args:
        args: the command line.
        target: the teacher.
        empty: what a new store would be.
        documents: of the data.
        world: processes.
        stack: keeps other extractions out of the folder until it is closed.

    Raises:
        ValueError: the folder holds something else, is not writable, or has too little room.
    """
    folder = args.out
    if not args.estimate:
        stack.enter_context(claim(folder))
    manifest = Manifest.take(folder, empty)
    tensors = row_tensors(manifest.layers, manifest.hidden_size, manifest.dtype)
    per_token = sum(dtype.itemsize * width for dtype, width in tensors.values())
    shard_tokens = max(1, int(args.shard_mb * 1e6 / per_token))
    jobs = plan(manifest, folder, documents, shard_tokens, args.verify)
    present, needed = manifest.counts(), predict_bytes(manifest, jobs)
    tokens = sum(job.tokens for job in jobs)
    print(
        f"store: {folder} has {present['documents']} documents, {present['tokens']} tokens, "
        f"{present['bytes'] / 1e9:.3f} GB\n"
        f"to add: {sum(len(job.documents) for job in jobs)} documents, {tokens} tokens in "
        f"{len(jobs)} shards, {per_token} bytes per token, {needed / 1e9:.3f} GB",
        flush=True,
    )
    quota = None if args.quota_gb is None else args.quota_gb * 1e9
    check_room(folder, needed, present["bytes"], quota)
    seconds = predict_seconds(target, manifest, jobs, args.batch_tokens) / world
    print(f"time: about {seconds:.0f} s with {world} process(es)", flush=True)
    if not args.estimate:
        begin(folder, manifest)
    places = {document.key: place for place, document in enumerate(documents)}
    plain = [(job.number, [places[d.key] for d in job.documents]) for job in jobs]
    return Work(manifest, plain, present["bytes"] + needed, seconds)


def extract(
    args: argparse.Namespace,
    target: TargetModel,
    work: Work,
    documents: list[Document],
    accelerator: Accelerator,
) -> float:
    """Write this process's shards; the main process keeps the manifest. Returns the seconds."""
    jobs = [Job(number, [documents[place] for place in places]) for number, places in work.jobs]
    mine = jobs[accelerator.process_index :: accelerator.num_processes]
    main_process = accelerator.is_main_process
    start = time.perf_counter()
    bar = tqdm(
        total=sum(job.tokens for job in mine),
        desc="features",
        unit="token",
        disable=None if main_process else True,
    )

    def finished(job: Job) -> None:
        bar.update(job.tokens)
        if main_process:
            merge(args.out, work.manifest)

    with bar:
        write_shards(target, args.out, work.manifest, mine, args.batch_tokens, finished)
    accelerator.wait_for_everyone()
    if main_process:
        merge(args.out, work.manifest)
    return time.perf_counter() - start


def report(args: argparse.Namespace, work: Work, documents: list[Document], seconds: float) -> None:
    """The last line."""
    added = sum(len(documents[place].ids) for _, places in work.jobs for place in places)
    print_json(
        {
            "out": str(args.out),
            **work.manifest.counts(),
            "shards": len(work.manifest.shards),
            "predicted_bytes": work.predicted_bytes,
            "added_tokens": added,
            "predicted_seconds": round(work.predicted_seconds, 2),
            "seconds": round(seconds, 2),
            "tokens_per_second": round(added / seconds, 1) if seconds else None,
        }
    )


if __name__ == "__main__":
    run(main)
