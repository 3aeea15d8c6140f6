"""Byte-pair encoding learned from texts: the 256 bytes, then the most frequent pair again and again.

Ties go to the pair that sorts first, so the same texts give the same ranks.

    train_bpe(texts, ranks=2800, keep_single="林周")
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise

import regex  # type: ignore[import-untyped]

from recipes.tokenizer import SPLIT

Pair = tuple[bytes, bytes]


class _Pairs:
    """Counts of neighbouring pairs over all words, kept up to date as pairs are merged."""

    def __init__(self, words: Counter[str], blocked: frozenset[bytes]) -> None:
        self.words = [[bytes([b]) for b in word.encode()] for word in words]
        self.counts = list(words.values())
        self.blocked = blocked
        self.pairs: Counter[Pair] = Counter()
        self.where: defaultdict[Pair, set[int]] = defaultdict(set)
        for index in range(len(self.words)):
            self._count(index, 1)

    def _count(self, index: int, sign: int) -> None:
        word = self.words[index]
        for pair in pairwise(word):
            self.pairs[pair] += sign * self.counts[index]
            if sign > 0:
                self.where[pair].add(index)

    def _allowed(self, pair: Pair) -> bool:
        return not (self.blocked and (pair[0] in self.blocked or pair[1] in self.blocked))

    def best(self) -> Pair:
        """The most frequent pair that may be merged."""
        allowed = (item for item in self.pairs.items() if self._allowed(item[0]))
        return max(allowed, key=lambda item: (item[1], item[0]))[0]

    def merge(self, pair: Pair) -> None:
        """Join ``pair`` wherever it stands."""
        for index in sorted(self.where.pop(pair, ())):
            self._count(index, -1)
            self.words[index] = _joined(self.words[index], pair)
            self._count(index, 1)
        self.pairs.pop(pair, None)


def _joined(word: list[bytes], pair: Pair) -> list[bytes]:
    found: list[bytes] = []
    position = 0
    while position < len(word):
        if tuple(word[position : position + 2]) == pair:
            found.append(pair[0] + pair[1])
            position += 2
        else:
            found.append(word[position])
            position += 1
    return found


def train_bpe(
    texts: Iterable[str], ranks: int, keep_single: str = "", rare: int = 0, split: str = SPLIT
) -> dict[bytes, int]:
    """Learn ``ranks`` tokens (256 bytes included) from ``texts`` cut by ``split``, Qwen's pattern.

    A character outside ASCII that occurs more than ``rare`` times gets a token of its own before any pair is
    counted; the others are spelled in bytes. Characters in ``keep_single`` always have one, and are never
    joined with a neighbour, so what is spelled with them is spelled the same wherever it stands.

    Raises:
        ValueError: bytes and characters alone take more than ``ranks`` tokens.
    """
    words: Counter[str] = Counter()
    for text in texts:
        words.update(regex.findall(split, text))
    seen: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            seen[character] += count
    characters = {c for c, count in seen.items() if not c.isascii() and count > rare} | set(keep_single)
    vocabulary = {bytes([b]): b for b in range(256)}
    pairs = _Pairs(words, frozenset(character.encode() for character in keep_single))
    for character in sorted(characters):
        data = character.encode()
        for end in range(2, len(data) + 1):
            _add(vocabulary, pairs, (data[: end - 1], data[end - 1 : end]))
    if len(vocabulary) > ranks:
        raise ValueError(f"bytes and characters take {len(vocabulary)} ranks, more than {ranks}; raise rare")
    while len(vocabulary) < ranks:
        _add(vocabulary, pairs, pairs.best())
    return vocabulary


def _add(vocabulary: dict[bytes, int], pairs: _Pairs, pair: Pair) -> None:
    if pair[0] + pair[1] not in vocabulary:
        vocabulary[pair[0] + pair[1]] = len(vocabulary)
    pairs.merge(pair)
