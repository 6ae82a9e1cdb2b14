"""Answers by all processes of a run together: each answers a share of the prompts.

Shares are dealt by length and written to files of their own, which the main process merges into the
one file. Where a process fails the others stop after their batch, so that none is waited for.
"""

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from drafters import TargetModel
from training.answers.conversations import Conversation
from training.answers.file import Answered, AnswerFile, AnswerOptions, plan, share_path
from training.answers.local import answer_conversations, made_by_of
from training.processes import on_main


@dataclass
class Share:
    """What one process did.

    Attributes:
        answered: its counts.
        failure: why it stopped early; None where it did not fail.
    """

    answered: Answered
    failure: str | None = None


def answer_together(
    target: TargetModel,
    rows: Sequence[dict[str, Any]],
    out: Path,
    options: AnswerOptions,
    accelerator: Accelerator,
    progress: bool = True,
) -> Answered:
    """Answer in process, by all processes, what no file holds yet; each prompt once.

    To be called by every process; a run that was stopped is continued by any number of them.

    Args:
        target: this process's; the weights are the same everywhere.
        rows: see :func:`~training.answers.local.generate_answers`; the same everywhere.
        out: JSONL file on a disk that all processes see; the shares lie beside it meanwhile.
        options: see :class:`~training.answers.file.AnswerOptions`.
        accelerator: of this process.
        progress: show a progress bar, of the main process's share.

    Returns:
        What all of them did.

    Raises:
        ValueError: in every process, where any of them failed; see
            :func:`~training.answers.local.generate_answers`.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    file = AnswerFile(out)
    with ExitStack() as stack:  # the main process keeps the file open, and so other runs out

        def begin() -> tuple[list[str], set[str]]:
            made_by = made_by_of(target)
            plan(rows, options, made_by)  # a row without a prompt is named once
            stack.enter_context(file)
            failure_mark(out).unlink(missing_ok=True)
            return made_by, file.done

        made_by, done = on_main(accelerator, begin)
        waiting = [one for one in plan(rows, options, made_by) if one.key not in done]
        mine = share_of(waiting, rank, world)
        path, shown = share_path(out, rank, world), progress and accelerator.is_main_process
        own = answer_share(target, mine, path, failure_mark(out), options, made_by, shown)
        shares: list[Share] = gather_object([own])

        def finish() -> Answered:
            failure_mark(out).unlink(missing_ok=True)
            total = total_of(shares, made_by)
            paths = [share_path(out, number, world) for number in range(world)]
            file.take_in([path for path in paths if path.exists()])
            total.report(options.max_prompt_tokens)
            return total

        total: Answered = on_main(accelerator, finish)
        return total


def share_of(waiting: Sequence[Conversation], rank: int, world: int) -> list[Conversation]:
    """One process's part, as long as the others' in sum and of the same mix of lengths."""
    ordered = sorted(waiting, key=lambda one: (len(str(one.script)), one.key))
    return ordered[rank::world]


def answer_share(
    target: TargetModel,
    share: Sequence[Conversation],
    path: Path,
    mark: Path,
    options: AnswerOptions,
    made_by: list[str],
    progress: bool = False,
) -> Share:
    """Answer one process's part into its file, up to its end or the failure of any process.

    Args:
        target: see :func:`answer_together`.
        share: this process's conversations.
        path: its file; not made for an empty share.
        mark: the file by which processes tell each other that one failed.
        options: see :class:`~training.answers.file.AnswerOptions`.
        made_by: see :class:`~training.answers.file.Answered`.
        progress: show a progress bar.
    """
    done = Share(Answered(made_by))
    if not share:
        return done
    try:
        with AnswerFile(path) as file:
            answer_conversations(
                target, share, file, options, done.answered, progress, stopped=mark.exists
            )
    except Exception as error:  # out of memory, a full disk: the others must hear of it
        done.failure = described(error)
        with suppress(OSError):
            mark.touch()
    return done


def failure_mark(out: Path) -> Path:
    """A file that is there while processes stop because one failed."""
    return out.with_name(out.name + ".failed")


def total_of(shares: Sequence[Share], made_by: list[str]) -> Answered:
    """What all processes did.

    Raises:
        ValueError: some failed; it names them.
    """
    failed = [
        f"process {number} of {len(shares)}: {share.failure}"
        for number, share in enumerate(shares)
        if share.failure is not None
    ]
    total = Answered(made_by)
    for share in shares:
        total.add(share.answered)
    if failed:
        raise ValueError(
            f"answers: {'; '.join(failed)}. {total.written} answers were written before; the same "
            "command goes on from there"
        )
    return total


def described(error: Exception) -> str:
    """An error in one line; the kind is named where it is not one of a user."""
    user = isinstance(error, ValueError | OSError)
    return str(error) if user else f"{type(error).__name__}: {error}"
