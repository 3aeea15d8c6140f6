"""Grammars for models of random weights, which have no text: a stand-in, and a regex over made-up tokens.

matcher = half_matcher(vocab_size=151936)
matcher = text_matcher(vocab_size=151936)     # needs llguidance
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ingot.config.grammar_spec import Grammar
from ingot.text.grammar.grammar_compiler import GrammarMatcher, mask_words
from ingot.text.grammar.lark import lark_of
from ingot.text.grammar.vocabulary import new_matcher, vocabulary

SECONDS = 100e-6  # per mask; llguidance takes some 40 µs for JSON and 150,000 tokens, at worst 15 ms
_MASKS = 16


class HalfMatcher(GrammarMatcher):
    """Allows a random half of the vocabulary, another one after every token. It takes SECONDS, in which other
    threads run.
    """

    def __init__(self, vocab_size: int) -> None:
        chance = np.random.default_rng(1)
        shape = (_MASKS, mask_words(vocab_size))
        self._masks = chance.integers(-(2**31), 2**31, shape, dtype=np.int32)
        self._masks[:, -1] &= (1 << (vocab_size - 1) % 32) - 1  # beyond the vocabulary is nothing

    def mask_into(self, bits: npt.NDArray[np.int32], output_ids: Sequence[int]) -> None:
        time.sleep(SECONDS)
        bits[:] = self._masks[len(output_ids) % _MASKS]

    def may_end(self, output_ids: Sequence[int]) -> bool:
        return True

    def copy(self) -> HalfMatcher:
        return self


def text_matcher(vocab_size: int) -> GrammarMatcher:
    """llguidance's matcher of quoted words without an end, over all bytes and random words."""
    chance = random.Random(1)
    tokens = [bytes([i]) for i in range(256)]
    letters = b"abcdefghijklmnopqrstuvwxyz "
    tokens += [bytes(chance.choices(letters, k=chance.randint(2, 8))) for _ in range(vocab_size - 256)]
    grammar = Grammar.regex('(?:"[A-Za-z ]{0,40}", ?)*')
    start = new_matcher(vocabulary(tokens[:vocab_size]), lark_of(grammar))
    return GrammarMatcher(start, vocab_size, end_ids=())
