# ruff: noqa: E402  (stand-ins are put in before what asks for them is imported)
"""Runs where SGLang is: build its draft models on the CPU, load exports with its own loader, and
decode the golden rows with its own forward.

    python sglang_worker.py JOBS.json

JOBS.json names the target and a list of exports, each with SGLang's algorithm, the number of
drafts and a file for the result: all parameters after loading, the logits, and what the target
captures for the head. Needs nothing of Headway. SGLang's CPU backend is switched on; its compiled
kernels and torchvision are stood in for where they are missing, by modules that raise when anything
of them is called. What no tensor fills starts as NaN, so that it cannot pass for loaded.

Legend: n rows, S drafts, V target vocabulary, F captured layers, D hidden.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import os
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}

STANDS_IN = ("sgl_kernel", "torchvision")
WITH_PARTS = ("torchvision",)
"""Those whose submodules are stood in for too; SGLang does without those of the other."""


class StandIn(types.ModuleType):
    """A module with every name in it; what is called raises."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": missing(f"{self.__name__}.{name}")})


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of packages that are not there."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        """Of a stand-in, or of nothing."""
        package = name.split(".")[0]
        if package not in STANDS_IN or (name != package and package not in WITH_PARTS):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=package in WITH_PARTS)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> StandIn:
        """An empty one."""
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def missing(name: str) -> Callable[..., None]:
    """A function that says what is not there."""

    def raising(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"{name} is a stand-in and cannot be called")

    return raising


from transformers.utils import is_torchvision_available

is_torchvision_available()  # remembers the answer, before a stand-in could change it
REPLACED = [name for name in STANDS_IN if importlib.util.find_spec(name) is None]
sys.meta_path.append(StandInFinder())  # the last to be asked

import sglang
import torch
from safetensors.torch import load_file, save_file
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.model_runner_components.attention_backend_setup import (
    configure_aux_hidden_state_capture,
)
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (
    resolve_spec_aux_hidden_state_config,
)
from sglang.srt.model_loader.loader import DefaultModelLoader, _initialize_model
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.runtime_context import SpawnRanks, get_spec, publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.dspark_components.dspark_config import resolve_runtime_config
from sglang.srt.speculative.dspark_components.dspark_draft import (
    select_draft_hidden_without_anchor,
)
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import Tensor

MAX_LENGTH = 64
BLOCKS = ("DFLASH", "DSPARK")


def serve(target: str, job: dict[str, Any]) -> ServerArgs:
    """What `launch_server` makes of its arguments, in force afterwards.

    DFlash and DSpark are refused on a CPU ("not supported ... on device 'cpu'", "only supports
    CUDA, NPU or XPU device"), so these models are built without the algorithm being asked for.
    """
    asked: dict[str, Any] = {"model_path": target, "device": "cpu", "dtype": "float32"}
    asked |= {"attention_backend": "torch_native", "context_length": MAX_LENGTH}
    if job["algorithm"] not in BLOCKS:
        drafts = job["drafts"]
        asked |= {
            "speculative_algorithm": job["algorithm"],
            "speculative_draft_model_path": job["export"],
            "speculative_num_steps": drafts,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": drafts + 1,
        }
    arguments = ServerArgs(**asked)
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    return arguments


def loaded(config: ModelConfig) -> torch.nn.Module:
    """A model with the file's tensors in it, by SGLang's loader; what nothing fills is NaN."""
    loader = DefaultModelLoader(LoadConfig())
    with set_default_torch_dtype(config.dtype):
        model = _initialize_model(config, loader.load_config)
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data.fill_(torch.nan)
        weights = loader._get_all_weights(config, model)
        loader.load_weights_and_postprocess(model, weights, torch.device("cpu"))
    return model.eval()


class Memory:
    """Keys and values of one sequence, in SGLang's pools, behind its attention in torch.

    Args:
        layers: attention of each layer, as SGLang built it.
    """

    def __init__(self, layers: list[Any]) -> None:
        shape = layers[0]
        pool = ReqToTokenPool(1, MAX_LENGTH, "cpu", enable_memory_saver=False)
        pool.req_to_token[1] = torch.arange(1, MAX_LENGTH + 1)  # slot 0 is for padding
        self.keys = MHATokenToKVPool(
            size=MAX_LENGTH,
            page_size=1,
            dtype=torch.float32,
            head_num=shape.tp_k_head_num,
            head_dim=shape.head_dim,
            layer_num=len(layers),
            device="cpu",
            enable_memory_saver=False,
        )
        runner = types.SimpleNamespace(
            device="cpu", req_to_token_pool=pool, token_to_kv_pool=self.keys
        )
        self.backend = TorchNativeAttnBackend(runner)
        self.length = 0

    def slots(self, rows: int) -> Tensor:
        """(n,) where the next rows go."""
        return torch.arange(self.length, self.length + rows) + 1

    @torch.no_grad()
    def run(self, model: Any, tokens: Tensor, decode: bool = False, **given: Any) -> Any:
        """SGLang's output for (n,) tokens behind what is there already.

        Args:
            model: one of SGLang's.
            tokens: of the new rows.
            decode: a single row in the mode of decoding.
            **given: fields of the batch; ``input_embeds`` goes to the model.
        """
        rows, before = len(tokens), self.length
        positions = torch.arange(before, before + rows)
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
            batch_size=1,
            input_ids=tokens,
            req_pool_indices=torch.tensor([1]),
            seq_lens=torch.tensor([before + rows]),
            out_cache_loc=self.slots(rows),
            seq_lens_sum=before + rows,
            seq_lens_cpu=torch.tensor([before + rows]),
            extend_num_tokens=rows,
            extend_seq_lens=torch.tensor([rows]),
            extend_prefix_lens=torch.tensor([before]),
            extend_seq_lens_cpu=[rows],
            extend_prefix_lens_cpu=[before],
            positions=positions,
            **given,
        )
        with forward_context(ForwardContext(attn_backend=self.backend)):
            embedded = (
                {"input_embeds": batch.input_embeds} if batch.input_embeds is not None else {}
            )
            found = model.forward(tokens, positions, batch, **embedded)
        self.length += rows
        return found


def attentions(model: torch.nn.Module) -> list[Any]:
    """Attention of each layer."""
    return [part.attn for name, part in model.named_modules() if name.endswith(".self_attn")]


def share_target(model: Any, target: Any, algorithm: str) -> None:
    """Give the draft model what the file leaves to the target, as SGLang's workers do."""
    embedding, head = target.get_embed_and_head()
    if algorithm == "DSPARK":
        model.attach_shared_modules(embed_tokens=target.model.embed_tokens, lm_head=target.lm_head)
    elif algorithm == "EAGLE" or getattr(model, "load_lm_head_from_target", False):
        model.set_embed_and_head(embedding, head)
    elif algorithm == "EAGLE3":
        model.set_embed(embedding)


def chain(model: Any, golden: dict[str, Tensor]) -> Tensor:
    """(S, V) logits of a prefix and the drafts after it, each fed what the one before gave back."""
    features, tokens, steps = golden["features"], golden["token_ids"], len(golden["logits"])
    memory, rows = Memory(attentions(model)), []
    hidden, new = features, tokens[: len(features)]
    for step in range(steps):
        given = EagleDraftInput(hidden_states=hidden)
        found = memory.run(
            model, new, step > 0, spec_info=given, capture_hidden_mode=CaptureHiddenMode.LAST
        )
        rows.append(found.next_token_logits)
        hidden, new = found.hidden_states, tokens[len(features) + step :][:1]
    return torch.cat(rows)


def block(
    model: Any, target: Any, job: dict[str, Any], golden: dict[str, Tensor], mask: int
) -> Tensor:
    """(S, V) logits of a block of mask tokens behind its context."""
    features, tokens, drafts = golden["features"], golden["token_ids"], job["drafts"]
    memory, prefix = Memory(attentions(model)), len(features)
    context = torch.arange(prefix)
    if job["algorithm"] == "DSPARK":
        model.write_target_hidden_kv(
            target_hidden=features, pool=memory.keys, positions=context, cache_loc=context + 1
        )
    else:
        runner = types.SimpleNamespace(token_to_kv_pool=memory.keys)
        worker = types.SimpleNamespace(draft_model=model, draft_model_runner=runner)
        projected = model.project_target_hidden(features)
        DFlashWorkerV2._append_target_hidden_sequential(worker, projected, context, context + 1)
    memory.length = prefix
    in_place = job["algorithm"] == "DFLASH" or not model.sample_from_anchor
    asked = torch.full((drafts + in_place,), mask)
    asked[0] = tokens[prefix - 1]
    embedded = target.model.embed_tokens(asked)
    hidden = memory.run(model, asked, input_embeds=embedded).hidden_states
    if job["algorithm"] == "DFLASH":
        return hidden[1:] @ target.lm_head.weight.T
    if in_place:
        hidden, _ = select_draft_hidden_without_anchor(hidden, bs=1, gamma=drafts)
    logits, _ = model.compute_base_logits(hidden)
    state, rows = model.markov_head.init_state(hidden[:1]), []
    for depth in range(drafts):
        before = tokens[prefix - 1 + depth][None]
        bias, state = model.markov_head.step_bias(
            before, hidden_states=hidden[depth : depth + 1], state=state
        )
        rows.append(logits[depth : depth + 1] + bias)
    return torch.cat(rows)


def set_capture(arguments: ServerArgs, target: Any, job: dict[str, Any]) -> list[int]:
    """Make the target capture what SGLang reads in the export; ``hidden_states`` indices."""
    with get_spec().override(speculative_draft_model_path=job["export"]):
        read = resolve_spec_aux_hidden_state_config(
            server_args=arguments,
            model_config=ModelConfig.from_server_args(arguments),
            spec_algorithm=SpeculativeAlgorithm.from_string(job["algorithm"]),
            is_draft_worker=False,
        )
    target.capture_aux_hidden_states, target.model.layers_to_capture = False, []
    configure_aux_hidden_state_capture(
        model=target,
        eagle_use_aux_hidden_state=read.eagle_use_aux_hidden_state,
        eagle_aux_hidden_state_layer_ids=read.eagle_aux_hidden_state_layer_ids,
        dflash_use_aux_hidden_state=read.dflash_use_aux_hidden_state,
        dflash_target_layer_ids=read.dflash_target_layer_ids,
        is_dspark=read.is_dspark,
    )
    return list(target.model.layers_to_capture)


def readings(model: Any, config: ModelConfig, job: dict[str, Any]) -> dict[str, Any]:
    """What SGLang understood of config.json, by the words of ``drafters.export.engines.meaning``,
    as its modules have it.
    """
    network = model if job["algorithm"] in BLOCKS else model.model
    first = network.layers[0]
    found = {
        "rms_norm_eps": first.post_attention_layernorm.variance_epsilon,
        "rope_theta": float(first.self_attn.rotary_emb.base),
        "num_layers": len(network.layers),
    }
    if job["algorithm"] == "EAGLE3":
        found |= {
            "norm_before_fc": network.input_norm is not None,
            "fc_norm": network.fc_norm is not None,
            "norm_output": bool(network.norm_output),
            "draft_vocab_size": model.lm_head.org_vocab_size,
        }
    if job["algorithm"] in BLOCKS:
        layers = attentions(model)
        sizes = [layer.sliding_window_size for layer in layers]
        found |= {
            "causal": [layer.attn_type == AttentionType.DECODER for layer in layers],
            "windows": [None if size < 0 else size + 1 for size in sizes],
            "mask_token_id": model.draft_config.mask_token_id,
            "block_size": model.block_size,
        }
    if job["algorithm"] == "DSPARK":
        found |= {
            "block_size": block_rows(model, config, job["drafts"] + 1),
            "markov_rank": model.markov_head.markov_rank,
            "sample_from_anchor": model.sample_from_anchor,
        }
    return found


def block_rows(model: Any, config: ModelConfig, asked: int | None) -> int:
    """Rows of a DSpark block.

    Args:
        model: SGLang's.
        config: of the export.
        asked: what `--speculative-dspark-block-size` leads to, that and one; None for no such
            option.
    """
    runtime = resolve_runtime_config(
        draft_hf_config=config.hf_config,
        speculative_num_draft_tokens=asked,
        target_vocab_size=config.vocab_size,
    )
    return int(runtime.gamma) + (not model.sample_from_anchor)


def run(target: Any, path: str, job: dict[str, Any]) -> dict[str, Any]:
    """One export: load, save, compute."""
    arguments = serve(path, job)
    config = ModelConfig.from_server_args(
        arguments, model_path=job["export"], is_draft_model=True, context_length=MAX_LENGTH
    )
    model = loaded(config)
    found = {n: p.detach().clone().contiguous() for n, p in model.named_parameters()}
    vocabulary = getattr(model, "hot_token_id", None)
    if vocabulary is not None:
        found["hot_token_id"] = vocabulary.clone()
    layers = set_capture(arguments, target, job)
    reads = readings(model, config, job) | ({"feature_layers": layers} if layers else {})
    share_target(model, target, job["algorithm"])
    golden = load_file(Path(job["export"]) / "golden.logits")
    with torch.no_grad():
        if job["algorithm"] in BLOCKS:
            logits = block(model, target, job, golden, reads["mask_token_id"])
        else:
            logits = chain(model, golden)
        handed = Memory(attentions(target)).run(
            target, golden["token_ids"], capture_hidden_mode=CaptureHiddenMode.FULL
        )  # captured layers, or the last hidden state
    found |= {"logits": logits.contiguous(), "captured": handed.hidden_states.contiguous()}
    save_file(found, job["result"])
    is_dspark = job["algorithm"] == "DSPARK"
    unasked = block_rows(model, config, None) if is_dspark else reads.get("block_size")
    return {"model": type(model).__name__, "reads": reads, "rows_unasked": unasked}


def main(path: str) -> None:
    """All jobs; one line of JSON each."""
    asked = json.loads(Path(path).read_text())
    logging.disable(logging.WARNING)
    versions = {"sglang": sglang.__version__, "torch": torch.__version__}
    first = {"algorithm": "DFLASH"}  # the target alone
    arguments = serve(asked["target"], first)
    with tempfile.TemporaryDirectory() as folder:
        place = f"file://{Path(folder) / 'group'}"
        parallel_state.init_distributed_environment(1, 0, place, 0, "gloo")
        parallel_state.initialize_model_parallel(backend="gloo")
        target = loaded(ModelConfig.from_server_args(arguments))
        for job in asked["jobs"]:
            try:
                report = run(target, asked["target"], job)
            except Exception as error:  # whatever an engine raises is what was found
                report = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
            said = {"name": job["name"], "versions": versions, "replaced": REPLACED, **report}
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
