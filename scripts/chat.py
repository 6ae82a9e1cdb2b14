"""Talk to a target that decodes with a draft head, and see what the head contributes.

    python -m scripts.chat --target targets/smollm2-135m --head outputs/eagle3/head
    python -m scripts.chat --target ... --head ... --prompt "Count to ten." --trace

Without `--prompt` it is a conversation: /new forgets it, /exit or Ctrl-D ends, Ctrl-C stops the
answer. `--trace` prints one line per target forward, as Figure 1 of arXiv:2211.17192: accepted
draft tokens are green, a recovered token (the target's, where it rejected the drafts) is blue, a
bonus token (the target's, after all drafts of a path) is magenta. Without a terminal, or with
NO_COLOR set, they are marked instead. Every line also has the acceptance length (bonus included)
and the tokens per second so far; without `--trace` they are shown live in the terminal's title.
"""

import argparse
import contextlib
import os
import sys
import time
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from drafters import TargetModel
from inference.counts import RoundCounts
from inference.engine import Engine
from inference.generate import speculative_generate
from inference.proposers import Proposer
from inference.sampling import SamplingParams
from inference.stats import AcceptanceStats
from scripts.auto_decided import keep_learnt
from scripts.common import (
    MODEL_OPTIONS,
    SAMPLING_OPTIONS,
    add_options,
    check_chat_template,
    load_target,
    open_engine,
    parser_for,
    run,
    sampling_params,
)
from scripts.drafting import add_drafting_options, load_proposer
from training.data.chat import Message, encode_prompt

ACCEPTED, RECOVERED, BONUS, PREFILL = "accepted", "recovered", "bonus", "prefill"
COLOURS = {ACCEPTED: "\x1b[32m", RECOVERED: "\x1b[34m", BONUS: "\x1b[35m", PREFILL: "\x1b[2m"}
MARKS = {ACCEPTED: "+", RECOVERED: "!", BONUS: "*", PREFILL: "."}
RESET = "\x1b[0m"
TITLE = "\x1b]2;{}\x07"
"""Sets the title of a terminal."""

Write = Callable[[str], None]


def main(argv: list[str] | None = None) -> int:
    """One answer, or a conversation."""
    args = parse_args(argv)
    sampling = sampling_params(args)
    target = load_target(args, args.chat_template)
    check_chat_template(target.tokenizer)
    engine = open_engine(args, target)
    proposer = load_proposer(args, target, engine)
    chat = Chat(
        target,
        proposer,
        sampling,
        args.rule,
        args.max_new_tokens,
        args.trace,
        use_colour(),
        engine=engine,
    )
    if args.prompt is not None:
        finished = chat.answer(args.prompt)
        keep_learnt(proposer)
        return 0 if finished else 130
    converse(chat)
    keep_learnt(proposer)
    return 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for(__doc__)
    add_options(parser, *MODEL_OPTIONS, "--engine", "--max-new-tokens", max_new_tokens=512)
    add_options(parser, *SAMPLING_OPTIONS, "--rule", "--chat-template")
    add_drafting_options(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="answer this and end")
    parser.add_argument("--trace", action="store_true", help="one line per target forward")
    return parser.parse_args(argv)


def use_colour() -> bool:
    """Colours only on a terminal whose user has not said no (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def converse(chat: "Chat") -> None:
    """Read and answer until the end of input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  line editing and history for input()
    print("/new forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer.")
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D ends)")
            continue
        if text == "/exit":
            return
        if text == "/new":
            chat.messages.clear()
        elif text:
            try:
                chat.answer(text)
            except ValueError as error:
                print(f"error: {error}", file=sys.stderr)
            except KeyboardInterrupt:  # before the first token, or behind the last
                print("\n[stopped]")


class TokenText:
    """Text of a growing list of tokens; a character cut in two waits for its other half.

    A token is decoded together with the ones before it, back to the last complete text, because
    tokenizers treat the first token of a text specially.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.start = 0  # of the tokens decoded together
        self.shown = 0  # tokens whose text has been given out

    def add(self, token: int) -> str:
        """The text that `token` completes; empty in the middle of a character."""
        self.tokens.append(token)
        return self._next(hold=True)

    def flush(self) -> str:
        """What is left when no token follows."""
        return self._next(hold=False)

    def _next(self, hold: bool) -> str:
        before = self._decode(self.tokens[self.start : self.shown])
        after = self._decode(self.tokens[self.start :])
        if hold and after.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self.start, self.shown = self.shown, len(self.tokens)
        return after[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        text = self.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)  # one text for one list of tokens
        return text


@dataclass
class Printer:
    """Writes the rounds of one answer as they come.

    Attributes:
        text: decodes.
        trace: one line per round, instead of running text.
        colour: colour the trace; marks otherwise.
        write: takes the output.
        stats: of the rounds so far.
        answer: the text so far.
        clock: seconds, of which differences are taken.
        first: when the token of the prefill came.
    """

    text: TokenText
    trace: bool
    colour: bool
    write: Write
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    answer: str = ""
    clock: Callable[[], float] = time.perf_counter
    first: float | None = None

    @property
    def speed(self) -> float:
        """Tokens per second of decoding so far, after the prefill's."""
        seconds = 0.0 if self.first is None else self.clock() - self.first
        return self.stats.num_emitted / seconds if seconds > 0 else 0.0

    def legend(self) -> None:
        """What the colours or marks of the trace mean."""
        kinds = (PREFILL, ACCEPTED, RECOVERED, BONUS)
        shown = "  ".join(self._paint(k, k) for k in kinds)
        self.write(f"{'forward':<9}{'accepted/drafted':<18}{'length':<8}{'tokens/s':<10}{shown}\n")

    def tokens(self, row: int, new: list[int]) -> None:
        """Tokens as they come: all of the running text; of a trace the prefill's only."""
        if self.first is None:
            self.first = self.clock()
        if not self.trace:
            self._write_text(new)
        elif not self.text.tokens:
            self._line("prefill", "", [(new[0], PREFILL)])

    def round(self, done: RoundCounts) -> None:
        """One target forward; its tokens have been given to `tokens` already."""
        self.stats.add_round(done.depth, done.draft_tokens, done.accepted, len(done.emitted))
        if not self.trace:
            if self.colour:
                length = f"length {self.stats.acceptance_length:.2f}"
                self.write(TITLE.format(f"{length}, {self.speed:.1f} tokens/s"))
            return
        tokens = [(token, ACCEPTED) for token in done.emitted[: done.accepted]]
        if not done.ended:
            # Where nothing was drafted the token is the target's alone, not a bonus.
            kind = BONUS if done.all_accepted and done.accepted else RECOVERED
            tokens.append((done.emitted[-1], kind))
        count = f"{done.accepted}/{done.draft_tokens}"
        self._line(str(self.stats.num_drafts), count, tokens)

    def finish(self) -> None:
        """Write what is still held back, and end the line."""
        rest = self.text.flush()
        self.answer += rest
        if not self.trace:
            self.write(f"{_harmless(rest)}\n" + (TITLE.format("") if self.colour else ""))
        elif rest:
            self.write(f"{'':<45}{_visible(rest)}\n")

    def _write_text(self, tokens: list[int]) -> None:
        piece = "".join(self.text.add(token) for token in tokens)
        self.answer += piece
        self.write(_harmless(piece))

    def _line(self, name: str, count: str, tokens: list[tuple[int, str]]) -> None:
        pieces = [(self.text.add(token), kind) for token, kind in tokens]
        self.answer += "".join(piece for piece, _ in pieces)
        shown = (self._paint(_visible(piece), kind) for piece, kind in pieces)
        live = f"{'':<18}"
        if self.stats.num_drafts:
            live = f"{self.stats.acceptance_length:<8.2f}{self.speed:<10.1f}"
        joined = ("" if self.colour else " ").join(shown)
        self.write(f"{name:<9}{count:<18}{live}{joined}\n")

    def _paint(self, text: str, kind: str) -> str:
        if self.colour:
            return f"{COLOURS[kind]}{text}{RESET}"
        return f"{MARKS[kind]}{text}"


def _visible(text: str) -> str:
    """Line breaks and other control characters as escapes, so that a line stays a line."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _harmless(text: str) -> str:
    """Running text without what a terminal would obey: control characters as escapes."""
    kept = {"\n", "\t"}
    return "".join(
        char if char in kept or unicodedata.category(char) != "Cc" else ascii(char)[1:-1]
        for char in text
    )


def _write(text: str) -> None:
    print(text, end="", flush=True)


@dataclass
class Chat:
    """A conversation with a target.

    Attributes:
        target: answers.
        proposer: drafts.
        sampling: temperature and the like.
        rule: of acceptance.
        max_new_tokens: per answer, where the target has room for it.
        trace: print one line per target forward.
        colour: colour them.
        write: takes the output.
        messages: said so far.
        engine: runs the target; None is "eager".
    """

    target: TargetModel
    proposer: Proposer
    sampling: SamplingParams
    rule: str
    max_new_tokens: int
    trace: bool
    colour: bool
    write: Write = _write
    messages: list[Message] = field(default_factory=list)
    engine: Engine | None = None

    def answer(self, text: str) -> bool:
        """Answer one message; Ctrl-C keeps what was said so far.

        Returns:
            Whether the answer was finished.

        Raises:
            ValueError: the target has no room for an answer, or its template refuses.
        """
        question: Message = {"role": "user", "content": text}
        ids = encode_prompt(self.target.tokenizer, [*self.messages, question])
        room = self.target.length_limit(len(ids)) - len(ids)
        if room < 1:
            raise ValueError(
                f"the conversation has {len(ids)} tokens and the target takes "
                f"{self.target.max_length}: /new starts over"
            )
        printer = Printer(TokenText(self.target.tokenizer), self.trace, self.colour, self.write)
        if self.trace:
            printer.legend()
        start = time.perf_counter()
        finished = self._decode(ids, min(room, self.max_new_tokens), printer)
        seconds = time.perf_counter() - start
        printer.finish()
        self.messages += [question, {"role": "assistant", "content": printer.answer}]
        self.write(summary(printer, seconds, finished))
        return finished

    def _decode(self, ids: list[int], max_new_tokens: int, printer: Printer) -> bool:
        try:
            speculative_generate(
                self.target,
                self.proposer,
                [ids],
                max_new_tokens=max_new_tokens,
                sampling=self.sampling,
                rule=self.rule,
                engine=self.engine,
                on_counts=printer.round,
                on_token=printer.tokens,
            )
        except KeyboardInterrupt:
            return False
        return True


def summary(printer: Printer, seconds: float, finished: bool) -> str:
    """One line about the answer."""
    stats, tokens = printer.stats, len(printer.text.tokens)
    parts = [f"{tokens} tokens, {tokens / seconds:.1f} tokens/s with the prefill"]
    if stats.num_drafts:
        parts.append(
            f"acceptance length {stats.acceptance_length:.2f} over {stats.num_drafts} forwards"
        )
        parts.append(f"{stats.accepted_per_round:.2f} drafts accepted per forward")
    if not finished:
        parts.insert(0, "stopped")
    return f"[{'; '.join(parts)}]\n"


if __name__ == "__main__":
    run(main)
