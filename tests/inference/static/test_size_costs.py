"""What whole rounds cost: measured, kept on disk, and what is chosen by it."""

from dataclasses import replace
from pathlib import Path

import pytest

from inference.generate import plain_generate, speculative_generate
from inference.proposers import build_proposer
from inference.sampling import SamplingParams
from inference.scheduling.costs import MachineKey
from inference.scheduling.schedule import plain_step
from inference.static import size_costs
from inference.static.decoding import DeviceEngine
from inference.static.draft_mtp import MtpDraft
from inference.static.size_costs import (
    RoundTable,
    behind,
    fastest_proposer,
    measured_rounds,
    on_a_line,
)
from inference.static.sizes import PLAIN, Form, sizes_of
from tests.inference.static.test_draft_rounds import head_of
from tests.inference.static.test_rounds import NO_END, PROMPTS

FORMS: list[Form] = [(1, 1, 2), (3, 3, 12)]
KEY = MachineKey("cpu", 1, "cpu", "2", "float32", "t", "device match greedy")


def table(**points: float) -> RoundTable:
    """Seconds by name: plain, chain and tree, at P = 100 and twice as much at P = 300, B = 1."""
    forms = dict(zip(("plain", "chain", "tree"), (PLAIN, *FORMS), strict=True))
    found = {}
    for name, value in points.items():
        found |= {(forms[name], 100, 1): value, (forms[name], 300, 1): 2 * value}
    return RoundTable(KEY, found)


def test_seconds_lie_on_lines() -> None:
    assert on_a_line({4: 2.0}, 99) == 2.0
    points = {10: 1.0, 20: 3.0, 40: 2.0}
    expected = {1: 1.0, 10: 1.0, 15: 2.0, 20: 3.0, 30: 2.5, 40: 2.0, 80: 2.0}
    assert {x: on_a_line(points, x) for x in expected} == expected
    assert on_a_line({10: 1.0, 20: 3.0}, 30) == 5.0
    found = table(plain=1.0, chain=1.5, tree=2.0)
    assert found.seconds(FORMS[1], 200, 1) == 3.0 and found.seconds(PLAIN, 100, 4) == 1.0
    step = plain_step(found, 200.0)
    assert (step.tokens, step.seconds) == (1.0, 1.5)


def test_tables_without_holes() -> None:
    with pytest.raises(ValueError, match="and the plain step"):
        table(chain=1.0, tree=2.0)
    whole = table(plain=1.0, tree=2.0)
    with pytest.raises(ValueError, match="at every context"):
        RoundTable(KEY, dict(list(whole.points.items())[:-1]))
    with pytest.raises(ValueError, match="above 0"):
        table(plain=0.0)


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    found = table(plain=1.0, chain=1.5, tree=2.0)
    found.save(tmp_path / "rounds.json")
    assert RoundTable.load(tmp_path / "rounds.json") == found
    (tmp_path / "other.json").write_text('{"format": 9}')
    with pytest.raises(ValueError, match=r"other\.json holds no table of rounds"):
        RoundTable.load(tmp_path / "other.json")


@pytest.mark.parametrize("name", ["eagle3", "medusa", "mtp 3"])
def test_rounds_are_measured_and_decode_afterwards(name: str) -> None:
    """By the rounds that a call uses, which forget the measuring."""
    head = head_of(name)
    engine, said = DeviceEngine(head.target), list[str]()
    proposer = build_proposer(head)
    found = measured_rounds(
        engine,
        proposer,
        FORMS,
        contexts=(20, 60),
        batches=(1, 3),
        budget_seconds=0,
        say=said.append,
    )
    assert found.points.keys() == {
        (form, p, b) for form in [PLAIN, *FORMS] for p in (20, 60) for b in (1, 3)
    }
    assert any("plain step" in line for line in said)
    assert not engine._rounds
    decoded = speculative_generate(
        head.target,
        fastest_proposer(proposer, found),
        PROMPTS,
        max_new_tokens=40,
        stop=NO_END,
        engine=engine,
    )
    plain = plain_generate(head.target, PROMPTS, max_new_tokens=40, stop=NO_END)
    assert decoded.sequences == plain.sequences


def test_a_table_of_this_machine_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = build_proposer(head_of("eagle3"))
    engine, path = DeviceEngine(head_of("eagle3").target), tmp_path / "rounds-device.json"
    measured: list[str] = []

    def measuring(*arguments: object) -> dict[tuple[Form, int], float]:
        measured.append(str(arguments[4]))
        return {(form, p): 1.0 for form in [PLAIN, *FORMS] for p in (128, 1024)}

    monkeypatch.setattr(size_costs, "_measured", measuring)
    first = measured_rounds(engine, head, FORMS, path)
    assert measured_rounds(engine, head, FORMS, path) == first
    fewer = measured_rounds(engine, head, FORMS[:1], path)
    assert fewer.forms == {PLAIN, FORMS[0]}, "what was not asked for is not drafted"
    assert fewer.seconds(FORMS[0], 300, 1) == first.seconds(FORMS[0], 300, 1)
    assert len(measured) == 1
    measured_rounds(engine, head, [*FORMS, (2, 1, 3)][:2], path, rule="coupled")
    assert measured == ["match", "coupled"]
    for more in ({"batches": (1, 4)}, {"sampling": SamplingParams(0.7, top_p=0.9)}):
        measured_rounds(engine, head, FORMS, path, **more)
    assert len(measured) == 5
    other = RoundTable.load(path)
    RoundTable(replace(other.key, torch="9"), other.points).save(path)
    measured_rounds(engine, head, FORMS, path, sampling=SamplingParams(0.7, top_p=0.9))
    assert len(measured) == 6
    for draws in ("all", "one", "none"):  # three kinds of trees
        head.options = replace(head.options, draws=draws)
        for _ in range(2):
            measured_rounds(
                engine, head, FORMS, path, rule="rejection", sampling=SamplingParams(1.0)
            )
    assert len(measured) == 9


@pytest.mark.parametrize("text", ["", "{}", '{"format": 9}', '{"format": 1, "rounds": [[1]]}'])
def test_a_damaged_table_is_measured_anew(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, said = build_proposer(head_of("eagle3")), list[str]()
    engine, path = DeviceEngine(head_of("eagle3").target), tmp_path / "rounds-device.json"
    points = {(form, p): 1.0 for form in [PLAIN, *FORMS] for p in (128, 1024)}
    monkeypatch.setattr(size_costs, "_measured", lambda *arguments: points)
    path.write_text(text)
    found = measured_rounds(engine, head, FORMS, path, say=said.append)
    assert "no table of rounds" in said[0] and RoundTable.load(path) == found


def test_a_read_only_folder_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    head = build_proposer(head_of("eagle3"))
    engine = DeviceEngine(head_of("eagle3").target)
    with pytest.raises(ValueError, match="cannot be written to"):
        measured_rounds(engine, head, FORMS, tmp_path / "none" / "rounds.json")


def test_measured_texts_are_as_long_as_they_say() -> None:
    head = build_proposer(head_of("mtp 3"))
    engine = DeviceEngine(head_of("mtp 3").target)
    params = [SamplingParams()] * 2
    rounds = engine.rounds_for(head, sizes_of(head, FORMS), params, "match", 1, 200)
    behind(rounds, 100)
    assert rounds.state.lengths.tolist() == [100, 100]
    assert isinstance(rounds.drafter, MtpDraft)
    assert rounds.drafter._committed.tolist() == [99, 99]
    assert [report.ended for report in rounds.run(1)] == [0, 0]


def test_the_table_decides() -> None:
    head = build_proposer(head_of("eagle3"))
    dear = fastest_proposer(head, table(plain=1.0, chain=9.0, tree=9.0))
    assert [(o.longest, o.top_k, o.size) for o in dear.sizes] == FORMS
    dear.chooser.start("match", 0.0, 1)
    assert dear.chooser.choose(100.0, 1, 9) is None
    free = fastest_proposer(head, table(plain=1.0, chain=1.0, tree=1.001))
    free.chooser.start("match", 0.0, 1)
    assert free.chooser.choose(100.0, 1, 9) == 1
