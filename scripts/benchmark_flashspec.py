"""The PyPI package `flashspec` as a contender of `scripts.benchmark`.

Runs in that package's own environment, by path and without this project: `benchmark_protocol`
beside it needs the standard library only. Drafts come from the text so far (`ngram`), or from a
draft model with prompt lookup before it, which is that package's choice (`drafter_strategy`
"auto"). Its first step runs the prompt and verifies the first drafts in one, so what that step
gives counts as the prefill's, as it does for transformers' assisted decoding.
"""

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from benchmark_protocol import Answer, serve

sys.path.pop(0)  # files here are named like packages

import torch
from flashspec import FlashSpecConfig, MetricsConfig, SamplingConfig, SpeculativeEngine
from flashspec.engine.hf_drafter import HuggingFaceDrafter
from flashspec.engine.ngram import NgramDrafter
from flashspec.engine.verifier import TargetModel
from transformers import AutoConfig, AutoModelForCausalLM

LENGTH = 4
"""Its own default."""

PARTS = {"draft": "draft", "verify": "verify", "sample": "accept", "bookkeeping": "commit"}
"""Names of its phases in our tables."""


class Flashspec:
    """Its engine, greedy.

    Args:
        settings: as for `scripts.benchmark_workers`, with the end-of-text tokens as "ends".
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        model, contender = settings["model"], settings["contender"]
        if model["threads"] is not None:
            torch.set_num_threads(model["threads"])
        self.device = torch.device(device_of(model["device"]))
        name, dtype = model["target"], getattr(torch, model["dtype"])
        length = int(contender["settings"].get("length", LENGTH))
        drafter: Any = NgramDrafter()
        if contender["source"] != "ngram":
            draft = load_draft(name, contender["settings"], dtype)
            drafter = HuggingFaceDrafter(name, self.device, dtype, temperature=0.0, model=draft)
        config = FlashSpecConfig(
            target_name=name,
            device=str(self.device),
            dtype=model["dtype"],
            eos_token_ids=tuple(settings["ends"]),
            sampling=SamplingConfig(gamma=length, temperature=0.0),
            metrics=MetricsConfig(profile_steps=True),
        )
        self.engine = SpeculativeEngine(config, [drafter], TargetModel(name, self.device, dtype))

    def warm_up(self, prompts: list[list[int]], longest: int, new_tokens: int) -> None:
        """First calls are slow, and on a GPU they compile."""
        self.decode(prompts, new_tokens)

    def decode(self, prompts: list[list[int]], new_tokens: int) -> Answer:
        """Decode one batch."""
        if len({len(prompt) for prompt in prompts}) > 1:
            raise ValueError("flashspec takes prompts of one length only: give --contexts")
        ids = torch.tensor(prompts, device=self.device)
        start = time.perf_counter()
        made = self.engine.generate(ids, max_new_tokens=new_tokens)
        rows = made.output_ids.tolist()
        seconds = time.perf_counter() - start
        tokens = [[token for token in row if token >= 0] for row in rows]
        first, *later = made.step_profile
        parts = {
            PARTS[part]: sum(getattr(step, f"{part}_ms") for step in later) / 1000 for part in PARTS
        }
        prefill = min(first.total_ms / 1000, seconds)
        parts["host"] = max(seconds - prefill - sum(parts.values()), 0.0)
        rounds = [[len(prompts), 0, 0, step.tokens_emitted] for step in later]
        return Answer(tokens, seconds, prefill, first.tokens_emitted, parts, rounds)


def load_draft(name: str, settings: dict[str, str], dtype: torch.dtype) -> Any:
    """A draft model: one with a name, or the first layers of the target."""
    if "model" in settings:
        return AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype)
    config = AutoConfig.from_pretrained(name)
    text = config.get_text_config()
    text.num_hidden_layers = int(settings["first"])
    if (types := getattr(text, "layer_types", None)) is not None:
        text.layer_types = types[: text.num_hidden_layers]
    return AutoModelForCausalLM.from_pretrained(name, config=config, dtype=dtype)


def device_of(name: str) -> str:
    """A device's name; auto takes a GPU if there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


if __name__ == "__main__":
    serve(Flashspec, torch.get_num_threads)
