"""What is said of modules in a checkpoint: by the export, its card, and the scripts."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from drafters import TargetModel
from drafters.export import CardFacts, ExportError, read_as, read_head, write_as
from scripts import convert
from scripts import export as export_script
from tests.drafters.export.stitched import opened, saved, tuned
from tests.drafters.export.written import logits
from tests.native_mtp import save_checkpoint
from tests.tiny import tiny_target

pytestmark = pytest.mark.usefixtures("quiet")


def test_the_stream_before_the_norm_is_remembered_and_said(tmp_path: Path) -> None:
    target = saved(tmp_path / "target", "deepseek_v3")
    notes = {}
    for norm_output in (True, False):
        head = tuned(target, norm_output=norm_output)
        export = write_as("mtp-deepseek", head, tmp_path / "out")
        again = read_head(tmp_path / "out", target)
        assert again.config.norm_output == norm_output
        assert torch.equal(logits(again), logits(head))
        notes[norm_output] = " ".join(export.notes)
    assert "its normed output, as SGLang does; vLLM hands on" in notes[True]
    assert "the stream before its norm, as vLLM does; SGLang hands on" in notes[False]


def test_a_draft_vocabulary_and_a_confidence_output_are_left_out_and_said(tmp_path: Path) -> None:
    target = saved(tmp_path / "target", "glm4_moe")
    head = tuned(target, draft_vocab_size=40, confidence_head=True)
    head.set_draft_vocab(torch.arange(96))
    head.config.tree = [[0], [0, 0]]
    export = write_as("mtp-deepseek", head, tmp_path / "out")
    assert export.left_out == ("confidence.proj.bias", "confidence.proj.weight", "draft_vocab")
    said = " ".join(export.notes)
    for part in ("reduced vocabulary", "confidence output", "fitted tree"):
        assert part in said
    again = read_head(tmp_path / "out", target)
    assert torch.allclose(logits(again)[:, head.draft_vocab], logits(head), atol=1e-5)


def test_several_modules_and_unknown_models_are_said(tmp_path: Path) -> None:
    two = write_as("mtp-deepseek", tuned(saved(tmp_path / "a", "deepseek_v3", 2)), tmp_path / "two")
    assert two.served == ("vllm",)
    assert "SGLang runs one" in " ".join(two.notes)
    other = write_as("mtp-qwen", tuned(saved(tmp_path / "b", "mellum")), tmp_path / "other")
    assert other.served == ()
    assert "no engine is known to have MTP code for 'mellum'" in " ".join(other.notes)


def test_the_card_lies_beside_that_of_the_target(tmp_path: Path) -> None:
    """What the authors wrote stays byte for byte; where they wrote nothing there is nothing."""
    target = saved(tmp_path / "target", "qwen3_next")
    head, written = tuned(target), "---\nlicense: mit\n---\n# Their model\n"
    for readme in (None, written):
        if readme is not None:
            (tmp_path / "target" / "README.md").write_text(readme)
        export = write_as("mtp-qwen", head, tmp_path / "out")
        assert (tmp_path / "out" / "README.md").is_file() == (readme is not None)
    assert (tmp_path / "out" / "README.md").read_text() == written
    text = (tmp_path / "out" / export.card).read_text()
    assert export.card == "HEADWAY.md" and text.startswith("# mtp draft head for target\n")
    assert "whole copy of target with the head among its tensors" in text
    assert f"- parameters: {sum(p.numel() for p in head.parameters()):,}\n" in text
    assert '"method": "mtp", "num_speculative_tokens": 5' in text
    assert "vllm serve out --speculative-config" in text
    assert "--model-path out \\\n    --speculative-algorithm NEXTN" in text
    assert "draft-model-path" not in text
    assert "python -m scripts.evaluate --target out --head out --prompts" in text


def test_the_card_says_what_it_is_told_and_is_replaced_with_the_modules(tmp_path: Path) -> None:
    head = tuned(saved(tmp_path / "target", "glm4_moe"))
    facts = CardFacts("org/glm", "me/glm-mtp", "## Acceptance\n\nOld.", "## Training\n\nA lot.")
    export = write_as("mtp-deepseek", head, tmp_path / "out", facts=facts)
    text = (tmp_path / "out" / export.card).read_text()
    assert text.index("## Acceptance") < text.index("## Serving") < text.index("## Training")
    assert "vllm serve me/glm-mtp " in text
    for note in export.notes:
        assert f"- {note}" in text
    write_as("mtp-deepseek", tuned(opened(tmp_path / "out")), tmp_path / "again")
    again = (tmp_path / "again" / export.card).read_text()
    assert "vllm serve again " in again and "Old." not in again


def test_a_card_of_that_name_that_is_not_ours_is_not_overwritten(tmp_path: Path) -> None:
    head = tuned(saved(tmp_path / "target", "glm4_moe"))
    (tmp_path / "target" / "HEADWAY.md").write_text("theirs")
    with pytest.raises(ExportError, match=r"holds a HEADWAY.md that Headway did not write"):
        write_as("mtp-deepseek", head, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_half_precision(tmp_path: Path) -> None:
    target = saved(tmp_path / "target", "glm4_moe")
    head = tuned(target)
    nn.Module.to(head, dtype=torch.bfloat16)
    export = write_as("mtp-deepseek", head, tmp_path / "out")
    assert "modules are written in bfloat16" in " ".join(export.notes)
    again = read_as("mtp-deepseek", tmp_path / "out", target)
    assert next(again.parameters()).dtype == torch.bfloat16
    assert torch.equal(logits(again), logits(head))


def test_the_scripts_stitch_check_and_take_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_checkpoint(tmp_path / "target", "qwen3_5_text", dtype=torch.float32)
    target = TargetModel.load(str(folder))
    write_as("native", tuned(target), tmp_path / "head")
    common = ["--target", str(folder), "--device", "cpu"]
    out = str(tmp_path / "out")
    export_script.main([str(tmp_path / "head"), "--to", "mtp-qwen", "--out", out, *common])
    shown = capsys.readouterr().out.splitlines()
    record = json.loads(shown[-1])
    assert (record["format"], record["logits_equal"]) == ("mtp-qwen", True)
    assert f"how to serve it: {tmp_path / 'out' / 'HEADWAY.md'}" in shown
    assert "## Training" in (tmp_path / "out" / "HEADWAY.md").read_text()
    export_script.main([out, "--check", *common])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["golden"] < 1e-5
    convert.main([out, "--to", "native", "--out", str(tmp_path / "back"), *common])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["logits_equal"]
    with pytest.raises(ValueError, match="wrong target"):  # a released one has no record
        read_head(tmp_path / "back", tiny_target(torch.float32))
