"""export: heads for serving engines, one file per dialect, and the checks that guard them.

Every writer reads its folder back through a simulation of the engines' loaders, and compares
logits, before the folder gets its name.
"""

from drafters.export.check import check_folder
from drafters.export.folder import Export, ExportError
from drafters.export.golden import check_golden, golden_inputs, golden_logits, write_golden
from drafters.export.native import read_native, write_native
from drafters.export.sglang import read_sglang, write_sglang

FORMATS = ("native", "sglang")

__all__ = [
    "FORMATS",
    "Export",
    "ExportError",
    "check_folder",
    "check_golden",
    "golden_inputs",
    "golden_logits",
    "read_native",
    "read_sglang",
    "write_golden",
    "write_native",
    "write_sglang",
]
