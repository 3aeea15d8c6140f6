"""Scores of answers: exact match and ROUGE-L.

ROUGE-L here agrees with the rouge-score package without stemming.

    rouge_l("a cat sat", "a cat sat down", "en")  # F-measure, 0 to 1
"""

from __future__ import annotations

import re
from collections.abc import Sequence


def tokens_of(text: str, language: str) -> list[str]:
    """English: runs of a-z and digits of the lower-cased text. Chinese: characters that are no space."""
    if language == "zh":
        return [character for character in text if not character.isspace()]
    return re.findall(r"[a-z0-9]+", text.lower())


def _common(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(second) + 1)
    for left in first:
        diagonal = 0
        for column, right in enumerate(second, 1):
            diagonal, row[column] = (
                row[column],
                diagonal + 1 if left == right else max(row[column], row[column - 1]),
            )
    return row[-1]


def rouge_l(prediction: str, reference: str, language: str) -> float:
    """F-measure of the longest common subsequence (Lin 2004), 0 to 1."""
    predicted, wanted = tokens_of(prediction, language), tokens_of(reference, language)
    common = _common(predicted, wanted)
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def exact(prediction: str, reference: str) -> bool:
    """True where the answers are the same but for white space around them and one closing full stop."""
    return prediction.strip().rstrip("。.") == reference.strip().rstrip("。.")
