"""Heads on the Hugging Face hub: the way from there to a folder here, and back.

Wherever a head is named, the name is a folder, a hub id ``user/name``, or a hub id at a branch, tag
or commit, ``user/name@revision``. What is fetched stays in the hub's cache, also for a machine that
is offline later.
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
_OURS = (".safetensors", ".logits", ".json", ".bin", ".pt")
"""Endings of files that a new export makes stale; others of a repository are left alone."""


def is_hub_id(name: str) -> bool:
    """Whether a name has the form ``user/name``; a folder may have it too."""
    return HUB_ID.fullmatch(name) is not None


def head_folder(name: str | Path) -> Path:
    """The folder of a head, fetched from the hub if the name is none here.

    Only what a head consists of is fetched: its config and records, and safetensors files, or,
    where there is none, pickles (which are later read without running any code in them).

    Args:
        name: a folder, ``user/name``, or ``user/name@revision``.

    Raises:
        ValueError: no such folder, and the hub does not give it; the message says what to check.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    found, _, revision = str(name).partition("@")
    if not is_hub_id(found):
        raise ValueError(
            f"head {name}: no such folder, and no hub id either (user/name or user/name@revision)"
        )
    try:
        folder = _fetch(found, revision or None, _SAFE)
        if not any(folder.glob("*.safetensors")):
            folder = _fetch(found, revision or None, _PICKLED)
    except Exception as error:  # the hub's client has no common base for its own
        raise ValueError(
            f"head {name}: no such folder here, and the hub does not give it ({_said(error)}). "
            "Check the name and the revision; a private or gated head needs HF_TOKEN or "
            "`hf auth login`"
        ) from error
    return folder


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


def _fetch(repo: str, revision: str | None, patterns: Sequence[str]) -> Path:
    return Path(
        snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(_NOT_A_HEAD),
        )
    )


def _said(error: Exception) -> str:
    """The first line of what the hub's client says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
