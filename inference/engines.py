"""Engines by name."""

from drafters import TargetModel
from inference.engine import EagerEngine, Engine
from inference.static.decoding import DeviceEngine
from inference.static.engine import StaticEngine

ENGINES = ("eager", "packed", "compiled", "device")


def build_engine(target: TargetModel, name: str = "eager") -> Engine:
    """An engine for a target; it can serve any number of decoding calls, one at a time.

    Args:
        target: the model.
        name: "eager" runs any model; "packed" replaces attention and, on a CPU, the linear layers;
            "compiled" also fuses what is between them, which takes a minute at first use; "device"
            also drafts and accepts there, in CUDA graphs where there is CUDA, with trained heads.

    Raises:
        ValueError: an unknown name, or a target that the engine cannot run.
    """
    if name not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}; got {name!r}")
    if name == "eager":
        return EagerEngine(target)
    if name == "device":
        return DeviceEngine(target)
    return StaticEngine(target, compiled=name == "compiled")
