"""drafters: what a draft head is. Configurations, networks, the target they hang on, and export."""

from transformers import AutoConfig, AutoModel

from drafters.base import Drafter
from drafters.config import DrafterConfig, Eagle3Config, MedusaConfig
from drafters.eagle import Eagle3Drafter
from drafters.loading import FAMILIES, build_drafter, load_drafter
from drafters.medusa import MedusaDrafter
from drafters.target import TargetModel, TargetOutput

for _drafter in FAMILIES.values():
    AutoConfig.register(_drafter.config_class.model_type, _drafter.config_class, exist_ok=True)
    AutoModel.register(_drafter.config_class, _drafter, exist_ok=True)

__all__ = [
    "FAMILIES",
    "Drafter",
    "DrafterConfig",
    "Eagle3Config",
    "Eagle3Drafter",
    "MedusaConfig",
    "MedusaDrafter",
    "TargetModel",
    "TargetOutput",
    "build_drafter",
    "load_drafter",
]
