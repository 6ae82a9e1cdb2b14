"""Lossless decoding: speculative output equals plain decoding, token for token, in float64."""

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig, MistralConfig

from drafters import Drafter, TargetModel, build_drafter
from inference.generate import Round, plain_generate, speculative_generate
from inference.proposers import Eagle3Proposer, MedusaProposer, build_proposer
from inference.sampling import SamplingParams
from inference.tree import static_tree
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
    "eagle3 chain": lambda t: Eagle3Proposer(make_head(t, "eagle3"), size=6, depth=4, top_k=1),
    "eagle3 tree": lambda t: Eagle3Proposer(make_head(t, "eagle3"), size=14, depth=4, top_k=4),
    "eagle3 reduced": lambda t: Eagle3Proposer(
        make_head(t, "eagle3", draft_vocab_size=40), size=14, depth=3, top_k=3
    ),
    "medusa": lambda t: MedusaProposer(make_head(t, "medusa", num_heads=3), size=12),
    "medusa shape": lambda t: MedusaProposer(
        make_head(t, "medusa", num_heads=3), static_tree([(0,), (1,), (1, 0)])
    ),
}


@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize("rule", ["match", "coupled"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_output_is_plain_decodings_own(
    target: TargetModel, name: str, rule: str, temperature: float
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=7)
    plain = plain_generate(target, PROMPTS, max_new_tokens=NEW, sampling=sampling)
    proposer = PROPOSERS[name](target)
    batch = speculative_generate(
        target, proposer, PROMPTS, max_new_tokens=NEW, sampling=sampling, rule=rule
    )
    assert batch.sequences == plain.sequences
    alone = [
        speculative_generate(
            target, proposer, [p], max_new_tokens=NEW, sampling=sampling, rule=rule
        ).sequences[0]
        for p in PROMPTS
    ]
    assert alone == plain.sequences


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
    depths = []
    drafted = speculative_generate(
        target,
        PROPOSERS["eagle3 tree"](target),
        PROMPTS[:1],
        max_new_tokens=limit,
        eos_token_ids=[],
        on_round=lambda done: depths.append(int(done.tree.depths.max())),
    )
    assert len(drafted.sequences[0]) == limit
    left = limit - 1
    assert all(depth < max(left, 1) for depth in depths[:1])


def test_end_of_sequence_inside_an_accepted_run_cuts_it() -> None:
    """A perfect head:

    A Medusa whose tree holds the true continuation, so long runs are accepted.
    """
    target = tiny_target()
    truth = plain_generate(target, PROMPTS[:1], max_new_tokens=NEW, eos_token_ids=[]).sequences[0]
    stop = truth[9]
    expected = truth[: truth.index(stop) + 1]
    plain = plain_generate(target, PROMPTS[:1], max_new_tokens=NEW, eos_token_ids=[stop])
    oracle = OracleProposer(PROMPTS[0] + truth)
    drafted = speculative_generate(
        target, oracle, PROMPTS[:1], max_new_tokens=NEW, eos_token_ids=[stop]
    )
    assert plain.sequences == [expected]
    assert drafted.sequences == [expected]
    assert drafted.stats.num_emitted == len(expected) - 1  # all but the prefill's token


def test_a_perfect_draft_is_accepted_whole() -> None:
    target = tiny_target()
    truth = plain_generate(target, PROMPTS[:1], max_new_tokens=17, eos_token_ids=[]).sequences[0]
    oracle = OracleProposer(PROMPTS[0] + truth)
    rounds: list[Round] = []
    drafted = speculative_generate(
        target, oracle, PROMPTS[:1], max_new_tokens=17, eos_token_ids=[], on_round=rounds.append
    )
    assert drafted.sequences == [truth]
    assert drafted.num_forwards == 4  # 16 tokens after the prefill's, 4 a round
    assert drafted.stats.acceptance_length == 4.0
    assert all(done.all_accepted for done in rounds)
    assert [token for done in rounds for token in done.emitted] == truth[1:]


class OracleProposer:
    """Drafts the true next three tokens as a chain."""

    feature_layers = ()

    def __init__(self, text: list[int]) -> None:
        self.text = text

    def start(self, batch_size: int, timer: object) -> None:
        pass

    def propose(self, states, sampling, rule):
        from inference.tree import TokenTree

        trees = []
        for state in states:
            place = len(state.tokens)
            depth = min(3, state.max_depth)
            trees.append(TokenTree.chain(torch.tensor(self.text[place - 1 : place + depth])))
        return trees


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
    assert 0 <= drafted.other_share < 1


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

    def test_layers_that_cannot_roll_back(self) -> None:
        small = dict(hidden_size=32, vocab_size=96, num_hidden_layers=3)
        windowed = MistralConfig(
            **small,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            sliding_window=8,
        )
        target = TargetModel(AutoModelForCausalLM.from_config(windowed))
        head = make_head_for(target)
        with pytest.raises(ValueError, match=r"layer 0.*sliding_attention"):
            speculative_generate(target, head, PROMPTS, max_new_tokens=4)

    def test_state_space_models(self) -> None:
        config = MambaConfig(hidden_size=32, vocab_size=96, num_hidden_layers=2, state_size=4)
        target = TargetModel(AutoModelForCausalLM.from_config(config))
        with pytest.raises(ValueError, match=r"layer 0.*cannot be rolled back"):
            speculative_generate(target, make_head_for(target), PROMPTS, max_new_tokens=4)


def make_head_for(target: TargetModel) -> MedusaProposer:
    return MedusaProposer(build_drafter("medusa", target, num_heads=2, shared_lm_head=True), size=4)


def test_every_proposer_option_is_checked(target: TargetModel) -> None:
    head = make_head(target, "eagle3")
    for size, depth, top_k in itertools.product((1, 4), (0, 2), (0, 2)):
        if size < 2 or depth < 1 or top_k < 1:
            with pytest.raises(ValueError, match="draft tree"):
                build_proposer(head, size, depth, top_k)
