"""llama.cpp's programs: built, fed with converted models, run on one prompt, and read.

Two of its programs decode with a draft model. ``llama-speculative-simple`` takes a text, keeps the
prompt's last token back and drafts behind it; what it drafted and accepted stands in its log.
``llama-server`` takes and returns token ids, and says how many tokens were drafted and accepted.
``llama-completion`` decodes without drafts. Everything runs on a CPU in float32, key-value caches
too (their default is float16), without flash attention, greedily and with the threshold on the
draft's probability at 0.
"""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from interop.setting import CannotRun, output

REQUIREMENT = "llama-cpp-python==0.3.36"
"""Its source distribution holds llama.cpp's sources under ``vendor``."""

SIMPLE, PLAIN, SERVER = "llama-speculative-simple", "llama-completion", "llama-server"
END_OF_TEXT = b" [end of text]\n"
OPTIONS = ("OPENSSL", "BUILD_UI", "USE_PREBUILT_UI", "BUILD_TESTS")
"""Of its build, switched off: what needs a network or the machine's libraries."""

CONTEXT = 2048  # of both models
PATIENCE = 1200.0  # seconds that a program may take
_ROUND = re.compile(r"accepted (\d+)/(\d+) draft tokens")
_DRAFT = re.compile(r"draft candidate +0, pos +\d+: +(\d+)")
_COUNT = re.compile(r"(n_predict|n_drafted|n_accept) *= *(\d+)")
_ENCODED = re.compile(r"encoded +(\d+) tokens")


@dataclass(frozen=True)
class Draft:
    """A draft model to decode with.

    Attributes:
        file: GGUF.
        kind: llama.cpp's name of what it is, such as "draft-eagle3".
        length: tokens drafted per round.
    """

    file: Path
    kind: str
    length: int


@dataclass(frozen=True)
class Continuation:
    """What llama.cpp made of one prompt.

    Attributes:
        text: of the new tokens, as bytes: an end may lie inside a character.
        tokens: new token ids; empty where the program tells only the text.
        new_tokens: how many there are.
        drafted: tokens drafted in all rounds.
        accepted: of these, accepted.
        rounds: accepted tokens of each round; empty where the program tells only the sums.
        verified: how many drafted tokens each round verified, likewise.
        drafts: drafted tokens of each round, likewise; at the end of a text fewer are verified.
        prompt_tokens: length of the prompt as the program took it.
    """

    text: bytes = b""
    tokens: list[int] = field(default_factory=list)
    new_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    rounds: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    prompt_tokens: int = 0


@dataclass(frozen=True)
class LlamaCpp:
    """Its sources and what was built of them.

    Attributes:
        source: folder with ``convert_hf_to_gguf.py``.
        build: folder of the build.
        threads: of every program.
        python: that converts; it needs torch, transformers, numpy, pyyaml and sentencepiece.
    """

    source: Path
    build: Path
    threads: int = 1
    python: Path = Path(sys.executable)

    def program(self, name: str) -> str:
        """A program's file.

        Raises:
            CannotRun: it has not been built.
        """
        path = self.build / "bin" / name
        if not path.is_file():
            raise CannotRun(f"{path} is missing: build target {name}")
        return str(path)

    def compile(self, *names: str, jobs: int = 2) -> None:
        """Build programs; takes ten minutes on two cores, nothing if they are there.

        Raises:
            CannotRun: cmake is missing or fails.
        """
        if all((self.build / "bin" / name).is_file() for name in names):
            return
        options = [f"-DLLAMA_{name}=OFF" for name in OPTIONS]
        where = ["-S", str(self.source), "-B", str(self.build)]
        output(["cmake", *where, "-DCMAKE_BUILD_TYPE=Release", *options])
        output(["cmake", "--build", str(self.build), "--target", *names, "-j", str(jobs)])

    def convert(self, model: Path, file: Path, target: Path | None = None) -> Path:
        """Make a float32 GGUF file of a target, or of a head for a target.

        Args:
            model: folder with ``config.json`` and weights.
            file: to write; it is converted anew, as the folder may have changed.
            target: folder of the target, for a head.

        Raises:
            CannotRun: the converter refuses.
        """
        script = str(self.source / "convert_hf_to_gguf.py")
        command = [str(self.python), script, str(model), "--outtype", "f32", "--outfile", str(file)]
        if target is not None:
            command += ["--target-model-dir", str(target)]
        output(command, timeout=PATIENCE)
        return file

    def settings(self, target: Path, draft: Draft | None) -> list[str]:
        """Arguments of all programs."""
        found = ["--model", str(target), "--threads", str(self.threads)]
        found += ["--ctx-size", str(CONTEXT), "--flash-attn", "off", "--temp", "0"]
        found += ["--cache-type-k", "f32", "--cache-type-v", "f32"]
        if draft is None:
            return found
        found += ["--spec-draft-model", str(draft.file), "--spec-type", draft.kind]
        found += ["--spec-draft-n-max", str(draft.length), "--spec-draft-p-min", "0"]
        found += ["--spec-draft-type-k", "f32", "--spec-draft-type-v", "f32"]
        return found

    def simple(self, target: Path, draft: Draft, prompt: str, new_tokens: int) -> Continuation:
        """One prompt through ``llama-speculative-simple``.

        Args:
            target: GGUF.
            draft: what drafts.
            prompt: text, with the special tokens spelled out.
            new_tokens: about as many; the last round may overshoot.

        Raises:
            CannotRun: it fails.
        """
        done = self._run(SIMPLE, self.settings(target, draft), prompt, new_tokens)
        return read_simple(done.stdout, done.stderr.decode(errors="replace"), prompt)

    def plain(self, target: Path, prompt: str, new_tokens: int) -> bytes:
        """The text of new tokens without drafts, by ``llama-completion``.

        Args:
            target: GGUF.
            prompt: text, with the special tokens spelled out.
            new_tokens: at most.

        Raises:
            CannotRun: it fails.
        """
        settings = [*self.settings(target, None), "--no-conversation", "--no-display-prompt"]
        found = self._run(PLAIN, settings, prompt, new_tokens).stdout
        return found.removesuffix(b"\n\n").removesuffix(END_OF_TEXT)

    def _run(
        self, name: str, settings: list[str], prompt: str, new_tokens: int
    ) -> subprocess.CompletedProcess[bytes]:
        file = self.build / "prompt.txt"  # as a binary file: nothing is unescaped or stripped
        file.write_bytes(prompt.encode())
        command = [self.program(name), *settings, "--verbosity", "5"]
        command += ["--binary-file", str(file), "--predict", str(new_tokens)]
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE, check=False)
        if done.returncode:
            lines = done.stderr.decode(errors="replace").splitlines()
            last = " / ".join(line.strip() for line in lines[-3:])
            raise CannotRun(f"{name} ended with {done.returncode}: {last}")
        return done

    @contextmanager
    def server(self, target: Path, draft: Draft | None) -> Iterator[str]:
        """A running ``llama-server``; gives its address.

        Raises:
            CannotRun: it ends instead of listening.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [self.program(SERVER), *self.settings(target, draft), "--parallel", "1"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        log = self.build / "server.log"
        with log.open("w", encoding="utf-8") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_for(address, process, log)
            yield address
        finally:
            process.terminate()
            process.wait()


def read_simple(stdout: bytes, log: str, prompt: str) -> Continuation:
    """The output of ``llama-speculative-simple``.

    Args:
        stdout: prompt and new text between blank lines.
        log: what it wrote to stderr at verbosity 5.
        prompt: that it was given.

    Raises:
        CannotRun: the output has another form.
    """
    before, found, text = stdout.partition(prompt.encode())
    counts = {name: int(number) for name, number in _COUNT.findall(log)}
    encoded = _ENCODED.search(log)
    if not found or before.strip() or not text.endswith(b"\n\n") or len(counts) < 3 or not encoded:
        raise CannotRun(f"{SIMPLE}: output has an unknown form: {stdout[:60]!r}, {counts}")
    *rounds, _ = _ROUND.split(log)  # log of a round, accepted, verified, log of the next, ...
    return Continuation(
        text=text[:-4] if text.endswith(b"\n\n\n\n") else text[:-2],
        new_tokens=counts["n_predict"],
        drafted=counts["n_drafted"],
        accepted=counts["n_accept"],
        rounds=[int(accepted) for accepted in rounds[1::3]],
        verified=[int(verified) for verified in rounds[2::3]],
        drafts=[[int(token) for token in _DRAFT.findall(part)] for part in rounds[::3]],
        prompt_tokens=int(encoded[1]),
    )


def read_completion(answer: dict[str, Any]) -> Continuation:
    """The answer of ``llama-server`` to ``/completion``.

    Args:
        answer: JSON; the token that ended it is among its tokens.
    """
    timings = answer["timings"]
    return Continuation(
        text=answer["content"].encode(),
        tokens=answer["tokens"],
        new_tokens=timings["predicted_n"],
        drafted=timings.get("draft_n", 0),
        accepted=timings.get("draft_n_accepted", 0),
        prompt_tokens=answer["tokens_evaluated"],
    )


def complete(address: str, prompt: Sequence[int], new_tokens: int) -> Continuation:
    """One prompt through a running server.

    Args:
        address: of the server.
        prompt: token ids.
        new_tokens: at most.

    Raises:
        CannotRun: it refuses.
    """
    question = {
        "prompt": list(prompt),
        "n_predict": new_tokens,
        "temperature": 0,
        "cache_prompt": False,
        "return_tokens": True,
    }
    try:
        return read_completion(_post(f"{address}/completion", question))
    except OSError as error:
        raise CannotRun(f"{SERVER}: {error}") from error


def _post(address: str, content: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        address, json.dumps(content).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.load(answer)


def _wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):  # not there yet, or still loading
            time.sleep(0.2)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    last = " / ".join(line.strip() for line in lines[-3:])
    raise CannotRun(f"{SERVER} ended with {process.poll()}: {last}")
