"""How much two transcripts differ.

Owns the word error rate between them. Their words are compared without case and punctuation, and without a
normaliser of one language. Knows no reference: neither transcript need be right.

    difference(t("talk.mp3"), t("talk.mp3", batched=True))       # 0.012: one word in eighty
"""

from __future__ import annotations

import re

import numpy as np

from ingot.speech.recording import Transcript

_WORDS = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")


def difference(one: Transcript, other: Transcript) -> float:
    """Words to change, insert or delete, over the words of the first; where that has none, their number."""
    words, others = (_WORDS.findall(each.text.lower()) for each in (one, other))
    return edits(words, others) / max(len(words), 1)


def edits(one: list[str], other: list[str]) -> int:
    """Levenshtein's distance in words; a row of the table at a time."""
    known = {word: i for i, word in enumerate({*one, *other})}
    row, target = np.arange(len(other) + 1), np.array([known[word] for word in other], dtype=np.int64)
    places = np.arange(len(other) + 1)
    for word in one:
        changed = np.minimum(row[1:] + 1, row[:-1] + (target != known[word]))
        row = np.concatenate([row[:1] + 1, changed])
        row = np.minimum.accumulate(row - places) + places  # insertions
    return int(row[-1])
