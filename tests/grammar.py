"""A grammar like a JSON schema's in the characters of `tests.tiny`, and processors that impose it.

A record holds three numbers of one to `MAX_DIGITS` digits under fixed keys: `a=12,b=3,c=405.`,
and then the text must end. The target prefers other characters, so every mask does something.
"""

import torch
from torch import Tensor
from transformers.generation import LogitsProcessor

from tests.tiny import CHARACTERS, END, SPECIALS

KEYS = "abc"
MAX_DIGITS = 3
EOS = SPECIALS.index(END)
MARKER = len(SPECIALS)
"""The newline: a prompt for `GrammarProcessor` ends with it."""

assert CHARACTERS[0] == "\n"


def token_of(character: str) -> int:
    return len(SPECIALS) + CHARACTERS.index(character)


def tokens_of(text: str) -> list[int]:
    return [token_of(character) for character in text]


DIGITS = tokens_of("0123456789")

State = tuple[int, int]
"""Index of the key (3 behind the final dot, 4 behind the end), and the place within its field:
0 before the key, 1 before `=`, and 2 + n behind n digits."""

START: State = (0, 0)


def allowed(state: State) -> list[int]:
    """Tokens that may come next; none behind the end."""
    key, place = state
    if key >= len(KEYS):
        return [EOS] if key == len(KEYS) else []
    if place < 2:
        return [token_of(KEYS[key]) if place == 0 else token_of("=")]
    digits = place - 2
    separator = token_of("," if key < len(KEYS) - 1 else ".")
    return (DIGITS if digits < MAX_DIGITS else []) + ([separator] if digits else [])


def advance(state: State, token: int) -> State:
    """The state behind `token`, which must be allowed."""
    if token not in allowed(state):
        raise ValueError(f"token {token} is not allowed in state {state}")
    key, place = state
    if token == EOS or token in tokens_of(",."):
        return key + 1, 0
    return key, place + 1


def valid_prefix(tokens: list[int]) -> bool:
    """Whether new tokens are the beginning of a record, or all of one."""
    state = START
    for token in tokens:
        if token not in allowed(state):
            return False
        state = advance(state, token)
    return True


def complete(tokens: list[int]) -> bool:
    """Whether new tokens are a record and the end."""
    return bool(tokens) and tokens[-1] == EOS and valid_prefix(tokens)


def _masked(scores: Tensor, state: State) -> Tensor:
    mask = torch.full_like(scores, -torch.inf)
    mask[:, allowed(state)] = 0.0
    return scores + mask


class GrammarProcessor(LogitsProcessor):
    """Without state: reads everything behind the last `MARKER` again at every call."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        text = input_ids[0].tolist()
        state = START
        for token in text[len(text) - text[::-1].index(MARKER) :]:
            state = advance(state, token)
        return _masked(scores, state)


class GrammarMatcher(LogitsProcessor):
    """With state: the first call is at the prompt, each further one has one more token.

    Anything else is an error, as it would be with the matchers of real grammars.
    """

    def __init__(self) -> None:
        self.state = START
        self.length = 0
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        length = input_ids.shape[1]
        if self.length:
            if length != self.length + 1:
                raise ValueError(f"called at length {length} after {self.length}")
            self.state = advance(self.state, int(input_ids[0, -1]))
        self.length = length
        self.calls += 1
        return _masked(scores, self.state)
