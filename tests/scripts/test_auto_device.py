"""`--engine device` in the commands: sizes that are chosen, and answers that stream."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from drafters import TargetModel
from inference.engines import DeviceEngine
from inference.generate import plain_generate, speculative_generate
from inference.static import size_costs
from inference.static.size_costs import RoundTable
from inference.static.sizes import PLAIN, SizedProposer
from scripts import auto_device
from scripts.auto_decided import keep_learnt
from scripts.common import load_target
from scripts.drafting import load_proposer
from tests.scripts.heads import save_models
from tests.scripts.test_chat import make_chat, plain_answer
from tests.scripts.test_drafting import model_args, without_head
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return save_models(tmp_path_factory.mktemp("models"))


def as_if_in_a_second(engine: DeviceEngine, run: Callable[[], object]) -> float:
    """Rounds are run, but drafts pay whatever else the machine does."""
    run()
    return 1.0


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_device, "CONTEXTS", (16,))
    monkeypatch.setattr(size_costs, "BUDGET", 0.0)
    monkeypatch.setattr(size_costs, "REPEATS", 1)
    monkeypatch.setattr(size_costs, "timed", as_if_in_a_second)


@pytest.mark.usefixtures("quick")
def test_auto_measures_rounds_and_decodes_the_same_text(models: list[str]) -> None:
    options = ["--size", "auto", "--depth", "2", "--branch", "2"]
    args = model_args(models, *options)
    target = load_target(args)
    engine = DeviceEngine(target)
    proposer = load_proposer(args, target, engine, batch_size=2)
    assert isinstance(proposer, SizedProposer)
    kept = Path(args.head) / "rounds-device-match-greedy.json"
    table = RoundTable.load(kept)
    assert table.forms == {PLAIN, (1, 1, 2), (2, 1, 3), (2, 2, 8), (2, 2, 16), (2, 2, 32)}
    assert {batch for _, _, batch in table.points} == {1, 2}
    assert args.size == "auto" and args.depth == 2
    prompts = [[5, 6, 7], [9, 8]]
    found = speculative_generate(target, proposer, prompts, max_new_tokens=30, engine=engine)
    assert found.sequences == plain_generate(target, prompts, max_new_tokens=30).sequences
    before = kept.stat().st_mtime_ns
    load_proposer(model_args(models, *options), target, engine, batch_size=2)
    assert kept.stat().st_mtime_ns == before, "measured once"
    learnt = kept.with_name("survival-greedy.json")
    assert not learnt.exists()
    keep_learnt(proposer)
    counts = json.loads(learnt.read_text(encoding="utf-8"))["arms"]["head"]["tried"]
    again = load_proposer(model_args(models, *options), target, engine, batch_size=2)
    assert isinstance(again, SizedProposer)
    again.chooser.start("match", 0.0, 2)
    assert sum(map(sum, counts)) > 0, "and the next run starts from it"
    assert again.chooser._controller.estimates["head"].prior.rounds[0][0] == counts[0][0]


@pytest.mark.usefixtures("quick")
def test_rounds_are_measured_with_the_warpers_that_they_have(models: list[str]) -> None:
    args = model_args(models, "--size", "auto", "--depth", "1", "--branch", "1")
    args.temperature, args.top_p = 1.0, 0.8
    target = load_target(args)
    load_proposer(args, target, DeviceEngine(target))
    table = RoundTable.load(Path(args.head) / "rounds-device-match-sampled.json")
    assert table.key.engine == "device match sampled top_p one_hot"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--rule", "block", "--branch", "1", "--temperature", "1"], "one of the rules match"),
        (["--costs", "/nowhere/costs.json"], "/nowhere cannot be written to"),
    ],
)
def test_auto_says_what_the_device_cannot_do(
    models: list[str], more: list[str], message: str
) -> None:
    args = model_args(models, "--size", "auto", *more)
    target = load_target(args)
    with pytest.raises(ValueError, match=message):
        load_proposer(args, target, DeviceEngine(target))


def test_copied_drafts_are_the_hosts(models: list[str]) -> None:
    args = without_head(models, "--size", "auto", "--proposer", "ngram")
    target = load_target(args)
    with pytest.raises(ValueError, match="engine device drafts with trained heads alone"):
        load_proposer(args, target, DeviceEngine(target))


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


@pytest.mark.parametrize("trace", [False, True])
def test_answers_stream_from_the_device(target: TargetModel, trace: bool) -> None:
    written: list[str] = []
    chat = make_chat(target, written, trace)
    chat.engine = DeviceEngine(target)
    assert chat.answer("hello")
    assert chat.messages[-1]["content"] == plain_answer(
        target, [{"role": "user", "content": "hello"}]
    )
    assert len(written) > 4, "it came in one piece"
    assert "acceptance length" in written[-1]
    if trace:
        rounds = [line.split() for line in "".join(written).splitlines() if line[:1].isdigit()]
        assert [int(number) for number, *_ in rounds] == list(range(1, len(rounds) + 1))
        assert all("/" in counts for _, counts, *_ in rounds)
