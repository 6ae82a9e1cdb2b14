"""The training recipe end to end on a tiny target, and one-line errors for what users get wrong."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.modeling_utils
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from drafters import Eagle3Drafter, MedusaDrafter, TargetModel, build_drafter, load_drafter
from recipes import checks, train
from recipes.train import main
from tests.tiny import save_tiny_target, tiny_target
from training.config import parse_config
from training.loop import Trainer

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = ["one plus one", "tell me a joke", "who are you", "name three colors", "why", "say hi"]


pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(
        tmp_path_factory.mktemp("models") / "tiny", dtype=torch.float32, layers=3
    )


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    """Conversations with answers."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": f"answer {number}, I think."},
            ]
        }
        for number, question in enumerate(QUESTIONS)
    ]
    return write_rows(tmp_path / "talks.jsonl", rows)


@pytest.fixture
def arguments(tmp_path: Path, target: Path, talks: Path) -> list[str]:
    """A small run; later arguments override."""
    config = {
        "target": {"name": str(target)},
        "drafter": {"type": "medusa", "num_heads": 2},
        "data": {"train": [str(talks)], "max_length": 128},
        "run": {"out": str(tmp_path / "out"), "steps": 4, "log_every": 2, "save_every": 2},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return ["--config", str(path)]


def command(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    """As the command line does it."""
    monkeypatch.setattr(sys, "argv", ["recipes/train.py", *arguments])
    train.run()


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


# --- the whole way


def test_prompts_to_a_trained_and_evaluated_eagle3(
    tmp_path: Path,
    target: Path,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": text} for text in QUESTIONS])
    held = write_rows(tmp_path / "held.jsonl", [{"turns": ["what now"]}, {"prompt": "and"}])
    out = tmp_path / "eagle"
    arguments = [
        *arguments,
        "--drafter.type=eagle3",
        "--drafter.draft_vocab_size=60",
        "--drafter.confidence_head=true",
        f"--data.train=[{prompts}]",
        "--data.regenerate=true",
        "--data.answer_tokens=16",
        "--loss.steps=2",
        f"--evaluate.prompts={held}",
        "--evaluate.every=2",
        "--evaluate.max_new_tokens=8",
        "--evaluate.size=8",
        f"--run.out={out}",
    ]
    arguments = [a for a in arguments if "num_heads" not in a]
    config = yaml.safe_load((tmp_path / "run.yaml").read_text())
    del config["drafter"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    command(monkeypatch, arguments)

    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["method"] == "eagle3"
    assert summary["steps"] == 4
    assert summary["acceptance_length"] >= 1
    assert summary["head"] == str(out / "head")
    answers = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == len(QUESTIONS)

    head = load_drafter(out / "head", TargetModel.load(str(target)))
    assert isinstance(head, Eagle3Drafter)
    assert head.config.draft_vocab_size == 60
    assert head.confidence is not None
    used = {token for row in answers for token in row["answer_ids"]}
    assert used & set(head.draft_vocab.tolist()) == used, "60 of 96 tokens cover 6 short answers"
    assert summary["parameters"] == head.num_parameters_trained()

    found = metrics(out)
    assert [line["step"] for line in found if "train/loss" in line] == [2, 4]
    assert [line["step"] for line in found if "eval/acceptance_length" in line] == [2, 4]
    again = parse_config(["--config", str(out / "config.yaml")])
    assert again.loss.steps == 2
    assert again.run.out == str(out)
    for folder in (out, out / "head"):
        name = "provenance.json" if folder == out else "export.json"
        made = json.loads((folder / name).read_text())
        made = made.get("provenance", made)
        assert {"command", "commit", "versions"} <= set(made)
        assert made["command"][0] == "train.py"


def test_conversations_to_a_trained_medusa(
    tmp_path: Path, target: Path, arguments: list[str]
) -> None:
    summary = main([*arguments, "--drafter.num_layers=2", "--optim.lr=1e-2", "--run.steps=12"])
    out = tmp_path / "out"
    assert summary["method"] == "medusa"
    assert summary["training_tokens"] > 0
    head = load_drafter(out / "head", TargetModel.load(str(target)))
    assert isinstance(head, MedusaDrafter)
    assert not all((p == 0).all() for p in head.blocks.parameters()), "it learnt something"
    losses = [line["train/loss"] for line in metrics(out)]
    assert losses[-1] < losses[0]
    saved = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert saved == ["step-000010", "step-000012"]


def test_base_model_trains_on_text(tmp_path: Path, target: Path, arguments: list[str]) -> None:
    base = save_tiny_target(tmp_path / "base", dtype=torch.float32, layers=3)
    remove_template(base)
    rows = [{"text": f"the {word} is on the table again, number {word}."} for word in QUESTIONS]
    text = write_rows(tmp_path / "text.jsonl", rows)
    summary = main([*arguments, f"--target.name={base}", f"--data.train=[{text}]"])
    assert summary["steps"] == 4


def test_started_again_it_resumes(tmp_path: Path, arguments: list[str]) -> None:
    """To the same file as in one go, and a finished run is left as it is."""
    main([*arguments, f"--run.out={tmp_path / 'straight'}"])
    stopped = Trainer._train_step

    def stopping(self: Trainer) -> float:
        if self.step == 3:
            raise MemoryError
        return stopped(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_train_step", stopping)
        with pytest.raises(MemoryError):
            main(arguments)
    main(arguments)
    straight = (tmp_path / "straight" / "head" / "model.safetensors").read_bytes()
    head = tmp_path / "out" / "head" / "model.safetensors"
    assert head.read_bytes() == straight
    assert main(arguments)["steps"] == 4
    assert head.read_bytes() == straight


def test_init_from_starts_with_the_weights_of_a_head(
    tmp_path: Path, target: Path, arguments: list[str]
) -> None:
    main(arguments)
    first = tmp_path / "out" / "head"
    more = [*arguments, f"--drafter.init_from={first}", f"--run.out={tmp_path / 'more'}"]
    main([*more, "--optim.lr=1e-12"])
    one, other = (load_file(p / "model.safetensors") for p in (first, tmp_path / "more" / "head"))
    assert all((one[name] - other[name]).abs().max() < 1e-8 for name in one)
    fresh = build_drafter(
        "medusa", TargetModel.load(str(target)), num_heads=2, confidence_head=True
    )
    weight = fresh.state_dict()["blocks.0.0.linear.weight"]
    assert (one["blocks.0.0.linear.weight"] - weight).abs().max() > 1e-6


def test_options_that_a_loaded_head_contradicts_are_refused(
    tmp_path: Path, arguments: list[str]
) -> None:
    main(arguments)
    more = [*arguments, f"--drafter.init_from={tmp_path / 'out' / 'head'}"]
    with pytest.raises(ValueError, match=r"drafter.num_layers=2 has no effect"):
        main([*more, f"--run.out={tmp_path / 'more'}", "--drafter.num_layers=2"])


def test_bad_rows_are_left_out_on_request(
    tmp_path: Path, arguments: list[str], talks: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with talks.open("a") as file:
        file.write(json.dumps({"messages": [{"role": "user", "content": "no answer"}]}) + "\n")
    main([*arguments, "--data.skip_bad_rows=true"])
    assert "left out 1 of 7 rows" in caplog.text


def test_parity_is_checked_before_the_first_step(
    tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    check, step = checks.check_parity, Trainer._train_step
    monkeypatch.setattr(checks, "check_parity", lambda *a: calls.append("parity") or check(*a))
    monkeypatch.setattr(Trainer, "_train_step", lambda self: calls.append("step") or step(self))
    main([*arguments, "--run.steps=2"])
    assert calls == ["parity", "step", "step"]
    calls.clear()
    main([*arguments, "--run.steps=2", "--run.parity=false", f"--run.out={tmp_path / 'b'}"])
    assert calls == ["step", "step"]


# --- what users get wrong


def remove_template(folder: Path) -> None:
    for path in folder.glob("chat_template*"):
        path.unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def no_target(folder: Path) -> list[str]:
    return [f"--target.name={folder / 'nowhere'}"]


def empty_dataset(folder: Path) -> list[str]:
    return [f"--data.train=[{write_rows(folder / 'rows.jsonl', [])}]"]


def missing_dataset(folder: Path) -> list[str]:
    return [f"--data.train=[{folder / 'nowhere.jsonl'}]"]


def bad_key(folder: Path) -> list[str]:
    path = folder / "run.yaml"
    path.write_text(path.read_text() + "optim:\n  learning_rate: 1\n")
    return []


def bad_value(folder: Path) -> list[str]:
    return ["--optim.lr=0"]


def no_template(folder: Path) -> list[str]:
    base = save_tiny_target(folder / "base", dtype=torch.float32, layers=3)
    remove_template(base)
    return [f"--target.name={base}"]


def no_template_file(folder: Path) -> list[str]:
    return [f"--data.chat_template={folder / 'nowhere.jinja'}"]


def no_answers(folder: Path) -> list[str]:
    rows = [{"messages": [{"role": "user", "content": "hello"}]}]
    return [f"--data.train=[{write_rows(folder / 'rows.jsonl', rows)}]"]


def prompts_too_long(folder: Path) -> list[str]:
    return ["--data.max_length=8"]


def held_out_missing(folder: Path) -> list[str]:
    return [f"--evaluate.prompts={folder / 'nowhere.jsonl'}"]


def no_head(folder: Path) -> list[str]:
    return [f"--drafter.init_from={folder / 'nowhere'}"]


def head_of_another_target(folder: Path) -> list[str]:
    build_drafter("medusa", tiny_target(layers=3, seed=9)).save_pretrained(folder / "head")
    return [f"--drafter.init_from={folder / 'head'}"]


def truncated_head(folder: Path) -> list[str]:
    target = tiny_target(torch.float32, layers=3)
    build_drafter("medusa", target, num_heads=2).save_pretrained(folder / "head")
    path = folder / "head" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return [f"--drafter.init_from={folder / 'head'}"]


def head_of_another_family(folder: Path) -> list[str]:
    build_drafter("eagle3", tiny_target(torch.float32, layers=3)).save_pretrained(folder / "head")
    return [f"--drafter.init_from={folder / 'head'}"]


def too_few_layers(folder: Path) -> list[str]:
    (folder / "run.yaml").write_text(
        (folder / "run.yaml").read_text().replace("num_heads: 2", "").replace("medusa", "eagle3")
    )
    small = save_tiny_target(folder / "small", dtype=torch.float32, layers=2)
    return [f"--target.name={small}"]


def indivisible_batch(folder: Path) -> list[str]:
    return ["--run.batch_size=3", "--run.micro_batch_size=2"]


def unwritable_out(folder: Path) -> list[str]:
    (folder / "file").write_text("")
    return [f"--run.out={folder / 'file' / 'out'}"]


def no_loss(folder: Path) -> list[str]:
    return ["--loss.terms={hinge: 1.0}"]


MISTAKES: list[tuple[Callable[[Path], list[str]], str]] = [
    (no_target, "nowhere"),
    (empty_dataset, "empty"),
    (missing_dataset, "nowhere.jsonl"),
    (bad_key, "learning_rate"),
    (bad_value, "lr"),
    (no_template, "chat template"),
    (no_template_file, "nowhere.jinja"),
    (no_answers, "data row 0"),
    (prompts_too_long, "data.max_length"),
    (held_out_missing, "nowhere.jsonl"),
    (no_head, "nowhere"),
    (head_of_another_target, "wrong target"),
    (truncated_head, "damaged or cut short"),
    (head_of_another_family, "drafter.init_from is a eagle3 head"),
    (too_few_layers, "only 2"),
    (indivisible_batch, "run.batch_size"),
    (unwritable_out, "file"),
    (no_loss, "loss.terms: 'hinge' is unknown"),
]


@pytest.mark.parametrize(
    ("mistake", "named"), MISTAKES, ids=[mistake.__name__ for mistake, _ in MISTAKES]
)
def test_mistakes_are_one_line(
    tmp_path: Path,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mistake: Callable[[Path], list[str]],
    named: str,
) -> None:
    wrong = mistake(tmp_path)
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        command(monkeypatch, [*arguments, *wrong])
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, err
    assert named in errors[0]
    assert errors[0] == err.splitlines()[-1], "the cause is the last thing to be read"
    assert "Traceback" not in err and out == ""
    assert not (tmp_path / "out" / "metrics.jsonl").exists(), "before any training"


def test_command_line_itself(tmp_path: Path, arguments: list[str]) -> None:
    """A new process, as `python -m recipes.train`: exit status 2 and no traceback."""
    done = subprocess.run(
        [sys.executable, "-m", "recipes.train", *arguments, "--target.name=/nowhere"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: target") and "'/nowhere'" in last
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_ctrl_c_is_one_line_and_keeps_the_step(
    tmp_path: Path,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    forward = Trainer._forward

    def interrupted(self: Trainer, batch: Any) -> torch.Tensor:
        if self.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return forward(self, batch)

    monkeypatch.setattr(Trainer, "_forward", interrupted)
    with pytest.raises(SystemExit) as caught:
        command(monkeypatch, arguments)
    assert caught.value.code == 130
    err = capsys.readouterr().err
    assert "stopped at step 3" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert (tmp_path / "out" / "checkpoints" / "step-000003").is_dir()


@pytest.mark.parametrize(
    "failure",
    [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left on device")],
    ids=["python", "safetensors"],
)
@pytest.mark.parametrize("place", ["checkpoints", "head"])
def test_full_disk_is_one_line_and_can_be_resumed(
    tmp_path: Path,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: str,
    failure: Exception,
) -> None:
    """While a checkpoint, or the finished head, is written."""
    out = tmp_path / "out"
    save = transformers.modeling_utils.safe_save_file

    def full(tensors: Any, path: Any, **kwargs: Any) -> None:
        folder = Path(path).parent
        if (
            ("step-000004" in str(path))
            if place == "checkpoints"
            else folder.name == ".head.writing"
        ):
            raise failure
        save(tensors, path, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(transformers.modeling_utils, "safe_save_file", full)
        with pytest.raises(SystemExit) as caught:
            command(patch, arguments)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert "no space left" in err.splitlines()[-1].lower()
    assert "Traceback" not in err
    left = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert left == (["step-000002"] if place == "checkpoints" else ["step-000002", "step-000004"])
    assert main(arguments)["steps"] == 4


def test_failed_save_of_the_head_leaves_the_one_before(
    tmp_path: Path, target: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second save into the same folder that is cut off must not damage the first."""
    main(arguments)
    head = tmp_path / "out" / "head"
    save = transformers.modeling_utils.safe_save_file

    def cut(tensors: Any, path: Any, **kwargs: Any) -> None:
        save(tensors, path, **kwargs)
        if "checkpoints" not in str(path):
            Path(path).write_bytes(Path(path).read_bytes()[:100])
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(transformers.modeling_utils, "safe_save_file", cut)
        with pytest.raises((ValueError, OSError), match=r"[Nn]o space left"):
            main(arguments)
    load_drafter(head, TargetModel.load(str(target)))


def test_refused_resume_leaves_the_run_s_configuration(
    tmp_path: Path, arguments: list[str]
) -> None:
    """config.yaml describes the checkpoints beside it."""
    main(arguments)
    path = tmp_path / "out" / "config.yaml"
    before = path.read_text()
    with pytest.raises(ValueError, match="other settings"):
        main([*arguments, "--optim.lr=1e-5"])
    assert path.read_text() == before


def test_damaged_checkpoint_is_named(
    tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main([*arguments, "--run.save_every=0"])
    path = tmp_path / "out" / "checkpoints" / "step-000004" / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"step-000004 is damaged .* delete it"):
        main([*arguments, "--run.save_every=0"])


def test_head_file_holds_nothing_of_the_target(tmp_path: Path, arguments: list[str]) -> None:
    main([*arguments, "--drafter.shared_lm_head=true"])
    tensors = load_file(tmp_path / "out" / "head" / "model.safetensors")
    assert all(name.split(".")[0] in ("blocks", "confidence") for name in tensors)
    save_file(tensors, tmp_path / "copy.safetensors")
    assert (tmp_path / "copy.safetensors").stat().st_size < 40_000
