"""What is wrong with a head: static checks of its file, and hypotheses measured on real text.

A head whose drafts are never accepted gives no error. So every fault that users have met is stated
as a hypothesis ("the layer ids are one too high"), the head is read under it, and what would raise
its agreement with the target by a wide margin is named.
"""

from recipes.diagnosis.diagnose import Diagnosis, diagnose
from recipes.diagnosis.evidence import Document, Evidence, gather
from recipes.diagnosis.files import LoadedHead, load_head
from recipes.diagnosis.findings import CHECKS, FAULT, OK, UNKNOWN, WEAK, Finding
from recipes.diagnosis.static import Serving

__all__ = [
    "CHECKS",
    "FAULT",
    "OK",
    "UNKNOWN",
    "WEAK",
    "Diagnosis",
    "Document",
    "Evidence",
    "Finding",
    "LoadedHead",
    "Serving",
    "diagnose",
    "gather",
    "load_head",
]
