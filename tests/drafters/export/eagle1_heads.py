"""EAGLE-1 heads with random tensors, and their two forms."""

from pathlib import Path
from typing import Any

from drafters import Eagle1Drafter, TargetModel
from drafters.export import write_as
from drafters.export.dialects.eagle1 import EAGLE1
from drafters.export.dialects.eagle1_sglang import SGLANG_EAGLE1
from tests.drafters.export.written import Written, make_head

QWEN2 = {"attention_bias": True, "num_layers": 2}
FORMS = {"eagle1": EAGLE1, "eagle1-sglang": SGLANG_EAGLE1}


def eagle(target: TargetModel, **options: Any) -> Eagle1Drafter:
    head = make_head("eagle1", target, **options)
    assert isinstance(head, Eagle1Drafter)
    return head


def written(name: str, target: TargetModel, folder: Path, **options: Any) -> Written:
    write_as(name, eagle(target, **options), folder)
    return Written(folder)
