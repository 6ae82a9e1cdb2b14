"""What llama.cpp makes of prompts, beside what our decoder makes of them with the same head."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from drafters import Drafter, TargetModel
from inference.generate import speculative_generate
from inference.measuring.compare import explain_difference
from inference.measuring.evaluation import Prompt
from inference.proposers.build import build_proposer
from inference.proposers.options import TreeOptions
from inference.sampling import SamplingParams
from interop.llama_cpp_runs import Continuation, Draft, LlamaCpp, complete
from interop.setting import CannotRun

CLOSE = 0.1
"""Accepted tokens per round may differ by this."""


@dataclass(frozen=True)
class Case:
    """A prompt and what our decoder makes of it with one head.

    Attributes:
        prompt: to continue.
        tokens: new tokens.
        rounds: accepted tokens of each round.
        drafts: drafted tokens of each round.
    """

    prompt: Prompt
    tokens: list[int]
    rounds: list[int]
    drafts: list[list[int]]


@dataclass
class Sums:
    """Accepted tokens and rounds over all prompts.

    Rounds at the end of a text, where one program verifies fewer tokens than elsewhere or goes on
    further than the other, are not counted, except of ``llama-server``, which tells only sums.
    """

    accepted: int = 0
    rounds: int = 0

    def add(self, accepted: Sequence[int], counted: Sequence[bool]) -> None:
        """Count the rounds that are to be counted."""
        found = [number for number, wanted in zip(accepted, counted, strict=False) if wanted]
        self.accepted += sum(found)
        self.rounds += len(found)

    @property
    def per_round(self) -> float:
        """Accepted tokens per round, the target's own token excluded; NaN without rounds."""
        return self.accepted / self.rounds if self.rounds else float("nan")


@dataclass
class Comparison:
    """One head in llama.cpp and here.

    Attributes:
        head: its name.
        dialect: it was exported as.
        length: tokens drafted per round.
        prompts: decoded.
        ours, simple, server: acceptance of our decoder, ``llama-speculative-simple`` and, if it was
            asked for, ``llama-server``.
        compared: rounds of ``llama-speculative-simple`` that began where a round of ours did.
        equal_drafts: of these, rounds that drafted the same tokens.
        equal_plain: prompts whose text by ``llama-speculative-simple`` is that of
            ``llama-completion``, which drafts nothing.
        equal_ours: prompts whose text by ``llama-speculative-simple`` is ours.
        equal_server: prompts whose tokens by ``llama-server`` are ours.
        unspelled: prompts left out, as their text has other token ids.
        differences: the first of each kind, in words.
    """

    head: str
    dialect: str
    length: int
    prompts: int = 0
    ours: Sums = field(default_factory=Sums)
    simple: Sums = field(default_factory=Sums)
    server: Sums = field(default_factory=Sums)
    compared: int = 0
    equal_drafts: int = 0
    equal_plain: int = 0
    equal_ours: int = 0
    equal_server: int = 0
    unspelled: int = 0
    differences: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Acceptance within ``CLOSE`` of ours, and texts equal to llama.cpp's own plain ones."""
        theirs = [sums for sums in (self.simple, self.server) if sums.rounds]
        close = all(abs(sums.per_round - self.ours.per_round) <= CLOSE for sums in theirs)
        return bool(theirs) and close and self.equal_plain == self.prompts

    def summary(self) -> str:
        """In one line."""
        by = {"llama-speculative-simple": self.simple, "llama-server": self.server}
        accepted = [f"{sums.per_round:.3f} by {name}" for name, sums in by.items() if sums.rounds]
        said = (
            f"accepted a round, of {self.length} drafted: {', '.join(accepted)}, "
            f"{self.ours.per_round:.3f} by ours; the same tokens drafted in {self.equal_drafts} of "
            f"{self.compared} rounds; text that of its plain decoding on {self.equal_plain} of "
            f"{self.prompts} prompts, ours on {self.equal_ours}"
        )
        if self.server.rounds:
            said += f" (llama-server's tokens on {self.equal_server})"
        return "; ".join((said, *self.differences.values()))


# Our side ---------------------------------------------------------------------------------------


def our_cases(
    target: TargetModel, head: Drafter, prompts: Sequence[Prompt], length: int, new: int
) -> list[Case]:
    """Decode all prompts with a head, in chains.

    Args:
        target: model.
        head: as read from its export.
        prompts: to continue.
        length: of the chains.
        new: tokens per prompt.
    """
    options = TreeOptions(size=length + 1, depth=length, top_k=1)
    cases = []
    for prompt in prompts:
        proposer = build_proposer(head, options)
        made = speculative_generate(
            target, proposer, [prompt.ids], max_new_tokens=new, record_rounds=True
        )
        rounds = [len(done.accepted) for done in made.rounds]
        drafts = [[int(token) for token in done.tree.tokens[1:]] for done in made.rounds]
        cases.append(Case(prompt, made.sequences[0], rounds, drafts))
    return cases


def spelled(target: TargetModel, case: Case) -> str | None:
    """A prompt and its first new token as text, or None if the text has other token ids."""
    ids = [*case.prompt.ids, case.tokens[0]]
    text = str(target.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    return text if target.tokenizer.encode(text, add_special_tokens=False) == ids else None


def without_end(target: TargetModel, tokens: Sequence[int]) -> list[int]:
    """New tokens without the one that ended them."""
    ended = bool(tokens) and tokens[-1] in target.eos_token_ids
    return list(tokens[:-1] if ended else tokens)


# The comparison -----------------------------------------------------------------------------------


def compare(
    llama: LlamaCpp,
    target: TargetModel,
    base: Path,
    draft: Draft,
    cases: Sequence[Case],
    plain: dict[str, bytes],
    result: Comparison,
) -> None:
    """Decode all cases with ``llama-speculative-simple``.

    Args:
        llama: programs.
        target: for texts.
        base: GGUF file of the target.
        draft: GGUF file of the head.
        cases: what our decoder made with the same head.
        plain: texts by ``llama-completion`` of prompts so far; new ones are added.
        result: to fill.

    Raises:
        CannotRun: a program fails.
    """
    for case in cases:
        text = spelled(target, case)
        if text is None:
            result.unspelled += 1
            continue
        if text not in plain:
            plain[text] = llama.plain(base, text, len(case.tokens) - 1)
        served = llama.simple(base, draft, text, len(case.tokens) - 1)
        count(result, target, case, served, plain[text])


def count(
    result: Comparison, target: TargetModel, case: Case, served: Continuation, plain: bytes
) -> None:
    """Add one prompt.

    Args:
        result: to fill.
        target: for texts.
        case: ours.
        served: by ``llama-speculative-simple``, behind the prompt and our first token.
        plain: text by ``llama-completion`` behind the same.

    Raises:
        CannotRun: its tokenizer made another number of tokens of the prompt.
    """
    if served.prompt_tokens != len(case.prompt.ids) + 1:
        raise CannotRun(
            f"prompt {case.prompt.id}: {served.prompt_tokens} tokens by its tokenizer, "
            f"{len(case.prompt.ids) + 1} by ours"
        )
    result.prompts += 1
    pairs = zip(case.drafts, served.verified, strict=False)
    whole = [min(len(draft), verified) == result.length for draft, verified in pairs]
    result.ours.add(case.rounds, whole)
    result.simple.add(served.rounds, whole)
    count_drafts(result, case, served)
    tokens = without_end(target, case.tokens)[1:]
    ours = str(target.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)).encode()
    result.equal_plain += _same(result, case, "its plain text", plain, served.text)
    result.equal_ours += _same(result, case, "our text", ours, served.text)


def count_drafts(result: Comparison, case: Case, served: Continuation) -> None:
    """Add rounds to ``compared`` and ``equal_drafts``, up to one that accepts something else."""
    ours = list(zip(case.drafts, case.rounds, strict=True))
    theirs = list(zip(served.drafts, served.rounds, strict=True))
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        shorter = min(len(mine[0]), len(other[0]))  # both draft less where the text is about to end
        equal = mine[0][:shorter] == other[0][:shorter]
        result.compared += 1
        result.equal_drafts += equal
        if not equal:
            said = f"prompt {case.prompt.id}: round {number} drafts {other[0]}, ours {mine[0]}"
            result.differences.setdefault("drafts", said)
        if mine[1] != other[1]:
            return


def _same(result: Comparison, case: Case, kind: str, expected: bytes, found: bytes) -> bool:
    """Whether texts are equal as far as both go: the last round may overshoot."""
    place = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), None)
    if place is None:
        return True
    ends = [text[place : place + 20].decode(errors="replace") for text in (found, expected)]
    said = f"prompt {case.prompt.id}: differs from {kind} at byte {place}: {ends[0]!r}, {ends[1]!r}"
    result.differences.setdefault(kind, said)
    return False


def compare_server(
    llama: LlamaCpp,
    target: TargetModel,
    base: Path,
    draft: Draft,
    cases: Sequence[Case],
    result: Comparison,
) -> None:
    """Decode all cases with ``llama-server``; arguments as in :func:`compare`."""
    with llama.server(base, draft) as address:
        for case in cases:
            count_server(result, target, case, complete(address, case.prompt.ids, len(case.tokens)))


def count_server(result: Comparison, target: TargetModel, case: Case, served: Continuation) -> None:
    """Add what ``llama-server`` made of a prompt; a difference names the gap between the logits."""
    result.server.accepted += served.accepted
    result.server.rounds += served.new_tokens - 1 - served.accepted  # one token before all rounds
    difference = explain_difference(
        target,
        case.prompt.ids,
        without_end(target, case.tokens),
        without_end(target, served.tokens),
        SamplingParams(0.0),
    )
    result.equal_server += difference is None
    if difference is not None:
        gap = "a text ended" if difference.gap is None else f"logits {difference.gap:.2g} apart"
        result.differences.setdefault(
            "server", f"prompt {case.prompt.id}: other new token {difference.position} ({gap})"
        )
