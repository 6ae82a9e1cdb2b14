# ruff: noqa: E402  (the platform is put in before what asks for it is imported)
"""Runs where vLLM is: build its draft models on the CPU, load exports with its own loader, and
decode the golden rows with its own forward.

    python vllm_worker.py JOBS.json

JOBS.json names the target and a list of exports, each with vLLM's method and a file for the result:
all parameters after loading, and the logits. Needs nothing of Headway. vLLM chooses a platform by
what it was compiled for; here the CPU's is put in by hand, and attention, the one part that needs
compiled kernels, is torch's. What no tensor fills starts as NaN, so that it cannot pass for loaded.

Legend: n rows, V target vocabulary.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import torch
import vllm.platforms
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm.platforms.cpu import CpuPlatform

vllm.platforms._current_platform = CpuPlatform()

from vllm.config import (
    CompilationConfig,
    ModelConfig,
    SpeculativeConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.config.device import DeviceConfig
from vllm.config.load import LoadConfig
from vllm.config.parallel import ParallelConfig
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import initialize_model

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
MAX_LENGTH = 512


def attend(self: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    """Causal attention of one sequence (n, heads · size), without a cache."""
    rows = len(query)
    q, k, v = (x.view(rows, -1, self.head_size).transpose(0, 1)[None] for x in (query, key, value))
    mixed = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    return mixed[0].transpose(0, 1).reshape(rows, -1)


def engine_config(target: str, job: dict[str, str]) -> VllmConfig:
    """What `vllm serve TARGET --speculative-config` makes of its arguments."""
    model = ModelConfig(model=target, dtype="float32", max_model_len=MAX_LENGTH, enforce_eager=True)
    parallel = ParallelConfig()
    asked: dict[str, Any] = {"model": job["export"], "method": job["method"]}
    asked["num_speculative_tokens"] = int(job["drafts"])
    if job["method"] == "peagle":
        asked |= {"method": "eagle3", "parallel_drafting": True}
    speculative = SpeculativeConfig(
        target_model_config=model, target_parallel_config=parallel, **asked
    )
    config = VllmConfig(
        model_config=model,
        parallel_config=parallel,
        device_config=DeviceConfig(device="cpu"),
        compilation_config=CompilationConfig(custom_ops=["none"]),  # torch's, not compiled ones
    )
    # Afterwards: for DSpark it would ask for the runner that needs Triton, which nothing here runs.
    config.speculative_config = speculative
    return config


def loaded_model(config: VllmConfig) -> torch.nn.Module:
    """The draft model with the file's tensors in it; what nothing fills is NaN."""
    speculative = config.speculative_config
    assert speculative is not None and speculative.draft_model_config is not None
    draft = speculative.draft_model_config
    model = initialize_model(vllm_config=config, model_config=draft)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data.fill_(torch.nan)
    DefaultModelLoader(LoadConfig()).load_weights(model, draft)
    return model


def share_target(model: torch.nn.Module, target: dict[str, Tensor]) -> Tensor:
    """Give the draft model what the file leaves to the target; the target's output matrix."""
    output = target.get(OUTPUT, target[EMBEDDING])
    for name, weight in ((EMBEDDING, target[EMBEDDING]), (OUTPUT, output)):
        parameter = dict(model.named_parameters()).get(name)
        if parameter is not None and parameter[: len(weight)].isnan().any():  # rows are padded
            parameter.data[: len(weight)] = weight.to(parameter.dtype)
    return output


def linear(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer as it is before weights are packed for a processor."""
    return torch.nn.functional.linear(x, layer.weight, bias)


@torch.no_grad()
def logits(model: Any, method: str, golden: dict[str, Tensor], output: Tensor) -> Tensor:
    """(S, V) logits of the golden rows.

    Args:
        model: with everything loaded.
        method: as in the job.
        golden: of the export: ``features``, ``token_ids``, ``logits``.
        output: (V, D) the target's output matrix.
    """
    features, tokens, steps = golden["features"], golden["token_ids"], len(golden["logits"])
    if method == "medusa":
        return torch.cat(model.compute_logits(model(features[-1:])))
    prefix = len(features)
    if method == "peagle":
        masks = steps - 1
        features = torch.cat([features, model.mask_hidden.expand(masks, -1)])
        mask_token = model.config.pard_token
        tokens = torch.cat([tokens[:prefix], tokens.new_full((masks,), mask_token)])
    hidden = features if method == "eagle" else model.combine_hidden_states(features)
    rows = []
    for _ in range(1 if method == "peagle" else steps):
        positions = torch.arange(len(hidden))
        last, fed_back = model(tokens[: len(hidden)], positions, hidden)
        rows.append(last[prefix - 1 :] if method == "peagle" else last[-1:])
        hidden = torch.cat([hidden, fed_back[-1:]])
    found = torch.cat(rows)
    return found @ output.T if method == "eagle" else model.compute_logits(found)


def run(target: str, job: dict[str, str]) -> dict[str, Any]:
    """One export: load, save, compute."""
    config = engine_config(target, job)
    with set_current_vllm_config(config):
        model = loaded_model(config)
    parameters = dict(model.named_parameters())
    found = {name: value.detach().clone().contiguous() for name, value in parameters.items()}
    report = {"model": type(model).__name__}
    golden = Path(job["export"]) / "golden.logits"
    if job["forward"]:
        files = map(load_file, Path(target).glob("*.safetensors"))
        output = share_target(model, {name: t for file in files for name, t in file.items()})
        with set_current_vllm_config(config):
            found["logits"] = logits(model, job["method"], load_file(golden), output).contiguous()
    save_file(found, job["result"])
    return report


def main(path: str) -> None:
    """All jobs; one line of JSON each."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    Attention.forward = attend
    UnquantizedLinearMethod.apply = linear
    UnquantizedEmbeddingMethod.apply = linear
    asked = json.loads(Path(path).read_text())
    versions = {"vllm": vllm.__version__, "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as folder:
        with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
            init_distributed_environment(1, 0, f"file://{Path(folder) / 'group'}", 0, "gloo")
            initialize_model_parallel(1, 1)
        for job in asked["jobs"]:
            try:
                report = run(asked["target"], job)
            except Exception as error:  # whatever an engine raises is what was found
                report = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
            print(json.dumps({"name": job["name"], "versions": versions, **report}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
