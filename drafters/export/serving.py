"""Command lines that serve a head: for the notes of an export and for its card.

They are the ones in the engines' own documentation; what of them was run here is in the README's
table. An engine that has none for a family has no line.
"""

import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from drafters.base import Drafter
from drafters.families import DFlashConfig

CHAIN = 5
"""Drafts a round of a head that has no number of its own."""
_SGLANG = {
    "eagle1": "EAGLE",
    "eagle3": "EAGLE3",
    "dflash": "DFLASH",
    "dspark": "DSPARK",
    "mtp": "NEXTN",
}
_VLLM = {
    "eagle1": "eagle",
    "eagle3": "eagle3",
    "peagle": "eagle3",
    "medusa": "medusa",
    "dflash": "dflash",
    "dspark": "dspark",
    "mtp": "mtp",
}
_LLAMA_CPP = {"eagle3": "draft-eagle3", "dflash": "draft-dflash", "dspark": "draft-dspark"}


def serving_line(
    engine: str, head: Drafter, config: Mapping[str, Any], target: str, place: str
) -> str | None:
    """A line, or a few, that serve a target with a head as its drafts.

    Args:
        engine: one of a dialect's.
        head: the head.
        config: of the folder.
        target: hub id or folder of the target.
        place: hub id or folder of the head.

    Returns:
        Text for a shell, or None where the engine documents nothing for such a head.
    """
    drafts = head.num_drafts or CHAIN
    if engine == "sglang":
        return _sglang(head, drafts, target, place)
    if engine == "vllm":
        return _vllm(head.family, drafts, config, target, place)
    if engine == "llama.cpp":
        return _llama_cpp(head.family, drafts, target, place)
    if engine == "tensorrt-llm" and head.family == "eagle3":
        return (
            "printf 'speculative_config:\\n  decoding_type: Eagle3\\n"
            f"  max_draft_len: {drafts}\\n  speculative_model: {place}\\n' > eagle3.yaml\n"
            f"trtllm-serve {target} --extra_llm_api_options eagle3.yaml"
        )
    return None


def _sglang(head: Drafter, drafts: int, target: str, place: str) -> str | None:
    if head.family not in _SGLANG:
        return None
    line = (
        f"python -m sglang.launch_server --model-path {target} \\\n"
        f"    --speculative-algorithm {_SGLANG[head.family]} "
    )
    if head.family != "mtp":  # its tensors lie in the target's own files
        line += f"--speculative-draft-model-path {place} \\\n    "
    if head.family == "dspark":  # it counts drafts, and adds the root's row where that drafts none
        return f"{line}--speculative-dspark-block-size {head.num_drafts}"
    if isinstance(head.config, DFlashConfig):  # it counts a block's rows
        return f"{line}--speculative-num-draft-tokens {head.config.block_size}"
    return (
        f"{line}--speculative-num-steps {drafts} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {drafts + 1}"
    )


def _vllm(
    family: str, drafts: int, config: Mapping[str, Any], target: str, place: str
) -> str | None:
    if family not in _VLLM:
        return None
    speculators = "speculators_model_type" in config
    asked: dict[str, Any] = {"method": _VLLM[family]}
    if family != "mtp" or speculators:  # otherwise its tensors lie in the target's own files
        asked["model"] = place
    asked["num_speculative_tokens"] = drafts
    if family == "peagle":
        asked["parallel_drafting"] = True
    line = f"vllm serve {target} --speculative-config '{json.dumps(asked)}'"
    if family == "medusa":
        line += "\n# of vLLM up to 0.32; 0.33 has no Medusa"
    if speculators:
        line += f"\n# or, with the target that config.json names: vllm serve {place}"
    return line


def _llama_cpp(family: str, drafts: int, target: str, place: str) -> str | None:
    if family not in _LLAMA_CPP:
        return None
    here, head = (f"path/to/{PurePath(name).name}" for name in (target, place))
    return (
        "# its converter reads folders: hf download NAME --local-dir path/to/NAME\n"
        f"python convert_hf_to_gguf.py {here} --outfile target.gguf\n"
        f"python convert_hf_to_gguf.py {head} --target-model-dir {here} --outfile head.gguf\n"
        f"llama-server -m target.gguf -md head.gguf --spec-type {_LLAMA_CPP[family]} "
        f"--spec-draft-n-max {drafts}"
    )
