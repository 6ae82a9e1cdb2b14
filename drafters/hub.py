"""Heads and targets on the Hugging Face hub: the way from there to a folder here, and back.

Wherever a head or a target is named, the name is a folder, a hub id ``user/name``, or a hub id at a
branch, tag or commit, ``user/name@revision``. What is fetched stays in the hub's cache, also for a
machine that is offline later.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    get_token,
    snapshot_download,
)
from huggingface_hub.errors import RepositoryNotFoundError

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_RECORDS = ("config.json", "export.json", "golden.logits", "*.index.json")
_SAFE = (*_RECORDS, "*.safetensors")
_PICKLED = (*_RECORDS, "*.bin", "*.pt")
_NOT_A_HEAD = ("*/*", "optimizer*", "scheduler*", "rng_state*", "training_args*")
_NOT_A_TARGET = ("*/*", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.onnx", "*.ot")
_HEAD = ((_SAFE, _NOT_A_HEAD), (_PICKLED, _NOT_A_HEAD))
_TARGET = ((("*",), (*_NOT_A_TARGET, "*.bin")), (("*",), _NOT_A_TARGET))
"""Patterns of names to fetch and to leave, first without pickles, then, where that gives no
tensors, with them."""
_OURS = (".safetensors", ".logits", ".json", ".bin", ".pt", "HEADWAY.md")
"""Endings of files that a new export makes stale; others of a repository are left alone."""


def is_hub_id(name: str) -> bool:
    """Whether a name has the form ``user/name``; a folder may have it too."""
    return HUB_ID.fullmatch(name) is not None


def split_revision(name: str) -> tuple[str, str | None]:
    """``user/name@revision`` in two; other names as they are, and None."""
    found, _, revision = name.partition("@")
    return (found, revision) if revision and is_hub_id(found) else (name, None)


def head_folder(name: str | Path) -> Path:
    """The folder of a head, fetched from the hub if the name is none here.

    Only what a head consists of is fetched: its config and records, and safetensors files, or,
    where there is none, pickles (which are later read without running any code in them).

    Args:
        name: a folder, ``user/name``, or ``user/name@revision``.

    Raises:
        ValueError: no such folder, and the hub does not give it; the message says what to check.
    """
    if Path(name).is_dir():
        return Path(name)
    found, revision = split_revision(str(name))
    if not is_hub_id(found):
        raise ValueError(
            f"head {name}: no such folder, and no hub id either (user/name or user/name@revision)"
        )
    return _fetch(f"head {name}", found, revision, _HEAD)


def target_place(name: str) -> str:
    """What transformers can load a target from: the name itself, or, as transformers has no names
    with a revision in them, the folder of that revision, fetched from the hub.

    Everything at the top level is fetched but for weights in formats that are not loaded.

    Args:
        name: a folder, ``user/name``, or ``user/name@revision``.

    Raises:
        ValueError: the hub does not give the revision; the message says what to check.
    """
    found, revision = split_revision(name)
    if Path(name).is_dir() or revision is None:
        return name
    return str(_fetch(f"target {name}", found, revision, _TARGET))


def check_can_push(repo: str, private: bool) -> None:
    """Refuse, before anything is computed, a repository that cannot be pushed to. Pushes nothing.

    Args:
        repo: hub id.
        private: whether it is to be private.

    Raises:
        ValueError: no hub id, no token, a repository with something else in it than an export, or
            a public one that should be private.
    """
    if not is_hub_id(repo):
        raise ValueError(f"push to {repo!r}: that is no hub id: name it user/name")
    if get_token() is None:
        raise ValueError(
            f"push to {repo}: no token of the hub here: set HF_TOKEN, or run `hf auth login`, with "
            "a token that may write"
        )
    try:
        info = HfApi().model_info(repo)
    except RepositoryNotFoundError:
        return  # it will be created
    except Exception as error:  # see head_folder
        raise ValueError(f"push to {repo}: the hub does not answer ({_said(error)})") from error
    there = [sibling.rfilename for sibling in info.siblings or []]
    foreign = [name for name in there if name.endswith(_OURS)]
    if foreign and "export.json" not in there:
        raise ValueError(
            f"push to {repo}: it holds something else than an export ({foreign[0]}, and no "
            "export.json): name another repository"
        )
    if private and not info.private:
        raise ValueError(
            f"push to {repo}: it is there and public: drop the wish for a private one, make it "
            "private on its settings page, or name another"
        )


def push_folder(folder: Path, repo: str, private: bool, message: str) -> str:
    """Make a repository hold what a folder holds, in one commit: all of it or nothing.

    Weights and JSON files there that the folder does not have are removed, so that no engine reads
    tensors of an earlier export.

    Args:
        folder: an export that passed its checks.
        repo: hub id; created if it is not there.
        private: whether to create it private.
        message: of the commit.

    Returns:
        The address of the commit.

    Raises:
        ValueError: the hub refuses; the message says what it said.
    """
    api = HfApi()
    try:
        api.create_repo(repo, private=private or None, exist_ok=True)
        there = api.list_repo_files(repo)
        here = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*"))}
        files = {name: path for name, path in here.items() if path.is_file()}
        stale = [name for name in there if name.endswith(_OURS) and name not in files]
        commit = api.create_commit(
            repo,
            operations=[
                *(CommitOperationDelete(name) for name in stale),
                *(CommitOperationAdd(name, path) for name, path in files.items()),
            ],
            commit_message=message,
        )
    except Exception as error:  # see head_folder
        raise ValueError(
            f"push to {repo}: the hub refuses ({_said(error)}). The export lies whole in {folder}; "
            "check that the token may write there, and push again"
        ) from error
    return commit.commit_url


def _fetch(
    what: str, repo: str, revision: str | None, tries: Sequence[tuple[Sequence[str], Sequence[str]]]
) -> Path:
    """The folder of a repository's files, of the first of ``tries`` that gives safetensors, or the
    last.

    Raises:
        ValueError: the hub does not give it.
    """
    try:
        for wanted, left in tries:
            folder = Path(
                snapshot_download(
                    repo,
                    revision=revision,
                    allow_patterns=list(wanted),
                    ignore_patterns=list(left),
                )
            )
            if any(folder.glob("*.safetensors")):
                break
        return folder
    except Exception as error:  # the hub's client has no common base for its own
        raise ValueError(
            f"{what}: no such folder here, and the hub does not give it ({_said(error)}). "
            "Check the name and the revision; what is private or gated needs HF_TOKEN or "
            "`hf auth login`"
        ) from error


def _said(error: Exception) -> str:
    """The first line of what the hub's client says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
