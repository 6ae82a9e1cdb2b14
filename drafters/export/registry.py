"""All dialects, and which one a folder is of."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drafters.export.dialect import Dialect
from drafters.export.dialects import speculators_dflash, speculators_eagle3, speculators_mtp
from drafters.export.dialects.dflash import DFLASH, DFLASH_VLLM
from drafters.export.dialects.dspark import DSPARK_FORMS
from drafters.export.dialects.eagle1 import EAGLE1
from drafters.export.dialects.eagle1_sglang import SGLANG_EAGLE1
from drafters.export.dialects.eagle3_vllm import VLLM
from drafters.export.dialects.hydra import HYDRA
from drafters.export.dialects.medusa import OFFICIAL_MEDUSA
from drafters.export.dialects.medusa_vllm import VLLM_MEDUSA
from drafters.export.dialects.modelopt import MODELOPT
from drafters.export.dialects.peagle_vllm import VLLM_PEAGLE
from drafters.export.dialects.sglang import SGLANG
from drafters.export.folder import CONFIG, MANIFEST, ExportError, read_json
from drafters.export.tensors import folder_tensors

DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        speculators_eagle3.EAGLE3,
        speculators_eagle3.PEAGLE,
        speculators_dflash.DFLASH,
        speculators_dflash.DSPARK,
        speculators_mtp.MTP,
        DFLASH_VLLM,
        DFLASH,
        *DSPARK_FORMS,
        SGLANG,
        MODELOPT,
        VLLM_PEAGLE,
        VLLM,
        SGLANG_EAGLE1,
        EAGLE1,
        OFFICIAL_MEDUSA,
        VLLM_MEDUSA,
        HYDRA,
    )
}
"""By name, in the order in which they are asked whether a folder is theirs."""


def dialect_named(name: str) -> Dialect:
    """One of them.

    Raises:
        ExportError: no such dialect.
    """
    if name not in DIALECTS:
        raise ExportError(f"dialect {name!r} is unknown: choose one of {', '.join(DIALECTS)}")
    return DIALECTS[name]


def dialect_of(folder: str | Path) -> Dialect:
    """The dialect of a folder: as our manifest says, or else by its keys and tensor names.

    Raises:
        ExportError: of none.
    """
    folder = Path(folder)
    config = read_json(folder / CONFIG)
    if (folder / MANIFEST).is_file():
        written = read_json(folder / MANIFEST).get("format")
        if written in DIALECTS:
            return DIALECTS[written]
    names = folder_tensors(folder)
    for dialect in DIALECTS.values():
        if dialect.recognises(config, names):
            return dialect
    raise ExportError(_unknown(folder, config, names))


def _unknown(folder: Path, config: Mapping[str, Any], names: Mapping[str, Any]) -> str:
    return (
        f"{folder}: no head of a known dialect: architectures {config.get('architectures')}, "
        f"tensors {', '.join(sorted(names)[:4])}...; known are {', '.join(DIALECTS)} and native"
    )
