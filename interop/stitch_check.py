"""Native MTP modules that Headway stitched into a checkpoint, in the package ``speculators``.

Its converter must find them there, its class must answer what our head answers, and its own
``stitch-mtp`` must write the very tensors that Headway wrote. No small model with modules is
published, so the target is a random Qwen3.5 of two layers with the tokenizer of the given one.

Legend: T rows of text, D hidden, V vocabulary.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from drafters import TargetModel
from drafters.export import check_as, read_head, write_as
from drafters.export.golden import KeepingAttention, golden_difference
from drafters.mtp import MtpDrafter
from drafters.mtp_native import load_native_mtp
from interop.results import (
    FAILED,
    HEADWAY,
    LOADED,
    PASSED,
    READ,
    ROUND_TRIP,
    STRICT,
    WRITTEN,
    Entry,
)
from interop.setting import Setting, answer, headway_versions
from interop.speculators_check import BARE, NAME, RANDOM, REQUIREMENTS, SECONDS, compare

DIALECTS = ("mtp-qwen",)
SIDE = Path(__file__).with_name("stitch_side.py")
KIND, LAYERS, ROWS = "qwen3_5_text", 2, 16
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}


def check(setting: Setting) -> Iterator[Entry]:
    """Our side of it; then one entry: converted, loaded, answered and stitched again.

    Args:
        setting: the target, whose tokenizer is taken, environments and folders.

    Raises:
        CannotRun: there is no environment.
    """
    python = setting.python(NAME, *REQUIREMENTS, bare=BARE)
    folder = setting.folder("stitched")
    target = TargetModel.load(str(write_target(folder / "target", setting.target)))
    head = moved(load_native_mtp(target))
    yield from files(head, folder / "ours")
    ids = torch.arange(ROWS)[None] * 7 % target.vocab_size
    hidden = target.forward(ids).last_hidden
    save_file({"input_ids": ids, "hidden": hidden}, folder / "rows")
    for old in ("theirs", "converted"):
        shutil.rmtree(folder / old, ignore_errors=True)
    paths = (folder / name for name in ("ours", "target", "rows", "theirs"))
    versions = headway_versions()
    try:
        found = answer([str(python), str(SIDE), *map(str, paths)], SECONDS)
        versions = {"speculators": found["versions"]["speculators"], **versions}
        theirs = load_file(folder / "rows")["theirs"]
        difference = compare(theirs, first_step(head, ids, hidden)[: len(theirs)])
        count = same_tensors(folder / "ours", folder / "theirs")
        without = ", once its copy of the output matrix is taken out" if found["copied"] else ""
        status = PASSED
        detail = (
            f"MTPDraftModel: logits differ by {difference:.1e} of the largest; its stitch-mtp "
            f"writes the same {count} tensors{without}"
        )
    except ValueError as error:
        status, detail = FAILED, " ".join(str(error).split())
    yield Entry(NAME, "mtp-qwen", LOADED, status, detail, versions, head=RANDOM)


def files(head: MtpDrafter, folder: Path) -> Iterator[Entry]:
    """Written, read, read back exactly and checked, by Headway itself."""

    def entry(check: str, status: str, detail: str) -> Entry:
        return Entry(HEADWAY, "mtp-qwen", check, status, detail, headway_versions(), head=RANDOM)

    export = write_as("mtp-qwen", head, folder)
    yield entry(WRITTEN, PASSED, f"{export.num_tensors} tensors")
    again = read_head(folder, head.target)
    yield entry(READ, PASSED, f"a {again.family} head")
    mine, theirs = head.state_dict(), again.state_dict()
    equal = golden_difference(head, again) == 0 and all(
        torch.equal(tensor, theirs[key]) for key, tensor in mine.items()
    )
    said = f"{len(mine)} tensors and the golden logits are {'equal' if equal else 'not equal'}"
    yield entry(ROUND_TRIP, PASSED if equal else FAILED, said)
    check_as("mtp-qwen", folder, head.target)
    yield entry(STRICT, PASSED, "index, count, names, shapes, values")


def write_target(folder: Path, tokenizer: Path) -> Path:
    """A random checkpoint with one module, in one file.

    Args:
        folder: to write.
        tokenizer: of the target whose vocabulary it gets.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shape = {**SHAPE, "vocab_size": AutoConfig.from_pretrained(tokenizer).vocab_size}
    config, longer = (_config(shape, count) for count in (LAYERS, LAYERS + 1))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(longer)
        size = config.hidden_size
        norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        tensors = {f"mtp.{name}.weight": 0.2 * torch.randn(size) for name in norms}
        tensors["mtp.fc.weight"] = 0.2 * torch.randn(size, 2 * size)
    behind = f"model.layers.{LAYERS}."
    tensors |= {
        name.replace(behind, "mtp.layers.0."): tensor for name, tensor in model.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    for path in (*tokenizer.glob("tokenizer*"), *tokenizer.glob("special_tokens*")):
        shutil.copy(path, folder)
    return folder


def _config(shape: dict[str, Any], layers: int) -> PreTrainedConfig:
    """Of a model with so many layers of full attention."""
    options = {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    return CONFIG_MAPPING[KIND](**{**shape, **options})


@torch.no_grad()
def moved(head: MtpDrafter) -> MtpDrafter:
    """The head with noise on every tensor."""
    generator = torch.Generator().manual_seed(1)
    for weight in head.parameters():
        weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    return head


@torch.no_grad()
def first_step(head: MtpDrafter, ids: Tensor, hidden: Tensor) -> Tensor:
    """(T - 1, V) logits of the first draft at each row of a text.

    Args:
        head: of one module.
        ids: (1, T).
        hidden: (1, T, D) last hidden states of the target.
    """
    positions = torch.arange(ids.shape[1] - 1)[None]
    out, _ = head(hidden[:, :-1], ids[:, 1:], positions, KeepingAttention())
    return head.logits(out[0])


def same_tensors(ours: Path, theirs: Path) -> int:
    """How many tensors two checkpoints have; both have the same.

    Raises:
        ValueError: a tensor is in one of them alone, or differs.
    """
    read: list[dict[str, Tensor]] = []
    for folder in (ours, theirs):
        read.append({})
        for path in folder.glob("model*.safetensors"):
            read[-1] |= load_file(path)
    here, there = read
    if other := sorted(set(here) ^ set(there)):
        raise ValueError(f"{other[0]} is in one of the two checkpoints alone")
    if other := [name for name, tensor in here.items() if not torch.equal(tensor, there[name])]:
        raise ValueError(f"{other[0]} differs between the two checkpoints")
    return len(here)
