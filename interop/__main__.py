"""Try exports in the programs they are for, and write the table of what was found.

    python -m interop --target targets/smollm2-135m --head eagle3=outputs/eagle3/head
    python -m interop --target ... --head dspark=<reduced vocabulary> --head dspark-full=<whole one>
    python -m interop speculators --target ... --head ... --python speculators=<interpreter>

Without names all are tried: files (every dialect written, read and checked, the loaders of SGLang
and vLLM simulated), vLLM, SGLang, speculators, stitching (native MTP modules, in speculators),
ModelOpt, llama.cpp. Each has an environment of its own below --work, which is made on demand;
--python names one that is there already. What cannot run is skipped and says why; what a dialect
cannot hold or an engine cannot serve is refused. The table, results.json and results.md in --work,
keeps former entries of what is not tried again.

Every check takes every head that fits it. The family of a head is read from its folder; its label
is free, and stands in the table in the column "head" and in those cells in which heads of one
program fared differently: "yes: vLLM (dspark-full); refused: vLLM (dspark)".
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from interop import (
    files_check,
    llama_cpp,
    modelopt_check,
    sglang_check,
    speculators_check,
    stitch_check,
    vllm_check,
)
from interop.results import FAILED, LOADED, SKIPPED, WRITTEN, Entry, load, markdown, merged, save
from interop.setting import CannotRun, Setting, labelled

CHECKS: dict[str, ModuleType] = {
    "files": files_check,
    "vllm": vllm_check,
    "sglang": sglang_check,
    "speculators": speculators_check,
    "stitching": stitch_check,
    "modelopt": modelopt_check,
    "llama.cpp": llama_cpp,
}


def named(text: str) -> tuple[str, Path]:
    """NAME=PATH of a command line."""
    name, separator, path = text.partition("=")
    if not separator or not name or not path:
        raise argparse.ArgumentTypeError(f"expected NAME=PATH, got {text!r}")
    return name, Path(path)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=", ".join(CHECKS))
    parser.add_argument("--target", required=True, type=Path, help="folder of the target")
    parser.add_argument(
        "--head",
        action="append",
        default=[],
        metavar="[LABEL=]DIR",
        help="trained head, as often as there are heads (default label: its family)",
    )
    parser.add_argument(
        "--python", action="append", default=[], type=named, metavar="NAME=EXE", help="interpreter"
    )
    parser.add_argument("--work", type=Path, default=Path("outputs/interop"), help="for all files")
    parser.add_argument("--no-install", action="store_true", help="make no environments")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.checks) - set(CHECKS)):
        parser.error(f"{unknown[0]!r} is unknown: choose of {', '.join(CHECKS)}")
    try:
        args.head = labelled(args.head)
    except ValueError as error:
        parser.error(str(error))
    return args


def found_by(name: str, setting: Setting) -> Iterator[Entry]:
    """Entries of one module; where it cannot go on, one that says so.

    Args:
        name: a key of ``CHECKS``.
        setting: where things are.
    """
    module = CHECKS[name]
    check = WRITTEN if name == "files" else LOADED
    try:
        yield from module.check(setting)
    except CannotRun as reason:
        for dialect in module.DIALECTS:
            yield Entry(module.NAME, dialect, check, SKIPPED, str(reason))
    except Exception as error:  # one program's fault must not hide what others found
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        yield Entry(module.NAME, module.DIALECTS[0], check, FAILED, text)


def main(argv: list[str] | None = None) -> int:
    """Try all, write the table; 1 if anything failed."""
    args = parse_args(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    setting = Setting(args.target, args.head, args.work, dict(args.python), not args.no_install)
    table, latest = args.work / "results.json", []
    for name in args.checks or CHECKS:
        for entry in found_by(name, setting):
            who = f"{entry.name} {entry.head}".strip()
            print(f"{entry.status}: {entry.dialect}, {entry.check}, {who}: {entry.detail}")
            latest.append(entry)
        entries = merged(load(table), latest)
        save(entries, table)
        (args.work / "results.md").write_text(markdown(entries), encoding="utf-8")
    failed = sum(entry.status == FAILED for entry in latest)
    print(f"{len(latest)} entries, {failed} failed: {args.work / 'results.md'}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
