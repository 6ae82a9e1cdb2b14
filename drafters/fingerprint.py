"""Hashes that tell one target from another."""

import hashlib
import json

import torch
from accelerate.utils import align_module_device
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SHAPE = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def fingerprint(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    weights: str | None = None,
) -> dict[str, str]:
    """Hashes of shape, weights, tokenizer and chat template, whatever dtype the model has.

    Weights are sampled (the first values of every parameter, rounded to bfloat16), so it takes
    milliseconds on a large model and still tells a fine-tune from its base. Loaded in float16 they
    are left out: its rounding hides the bits that the others agree on.

    Args:
        model: if its weights are in slices, all processes call this together.
        tokenizer: None leaves it out.
        weights: the hash of the weights, if it is known already.
    """
    config = model.config.get_text_config()
    shape = {key: getattr(config, key, None) for key in _SHAPE}
    prints = {"shape": digest(json.dumps(shape, sort_keys=True))}
    if model.get_output_embeddings().weight.dtype != torch.float16:
        prints["weights"] = weights or _weights_digest(model)
    if tokenizer is not None:
        vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
        prints["tokenizer"] = digest(vocabulary)
        prints["chat_template"] = digest(str(tokenizer.chat_template))
    return prints


def digest(text: str) -> str:
    """A short hash."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _weights_digest(model: PreTrainedModel) -> str:
    found, seen = hashlib.sha256(), set[torch.Tensor]()
    for prefix, module in model.named_modules():
        own = dict(module.named_parameters(prefix, recurse=False))
        new = [name for name, parameter in own.items() if parameter not in seen]
        seen |= set(own.values())
        with align_module_device(module):  # fetches what waits in main memory or on disk
            for name in new:
                value = module.get_parameter(name.rpartition(".")[2]).detach()
                value = value.full_tensor() if isinstance(value, DTensor) else value
                sample = value.flatten()[:64].to(torch.bfloat16).view(torch.int16).cpu()
                found.update(name.encode() + sample.numpy().tobytes())
    return found.hexdigest()[:16]
