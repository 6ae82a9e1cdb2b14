"""Heads and targets on the hub: fetched once and whole, at a revision, offline; heads pushed in one
commit or not.
"""

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch

from drafters import TargetModel, build_drafter, load_drafter
from drafters.hub import (
    check_can_push,
    head_folder,
    is_hub_id,
    push_folder,
    split_revision,
    target_place,
)
from tests.fake_hub import TOKEN, FakeHub, hub
from tests.tiny import save_tiny_target


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with hub(tmp_path / "cache", monkeypatch) as found:
        yield found


def folder_of(path: Path, **files: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(content)
    return path


# --- names


@pytest.mark.parametrize("name", ["me/head", "me-too/head.v1_2", "a/b"])
def test_hub_ids(name: str) -> None:
    assert is_hub_id(name)


@pytest.mark.parametrize("name", ["head", "/me/head", "me/head/more", "me/", "./head", "../h", ""])
def test_names_that_are_no_hub_ids(name: str) -> None:
    assert not is_hub_id(name)
    with pytest.raises(ValueError, match="no such folder, and no hub id"):
        head_folder(name or "nothing")


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose name looks like a hub id: nothing is asked."""
    folder_of(tmp_path / "me" / "head")
    monkeypatch.chdir(tmp_path)
    assert head_folder("me/head") == Path("me/head")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("me/head@v1", ("me/head", "v1")),
        ("me/head@refs/pr/3", ("me/head", "refs/pr/3")),
        ("me/head", ("me/head", None)),
        ("me/head@", ("me/head@", None)),
        ("runs/a/head@2", ("runs/a/head@2", None)),  # a folder's name
        ("head@2", ("head@2", None)),
    ],
)
def test_revisions_are_taken_apart(name: str, parts: tuple[str, str | None]) -> None:
    assert split_revision(name) == parts


# --- fetching


def test_only_the_head_is_fetched(tmp_path: Path, fake: FakeHub) -> None:
    wanted = {"config__json": "{}", "export__json": "{ }", "model__safetensors": "w"}
    wanted["golden__logits"] = "g"
    others = {"optimizer__pt": "o", "tokenizer__json": "t", "plot__png": "p", "README__md": "r"}
    fake.add("me/head", folder_of(tmp_path / "made", **wanted, **others, pytorch_model__bin="x"))
    found = head_folder("me/head")
    names = {"config.json", "export.json", "golden.logits", "model.safetensors"}
    assert {path.name for path in found.iterdir()} == names
    assert (found / "model.safetensors").read_text() == "w"
    assert set(fake.downloaded) == names


def test_pickles_are_fetched_where_there_is_nothing_else(tmp_path: Path, fake: FakeHub) -> None:
    files = {"config__json": "{}", "medusa_lm_head__pt": "w", "training_args__bin": "no"}
    fake.add("me/old", folder_of(tmp_path / "made", **files))
    found = head_folder("me/old")
    assert {path.name for path in found.iterdir()} == {"config.json", "medusa_lm_head.pt"}


def test_a_revision(tmp_path: Path, fake: FakeHub) -> None:
    for text in ("one", "two"):
        made = folder_of(tmp_path / "made", config__json=text, model__safetensors=text)
        repo = fake.add("me/head", made, tag=f"v-{text}")
    by_name = {
        "me/head": "two",
        "me/head@main": "two",
        "me/head@v-one": "one",
        f"me/head@{repo.commits[0][0]}": "one",
    }
    for name, text in by_name.items():
        assert (head_folder(name) / "config.json").read_text() == text
    with pytest.raises(ValueError, match=r"me/head@v-three.*RevisionNotFound"):
        head_folder("me/head@v-three")


def test_what_was_fetched_serves_offline(
    tmp_path: Path, fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.add("me/head", folder_of(tmp_path / "made", config__json="{}", model__safetensors="w"))
    online = head_folder("me/head")
    before = len(fake.downloaded)
    head_folder("me/head")
    assert len(fake.downloaded) == before
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert head_folder("me/head") == online
    with pytest.raises(ValueError, match="head me/other: no such folder here, and the hub does"):
        head_folder("me/other")


def test_what_is_not_there_is_said_in_one_line(fake: FakeHub) -> None:
    with pytest.raises(ValueError, match=r"RepositoryNotFound.*HF_TOKEN") as caught:
        head_folder("outputs/eagle3")
    assert "\n" not in str(caught.value)


# --- targets


def test_a_target_without_a_revision_is_left_to_transformers(
    tmp_path: Path, fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_of(tmp_path / "me" / "target@2")
    monkeypatch.chdir(tmp_path)
    for name in ("me/target", "me/target@2", "target", "target@2", str(tmp_path)):
        assert target_place(name) == name
    assert not fake.asked


def test_a_target_is_fetched_whole_but_for_weights_of_other_kinds(
    tmp_path: Path, fake: FakeHub
) -> None:
    wanted = {"config__json": "{}", "model__safetensors": "w", "LICENSE": "l", "merges__txt": "m"}
    others = {"pytorch_model__bin": "b", "model__gguf": "g", "consolidated__pth": "p"}
    fake.add("me/target", folder_of(tmp_path / "made", **wanted, **others), tag="v1")
    found = Path(target_place("me/target@v1"))
    names = {name.replace("__", ".") for name in wanted}
    assert {path.name for path in found.iterdir()} == {*names, ".gitattributes"}
    del wanted["model__safetensors"]
    fake.add("me/old", folder_of(tmp_path / "old", **wanted, **others), tag="v1")
    assert (Path(target_place("me/old@v1")) / "pytorch_model.bin").read_text() == "b"


def test_a_target_at_a_revision(
    tmp_path: Path, fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, config, tokenizer and fingerprint are all of that revision, offline too."""
    for seed, layers in enumerate((4, 5, 5)):
        made = save_tiny_target(tmp_path / f"t{seed}", torch.float32, layers=layers, seed=seed)
        repo = fake.add("me/target", made, tag=f"v{seed}")
    commit = repo.commits[1][0]
    found = {name: TargetModel.load(f"me/target@{name}") for name in ("v0", commit, "main")}
    for seed, target in enumerate(found.values()):
        made = TargetModel.load(str(tmp_path / f"t{seed}"))
        assert target.fingerprint() == made.fingerprint()
        assert target.num_layers == made.num_layers
        assert torch.equal(target.lm_head.weight, made.lm_head.weight)
    assert found["v0"].shape_fields()["target_name"] == "me/target@v0"
    before = len(fake.downloaded)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert TargetModel.load("me/target@v0").fingerprint() == found["v0"].fingerprint()
    assert len(fake.downloaded) == before
    with pytest.raises(ValueError, match="target me/target@v7: no such folder here, and the hub"):
        TargetModel.load("me/target@v7")


def test_a_head_belongs_to_one_revision(tmp_path: Path, fake: FakeHub) -> None:
    for seed in (0, 1):
        made = save_tiny_target(tmp_path / f"t{seed}", torch.float32, layers=4, seed=seed)
        fake.add("me/target", made, tag=f"v{seed}")
    first, second = (TargetModel.load(f"me/target@v{seed}") for seed in (0, 1))
    build_drafter("medusa", first).save_pretrained(tmp_path / "head")
    load_drafter(tmp_path / "head", TargetModel.load("me/target@v0"))
    with pytest.raises(ValueError, match=r"weights of 'me/target@v1' differ from 'me/target@v0'"):
        load_drafter(tmp_path / "head", second)


# --- pushing


def export(path: Path, **more: str) -> Path:
    return folder_of(
        path, export__json="{}", model__safetensors="w", README__md="---\na: b\n---\n", **more
    )


def test_a_push_is_one_commit_that_holds_the_folder(tmp_path: Path, fake: FakeHub) -> None:
    check_can_push("me/head", private=True)
    assert not fake.writes
    url = push_folder(export(tmp_path / "out"), "me/head", private=True, message="first")
    repo = fake.repos["me/head"]
    assert repo.private and len(repo.commits) == 2  # the empty one, and this
    assert repo.messages[-1] == "first" and url.endswith(repo.commits[-1][0])
    assert set(repo.files) == {".gitattributes", "export.json", "model.safetensors", "README.md"}
    assert repo.files["model.safetensors"] == b"w"


def test_a_second_push_leaves_nothing_stale(tmp_path: Path, fake: FakeHub) -> None:
    """A tensor file of another dialect would be read by some engine; a licence is left alone."""
    push_folder(export(tmp_path / "a", medusa_lm_head__safetensors="m"), "me/head", False, "a")
    fake.repos["me/head"].files["LICENSE"] = b"mine"
    check_can_push("me/head", private=False)
    push_folder(export(tmp_path / "b", config__json="{}"), "me/head", False, "b")
    assert set(fake.repos["me/head"].files) == {
        *(".gitattributes", "LICENSE"),
        *("export.json", "model.safetensors", "README.md", "config.json"),
    }
    push_folder(tmp_path / "b", "me/head", False, "the same again")


def test_without_a_token_nothing_is_asked(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ValueError, match=r"no token of the hub here: set HF_TOKEN"):
        check_can_push("me/head", private=False)
    assert not fake.asked


def test_a_token_that_may_not_write(
    tmp_path: Path, fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN.replace("a", "b"))
    with pytest.raises(ValueError, match=r"the hub refuses \(.*403.*lies whole in"):
        push_folder(export(tmp_path / "out"), "me/head", False, "no")
    assert not fake.repos


def test_a_repository_with_something_else_is_refused(tmp_path: Path, fake: FakeHub) -> None:
    fake.add("me/model", folder_of(tmp_path / "made", config__json="{}", model__safetensors="w"))
    with pytest.raises(ValueError, match=r"me/model: it holds something else than an export"):
        check_can_push("me/model", private=False)
    fake.add("me/empty")
    check_can_push("me/empty", private=False)
    with pytest.raises(ValueError, match=r"me/empty: it is there and public"):
        check_can_push("me/empty", private=True)
    with pytest.raises(ValueError, match="'head': that is no hub id"):
        check_can_push("head", private=False)


def test_a_card_that_the_hub_refuses_is_not_pushed(tmp_path: Path, fake: FakeHub) -> None:
    made = export(tmp_path / "out")
    (made / "README.md").write_text("no front matter")
    with pytest.raises(ValueError, match=r"the hub refuses.*Invalid metadata"):
        push_folder(made, "me/head", False, "no")
    assert set(fake.repos["me/head"].files) == {".gitattributes"}


def test_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(tmp_path / "cache", monkeypatch):
        pass  # it is gone
    with pytest.raises(ValueError, match="head me/head"):
        head_folder("me/head")
    with pytest.raises(ValueError, match="push to me/head: the hub"):
        check_can_push("me/head", private=False)
