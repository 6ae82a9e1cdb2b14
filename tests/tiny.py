"""A tiny random target with a tokenizer and a chat template, built in code: nothing is downloaded.

The tokenizer is character level, so any text round-trips as long as its characters fit into
`vocab`; the others become `<unk>`. Weights are large enough that greedy decoding has clear winners.
"""

import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from drafters import TargetModel

UNK, START, END = "<unk>", "<|im_start|>", "<|im_end|>"
SPECIALS = (UNK, START, END)
CHARACTERS = "\n " + string.ascii_lowercase + string.digits + ".,?!'-+=" + string.ascii_uppercase

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_tokenizer(vocab: int = 96) -> PreTrainedTokenizerFast:
    """One token per character, three special tokens, and fillers up to `vocab`."""
    tokens = [*SPECIALS, *CHARACTERS]
    tokens += [f"<extra_{number}>" for number in range(len(tokens), vocab)]
    model = BPE({token: number for number, token in enumerate(tokens[:vocab])}, [], unk_token=UNK)
    backend = Tokenizer(model)
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=UNK,
        bos_token=START,
        eos_token=END,
        pad_token=END,
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )


def tiny_target(
    dtype: torch.dtype = torch.float64,
    layers: int = 6,
    hidden: int = 32,
    vocab: int = 96,
    attn: str = "sdpa",
    seed: int = 0,
) -> TargetModel:
    """A random Llama with grouped-query attention: four query heads, two key/value heads."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=hidden * 3 // 2,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=SPECIALS.index(START),
        eos_token_id=SPECIALS.index(END),
        attn_implementation=attn,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(dtype)
    return TargetModel(model, tiny_tokenizer(vocab), name="tiny")


def save_tiny_target(
    folder: Path,
    dtype: torch.dtype = torch.float64,
    layers: int = 6,
    hidden: int = 32,
    vocab: int = 96,
    attn: str = "sdpa",
    seed: int = 0,
) -> Path:
    """Write :func:`tiny_target` as an ordinary model folder, as `--target` takes it."""
    target = tiny_target(dtype, layers, hidden, vocab, attn, seed)
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder
