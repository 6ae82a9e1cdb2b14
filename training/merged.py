"""What a joint run leaves behind: the LoRA, the merged target, and a head that names both."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drafters import TargetModel
from drafters.export.folder import MANIFEST, publish, write_json
from training.joint import JointObjective


def write_merged(
    objective: JointObjective, out: Path, provenance: Mapping[str, Any] | None = None
) -> TargetModel:
    """Write ``out/lora`` (the adapter, as peft writes it) and ``out/target`` (the target with the
    adapter merged into it, and its tokenizer), and make the head the merged target's.

    Afterwards the objective cannot be trained any more: the adapter is merged in place, for a
    second copy of a large target may not fit.

    Args:
        objective: at the end of its training.
        out: run folder.
        provenance: versions, commit and command line, for the record.

    Returns:
        The merged target, which the head hangs on; its fingerprint is that of the written one.

    Raises:
        ExportError: a folder cannot be written.
        ValueError: the adapter is not finite.
    """
    drafter, adapter = objective.drafter, objective.lora_adapter
    reference = {**objective.base, "adapter": adapter.digest()}
    record = {"reference": reference, "provenance": dict(provenance or {})}
    with publish(out / "lora") as folder:
        adapter.save(folder, reference["base"])
        write_json({"format": "lora", **record}, folder / MANIFEST)
    former = drafter.target
    adapter.merge()
    with publish(out / "target") as folder:
        former.model.save_pretrained(folder)
        former.tokenizer.save_pretrained(folder)
        write_json({"format": "merged target", **record}, folder / MANIFEST)
    merged = TargetModel(former.model, former.tokenizer, str(out / "target"))
    config = drafter.config
    config.reference = reference
    config.target_name = f"{reference['base']} merged with LoRA {reference['adapter']}"
    config.target_fingerprint = merged.fingerprint()
    drafter.attach(merged)
    return merged
