"""Texts of single tokens, so that they add up to the text of all."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

BROKEN = "\N{REPLACEMENT CHARACTER}"


def text_pieces(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[str]:
    """What each token adds to the text.

    A character that is spread over several tokens belongs to the last of them; the others add "".
    What a token looks like may depend on the one before it (a space, at the start of a word), so
    each is decoded behind what is still open.

    Args:
        tokenizer: of the target; special tokens are shown.
        tokens: ids.
    """
    pieces: list[str] = []
    start = done = 0  # tokens[start:done] is context that is known already
    for end in range(1, len(tokens) + 1):
        before, text = _text(tokenizer, tokens[start:done]), _text(tokenizer, tokens[start:end])
        if text.endswith(BROKEN) and end < len(tokens):
            pieces.append("")
            continue
        pieces.append(text[len(before) :])
        start, done = done, end
    return pieces


def node_pieces(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], parents: Sequence[int]
) -> list[str]:
    """What each node of a tree looks like behind its parent.

    Args:
        tokenizer: of the target.
        tokens: N ids.
        parents: N, -1 for the root.
    """
    alone = [_text(tokenizer, [token]) for token in tokens]
    pieces = alone[:1]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        both = _text(tokenizer, [tokens[parent], token])
        pieces.append(both[len(alone[parent]) :])
    return pieces


def _text(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))
