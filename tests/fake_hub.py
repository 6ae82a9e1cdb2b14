"""A model hub on localhost: enough of its interface to create, push, list and download.

Repositories have a history, so that a revision can be asked for. Writing needs `TOKEN`.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest

TOKEN = "hf_" + "a" * 20
Files = dict[str, bytes]


@dataclass
class Repo:
    """A repository: its commits, the last of which is `main`."""

    private: bool = False
    commits: list[tuple[str, Files]] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, files: Files, message: str = "") -> str:
        name = hashlib.sha1(repr((len(self.commits), sorted(files.items()))).encode()).hexdigest()
        self.commits.append((name, files))
        self.messages.append(message)
        return name

    @property
    def files(self) -> Files:
        return self.commits[-1][1]

    def at(self, revision: str) -> tuple[str, Files] | None:
        """A commit by its name, a tag, or `main`."""
        if revision == "main":
            return self.commits[-1]
        wanted = self.tags.get(revision, revision)
        return next((each for each in self.commits if each[0] == wanted), None)


class FakeHub:
    """The repositories, and what was asked for.

    Attributes:
        url: of the server.
        repos: by id.
        asked: method and path of every request.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.asked: list[str] = []
        self.url = ""

    def add(self, name: str, folder: Path | None = None, tag: str | None = None) -> Repo:
        """Commit the files of a folder to a repository, which may be new."""
        repo = self.repos.setdefault(name, Repo())
        files = {} if folder is None else {p.name: p.read_bytes() for p in folder.iterdir()}
        commit = repo.commit({".gitattributes": b"", **files})
        if tag is not None:
            repo.tags[tag] = commit
        return repo

    @property
    def downloaded(self) -> list[str]:
        """Names of files that were fetched."""
        return [
            each.rpartition("/")[2] for each in self.asked if "GET" in each and "/resolve/" in each
        ]

    @property
    def writes(self) -> list[str]:
        return [each for each in self.asked if each.startswith("POST")]

    @contextmanager
    def serving(self) -> Iterator[None]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


@contextmanager
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that this process talks to, with an empty cache and a token that may write."""
    fake = FakeHub()
    with fake.serving():
        constants: Any = huggingface_hub.constants
        template = fake.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", fake.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "no-token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield fake


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            if parts[:2] == ["api", "models"] and len(parts) >= 4:
                self.repository("/".join(parts[2:4]), parts[4:])
            elif len(parts) >= 5 and parts[2] == "resolve":
                self.file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
            else:
                self.fail(404)

        def do_POST(self) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = urlsplit(self.path).path.strip("/")
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self.fail(403, "this token may not write")
            elif path == "api/validate-yaml":
                text = json.loads(body)["content"]
                errors = [] if text.startswith("---\n") else [{"message": "no front matter"}]
                self.answer({"errors": errors, "warnings": []}, 400 if errors else 200)
            elif path == "api/repos/create":
                self.create(json.loads(body))
            elif "/preupload/" in path:
                kinds = {"uploadMode": "regular", "shouldIgnore": False}
                names = [file["path"] for file in json.loads(body)["files"]]
                self.answer({"files": [{"path": name, **kinds} for name in names]})
            elif "/commit/" in path:
                self.commit("/".join(path.split("/")[2:4]), body)
            else:
                self.fail(404)

        def repository(self, name: str, rest: list[str]) -> None:
            revision = rest[1] if rest else "main"
            if (repo := self.readable(name)) is None:
                self.fail(404, "no such repository", "RepoNotFound")
            elif (found := repo.at(revision)) is None:
                self.fail(404, "no such revision", "RevisionNotFound")
            elif rest[:1] == ["tree"]:
                sizes = {name: len(content) for name, content in found[1].items()}
                rows = [
                    {"type": "file", "path": name, "size": size, "oid": "0" * 40}
                    for name, size in sizes.items()
                ]
                self.answer(rows)
            else:
                siblings = [{"rfilename": name} for name in found[1]]
                about = {"id": name, "modelId": name, "private": repo.private, "tags": []}
                self.answer({**about, "sha": found[0], "siblings": siblings})

        def file(self, name: str, revision: str, path: str) -> None:
            repo = self.readable(name)
            found = None if repo is None else repo.at(revision)
            if found is None or path not in found[1]:
                self.fail(404, "no such file", "EntryNotFound" if found else "RevisionNotFound")
                return
            content = found[1][path]
            etag = hashlib.sha1(content).hexdigest()
            self.answer(content, headers={"ETag": f'"{etag}"', "X-Repo-Commit": found[0]})

        def readable(self, name: str) -> Repo | None:
            repo = hub.repos.get(name)
            hidden = repo is not None and repo.private and not self.headers.get("Authorization")
            return None if hidden else repo

        def create(self, asked: dict[str, Any]) -> None:
            name = f"{asked['organization']}/{asked['name']}"
            known = name in hub.repos
            if not known:
                repo = hub.repos[name] = Repo(private=asked.get("visibility") == "private")
                repo.commit({".gitattributes": b""})
            self.answer({"url": f"{hub.url}/{name}"}, 409 if known else 200)

        def commit(self, name: str, body: bytes) -> None:
            repo = hub.repos[name]
            files, message = dict(repo.files), ""
            for line in body.splitlines():
                value = json.loads(line)["value"]
                kind = json.loads(line)["key"]
                if kind == "header":
                    message = value["summary"]
                elif kind == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif kind == "deletedFile":
                    del files[value["path"]]
            oid = repo.commit(files, message)
            self.answer({"commitUrl": f"{hub.url}/{name}/commit/{oid}", "commitOid": oid})

        def answer(
            self, content: Any, status: int = 200, headers: dict[str, str] | None = None
        ) -> None:
            raw = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(raw)

        def fail(self, status: int, message: str = "", code: str = "") -> None:
            self.answer({"error": message}, status, {"X-Error-Code": code} if code else {})

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    return Handler
