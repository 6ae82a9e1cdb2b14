"""A separate draft model: lossless, its cache rolled back, nothing computed twice."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedTokenizerFast,
)

from drafters import TargetModel
from inference.generate import speculative_generate
from inference.proposers import RowState, TreeOptions
from inference.proposers.draft_model import DraftModelProposer, check_same_tokenizer
from inference.proposers.levels import Branches
from inference.sampling import SamplingParams
from inference.static.engine import StaticEngine
from inference.tree import Proposal, TokenTree
from tests.inference.drafting import (
    GREEDY,
    LENGTHS,
    NO_END,
    PROMPTS,
    SAMPLED,
    WARPED,
    Recording,
    assert_allowed,
    assert_laws_are_fresh,
    counted_rows,
    decode,
    decode_alone,
    noisy_copy,
    p_value_of_rejection,
    plain,
)
from tests.tiny import tiny_target, tiny_tokenizer
from tests.zoo import float64_throughout, zoo_target

CHAIN, TREE = TreeOptions(5, 4, 1), TreeOptions(14, 4, 3)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


@pytest.fixture(scope="module")
def draft(target: TargetModel) -> TargetModel:
    """Agrees with the target more often than not."""
    return noisy_copy(target, tiny_target, 0.04)


@pytest.mark.parametrize("options", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize(
    ("rule", "sampling"), [("match", GREEDY), ("coupled", SAMPLED), ("coupled", WARPED)]
)
def test_output_is_plain_decodings_own(
    target: TargetModel,
    draft: TargetModel,
    options: TreeOptions,
    sampling: SamplingParams,
    rule: str,
) -> None:
    """In a batch of unequal prompts and lengths, and alone."""
    expected = plain(target, sampling)
    proposer = DraftModelProposer(draft, options)
    batch = decode(target, proposer, sampling=sampling, rule=rule)
    assert batch.sequences == expected
    accepted, drafted = batch.stats.num_accepted_tokens, batch.stats.num_draft_tokens
    assert 5 < accepted < drafted, "drafts that are always right or always wrong test little"
    assert decode_alone(target, proposer, 1, sampling=sampling, rule=rule) == expected[1]


@pytest.mark.parametrize("least", [1, 4])
@pytest.mark.parametrize("options", [CHAIN, TREE], ids=["chain", "tree"])
def test_static_engines_draft_the_same_trees(
    target: TargetModel, draft: TargetModel, options: TreeOptions, least: int
) -> None:
    """The draft model's keys and values are in one tensor, single rows may be filled up."""
    engine, trees = StaticEngine(target), []
    beside = engine.beside(draft)
    assert isinstance(beside, StaticEngine)
    beside.least_rows = least
    for other in (None, engine):
        found = decode(
            target,
            DraftModelProposer(draft, options),
            engine=other,
            sampling=SAMPLED,
            rule="coupled",
            record_rounds=True,
        )
        assert found.sequences == plain(target, SAMPLED)
        trees.append([(done.tree.tokens.tolist(), done.accepted) for done in found.rounds])
    assert trees[0] == trees[1]


@pytest.mark.parametrize("name", ["gemma3_text", "mistral", "gpt2"])
def test_windows_of_the_draft_model(
    target: TargetModel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft model of another architecture, whose windows (8) the texts leave."""
    float64_throughout(monkeypatch)
    other = zoo_target(name)
    proposer = DraftModelProposer(other, TREE)
    assert decode(target, proposer).sequences == plain(target, GREEDY)
    recording = Recording(DraftModelProposer(other, TREE))
    result = decode(other, recording, sampling=SAMPLED, rule="rejection")
    assert_laws_are_fresh(
        recording.drafted, lambda text: other.forward(torch.tensor([text])).logits[0, -1]
    )
    assert result.stats.num_accepted_tokens > 20


@pytest.mark.parametrize(
    ("rule", "sampling"),
    [("match", GREEDY), ("coupled", SAMPLED), ("rejection", SAMPLED), ("block", SAMPLED)],
)
def test_a_draft_model_that_is_the_target_is_always_right(
    target: TargetModel, rule: str, sampling: SamplingParams
) -> None:
    rounds: list[Any] = []
    decode(
        target,
        DraftModelProposer(tiny_target(), CHAIN),
        rule=rule,
        sampling=sampling,
        on_round=rounds.append,
    )
    assert len(rounds) > 9
    for done in rounds:
        assert len(done.accepted) == done.tree.num_draft_tokens
    for row, length in enumerate(LENGTHS):
        depths = [done.tree.num_draft_tokens for done in rounds if done.row == row]
        assert depths[: (length - 1) // 5] == [4] * (
            (length - 1) // 5
        )  # the prefill emits one, a round five
        rest = (length - 1) % 5
        assert depths[(length - 1) // 5 :] == ([rest - 1] if rest else [])


@pytest.mark.parametrize(("rule", "options"), [("rejection", TREE), ("block", CHAIN)])
def test_drafts_come_from_the_text_alone(
    target: TargetModel, draft: TargetModel, rule: str, options: TreeOptions
) -> None:
    """Rollback: after any rounds of acceptance the draft law at every node is that of a fresh
    forward of the draft model over the text and the node's path.
    """
    recording = Recording(DraftModelProposer(draft, options))
    result = decode(target, recording, sampling=SAMPLED, rule=rule)
    assert result.stats.num_accepted_tokens > 10
    assert all(one.tree.proposal is Proposal.DENSE for one in recording.drafted)
    assert_laws_are_fresh(
        recording.drafted, lambda text: draft.forward(torch.tensor([text])).logits[0, -1]
    )


@pytest.mark.parametrize("wrong", ["sibling", "repeated", "longer"])
def test_a_wrong_rollback_is_seen(
    target: TargetModel, draft: TargetModel, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    """The comparison above can fail."""
    right = Branches.spelled

    def spelled(self: Branches, tokens: Sequence[int]) -> list[int]:
        path = right(self, tokens)
        rejected = [row for row in self.rows if row >= 0 and row not in path]
        if wrong == "sibling" and path and rejected:
            return [rejected[0], *path[1:]]
        if wrong == "longer" and rejected and len(path) < len(tokens):
            return [*path, rejected[0]]
        return path[:1] * len(path) if wrong == "repeated" else path

    monkeypatch.setattr(Branches, "spelled", spelled)
    with pytest.raises(AssertionError):
        test_drafts_come_from_the_text_alone(target, draft, "rejection", TREE)


@pytest.mark.parametrize("chunk", [2048, 2])
def test_nothing_is_computed_twice(
    target: TargetModel, draft: TargetModel, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """Rows that the draft model runs: the text once, and drafts that were not accepted."""
    monkeypatch.setattr("inference.append.PREFILL_ROWS", chunk)
    proposer = DraftModelProposer(draft, CHAIN)
    for prompt in PROMPTS:
        options: dict[str, Any] = {"max_new_tokens": 20, "stop": NO_END}
        speculative_generate(target, proposer, [prompt], **options)  # probes are over
        with counted_rows(draft) as counts:
            result = speculative_generate(target, proposer, [prompt], record_rounds=True, **options)
        expected, known, length = 0, 0, len(prompt) + 1
        for done in result.rounds:
            if done.tree.num_draft_tokens:
                expected += length - known  # what is new of the text
                run = done.tree.num_draft_tokens - 1  # the leaf is not expanded
                expected += run
                known = length + min(len(done.accepted), run)
            length += len(done.emitted)
        assert counts == [expected] * draft.num_layers
        assert result.stats.num_accepted_tokens > 3


def test_sequences_that_ended_cost_no_draft(
    target: TargetModel, draft: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    forward = draft.forward

    def recorded(ids: torch.Tensor, **options: Any) -> Any:
        rows.append(len(ids))
        return forward(ids, **options)

    proposer = DraftModelProposer(draft, TREE)
    expected = decode(target, proposer).sequences
    monkeypatch.setattr(draft, "forward", recorded)
    lengths = [10, 1, 22]  # the second ends before the first round
    assert decode(target, proposer, max_new_tokens=lengths).sequences == [
        text[:length] for text, length in zip(expected, lengths, strict=True)
    ]
    assert rows[0] == 2 and rows[-1] == 1 and rows == sorted(rows, reverse=True)


@pytest.mark.parametrize("draws", ["all", "one"])
def test_rejection_keeps_the_targets_law(
    target: TargetModel, draft: TargetModel, draws: str
) -> None:
    options = TreeOptions(7, 3, 3, draws=draws)
    sampling = SamplingParams(0.8, seed=100)
    assert p_value_of_rejection(target, DraftModelProposer(draft, options), sampling, 400) > 1e-3


def test_a_wrong_law_is_seen(target: TargetModel, draft: TargetModel) -> None:
    """The test above can fail: the recorded law is sharper than the one drawn from."""

    class Wrong(Recording):
        def propose(self, states: Sequence[RowState | None]) -> list[TokenTree | None]:
            trees = super().propose(states)
            for tree in trees:
                if tree is not None and tree.draft_probs is not None:
                    sharper = tree.draft_probs.pow(2)
                    tree.draft_probs.copy_(sharper / sharper.sum(-1, keepdim=True).clamp(1e-30))
            return trees

    proposer = Wrong(DraftModelProposer(draft, CHAIN))
    assert p_value_of_rejection(target, proposer, SamplingParams(0.8, seed=100), 400) < 1e-4


@pytest.mark.parametrize("draws", ["all", "one"])
def test_rejection_emits_allowed_tokens_whatever_the_batch(
    target: TargetModel, draft: TargetModel, draws: str
) -> None:
    samplings = [WARPED, GREEDY, SAMPLED]
    proposer = DraftModelProposer(draft, TreeOptions(10, 3, 3, draws=draws))
    together = decode(target, proposer, sampling=samplings, rule="rejection").sequences
    for row, (new, sampling) in enumerate(zip(together, samplings, strict=True)):
        assert decode_alone(target, proposer, row, sampling=sampling, rule="rejection") == new
        assert_allowed(target, row, new, sampling)


def padded_target(rows: int, tokens: int, seed: int) -> TargetModel:
    """A target with an output matrix that is larger than its tokenizer."""
    model = tiny_target(vocab=rows, seed=seed).model
    return TargetModel(model, tiny_tokenizer(tokens))


@pytest.mark.parametrize("rows", [(96, 80), (80, 96)])
@pytest.mark.parametrize("rule", ["match", "coupled", "rejection"])
def test_output_matrices_of_different_sizes(rows: tuple[int, int], rule: str) -> None:
    """One tokenizer, padded differently; random targets do emit padding, unlike trained ones."""
    target, draft = padded_target(rows[0], 72, 0), padded_target(rows[1], 72, 0)
    recording = Recording(DraftModelProposer(draft, TREE))
    result = decode(target, recording, sampling=SAMPLED, rule=rule)
    if rule != "rejection":
        assert result.sequences == plain(target, SAMPLED)
    for one in recording.drafted:
        assert int(one.tree.tokens.max()) < rows[0]
        if one.tree.draft_probs is not None:
            assert one.tree.draft_probs.shape[1] == rows[0]
    if rows[0] > rows[1]:
        assert max(max(one.tokens) for one in recording.drafted) >= rows[1]


def test_texts_beyond_the_positions_of_the_draft_model(target: TargetModel) -> None:
    """Drafting goes on to the last position, and warns once."""
    config = LlamaConfig(**{**target.config.to_dict(), "max_position_embeddings": 20})
    model = LlamaForCausalLM(config).double()
    model.load_state_dict(target.model.state_dict())
    draft = TargetModel(model, tiny_tokenizer())
    positions: list[int] = []
    forward = draft.forward

    def recorded(ids: torch.Tensor, **options: Any) -> Any:
        if options.get("position_ids") is not None:
            positions.append(int(options["position_ids"].max()))
        return forward(ids, **options)

    recording = Recording(DraftModelProposer(draft, CHAIN))
    draft.forward = recorded  # type: ignore[method-assign]
    expected = plain(target, GREEDY)
    with pytest.warns(UserWarning, match="end of the draft model's 20 positions") as caught:
        assert decode(target, recording).sequences == expected
    assert len(caught) == 1
    assert max(positions) == 19
    deepest = max(
        len(one.tokens) - 1 + int(one.tree.depths.max())
        for one in recording.drafted
        if one.tree.num_draft_tokens
    )
    assert deepest == 20  # proposed from position 19
    assert any(one.max_depth and not one.tree.num_draft_tokens for one in recording.drafted)


def tokenizer_with(changed: dict[str, str]) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with some tokens renamed."""
    data = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    data["model"]["vocab"] = {
        changed.get(token, token): index for token, index in data["model"]["vocab"].items()
    }
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(data)))


def test_another_tokenizer_is_refused(target: TargetModel) -> None:
    model = tiny_target(layers=2).model
    first = tiny_tokenizer().get_vocab()["a"]
    other = TargetModel(model, tokenizer_with({"a": "<a>", "b": "<b>"}))
    with pytest.raises(ValueError, match=f"token {first} is '<a>' there and 'a' here.*one of 2"):
        decode(target, DraftModelProposer(other))
    fewer = TargetModel(model, tiny_tokenizer(90))
    with pytest.raises(ValueError, match="token 90 is no token there and '<extra_90>' here"):
        check_same_tokenizer(target, fewer)
    check_same_tokenizer(target, TargetModel(model, tiny_tokenizer()))


def test_without_tokenizers_the_sizes_must_agree(target: TargetModel) -> None:
    bare, small = TargetModel(target.model), TargetModel(tiny_target(vocab=80).model)
    check_same_tokenizer(bare, bare)
    check_same_tokenizer(bare, target)
    with pytest.raises(ValueError, match="80, the target's 96, and without both tokenizers"):
        decode(bare, DraftModelProposer(small))


def test_a_draft_model_without_rollback_is_refused(target: TargetModel) -> None:
    config = MambaConfig(vocab_size=96, hidden_size=16, num_hidden_layers=2, state_size=4)
    draft = TargetModel(MambaForCausalLM(config).double(), tiny_tokenizer(), name="mamba")
    with pytest.raises(ValueError, match="layer 0 of 'mamba'"):
        decode(target, DraftModelProposer(draft))
