"""Block families in training: which rounds, which tokens, and attention in two parts."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from drafters import TargetModel
from tests.blocks import VARIANTS, block_head, block_objective
from tests.tiny import tiny_target
from tests.training.toys import (
    STUCK,
    V,
    feature_toy,
    surprise_toy,
    token_toy,
    toy_target,
    train,
)
from training import masks
from training.data.batches import Batch
from training.draws import generator
from training.features import TargetBatch, run_target
from training.masks import Rule, block, causal_block, join, parallel, sequence_rows, windowed
from training.objectives import block as block_module
from training.objectives.block_attention import BlockAttention, DraftAttention, RolloutAttention
from training.objectives.rounds import draw_rounds, kept_rounds, possible_roots, ranked_rounds

H, HKV, SIZE = 4, 2, 6


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


def batch_of(supervised: list[str], documents: list[list[int]], draws: list[int]) -> Batch:
    """Tokens 10, 11, ...; a sequence's supervision as a string of 0 and 1."""
    mask = torch.tensor([[c == "1" for c in row] for row in supervised])
    ids = 10 + torch.arange(mask.numel()).reshape(mask.shape)
    document = torch.tensor(documents)
    position = torch.arange(mask.shape[1]).expand_as(ids).clone()
    for row, own in enumerate(document):
        for name in own.unique():
            here = own == name
            position[row, here] = torch.arange(int(here.sum()))
    number = torch.tensor(draws)
    return Batch(ids, position, document, mask, number, number)


# --- rounds


@pytest.mark.parametrize(
    ("supervised", "documents", "roots"),
    [
        ("11111111", [0] * 8, [1, 2, 3, 4, 5, 6]),  # text before it, and a token to draft
        ("00011111", [0] * 8, [3, 4, 5, 6]),  # x_a is the target's own
        ("00010001", [0] * 8, []),  # an answer of one token drafts nothing
        ("01101100", [0] * 8, [1, 4]),
        ("11111111", [0, 0, 0, 0, 1, 1, 1, 1], [1, 2, 5, 6]),
        ("11111000", [0, 0, 0, 0, 0, -1, -1, -1], [1, 2, 3]),
        ("01111111", [-1] * 8, []),
    ],
)
def test_where_rounds_start(supervised: str, documents: list[int], roots: list[int]) -> None:
    batch = batch_of([supervised], [documents], [0])
    assert possible_roots(batch)[0].nonzero().flatten().tolist() == roots


def test_rounds_are_drawn_by_the_number_of_the_use() -> None:
    batch = batch_of(["1" * 40] * 3, [[0] * 40] * 3, [7, 8, 7])
    roots = draw_rounds(batch, 5, fresh=True).roots
    assert roots.shape == (3, 5)
    assert torch.equal(roots[0], roots[2])
    assert not torch.equal(roots[0], roots[1])
    for row in roots.tolist():
        assert row == sorted(set(row)), "without repeats, in order"
    again = draw_rounds(replace(batch, draw=batch.draw + 100), 5, fresh=True).roots
    assert not torch.equal(roots, again)
    few = Batch(*(getattr(batch, name)[1:2] for name in vars(batch)))
    assert torch.equal(draw_rounds(few, 5, fresh=True).roots[0], roots[1]), "not by its place"


def test_every_root_is_drawn_alike() -> None:
    batch = batch_of(["1" * 12] * 400, [[0] * 12] * 400, list(range(400)))
    roots = draw_rounds(batch, 3, fresh=True).roots
    counts = roots.flatten().bincount(minlength=12)[1:11]
    assert counts.min() > 80 and counts.max() < 165, counts  # 120 expected


def test_all_are_taken_where_there_are_few_and_spread_while_not_training() -> None:
    batch = batch_of(["1" * 6, "001100"], [[0] * 6] * 2, [1, 2])
    assert draw_rounds(batch, 9, fresh=True).roots.tolist() == [[1, 2, 3, 4], [2, -1, -1, -1]]
    assert draw_rounds(batch, 2, fresh=False).roots.tolist() == [[1, 3], [2, -1]]


def test_deeper_drafts_are_kept_for_fewer_rounds() -> None:
    counts = [kept_rounds(100, depth, 0.7, 0.2) for depth in range(8)]
    assert counts == [100, 70, 49, 34, 24, 20, 20, 20]
    assert [kept_rounds(n, 7, 0.7, 0.2) for n in (0, 1, 2, 10)] == [0, 1, 1, 2]
    assert kept_rounds(50, 3, 1.0, 0.2) == 50


def test_the_order_of_rounds_is_fresh_in_training_and_even_otherwise() -> None:
    batch = batch_of(["1" * 102] * 2, [[0] * 102] * 2, [7, 8])
    fresh = ranked_rounds(batch, fresh=True).roots
    assert not torch.equal(fresh[0], fresh[1])
    assert torch.equal(fresh[0].sort().values, torch.arange(1, 101))
    even = ranked_rounds(batch, fresh=False).roots[0]
    for count in (5, 20, 50):
        gaps = even[:count].sort().values.diff()
        assert gaps.max() <= 2.7 * 100 / count, "no long stretch without a round"


def drafts_of(target: TargetModel, batch: Batch, name: str, train: bool = False, **options: Any):
    family, head_options = VARIANTS[name]
    head = block_head(target, family, **head_options)
    objective = block_objective(head, **options).train(train)
    data = run_target(target, batch, head.feature_layers)
    return objective, objective.drafts(data), data


@pytest.mark.parametrize("name", ["dflash", "dspark vanilla", "peagle"])
def test_what_is_drafted(target: TargetModel, name: str) -> None:
    """From a root at column 2: tokens 13, 14, ... by the rows of their predecessors."""
    batch = batch_of(["00111101"], [[0] * 8], [0])
    objective, drafts, _ = drafts_of(target, batch, name)
    assert drafts is not None
    first = [int(x) for x in (drafts.teacher[0] == 2).nonzero()]
    assert len(first) == 1
    column = first[0]
    count = 3  # 13, 14, 15: there is a gap behind
    assert drafts.tokens[:count, column].tolist() == [13, 14, 15]
    assert drafts.teacher[:count, column].tolist() == [2, 3, 4]
    kept = drafts.valid[:, column].tolist()
    assert kept == [depth < count for depth in range(objective.depths)]
    assert objective.count(batch) == drafts.valid.shape[1] == 3
    assert drafts.anchor.tolist() == [[0, 1, 2]] * objective.depths
    assert [h.shape for h in drafts.hidden] == [(3, objective.drafter.output_size)] * len(kept)


@pytest.mark.parametrize("name", ["dflash", "peagle"])
def test_rows_behind_the_first_sequence(target: TargetModel, name: str) -> None:
    batch = batch_of(["0001100", "0111000"], [[0] * 7] * 2, [0, 1])
    objective, drafts, _ = drafts_of(target, batch, name)
    assert drafts is not None
    assert sorted(drafts.tokens[0].tolist()) == [14, 19, 20]
    assert sorted(drafts.teacher[0].tolist()) == [3, 8, 9]
    assert objective.count(batch) == 3


def test_anchors_bound_the_rounds(target: TargetModel) -> None:
    batch = batch_of(["1" * 12, "000000000110"], [[0] * 12] * 2, [5, 6])
    objective, drafts, _ = drafts_of(target, batch, "dflash", train=True, anchors=4)
    assert drafts is not None
    assert objective.count(batch) == drafts.valid.shape[1] == 5


def test_nothing_to_draft(target: TargetModel) -> None:
    batch = batch_of(["00010000"], [[0] * 8], [0])
    for name in ("dflash", "peagle"):
        objective, drafts, data = drafts_of(target, batch, name)
        assert drafts is None
        assert objective.count(batch) == 0
        assert objective(data)[0] == 0


def test_dropped_depths_are_nested(target: TargetModel) -> None:
    batch = batch_of(["1" * 42, "1" * 22 + "0" * 20], [[0] * 42] * 2, [5, 6])
    _, drafts, _ = drafts_of(target, batch, "peagle", train=True, cod_rate=0.5, cod_floor=0.3)
    assert drafts is not None
    counts = torch.tensor([40 + 20, 20 + 10, 12 + 6, 12 + 6])
    made = torch.stack([(rows != 0).any(-1) for rows in drafts.hidden])
    assert (drafts.valid <= made).all()
    assert (drafts.valid.sum(1) <= counts).all()
    assert int(drafts.valid[0].sum()) == 60
    assert (drafts.valid[1:] <= drafts.valid[:-1]).all()
    whole = drafts_of(target, batch, "peagle", train=True, cod_rate=1.0)[1]
    assert whole is not None
    assert int(whole.valid.sum()) > int(drafts.valid.sum())


def test_a_draft_does_not_depend_on_what_else_is_drafted(target: TargetModel) -> None:
    """Rows of a training pass over many rounds equal those of single rounds."""
    batch = batch_of(["1" * 16] * 2, [[0] * 9 + [1] * 7] * 2, [5, 6])
    for name in VARIANTS:
        objective, drafts, data = (
            drafts_of(target, batch, name, cod_rate=0.5)
            if name.startswith("peagle")
            else drafts_of(target, batch, name)
        )
        assert drafts is not None
        for place in (0, 4, drafts.valid.shape[1] - 1):
            root = int(drafts.teacher[0, place])
            sequence, column = divmod(root, 16)
            one = TargetBatch(
                Batch(*(getattr(batch, f)[sequence : sequence + 1] for f in vars(batch))),
                data.features[sequence : sequence + 1],
                data.last_hidden[sequence : sequence + 1],
            )
            alone = objective.forced(one, torch.tensor([column]))
            for depth in range(objective.depths):
                if drafts.valid[depth, place]:
                    torch.testing.assert_close(
                        drafts.hidden[depth][place], alone[depth][0], atol=1e-9, rtol=0
                    )


@pytest.mark.parametrize(
    "name", ["jetspec sliding", "dspark gated", "dspark rnn", "peagle sliding"]
)
def test_every_weight_learns_and_chunks_change_nothing(target: TargetModel, name: str) -> None:
    """Loss and gradients a few rows at a time are those of all rows at once."""
    batch = batch_of(["1" * 16, "0" * 6 + "1" * 10], [[0] * 9 + [1] * 7] * 2, [5, 6])
    results = []
    for chunk in (0, 3):
        family, options = VARIANTS[name]
        head = block_head(target, family, **options)
        objective = block_objective(head, chunk=chunk).train()
        data = run_target(target, batch, head.feature_layers)
        loss, metrics = objective(data)
        loss.backward()
        grads = {n: p.grad for n, p in objective.named_parameters()}
        assert all(g is not None and bool(g.abs().max() > 0) for g in grads.values()), grads.keys()
        results.append([loss, metrics["loss_1_sum"], *grads.values()])
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(whole, chunked, atol=1e-9, rtol=1e-9)


# --- attention in two parts


def dense(
    attention: DraftAttention, q: Tensor, k: Tensor, v: Tensor, text: Tensor, rule: Rule
) -> Tensor:
    """All draft rows against all keys, by the definition."""
    rows = attention._drafts
    keys = join(attention._text, rows)
    mask = masks.build_mask(rows, keys, rule)[:, None]
    k, v = (
        torch.cat((x, y), 2).repeat_interleave(H // HKV, 1) for x, y in ((text[0], k), (text[1], v))
    )
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


DOCUMENTS = torch.tensor([[0] * 9 + [1] * 5, [0] * 4 + [1] * 8 + [-1] * 2])
ROOTS = torch.tensor([[2, 3, 8, 11], [1, 2, 9, -1]])


def attentions(window: int | None) -> dict[str, tuple[DraftAttention, Rule]]:
    blocks = {
        "block": (BlockAttention(DOCUMENTS, ROOTS, 3, [block], [window]), block),
        "causal": (BlockAttention(DOCUMENTS, ROOTS, 3, [causal_block], [window]), causal_block),
        "rollouts": (RolloutAttention(DOCUMENTS, ROOTS, [4, 3, 1], [window]), parallel),
    }
    return {name: (fast, windowed(rule, window)) for name, (fast, rule) in blocks.items()}


@pytest.mark.parametrize("piece", [1024, 5])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", ["block", "causal", "rollouts"])
def test_attention_in_two_parts_is_the_dense_one(
    monkeypatch: pytest.MonkeyPatch, kind: str, window: int | None, piece: int
) -> None:
    """In values and gradients, for every real row; all rows at once, or a few at a time."""
    monkeypatch.setattr("training.objectives.spans.ROWS", piece)
    fast, rule = attentions(window)[kind]
    count = fast._drafts.position.shape[1]
    g = torch.Generator().manual_seed(0)

    def random(heads: int, rows: int) -> Tensor:
        return torch.randn(2, heads, rows, SIZE, generator=g, dtype=torch.float64).requires_grad_()

    q, k, v = random(H, count), random(HKV, count), random(HKV, count)
    text = torch.stack((random(HKV, 14), random(HKV, 14))).detach().requires_grad_()
    fast.store(0, text[0], text[1])
    real = (fast._drafts.document >= 0)[:, None, :, None]
    weight = torch.randn(2, H, count, SIZE, generator=g, dtype=torch.float64) * real
    results = []
    for out in (fast(0, q, k, v), dense(fast, q, k, v, text, rule)):
        assert not out.isnan().any()
        results.append([out * real, *torch.autograd.grad((out * weight).sum(), [q, k, v, text])])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("window", [None, 3])
def test_text_rows_are_causal(window: int | None) -> None:
    fast = RolloutAttention(DOCUMENTS, ROOTS, [1], [window])
    q, k, v = (torch.randn(2, n, 14, SIZE, dtype=torch.float64) for n in (H, HKV, HKV))
    rows = sequence_rows(DOCUMENTS)
    mask = masks.build_mask(rows, rows, windowed(masks.causal, window))[:, None]
    k2, v2 = (x.repeat_interleave(H // HKV, 1) for x in (k, v))
    expected = F.scaled_dot_product_attention(q, k2, v2, attn_mask=mask)
    torch.testing.assert_close(fast.text(0, q, k, v), expected, atol=1e-12, rtol=0)


# --- alignment: a toy target's next token is known to the right rows only


def toy_objective(family: str, drafts: int = 2, **options: Any):
    """One block a sequence, from column 1, so that a head need not learn where to look."""
    size = {"dflash": drafts + 1, "dspark": drafts}.get(family)
    depth: dict[str, Any] = (
        {"num_drafts": drafts} if size is None else {"block_size": size, "mask_token_id": 0}
    )
    depth |= {"feature_layers": [0, 1, 2]}
    head = block_head(toy_target(), family, 0.0, torch.float32, False, **depth, **options)
    few = {"cod_rate": 1e-6, "cod_floor": 1e-6} if family == "peagle" else {"anchors": 1}
    return block_objective(head, decay=1.0, chunk=0, terms={"kl": 1.0}, **few).eval()


FAMILIES = ["dflash", "dspark", "peagle"]
LEARNT = 0.4 * math.log(V)  # a short training; what cannot be known stays at log V


def mute(data: TargetBatch) -> TargetBatch:
    """Without features, so that there is only the text to read."""
    return replace(data, features=0 * data.features)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_root_s_token_decides_the_first_draft(family: str) -> None:
    """Only depth 0 knows the token before its label; DSpark's Markov head knows it at any depth."""
    options = {"markov_rank": 8} if family == "dspark" else {}
    losses = train(toy_objective(family, **options), lambda g: mute(token_toy(4, 1, g)), 250)
    assert losses[0] < LEARNT, losses
    assert losses[1] < LEARNT if family == "dspark" else losses[1] > STUCK, losses


def test_without_a_markov_head_dspark_does_not_know_it() -> None:
    objective = toy_objective("dspark", markov_type="none")
    losses = train(objective, lambda g: mute(token_toy(4, 1, g)), 250)
    assert losses[0] < LEARNT and losses[1] > STUCK, losses


@pytest.mark.parametrize(
    ("family", "offset"),
    [("dflash", 2), ("dflash", 3), ("dspark", 2), ("peagle", 3)],
)
def test_features_before_the_root_are_seen_and_no_later_ones(family: str, offset: int) -> None:
    """Features at t know x_{t+offset}: the last before root a knows x_{a-1+offset}, which is what
    depth offset-2 drafts; one more depth would need those of the root itself.
    """
    options = {"markov_rank": 8} if family == "dspark" else {}
    losses = train(
        toy_objective(family, **options), lambda g: feature_toy(4, 1, g, offset=offset), 200
    )
    assert losses[offset - 2] < LEARNT, losses
    if offset == 2:
        assert losses[1] > STUCK, losses
    elif family == "dflash":  # P-EAGLE drafts depth 0 from later roots too, which know it
        assert losses[0] > STUCK, losses


@pytest.mark.parametrize("family", FAMILIES)
def test_nobody_knows_a_surprise(family: str) -> None:
    losses = train(toy_objective(family), lambda g: surprise_toy(4, 1, g), 60)
    assert min(losses) > STUCK, losses


def test_a_leak_of_the_root_s_features_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with them depth 1 is solved, which in decoding it could not be."""

    class Leaky(BlockAttention):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._spans = replace(self._spans, last=self._spans.last + 1)

    monkeypatch.setattr(block_module, "BlockAttention", Leaky)
    losses = train(toy_objective("dflash"), lambda g: feature_toy(4, 1, g), 250)
    assert losses[1] < STUCK / 2, losses


@pytest.mark.parametrize("family", ["dflash", "peagle"])
def test_labels_one_place_late_would_show(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Negative control: with each draft taught the token behind its own, depth 0 learns nothing."""
    right = block_module.as_drafts

    def late(*args: Any) -> Any:
        drafts = right(*args)
        return replace(drafts, teacher=drafts.teacher + 1)

    monkeypatch.setattr(block_module, "as_drafts", late)
    losses = train(toy_objective(family), lambda g: feature_toy(4, 1, g), 150)
    assert min(losses) > STUCK, losses


def test_generator_streams_of_rounds_differ_from_those_of_noise() -> None:
    streams = [torch.randperm(50, generator=generator(4, purpose)) for purpose in range(3)]
    assert not any(torch.equal(streams[i], streams[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
