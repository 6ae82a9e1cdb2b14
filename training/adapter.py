"""A LoRA in a target, through peft.

Legend: r rank.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from drafters import TargetModel
from drafters.export.folder import share
from training.options.data import LoraOptions

ALL_LINEAR = "all-linear"


class TargetAdapter:
    """Low-rank updates W + (alpha / r) B A of a target's linear layers (arXiv:2106.09685), B = 0.

    The layers of ``target.model`` are replaced in place, its weights stay frozen. So whoever runs
    this :class:`~drafters.TargetModel`, the decoder included, runs the adapted one.

    Args:
        target: gets the adapter; in eval mode, which it stays in.
        options: rank above 0.
        seed: of A.

    Raises:
        ValueError: peft is missing, or the target or ``options.modules`` cannot have a LoRA.
    """

    def __init__(self, target: TargetModel, options: LoraOptions, seed: int = 0) -> None:
        if find_spec("peft") is None:
            raise ValueError("lora.rank needs peft: pip install 'headway[train]', or peft itself")
        from peft import LoraConfig, get_peft_model

        check_modules(target, options.modules)
        if target.dtype == torch.float16:
            raise ValueError(
                "target.dtype float16 does not go with lora.rank: gradients through it underflow; "
                "use bfloat16 or float32"
            )
        names = list(options.modules)
        config = LoraConfig(
            r=options.rank,
            lora_alpha=options.alpha,  # type: ignore[arg-type]  # peft divides, any number will do
            target_modules=ALL_LINEAR if names == [ALL_LINEAR] else names,
            task_type="CAUSAL_LM",
        )
        self.target, self.rank, self.alpha = target, options.rank, options.alpha
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._peft: Any = get_peft_model(target.model, config).eval()

    def parameters(self) -> dict[str, nn.Parameter]:
        """A and B of every layer by their names in the model; float32 or better."""
        named = self.target.model.named_parameters()
        return {name: value for name, value in named if value.requires_grad}

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside, the target is the original one."""
        with self._peft.disable_adapter():
            yield

    def tensors(self) -> dict[str, Tensor]:
        """A and B as peft names them in a file."""
        from peft import get_peft_model_state_dict

        found = get_peft_model_state_dict(self._peft, save_embedding_layers=False)
        return {name: value.detach().cpu().contiguous() for name, value in found.items()}

    def save(self, folder: Path, base: str) -> None:
        """Write peft's two files: adapter_config.json and adapter_model.safetensors.

        Args:
            folder: exists.
            base: name of the original target, for the record.
        """
        config = self._peft.peft_config["default"]
        config.base_model_name_or_path = base
        config.save_pretrained(str(folder))
        path = folder / "adapter_model.safetensors"
        save_file(self.tensors(), path, {"format": "pt"})
        share(path)

    def digest(self) -> str:
        """A short hash of the update: A, B and their scale."""
        found = hashlib.sha256(json.dumps([self.rank, self.alpha]).encode())
        for name, value in sorted(self.tensors().items()):
            found.update(name.encode() + value.view(torch.uint8).numpy().tobytes())
        return found.hexdigest()[:16]

    def merge(self) -> None:
        """Add the update to the weights: ``target.model`` has plain layers again, and no adapter.

        Raises:
            ValueError: the update is not finite.
        """
        self._peft.merge_and_unload(safe_merge=True)
        self.target.model.requires_grad_(False)


def check_modules(target: TargetModel, names: list[str]) -> None:
    """Refuse layers that cannot have a LoRA.

    Raises:
        ValueError: a name that fits no linear layer, or one of the matrices that heads borrow.
    """
    if names == [ALL_LINEAR]:
        return
    if ALL_LINEAR in names:
        raise ValueError(f"lora.modules: {ALL_LINEAR} is not named together with others")
    modules = dict(target.model.named_modules())
    for name in names:
        fitting = [m for n, m in modules.items() if n == name or n.endswith("." + name)]
        if not fitting:
            linear = [n.rsplit(".", 1)[-1] for n, m in modules.items() if isinstance(m, nn.Linear)]
            raise ValueError(
                f"lora.modules: the target has no layer {name!r}; its linear ones are "
                f"{sorted(set(linear))}"
            )
        if any(module in (target.lm_head, target.embedding) for module in fitting):
            raise ValueError(
                f"lora.modules: {name!r} is a matrix that the head borrows, which stays frozen: "
                "leave it out"
            )
