"""Texts of single tokens add up to the text of all."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from inference.measuring.pieces import node_pieces, text_pieces
from tests.tiny import tiny_tokenizer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that a character may take several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama's: a word carries the space before it, which a text does not begin with."""
    words = {"\u2581the": 0, "\u2581sky": 1, "s": 2, "<unk>": 3}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


def test_a_token_per_character() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("so it is.")["input_ids"]
    assert text_pieces(tokenizer, ids) == list("so it is.")
    assert text_pieces(tokenizer, []) == []


def test_a_character_belongs_to_its_last_token() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer("aä€b")["input_ids"]
    pieces = text_pieces(tokenizer, ids)
    assert pieces == ["a", "", "ä", "", "", "€", "b"]
    cut = text_pieces(tokenizer, ids[:4])
    assert cut[:3] == ["a", "", "ä"] and cut[3] != "", "what is broken off is shown at the end"


def test_spaces_between_words_are_kept() -> None:
    tokenizer = word_tokenizer()
    assert text_pieces(tokenizer, [0, 1, 2, 0]) == ["the", " sky", "s", " the"]


def test_nodes_are_shown_behind_their_parents() -> None:
    tokenizer = word_tokenizer()
    assert node_pieces(tokenizer, [0, 1, 2, 0], [-1, 0, 0, 1]) == ["the", " sky", "s", " the"]
