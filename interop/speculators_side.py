"""The side of `interop.speculators_check` that runs in the environment of ``speculators``.

    speculators_side.py load TARGET FOLDER...     their class: FOLDER/head answers to FOLDER/rows
    speculators_side.py train TARGET FOLDER KIND  their trainer makes FOLDER/head and FOLDER/rows

Run by path, without Headway. ``rows`` is a safetensors file with ``features`` (T, F·H) and
``token_ids`` (T + S - 1,), to which ``theirs`` (S, Vd) is added: what their own forward passes
answer, in float32. The last line of standard output is JSON.

Legend: T rows of text, S drafts, F captured layers, H hidden, Vd draft vocabulary.
"""

import json
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

ROWS, DOCUMENTS, LENGTH, STEPS, VOCAB = 6, 8, 48, 4, 2048
TEXT = "The quick brown fox jumps over the lazy dog while {} small birds sing in the old tree. "
NETWORK = {
    "eagle3": {},
    "peagle": {"num-layers": 2, "num-depths": 4},
    "dflash": {"num-layers": 2, "block-size": 4, "max-anchors": 8},
    "dspark": {"num-layers": 2, "block-size": 4, "max-anchors": 8, "markov-rank": 16},
    "mtp": {},
}
"""Options of their trainer that make a small head; all others keep their defaults."""


def main() -> None:
    """Do what the command line says."""
    torch.set_num_threads(1)
    what, target, *rest = sys.argv[1:]
    if what == "load":
        found = [load(Path(folder), Path(target)) for folder in rest][-1]
    else:
        found = train(Path(rest[0]), Path(target), rest[1])
    packages = ("speculators", "torch", "transformers")
    print(json.dumps({**found, "versions": {name: version(name) for name in packages}}))


def load(folder: Path, target: Path) -> dict[str, Any]:
    """Their class with our file."""
    model = their_model(folder / "head", target)
    broken = [name for name, x in model.state_dict().items() if not x.isfinite().all()]
    assert not broken, f"{type(model).__name__}: {broken} not filled"
    inputs = load_file(folder / "rows")
    save_file({**inputs, "theirs": answer(model, inputs).contiguous()}, folder / "rows")
    return {"class": type(model).__name__}


def their_model(head: Path, target: Path) -> Any:
    """A head as their package loads it, in float32, with plain attention."""
    import speculators
    from speculators.model import SpeculatorModel

    speculators.reload_schemas()
    config = speculators.SpeculatorModelConfig.from_pretrained(head)
    if config.speculators_model_type != "mtp":
        config.transformer_layer_config._attn_implementation = "eager"
    config.speculators_config.verifier.name_or_path = str(target)
    return SpeculatorModel.from_pretrained(head, config=config, dtype=torch.float32).eval()


@torch.no_grad()
def answer(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """(S, Vd) logits of their forward pass, by kind of head."""
    kind = model.config.speculators_model_type
    rows = {"eagle3": chain, "peagle": parallel, "mtp": repeated}.get(kind, block)
    features, tokens = inputs["features"].float(), inputs["token_ids"]
    return rows(model, features, tokens, len(tokens) - len(features) + 1)


class Captured:
    """Their ``compute_metrics`` of a module, replaced to keep the logits that it is given."""

    def __init__(self, model: Any) -> None:
        self.module, self.logits = sys.modules[type(model).__module__], []

    def __enter__(self) -> list[Tensor]:
        self.original = self.module.compute_metrics
        self.module.compute_metrics = self.keep
        return self.logits

    def __exit__(self, *error: object) -> None:
        self.module.compute_metrics = self.original

    def keep(self, logits: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, dict[str, Any]]:
        """Their first argument."""
        self.logits.append(logits[0])
        return logits.new_zeros(()), {}


def padded(x: Tensor, length: int) -> Tensor:
    """(n, ...) -> (1, length, ...), zeros behind."""
    return torch.cat((x, x.new_zeros(length - len(x), *x.shape[1:])))[None]


def chain(model: Any, features: Tensor, tokens: Tensor, steps: int) -> Tensor:
    """EAGLE-3: the last row of the text at each of their steps."""
    length = len(tokens)
    arguments = {
        "hidden_states": padded(features, length),
        "input_ids": tokens[None],
        "document_ids": torch.zeros(1, length, dtype=torch.long),
        "position_ids": torch.arange(length)[None],
        "verifier_last_hidden_states": torch.zeros(1, length, model.hidden_size),
        "loss_mask": torch.ones(1, length, dtype=torch.bool),
    }
    with Captured(model) as logits:
        model(**arguments, ttt_steps=steps)
    return torch.stack([step[len(features) - 1] for step in logits])


def parallel(model: Any, features: Tensor, tokens: Tensor, drafts: int) -> Tensor:
    """P-EAGLE: the last row of the text and the mask rows of its rollout; their random choice of
    rollouts is replaced by this one.
    """
    module, count, length = sys.modules[type(model).__module__], len(features), len(tokens)
    anchors = torch.cat((torch.arange(count), torch.full((drafts - 1,), count - 1)))
    depths = torch.cat((torch.zeros(count, dtype=torch.long), torch.arange(1, drafts)))
    original = module.generate_cod_sample_indices
    module.generate_cod_sample_indices = lambda **options: (anchors, depths)
    try:
        with Captured(model) as logits:
            model(
                hidden_states=padded(features, length),
                input_ids=tokens[None],
                document_ids=torch.zeros(1, length, dtype=torch.long),
                verifier_last_hidden_states=torch.zeros(1, length, model.hidden_size),
            )
    finally:
        module.generate_cod_sample_indices = original
    return logits[0][count - 1 :]


def block(model: Any, features: Tensor, tokens: Tensor, drafts: int) -> Tensor:
    """DFlash and DSpark: the one block whose anchor stands behind the text; the loss mask lets
    them choose no other.
    """
    count, size = len(features), model.block_size
    length = count + size + 1
    mask = torch.zeros(1, length, dtype=torch.bool)
    mask[0, count] = True
    ids = torch.cat((torch.zeros(count, dtype=torch.long), tokens[count - 1 :]))
    with Captured(model) as logits:
        model(
            hidden_states=padded(features, length),
            input_ids=padded(ids, length),
            loss_mask=mask,
            verifier_last_hidden_states=torch.zeros(1, length, model.hidden_size),
            document_ids=torch.zeros(1, length, dtype=torch.long),
            max_anchors=1,
        )
    return logits[0][size - drafts :]


def repeated(model: Any, features: Tensor, tokens: Tensor, steps: int) -> Tensor:
    """MTP: the last row of the text at each step; every step runs on all rows."""
    count, edge = len(features), tokens.new_zeros(1)
    ids = torch.cat((edge, tokens, edge))[None]
    logits, *_ = model(input_ids=ids, hidden_states=padded(features, count + steps + 1))
    return torch.stack([step[0, count - 1] for step in logits])


def train(folder: Path, target: Path, kind: str) -> dict[str, Any]:
    """A few steps of their trainer on the CPU, on texts of no meaning.

    It saves in bfloat16. What of the file is a copy of the target's embedding or output matrix is
    taken from the target again before the model answers, as a loader that borrows both has it.
    """
    from speculators.train import cli, trainer
    from speculators.train.config import TrainConfig

    data, saved = folder / "data", folder / "saved"
    for old in (data, saved, folder / "head"):
        shutil.rmtree(old, ignore_errors=True)
    write_data(target, data)
    options = {
        "verifier-name-or-path": target,
        "data-path": data,
        "save-path": saved,
        "log-dir": folder / "logs",
        "speculator-type": kind,
        "total-seq-len": LENGTH,
        "hidden-states-dtype": "float32",
        "loss-implementation": "eager",
        "on-missing": "raise",
        "epochs": 1,
        "max-steps": STEPS,
        "num-workers": 0,
        "train-data-ratio": 0.75,
    }
    if kind == "mtp":
        options["from-pretrained"] = folder / "config"  # written by the caller: no weights in it
    else:
        size = AutoConfig.from_pretrained(target).vocab_size
        options |= {"draft-vocab-size": min(VOCAB, size // 2), "draft-attn-impl": "eager"}
    options |= NETWORK[kind]
    trainer.get_local_rank = lambda: "cpu"  # their device: they number GPUs
    torch.accelerator.synchronize = lambda *device: None  # their clock waits for a GPU
    cli.main(TrainConfig.resolve([f"--{key}={value}" for key, value in options.items()]))
    last = max(path.parent for path in saved.glob("*/model.safetensors"))
    shutil.copytree(last, folder / "head")
    model = their_model(folder / "head", target)
    if kind != "mtp":  # which saves no copies
        model._load_verifier_weights(
            overwrite_embed_tokens=not getattr(model.config, "embed_requires_grad", False),
            overwrite_lm_head=kind.startswith("d"),
        )
    inputs = inputs_for(model)
    save_file({**inputs, "theirs": answer(model, inputs).contiguous()}, folder / "rows")
    return {"class": type(model).__name__, "steps": STEPS}


def inputs_for(model: Any) -> dict[str, Tensor]:
    """Random rows for a head of theirs."""
    generator = torch.Generator().manual_seed(5)
    config = model.config
    layers = 1 if config.speculators_model_type == "mtp" else len(model.target_layer_ids)
    drafts = config.speculators_config.proposal_methods[0].speculative_tokens
    size, vocab = model.hidden_size, config.transformer_layer_config.vocab_size
    features = torch.randn(ROWS, layers * size, generator=generator)
    tokens = torch.randint(vocab, (ROWS + drafts - 1,), generator=generator)
    return {"features": features, "token_ids": tokens}


@torch.no_grad()
def write_data(target: Path, data: Path) -> None:
    """Texts, and the hidden states that their trainer reads: the captured layers and the stream
    behind the last one, before its norm.
    """
    from datasets import Dataset

    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    count = model.config.num_hidden_layers
    before: list[Tensor] = []
    model.model.norm.register_forward_hook(lambda norm, given, out: before.append(given[0]))
    hidden = data / "hidden_states"
    hidden.mkdir(parents=True)
    rows = []
    for number in range(DOCUMENTS):
        ids = tokenizer(TEXT.format(number) * 4)["input_ids"][: LENGTH + 1]
        out = model(torch.tensor([ids]), output_hidden_states=True)
        states = [out.hidden_states[k][0] for k in (2, count // 2, count - 3)]
        stacked = torch.stack([*states, before.pop()[0]], dim=1)
        stored = {"hidden_states": stacked.contiguous(), "token_ids": torch.tensor(ids)}
        save_file(stored, hidden / f"hs_{number}.safetensors")
        # one token more than the length that packing sees: what some kinds shift away; their
        # P-EAGLE gives no number where a row of padding is left
        rows.append({"input_ids": ids, "loss_mask": [1] * len(ids), "seq_len": LENGTH})
    Dataset.from_list(rows).with_format("torch").save_to_disk(data)
    ids = torch.tensor([token for row in rows for token in row["input_ids"]])
    torch.save(
        dict(zip(*(x.tolist() for x in ids.unique(return_counts=True)), strict=True)),
        data / "token_freq.pt",
    )


if __name__ == "__main__":
    main()
