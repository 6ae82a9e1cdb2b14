"""A plan counts what a step allocates, writes nothing, and says what is missing."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drafters import TargetModel, build_drafter
from drafters.export import write_as
from recipes import dryrun, memory, train
from recipes.dryrun import HEAD, PASS, TARGET, StepTrace, measure_step, trace_step
from recipes.memory import (
    AVERAGE,
    ENGINE,
    STATES,
    TWIN,
    DoesNotFit,
    check_memory,
    launched,
    plan_memory,
    spill,
)
from recipes.plan import make_plan, parse_plan, plan_command, run
from recipes.shadow import COPIES, VOCABULARY, Shadow
from tests.tiny import save_tiny_target, tiny_target
from tests.zoo import zoo_target
from training.config import TrainConfig, parse_config
from training.store.encoding import predicted_bytes, row_tensors

VOCAB = 400


def configured(*flags: str, family: str = "eagle3", length: int = 64) -> TrainConfig:
    return parse_config(arguments(*flags, family=family, length=length))


def arguments(*flags: str, family: str = "eagle3", length: int = 64) -> list[str]:
    return [
        *("--target.name", "nowhere", "--data.train", "[nothing.jsonl]", "--run.out", "never"),
        *("--drafter.type", family, "--drafter.draft_vocab_size", "200"),
        *("--data.max_length", str(length)),
        *flags,
    ]


def config_of_target() -> Any:
    return llama().model.config


def llama() -> TargetModel:
    return tiny_target(torch.float32, hidden=64, vocab=VOCAB)


def measured(config: TrainConfig, make: Callable[[], TargetModel] = llama) -> StepTrace:
    """The same micro-batch with data, on the CPU, every tensor watched."""
    with Shadow(real=True) as shadow:
        with shadow.counting(TARGET):
            target = make()
        with shadow.counting(HEAD):
            fields = config.drafter.head_fields()
            drafter = build_drafter(config.drafter.family, target, **fields)
            counts = torch.zeros(target.vocab_size, dtype=torch.int64)
            drafter.set_draft_vocab(counts, start="random")
        return measure_step(shadow, config, target, drafter, accumulates=True)


@pytest.mark.parametrize(
    ("family", "length", "flags"),
    [
        ("eagle3", 48, ("--loss.steps", "2")),
        ("medusa", 600, ("--run.micro_batch_size", "2", "--run.batch_size", "4")),
        ("dflash", 96, ("--loss.anchors", "16", "--drafter.num_layers", "2")),
        ("medusa", 96, ("--lora.rank", "4", "--lora.start", "0.3")),
    ],
)
def test_a_dry_run_counts_what_a_real_step_allocates(
    family: str, length: int, flags: tuple[str, ...]
) -> None:
    config = configured(*flags, "--loss.chunk", "64", family=family, length=length)
    real, dry = measured(config), trace_step(config, config_of_target())
    assert (dry.trained, dry.target_bytes) == (real.trained, real.target_bytes)
    weights = sum(parameter.nbytes for parameter in llama().model.parameters())
    assert dry.target_bytes == weights, "a LoRA is not the target's own"
    assert (dry.lora_bytes == real.lora_bytes > 0) == bool(config.lora.rank)
    assert dry.target_flops == real.target_flops
    assert (dry.target_flops > 0) == (not config.lora.rank), "with a LoRA it runs inside the loss"
    assert dry.head_flops == pytest.approx(real.head_flops, rel=0.05)
    assert sum(dry.at_peak.values()) == pytest.approx(sum(real.at_peak.values()), rel=0.1)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("mixtral", ()),
        ("qwen3_moe", ("--lora.rank", "2")),
        ("olmoe", ()),
        ("gpt_oss", ("--target.attn_implementation", "eager")),
        ("deepseek_v3", ()),
    ],
)
def test_experts_in_float32_are_counted(name: str, flags: tuple[str, ...]) -> None:
    """Torch knows the shapes of what experts multiply in bfloat16 only."""
    head = ("--drafter.draft_vocab_size", "50", "--loss.steps", "1")
    config = configured(*head, *flags, length=96)
    real = measured(config, lambda: zoo_target(name, torch.float32))
    dry = trace_step(config, zoo_target(name, torch.float32).model.config)
    assert (dry.target_flops, dry.head_flops) == (real.target_flops, real.head_flops)
    assert (dry.target_flops or dry.lora_bytes) and dry.target_bytes == real.target_bytes
    assert sum(dry.at_peak.values()) == pytest.approx(sum(real.at_peak.values()), rel=0.1)


def test_the_counter_sees_what_comes_and_goes() -> None:
    with Shadow(real=True) as shadow, shadow.counting("mine"):
        kept = torch.zeros(1000)
        view = kept[10:]
        gone = torch.ones(500)
        del gone
        assert (shadow.now, shadow.peak) == (4000, 6000)
        assert shadow.at_peak == {"mine": 6000}
        del kept
        assert shadow.now == 4000  # the view holds it
        del view
        assert shadow.now == 0


def test_what_is_turned_down_takes_less() -> None:
    model, base = config_of_target(), ("--loss.steps", "1")
    plain = trace_step(configured(*base), model).at_peak
    chunked = trace_step(configured(*base, "--loss.chunk", "16"), model).at_peak
    assert chunked.get(VOCABULARY, 0) < 0.6 * plain[VOCABULARY]
    again = configured(*base, "--run.activation_checkpointing", "true", "--loss.chunk", "16")
    assert trace_step(again, model).at_peak[PASS] < chunked[PASS]
    larger = configured(*base, "--run.micro_batch_size", "2", "--run.batch_size", "4")
    assert trace_step(larger, model).at_peak[PASS] > 1.5 * plain[PASS]


@pytest.mark.parametrize("form", ["native", "sglang"])
def test_a_continued_head_of_any_dialect_has_the_shape_of_its_file(
    tmp_path: Path, form: str
) -> None:
    head = build_drafter("eagle3", llama(), draft_vocab_size=200)
    head.set_draft_vocab(torch.arange(VOCAB))
    write_as(form, head, tmp_path / "head")
    start = ("--drafter.init_from", str(tmp_path / "head"))
    continued = trace_step(configured(*start), config_of_target())
    new = trace_step(configured("--drafter.confidence_head", "false"), config_of_target())
    assert continued == new
    config = configured("--drafter.init_from", str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="nothing: no such folder"):
        trace_step(config, config_of_target())


def test_engines_share_out_what_they_say() -> None:
    config, without = (
        configured("--loss.steps", "1", *ema) for ema in (("--optim.ema", "0.9"), ())
    )
    trace = trace_step(config, config_of_target())
    w = trace.head_bytes
    one = plan_memory(config, trace).parts
    for engine, always in (("ddp", False), ("zero2", False), ("fsdp2", True), ("zero3", True)):
        plain = plan_memory(without, trace, 4, engine)
        averaged = plan_memory(config, trace, 4, engine)
        assert (averaged.parts[TWIN], plain.parts.get(TWIN, 0)) == (w, w * always), "is evaluated"
        extra = averaged.total - plain.total
        assert extra == averaged.parts[AVERAGE] + (w if not always else 0)
    assert (one[TWIN], TWIN in plan_memory(without, trace).parts) == (w, False)
    assert (one[HEAD], one[STATES], one.get(ENGINE)) == (w, 2 * w, None)
    ddp = plan_memory(config, trace, 4).parts
    assert (ddp[STATES], ddp[ENGINE]) == (2 * w, w)
    zero2 = plan_memory(config, trace, 4, "zero2").parts
    assert (zero2[HEAD], zero2[STATES]) == (w, 2 * w // 4)
    fsdp2 = plan_memory(config, trace, 4, "fsdp2").parts
    assert (fsdp2[HEAD], fsdp2[memory.AVERAGE]) == (w // 4, w // 4)
    muon = plan_memory(configured("--optim.name", "muon"), trace).parts
    assert muon[STATES] == 2 * w - trace.inner_bytes < one[STATES]


def test_a_target_in_parts() -> None:
    config = configured("--loss.steps", "1")
    trace = trace_step(config, config_of_target())
    whole = plan_memory(config, trace, 4).parts[TARGET]
    assert whole == trace.target_bytes
    tensor = configured("--target.parallel", "tensor")
    assert trace.borrowed * 4 < plan_memory(tensor, trace, 4).parts[TARGET] < whole
    spread = configured("--target.device_map", "auto")
    plan = plan_memory(spread, trace)
    rest = plan.total - plan.parts[TARGET]
    spilt = spill(plan, trace, plan.total - 1000, rest / 1e9)
    assert (spilt.total, spilt.host) == (plan.total - 1000, 1000)
    assert spill(plan, trace, plan.total - 1000, 0.0).host == 0, "nothing is kept free unasked"
    assert spill(plan, trace, 0, 0.0).total > 0, "what is borrowed stays"


def test_gradients_alone_can_be_the_peak() -> None:
    config = configured("--loss.steps", "1")
    trace = replace(trace_step(config, config_of_target()), at_peak={PASS: 10})
    assert plan_memory(config, trace).parts[COPIES] == trace.head_bytes - 10


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder that holds nothing but the target's config.json."""
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_text(config_of_target().to_json_string(use_diff=False))
    return folder


def test_a_plan_needs_a_config_only_and_writes_nothing(
    bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    flags = ("--target.name", str(bare), "--run.out", str(out), "--loss.steps", "1")
    plan_command(["--plan", *arguments(*flags), "--device-gb", "24"])
    printed = capsys.readouterr().out.splitlines()
    plan = json.loads(printed[-1])
    assert plan["fits"] and plan["steps"] is None and plan["data"]["rows"] is None
    assert "not a local file" in plan["data"]["note"]
    assert plan["peak_gb"] == pytest.approx(sum(plan["parts_gb"].values()))
    assert plan["seconds_per_step"] > 0 and "TFLOP/s" in plan["seconds_from"]
    assert str(out / "head") in " ".join(plan["files"])
    assert any(line.startswith("memory") for line in printed)
    assert sorted(tmp_path.rglob("*")) == [bare, bare / "config.json"]


def test_the_training_command_plans(
    bare: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = arguments("--target.name", str(bare), "--loss.steps", "1")
    monkeypatch.setattr(sys, "argv", ["recipes.train", "--plan", *flags])
    train.run()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["fits"]


def test_what_cannot_fit_says_so(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = arguments("--target.name", str(bare), "--loss.steps", "1")
    with pytest.raises(SystemExit) as stopped:
        run(["--plan", *flags, "--device-gb", "0.001"])
    assert stopped.value.code == 2
    found = capsys.readouterr()
    assert not json.loads(found.out.splitlines()[-1])["fits"]
    assert "does not fit" in found.err and "largest part" in found.err and "try" in found.err


def test_data_and_weights_that_are_there_are_used(tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path / "target", torch.float32)
    rows = [{"messages": chat(f"question {i}", "an answer " * (1 + i % 3))} for i in range(12)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--target.name", str(folder), "--data.train", f"[{data}]", "--run.batch_size", "2")
    head = ("--drafter.draft_vocab_size", "null", "--drafter.draft_vocab_coverage", "0.9")
    options, config = parse_plan(["--plan", *arguments(*flags, *head, "--loss.steps", "1")])
    plan = make_plan(options, config)
    counted = plan["data"]
    letters = sum(len("an answer " * (1 + i % 3)) for i in range(12))
    assert counted["exact"] and counted["rows"] == 12
    assert letters <= counted["supervised_tokens"] + 12 <= letters + 36  # trimmed ends, end tokens
    assert plan["steps"] == max(1, counted["sequences"] // 2)
    assert "2 micro-batches and an optimizer step timed here" in plan["seconds_from"]
    assert "the target's pass" in plan["seconds_from"]
    tensors = row_tensors([2, 3, 4], 32, "fp8")
    wanted = predicted_bytes(tensors, 12, counted["tokens"]) / 1e9
    assert plan["disk_gb"]["features_fp8"] == pytest.approx(wanted)


def test_before_the_answers_there_is_a_bound(tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path / "target", torch.float32)
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"ask {i}"}) + "\n" for i in range(5)))
    flags = ("--target.name", str(folder), "--data.train", f"[{data}]", "--data.regenerate", "true")
    more = ("--data.answer_tokens", "20", "--loss.steps", "1", "--drafter.draft_vocab_size", "null")
    options, config = parse_plan(["--plan", *arguments(*flags, *more), "--timed-steps", "0"])
    plan = make_plan(options, config)
    assert plan["data"]["supervised_tokens"] == 100 and not plan["data"]["exact"]
    assert any("answers.jsonl" in path for path in plan["files"])


def chat(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--engine", "zero2"), "no effect on one process"),
        (("--processes", "0"), "at least 1"),
        (("--processes", "2"), "must be a multiple"),
    ],
)
def test_flags_of_a_plan_are_checked(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_plan(["--plan", *arguments(), *flags])


def test_the_launcher_says_how_many_and_which(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched() == (1, "ddp")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    assert launched() == (4, "zero3")


def test_a_run_is_refused_before_it_starts(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured("--loss.steps", "1", "--target.name", str(bare))
    device = torch.device("cpu")
    monkeypatch.setattr(memory, "device_memory", lambda device: (10**6, 10**6))
    assert check_memory(config, device) is None  # so small that nothing is predicted
    monkeypatch.setattr(memory, "SMALL_TARGET", 0)
    with pytest.raises(DoesNotFit, match="largest part is"):
        check_memory(config, device)
    monkeypatch.setattr(memory, "device_memory", lambda device: (0, 10**11))
    warning = check_memory(config, device)
    assert warning is not None and "are free" in warning
    monkeypatch.setattr(memory, "device_memory", lambda device: (10**11, 10**11))
    assert check_memory(config, device) is None


def test_a_refusal_names_the_way_past_it(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--loss.steps", "1", "--target.name", str(bare))
    monkeypatch.setattr(memory, "device_memory", lambda device: (10**6, 10**6))
    monkeypatch.setattr(memory, "SMALL_TARGET", 0)
    device = torch.device("cpu")
    with pytest.raises(DoesNotFit, match=r"run\.memory_check=warn starts it"):
        check_memory(configured(*flags), device)
    warned = check_memory(configured(*flags, "--run.memory_check", "warn"), device)
    assert warned is not None and "does not fit into" in warned and "=warn" not in warned
    monkeypatch.setattr(memory, "trace_step", None)  # nothing is predicted
    assert check_memory(configured(*flags, "--run.memory_check", "off"), device) is None
    with pytest.raises(ValueError, match=r"run\.memory_check must be one of"):
        configured("--run.memory_check", "sometimes")


@pytest.mark.parametrize("where", ["measure_step", "_model"])
def test_what_fails_without_data_stops_no_run(
    bare: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: str,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise problem

    problem: Exception = RuntimeError("no such kernel\nat: somewhere")
    monkeypatch.setattr(dryrun, where, fail)
    monkeypatch.setattr(memory, "SMALL_TOKENS", 0 if where == "measure_step" else 4096)
    flags = ("--loss.steps", "1", "--target.name", str(bare))
    found = check_memory(configured(*flags), torch.device("cpu"))
    assert found == "memory could not be predicted: RuntimeError: no such kernel"
    with pytest.raises(SystemExit):
        run(["--plan", *arguments(*flags)])
    assert "error: memory could not be predicted" in capsys.readouterr().err
    problem = ValueError("drafter.x is wrong")
    with pytest.raises(ValueError, match="x is wrong"):
        check_memory(configured(*flags), torch.device("cpu"))


def written(folder: Path) -> int:
    """Bytes of all tensors, without the headers of their files."""
    files = [path for path in folder.rglob("*.safetensors") if path.stem != "golden"]
    return sum(tensor.nbytes for path in files for tensor in load_file(path).values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [("--lora.rank", "4"), ("--optim.ema", "0.9"), ("--optim.name", "muon"), ()],
    ids=["lora", "ema", "muon", "plain"],
)
def test_a_run_writes_what_its_plan_says(
    tmp_path: Path, fresh_accelerate: None, flags: tuple[str, ...]
) -> None:
    folder = save_tiny_target(tmp_path / "target", torch.float32)
    rows = [{"prompt_ids": [5, 6, 7], "answer_ids": list(range(10, 30))} for _ in range(8)]
    data, out = tmp_path / "rows.jsonl", tmp_path / "out"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [
        *("--target.name", str(folder), "--data.train", f"[{data}]", "--target.device", "cpu"),
        *("--drafter.draft_vocab_size", "null", "--loss.steps", "1", "--run.steps", "2"),
        *("--run.save_every", "1", "--run.keep", "3", "--run.parity", "false"),
        *("--run.out", str(out), *flags),
    ]
    options, config = parse_plan(["--plan", *arguments(*given)])
    plan = make_plan(options, config)
    train.main(arguments(*given))
    names = ["head", "checkpoints", *(["lora", "target"] if config.lora.rank else [])]
    assert {f"{out}/{name}/" for name in names} <= set(plan["files"])
    assert plan["disk_gb"]["run"] * 1e9 == pytest.approx(written(out), rel=0.002)
