"""`model.generate` with drafts and an engine: the same tokens, one engine at a time."""

import gc
import weakref
from typing import Any

import pytest
import torch

from drafters import TargetModel
from inference.engines import build_engine
from inference.hf import speculative
from inference.proposers.ngram import NgramProposer
from tests.blocks import block_head
from tests.tiny import tiny_target

IDS = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])


def generate(target: TargetModel, **options: Any) -> list[list[int]]:
    found = target.model.generate(
        input_ids=IDS,
        attention_mask=torch.ones_like(IDS),
        max_new_tokens=16,
        do_sample=False,
        custom_generate=speculative,
        **{"drafter": NgramProposer(8, 4, 2), **options},
    )
    return found.tolist()


def test_an_engine_that_is_named_stays_until_another_is_named() -> None:
    target = tiny_target(torch.float32)
    expected = generate(target)
    assert "forward" not in vars(target.lm_head)
    for _ in range(2):
        assert generate(target, engine="packed") == expected
        assert "forward" in vars(target.lm_head), "weights stay packed between calls"
    assert generate(target, engine="eager") == expected
    assert "forward" not in vars(target.lm_head)


def test_the_callers_own_engine_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(torch.float64)
    expected = generate(target)
    monkeypatch.setattr("inference.hf.setup._target", lambda *args: target)
    engine, calls = build_engine(target, "packed"), []
    append = engine.append
    engine.append = lambda *args, **options: calls.append(1) or append(*args, **options)
    assert generate(target, engine=engine) == expected
    assert calls


def test_a_head_drafts_on_the_device() -> None:
    """Nothing but tokens and the length ends these texts; criteria are the host's."""
    target = tiny_target(torch.float64)
    head = block_head(target, "eagle3", dtype=torch.float64)
    expected = generate(target)
    assert generate(target, drafter=head, engine="device") == expected
    with pytest.raises(ValueError, match="tokens and lengths only: use engine='packed'"):
        generate(target, drafter=head, engine="device", max_time=60.0)


def test_engines_that_cannot_be_meant_are_refused() -> None:
    target, other = tiny_target(torch.float64), tiny_target(torch.float64, seed=1)
    with pytest.raises(ValueError, match="engine= must be one of eager, packed"):
        generate(target, engine="fast")
    with pytest.raises(ValueError, match="engine= runs another model"):
        generate(target, engine=build_engine(other, "packed"))
    with pytest.raises(ValueError, match="another TargetModel of this model"):
        generate(target, engine=build_engine(target, "packed"))
    with pytest.raises(ValueError, match="drafts with trained heads, not NgramProposer"):
        generate(target, engine="device")


def test_an_engine_does_not_keep_the_model() -> None:
    target = tiny_target(torch.float32)
    generate(target, engine="packed")
    model = weakref.ref(target.model)
    del target
    gc.collect()
    assert model() is None
