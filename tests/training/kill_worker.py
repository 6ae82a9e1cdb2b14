"""Ten times: start a run in a child process, kill -9 it at a random moment, start it again.

    python -m tests.training.kill_worker SEED KILLS OUT ARGUMENTS...

The children are forked, so that the imports are paid for once. Prints a JSON list of the steps that
metrics.jsonl had reached when each child was killed.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from recipes.train import main


def child(arguments: list[str]) -> int:
    """Start the run; returns the process."""
    process = os.fork()
    if process == 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the process ends with it
        code = 1
        try:
            main(arguments)
            code = 0
        finally:
            os._exit(code)
    return process


def reached(out: Path) -> int:
    """Lines in metrics.jsonl."""
    file = out / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def finished(process: int) -> bool:
    """Whether the child has ended by itself."""
    return os.waitpid(process, os.WNOHANG)[0] != 0


def kill_somewhere(arguments: list[str], out: Path, chance: random.Random) -> int:
    """Kill a run a few steps after where it is, at no particular line of code."""
    aim = reached(out) + chance.randint(1, 4)
    process = child(arguments)
    deadline = time.time() + 120
    while reached(out) < aim:
        assert time.time() < deadline and not finished(process), "the run ended too early"
        time.sleep(0.001)
    time.sleep(chance.random() * 0.05)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return reached(out)


def run() -> None:
    """Command line."""
    seed, kills, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    arguments = [*sys.argv[4:], f"--run.out={out}"]
    chance = random.Random(seed)
    steps = [kill_somewhere(arguments, out, chance) for _ in range(kills)]
    _, status = os.waitpid(child(arguments), 0)
    sys.stdout.write(json.dumps(steps) + "\n")
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    run()
