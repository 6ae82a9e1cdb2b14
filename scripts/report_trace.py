"""The decode trace: a row per round, its tokens marked by where they came from, its draft tree.

Rows are HTML. Trees are data in one JSON block beside them, from which `report.js` draws the tree
of the row that has the mouse or the keyboard focus.

A token is *accepted* (a draft token that the target's rule took), *bonus* (the target's own after
a path that was accepted to its end) or *recovered* (the target's own where it took no draft).
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from inference.measuring.run_records import RequestRecord, RoundRecord, Run, Trace
from scripts.report_html import Html, joined, number, tag, visible

KINDS = {
    "accepted": "draft token that was accepted",
    "recovered": "the target's own token, no draft was taken there",
    "bonus": "the target's own token behind a draft accepted to its end",
    "prefill": "given by the prefill, belongs to no round",
}
DIGITS = 4
"""Of probabilities in the trees."""


def last_kind(record: RoundRecord) -> str | None:
    """What the target's own token of a round is; None where the text ended before it.

    Without a tree a round that accepted as many tokens as its tree is deep counts as bonus.
    """
    if record.ended:
        return None
    if record.trace is None:
        return "bonus" if record.accepted == record.depth else "recovered"
    end = record.trace.path[-1] if record.trace.path else 0
    return "recovered" if record.trace.children(end) else "bonus"


def kinds(record: RoundRecord) -> list[str]:
    """One of `KINDS` for each token that a round emitted."""
    last = last_kind(record)
    return ["accepted"] * record.accepted + ([] if last is None else [last])


def text_of(token: str, kind: str) -> Html:
    """A token of the text, marked by its kind."""
    return tag("span", tag("span", f"{kind} ", class_="unseen"), visible(token), class_=f"t {kind}")


def legend() -> Html:
    """What the marks mean."""
    items = [
        tag("li", tag("span", kind, class_=f"t {kind}"), meaning) for kind, meaning in KINDS.items()
    ]
    return tag("ul", *items, class_="legend kinds")


def chosen_requests(run: Run, cell: int, limit: int) -> list[RequestRecord]:
    """The first requests of a cell whose rounds hold trees."""
    traced = [
        request
        for request in run.requests_of(cell)
        if any(each.trace is not None for each in run.rounds_of(request))
    ]
    return traced[:limit]


def request_rows(
    request: RequestRecord, rounds: Sequence[RoundRecord], name: str, title: str, opened: bool
) -> tuple[Html, dict[str, Any]]:
    """One decoded text, folded.

    Args:
        request: the text.
        rounds: of it.
        name: prefix of ids on the page, letters and digits.
        title: of the cell, shown in front.
        opened: unfolded from the start.

    Returns:
        HTML; and the tree of each row by its id.
    """
    trees = {}
    rows = [_row("prefill", [(request.pieces[0], "prefill")], "", None)]
    at = 1
    for record in rounds:
        own = kinds(record)
        pieces = request.pieces[at : at + len(own)]
        at += len(own)
        identity = f"{name}-{record.round}"
        if record.trace is not None:
            trees[identity] = tree_data(record, pieces[-1] if pieces else "")
        tokens = list(zip(pieces, own, strict=True))
        share = f"{record.accepted}/{record.depth}"
        rows.append(_row(str(record.round + 1), tokens, share, identity if record.trace else None))
    emitted = sum(len(record.emitted) for record in rounds)
    ratio = emitted / len(rounds) if rounds else None
    facts = (
        f"{request.prompt_tokens} prompt tokens, {len(request.tokens)} new in {len(rounds)} "
        f"rounds: {number(ratio)} a round"
    )
    turn = f", turn {request.turn + 1}" if request.turn else ""
    summary = tag(
        "summary",
        tag("strong", f"{request.category} · {request.id}{turn}"),
        tag("span", title, class_="where"),
        tag("span", facts, class_="facts"),
    )
    listed = tag("ol", *rows, class_="rounds", aria_label=f"rounds of {request.id}")
    heads = tag(
        "div", tag("span", "round"), tag("span", "tokens"), tag("span", "accepted/depth"),
        class_="heads", aria_hidden="true",
    )  # fmt: skip
    return tag("details", summary, heads, listed, class_="trace", open=opened), trees


def _row(
    number_text: str, tokens: Sequence[tuple[str, str]], share: str, identity: str | None
) -> Html:
    text = tag("span", *(text_of(piece, kind) for piece, kind in tokens), class_="tokens")
    parts = [tag("span", number_text, class_="n"), text, tag("span", share, class_="share")]
    if identity is None:
        return tag("li", tag("div", *parts, class_="round"))
    button = tag(
        "button", *parts, class_="round", type="button", aria_expanded="false",
        aria_controls=identity,
    )  # fmt: skip
    panel = {"class_": "tree", "id": identity, "hidden": True}
    return tag("li", button, tag("div", **panel))


def tree_data(record: RoundRecord, last: str) -> dict[str, Any]:
    """What `report.js` draws: the nodes in the order of a tree, root first.

    Args:
        record: with its trace.
        last: text of the last token that the round emitted.

    Returns:
        round, kind and text of the target's own token, and columns of the nodes: text, level,
        state (2 accepted, 1 tried and not taken, 0 not reached), p and q.
    """
    trace = record.trace
    assert trace is not None
    taken = {0, *trace.path}
    order = list(_walk(trace, 0, 0, taken))
    kind = last_kind(record)
    return {
        "round": record.round + 1,
        "context": record.context,
        "last": None if kind is None else [kind, visible(last)],
        "text": [_shown(trace.pieces[node]) for node, _ in order],
        "level": [level for _, level in order],
        "state": [
            2 if node in taken else int(trace.parents[node] in taken) for node, _ in order
        ],
        "p": [_rounded(trace.p[node]) for node, _ in order],
        "q": [_rounded(trace.q[node]) for node, _ in order],
    }  # fmt: skip


def _walk(trace: Trace, node: int, level: int, taken: set[int]) -> Iterable[tuple[int, int]]:
    """Nodes with their level: a node, then the tree under each child, the accepted one first."""
    todo = [(node, level)]
    below: dict[int, list[int]] = {}
    for child, parent in enumerate(trace.parents):
        below.setdefault(parent, []).append(child)
    while todo:
        node, level = todo.pop()
        yield node, level
        children = sorted(below.get(node, []), key=lambda child: child not in taken)
        todo.extend((child, level + 1) for child in reversed(children))


def _shown(piece: str) -> str:
    """A node's text: here a leading space counts, because it tells tokens apart."""
    text = visible(piece)
    return "␣" + text[1:] if text.startswith(" ") else text


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS)


def script_data(trees: dict[str, Any]) -> Html:
    """A JSON block that nothing in it can close."""
    text = json.dumps(trees, separators=(",", ":"))  # ASCII only
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return tag("script", Html(text), type="application/json", id="trees")


def trace_section(blocks: Sequence[Html]) -> Html:
    """All texts, with the legend."""
    hint = (
        "One row a round. Point at a row, or reach it with Tab and ↑ ↓, to see its draft tree with "
        "the target's probability p and the draft's q of every token; Enter or a click keeps it "
        "open, Escape closes it. At temperature 0, p is 1 for the target's choice and 0 for the "
        "others."
    )
    return joined([tag("p", hint), legend(), *blocks])
