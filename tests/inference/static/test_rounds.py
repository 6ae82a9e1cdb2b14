"""Whole rounds on the device decode what the host's rounds decode, for every head."""

import copy
from collections.abc import Callable

import pytest
import torch

from drafters import TargetModel
from inference.decoding import Keep
from inference.engines import build_engine
from inference.generate import Generation, plain_generate, speculative_generate
from inference.proposers import TreeOptions, build_proposer
from inference.proposers.ngram import NgramProposer
from inference.sampling import SamplingParams
from inference.static.decoding import DeviceEngine, _prefill
from inference.static.rounds import EAGER_ROUNDS, Rounds
from inference.stopping import Stop
from inference.texts import new_texts
from tests.inference.static.test_draft_rounds import FEW, HEADS, head_of
from tests.inference.static.valueless import META, Mover

PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13], [20] * 11]
NEW = [17, 1, 22]
NO_END = Stop(token_ids=())
GREEDY, SAMPLED = SamplingParams(), SamplingParams(0.8, 12, 0.9, seed=3)
TREE, CHAIN = TreeOptions(size=12, depth=3, top_k=3), TreeOptions(size=4, depth=3, top_k=1)


@pytest.fixture(scope="module")
def engines() -> dict[int, DeviceEngine]:
    return {}


def device(target: TargetModel, engines: dict[int, DeviceEngine]) -> DeviceEngine:
    """One engine per target."""
    if id(target) not in engines:
        engines[id(target)] = DeviceEngine(target)
    return engines[id(target)]


def both(
    name: str, engines: dict[int, DeviceEngine], options: TreeOptions, **settings: object
) -> tuple[Generation, Generation]:
    """By the host and on the device."""
    head = head_of(name)
    target = head.target
    settings = {"max_new_tokens": NEW, "stop": NO_END} | settings
    host, found = (
        speculative_generate(
            target, build_proposer(head, options), PROMPTS, engine=engine, **settings
        )
        for engine in (None, device(target, engines))
    )
    return host, found


@pytest.mark.parametrize("name", sorted(HEADS))
@pytest.mark.parametrize("options", [TREE, CHAIN], ids=["tree", "chain"])
def test_rounds_are_the_hosts(
    name: str, options: TreeOptions, engines: dict[int, DeviceEngine]
) -> None:
    host, found = both(name, engines, options)
    assert found.sequences == host.sequences
    assert found.reasons == host.reasons
    assert found.stats == host.stats


@pytest.mark.parametrize("rule", ["match", "coupled", "rejection"])
@pytest.mark.parametrize("name", ["eagle3", "medusa", "dspark gated"])
def test_sampled_rounds_too(name: str, rule: str, engines: dict[int, DeviceEngine]) -> None:
    host, found = both(name, engines, TREE, sampling=SAMPLED, rule=rule)
    assert found.sequences == host.sequences
    assert found.stats == host.stats


def test_texts_end_at_their_tokens(engines: dict[int, DeviceEngine]) -> None:
    plain = plain_generate(
        head_of("eagle3").target, PROMPTS, max_new_tokens=30, stop=NO_END
    ).sequences
    stop = Stop(token_ids=(plain[0][9], plain[2][4]))
    host, found = both("eagle3", engines, TREE, stop=stop, max_new_tokens=30)
    assert found.sequences == host.sequences
    assert found.reasons == host.reasons
    assert "eos" in found.reasons


@pytest.mark.parametrize("name", ["eagle3", "medusa"])  # the latter with a shape of its own
def test_a_second_call_finds_the_first_ones_rounds(name: str) -> None:
    head = head_of(name)
    engine = DeviceEngine(head.target)
    decoded = [
        speculative_generate(
            head.target,
            build_proposer(head, TREE),
            [prompt],
            max_new_tokens=12,
            stop=NO_END,
            engine=engine,
        ).sequences
        for prompt in (PROMPTS[0], PROMPTS[2], PROMPTS[0])
    ]
    assert len(engine._rounds) == 1
    assert decoded[0] == decoded[2]
    plain = plain_generate(head.target, PROMPTS[::2], max_new_tokens=12, stop=NO_END).sequences
    assert [decoded[0][0], decoded[1][0]] == plain


def test_tokens_arrive_round_by_round(engines: dict[int, DeviceEngine]) -> None:
    arrived: dict[int, list[int]] = {row: [] for row in range(len(PROMPTS))}
    head = head_of("eagle3")
    found = speculative_generate(
        head.target,
        build_proposer(head, TREE),
        PROMPTS,
        max_new_tokens=NEW,
        stop=NO_END,
        engine=device(head.target, engines),
        on_token=lambda row, tokens: arrived[row].extend(tokens),
    )
    assert list(arrived.values()) == found.sequences


@pytest.mark.parametrize(
    "settings",
    [
        {"rule": "block", "sampling": SAMPLED},
        {"stop": Stop(criteria=(lambda ids, scores: False,))},
        {"sampling": [GREEDY, SAMPLED, GREEDY]},
        {"record_rounds": True},
        {"output_logprobs": True},
        {"sampling": SamplingParams(0.8, repetition_penalty=1.1)},
    ],
)
def test_what_is_the_hosts_is_refused(
    settings: dict[str, object], engines: dict[int, DeviceEngine]
) -> None:
    head = head_of("eagle3")
    with pytest.raises(ValueError, match=r"'packed'|without static shapes"):
        speculative_generate(
            head.target,
            build_proposer(head, CHAIN),
            PROMPTS,
            max_new_tokens=4,
            engine=device(head.target, engines),
            **settings,
        )


def test_drafts_of_no_head_are_refused() -> None:
    target = head_of("eagle3").target
    with pytest.raises(ValueError, match="trained heads"):
        speculative_generate(
            target,
            NgramProposer(8, 4, 2),
            PROMPTS,
            max_new_tokens=4,
            engine=build_engine(target, "device"),
        )


# --- captured


def started(
    name: str,
    sampling: SamplingParams | list[SamplingParams] | None = None,
    rule: str = "match",
) -> Rounds:
    """Rounds of a copy of a head and its target, after the prompts."""
    with torch.inference_mode(False):
        head = copy.deepcopy(head_of(name))
    engine = DeviceEngine(head.target)
    texts = new_texts(head.target, PROMPTS, NEW, sampling, NO_END, Keep(), rule)
    rounds = engine.rounds(build_proposer(head, TREE), texts, rule)
    _prefill(engine, rounds, texts)
    return rounds


@pytest.mark.parametrize("name", FEW)
@torch.inference_mode()
def test_a_whole_round_reads_nothing_on_the_host(name: str) -> None:
    """And does not mix devices, in the way it goes on CUDA."""
    rounds = started(name)
    expected = rounds._round(0)  # what is gathered once is
    with torch.inference_mode(False), torch.no_grad():
        found = Mover()(rounds)._round(0)
    assert found.device == META and found.shape == expected.shape
    with pytest.raises(RuntimeError):
        found.tolist()


@pytest.mark.parametrize("rule", ["match", "coupled", "rejection"])
@torch.inference_mode()
def test_nor_does_a_sampled_one(rule: str) -> None:
    sampling = [SamplingParams(0.5 + row, 9 + row, 0.9, seed=row) for row in range(3)]
    rounds = started("eagle3 sliding", sampling, rule)
    expected = rounds._round(0)
    with torch.inference_mode(False), torch.no_grad():
        assert Mover()(rounds)._round(0).shape == expected.shape


def test_a_round_is_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[int] = []
    head = head_of("eagle3")
    engine = DeviceEngine(head.target)

    def capture(function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Replays write to one tensor, as graphs do."""
        [rounds] = engine._rounds.values()
        captured.append(rounds._done[0])
        out = torch.zeros(len(PROMPTS), 3 * TREE.longest + 6, dtype=torch.int64)
        return lambda: out.copy_(function())

    monkeypatch.setattr(engine, "_capture", lambda: capture)
    for _ in range(2):
        found = speculative_generate(
            head.target,
            build_proposer(head, TREE),
            PROMPTS,
            max_new_tokens=NEW,
            stop=NO_END,
            engine=engine,
        )
        plain = plain_generate(head.target, PROMPTS, max_new_tokens=NEW, stop=NO_END)
        assert found.sequences == plain.sequences
    assert captured == [EAGER_ROUNDS]
    assert engine.warm_up_seconds > 0


def test_nothing_is_captured_without_cuda() -> None:
    assert started("eagle3").capture is None


@pytest.mark.parametrize(
    "option",
    [
        {"repetition_penalty": 3.0},
        {"suppress_tokens": (7,)},
        {"logit_bias": ((7, 50.0),)},
        {"typical_p": 0.5},
    ],
)
def test_what_is_refused_at_first_is_refused_later(
    option: dict[str, object], engines: dict[int, DeviceEngine]
) -> None:
    """Rounds that are kept for the same warpers know nothing of penalties and bans."""
    head = head_of("eagle3")
    engine = device(head.target, engines)
    decode = lambda params: speculative_generate(  # noqa: E731
        head.target,
        build_proposer(head, CHAIN),
        PROMPTS,
        max_new_tokens=4,
        sampling=params,
        engine=engine,
    )
    decode(SamplingParams(0.8))
    with pytest.raises(ValueError, match="static"):
        decode(SamplingParams(0.8, **option))


def test_closing_frees_what_rounds_hold() -> None:
    head = head_of("eagle3")
    engine = DeviceEngine(head.target)
    speculative_generate(
        head.target, build_proposer(head, CHAIN), PROMPTS, max_new_tokens=4, engine=engine
    )
    assert engine._rounds
    engine.close()
    assert not engine._rounds
