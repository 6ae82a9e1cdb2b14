"""Every dialect with heads of a tiny target: what is written, refused, left out, and missing."""

import pytest
import torch

from drafters import TargetModel
from drafters.export import DIALECTS
from interop import files_check
from interop.results import (
    FAILED,
    HEADWAY,
    PASSED,
    READ,
    REFUSED,
    ROUND_TRIP,
    SIMULATED,
    SKIPPED,
    STRICT,
    WRITTEN,
    Entry,
)
from interop.setting import Setting
from interop.speculators_check import random_head
from tests.tiny import save_tiny_target

SIZES = {"part": 48, "full": 96}
HEADS = {
    "dflash": {"num_layers": 1, "confidence_head": True},
    "dspark": {"num_layers": 1, "markov_rank": 16, "confidence_head": True},
}


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> list[Entry]:
    """Of two heads each of two families, with a reduced draft vocabulary and the whole one."""
    folder = tmp_path_factory.mktemp("files")
    place = save_tiny_target(folder / "target", torch.float32)
    target, heads = TargetModel.load(str(place)), {}
    for family, options in HEADS.items():
        for size, vocab in SIZES.items():
            head = random_head(family, target, draft_vocab_size=vocab, **options)
            head.save_pretrained(folder / f"{family}-{size}")
            heads[f"{family}-{size}"] = folder / f"{family}-{size}"
    return list(files_check.check(Setting(place, heads, folder)))


def of(entries: list[Entry], dialect: str, head: str = "") -> dict[str, Entry]:
    """Headway's entries by check."""
    return {
        entry.check: entry
        for entry in entries
        if (entry.dialect, entry.head, entry.name) == (dialect, head, HEADWAY)
    }


def test_every_dialect_has_an_entry_and_none_fails(entries: list[Entry]) -> None:
    assert {entry.dialect for entry in entries} == set(DIALECTS)
    assert [entry for entry in entries if entry.status == FAILED] == []


def test_a_missing_head_is_a_gap(entries: list[Entry]) -> None:
    found = of(entries, "sglang")
    assert list(found) == [WRITTEN]
    assert found[WRITTEN].status == SKIPPED
    assert found[WRITTEN].detail == "no eagle3 head: name one with --head eagle3=<folder>"


def test_a_refusal_is_an_answer_and_other_heads_of_the_family_go_on(entries: list[Entry]) -> None:
    refused = of(entries, "dspark-specforge", "dspark-part")
    assert {check: entry.status for check, entry in refused.items()} == {WRITTEN: REFUSED}
    assert "draft_vocab_size=48" in refused[WRITTEN].detail
    written = of(entries, "dspark-specforge", "dspark-full")
    assert [written[check].status for check in (WRITTEN, READ, ROUND_TRIP, STRICT)] == [PASSED] * 4


def test_a_round_trip_without_the_draft_vocabulary_says_so(entries: list[Entry]) -> None:
    limits = {
        (dialect, head): of(entries, dialect, head)[ROUND_TRIP].limit
        for dialect, head in (
            ("dflash", "dflash-part"),
            ("dflash", "dflash-full"),
            ("dflash-vllm", "dflash-part"),
            ("dspark", "dspark-part"),
        )
    }
    assert list(limits.values()) == ["without draft vocabulary", "", "", ""]
    whole = of(entries, "dflash", "dflash-full")[ROUND_TRIP]
    assert whole.detail.endswith("left out: confidence.proj.bias, confidence.proj.weight")


def test_an_engine_that_the_export_does_not_name_refuses(entries: list[Entry]) -> None:
    """SGLang drafts from the whole vocabulary alone; one that the dialect does not name is no part
    of it, though its loaders would take the folder.
    """
    found = {
        (entry.name, entry.head): entry
        for entry in entries
        if (entry.dialect, entry.check) == ("dspark", SIMULATED)
    }
    assert found["sglang", "dspark-part"].status == REFUSED
    assert found["sglang", "dspark-part"].detail == (
        "the export names what serves this head: vllm, llama.cpp"
    )
    assert found["sglang", "dspark-full"].status == PASSED
    assert found["vllm", "dspark-part"].status == PASSED
    others = [e.name for e in entries if (e.dialect, e.check) == ("speculators-dspark", SIMULATED)]
    assert others == ["vllm", "vllm"]
