"""The model card: front matter, serving lines, and nothing that nobody handed over."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from drafters import Drafter, TargetModel, build_drafter
from drafters.export import CardFacts, write_as
from drafters.export.card import base_model_of
from drafters.export.serving import serving_line
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(torch.float32)


def eagle3(target: TargetModel, name: str = "org/tiny-chat", **options: Any) -> Drafter:
    head = build_drafter("eagle3", target, draft_vocab_size=40, feature_layers=[1, 3, 5], **options)
    head.set_draft_vocab(torch.arange(96) % 7)
    head.config.target_name = name
    return head


def card(folder: Path) -> tuple[dict[str, Any], str]:
    """Front matter and text."""
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text


def test_a_dialect_has_a_card(tmp_path: Path, target: TargetModel) -> None:
    export = write_as("sglang", eagle3(target, confidence_head=True), tmp_path / "out")
    front, text = card(tmp_path / "out")
    assert front == {
        "base_model": "org/tiny-chat",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-head", "eagle3", "sglang", "headway"],
    }
    assert "# eagle3 draft head for org/tiny-chat" in text
    assert "lossless with respect to this target." in text
    assert "draft vocabulary: 40 of 96" in text
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    stored = sum(tensor.numel() for name, tensor in tensors.items() if name not in ("d2t", "t2d"))
    assert f"- parameters: {stored:,}\n" in text
    for engine in export.served:
        assert f"\n{engine}:\n" in text
    assert "--speculative-algorithm EAGLE3 --speculative-draft-model-path out" in text
    assert 'vllm serve org/tiny-chat --speculative-config \'{"method": "eagle3"' in text
    assert "--target-model-dir path/to/tiny-chat" in text and "draft-eagle3" in text
    assert "--target org/tiny-chat --head out" in text
    for note in export.notes:
        assert f"- {note}" in text
    assert "Acceptance" not in text and "Training" not in text


def test_a_native_head_has_one_too(tmp_path: Path, target: TargetModel) -> None:
    write_as("native", build_drafter("hydra", target), tmp_path / "out")
    front, text = card(tmp_path / "out")
    assert "base_model" not in front  # the target is a folder's name
    assert front["tags"][2:4] == ["hydra", "native"]
    assert "python -m scripts.evaluate --target tiny --head out" in text
    assert "sglang" not in text and "vllm" not in text


def test_what_is_handed_over_is_in_it(tmp_path: Path, target: TargetModel) -> None:
    facts = CardFacts("org/else", "me/head", "## Acceptance\n\n| a | b |", "## Training\n\nA lot.")
    write_as("sglang", eagle3(target), tmp_path / "out", facts=facts)
    front, text = card(tmp_path / "out")
    assert front["base_model"] == "org/else"
    assert text.index("## Acceptance") < text.index("## Serving") < text.index("## Training")
    assert "--model-path org/else" in text and "--speculative-draft-model-path me/head" in text


def test_names_cannot_break_the_front_matter(tmp_path: Path, target: TargetModel) -> None:
    facts = CardFacts(base_model="org/x: [1]\n---\n")
    write_as("native", eagle3(target), tmp_path / "out", facts=facts)
    text = (tmp_path / "out" / "README.md").read_text()
    front = yaml.safe_load(text.split("\n---\n")[0].removeprefix("---\n"))
    assert front["pipeline_tag"] == "text-generation"


def test_a_merged_target_is_not_the_base(tmp_path: Path, target: TargetModel) -> None:
    head = eagle3(target, "org/base merged with LoRA 0123")
    head.config.reference = {"base": "org/base", "base_weights": "ab", "adapter": "0123"}
    write_as("sglang", head, tmp_path / "out")
    front, text = card(tmp_path / "out")
    assert front["base_model"] == "org/base" == base_model_of(head)
    assert "not to org/base" in text
    assert "--model-path path/to/target " in text and "--model-path org/base" not in text


# --- serving lines


def lines(target: TargetModel, family: str, config: dict[str, Any] | None = None) -> dict[str, Any]:
    head = build_drafter(family, target)
    engines = ("sglang", "vllm", "llama.cpp", "tensorrt-llm", "medusa")
    return {name: serving_line(name, head, config or {}, "org/t", "me/h") for name in engines}


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("medusa", {"vllm": '"method": "medusa", "model": "me/h", "num_speculative_tokens": '}),
        ("hydra", {}),
        ("eagle1", {"sglang": "EAGLE ", "vllm": '"method": "eagle", "model": "me/h"'}),
        ("peagle", {"vllm": '"num_speculative_tokens": 8, "parallel_drafting": true'}),
        (
            "eagle3",
            {
                "sglang": "--speculative-num-steps 5 --speculative-eagle-topk 1 "
                "--speculative-num-draft-tokens 6",
                "vllm": '"num_speculative_tokens": 5',
                "llama.cpp": "--spec-type draft-eagle3 --spec-draft-n-max 5",
                "tensorrt-llm": "decoding_type: Eagle3",
            },
        ),
        (
            "mtp",
            {
                "sglang": "NEXTN",
                "vllm": 'vllm serve org/t --speculative-config \'{"method": "mtp", "num_',
            },
        ),
        ("dflash", {"sglang": "DFLASH", "vllm": "dflash", "llama.cpp": "draft-dflash"}),
        ("dspark", {"sglang": "dspark-block-size", "vllm": "dspark", "llama.cpp": "draft-dspark"}),
    ],
)
def test_an_engine_has_a_line_where_it_documents_one(
    target: TargetModel, family: str, words: dict[str, str]
) -> None:
    found = {name: line for name, line in lines(target, family).items() if line is not None}
    assert found.keys() == words.keys()
    for name, part in words.items():
        assert part in found[name]


def test_block_heads_are_asked_for_what_they_draft(target: TargetModel) -> None:
    """SGLang counts the rows of a block, vLLM drafts."""
    for family, option in (("dflash", "num-draft-tokens"), ("dspark", "dspark-block-size")):
        head = build_drafter(family, target)
        found = lines(target, family)
        assert f"--speculative-{option} {head.config.block_size}" in found["sglang"]
        assert f'"num_speculative_tokens": {head.num_drafts}' in found["vllm"]


def test_speculators_name_their_target_themselves(target: TargetModel) -> None:
    found = lines(target, "eagle3", {"speculators_model_type": "eagle3"})
    assert '"method": "eagle3", "model": "me/h"' in found["vllm"]
    assert found["vllm"].endswith("vllm serve me/h")
