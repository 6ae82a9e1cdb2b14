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
from drafters.export import dialect_named, read_as, read_head, write_as
from interop.llama_cpp_compare import Comparison, compare, compare_server, our_cases
from interop.llama_cpp_runs import PLAIN, REQUIREMENT, SIMPLE, Draft, LlamaCpp
from interop.results import FAILED, LOADED, PASSED, SERVED, Entry
from interop.setting import CannotRun, Setting, headway_versions, output
from scripts.common import encode_prompts, load_prompts, run

NAME = "llama.cpp"
KINDS = {
    "eagle3": "draft-eagle3",
    "dflash": "draft-dflash",
    "jetspec": "draft-dflash",
    "dspark": "draft-dspark",
}
"""What llama.cpp calls the heads that it serves."""

FORMS = {
    "eagle3": ("sglang", "vllm", "speculators-eagle3"),
    "dflash": ("dflash",),
    "jetspec": ("dflash",),
    "dspark": ("dspark", "dspark-specforge", "speculators-dspark"),
}
"""Dialects that its converter takes."""

DIALECTS = tuple(dict.fromkeys(form for forms in FORMS.values() for form in forms))
PROMPTS = Path(__file__).parents[1] / "recipes" / "prompts" / "heldout.jsonl"


def compare_heads(
    llama: LlamaCpp,
    target_folder: Path,
    exports: Mapping[tuple[str, str], Path],
    prompts_file: Path,
    work: Path,
    limit: int = 8,
    length: int = 5,
    new: int = 128,
    server: bool = False,
) -> Iterator[Comparison]:
    """Convert the target and exported heads, and compare them one after the other.

    Args:
        llama: programs.
        target_folder: of the target.
        exports: folders by (head, dialect).
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
    base = llama.convert(target_folder, work / "target.gguf")
    plain: dict[str, bytes] = {}
    for (name, dialect), folder in exports.items():
        file = llama.convert(folder, work / f"{name}-{dialect}.gguf", target_folder)
        head = read_as(dialect, folder, target, target.dtype)
        drafted = head.num_drafts if isinstance(head, DFlashDrafter) else length
        cases = our_cases(target, head, prompts, drafted, new)
        draft = Draft(file, KINDS[name], drafted)
        result = Comparison(name, dialect, drafted)
        compare(llama, target, base, draft, cases, plain, result)
        if server:
            compare_server(llama, target, base, draft, cases, result)
        yield result


# As an entry of the interop table, and by hand ----------------------------------------------------


def fetched(setting: Setting) -> LlamaCpp:
    """llama.cpp's sources, downloaded and built if they are not there.

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
    llama = LlamaCpp(source, folder / "build")
    if setting.install:
        llama.compile(SIMPLE, PLAIN)
    return llama


def exported(
    heads: Mapping[str, Path], forms: Sequence[str], target_folder: Path, work: Path
) -> dict[tuple[str, str], Path]:
    """Write heads as dialects that llama.cpp's converter takes.

    Args:
        heads: folders of trained heads, by keys of ``KINDS``; others are left out.
        forms: dialects to write, where the head can be written so.
        target_folder: of the target.
        work: folder to write below.

    Returns:
        Folders by (head, dialect).
    """
    target = TargetModel.load(str(target_folder), torch.float32, "cpu")
    found = {}
    for name in (name for name in KINDS if name in heads):
        head = read_head(heads[name], target, target.dtype)
        for form in (form for form in FORMS[name] if form in forms):
            if not dialect_named(form).refusals(head):
                folder = work / f"{name}-{form}"
                found[name, form] = write_as(form, head, folder).folder
    return found


def check(setting: Setting) -> Iterator[Entry]:
    """Entries of every form that llama.cpp serves and a head was given for."""
    llama, work = fetched(setting), setting.folder(NAME)
    exports = exported(setting.heads, DIALECTS, setting.target, work)
    if not exports:
        raise CannotRun(f"no head that it serves: name one with --head, of {', '.join(KINDS)}")
    versions = {"llama.cpp": f"of {REQUIREMENT.replace('==', ' ')}", **headway_versions()}
    for found in compare_heads(llama, setting.target, exports, PROMPTS, work, limit=4, new=64):
        name = f"{NAME} {found.head}"
        loaded = "converted by its script and loaded by its programs"
        yield Entry(name, found.dialect, LOADED, PASSED, loaded, versions)
        status = PASSED if found.passed else FAILED
        yield Entry(name, found.dialect, SERVED, status, found.summary(), versions)


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
    parser.add_argument("--head", action="append", required=True, metavar="NAME=DIR")
    parser.add_argument("--dialect", action="append", choices=DIALECTS, help="default: all")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, metavar="FILE")
    parser.add_argument("--limit", type=int, default=8, metavar="N", help="prompts")
    parser.add_argument("--drafts", type=int, default=5, metavar="K", help="drafted per round")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--work", type=Path, default=Path("outputs/llama_cpp"), metavar="DIR")
    parser.add_argument("--server", action="store_true", help="also by llama-server")
    args = parser.parse_args()
    heads = {name: Path(folder) for name, _, folder in (pair.partition("=") for pair in args.head)}
    if unknown := sorted(set(heads) - set(KINDS)):
        parser.error(f"--head {unknown[0]}: llama.cpp serves {', '.join(KINDS)}")
    args.work.mkdir(parents=True, exist_ok=True)
    exports = exported(heads, args.dialect or DIALECTS, args.target, args.work)
    llama = LlamaCpp(args.source, args.build or args.source / "build")
    results = []
    chosen = (args.prompts, args.work, args.limit, args.drafts, args.max_new_tokens, args.server)
    try:
        for result in compare_heads(llama, args.target, exports, *chosen):
            results.append(result)
            print(f"{result.head}: {result.summary()}", flush=True)
    except CannotRun as reason:
        raise ValueError(str(reason)) from reason
    print(table(results))
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    run(main)
