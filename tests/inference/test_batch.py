"""Batches: each sequence has its own prompt, length, law, seed and end, and disturbs no other."""

import gc
import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from drafters import TargetModel, TargetOutput
from inference.generate import Generation, plain_generate, speculative_generate
from inference.proposers import Proposer, RowState
from inference.proposers.layer_skip import LayerSkipProposer
from inference.proposers.ngram import NgramProposer
from inference.proposers.suffix import SuffixProposer
from inference.sampling import SamplingParams
from inference.stopping import Stop
from inference.tree import TokenTree
from tests.oracle import NoisyOracle
from tests.tiny import tiny_target
from tests.zoo import zoo_target

PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13], [20] * 11, [44, 2, 17, 60]]
LENGTHS = [9, 30, 4, 23]
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(0.7, seed=7),
    SamplingParams(1.3, top_k=20, seed=8),
    SamplingParams(0.9, top_p=0.8, seed=9, repetition_penalty=1.3, frequency_penalty=0.5),
]
NO_END = Stop(token_ids=())


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


@pytest.fixture(scope="module")
def texts(target: TargetModel) -> list[list[int]]:
    plain = plain_generate(
        target, PROMPTS, max_new_tokens=LENGTHS, sampling=SAMPLINGS, stop=NO_END
    ).sequences
    return [prompt + new for prompt, new in zip(PROMPTS, plain, strict=True)]


def decode(
    target: TargetModel, texts: Sequence[list[int]], rows: Sequence[int], **options: object
) -> Generation:
    oracle = options.pop("proposer", None) or NoisyOracle([texts[row] for row in rows])
    settings = {
        "max_new_tokens": [LENGTHS[row] for row in rows],
        "sampling": [SAMPLINGS[row] for row in rows],
        "stop": NO_END,
        "rule": "coupled",
    }
    prompts = [PROMPTS[row] for row in rows]
    return speculative_generate(target, oracle, prompts, **{**settings, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["match", "coupled"])
def test_every_row_is_its_own_run(target: TargetModel, texts: list[list[int]], rule: str) -> None:
    expected = [text[len(prompt) :] for text, prompt in zip(texts, PROMPTS, strict=True)]
    for order in itertools.permutations(range(4)):
        result = decode(target, texts, order, rule=rule)
        assert result.sequences == [expected[row] for row in order]
    for row in range(4):
        assert decode(target, texts, [row], rule=rule).sequences == [expected[row]]


def test_rejection_does_not_depend_on_the_rest_of_the_batch(
    target: TargetModel, texts: list[list[int]]
) -> None:
    together = decode(target, texts, range(4), rule="rejection").sequences
    for row in range(4):
        assert decode(target, texts, [row], rule="rejection").sequences == [together[row]]


def test_rows_end_for_their_own_reasons(target: TargetModel, texts: list[list[int]]) -> None:
    """One at a token of its own, one by a stop string, one by length."""
    new = texts[1][len(PROMPTS[1]) :]
    stop = new[12]
    string = target.tokenizer.decode(texts[3][len(PROMPTS[3]) + 8 : len(PROMPTS[3]) + 10])
    stops = [NO_END, Stop(token_ids=(stop,)), NO_END, Stop(token_ids=(), strings=(string,))]
    plain = plain_generate(target, PROMPTS, max_new_tokens=LENGTHS, sampling=SAMPLINGS, stop=stops)
    result = decode(target, texts, range(4), stop=stops)
    assert result.sequences == plain.sequences
    assert result.reasons == plain.reasons == ["length", "eos", "length", "stop"]
    assert result.sequences[1] == new[: new.index(stop) + 1]
    assert len(result.sequences[3]) < LENGTHS[3]


class Watcher(NoisyOracle):
    """Notes who is asked and who has ended."""

    def __init__(self, texts: Sequence[list[int]]) -> None:
        super().__init__(texts)
        self.asked: list[list[int]] = []
        self.ended: dict[int, list[int]] = {}

    def propose(self, states: Sequence[RowState | None]) -> list[TokenTree | None]:
        self.asked.append([row for row, state in enumerate(states) if state is not None])
        return super().propose(states)

    def finish(self, row: int, tokens: list[int]) -> None:
        assert row not in self.ended
        self.ended[row] = list(tokens)


def test_ended_rows_cost_nothing(
    target: TargetModel, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in the draft nor in the target, and each is said to have ended once."""
    widths: list[int] = []
    forward = TargetModel.forward

    def counted(self: TargetModel, input_ids: Tensor, **options: object) -> TargetOutput:
        widths.append(len(input_ids))
        return forward(self, input_ids, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(TargetModel, "forward", counted)
    watcher = Watcher(texts)
    result = decode(target, texts, range(4), proposer=watcher)
    rounds = widths[-len(watcher.asked) :]
    assert rounds == [len(rows) for rows in watcher.asked]
    assert rounds[0] == 4 and rounds[-1] == 1 and len(set(rounds)) > 2
    assert watcher.ended == dict(enumerate(texts))
    assert result.num_forwards == len(rounds)


def test_a_prompt_longer_than_one_forward(
    target: TargetModel, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts run in stretches; rows that have run out of prompt wait."""
    whole = decode(target, texts, range(4))
    for rows in (1, 3, 4, 5):
        monkeypatch.setattr("inference.append.PREFILL_ROWS", rows)
        seen = States(texts)
        result = decode(target, texts, range(4), proposer=seen)
        assert result.sequences == whole.sequences
        for row, (features, hidden) in enumerate(seen.first):
            alone = target.forward(torch.tensor([PROMPTS[row]]), feature_layers=(2,))
            assert torch.allclose(features, alone.features[0], atol=1e-12)  # type: ignore[index]
            assert torch.allclose(hidden, alone.last_hidden[0], atol=1e-12)


class States(NoisyOracle):
    """Keeps the states of the first round."""

    feature_layers = (2,)  # type: ignore[assignment]

    def propose(self, states: Sequence[RowState | None]) -> list[TokenTree | None]:
        if not hasattr(self, "first"):
            self.first = [(state.features, state.hidden) for state in states if state is not None]
        return super().propose(states)


def test_one_value_for_all_or_one_for_each(target: TargetModel, texts: list[list[int]]) -> None:
    for name, values in [("max_new_tokens", [4, 5]), ("sampling", SAMPLINGS[:3])]:
        with pytest.raises(ValueError, match=rf"{name}: {len(values)} values for 4 prompts"):
            decode(target, texts, range(4), **{name: values})


def test_scores_and_log_probabilities_are_plain_decodings(
    target: TargetModel, texts: list[list[int]]
) -> None:
    options = {"output_scores": True, "output_logprobs": True}
    plain = plain_generate(
        target, PROMPTS, max_new_tokens=LENGTHS, sampling=SAMPLINGS, stop=NO_END, **options
    )
    for rule in ("match", "coupled"):
        result = decode(target, texts, range(4), rule=rule, **options)
        for row in range(4):
            count = LENGTHS[row]
            assert result.scores[row].shape == (count, target.vocab_size)
            assert torch.allclose(result.scores[row], plain.scores[row], atol=1e-9)
            assert torch.allclose(
                torch.tensor(result.logprobs[row]), torch.tensor(plain.logprobs[row]), atol=1e-6
            )
    text, prompt = texts[1], PROMPTS[1]
    raw = target.forward(torch.tensor([text])).logits[0].log_softmax(-1)
    by_hand = [float(raw[place - 1, text[place]]) for place in range(len(prompt), len(text))]
    assert torch.allclose(torch.tensor(plain.logprobs[1]), torch.tensor(by_hand), atol=1e-6)


def test_rounds_are_recorded(target: TargetModel, texts: list[list[int]]) -> None:
    assert not decode(target, texts, range(4)).rounds
    result = decode(target, texts, range(4), record_rounds=True)
    for row in range(4):
        emitted = [token for done in result.rounds if done.row == row for token in done.emitted]
        assert emitted == result.sequences[row][1:]


def live_bytes() -> int:
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        # Fake tensors, which tracing in other tests leaves behind, hold no memory.
        if issubclass(type(thing), Tensor) and not isinstance(thing, FakeTensor):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def test_memory_stays_flat_beyond_the_cache(target: TargetModel) -> None:
    """Round after round nothing is left behind: what lives besides the cache does not grow."""
    prompt, new = PROMPTS[:1], 400
    text = plain_generate(target, prompt, max_new_tokens=new, stop=NO_END).sequences[0]
    found: list[int] = []
    caches: list[int] = []

    class Weighing(NoisyOracle):
        def start(self, session):  # type: ignore[no-untyped-def]
            super().start(session)
            self.session = session

        def propose(self, states: Sequence[RowState | None]) -> list[TokenTree | None]:
            state = states[0]
            assert state is not None
            if len(state.tokens) // 50 > len(found):
                layers = self.session.cache.layers
                caches.append(sum(2 * layer.keys.nbytes for layer in layers))
                found.append(live_bytes() - caches[-1])
            return super().propose(states)

    weighing: Proposer = Weighing([prompt[0] + text])
    speculative_generate(target, weighing, prompt, max_new_tokens=new, stop=NO_END)
    assert len(found) >= 7
    assert max(found[1:]) - min(found[1:]) < 20_000, found


def test_a_prompt_behind_a_switch_of_frequencies_runs_in_one_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stretches before the switch would have other rotary frequencies than plain decoding's."""
    rope = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}
    rope |= {"rope_type": "longrope", "original_max_position_embeddings": 30}
    target = zoo_target("phi3", original_max_position_embeddings=30, rope_parameters=rope)
    monkeypatch.setattr("inference.append.PREFILL_ROWS", 8)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 96, (n,), generator=generator).tolist() for n in (34, 40)]
    options = {"max_new_tokens": 10, "stop": NO_END}
    plain = plain_generate(target, prompts, **options)  # type: ignore[arg-type]
    found = speculative_generate(target, NgramProposer(), prompts, **options)  # type: ignore[arg-type]
    assert found.sequences == plain.sequences
    short = [prompt[:20] for prompt in prompts]
    plain = plain_generate(target, short, **options)  # type: ignore[arg-type]
    found = speculative_generate(target, NgramProposer(), short, **options)  # type: ignore[arg-type]
    assert found.sequences == plain.sequences
    with pytest.raises(ValueError, match="a batch must lie on one side"):
        speculative_generate(target, NgramProposer(), [prompts[0], short[0]], **options)  # type: ignore[arg-type]


class TestRefusalsBeforeAnyToken:
    @pytest.mark.parametrize(
        "proposer",
        [NgramProposer(), SuffixProposer(), LayerSkipProposer(2, width=2)],
        ids=lambda proposer: type(proposer).__name__,
    )
    def test_trees_under_block(self, target: TargetModel, proposer: Proposer) -> None:
        emitted: list[int] = []
        with pytest.raises(ValueError, match="'block' verifies chains"):
            speculative_generate(
                target,
                proposer,
                PROMPTS,
                max_new_tokens=9,
                rule="block",
                on_token=lambda row, new: emitted.extend(new),
            )
        assert not emitted

    def test_what_is_no_proposer(self, target: TargetModel) -> None:
        with pytest.raises(ValueError, match="build_proposer"):
            speculative_generate(target, object(), PROMPTS, max_new_tokens=4)  # type: ignore[arg-type]

    @pytest.mark.parametrize("prompts", [[5, 6, 7], [torch.tensor([5, 6])], [[]], []])
    def test_prompts_that_are_no_lists(self, target: TargetModel, prompts: list) -> None:
        with pytest.raises(ValueError, match="prompts must be lists of token ids"):
            plain_generate(target, prompts, max_new_tokens=4)

    @pytest.mark.parametrize("number", [0, 2.5, "3"])
    def test_lengths_that_are_no_numbers(self, target: TargetModel, number: object) -> None:
        with pytest.raises(ValueError, match="max_new_tokens must be a whole number"):
            plain_generate(target, PROMPTS, max_new_tokens=number)  # type: ignore[arg-type]


def test_drafts_that_the_target_does_not_have(target: TargetModel) -> None:
    class Foreign(NoisyOracle):
        def grow(self, text: list[int], state: RowState) -> TokenTree:
            return TokenTree.chain(torch.tensor([state.tokens[-1], 96]))

    with pytest.raises(ValueError, match="Foreign drafted token 96, but the target has 96"):
        speculative_generate(target, Foreign([PROMPTS[0]]), PROMPTS[:1], max_new_tokens=9)


def test_a_history_ends_with_its_target(target: TargetModel) -> None:
    """Outputs of another target may hold tokens that this one does not have."""
    proposer = SuffixProposer()
    larger = tiny_target(vocab=120)
    options = {"max_new_tokens": 24, "stop": NO_END}
    prompt = [[100, 110, 100, 110, 5]]
    speculative_generate(larger, proposer, prompt, **options)  # type: ignore[arg-type]
    found = speculative_generate(target, proposer, PROMPTS, **options)  # type: ignore[arg-type]
    assert found.sequences == plain_generate(target, PROMPTS, **options).sequences  # type: ignore[arg-type]


def test_keys_and_values_are_freed_with_the_last_sequence(target: TargetModel) -> None:
    kept = []

    class Keeper(NoisyOracle):
        def start(self, session):  # type: ignore[no-untyped-def]
            super().start(session)
            kept.append(session)

    text = plain_generate(target, PROMPTS[:1], max_new_tokens=9, stop=NO_END).sequences[0]
    keeper = Keeper([PROMPTS[0] + text])
    speculative_generate(target, keeper, PROMPTS[:1], max_new_tokens=9, stop=NO_END)
    assert not kept[0].live and not kept[0].cache.layers
