"""Rounds of several sizes in one call decode what the host decodes by the same choices."""

import copy
import random
from collections.abc import Callable, Sequence

import pytest
import torch

from inference.counts import RoundCounts
from inference.decoding import Keep, Round
from inference.generate import Generation, plain_generate, speculative_generate
from inference.proposers import TreeOptions, build_proposer
from inference.sampling import SamplingParams
from inference.scheduling.survival import Outcome
from inference.static import rounds as rounds_module
from inference.static.decoding import DeviceEngine, _prefill
from inference.static.rounds import Kind, Rounds
from inference.static.sizes import (
    PLAIN,
    FastestSizes,
    Form,
    SizedProposer,
    default_forms,
)
from inference.static.tree import DraftTree
from inference.texts import new_texts
from tests.inference.static.draft_rounds import Paths, host_paths, static_paths
from tests.inference.static.test_draft_rounds import FEW, HEADS, head_of
from tests.inference.static.test_rounds import NO_END, PROMPTS, SAMPLED
from tests.inference.static.valueless import META, Mover

FORMS: list[Form] = [(1, 1, 2), (2, 1, 3), (3, 3, 12), (2, 2, 5)]
NEW = [50, 3, 61]


class Scheduled:
    """Sizes by a list that starts over, and what came of them."""

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self.kinds = list(kinds)
        self.asked: list[tuple[float, int, int]] = []
        self.seen: list[list[Outcome]] = []

    def start(self, rule: str, temperature: float, batch: int) -> None:
        self.asked.clear()
        self.seen.clear()

    def choose(self, context: float, batch: int, room: int) -> Kind:
        self.asked.append((context, batch, room))
        return self.kinds[(len(self.asked) - 1) % len(self.kinds)]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self.seen.append(list(outcomes))


def random_kinds(seed: int) -> list[Kind]:
    """Sizes and plain steps, alone and in runs that are longer than what may wait."""
    draw, kinds = random.Random(seed), list[Kind]()
    while len(kinds) < 60:
        kinds.append(draw.randrange(len(FORMS)))
        kinds += [None] * draw.choice([0, 0, 1, 2, 7, 17])
    return kinds


def sized(name: str, kinds: Sequence[Kind]) -> tuple[SizedProposer, Scheduled]:
    chooser = Scheduled(kinds)
    return SizedProposer(build_proposer(head_of(name)), FORMS, chooser), chooser


class Trees:
    """The paths of all trees, round by round: by the host, or on the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host: list[list[Paths]] = []
        self.device: list[list[Paths]] = []
        draft = Rounds.draft

        def drafting(rounds: Rounds, kind: Kind = 0) -> DraftTree:
            tree = draft(rounds, kind)
            assert rounds.committed is not None
            running = rounds.committed.counts.tolist()
            paths = zip(static_paths(tree), running, strict=True)
            self.device.append([path for path, there in paths if there])
            return tree

        monkeypatch.setattr(Rounds, "draft", drafting)
        self._row = 99

    def on_round(self, done: Round) -> None:
        if done.row <= self._row:
            self.host.append([])
        self._row = done.row
        self.host[-1].append(host_paths(done.tree))


def decode(
    proposer: SizedProposer, engine: DeviceEngine | None = None, **settings: object
) -> Generation:
    target = proposer.head.drafter.target
    settings = {"max_new_tokens": NEW, "stop": NO_END} | settings
    return speculative_generate(target, proposer, PROMPTS, engine=engine, **settings)


def check_same(
    name: str, kinds: Sequence[Kind], monkeypatch: pytest.MonkeyPatch, **settings: object
) -> Generation:
    """Texts, statistics, trees and outcomes of both."""
    (twin, by_host), (ours, on_device) = sized(name, kinds), sized(name, kinds)
    trees = Trees(monkeypatch)
    host = decode(twin, on_round=trees.on_round, **settings)
    engine = DeviceEngine(head_of(name).target)
    found = decode(ours, engine, **settings)
    engine.close()
    assert found.sequences == host.sequences and found.reasons == host.reasons
    assert found.stats == host.stats
    assert trees.device == trees.host
    assert on_device.asked == by_host.asked
    assert on_device.seen[: len(by_host.seen)] == by_host.seen
    return found


@pytest.mark.parametrize("name", sorted(HEADS))
def test_any_sizes_in_any_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = check_same(name, random_kinds(len(name)), monkeypatch)
    target = head_of(name).target
    plain = plain_generate(target, PROMPTS, max_new_tokens=NEW, stop=NO_END)
    assert found.sequences == plain.sequences


@pytest.mark.parametrize("name", FEW)
def test_with_as_little_waiting_as_there_can_be(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head takes in what waits every few plain steps."""
    monkeypatch.setattr(rounds_module, "WAITING", 1)
    check_same(name, [None] * 9 + [2] + [None] * 3 + [0, 3], monkeypatch)


@pytest.mark.parametrize("rule", ["match", "coupled", "rejection"])
@pytest.mark.parametrize("name", ["eagle3", "medusa", "dflash", "mtp 3", "dspark gated"])
def test_sampled_too(name: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = check_same(name, random_kinds(1), monkeypatch, sampling=SAMPLED, rule=rule)
    if rule != "rejection":
        target = head_of(name).target
        plain = plain_generate(target, PROMPTS, max_new_tokens=NEW, stop=NO_END, sampling=SAMPLED)
        assert found.sequences == plain.sequences


def test_outcomes_are_learnt_from() -> None:
    """Some drafts are accepted, or the tests above would compare little."""
    proposer, chooser = sized("eagle3", [2, 0])
    engine = DeviceEngine(head_of("eagle3").target)
    decode(proposer, engine, max_new_tokens=[200, 10, 200], sampling=SamplingParams(3.0, seed=4))
    ranks = [rank for round_ in chooser.seen for outcome in round_ for rank in outcome.ranks]
    assert ranks and max(ranks) > 0


# --- numbers of a round


def test_counts_are_those_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[RoundCounts]] = []
    for engine in (None, DeviceEngine(head_of("medusa").target)):
        proposer, _ = sized("medusa", [None, 2, 1])
        found.append([])
        settings = {"sampling": SamplingParams(2.0, seed=1), "rule": "coupled"}
        made = decode(proposer, engine, on_counts=found[-1].append, **settings)
        emitted = sum(len(counts.emitted) for counts in found[-1])
        assert emitted == sum(NEW) - 3 == made.stats.num_emitted
    assert found[0] == found[1]
    assert {counts.width for counts in found[0]} > {1, 3}
    assert [counts.context for counts in found[0] if counts.row == 0][:2] == [6, 7]


def test_texts_that_end_inside_a_tree_say_so() -> None:
    target = head_of("eagle3").target
    sampling = SamplingParams(3.0, seed=4)
    free = plain_generate(
        target, PROMPTS[:1], max_new_tokens=200, stop=NO_END, sampling=sampling
    ).sequences[0]
    ends = []
    for length in (40, 41, 42, 43):
        counts: list[RoundCounts] = []
        made = speculative_generate(
            target,
            build_proposer(head_of("eagle3"), TreeOptions(size=40, depth=5, top_k=9)),
            PROMPTS[:1],
            max_new_tokens=length,
            stop=NO_END,
            sampling=sampling,
            rule="coupled",
            engine=DeviceEngine(target),
            on_counts=counts.append,
        )
        assert made.sequences[0] == free[:length]
        ends.append(counts[-1].ended)
        assert not any(one.ended for one in counts[:-1])
    assert set(ends) <= {True, False}


# --- captured


def begun(name: str) -> Rounds:
    """Rounds of all kinds, of a copy of a head and its target, after the prompts."""
    with torch.inference_mode(False):
        head = copy.deepcopy(head_of(name))
    engine = DeviceEngine(head.target)
    texts = new_texts(head.target, PROMPTS, NEW, None, NO_END, Keep(), "match")
    proposer = SizedProposer(build_proposer(head), FORMS, Scheduled([0]))
    rounds = engine.rounds(proposer, texts, "match")
    _prefill(engine, rounds, texts)
    return rounds


@pytest.mark.parametrize("name", FEW)
@torch.inference_mode()
def test_no_kind_reads_anything_on_the_host(name: str) -> None:
    rounds = begun(name)
    kinds: list[Kind] = [None, *range(len(FORMS))]
    shapes = [rounds._round(kind).shape for kind in kinds]
    rounds._absorb()
    with torch.inference_mode(False), torch.no_grad():
        moved = Mover()(rounds)
        assert moved._absorb().device == META
        for kind, shape in zip(kinds, shapes, strict=True):
            found = moved._round(kind)
            assert found.device == META and found.shape == shape
    assert shapes[0][1] == 6 and shapes[3][1] == 15


def test_each_kind_is_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[int] = []
    head = head_of("eagle3")
    engine = DeviceEngine(head.target)

    def capture(function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        captured.append(len(captured))
        kept: list[torch.Tensor] = []

        def replay() -> torch.Tensor:
            """Always returns the same memory, as graphs do."""
            found = function()
            kept.extend([found] * (not kept))
            return kept[0].copy_(found)

        return replay

    monkeypatch.setattr(engine, "_capture", lambda: capture)
    proposer, _ = sized("eagle3", [0, 1, *[None] * 18, 2, 3])
    for _ in range(3):
        found = decode(proposer, engine)
        plain = plain_generate(head.target, PROMPTS, max_new_tokens=NEW, stop=NO_END)
        assert found.sequences == plain.sequences
    [rounds] = engine._rounds.values()
    assert set(rounds._replays) == {None, 0, 1, 2, 3, "absorb"}
    assert len(captured) == 6


def test_kinds_share_what_they_keep() -> None:
    rounds = begun("mtp 3")
    first, *others = rounds.drafters
    for other in others:
        assert other.caches is first.caches and other._ring is first._ring


# --- deciding


class StepCosts:
    """A plain step takes a second."""

    def verify(self, width: int, context: float, batch: float = 1) -> float:
        return 1.0

    def draft(self, name: str, depth: int, width: int = 1, batch: float = 1) -> float:
        return 0.0

    def absorb(self, name: str, positions: int) -> float:
        return 0.0

    def rest(self, batch: float = 1) -> float:
        return 0.0

    def knows_plain(self) -> bool:
        return True

    def widest(self, batch: float = 1) -> int:
        return 128

    def widths(self, batch: float = 1) -> list[int]:
        return []


def seconds(form: Form, context: float, batch: float) -> float:
    depth, _, size = form
    return 1.0 + 0.06 * depth + 0.01 * size


def fastest(forms: Sequence[Form] = FORMS) -> FastestSizes:
    return FastestSizes(forms, StepCosts(), seconds)


def simulated(chooser: FastestSizes, rate: float, rounds: int = 1500) -> tuple[float, list[Kind]]:
    """Tokens per second with drafts whose first child is right so often, and what was chosen."""
    draw, tokens, spent, kinds = random.Random(3), 0, 0.0, list[Kind]()
    chooser.start("match", 0.0, 1)
    for _ in range(rounds):
        kind = chooser.choose(500.0, 1, 99)
        form = PLAIN if kind is None else FORMS[kind]
        accepted = 0
        while accepted < form[0] and draw.random() < rate:
            accepted += 1
        offered = [form[1]] * (accepted + (accepted < form[0]))
        chooser.observe([Outcome([0] * accepted, offered, accepted + 1, form[2], form[0])])
        tokens, kinds = tokens + accepted + 1, [*kinds, kind]
        spent += 1.0 if kind is None else seconds(form, 500.0, 1)
    return tokens / spent, kinds


@pytest.mark.parametrize(("rate", "best"), [(0.02, None), (0.35, 1), (0.9, 2)])
def test_the_fastest_size_is_found(rate: float, best: Kind) -> None:
    found, kinds = simulated(fastest(), rate)
    survival = [1.0, rate, rate**2, rate**3]
    static = [sum(survival[: form[0] + 1]) / seconds(form, 0.0, 1) for form in FORMS]
    assert found > 0.96 * max(1.0, *static)
    assert static[best] == max(static) if best is not None else max(static) < 1.0
    assert kinds[700:].count(best) > 600


def test_the_device_chooses_as_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same counts: text, choices and what is learnt are the same."""
    head, texts = head_of("eagle3"), []
    chosen: list[list[tuple[object, ...]]] = []
    for engine in (None, DeviceEngine(head.target)):
        chooser = fastest()
        chosen.append([])
        choose = chooser.choose

        def choosing(*where: float, made: Callable = choose, log: list = chosen[-1]) -> Kind:
            log.append((*where, made(*where)))
            return log[-1][-1]

        chooser.choose = choosing  # type: ignore[method-assign]
        proposer = SizedProposer(build_proposer(head), FORMS, chooser)
        for _ in range(2):
            settings = {"sampling": SamplingParams(3.0, seed=4), "max_new_tokens": 90}
            texts.append(decode(proposer, engine, **settings).sequences)
    assert texts[0] == texts[1] == texts[2] == texts[3]
    assert chosen[0] == chosen[1]
    assert len({kind for *_, kind in chosen[0]}) > 1, "a trial at least"


def test_what_was_learnt_lasts_where_it_may() -> None:
    chooser = fastest()
    simulated(chooser, 0.9, 200)
    assert chooser.choose(500.0, 1, 99) == 2
    chooser.start("match", 0.0, 4)
    assert chooser.choose(500.0, 4, 99) == 2
    chooser.start("rejection", 1.0, 1)
    fresh = fastest()
    fresh.start("rejection", 1.0, 1)
    assert chooser._controller.estimates["head"].table() == (
        fresh._controller.estimates["head"].table()
    )


def test_a_batch_has_one_size_and_texts_must_not_depend_on_each_other() -> None:
    head = head_of("eagle3")
    proposer = SizedProposer(build_proposer(head), FORMS, fastest())
    for engine in (None, DeviceEngine(head.target)):
        with pytest.raises(ValueError, match="rule 'rejection': one size is chosen for a whole"):
            decode(proposer, engine, rule="rejection", sampling=SAMPLED)


def test_sizes_to_prepare() -> None:
    grown = TreeOptions(size=32, depth=5, top_k=8)
    forms = default_forms(grown)
    assert forms[:4] == [(1, 1, 2), (2, 1, 3), (3, 1, 4), (5, 1, 6)]
    assert forms[4:] == [(3, 8, 8), (4, 8, 16), (5, 8, 32)]
    assert default_forms(TreeOptions(depth=2, top_k=1)) == [(1, 1, 2), (2, 1, 3)]
    sizes = sized("hydra", [0])[0].sizes
    assert [(options.longest, options.top_k, options.size) for options in sizes] == FORMS
    with pytest.raises(ValueError, match="one size at least"):
        SizedProposer(build_proposer(head_of("hydra")), [], fastest())


def test_deep_trees_are_worth_less_at_the_end_of_a_text() -> None:
    chooser = fastest()
    simulated(chooser, 0.9, 300)
    assert chooser.choose(500.0, 1, 3) == 2
    assert chooser.choose(500.0, 1, 1) == 0
    assert chooser.choose(500.0, 1, 0) is None
