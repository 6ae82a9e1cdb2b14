"""What no DFlash file may say, and heads that have no place in one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters import TargetModel
from drafters.export import ExportError, check_folder, read_head, write_as
from drafters.export.dialects.dflash import DFLASH
from tests.drafters.export.block_engine import Folder
from tests.drafters.export.test_dflash import make_head, written
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(dtype=torch.float32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qk_norm": False}, "qk_norm=False: loaders of this dialect know only qk_norm=True"),
        ({"sliding_window": 3}, "sliding_window=3 is less than block_size=4"),
        (
            {"causal_layers": [1]},
            r"causal_layers=\[1\]: engines know blocks that are causal in all",
        ),
    ],
)
def test_what_engines_cannot_compute_is_refused(
    target: TargetModel, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ExportError, match=message):
        write_as("dflash", make_head(target, **options), tmp_path / "head")


def test_a_target_with_scaled_logits_is_refused(target: TargetModel, tmp_path: Path) -> None:
    other = tiny_target(dtype=torch.float32)
    head = make_head(other)
    other.config.logit_scale = 0.5
    with pytest.raises(ExportError, match="'tiny' scales, caps or shifts its logits"):
        write_as("dflash", head, tmp_path / "head")


def top(**changes: Any) -> Callable[[Folder], object]:
    return lambda files: files.config.update(changes)


def nested(**changes: Any) -> Callable[[Folder], object]:
    return lambda files: files.config["dflash_config"].update(changes)


def drop(name: str) -> Callable[[Folder], object]:
    return lambda files: files.tensors.pop(name)


def poison(files: Folder) -> None:
    files.tensors["layers.1.self_attn.k_norm.weight"][0] = torch.nan


VIOLATIONS: dict[str, tuple[Callable[[Folder], object], str]] = {
    "missing tensor": (drop("hidden_norm.weight"), "missing tensor hidden_norm.weight"),
    "missing layer": (top(num_hidden_layers=3, layer_types=["full_attention"] * 3), "layers.2."),
    "not finite": (poison, "k_norm.weight holds values that are not finite"),
    "another architecture": (top(architectures=["DFlash2DraftModel"]), "architectures must be"),
    "convolutions": (nested(conv_kernel_size=2), "DFlash 2's convolutions"),
    "selector": (nested(selector_rank=256), "DFlash 2's candidate selector"),
    "domino": (nested(gru_hidden_dim=8), "Domino's recurrent head"),
    "drafts from the anchor": (nested(sample_from_anchor=True), "its first row drafts, too"),
    "sinks": (nested(attention_sink_bias=True), "sinks in the attention"),
    "scaled logits": (nested(output_multiplier=0.2), "dflash_config.output_multiplier=0.2"),
    "interleaved": (top(rope_is_neox_style=False), "interleaved RoPE"),
    "another width": (top(target_hidden_size=64), "target_hidden_size=64 differs"),
    "another base of rope": (top(rope_theta=1e6), "rope_theta is 1000000.0 but rope_parameters"),
    "ids of inputs": (nested(target_layer_ids=[2, 3, 5]), "increasing ids of layers"),
    "ids that disagree": (
        top(eagle_aux_hidden_state_layer_ids=[1, 2, 4]),
        r"layer ids disagree: .* must be one higher",
    ),
    "fewer ids": (
        lambda files: (
            nested(target_layer_ids=[1, 2])(files),
            top(eagle_aux_hidden_state_layer_ids=[2, 3])(files),
        ),
        r"fc.weight has shape \[32, 96\], the config asks for \[32, 64\]",
    ),
    "two sizes of blocks": (nested(block_size=8), "block_size is 4 but dflash_config says 8"),
    "mask outside": (nested(mask_token_id=96), "mask_token_id must lie in 0..95"),
    "mask unknown": (nested(mask_token_id=None), "mask_token_id must lie in 0..95"),
    "two causalities": (nested(causal=True), "is_causal is False but dflash_config.causal True"),
    "causality unsaid": (top(is_causal=None), "is_causal must be true or false"),
    "window in no layer": (top(sliding_window=8), "contradict each other"),
    "types for one layer": (top(layer_types=["full_attention"]), "for each of the layers"),
    "another vocabulary": (top(vocab_size=97), "vocab_size is 97 but the target has 96"),
    "another target": (top(num_target_layers=7), "num_target_layers is 7 but the target has 6"),
    "clamped positions": (top(max_position_embeddings=64), "max_position_embeddings is 64"),
    "tied": (top(tie_word_embeddings=True), "tie_word_embeddings must be False"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_every_violation_is_named(target: TargetModel, tmp_path: Path, name: str) -> None:
    change, message = VIOLATIONS[name]
    files = written(make_head(target), tmp_path / "head")
    change(files)
    files.save()
    with pytest.raises(ExportError, match=message):
        check_folder(tmp_path / "head", target, DFLASH)


def test_an_embedding_of_the_mask_beside_it_is_refused(target: TargetModel, tmp_path: Path) -> None:
    written(make_head(target), tmp_path / "head")
    torch.save(torch.ones(32), tmp_path / "head" / "mask_embedding.pt")
    with pytest.raises(ExportError, match=r"mask_embedding.pt: heads with an embedding of their"):
        read_head(tmp_path / "head", target)


def test_a_fusion_of_zeros_was_never_trained(target: TargetModel, tmp_path: Path) -> None:

    head = make_head(target)
    with torch.no_grad():
        head.fc.weight.zero_()
    with pytest.raises(ExportError, match=r"fc.weight is all zeros: it was never trained"):
        write_as("dflash", head, tmp_path / "head")
