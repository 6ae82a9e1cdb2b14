"""scripts.benchmark_workers and scripts.benchmark_transformers: equal texts, equal settings."""

from pathlib import Path
from typing import Any

import pytest
import torch

from drafters import TargetModel
from inference.proposers import HeadProposer
from inference.proposers.ngram import NgramProposer
from inference.proposers.suffix import SuffixProposer
from scripts.benchmark_contenders import parse_contender
from scripts.benchmark_protocol import Answer, Handler, respond
from scripts.benchmark_transformers import Compiled, Generate, cut, padded
from scripts.benchmark_workers import Ours, build, opened, parts_of, proposer_maker
from tests.scripts.heads import save_models
from tests.tiny import tiny_target

PROMPTS = [[5, 6, 7, 5, 6], [11, 12, 13, 11], [20] * 9]
NEW = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    save_models(folder)
    return folder


def handler(folder: Path, text: str) -> Any:
    """The worker of a contender, in this process."""
    found = parse_contender(text)
    model = {"target": str(folder / "target"), "dtype": "float64", "device": "cpu", "threads": None}
    settings = {"name": text, "contender": found.to_dict()}
    return build({**settings, "model": {**model, "chat_template": None}})


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    plain = handler(folder, "plain")
    return [plain.decode([prompt], NEW).tokens[0] for prompt in PROMPTS]


def check(answer: Answer) -> None:
    """Figures that any answer must have."""
    assert 0 < answer.prefill < answer.seconds
    later = sum(map(len, answer.tokens)) - answer.first
    if answer.rounds is not None:
        assert sum(emitted for *_, emitted in answer.rounds) == later
    if answer.parts:
        assert sum(answer.parts.values()) == pytest.approx(answer.seconds - answer.prefill, rel=0.2)


@pytest.mark.parametrize(
    "text",
    [
        "prompt-lookup:length=4",
        "assisted:first=3:length=4",
        "assisted:first=3",
        "early-exit:first=3:length=4",
        "ours",
        "ours:ngram",
        "ours:suffix:8:depth=3",
        "ours:layer-skip:exit-layer=2",
        "ours:as-early-exit:first=3:length=4",
        "ours:HEAD:chain:4",
        "ours:engine=eager",
        "ours:ngram:engine=packed",
        "ours:HEAD:chain:4:engine=device",
    ],
)
def test_texts_are_those_of_plain_decoding(
    folder: Path, expected: list[list[int]], text: str
) -> None:
    worker = handler(folder, text.replace("HEAD", str(folder / "head")))
    worker.warm_up([[6, 5, 7]], 9, NEW)
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        answer = worker.decode([prompt], NEW)
        assert answer.tokens == [tokens]
        check(answer)


@pytest.mark.parametrize(
    "text", ["plain", "ours", "ours:ngram", "ours:as-assisted:first=3:length=2"]
)
def test_a_batch_of_several_lengths_gives_the_same(
    folder: Path, expected: list[list[int]], text: str
) -> None:
    worker = handler(folder, text)
    worker.warm_up([ids[::-1] for ids in PROMPTS], 9, NEW)
    answer = worker.decode(PROMPTS, NEW)
    assert answer.tokens == expected
    assert answer.first == len(PROMPTS)
    check(answer)


def test_compiled_decoding_without_its_compiler(
    folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop, the static cache and the padding; what Inductor adds is in the slow test."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    worker = handler(folder, "plain-compiled")
    assert isinstance(worker, Compiled)
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        worker.warm_up([prompt[::-1]], 9, NEW)
        assert worker.decode([prompt], NEW).tokens == [tokens]
    worker.warm_up([ids[::-1] for ids in PROMPTS], 9, NEW)
    answer = worker.decode(PROMPTS, NEW)
    assert answer.tokens == expected
    check(answer)
    assert [len(text) for text in worker.decode(PROMPTS, 1).tokens] == [1, 1, 1]


@pytest.mark.slow
def test_compiled_decoding_compiles_once() -> None:
    target = tiny_target(layers=1)
    compiled, plain = Compiled(target), Generate(target, {})
    compiled.warm_up([PROMPTS[2][::-1]], 9, NEW)
    with torch.compiler.set_stance("fail_on_recompile"):
        for prompt in PROMPTS:
            expected = plain.decode([prompt], NEW).tokens
            assert compiled.decode([prompt], NEW).tokens == expected


@pytest.mark.parametrize("text", ["plain", "plain-compiled", "ours", "ours:ngram", "prompt-lookup"])
def test_an_end_of_text_ends_it(
    folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """A token that the text holds is made its end."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    end = expected[0][4]
    worker = handler(folder, text)
    worker.target.model.generation_config.eos_token_id = [end]
    assert list(worker.target.eos_token_ids) == [end], "else the test says nothing"
    worker.warm_up([PROMPTS[0][::-1]], 9, NEW)
    assert worker.decode(PROMPTS[:1], NEW).tokens == [cut(expected[0], [end])]


@pytest.mark.parametrize("kind", ["prompt-lookup:length=4", "assisted:first=3:length=4"])
def test_settings_are_equal_on_both_sides(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Both verify the same drafts: the target runs as often on one side as on the other."""
    monkeypatch.setattr("inference.generate.check_tree_support", lambda target: None)
    rounds = []
    for text in (kind, f"ours:as-{kind}"):
        worker = handler(folder, text)
        worker.warm_up([PROMPTS[0]], 9, NEW)
        calls: list[int] = []
        worker.target.model.lm_head.register_forward_hook(lambda *_, c=calls: c.append(1))
        for prompt in PROMPTS:
            worker.decode([prompt], NEW)
        rounds.append(len(calls))
    more = rounds[1] - rounds[0]
    assert 0 <= more <= len(PROMPTS), "theirs verifies its first drafts with the prompt"


def test_rounds_of_a_batch_are_counted_by_forward(folder: Path) -> None:
    worker = handler(folder, "ours:ngram:4")
    worker.warm_up([[6]], 9, NEW)
    answer = worker.decode(PROMPTS, NEW)
    assert answer.rounds is not None
    assert answer.rounds[0][0] == 3, "all of them run at first"
    assert all(1 <= rows <= 3 and 1 <= nodes <= 4 for rows, nodes, *_ in answer.rounds)
    alone = [worker.decode([prompt], NEW).rounds for prompt in PROMPTS]
    assert len(answer.rounds) == max(map(len, alone)), "the longest text decides"


def test_drafts_are_what_was_asked_for(folder: Path) -> None:
    target = TargetModel.load(str(folder / "target"), torch.float64)

    def made(text: str) -> Any:
        make = proposer_maker(target, parse_contender(text), str(folder / "target"))
        return None if make is None else make()

    assert made("ours") is None
    ngram = made("ours:ngram:8:depth=3")
    assert isinstance(ngram, NgramProposer) and (ngram.size, ngram.depth) == (8, 3)
    same = made("ours:as-prompt-lookup:length=5:match=3")
    assert (same.size, same.depth, same.branch, same.max_ngram) == (6, 5, 1, 3)
    assert isinstance(made(f"ours:{folder / 'head'}:chain:4"), HeadProposer)
    with pytest.raises(ValueError, match=r"ours:ngram:size=few: argument --size: "):
        made("ours:ngram:size=few")
    with pytest.raises(ValueError, match="as-early-exit:first=3: length=K is needed"):
        made("ours:as-early-exit:first=3")
    with pytest.raises(ValueError, match="first must be below the target's 6 layers"):
        made("ours:as-assisted:first=6:length=2")


@pytest.mark.parametrize("text", ["assisted:first=6", "early-exit:first=6"])
def test_a_draft_of_all_layers_is_refused(folder: Path, text: str) -> None:
    with pytest.raises(ValueError, match="first must be below the target's 6 layers"):
        handler(folder, text)


def test_drafts_remember_nothing_of_an_earlier_cell(folder: Path) -> None:
    """Copies of earlier answers would be copies of this very answer."""
    worker = handler(folder, "ours:suffix")
    worker.warm_up([[6]], 9, NEW)
    fresh = worker.decode(PROMPTS[:1], NEW).rounds
    again = worker.decode(PROMPTS[:1], NEW).rounds
    assert isinstance(worker._proposer, SuffixProposer)
    assert len(again) < len(fresh), "it does remember within a cell, or the test says nothing"
    worker.warm_up([[6]], 9, NEW)
    assert worker.decode(PROMPTS[:1], NEW).rounds == fresh


def test_the_engine_reaches_the_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def noted(*args: Any, **options: Any) -> None:
        seen.append(options["engine"] and options["engine"].name)
        raise InterruptedError

    monkeypatch.setattr("scripts.benchmark_workers.speculative_generate", noted)
    monkeypatch.setattr("scripts.benchmark_workers.plain_generate", noted)
    for text in ("ours", "ours:ngram", "ours:engine=eager", "ours:ngram:engine=packed"):
        with pytest.raises(InterruptedError):
            found, target = parse_contender(text), tiny_target()
            engine = opened(target, found.settings.get("engine"), choose_threads=False)
            Ours(target, found, "", engine).warm_up([[5]], 1, 2)
    assert seen == [None, None, "eager", "packed"]


def test_parts_of_a_step() -> None:
    found = parts_of({"prefill": 9.0, "target": 3.0, "draft": 1.0, "total": 4.5}, 5.0)
    assert found == {"draft": 1.0, "verify": 3.0, "host": 1.0}
    named = {"prefill": 9.0, "draft": 1.0, "verify": 3.0, "commit": 0.5, "total": 4.5}
    assert parts_of(named, 5.0) == {"draft": 1.0, "verify": 3.0, "commit": 0.5, "host": 0.5}


def test_requests_are_passed_on() -> None:
    class Note(Handler):
        def warm_up(self, prompts: list[list[int]], longest: int, new_tokens: int) -> None:
            self.seen = (prompts, longest, new_tokens)

        def decode(self, prompts: list[list[int]], new_tokens: int) -> Answer:
            return Answer([[new_tokens]], 1.0, 0.5, 1)

    note = Note()
    warm = {"do": "warm_up", "prompts": [[1]], "longest": 7, "new_tokens": 3}
    assert respond(note, warm) == {"ready": True} and note.seen == ([[1]], 7, 3)
    assert respond(note, {"do": "decode", "prompts": [[1]], "new_tokens": 3})["tokens"] == [[3]]


def test_padding_and_cutting() -> None:
    ids, mask = padded([[1, 2, 3], [4]], 9, torch.device("cpu"))
    assert ids.tolist() == [[1, 2, 3], [9, 9, 4]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert cut([5, 6, 7, 6], [6]) == [5, 6]
    assert cut([5, 6], [9]) == [5, 6]


def auto_worker(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("inference.scheduling.auto.WIDTHS", (1, 2, 4))
    monkeypatch.setattr("scripts.auto_decided.CONTEXTS", (16,))
    monkeypatch.setattr("inference.scheduling.cost_calibration.MOST_REPEATS", 1)
    return handler(folder, f"ours:{folder / 'head'}:auto:depth=2:branch=2")


def test_auto_tells_what_it_expected_and_who_drafted(
    folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = auto_worker(folder, monkeypatch)
    worker.warm_up([[6, 5, 7]], 9, NEW)
    answer = worker.decode(PROMPTS, NEW)
    assert answer.tokens == expected
    assert answer.rounds and answer.drafted is not None and answer.expected is not None
    assert len(answer.drafted) == len(answer.rounds)
    for (rows, *_), drafted in zip(answer.rounds, answer.drafted, strict=True):
        assert 0 <= drafted <= rows
    tokens, seconds, plain = answer.expected
    assert tokens >= sum(rows for rows, *_ in answer.rounds)  # one at least of each
    assert seconds > 0 and plain > 0


def test_auto_learns_nothing_from_the_warm_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = auto_worker(folder, monkeypatch)
    worker.warm_up([[6, 5, 7]], 9, NEW)
    assert not worker._proposer.estimates and not worker._proposer.made
    worker.decode(PROMPTS[:1], NEW)
    assert worker._proposer.made


def test_threads_are_chosen_where_the_engine_measures_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(
        "scripts.benchmark_workers.open_engine", lambda args, _: seen.append(args.engine)
    )
    for text in ("ours:engine=packed", "ours:engine=eager", "ours"):
        handler(folder, text)
    assert seen == ["packed"]
