"""Lossless decoding: speculative output equals plain decoding, token for token, in float64."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig

import inference.engine as engine_module
from drafters import Drafter, TargetModel, build_drafter
from inference.cache import TreeCache
from inference.generate import Generation, Round, plain_generate, speculative_generate
from inference.proposers import (
    MedusaProposer,
    Proposer,
    RowState,
    SequentialProposer,
    Session,
    TreeOptions,
    build_proposer,
)
from inference.sampling import SamplingParams
from inference.shapes.static_tree import static_tree
from inference.stopping import Stop
from inference.tree import TokenTree
from tests.oracle import NoisyOracle
from tests.tiny import tiny_target

PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13], [20] * 11]
NEW = 20


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def target(request: pytest.FixtureRequest) -> TargetModel:
    return tiny_target(attn=request.param)


def make_head(target: TargetModel, family: str, **options: object) -> Drafter:
    head = build_drafter(family, target, seed=1, **options).double()
    head.set_draft_vocab(torch.arange(target.vocab_size))
    return head.eval()


PROPOSERS = {
    "eagle3 chain": lambda t: SequentialProposer(make_head(t, "eagle3"), TreeOptions(6, 4, 1)),
    "eagle3 tree": lambda t: SequentialProposer(make_head(t, "eagle3"), TreeOptions(14, 4, 4)),
    "eagle3 reduced": lambda t: SequentialProposer(
        make_head(t, "eagle3", draft_vocab_size=40), TreeOptions(14, 3, 3)
    ),
    "medusa": lambda t: MedusaProposer(make_head(t, "medusa", num_heads=3), TreeOptions(size=12)),
    "medusa shape": lambda t: MedusaProposer(
        make_head(t, "medusa", num_heads=3),
        TreeOptions(shape=static_tree([(0,), (1,), (1, 0)])),
    ),
}


GREEDY = SamplingParams()
SAMPLED = [
    SamplingParams(0.7, seed=7),
    SamplingParams(1.3, seed=7),
    SamplingParams(0.9, 12, 0.8, 3),
]
PLAIN_TOKENS = [
    *itertools.product(["match", "coupled"], [GREEDY, *SAMPLED]),
    ("rejection", GREEDY),
]
"""Rules and laws that promise the very tokens of plain decoding."""


def decode_with_oracle(
    target: TargetModel, texts: Sequence[list[int]], sampling: SamplingParams, rule: str
) -> tuple[Generation, list[Round]]:
    rounds: list[Round] = []
    result = speculative_generate(
        target,
        NoisyOracle(texts),
        [text[:-NEW] for text in texts],
        max_new_tokens=NEW,
        sampling=sampling,
        rule=rule,
        stop=Stop(token_ids=()),
        on_round=rounds.append,
    )
    return result, rounds


@functools.cache
def true_texts(target: TargetModel, sampling: SamplingParams) -> list[list[int]]:
    plain = plain_generate(
        target, PROMPTS, max_new_tokens=NEW, sampling=sampling, stop=Stop(token_ids=())
    ).sequences
    return [prompt + text for prompt, text in zip(PROMPTS, plain, strict=True)]


@pytest.mark.parametrize(("rule", "sampling"), PLAIN_TOKENS)
def test_accepted_branches_leave_the_output_plain(
    target: TargetModel, rule: str, sampling: SamplingParams
) -> None:
    """Commits of several rows, out of order, in a batch whose rows end at different times."""
    texts = true_texts(target, sampling)
    result, rounds = decode_with_oracle(target, texts, sampling, rule)
    assert result.sequences == [text[-NEW:] for text in texts]
    accepted = [len(done.accepted) for done in rounds]
    assert set(accepted) >= {0, 1, 2, 4}
    assert result.stats.num_accepted_tokens == sum(accepted) > len(PROMPTS) * NEW / 2
    per_row = [sum(done.row == row for done in rounds) for row in range(len(PROMPTS))]
    assert len(set(per_row)) > 1, "no row outlived another"
    for text in texts:
        alone, _ = decode_with_oracle(target, [text], sampling, rule)
        assert alone.sequences == [text[-NEW:]]


class Recorder(NoisyOracle):
    """Keeps what the decoder hands over of the target's hidden states."""

    feature_layers = (1, 4)

    def start(self, session: Session) -> None:
        super().start(session)
        self.seen: list[list[RowState]] = [[] for _ in range(session.batch_size)]

    def propose(self, states: Sequence[RowState | None]) -> list[TokenTree | None]:
        for row, state in enumerate(states):
            if state is not None:
                self.seen[row].append(replace(state))
                known = sum(len(seen.hidden) for seen in self.seen[row])
                assert known == len(state.tokens) - 1, "all but the last token, which is new"
        return super().propose(states)


def test_proposers_are_given_the_states_of_what_was_committed(target: TargetModel) -> None:
    """Each position once and in order, whatever branches were tried in between."""
    texts = true_texts(target, GREEDY)
    recorder = Recorder(texts)
    speculative_generate(target, recorder, PROMPTS, max_new_tokens=NEW, stop=Stop(token_ids=()))
    for text, states in zip(texts, recorder.seen, strict=True):
        out = target.forward(torch.tensor([text]), feature_layers=recorder.feature_layers)
        features = torch.cat([state.features for state in states if state.features is not None])
        hidden = torch.cat([state.hidden for state in states])
        assert len(states) > 4 and out.features is not None
        assert torch.allclose(features, out.features[0, : len(features)], atol=1e-5)
        assert torch.allclose(hidden, out.last_hidden[0, : len(hidden)], atol=1e-5)


def test_a_wrong_commit_is_seen(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: keep the first rows instead of the accepted ones."""

    class FirstRows(TreeCache):
        def commit(self, paths: Sequence[Sequence[int]]) -> None:
            super().commit([range(len(path)) for path in paths])

    monkeypatch.setattr(engine_module, "TreeCache", FirstRows)
    texts = true_texts(target, GREEDY)
    result, _ = decode_with_oracle(target, texts, GREEDY, "match")
    assert result.sequences != [text[-NEW:] for text in texts]


@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize("rule", ["match", "coupled"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_output_is_plain_decodings_own(
    target: TargetModel, name: str, rule: str, temperature: float
) -> None:
    """With untrained heads, whose drafts are mostly rejected."""
    sampling = SamplingParams(temperature=temperature, seed=7)
    expected = [text[-NEW:] for text in true_texts(target, sampling)]
    proposer = PROPOSERS[name](target)
    options = dict(max_new_tokens=NEW, sampling=sampling, rule=rule, stop=Stop(token_ids=()))
    batch = speculative_generate(target, proposer, PROMPTS, **options)
    assert batch.sequences == expected
    alone = [speculative_generate(target, proposer, [p], **options).sequences[0] for p in PROMPTS]
    assert alone == expected


@pytest.mark.parametrize("rule", ["match", "coupled"])
def test_warpers_apply_to_the_target_on_every_path(target: TargetModel, rule: str) -> None:
    sampling = SamplingParams(temperature=0.9, top_k=12, top_p=0.8, seed=3)
    plain = plain_generate(target, PROMPTS, max_new_tokens=NEW, sampling=sampling)
    proposer = PROPOSERS["eagle3 tree"](target)
    drafted = speculative_generate(
        target, proposer, PROMPTS, max_new_tokens=NEW, sampling=sampling, rule=rule
    )
    assert drafted.sequences == plain.sequences


def test_greedy_equals_generate(target: TargetModel) -> None:
    for prompt in PROMPTS:
        expected = target.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=NEW,
            do_sample=False,
        )[0, len(prompt) :].tolist()
        assert plain_generate(target, [prompt], max_new_tokens=NEW).sequences == [expected]
        for make in PROPOSERS.values():
            drafted = speculative_generate(target, make(target), [prompt], max_new_tokens=NEW)
            assert drafted.sequences == [expected]


def test_different_seeds_give_different_samples(target: TargetModel) -> None:
    """The equality above would be empty if sampling ignored its noise."""
    outputs = {
        tuple(
            plain_generate(
                target, [PROMPTS[0]], max_new_tokens=NEW, sampling=SamplingParams(1.3, seed=s)
            ).sequences[0]
        )
        for s in range(4)
    }
    assert len(outputs) == 4


@pytest.mark.parametrize("limit", range(1, 8))
def test_length_limit_is_exact_and_drafts_do_not_overrun_it(
    target: TargetModel, limit: int
) -> None:
    text = true_texts(target, GREEDY)[0]
    perfect: Proposer = NoisyOracle([text], wrong=False)
    for proposer in (PROPOSERS["eagle3 tree"](target), NoisyOracle([text]), perfect):
        rounds: list[Round] = []
        drafted = speculative_generate(
            target,
            proposer,
            PROMPTS[:1],
            max_new_tokens=limit,
            stop=Stop(token_ids=()),
            on_round=rounds.append,
        )
        assert drafted.sequences[0] == text[len(PROMPTS[0]) :][:limit]
        emitted = 1  # the prefill's token
        for done in rounds:
            room = limit - emitted - 1  # the target adds a token of its own
            depth = int(done.tree.depths.max())
            assert depth <= room
            if proposer is perfect:
                assert depth == min(4, room)
            emitted += len(done.emitted)
            assert done.next_token is not None, "a draft did not fit in"
        assert emitted == limit


def test_end_of_sequence_inside_an_accepted_run_cuts_it() -> None:
    target = tiny_target()
    truth = plain_generate(
        target, PROMPTS[:1], max_new_tokens=NEW, stop=Stop(token_ids=())
    ).sequences[0]
    stop = truth[9]
    expected = truth[: truth.index(stop) + 1]
    plain = plain_generate(target, PROMPTS[:1], max_new_tokens=NEW, stop=Stop(token_ids=(stop,)))
    oracle = NoisyOracle([PROMPTS[0] + truth], depth=3, wrong=False)
    drafted = speculative_generate(
        target, oracle, PROMPTS[:1], max_new_tokens=NEW, stop=Stop(token_ids=(stop,))
    )
    assert plain.sequences == [expected]
    assert drafted.sequences == [expected]
    assert drafted.stats.num_emitted == len(expected) - 1  # all but the prefill's token


def test_a_perfect_draft_is_accepted_whole() -> None:
    target = tiny_target()
    truth = plain_generate(
        target, PROMPTS[:1], max_new_tokens=17, stop=Stop(token_ids=())
    ).sequences[0]
    oracle = NoisyOracle([PROMPTS[0] + truth], depth=3, wrong=False)
    rounds: list[Round] = []
    drafted = speculative_generate(
        target,
        oracle,
        PROMPTS[:1],
        max_new_tokens=17,
        stop=Stop(token_ids=()),
        on_round=rounds.append,
    )
    assert drafted.sequences == [truth]
    assert drafted.num_forwards == 4  # 16 tokens after the prefill's, 4 a round
    assert drafted.stats.acceptance_length == 4.0
    assert all(done.all_accepted for done in rounds)
    assert [token for done in rounds for token in done.emitted] == truth[1:]


def test_tokens_are_handed_out_as_soon_as_they_are_known(target: TargetModel) -> None:
    """The prefill's at once, then those of every round before anything else is told of it."""
    texts = true_texts(target, GREEDY)
    told: list[tuple[str, int, list[int]]] = []
    speculative_generate(
        target,
        NoisyOracle(texts),
        PROMPTS,
        max_new_tokens=NEW,
        stop=Stop(token_ids=()),
        on_token=lambda row, new: told.append(("token", row, list(new))),
        on_round=lambda done: told.append(("round", done.row, done.emitted)),
    )
    firsts, rounds = told[: len(PROMPTS)], told[len(PROMPTS) :]
    assert firsts == [("token", row, [text[-NEW]]) for row, text in enumerate(texts)]
    assert [kind for kind, *_ in rounds] == ["token", "round"] * (len(rounds) // 2)
    assert [rest for _, *rest in rounds[::2]] == [rest for _, *rest in rounds[1::2]]
    for row, text in enumerate(texts):
        handed = [new for kind, of, new in told if kind == "token" and of == row]
        assert list(itertools.chain(*handed)) == text[-NEW:]


def test_rejection_emits_only_tokens_the_warped_target_allows(target: TargetModel) -> None:
    sampling = SamplingParams(temperature=1.0, top_k=3, seed=5)
    prompt = PROMPTS[0]
    drafted = speculative_generate(
        target,
        PROPOSERS["eagle3 tree"](target),
        [prompt],
        max_new_tokens=NEW,
        sampling=sampling,
        rule="rejection",
    )
    tokens = prompt + drafted.sequences[0]
    logits = target.forward(torch.tensor([tokens])).logits[0]
    for place in range(len(prompt), len(tokens)):
        assert tokens[place] in logits[place - 1].topk(3).indices.tolist()


def test_time_is_accounted_for(target: TargetModel) -> None:
    drafted = speculative_generate(
        target, PROPOSERS["eagle3 tree"](target), PROMPTS, max_new_tokens=NEW
    )
    assert 0 < drafted.seconds["target"] + drafted.seconds["draft"] <= drafted.seconds["total"]


class TestRefusals:
    """Before any token is produced."""

    def test_empty_prompt(self, target: TargetModel) -> None:
        with pytest.raises(ValueError, match="prompts"):
            speculative_generate(target, PROPOSERS["medusa"](target), [[]], max_new_tokens=4)

    def test_no_room(self, target: TargetModel) -> None:
        with pytest.raises(ValueError, match="max_position_embeddings"):
            plain_generate(target, [[1] * 500], max_new_tokens=64)

    def test_unknown_rule(self, target: TargetModel) -> None:
        with pytest.raises(ValueError, match="rule"):
            speculative_generate(
                target, PROPOSERS["medusa"](target), PROMPTS, max_new_tokens=4, rule="typical"
            )

    def test_state_space_models(self) -> None:
        config = MambaConfig(hidden_size=32, vocab_size=96, num_hidden_layers=2, state_size=4)
        target = TargetModel(AutoModelForCausalLM.from_config(config))
        with pytest.raises(ValueError, match=r"layer 0.*cannot be rolled back"):
            speculative_generate(target, make_head_for(target), PROMPTS, max_new_tokens=4)


def make_head_for(target: TargetModel) -> MedusaProposer:
    head = build_drafter("medusa", target, num_heads=2, shared_lm_head=True)
    return MedusaProposer(head, TreeOptions(size=4))


def test_every_proposer_option_is_checked(target: TargetModel) -> None:
    head = make_head(target, "eagle3")
    for size, depth, top_k in itertools.product((1, 4), (0, 2), (0, 2)):
        if size < 2 or depth < 1 or top_k < 1:
            with pytest.raises(ValueError, match="draft tree"):
                build_proposer(head, TreeOptions(size, depth, top_k))
