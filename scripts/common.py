"""What the scripts share: option names, prompts, loading, and how they end.

A script's `main()` parses its own arguments and returns its exit code (None is 0); `run(main)` is
the last line of the file. A user's error is one line on stderr and exit code 2, Ctrl-C is 130, and
neither shows a traceback.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from drafters import TargetModel
from inference.engine import Engine
from inference.engines import ENGINES, build_engine
from inference.files import write_whole
from inference.measuring.evaluation import Prompt
from inference.sampling import SamplingParams
from inference.threads import thread_counts, thread_seconds
from inference.verify import ALL_RULES
from training.answers.conversations import prompt_messages
from training.data.chat import encode_prompt
from training.data.sources import load_rows

OPTIONS: dict[str, dict[str, Any]] = {
    "--target": {
        "required": True,
        "metavar": "NAME",
        "help": "target model: folder or hub id (user/name[@revision])",
    },
    "--head": {"required": True, "metavar": "NAME", "help": "trained head: folder or hub id"},
    "--prompts": {
        "required": True,
        "metavar": "FILE",
        "help": "JSONL with messages, prompt, turns (Spec-Bench; the first turn is used), "
        "prompt_ids or text in each line; any other name is taken for a data set",
    },
    "--limit": {"type": int, "metavar": "N", "help": "use N prompts, spread over the categories"},
    "--max-new-tokens": {"type": int, "default": 64, "metavar": "N", "help": "tokens per prompt"},
    "--temperature": {"type": float, "default": 0.0, "metavar": "T", "help": "0 is greedy"},
    "--top-k": {"type": int, "metavar": "K", "help": "keep the K most likely tokens"},
    "--top-p": {"type": float, "metavar": "P", "help": "keep the smallest set with mass P"},
    "--min-p": {"type": float, "metavar": "P", "help": "drop tokens below P times the likeliest"},
    "--typical-p": {"type": float, "metavar": "P", "help": "keep the P most typical mass"},
    "--repetition-penalty": {"type": float, "metavar": "F", "help": "over prompt and output"},
    "--presence-penalty": {"type": float, "metavar": "X", "help": "over the output"},
    "--frequency-penalty": {"type": float, "metavar": "X", "help": "over the output"},
    "--no-repeat-ngram-size": {"type": int, "metavar": "N", "help": "no N-gram comes twice"},
    "--rule": {
        "choices": tuple(ALL_RULES),
        "default": "match",
        "help": "acceptance rule; lossy_typical changes the output",
    },
    "--batch-size": {"type": int, "default": 1, "metavar": "N", "help": "prompts decoded together"},
    "--seed": {"type": int, "default": 0, "metavar": "N", "help": "of all random numbers"},
    "--dtype": {
        "choices": ("float32", "float64", "bfloat16", "float16"),
        "default": "float32",
        "help": "of the weights",
    },
    "--device": {"default": "auto", "metavar": "NAME", "help": "auto takes a GPU if there is one"},
    "--engine": {
        "choices": tuple(name for name in ENGINES if name != "device"),  # no rounds to look at
        "default": "eager",
        "help": "what runs the target: eager, packed (fused attention, packed weights on a CPU), "
        "compiled (also compiled, a minute at first use)",
    },
    "--threads": {
        "type": int,
        "metavar": "N",
        "help": "CPU threads (default: torch's choice; with --engine packed or compiled measured)",
    },
    "--chat-template": {
        "type": Path,
        "metavar": "FILE",
        "help": "jinja file that replaces the target's chat template",
    },
    "--out": {"type": Path, "metavar": "PATH", "help": "also write the results here"},
}
"""The options that several scripts have, with one meaning each."""

MODEL_OPTIONS = ("--target", "--dtype", "--device", "--threads")
WARPER_OPTIONS = ("--top-k", "--top-p", "--min-p", "--typical-p")
PENALTY_OPTIONS = (
    "--repetition-penalty",
    "--presence-penalty",
    "--frequency-penalty",
    "--no-repeat-ngram-size",
)
SAMPLING_OPTIONS = ("--temperature", *WARPER_OPTIONS, *PENALTY_OPTIONS, "--seed")


# Ending -----------------------------------------------------------------------------------------


def run(main: Callable[[], int | None]) -> NoReturn:
    """Call `main` and exit with its code; errors that a user can mend become one line."""
    try:
        code = main()
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        code = 130
    sys.exit(code)


def print_json(record: dict[str, Any]) -> None:
    """Print the result as one line; call it last."""
    print(json.dumps(record, allow_nan=False), flush=True)


def decimal(value: float | None, digits: int = 2) -> str:
    """A cell of a table; "-" where there is nothing to tell."""
    return "-" if value is None else f"{value:.{digits}f}"


def write_json_atomic(path: Path, record: dict[str, Any]) -> None:
    """Write a JSON file that is whole or, whatever happens on the way, not touched."""
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, [text])


# Options ----------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser, *names: str, **defaults: Any) -> None:
    """Add shared options by name.

    Args:
        parser: to add them to.
        names: keys of `OPTIONS`, in the order of the help.
        **defaults: other defaults for some of them, as `max_new_tokens=512`; a required option
            with a default is optional.
    """
    for name in names:
        settings = dict(OPTIONS[name])
        key = name.removeprefix("--").replace("-", "_")
        if key in defaults:
            settings |= {"default": defaults[key], "required": False}
        text = settings.pop("help")
        if settings.get("default") is not None:
            text += " (default: %(default)s)"
        parser.add_argument(name, help=text, **settings)


def parser_for(doc: str | None, replace: bool = False) -> argparse.ArgumentParser:
    """A parser whose `--help` shows the script's docstring.

    Args:
        doc: the docstring.
        replace: an option that is added twice is the second one.
    """
    return argparse.ArgumentParser(
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        conflict_handler="resolve" if replace else "error",
    )


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The sampling options."""
    names = (*WARPER_OPTIONS, *PENALTY_OPTIONS)
    fields = {name.removeprefix("--").replace("-", "_") for name in names}
    values = {name: value for name, value in vars(args).items() if name in fields}
    given = {name: value for name, value in values.items() if value is not None}
    return SamplingParams(args.temperature, seed=args.seed, **given)


def load_target(args: argparse.Namespace, chat_template: Path | None = None) -> TargetModel:
    """The target on its device, with another chat template if one is given; sets the threads."""
    if args.threads is not None:
        if args.threads < 1:
            raise ValueError(f"--threads must be at least 1, got {args.threads}")
        torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    text = None if chat_template is None else chat_template.read_text(encoding="utf-8")
    target = TargetModel.load(args.target, getattr(torch, args.dtype), _device(args.device))
    if text is not None:
        target.tokenizer.chat_template = text
    return target


def open_engine(args: argparse.Namespace, target: TargetModel) -> Engine | None:
    """The engine of `--engine`; on a CPU, with the number of threads that it is fastest with.

    What was chosen is printed. `--threads` and the eager engine leave torch's setting alone.

    Returns:
        None for "eager", so that plain references are decoded without any cache of this project.
    """
    if args.engine == "eager":
        return None
    engine = build_engine(target, args.engine)
    if target.device.type != "cpu" or args.threads is not None:
        return engine
    counts = thread_counts(torch.get_num_threads())
    seconds = thread_seconds(engine, counts)
    best = counts[seconds.index(min(seconds))]
    torch.set_num_threads(best)
    engine.tune()
    timings = ", ".join(f"{n}: {1e3 * s:.0f} ms" for n, s in zip(counts, seconds, strict=True))
    print(f"{best} threads (a step of 1 row and one of 8: {timings})", file=sys.stderr)
    return engine


def check_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse to encode messages without a chat template.

    Raises:
        ValueError: there is none.
    """
    if not isinstance(tokenizer.chat_template, str):
        raise ValueError(
            "the target's tokenizer has no chat template, which messages and prompts need: give "
            "one with --chat-template FILE (jinja), or use rows of 'text' for a base model"
        )


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device {name}: no such device; try cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: this torch sees no CUDA device; use --device cpu")
    return device


# Prompts ----------------------------------------------------------------------------------------


def load_prompts(path: str, limit: int | None = None, turns: str = "first") -> list[dict[str, Any]]:
    """Prompts from a file, or from a data set.

    Args:
        path: JSONL; each line needs `messages` (trailing answers are dropped), `prompt`, `turns`
            as in Spec-Bench and SPEED-Bench, `prompt_ids` or `text` (for models without a chat
            template), and may have `category` and `id` or `question_id`. A file `.txt` has one
            prompt a line. Any other name is read as a data set with such columns.
        limit: use this many, taken from all categories in turn.
        turns: "all" of a row with `turns`, or the "first" alone, which is said on stderr.

    Returns:
        Rows with `id`, `category`, one of `messages`, `ids`, `text` and `line`, and with "all"
        `later`: what the user says afterwards; in the file's order, no two with the same id.

    Raises:
        ValueError: nothing there, or a line that is no prompt; the message says which.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"--limit must be at least 1, got {limit}")
    if path.endswith(".txt"):
        lines = Path(path).read_text(encoding="utf-8").split("\n")
        raw = [{"line": line} for line in lines if line.strip()]
    else:
        raw = _read_jsonl(Path(path)) if path.endswith(".jsonl") else load_rows(path)
    if not raw:
        raise ValueError(f"--prompts {path}: the file is empty")
    rows = []
    for number, row in enumerate(raw, start=1):
        try:
            rows.append(_prompt_row(row, number, turns))
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"--prompts {path}, row {number}: {error}") from error
    _make_unique(rows)
    places = _spread([row["category"] for row in rows], limit)
    cut = sum(len(raw[place].get("turns") or ()) > 1 for place in places)
    if cut and turns == "first":
        print(f"prompts: {cut} have several turns; only the first is used", file=sys.stderr)
    return [rows[place] for place in places]


def encode_prompts(target: TargetModel, rows: Sequence[dict[str, Any]]) -> list[Prompt]:
    """Token ids of what `load_prompts` gave, by the target's chat template where there is one."""
    prompts = []
    for row in rows:
        if "line" in row:
            if isinstance(target.tokenizer.chat_template, str):
                row = {**row, "messages": [{"role": "user", "content": row["line"]}]}
            else:
                row = {**row, "text": row["line"]}
        if "messages" in row:
            check_chat_template(target.tokenizer)
            prompts.append(_turn(target.tokenizer, row, row["messages"], 0))
            continue
        if "text" in row:
            ids = target.tokenizer(row["text"])["input_ids"]
        else:
            ids = row["ids"]
            if not all(0 <= token < target.vocab_size for token in ids):
                raise ValueError(
                    f"prompt {row['id']!r}: prompt_ids must lie in 0..{target.vocab_size - 1}, the "
                    "target's vocabulary; were they made for another target?"
                )
        prompts.append(Prompt(list(ids), row["category"], row["id"]))
    return prompts


def _turn(
    tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], messages: list[Any], turn: int
) -> Prompt:
    """A turn of a conversation, which knows how to go on once it is answered."""
    later = row.get("later", [])

    def follow(answer: Sequence[int]) -> Prompt:
        said = str(tokenizer.decode(list(answer), skip_special_tokens=True))
        more = [{"role": "assistant", "content": said}, {"role": "user", "content": later[turn]}]
        return _turn(tokenizer, row, [*messages, *more], turn + 1)

    ids = list(encode_prompt(tokenizer, messages))
    goes_on = follow if turn < len(later) else None
    return Prompt(ids, row["category"], row["id"], turn, goes_on)


def fitting(target: TargetModel, prompts: Sequence[Prompt], new_tokens: int) -> list[Prompt]:
    """Prompts that leave room for so many new tokens.

    Raises:
        ValueError: none does.
    """
    kept = [prompt for prompt in prompts if target.has_room(len(prompt.ids), new_tokens)]
    if not kept:
        raise ValueError(
            f"--prompts: none of {len(prompts)} leaves room for {new_tokens} new tokens in the "
            f"target's {target.max_length} positions: lower --max-new-tokens, or give shorter ones"
        )
    return kept


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    rows = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"--prompts {path}, line {number}: not JSON ({error})") from error
            if not isinstance(row, dict):
                raise ValueError(f"--prompts {path}, line {number}: not a JSON object")
            rows.append(row)
    return rows


def _prompt_row(row: dict[str, Any], number: int, turns: str) -> dict[str, Any]:
    json.dumps(row, ensure_ascii=False, default=str).encode()  # refuses half a surrogate pair
    name = _shown(row.get("id", row.get("question_id", number))) or str(number)
    named = {"id": name, "category": _shown(row.get("category") or "all") or "all"}
    if row.get("prompt_ids"):
        return {**named, "ids": [int(token) for token in row["prompt_ids"]]}
    if row.get("text") and not any(row.get(key) for key in ("messages", "prompt", "turns")):
        return {**named, "text": str(row["text"])}
    if "line" in row:
        return {**named, "line": row["line"]}
    messages = prompt_messages(row)
    said, more = row.get("turns") or (), {}
    if not any(row.get(key) for key in ("messages", "prompt")) and turns == "all":
        if not all(isinstance(text, str) and text for text in said):
            raise ValueError("turns must be texts; SPEED-Bench needs its prepare_data.py first")
        more = {"later": list(said[1:])} if len(said) > 1 else {}
    for message in messages:
        if not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError(f"messages need text as role and content, got {message}")
    return {**named, "messages": messages, **more}


def _shown(name: Any) -> str:
    """A name on one line, without what would move the cursor or break a table's rows."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(name)).split())


def _make_unique(rows: Sequence[dict[str, Any]]) -> None:
    """The second row with an id gets another."""
    seen: set[str] = set()
    for row in rows:
        name, number = row["id"], 1
        while row["id"] in seen:
            number += 1
            row["id"] = f"{name}#{number}"
        seen.add(row["id"])


def _spread(categories: Sequence[str], limit: int | None) -> list[int]:
    """Places of at most `limit` rows: the first of every category, then the second, and so on."""
    seen: Counter[str] = Counter()
    turns = []
    for place, category in enumerate(categories):
        turns.append((seen[category], place))
        seen[category] += 1
    return sorted(place for _, place in sorted(turns)[:limit])
