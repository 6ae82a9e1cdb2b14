"""scripts.benchmark_contenders: what can be written, and what is refused."""

import pytest

from scripts.benchmark_contenders import (
    Contender,
    drafting_arguments,
    parse_contender,
    parse_contenders,
    with_engine,
)


def test_theirs() -> None:
    assert parse_contender("plain") == Contender("plain", "plain")
    found = parse_contender("prompt-lookup:length=5:match=3")
    assert (found.kind, found.settings) == ("prompt-lookup", {"length": "5", "match": "3"})
    assert parse_contender("flashspec:ngram:length=5").source == "ngram"
    assert parse_contender("flashspec:first=4").source is None


@pytest.mark.parametrize("text", ["ours", "ours:plain"])
def test_ours_without_drafts(text: str) -> None:
    found = parse_contender(text)
    assert (found.kind, found.source, found.drafts) == ("ours", None, False)


def test_ours_with_words_for_settings() -> None:
    found = parse_contender("ours:outputs/eagle3/head:chain:6:depth=4:with-ngram:engine=compiled")
    assert found.source == "outputs/eagle3/head"
    assert drafting_arguments(found) == [
        *("--head", "outputs/eagle3/head", "--branch", "1", "--size", "6"),
        *("--depth", "4", "--with-ngram"),
    ]
    assert drafting_arguments(parse_contender("ours:suffix:auto")) == [
        *("--proposer", "suffix", "--size", "auto")
    ]
    assert parse_contender("ours:head:static").settings == {"tree": "static"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fast", "'fast' is none of ours, plain"),
        ("plain:length=3", "'length' is no setting of it; it takes none"),
        ("ours:plain:8", "'size' is no setting"),
        ("ours:ngram:legnth=3", "'legnth' is no setting"),
        ("ours:ngram:wide", "'wide' is no setting"),
        ("ours:ngram:size=8:16", "size is set twice"),
        ("ours:ngram:size=", "size needs a value"),
        ("ours:head:with-ngram=yes", "with-ngram takes no value"),
        ("prompt-lookup:length=0", "length is a whole number from 1"),
        ("prompt-lookup:length=few", "length is a whole number from 1"),
        ("prompt-lookup:5", "'5' is no setting"),
        ("assisted", "first=E or model=NAME is needed"),
        ("assisted:first=2:model=m", "one of them"),
        ("early-exit:length=3", "first=E is needed"),
        ("flashspec", "first=E or model=NAME is needed"),
        ("flashspec:tree", "flashspec drafts from ngram"),
        ("flashspec:ngram:first=2", "first has no effect with ngram"),
        ("ours:as-assisted:length=3", "first=E or model=NAME is needed"),
        ("ours:as-prompt-lookup:size=3", "'size' is no setting of it; it takes length, match"),
    ],
)
def test_what_has_no_meaning_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_contender(text)


def test_sizes_multiply_ours_that_have_none() -> None:
    texts = ["plain", "ours", "ours:ngram", "ours:suffix:4", "ours:as-prompt-lookup"]
    assert [one.name for one in parse_contenders(texts, ["8", "auto"])] == [
        *("plain", "ours", "ours:ngram:8", "ours:ngram:auto", "ours:suffix:4"),
        "ours:as-prompt-lookup",
    ]
    with pytest.raises(ValueError, match="--sizes has no effect"):
        parse_contenders(["plain", "ours:suffix:4"], ["8"])


def test_the_same_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="plain is given twice"):
        parse_contenders(["plain", "ours", "plain"])


def test_an_engine_for_all_of_ours_that_name_none() -> None:
    found = parse_contenders(["plain", "ours", "ours:ngram:engine=eager"])
    assert [one.settings for one in with_engine(found, "compiled")] == [
        *({}, {"engine": "compiled"}, {"engine": "eager"})
    ]
    assert with_engine(found, None) == found
    with pytest.raises(ValueError, match="--engine has no effect"):
        with_engine(parse_contenders(["plain"]), "compiled")


def test_counterparts_have_equal_settings() -> None:
    names = ["prompt-lookup:length=5", "prompt-lookup", "ours:as-prompt-lookup:length=5"]
    found = with_engine(parse_contenders([*names, "ours:as-prompt-lookup:length=6"]), "compiled")
    assert found[2].counterpart(found) == found[0]
    assert found[3].counterpart(found) is None
    assert found[0].counterpart(found) is None
