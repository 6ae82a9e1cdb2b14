"""A head in the folder of every dialect, and which of them has what."""

from pathlib import Path
from typing import Any

from drafters import TargetModel
from drafters.export import DIALECTS, write_as
from tests.drafters.export.written import make_head

BLOCK = {"num_layers": 1, "block_size": 4, "mask_token_id": 90, "feature_layers": [1, 3, 4]}
FAMILIES: dict[str, dict[str, Any]] = {
    "eagle3": {"feature_layers": [1, 3, 4], "draft_vocab_size": 40},
    "peagle": {
        "num_layers": 2,
        "num_drafts": 3,
        "mask_token_id": 90,
        "feature_layers": [1, 3, 4],
        "draft_vocab_size": 40,
    },
    "dflash": BLOCK,
    "dspark": {**BLOCK, "markov_rank": 8},
    "medusa": {"num_heads": 2},
    "hydra": {"num_heads": 2, "num_layers": 1, "prefix_norm": True},
    "mtp": {"qk_norm": True},
}
DIALECT_OPTIONS: dict[str, dict[str, Any]] = {
    "dflash-vllm": {"draft_vocab_size": 40},
    "vllm-medusa": {"draft_vocab_size": 40},
    "speculators-dflash": {"draft_vocab_size": 40, "causal": True},
    "speculators-dspark": {"draft_vocab_size": 40, "causal": True},
    "dspark": {"draft_vocab_size": 40},
    "dspark-modelopt": {"confidence_head": True},
}
"""What a dialect wants beyond its family's."""
MEDUSA = {"medusa", "vllm-medusa"}
BLOCKS = {name for name in DIALECTS if "dflash" in name or "dspark" in name}
EAGLE3 = {"sglang", "vllm", "modelopt", "vllm-peagle", "speculators-eagle3", "speculators-peagle"}
SPECULATORS = {name for name in DIALECTS if name.startswith("speculators")}
EAGLE1 = {"eagle1", "eagle1-sglang"}
WHOLE = {"dflash", "dspark-specforge", "dspark-modelopt", *EAGLE1, "medusa", "hydra"}
WHOLE |= {"speculators-mtp"}
"""Without a draft vocabulary."""


def write_all(target: TargetModel, folder: Path) -> dict[str, Path]:
    """Write a whole folder of each dialect, its tensors random; the folders by dialect."""
    found = {}
    for name, dialect in DIALECTS.items():
        family = dialect.families[0]
        options = {**FAMILIES.get(family, {}), **DIALECT_OPTIONS.get(name, {})}
        write_as(name, make_head(family, target, **options), folder / name)
        found[name] = folder / name
    return found
