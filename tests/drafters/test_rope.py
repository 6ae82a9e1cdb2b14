"""Stretched rotary embeddings against transformers' own, and what is refused of them."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from drafters import TargetModel, build_drafter
from drafters.rope import attention_factor, extended, extension_problems, rotate
from tests.tiny import tiny_target

SIZE, THETA = 64, 500000.0
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}
EXTENSIONS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn, other turns": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, not rounded": {**YARN, "truncate": False},
    "yarn, its factor given": {**YARN, "attention_factor": 1.5},
    "yarn, two magnitudes": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


@pytest.mark.parametrize("theta", [THETA, 10000.0])
@pytest.mark.parametrize("name", EXTENSIONS)
def test_frequencies_are_transformers_own(name: str, theta: float) -> None:
    extension = EXTENSIONS[name]
    config = LlamaConfig(
        hidden_size=SIZE,
        num_attention_heads=1,
        head_dim=SIZE,
        max_position_embeddings=131072,
        rope_parameters={**extension, "rope_theta": theta},
    )
    wanted, factor = ROPE_INIT_FUNCTIONS[extension["rope_type"]](config, torch.device("cpu"))
    plain = theta ** -(torch.arange(0, SIZE, 2) / SIZE)
    found = extended(plain, theta, extension)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-12)
    assert attention_factor(extension) == pytest.approx(factor)
    assert not torch.allclose(found, plain)


def test_magnitude_and_angle() -> None:
    x, positions = torch.randn(1, 2, 3, SIZE).double(), torch.arange(3)[None]
    turned = rotate(x, positions, THETA, YARN)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1) * attention_factor(YARN))
    scaled = {"rope_type": "linear", "factor": 2.0}
    torch.testing.assert_close(
        rotate(x, 2 * positions, THETA, scaled), rotate(x, positions, THETA), atol=1e-12, rtol=0
    )


@pytest.mark.parametrize(
    ("extension", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic' RoPE is not supported"),
        ({"rope_type": "linear"}, "linear RoPE needs a positive factor, got None"),
        ({**YARN, "factor": 0}, "yarn RoPE needs a positive factor, got 0"),
        ({**YARN, "finetuned": True}, "yarn RoPE has no finetuned"),
        ({**LLAMA3, "beta_fast": 1.0}, "llama3 RoPE has no beta_fast"),
    ],
)
def test_what_is_not_known_is_named(
    target: TargetModel, extension: dict[str, Any], message: str
) -> None:
    assert any(message in problem for problem in extension_problems(extension))
    with pytest.raises(ValueError, match=f"rope_extension: .*{message}"):
        build_drafter("eagle3", target, rope_extension=extension)


def test_heads_have_it(target: TargetModel) -> None:
    """The same weights with and without."""
    ids = torch.arange(8)[None]
    heads = [
        build_drafter("eagle3", target, seed=0, rope_extension=extension).double()
        for extension in (None, {**YARN, "original_max_position_embeddings": 16})
    ]
    x = torch.randn(1, 8, 64).double()
    queries = [head.midlayer.self_attn.project(x, ids)[0] for head in heads]
    assert not torch.allclose(*queries)
