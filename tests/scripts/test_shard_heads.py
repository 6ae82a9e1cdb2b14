"""Heads as small files: they load again, nothing is lost, and the list of hashes is true."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from drafters import load_drafter
from scripts import shard_heads
from tests.scripts.heads import tiny_head
from tests.tiny import tiny_target


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for family in ("eagle3", "medusa"):
        tiny_head(tiny_target(), family).save_pretrained(tmp_path / family / "head")
    return tmp_path


def test_heads_load_from_their_shards(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, out = tiny_target(), runs / "out"
    heads = [str(runs / family / "head") for family in ("eagle3", "medusa")]
    shard_heads.main([*heads, "--out", str(out), "--shard-mb", "0.03", "--dtype", "float32"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["heads"] == ["eagle3", "medusa"]
    for family in ("eagle3", "medusa"):
        shards = list((out / family).glob("*.safetensors"))
        assert len(shards) > 1
        assert all(path.stat().st_size < 40_000 for path in shards)  # with a header
        old = load_drafter(runs / family / "head", target)
        new = load_drafter(out / family, target)
        assert new.state_dict().keys() == old.state_dict().keys()
        for name, tensor in old.state_dict().items():
            assert torch.equal(new.state_dict()[name], tensor), name
    files = json.loads((out / "manifest.json").read_text())["files"]
    assert {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()} == {
        *files,
        "manifest.json",
    }
    for name, entry in files.items():
        content = (out / name).read_bytes()
        assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_half_precision_keeps_the_draft_vocabulary(runs: Path) -> None:
    shard_heads.main([str(runs / "eagle3" / "head"), "--out", str(runs / "out")])
    old = load_drafter(runs / "eagle3" / "head", tiny_target())
    new = load_drafter(runs / "out" / "eagle3", tiny_target())
    assert torch.equal(new.draft_vocab, old.draft_vocab)
    for mine, theirs in zip(new.parameters(), old.parameters(), strict=True):
        assert torch.equal(mine, theirs.to(torch.bfloat16).float())


def test_what_cannot_be_done_is_said(runs: Path) -> None:
    head = str(runs / "eagle3" / "head")
    with pytest.raises(ValueError, match=r"alone is .* raise --shard-mb"):
        shard_heads.main([head, "--out", str(runs / "out"), "--shard-mb", "0.001"])
    with pytest.raises(ValueError, match="cannot load it"):
        shard_heads.main([str(runs / "nothing"), "--out", str(runs / "out")])
    with pytest.raises(ValueError, match="same name"):
        shard_heads.main([head, head, "--out", str(runs / "out")])
