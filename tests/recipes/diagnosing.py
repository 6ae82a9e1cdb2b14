"""A small target, heads really trained for it, and ways to break their files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from drafters import Drafter, TargetModel, build_drafter
from drafters.export import NATIVE, write_as, write_native
from drafters.export.folder import MANIFEST
from drafters.export.golden import GOLDEN
from recipes.diagnosis import Diagnosis, Evidence, Serving, diagnose, gather, load_head
from tests.tiny import END, SPECIALS, START, tiny_tokenizer
from tests.training.toys import pair_rows
from training.data.batches import collate
from training.data.chat import TokenizedRow
from training.features import TargetBatch, run_target
from training.objectives import ObjectiveOptions, build_objective
from training.objectives.options import RECURSIVE

V, PROMPT, LENGTH = 40, 8, 32
OPTIONS: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab_size": 32, "feature_layers": [1, 3, 4]},
    "medusa": {"num_heads": 3},
}
STEPS = {"medusa": 250}
MASK = V - 1
LAYERS = {"feature_layers": [1, 3, 4]}
BLOCK = {**LAYERS, "mask_token_id": MASK, "num_layers": 2, "block_size": 4}
PARALLEL = {**LAYERS, "mask_token_id": MASK, "num_layers": 2, "num_drafts": 4}
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", {}),
    "hydra": ("hydra", {"num_heads": 3, "lm_head_bias": True}),
    "hydra++": ("hydra", {"num_heads": 3, "num_layers": 1, "prefix_norm": True}),
    "eagle1": ("eagle1", {"fc_bias": True, "attention_bias": True}),
    "eagle1 plain": ("eagle1", {}),
    "eagle3": ("eagle3", {}),
    "eagle3.1": ("eagle3", {"norm_before_fc": True, "norm_before_residual": True}),
    "own embedding": ("eagle3", {"own_embedding": True, "draft_vocab_size": None}),
    "mtp": ("mtp", {"qk_norm": True}),
    "peagle": ("peagle", PARALLEL),
    "peagle own": ("peagle", {**PARALLEL, "own_embedding": True}),
    "dflash": ("dflash", BLOCK),
    "dflash cut": ("dflash", {**BLOCK, "draft_vocab_size": 32}),
    "jetspec": ("dflash", {**BLOCK, "causal": True}),
    "dspark": ("dspark", {**BLOCK, "markov_rank": 8}),
    "dspark in place": ("dspark", {**BLOCK, "markov_rank": 8, "sample_from_anchor": False}),
    "dspark gated": ("dspark", {**BLOCK, "markov_rank": 8, "markov_type": "gated"}),
}
"""Heads by what is special about them: family and options."""

Data = Callable[[TargetBatch], TargetBatch]


def small_target(seed: int = 0) -> TargetModel:
    """A random Llama whose laws are peaked, and learnt within seconds."""
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=SPECIALS.index(START),
        eos_token_id=SPECIALS.index(END),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(6.0)
        model.model.embed_tokens.weight.mul_(10.0)
        for layer in model.model.layers:  # so that it matters which layer a feature comes from
            layer.self_attn.o_proj.weight.mul_(4.0)
            layer.mlp.down_proj.weight.mul_(4.0)
    return TargetModel(model, tiny_tokenizer(V), "small")


@torch.no_grad()
def written(target: TargetModel, count: int, seed: int, words: int = V) -> Tensor:
    """(count, LENGTH) random prompts of the first ``words`` tokens with the target's answers, drawn
    at temperature 1.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(len(SPECIALS), words, (count, PROMPT), generator=generator)
    while ids.shape[1] < LENGTH:
        law = target.forward(ids, logits_to_keep=1).logits[:, -1].softmax(-1)
        law[:, SPECIALS.index(END)] = 0
        ids = torch.cat((ids, torch.multinomial(law, 1, generator=generator)), 1)
    return ids


def evidence_of(target: TargetModel, count: int = 14, words: int = V) -> Evidence:
    """Text that no head was trained on."""
    ids = written(target, count, 9, words).tolist()
    return gather(target, [row[:PROMPT] for row in ids], [row[PROMPT:] for row in ids])


def trained(
    target: TargetModel,
    family: str,
    handed: Data | None = None,
    later: int = 0,
    words: int = V,
    steps: int | None = None,
    **options: Any,
) -> Drafter:
    """A head after a few seconds of training.

    Args:
        target: the teacher.
        family: of the head.
        handed: what training hands to the head in place of what it should.
        later: each label is drafted from a row that much later than the right one.
        words: tokens that prompts are made of.
        steps: of training; None takes the family's.
        **options: of the head.
    """
    head = build_drafter(family, target, **{**OPTIONS.get(family, {}), **options})
    counts = torch.bincount(written(target, 256, 0, words).flatten(), minlength=target.vocab_size)
    head.set_draft_vocab(counts)
    return taught(head, handed, later, words, steps)


def taught(
    head: Drafter,
    handed: Data | None = None,
    later: int = 0,
    words: int = V,
    steps: int | None = None,
) -> Drafter:
    """A head after a few seconds of training from where it is; see :func:`trained`."""
    target, family = head.target, head.family
    ids = written(target, 256, 0, words)
    recursive = family in RECURSIVE and head.num_drafts is None
    unrolled: dict[str, Any] = {"steps": 2} if recursive else {}
    objective = build_objective(head, ObjectiveOptions(chunk=0, **unrolled))
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-3, weight_decay=0.0)
    batches = []
    for part in ids.split(32):
        rows = [[TokenizedRow(row, [True] * LENGTH)] for row in part.tolist()]
        data = run_target(target, collate(rows, LENGTH), head.feature_layers)
        batches.append(data if handed is None else handed(data))
    total = steps or STEPS.get(family, 120)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
    head.train()
    for step in range(total):
        with pytest.MonkeyPatch.context() as patch:
            pair_rows(patch, later)
            loss, metrics = objective(batches[step % len(batches)])
        (loss / metrics["loss_0_count"]).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return head.eval()


class Workshop:
    """Trained heads on the disk, each made when it is first asked for."""

    def __init__(self, target: TargetModel, folder: Path) -> None:
        self.target, self.folder = target, folder

    def head(self, name: str) -> Path:
        """Of ``RECIPES``."""
        folder = self.folder / name
        if not folder.exists():
            family, options = RECIPES[name]
            trained(self.target, family, **options).save_pretrained(folder)
        return folder

    def exported(self, name: str, dialect: str) -> Path:
        """The same in a dialect."""
        folder = self.folder / f"{name} as {dialect}"
        if not folder.exists():
            head = load_head(self.head(name), self.target).head
            if dialect == NATIVE:
                write_native(head, folder)
            else:
                write_as(dialect, head, folder)
        return folder


def forgotten(folder: Path) -> None:
    """Remove what only our own folders have beside config and tensors."""
    for name in (MANIFEST, GOLDEN, "README.md"):
        (folder / name).unlink(missing_ok=True)


def field(**fields: Any) -> Callable[[dict[str, Any]], None]:
    """A change of a config."""
    return lambda config: config.update(fields)


def noise(tensor: Tensor) -> Tensor:
    """Random numbers of the same size."""
    generator = torch.Generator().manual_seed(3)
    return tensor.std() * torch.randn(tensor.shape, generator=generator)


def edited(
    source: Path,
    folder: Path,
    config: Callable[[dict[str, Any]], None] | None = None,
    tensors: Callable[[dict[str, Tensor]], None] | None = None,
) -> Path:
    """A copy of a head's folder with another config or other tensors."""
    folder.mkdir(parents=True)
    fields = json.loads((source / "config.json").read_text())
    weights = load_file(source / "model.safetensors")
    if config is not None:
        config(fields)
    if tensors is not None:
        tensors(weights)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in weights.items()},
        folder / "model.safetensors",
    )
    return folder


def diagnosed(
    folder: Path, target: TargetModel, evidence: Evidence, serving: Serving | None = None
) -> Diagnosis:
    """The diagnosis of a folder."""
    return diagnose(load_head(folder, target), target, evidence, serving)


def faults(diagnosis: Diagnosis) -> set[str]:
    """The checks that found something."""
    return {finding.check for finding in diagnosis.faults}
