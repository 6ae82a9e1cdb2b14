"""drafters: what a draft head is. Configurations, networks, the target they hang on, and export."""

from transformers import AutoConfig, AutoModel

from drafters.base import Drafter, SequentialDrafter
from drafters.block import DFlashDrafter
from drafters.config import DrafterConfig
from drafters.dspark import DSparkDrafter
from drafters.eagle import Eagle3Drafter
from drafters.eagle1 import Eagle1Drafter
from drafters.families import Eagle3Config, MedusaConfig
from drafters.hydra import HydraDrafter
from drafters.loading import FAMILIES, build_drafter, load_drafter
from drafters.medusa import MedusaDrafter
from drafters.mtp import MtpDrafter
from drafters.peagle import PEagleDrafter
from drafters.target import TargetModel, TargetOutput

for _drafter in FAMILIES.values():
    AutoConfig.register(_drafter.config_class.model_type, _drafter.config_class, exist_ok=True)
    AutoModel.register(_drafter.config_class, _drafter, exist_ok=True)

__all__ = [
    "FAMILIES",
    "DFlashDrafter",
    "DSparkDrafter",
    "Drafter",
    "DrafterConfig",
    "Eagle1Drafter",
    "Eagle3Config",
    "Eagle3Drafter",
    "HydraDrafter",
    "MedusaConfig",
    "MedusaDrafter",
    "MtpDrafter",
    "PEagleDrafter",
    "SequentialDrafter",
    "TargetModel",
    "TargetOutput",
    "build_drafter",
    "load_drafter",
]
