"""Every launch file is one that accelerate reads, and starts what it is named after."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "recipes" / "launch"
TYPES = {
    "cpu": "NO",
    "single_gpu": "NO",
    "ddp": "MULTI_GPU",
    "fsdp2": "FSDP",
    "zero2": "DEEPSPEED",
    "zero3": "DEEPSPEED",
    "multi_node": "MULTI_GPU",
}
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]


def test_every_file_is_known() -> None:
    assert {path.stem for path in LAUNCH.glob("*.yaml")} == set(TYPES)


@pytest.mark.parametrize("name", TYPES)
def test_accelerate_reads_it(name: str) -> None:
    path = LAUNCH / f"{name}.yaml"
    found: Any = load_config_from_file(str(path))
    assert found.distributed_type.value == TYPES[name]
    assert found.use_cpu == (name == "cpu")
    assert (found.num_machines > 1) == (name == "multi_node")
    # Arithmetic, optimizer, clipping and batch sizes are the recipe's.
    assert found.mixed_precision is None
    settings = found.deepspeed_config or {}
    assert not {"gradient_clipping", "deepspeed_config_file"} & set(settings)
    assert f"recipes/launch/{name}.yaml" in path.read_text(), "the comment says how to use it"


def test_fsdp_keys_have_an_effect() -> None:
    """The engine shards with torch's own ``fully_shard``, which reads none of the other keys."""
    found: Any = load_config_from_file(str(LAUNCH / "fsdp2.yaml"))
    assert set(found.fsdp_config) == {"fsdp_version", "fsdp_cpu_ram_efficient_loading"}
    parser = launch_command_parser()
    for name, value in found.fsdp_config.items():
        assert parser.get_default(name) != str(value).lower(), f"{name} is accelerate's default"


@pytest.mark.parametrize("name", TYPES)
def test_the_command_line_of_its_comment_parses(name: str) -> None:
    """As `accelerate launch` merges file and options, before it starts anything."""
    arguments = [
        "--config_file",
        str(LAUNCH / f"{name}.yaml"),
        "-m",
        "recipes.train",
        "--config",
        "x",
    ]
    if name == "multi_node":
        more = "--num_machines 3 --num_processes 24 --machine_rank 2 --main_process_ip 10.0.0.1"
        more += " --rdzv_backend c10d"
        arguments = [*more.split(), *arguments]
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    assert args.module and args.training_script == "recipes.train"
    assert args.training_script_args == ["--config", "x"]
    kinds = {"FSDP": args.use_fsdp, "DEEPSPEED": args.use_deepspeed, "MULTI_GPU": args.multi_gpu}
    assert [kind for kind, on in kinds.items() if on] == [
        kind for kind in kinds if kind == TYPES[name]
    ]
    if name == "fsdp2":
        assert args.fsdp_version == 2
        assert args.fsdp_cpu_ram_efficient_loading is False, "targets would be without weights"
    if name.startswith("zero"):
        assert args.zero_stage == int(name[-1])
    if name == "zero3":
        assert args.zero3_init_flag is False, "the target would be cut up while it loads"
    if name == "multi_node":
        assert (args.num_machines, args.machine_rank, args.rdzv_backend) == (3, 2, "c10d")
        assert args.main_process_ip == "10.0.0.1"


def start(arguments: list[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*ACCELERATE, *arguments],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment},
    )


def lines(*runs: subprocess.Popen[str]) -> list[dict[str, Any]]:
    found = []
    for run in runs:
        try:
            stdout, stderr = run.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            run.terminate()  # torchrun ends its processes with it
            raise
        assert run.returncode == 0, stderr[-3000:]
        found += [json.loads(line) for line in stdout.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda line: line["rank"])


def free_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu", "ddp", "fsdp2"])
def test_processes_without_a_gpu(name: str) -> None:
    """Files for GPUs start as many CPU processes where there is none."""
    port = ["--main_process_port", free_port()]
    arguments = ["--config_file", str(LAUNCH / f"{name}.yaml"), *port]
    found = lines(start([*arguments, "-m", "tests.recipes.launched", "cpu"]))
    assert [line["rank"] for line in found] == ([0] if name == "cpu" else [0, 1])
    assert {line["type"] for line in found} == {"NO" if name == "cpu" else "MULTI_CPU"}
    assert {line["fsdp"] for line in found} == {name == "fsdp2"}
    if name == "fsdp2":
        assert {line["fsdp_version"] for line in found} == {"2"}
        assert {line["empty_targets"] for line in found} == {"false"}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_without_a_gpu(stage: int) -> None:
    pytest.importorskip("deepspeed")
    arguments = ["--config_file", str(LAUNCH / f"zero{stage}.yaml"), "--num_processes", "1"]
    arguments += ["--main_process_port", free_port(), "-m", "tests.recipes.launched"]
    (line,) = lines(start(arguments, DS_ACCELERATOR="cpu"))
    assert line["type"] == "DEEPSPEED"
    assert line["zero"]["zero_optimization"]["stage"] == stage
    assert not {"optimizer", "scheduler"} & set(line["zero"])


@pytest.mark.slow
def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_two_machines_meet() -> None:
    """Both are this one: each is told its rank and where the first is."""
    port = free_port()
    place = ["--main_process_ip", "127.0.0.1", "--main_process_port", port]
    place += ["--rdzv_backend", "c10d"]
    size = ["--num_machines", "2", "--num_processes", "2"]
    file = ["--config_file", str(LAUNCH / "multi_node.yaml")]
    runs, deadline = [], time.time() + 120
    for rank in ("0", "1"):
        worker = ["--machine_rank", rank, "-m", "tests.recipes.launched", "cpu"]
        runs.append(start([*file, *size, *place, *worker]))
        # accelerate refuses the first machine a port that is open, and here the second may open it
        while not is_open(int(port)) and runs[0].poll() is None and time.time() < deadline:
            time.sleep(0.1)
    found = lines(*runs)
    assert [(line["rank"], line["processes"]) for line in found] == [(0, 2), (1, 2)]


def test_no_file_holds_what_accelerate_reads_from_the_command_line_only() -> None:
    parser = launch_command_parser()
    silent = {"rdzv_backend", "same_network"}
    assert all(parser.get_default(name) is not None for name in silent), "now it reads the file"
    for path in LAUNCH.glob("*.yaml"):
        assert not silent & {line.split(":")[0] for line in path.read_text().splitlines()}


def test_the_slurm_file_is_a_shell_script() -> None:
    assert subprocess.run(["bash", "-n", str(LAUNCH / "slurm.sh")], check=False).returncode == 0


SRUN = """
import os, pathlib, signal, subprocess, sys, psutil
here = pathlib.Path(os.environ["HERE"])
at = sys.argv.index("bash")
(here / "options").write_text("\\n".join(sys.argv[1:at]))

def kill(*_):
    for process in psutil.Process().children(recursive=True):
        process.kill()

signal.signal(signal.SIGTERM, kill)
# One node: its task runs here.
task = subprocess.Popen(sys.argv[at:], env={**os.environ, "SLURM_NODEID": "0"})
(here / "srun-pid").write_text(str(os.getpid()))
sys.exit(task.wait())
"""
SCANCEL = """
import os, pathlib, sys, psutil
assert sys.argv[1:] == ["--signal=TERM", os.environ["SLURM_JOB_ID"]], sys.argv
srun = psutil.Process(int((pathlib.Path(os.environ["HERE"]) / "srun-pid").read_text()))
for process in srun.children(recursive=True):
    process.terminate()
"""
SCONTROL = """
import os, pathlib, sys
if sys.argv[1] == "show":
    print("127.0.0.1")
else:
    (pathlib.Path(os.environ["HERE"]) / "asked").write_text(" ".join(sys.argv[1:]))
"""
STUBS = {"srun": SRUN, "scancel": SCANCEL, "scontrol": SCONTROL}
"""Slurm's commands: a SIGTERM to srun itself kills the tasks, scancel's reaches them alone."""
WAITING = """
import signal, sys, time, pathlib
from accelerate import PartialState
state, stopped, here = PartialState(cpu=True), [], pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
(here / f"ready-{state.process_index}").touch()
while not stopped:
    time.sleep(0.05)
time.sleep(1)  # the step in progress and its checkpoint
(here / f"saved-{state.process_index}").write_text(" ".join(sys.argv[2:]))
state.destroy_process_group()
sys.exit(130)
"""


def slurm_job(folder: Path, *arguments: str, **environment: str | None) -> subprocess.Popen[str]:
    """``slurm.sh`` with stand-ins for Slurm's commands, in a folder.

    Args:
        folder: to run in; what the stand-ins were told is written there.
        arguments: of the script.
        environment: of the job, beside Slurm's; None leaves a variable out.
    """
    for name, body in STUBS.items():
        stub = folder / name
        stub.write_text(f"#!{sys.executable}{body}")
        stub.chmod(0o755)
    wanted: dict[str, str | None] = {
        **os.environ,
        "HERE": str(folder),
        "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "LAUNCH": str(LAUNCH / "multi_node.yaml"),
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "node[1]",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_CPUS_PER_TASK": "4",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    return subprocess.Popen(
        ["bash", str(LAUNCH / "slurm.sh"), *arguments],
        cwd=folder,
        env={name: value for name, value in wanted.items() if value is not None},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("cpus", ["4", None])
def test_slurm_steps_get_the_cores_of_the_job(tmp_path: Path, cpus: str | None) -> None:
    """And a failure is the job's; it is not queued again."""
    accelerate = tmp_path / "accelerate"
    accelerate.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\nexit 3\n')
    accelerate.chmod(0o755)
    job = slurm_job(tmp_path, "--run.out", "a b", SLURM_CPUS_PER_TASK=cpus)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 3, output
    options = (tmp_path / "options").read_text().splitlines()
    assert options == ["--kill-on-bad-exit=1", *([f"--cpus-per-task={cpus}"] if cpus else [])]
    assert output.splitlines()[:3] == ["launch", "--machine_rank", "0"]
    assert output.splitlines()[-4:] == ["-m", "recipes.train", "--run.out", "a b"]
    assert not (tmp_path / "asked").exists()


@pytest.mark.slow
def test_slurm_stops_early_saves_and_queues_again(tmp_path: Path) -> None:
    """The script itself, with stand-ins for Slurm's commands and for the training."""
    package = tmp_path / "recipes"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text(WAITING)
    number = str(int(free_port()) % 20000)
    job = slurm_job(tmp_path, str(tmp_path), "--run.out", "a b", SLURM_JOB_ID=number)
    deadline = time.time() + 300
    while len(list(tmp_path.glob("ready-*"))) < 2 and time.time() < deadline:
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.2)
    job.send_signal(signal.SIGTERM)  # to the script alone, as --signal=B: does
    try:
        output, _ = job.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.kill(int((tmp_path / "srun-pid").read_text()), signal.SIGTERM)  # and all its tasks
        raise
    saved = sorted(path.name for path in tmp_path.glob("saved-*"))
    assert saved == ["saved-0", "saved-1"], output
    assert (tmp_path / "saved-0").read_text() == "--run.out a b"
    assert (tmp_path / "asked").read_text() == f"requeue {number}"
    assert job.returncode != 0
