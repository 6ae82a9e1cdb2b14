"""Where the weights of a target are: on one device, spread over several, or shared by processes.

Three ways to hold a target that is too big for one device:

* ``device_map``: one process, decoder layers on several devices, by accelerate's hooks. What does
  not fit waits in main memory or on disk and is copied to a device for each pass.
* ``tensor``: every process holds a slice of each matrix, and all compute the same batch together,
  by transformers' own plan.
* ``shard``: every process holds a slice of each layer and gathers the whole layer to run it (FSDP2
  without a backward pass); each process has its own batch.

Under the last two all processes run the same forward passes in the same order, or they wait for
each other forever. In all three the embedding, the final norm and the output matrix are whole on
the device of the head, which borrows them.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import infer_auto_device_map
from accelerate.utils import align_module_device, get_balanced_memory, get_max_memory
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.distributed import DistributedConfig
from transformers.utils.quantization_config import Mxfp4Config

if TYPE_CHECKING:
    from drafters.target import TargetModel

logger = logging.getLogger(__name__)
DeviceMap = str | dict[str, Any]
"""auto, balanced, balanced_low_0 or sequential; or a device for each module."""


class PlacementError(ValueError):
    """The target cannot be placed as asked; the message names the option and the way out."""


def load_pretrained(
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    attn_implementation: str | None = None,
    device_map: DeviceMap | None = None,
    parallel: str = "none",
    reserve_gb: float = 0.0,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer, placed; see ``TargetModel.load``.

    Raises:
        ValueError: it cannot be found, loaded or placed so; the message says what to check.
    """
    if attn_implementation not in ("sdpa", "eager", None):
        raise ValueError(
            "attn_implementation must be 'sdpa' or 'eager' (or None: transformers chooses), "
            f"got {attn_implementation!r}"
        )
    loaded: Any
    try:
        config = AutoConfig.from_pretrained(name)
        loaded = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=dtype,
            attn_implementation=attn_implementation,
            output_loading_info=True,
            **loading_options(config, dtype, device, device_map, parallel, reserve_gb),
            **_unpacking(config),
        )
        tokenizer = AutoTokenizer.from_pretrained(name)
    except PlacementError:
        raise
    except Exception as error:  # OSError, ValueError, SafetensorError, KeyError, ...
        kind = "folder" if Path(name).exists() else "name (not a folder here; the hub was asked)"
        raise ValueError(f"target {name!r}: cannot load this {kind}: {error}") from error
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"target {name!r}: its files lack {missing[0]} and {len(missing) - 1} more "
            "weights, which would be random: the download is incomplete"
        )
    weights = layer_list(model).parameters() if parallel == "tensor" else ()
    if parallel == "tensor" and not any(isinstance(weight, DTensor) for weight in weights):
        raise PlacementError(
            f"target.parallel=tensor: transformers' plan for {type(model).__name__} cuts none of "
            "its layers; take target.parallel=shard"
        )
    _make_borrowable(model)
    return model, tokenizer


def _unpacking(config: PreTrainedConfig) -> dict[str, Any]:
    """An argument of ``from_pretrained``: MXFP4 weights become the wanted dtype. Otherwise that
    would depend on the device and on whether the package ``kernels`` is there.
    """
    packed = config.to_dict().get("quantization_config") or {}
    if packed.get("quant_method") != "mxfp4":
        return {}
    return {"quantization_config": Mxfp4Config(dequantize=True)}


def loading_options(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    device_map: DeviceMap | None,
    parallel: str,
    reserve_gb: float = 0.0,
) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` for a placement.

    Weights go from the file to their device one by one. On the CPU they stay mapped from the file
    where it has the wanted dtype, so the processes of a machine share that memory.

    Args:
        config: of the model.
        dtype: of the weights.
        device: for a target in one piece.
        device_map: see ``DeviceMap``.
        parallel: none, tensor or shard.
        reserve_gb: what ``device_map`` leaves free on the first device.

    Raises:
        PlacementError: the number of processes does not fit, or the target cannot be cut so.
    """
    processes = _num_processes()
    if device_map is not None:
        if processes > 1:
            raise PlacementError(
                f"target.device_map is for one process and there are {processes}: launch one, or "
                "set target.parallel to tensor or shard"
            )
        if isinstance(device_map, str):
            device_map = spread(config, dtype, device_map, int(reserve_gb * 1e9))
        return {"device_map": device_map}
    if parallel == "none":
        return {} if device.type == "cpu" else {"device_map": {"": device}}
    if processes == 1:
        raise PlacementError(
            f"target.parallel={parallel} needs several processes and there is one: start it with "
            "torchrun or a launch file of several, or drop it"
        )
    if parallel == "shard":
        return {}  # on the CPU until `shard_target` takes slices of it
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config.get_text_config(), field, None) or processes
        if heads % processes:
            raise PlacementError(
                f"target.parallel=tensor: the target's {field}={heads} is no multiple of the "
                f"{processes} processes; take another number of them, or target.parallel=shard"
            )
    return {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=processes)}


def spread(
    config: PreTrainedConfig, dtype: torch.dtype, how: str, reserve: int = 0
) -> dict[str, Any]:
    """A device for every decoder layer; the first device for all the rest, where the head is.

    Args:
        config: of the model.
        dtype: of the weights.
        how: auto and balanced share the layers out evenly, balanced_low_0 gives the first device
            only what the others have no room for, sequential fills one device after another.
        reserve: bytes of the first device to leave free.

    Returns:
        A device map of ``from_pretrained``.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    layers = layer_list(model)
    path = next(key for key, module in model.named_modules() if module is layers)
    inside = set(layers.parameters())
    outside = [key for key, parameter in model.named_parameters() if parameter not in inside]
    memory = get_max_memory()
    first = next(iter(memory))
    sizes = {key: model.get_parameter(key).nbytes for key in outside}
    memory[first] = max(0, memory[first] - sum(sizes.values()) - reserve)
    kinds = sorted({type(layer).__name__ for layer in layers})
    if how != "sequential":
        low = how == "balanced_low_0"
        memory = get_balanced_memory(layers, memory, kinds, dtype=dtype, low_zero=low)
    found = infer_auto_device_map(layers, memory, kinds, dtype=dtype, clean_result=False)
    placed = {f"{path}.{i}": found.get(str(i), found.get("")) for i in range(len(layers))}
    assert None not in placed.values(), found
    if slow := sum(device in ("cpu", "disk") for device in placed.values() if first != "cpu"):
        logger.warning(
            "target.device_map=%s: %d of %d layers find no room on the devices; they are copied "
            "there for each pass, which is slow",
            how,
            slow,
            len(layers),
        )
    return {**_outer_modules(model, path, first), **placed}


def layer_list(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers, in order.

    Raises:
        ValueError: they are not in one list.
    """
    count = model.config.get_text_config().num_hidden_layers
    for module in model.get_decoder().children():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(
        f"{type(model).__name__}: no list of its {count} decoder layers, so they cannot be run or "
        "placed one by one"
    )


def _make_borrowable(model: PreTrainedModel) -> None:
    """Make the embedding and the output matrix whole in this process; all processes together.

    Raises:
        PlacementError: a device map leaves one of them off the devices.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    borrowed = [module for module in (embedding, head) if module is not None]
    own = [dict(module.named_parameters(recurse=False)) for module in borrowed]
    tied = len(own) == 2 and own[0].get("weight") is own[1].get("weight")
    for module, weights in zip(borrowed, own, strict=True):
        for key, value in weights.items():
            if value.is_meta:
                raise PlacementError(
                    "target.device_map: the head borrows the embedding and the output matrix, so "
                    "neither may be on disk or in main memory beside a GPU"
                )
            if isinstance(value, DTensor):
                module.register_parameter(key, nn.Parameter(whole(value), requires_grad=False))
                module.__dict__.pop("forward", None)  # transformers' own, which exchanges slices
    if tied:
        head.register_parameter("weight", embedding.get_parameter("weight"))


def shard_target(target: "TargetModel", device: torch.device) -> None:
    """Keep a slice of each decoder layer in each process; all processes together.

    The rest of the model moves to ``device``. A forward pass gathers one layer after another, so it
    ends in one process only when the others run it too.

    Args:
        target: whole in each process; on the CPU, if it is too big for one device.
        device: of this process.

    Raises:
        ValueError: the target's layers are not in one list.
    """
    target.remember_fingerprint()
    model = target.model
    layers = layer_list(model)
    inside = set(layers.parameters())
    outside = {parameter for parameter in model.parameters() if parameter not in inside}
    for weight in outside:
        weight.data = weight.data.to(device)
    mesh = init_device_mesh(device.type, (_num_processes(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    # The model is the common root: layers then share streams, and buffers move to the device.
    fully_shard(model, mesh=mesh, reshard_after_forward=True, ignored_params=outside)


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Inside, the weights of a module are on a device, and not in slices of FSDP.

    Where processes share them, all enter together.
    """
    with ExitStack() as stack:
        if isinstance(module, FSDPModule):
            module.unshard()
            stack.callback(module.reshard)
        for part in module.modules():
            stack.enter_context(align_module_device(part))
        yield


def whole(weight: Tensor) -> Tensor:
    """A copy of a weight; all processes together, where they hold it in slices."""
    if isinstance(weight, DTensor):
        return weight.full_tensor().detach()
    return weight.detach().clone()


def held_bytes(module: nn.Module) -> int:
    """Bytes of the weights that this process itself holds in memory."""
    local = (
        parameter.to_local() if isinstance(parameter, DTensor) else parameter
        for parameter in module.parameters()
    )
    return sum(tensor.nbytes for tensor in local if not tensor.is_meta)


def _outer_modules(model: nn.Module, layers: str, device: Any) -> dict[str, Any]:
    """The modules outside of the layers that have weights or buffers, all on one device."""
    owners = {
        key
        for key, module in model.named_modules()
        if key
        and not f"{key}.".startswith(f"{layers}.")
        and (module._parameters or module._buffers)
    }
    return dict.fromkeys(sorted(owners), device)


def _num_processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
