"""What a model card says of a head: how well it was measured, and how it came to be.

Both are records of earlier commands: run folders of `scripts.evaluate --out`, and the run folder
that a head was trained in, or what an earlier export kept of it.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from drafters import Drafter
from drafters.export.folder import MANIFEST, read_json
from drafters.hub import is_hub_id
from inference.measuring.run_records import Run
from scripts.report_data import Loaded, load
from scripts.report_markdown import markdown
from training.records import read_lines

ROOT = Path(__file__).resolve().parents[1]
CONFIG, PROVENANCE, METRICS = "config.yaml", "provenance.json", "metrics.jsonl"


# Acceptance -------------------------------------------------------------------------------------


def results(folders: Sequence[Path], head: Drafter) -> str | None:
    """The table of acceptance and speed, and the commands that it came from.

    Args:
        folders: of `scripts.evaluate --out`; none gives None.
        head: that was evaluated, with its target attached.

    Raises:
        ValueError: one is no run, or of another head or target.
    """
    if not folders:
        return None
    loaded = load(folders)
    for label, run in loaded.runs.items():
        check_same(label, run, head)
    return "\n".join([markdown(loaded, ()), *_measured_by(loaded)])


def check_same(label: str, run: Run, head: Drafter) -> None:
    """Refuse to print figures of something else on a head's card.

    Raises:
        ValueError: the run decoded with another head, with none, or for another target.
    """
    found, target = run.result["head"], run.result["target"]
    if found is None or found["type"] != head.family:
        drafts = "no head" if found is None else f"a head of type {found['type']}"
        raise ValueError(
            f"--runs {label}: evaluated with {drafts}, and this is a head of type {head.family}: "
            "name a run of this head"
        )
    measured = found["parameters"]
    confidence = sum(p.numel() for name, p in head.named_parameters() if "confidence" in name)
    own = head.num_parameters_trained()
    if measured not in (own, own - confidence):  # dialects leave confidence outputs out
        raise ValueError(
            f"--runs {label}: evaluated with a head of {measured:,} parameters, this one has "
            f"{own:,}: name a run of this head"
        )
    theirs, ours = target["fingerprint"].get("weights"), head.target.fingerprint()["weights"]
    if theirs != ours:
        raise ValueError(
            f"--runs {label}: evaluated on {target['name']} with weights {theirs}, the target here "
            f"has {ours}: name a run on this target"
        )


def _measured_by(loaded: Loaded) -> list[str]:
    """The command of every run, and what it ran with."""
    lines = ["Measured by:", "", "```bash"]
    for run in loaded.runs.values():
        lines += [command_line(run.result["command"]), f"# {_versions(run.result)}"]
    return [*lines, "```"]


# Training ---------------------------------------------------------------------------------------


def training_record(head: Path) -> dict[str, Any] | None:
    """How a head came to be, as far as its surroundings tell.

    Args:
        head: its folder.

    Returns:
        "command", "versions", "commit", and where they are known "config" (the resolved options),
        "step" and "tokens"; None where nothing is recorded.
    """
    run = head.absolute().parent
    if (run / CONFIG).is_file() and (run / PROVENANCE).is_file():
        record = _provenance(json.loads((run / PROVENANCE).read_text(encoding="utf-8")))
        record["config"] = yaml.safe_load((run / CONFIG).read_text(encoding="utf-8"))
        if (run / METRICS).is_file():
            rows = [row for row in read_lines(run / METRICS) if "train/tokens" in row]
            record |= {"step": rows[-1]["step"], "tokens": rows[-1]["train/tokens"]} if rows else {}
        return record
    if not (head / MANIFEST).is_file():
        return None
    kept = read_json(head / MANIFEST).get("provenance") or {}
    if kept.get("training"):
        return dict(kept["training"])
    trained_here = Path((kept.get("command") or [""])[0]).name == "train.py"
    return _provenance(kept) if trained_here else None


def training_text(record: Mapping[str, Any] | None) -> str:
    """The part of a card about training.

    Args:
        record: of :func:`training_record`.
    """
    lines = ["## Training", ""]
    if record is None:
        return "\n".join([*lines, "Not recorded: the head came here without its run's folder."])
    config = record.get("config")
    if config:
        data = config["data"]
        lines += [f"- data: {', '.join(map(_source, data['train']))}, split {data['split']}"]
        if data.get("regenerate") or data.get("answers"):
            lines += ["- answers: written by the target itself"]
        lines += [f"- texts of at most {data['max_length']:,} tokens"]
    if "tokens" in record:
        lines += [f"- trained for {record['step']:,} steps, {record['tokens']:,} tokens"]
    lines += ["", "```bash", command_line(record["command"]), f"# {_versions(record)}", "```"]
    if config:
        resolved = yaml.safe_dump(config, sort_keys=True, allow_unicode=True).rstrip()
        lines += ["", "<details><summary>All options</summary>", ""]
        lines += ["```yaml", resolved, "```", "", "</details>"]
    return "\n".join(lines)


def _provenance(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: found.get(name) for name in ("command", "commit", "python", "versions")}


def _source(name: str) -> str:
    """A data set by its hub id, a file by its name."""
    return name if is_hub_id(name) and not Path(name).exists() else f"`{Path(name).name}`"


# Commands ---------------------------------------------------------------------------------------


def command_line(command: Sequence[str]) -> str:
    """What was typed, from a record of `training.provenance`, which keeps a script's bare name."""
    name, *rest = command
    for package in ("scripts", "recipes"):
        if (ROOT / package / name).is_file():
            return shlex.join(["python", "-m", f"{package}.{Path(name).stem}", *rest])
    return shlex.join(["python", name, *rest])


def _versions(record: Mapping[str, Any]) -> str:
    versions = record.get("versions") or {}
    named = [f"{name} {version}" for name, version in versions.items()]
    return ", ".join([f"Headway {record.get('commit') or 'without a commit'}", *named])
