"""Joint runs end to end: what they leave behind, and that decoding with it is lossless with respect
to the merged target.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from drafters import Eagle3Drafter, TargetModel, load_drafter
from drafters.export import read_as, write_as
from inference.generate import plain_generate, speculative_generate
from inference.proposers import TreeOptions, build_proposer
from inference.stopping import Stop
from recipes.train import main
from tests.tiny import save_tiny_target, tiny_target
from training.joint import IN_TRAINING, JointObjective
from training.merged import write_merged

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13], [20] * 11]
LORA = ["--lora.rank=2", "--lora.lr=0.02"]
FAMILIES: dict[str, list[str]] = {
    "medusa": ["--drafter.num_heads=2"],
    "eagle3": ["--loss.steps=2"],
    "dflash": [],
}


pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """float64, so that the merged target says what the adapted one said."""
    return save_tiny_target(tmp_path_factory.mktemp("models") / "tiny", layers=4)


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory, base: Path) -> list[str]:
    folder = tmp_path_factory.mktemp("data")
    rows = [
        {"prompt_ids": [5, 6, 7], "answer_ids": [(3 * i + 7 * j) % 90 for j in range(9 + i % 9)]}
        for i in range(24)
    ]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held = folder / "held.jsonl"
    held.write_text('{"prompt": "say hi"}\n{"prompt": "why"}\n')
    return [
        f"--target.name={base}",
        "--target.device=cpu",
        "--target.dtype=float64",
        f"--data.train=[{data}]",
        "--data.max_length=48",
        f"--evaluate.prompts={held}",
        "--evaluate.max_new_tokens=8",
        "--evaluate.size=6",
        "--optim.warmup=0",
        "--run.batch_size=4",
        "--run.steps=4",
        "--run.save_every=2",
        "--run.log_every=1",
        "--run.keep=9",
        "--run.parity=false",  # its bound is for heads as wide as their target
        *LORA,
    ]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def finished(
    request: pytest.FixtureRequest, arguments: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of a finished run."""
    out = tmp_path_factory.mktemp(request.param)
    kind = [f"--drafter.type={request.param}", *FAMILIES[request.param]]
    summary = main([*arguments, *kind, f"--run.out={out}"])
    assert summary["steps"] == 4 and summary["acceptance_length"] >= 1
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return out


def load(folder: Path) -> TargetModel:
    return TargetModel.load(str(folder), torch.float64)


def plain(target: TargetModel) -> list[list[int]]:
    stop = Stop(token_ids=())
    return plain_generate(target, PROMPTS, max_new_tokens=20, stop=stop).sequences


def drafted(target: TargetModel, head: Any) -> list[list[int]]:
    proposer = build_proposer(head, TreeOptions(size=8))
    found = speculative_generate(
        target, proposer, PROMPTS, max_new_tokens=20, stop=Stop(token_ids=())
    )
    return found.sequences


def test_the_head_is_lossless_with_respect_to_the_merged_target(finished: Path, base: Path) -> None:
    """And the target has become another one, or this would say nothing."""
    merged = load(finished / "target")
    expected = plain(merged)
    assert drafted(merged, load_drafter(finished / "head", merged)) == expected
    assert plain(load(base)) != expected


def test_the_head_names_its_reference_and_is_refused_beside_the_base(
    finished: Path, base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=r"wrong target: weights .* merged target .*target/"):
        load_drafter(finished / "head", load(base))
    merged = load(finished / "target")
    config = load_drafter(finished / "head", merged).config
    assert config.target_fingerprint == merged.fingerprint()
    assert config.reference["base"] == "tiny"
    assert config.reference["base_weights"] == load(base).fingerprint()["weights"]
    record = json.loads((finished / "target" / "export.json").read_text())
    assert record["reference"] == config.reference
    adapter = json.loads((finished / "lora" / "export.json").read_text())
    assert adapter["reference"]["adapter"] == config.reference["adapter"] != IN_TRAINING


def test_the_card_says_what_lossless_refers_to(finished: Path) -> None:
    config = json.loads((finished / "head" / "config.json").read_text())
    text = (finished / "head" / "README.md").read_text()
    assert "lossless with respect to this merged target, not to tiny" in text
    assert config["reference"]["adapter"] in text
    assert config["target_fingerprint"]["weights"] in text


def test_an_exported_head_says_which_target_to_serve(finished: Path, tmp_path: Path) -> None:
    merged = load(finished / "target")
    head = load_drafter(finished / "head", merged)
    if not isinstance(head, Eagle3Drafter):
        pytest.skip("SGLang's dialect is for EAGLE-3")
    notes = write_as("sglang", head, tmp_path / "sglang").notes
    assert any("serve it with the merged target" in note for note in notes)
    again = read_as("sglang", tmp_path / "sglang", merged)
    assert again.config.reference == head.config.reference


def test_peft_reads_the_adapter(finished: Path, base: Path) -> None:
    """On the base target it makes what the merged one is."""
    bare = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    adapted = PeftModel.from_pretrained(bare, str(finished / "lora"), torch_dtype=torch.float64)
    ids = torch.tensor(PROMPTS[0])[None]
    expected = load(finished / "target").model(ids).logits
    assert torch.allclose(adapted(ids).logits, expected, rtol=1e-9, atol=1e-9)
    settings = json.loads((finished / "lora" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "tiny"


def test_heads_of_checkpoints_fit_no_target(finished: Path, base: Path) -> None:
    """Their LoRA is not merged into any."""
    checkpoint = finished / "checkpoints" / "step-000004"
    for target in (load(base), load(finished / "target")):
        with pytest.raises(ValueError, match="wrong target: weights"):
            load_drafter(checkpoint / "head", target)
    names = set(load_file(checkpoint / "weights.safetensors"))
    assert sum(name.startswith("adapter.") for name in names) == 2 * 7 * 4


def test_the_target_is_held_to_its_task_from_where_it_started(finished: Path) -> None:
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    distances = [line["train/target_loss"] for line in lines if "train/loss" in line]
    assert distances[0] == 0 < distances[-1]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*.safetensors"))
    }


def test_resumed_from_a_checkpoint_it_ends_bit_for_bit_the_same(
    finished: Path, arguments: list[str], tmp_path: Path
) -> None:
    """Head, LoRA, merged target, and the optimizer's state of both."""
    name = next(name for name in FAMILIES if name in finished.name)
    shutil.copytree(finished / "checkpoints" / "step-000002", tmp_path / "checkpoints/step-000002")
    command = [*arguments, f"--drafter.type={name}", *FAMILIES[name], f"--run.out={tmp_path}"]
    main(command)
    found, expected = contents(tmp_path), contents(finished)
    assert found == expected
    main(command)  # a finished run starts from the original target again
    assert contents(tmp_path) == expected
    assert {"lora/adapter_model.safetensors", "target/model.safetensors"} <= set(found)
    moved = load_file(finished / "checkpoints" / "step-000004" / "optimizer.safetensors")
    assert any(name.startswith("adapter.") and name.endswith("exp_avg") for name in moved)


def test_merged_it_decodes_as_before(tmp_path: Path) -> None:
    """The decoder runs the adapted target while training goes on: the same texts as from the
    merged target, in memory and from the disk.
    """
    from tests.training.test_joint import joint, move

    objective = joint("eagle3", loss={"steps": 2})
    target, head = objective.drafter.target, objective.drafter
    before = plain(target)
    move(objective, 0.05)
    adapted = plain(target)
    assert adapted != before
    assert drafted(target, head.eval()) == adapted
    merged = write_merged(objective, tmp_path)
    assert head.target is merged
    assert plain(merged) == drafted(merged, head) == plain(load(tmp_path / "target")) == adapted
    assert not [name for name, _ in merged.model.named_parameters() if "lora" in name]


def test_an_adapter_that_is_not_finite_is_not_merged(tmp_path: Path) -> None:
    from tests.training.test_joint import joint

    objective: JointObjective = joint()
    with torch.no_grad():
        next(iter(objective.adapter.values())).fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN"):
        write_merged(objective, tmp_path)
    assert not (tmp_path / "target").exists()


def test_without_peft_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.training.test_joint import joint

    monkeypatch.setattr("training.adapter.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs peft: pip install"):
        joint()


def test_a_plain_head_has_a_plain_card(tmp_path: Path) -> None:
    from drafters import build_drafter
    from drafters.export import write_native

    write_native(build_drafter("medusa", tiny_target(layers=4)), tmp_path / "head")
    text = (tmp_path / "head" / "README.md").read_text()
    assert "lossless with respect to this target." in text and "merged" not in text


@pytest.mark.slow
def test_two_processes_equal_one(arguments: list[str], tmp_path: Path) -> None:
    """With the LoRA at rest for the first part, so that both kinds of step are there."""
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    kept = []
    for name, launcher in (("one", []), ("two", two)):
        command = [sys.executable, *launcher, "-m", "recipes.train", *arguments]
        command += ["--drafter.type=eagle3", "--loss.steps=2", "--lora.start=0.3"]
        run = subprocess.run(
            [*command, "--run.threads=1", f"--run.out={tmp_path / name}"],
            cwd=ROOT,
            text=True,
            capture_output=True,
            timeout=240,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert run.returncode == 0, run.stderr
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        curve = [json.loads(line) for line in lines if "train/loss" in line]
        kept.append((curve, load_file(tmp_path / name / "lora" / "adapter_model.safetensors")))
    (curve, lora), (other_curve, other_lora) = kept
    assert [line["train/loss"] for line in curve] == pytest.approx(
        [line["train/loss"] for line in other_curve], rel=1e-6
    )
    assert ["train/target_loss" in line for line in curve] == [False, False, True, True]
    for name, tensor in lora.items():
        assert torch.allclose(tensor, other_lora[name], rtol=1e-5, atol=1e-8), name
    assert any(tensor.abs().max() > 1e-3 for name, tensor in lora.items() if "lora_B" in name)
