"""scripts.benchmark_protocol: workers that do what they should, that crash, hang, and lie."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.benchmark_protocol import (
    Answer,
    RefusalError,
    Seat,
    Worker,
    WorkerError,
    checked_answer,
    quiet_environment,
)

FOLDER = Path(__file__).resolve().parents[2] / "scripts"

HONEST = f"""
import sys, time
sys.path.insert(0, {str(FOLDER)!r})
from benchmark_protocol import Answer, serve

class Echo:
    def __init__(self, settings):
        self.settings = settings
        if settings.get("broken"):
            raise OSError("no such head")

    def warm_up(self, prompts, longest, new_tokens):
        print("a library says hello")
        self.longest = longest

    def decode(self, prompts, new_tokens):
        if len(prompts) > 1:
            raise ValueError("one at a time")
        if prompts[0][0] == 666:
            raise SystemExit("fatal: out of memory")
        time.sleep(0.01)
        return Answer([prompt[:new_tokens] for prompt in prompts], 0.01, 0.0, len(prompts))

serve(Echo, lambda: 3)
"""
ANSWER = {"tokens": [[1, 2]], "seconds": 0.5, "prefill": 0.1, "first": 1}


@pytest.fixture
def make() -> Iterator:
    made = []

    def start(program: str, **settings: object) -> Worker:
        worker = Worker("w", [sys.executable, "-u", "-c", program], settings)
        made.append(worker)
        return worker

    yield start
    for worker in made:
        worker.close()


def liar(answer: str) -> str:
    """A worker that says hello, and then this."""
    return f"import sys\nfor line in sys.stdin:\n    print({answer!r})"


def gone(pid: int) -> bool:
    """Whether a process has ended, soon."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        stat = Path(f"/proc/{pid}/stat")
        if stat.is_file() and stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


def test_an_honest_worker(make) -> None:
    worker = make(HONEST)
    assert worker.threads is None
    assert worker.start(20) > 0
    assert worker.threads == 3
    assert worker.warm_up([[3, 4]], 2, 5, 20) >= 0, "what it prints is no answer"
    answer = worker.decode([[3, 4, 5]], 2, 20)
    assert (answer.tokens, answer.seconds, answer.first) == ([[3, 4]], 0.01, 1)


def test_a_refusal_leaves_it_of_use(make) -> None:
    worker = make(HONEST)
    worker.start(20)
    with pytest.raises(RefusalError, match="ValueError: one at a time"):
        worker.decode([[3], [4]], 2, 20)
    assert worker.decode([[3]], 2, 20).tokens == [[3]]


def test_one_that_cannot_load(make) -> None:
    with pytest.raises(WorkerError, match="OSError: no such head"):
        make(HONEST, broken=True).start(20)


def test_one_that_crashes_says_its_last_words(make) -> None:
    worker = make(HONEST)
    worker.start(20)
    with pytest.raises(WorkerError, match="ended with code 1: fatal: out of memory"):
        worker.decode([[666]], 2, 20)
    worker.close()


def test_one_that_is_killed(make) -> None:
    program = "import os, sys\nsys.stdin.readline()\nos.kill(os.getpid(), 9)"
    with pytest.raises(WorkerError, match="was ended by signal 9: without a word"):
        make(program).start(20)


def test_one_that_ended_long_ago(make) -> None:
    worker = make("raise SystemExit('gone')")
    worker._process.wait(20)
    with pytest.raises(WorkerError, match="gone"):
        worker.start(20)


def test_one_that_hangs_is_ended_with_what_it_started(make) -> None:
    program = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
for line in sys.stdin:
    if "decode" in line:
        time.sleep(60)
    print('{"ready": %d}' % child.pid)
"""
    worker = make(program)
    child = worker.ask({}, 20)["ready"]
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"no answer within 0\.2 s"):
        worker.decode([[1]], 2, 0.2)
    assert time.monotonic() - start < 10
    assert gone(worker._process.pid) and gone(child)


def test_half_a_line_is_no_answer(make) -> None:
    program = "import sys, time\nsys.stdin.readline()\nsys.stdout.write('{')\ntime.sleep(60)"
    with pytest.raises(WorkerError, match="no answer within"):
        make(program).start(0.5)


@pytest.mark.parametrize("text", ["", "ready", "[1, 2]", "{'tokens': 1}"])
def test_one_that_speaks_something_else(make, text: str) -> None:
    with pytest.raises(WorkerError, match="no JSON"):
        make(liar(text)).start(20)


def test_one_that_lies_is_ended(make) -> None:
    worker = make(liar(json.dumps({**ANSWER, "seconds": 50.0})))
    with pytest.raises(WorkerError, match=r"impossible answer: took 50\.000 s of the"):
        worker.decode([[1]], 2, 20)
    assert gone(worker._process.pid)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": 0.7}, "took 0.700 s of the 0.600 s"),
        ({"seconds": -1.0}, "took -1.000 s"),
        ({"seconds": float("nan")}, "took nan s"),
        ({"prefill": 0.6}, "a prefill of 0.600 s"),
        ({"prefill": -0.1}, "a prefill of -0.100 s"),
        ({"tokens": [[1], [2]]}, "2 texts for 1 prompts"),
        ({"tokens": [[]]}, "a text of 0 tokens"),
        ({"tokens": [[1] * 5]}, "a text of 5 tokens where 1 to 4"),
        ({"tokens": [[1, -2]]}, "whole numbers from 0"),
        ({"tokens": [[1, "2"]]}, "whole numbers from 0"),
        ({"first": 3}, "3 tokens of the prefill"),
        ({"first": 0}, "0 tokens of the prefill"),
    ],
)
def test_answers_that_cannot_be(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked_answer({**ANSWER, **change}, 1, 4, 0.6)


def test_a_claim_far_below_our_clock_is_a_lie() -> None:
    """A busy machine delays a message, by a part of a second or of the whole."""
    assert checked_answer(ANSWER, 1, 4, 2.9).seconds == 0.5
    with pytest.raises(ValueError, match=r"claims 0\.500 s, but we waited 3\.100 s"):
        checked_answer(ANSWER, 1, 4, 3.1)


def test_answers_that_can_be() -> None:
    assert checked_answer(ANSWER, 1, 4, 0.6) == Answer([[1, 2]], 0.5, 0.1, 1)
    assert checked_answer({**ANSWER, "seconds": 0.3}, 1, 4, 0.6).seconds == 0.3
    with pytest.raises(TypeError):
        checked_answer({"tokens": [[1]]}, 1, 4, 0.6)


def test_waiting_threads_do_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = quiet_environment()
    assert "OMP_WAIT_POLICY" not in found and found["OMP_NUM_THREADS"] == "3"
    assert int(found["KMP_BLOCKTIME"]) <= 1


def test_a_waiting_worker_uses_no_time(make) -> None:
    worker = make(HONEST)
    worker.start(20)
    fields = f"/proc/{worker._process.pid}/stat"
    if not Path(fields).is_file():
        pytest.skip("no /proc")

    def ticks() -> int:
        return sum(map(int, Path(fields).read_text().rpartition(")")[2].split()[11:13]))

    before = ticks()
    time.sleep(0.3)
    assert ticks() - before <= 2


def test_ctrl_c_ends_the_children() -> None:
    """The parent alone gets the signal; its workers must not outlive it."""
    program = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits "ignored"
sys.path.insert(0, {str(FOLDER)!r})
from contextlib import closing
from benchmark_protocol import Worker
with closing(Worker("w", [sys.executable, "-c", "import time; time.sleep(60)"], {{}})) as worker:
    print(worker._process.pid, flush=True)
    worker.start(60)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGINT)
    assert parent.wait(20) != 0
    assert gone(child)
    parent.stdout.close()


def test_a_worker_ends_when_its_parent_is_gone() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HONEST], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.communicate(b"{}\n", timeout=20)
    assert process.returncode == 0


CREW = HONEST.replace(
    "serve(Echo, lambda: 3)",
    """
from benchmark_protocol import Crew

class Several(Crew):
    def __init__(self, settings):
        if settings.get("lost"):
            raise OSError("no target there")
        self.members = {}

    def join(self, who, contender):
        self.members[who] = Echo(contender)

    def member(self, who):
        return self.members[who]

serve(Several, lambda: 3)
""",
)


def test_several_share_a_process_and_the_last_one_ends_it(make) -> None:
    worker, taken = make(CREW), set()
    seats = [Seat(name, worker, {"broken": name == "b"}, taken) for name in "abc"]
    assert seats[0].start(30) > 0 and seats[0].threads == 3
    with pytest.raises(WorkerError, match="no such head"):
        seats[1].start(30)
    seats[1].close()
    seats[2].start(30)
    for seat in (seats[0], seats[2]):
        assert seat.warm_up([[1]], 1, 2, 30) > 0
        assert seat.decode([[4, 5, 6]], 2, 30).tokens == [[4, 5]]
    seats[0].close()
    assert seats[2].decode([[7]], 2, 30).tokens == [[7]]
    seats[2].close()
    with pytest.raises(WorkerError, match="has ended"):
        seats[2].decode([[7]], 2, 30)


def test_who_shares_a_process_shares_its_death(make) -> None:
    worker, taken = make(CREW), set()
    seats = [Seat(name, worker, {}, taken) for name in "ab"]
    for seat in seats:
        seat.start(30)
    with pytest.raises(WorkerError, match="out of memory"):
        seats[0].decode([[666]], 2, 30)
    with pytest.raises(WorkerError, match="has ended"):
        seats[1].decode([[7]], 2, 30)


def test_a_target_that_cannot_be_loaded_is_every_seats_error(make) -> None:
    worker, taken = make(CREW, lost=True), set()
    for seat in [Seat(name, worker, {}, taken) for name in "ab"]:
        with pytest.raises(WorkerError, match="no target there"):
            seat.start(30)
