"""Heads served by llama.cpp, compared with our own decoder round by round.

    python -m interop.llama_cpp --source llama.cpp --target targets/smollm2-135m \\
        --head eagle3=outputs/eagle3/head --prompts recipes/prompts/heldout.jsonl --limit 8

Each head is exported, converted with llama.cpp's own script, and decodes every prompt greedily in
float32 with chains of the same length, by ``llama-speculative-simple`` and by our decoder reading
the same export: acceptance, the tokens drafted in every round and the texts are compared, the text
also with that of ``llama-completion``, which drafts nothing. With --server the prompts go through
``llama-server`` as well, as token ids.

``llama-speculative-simple`` keeps the last token of its prompt back and drafts behind that one,
while a server (and our decoder) first draws one token. So that their rounds are the same ones, it
is given the prompt and that token, as text, unless the text has other token ids.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from drafters import TargetModel
from drafters.block import DFlashDrafter
from drafters.export import read_as, read_head
from interop.exports import export_for
from interop.llama_cpp_compare import Comparison, compare, compare_server, our_cases
from interop.llama_cpp_runs import PLAIN, REQUIREMENT, SIMPLE, Draft, LlamaCpp
from interop.results import FAILED, LOADED, PASSED, REFUSED, SERVED, SKIPPED, Entry
from interop.setting import CannotRun, Setting, headway_versions, labelled, no_head, output
from scripts.common import encode_prompts, load_prompts, run

NAME = "llama.cpp"
KINDS = {
    "eagle3": "draft-eagle3",
    "dflash": "draft-dflash",
    "dspark": "draft-dspark",
}
"""What llama.cpp calls the heads that it serves, by family."""

FORMS = {
    "eagle3": ("sglang", "vllm", "speculators-eagle3"),
    "dflash": ("dflash",),
    "dspark": ("dspark", "dspark-specforge", "speculators-dspark"),
}
"""Dialects that its converter takes."""

CONVERTER = ("torch==2.13.0", "transformers==5.24.0", "sentencepiece==0.2.1")
"""What its converter imports."""

DIALECTS = tuple(dict.fromkeys(form for forms in FORMS.values() for form in forms))
TARGET = "target.gguf"
PROMPTS = Path(__file__).parents[1] / "recipes" / "prompts" / "heldout.jsonl"


def compare_heads(
    llama: LlamaCpp,
    target_folder: Path,
    base: Path,
    exports: Mapping[tuple[str, str], Path],
    prompts_file: Path,
    work: Path,
    limit: int = 8,
    length: int = 5,
    new: int = 128,
    server: bool = False,
) -> Iterator[Comparison]:
    """Convert exported heads, and compare them one after the other.

    Args:
        llama: programs.
        target_folder: of the target.
        base: GGUF file of the target.
        exports: folders by (label, dialect).
        prompts_file: as scripts take them.
        work: folder for GGUF files.
        limit: prompts.
        length: tokens drafted per round; block heads draft their block, as a shorter one has fewer
            mask rows, which the others see.
        new: tokens per prompt.
        server: also by ``llama-server``.

    Raises:
        CannotRun: a program fails.
    """
    target = TargetModel.load(str(target_folder), torch.float32, "cpu")
    prompts = encode_prompts(target, load_prompts(str(prompts_file), limit))
    plain: dict[str, bytes] = {}
    for (name, dialect), folder in exports.items():
        file = llama.convert(folder, work / f"{name}-{dialect}.gguf", target_folder)
        head = read_as(dialect, folder, target, target.dtype)
        drafted = head.num_drafts if isinstance(head, DFlashDrafter) else length
        cases = our_cases(target, head, prompts, drafted, new)
        draft = Draft(file, KINDS[head.family], drafted)
        result = Comparison(name, dialect, drafted)
        compare(llama, target, base, draft, cases, plain, result)
        if server:
            compare_server(llama, target, base, draft, cases, result)
        yield result


# As an entry of the interop table, and by hand ----------------------------------------------------


def fetched(setting: Setting) -> LlamaCpp:
    """llama.cpp's sources and what its converter needs, fetched and built if they are not there.

    Raises:
        CannotRun: they are missing and may not be fetched, or do not build.
    """
    folder = setting.folder(NAME)
    name = REQUIREMENT.replace("==", "-").replace("llama-cpp-python", "llama_cpp_python")
    source = folder / name / "vendor" / "llama.cpp"
    if not source.is_dir():
        if not setting.install:
            raise CannotRun(f"{source} is missing and --no-install was given")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        output([*pip, "--no-binary", "llama-cpp-python", REQUIREMENT], folder)
        output(["tar", "xzf", f"{name}.tar.gz"], folder)
    python = setting.python(NAME, *CONVERTER)
    llama = LlamaCpp(source, folder / "build", python=python)
    if setting.install:
        llama.compile(SIMPLE, PLAIN)
    return llama


def exported(
    heads: Mapping[str, Path], forms: Sequence[str], target_folder: Path, work: Path
) -> dict[tuple[str, str], Path | str]:
    """Write heads as dialects that llama.cpp's converter takes.

    Args:
        heads: trained heads by label; those of other families than ``KINDS`` are left out.
        forms: dialects to write.
        target_folder: of the target.
        work: folder to write below.

    Returns:
        By (label, dialect) the folder, or why there is none.
    """
    target = TargetModel.load(str(target_folder), torch.float32, "cpu")
    found: dict[tuple[str, str], Path | str] = {}
    for label, place in heads.items():
        head = read_head(place, target, target.dtype)
        for form in (form for form in FORMS.get(head.family, ()) if form in forms):
            export = export_for(NAME, head, form, work / f"{label}-{form}")
            found[label, form] = export if isinstance(export, str) else export.folder
    return found


def check(setting: Setting) -> Iterator[Entry]:
    """Entries of every form that llama.cpp serves."""
    for family, forms in FORMS.items():
        for form in forms if not setting.of(family) else ():
            yield Entry(NAME, form, LOADED, SKIPPED, no_head(family), headway_versions())
    work = setting.folder(NAME)
    versions = {"llama.cpp": f"of {REQUIREMENT.replace('==', ' ')}", **headway_versions()}

    def entry(key: tuple[str, str], status: str, detail: str, what: str = LOADED) -> Entry:
        label, form = key
        return Entry(NAME, form, what, status, detail, versions, head=label)

    todo: dict[tuple[str, str], Path] = {}
    for key, export in exported(setting.of(*KINDS), DIALECTS, setting.target, work).items():
        if isinstance(export, str):
            yield entry(key, REFUSED, export)
        else:
            todo[key] = export
    if not todo:
        return
    llama = fetched(setting)
    base = llama.convert(setting.target, work / TARGET)
    while todo:
        rest = dict(todo)
        compared = compare_heads(llama, setting.target, base, rest, PROMPTS, work, 4, new=64)
        try:
            for found in compared:
                key = found.head, found.dialect
                del todo[key]
                yield entry(key, PASSED, "converted by its script and loaded by its programs")
                status = PASSED if found.passed else FAILED
                yield entry(key, status, found.summary(), SERVED)
        except CannotRun as reason:  # its programs are there, so the head in hand fails
            key = next(iter(todo))
            del todo[key]
            yield entry(key, FAILED, str(reason))


def table(results: Sequence[Comparison]) -> str:
    """Markdown, one row per head."""
    columns = (
        "head | dialect | drafted | prompts | accepted a round: llama-speculative-simple | "
        "llama-server | ours | equal drafts | text of its plain decoding | our text"
    )
    lines = [f"| {columns} |", "|" + "---|" * len(columns.split("|"))]
    for one in results:
        cells = [one.head, one.dialect, str(one.length), str(one.prompts)]
        for sums in (one.simple, one.server, one.ours):
            cells.append(f"{sums.per_round:.3f}" if sums.rounds else "not run")
        cells += [f"{one.equal_drafts}/{one.compared}", str(one.equal_plain), str(one.equal_ours)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """The command line; the exit code is 1 if a comparison fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, required=True, help="folder of llama.cpp's sources")
    parser.add_argument("--build", type=Path, help="folder of its build (default: SOURCE/build)")
    parser.add_argument("--target", type=Path, required=True, help="folder of the target")
    parser.add_argument("--head", action="append", required=True, metavar="[LABEL=]DIR")
    parser.add_argument("--dialect", action="append", choices=DIALECTS, help="default: all")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, metavar="FILE")
    parser.add_argument("--limit", type=int, default=8, metavar="N", help="prompts")
    parser.add_argument("--drafts", type=int, default=5, metavar="K", help="drafted per round")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--work", type=Path, default=Path("outputs/llama_cpp"), metavar="DIR")
    parser.add_argument("--server", action="store_true", help="also by llama-server")
    args = parser.parse_args()
    heads = labelled(args.head)
    args.work.mkdir(parents=True, exist_ok=True)
    exports = {}
    for key, export in exported(heads, args.dialect or DIALECTS, args.target, args.work).items():
        if isinstance(export, str):
            print(f"{' as '.join(key)} is refused: {export}")
        else:
            exports[key] = export
    if not exports:
        raise ValueError(f"--head: none that llama.cpp serves, of {', '.join(KINDS)}")
    llama = LlamaCpp(args.source, args.build or args.source / "build")
    results = []
    chosen = (
        exports,
        args.prompts,
        args.work,
        args.limit,
        args.drafts,
        args.max_new_tokens,
        args.server,
    )
    try:
        base = llama.convert(args.target, args.work / TARGET)
        for result in compare_heads(llama, args.target, base, *chosen):
            results.append(result)
            print(f"{result.head}: {result.summary()}", flush=True)
    except CannotRun as reason:
        raise ValueError(str(reason)) from reason
    print(table(results))
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    run(main)
