"""Acceptance counted along texts: what the arms would have got right, by hand and by decoding."""

import torch

from inference.engine import EagerEngine
from inference.generate import plain_generate
from inference.proposers import Proposer, TreeOptions, build_proposer
from inference.proposers.ngram import NgramProposer
from inference.sampling import SamplingParams
from inference.scheduling.priors import Counts
from inference.scheduling.survival_calibration import SEED, SurvivalCalibration
from tests.blocks import block_head
from tests.tiny import tiny_target

PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [9, 3, 9, 3]]
NEW = 24


def counted(
    arms: dict[str, Proposer], rule: str = "match", temperature: float = 0.0, positions: int = 1000
) -> tuple[dict[str, Counts], int]:
    engine = EagerEngine(tiny_target())
    one = SurvivalCalibration(engine, arms, SamplingParams(temperature), rule, positions)
    return one.run(PROMPTS, NEW), one.seen


def head() -> Proposer:
    drafter = block_head(tiny_target(), "eagle3", dtype=torch.float64, draft_vocab_size=40)
    return build_proposer(drafter, TreeOptions(size=8, depth=3, top_k=2))


def test_copies_are_counted_at_every_position() -> None:
    """Depth 1 by hand: the token behind the last place where the last token stood."""
    found, seen = counted({"ngram": NgramProposer(4, 3, 1, max_ngram=1)})
    hits = tried = 0
    for prompt in PROMPTS:
        made = plain_generate(tiny_target(), [prompt], max_new_tokens=NEW)
        ids = [*prompt, *made.sequences[0]]
        for root in range(len(prompt), len(ids) - 1):
            before = [place for place in range(root) if ids[place] == ids[root]]
            if before:
                tried += 1
                hits += ids[before[-1] + 1] == ids[root + 1]
    accepted, rounds = found["ngram"]
    assert seen == 2 * (NEW - 1)
    assert 0 < tried <= seen
    assert abs(rounds[0][0] - tried) < 0.1 * tried  # counts fade a little
    assert abs(accepted[0][0] - hits) < 0.1 * tried


def test_heads_are_counted_with_all_depths_and_ranks() -> None:
    found, seen = counted({"head": head(), "ngram": NgramProposer(4, 3, 1)})
    accepted, tried = found["head"]
    assert [len(row) for row in accepted] == [len(row) for row in tried] == [2, 2, 2]
    assert tried[0] == [seen, seen]
    for level in (1, 2):  # whoever got there was accepted above, within the ranks
        assert tried[level][0] <= sum(accepted[level - 1])


def test_positions_end_it() -> None:
    found, seen = counted({"head": head(), "ngram": NgramProposer(4, 3, 1)}, positions=30)
    assert seen == 30
    assert found["head"][1][0][0] == 30


def test_drawn_drafts_are_counted_by_their_chances() -> None:
    found, seen = counted({"head": head()}, "rejection", 1.0)
    accepted, tried = found["head"]
    assert tried[0][0] == seen
    assert 0 < sum(accepted[0]) < seen
    assert any(value % 1 for value in accepted[0])


def test_its_texts_are_of_seeds_that_no_run_has() -> None:
    assert SEED > 2**32
