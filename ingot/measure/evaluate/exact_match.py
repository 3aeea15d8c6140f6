"""Exact answers by SQuAD's rule (Rajpurkar et al., 2016), with Unicode's punctuation and full-width forms
folded.

    exact("The  Cat.", ["cat"])
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_BETWEEN_DIGITS = re.compile(r"(?<=\d)[.,:/](?=\d)")


def normalised(text: str) -> str:
    """NFKC, lower case, without punctuation (between digits, and a minus before one, it stays), English
    articles and spare white space.
    """
    folded = unicodedata.normalize("NFKC", text).lower()
    kept = {match.start() for match in _BETWEEN_DIGITS.finditer(folded)}
    kept |= {match.start() for match in re.finditer(r"(?<!\w)-(?=\d)", folded)}
    marks = "".join(
        " " if unicodedata.category(one).startswith("P") and place not in kept else one
        for place, one in enumerate(folded)
    )
    return " ".join(_ARTICLES.sub(" ", marks).split())


def exact(answer: str, references: Sequence[str]) -> bool:
    """Whether the answer is one of the references, both normalised."""
    return normalised(answer) in {normalised(one) for one in references}


def contains(answer: str, references: Sequence[str]) -> bool:
    """Whether a reference is in the answer, both normalised: whole words and numbers, CJK anywhere."""
    text = normalised(answer)
    return any(_stands_in(normalised(one), text) for one in references)


def _stands_in(part: str, text: str) -> bool:
    if not part:
        return not text
    before = r"(?<![0-9a-z-])(?<!\d[.,:/])" if re.match(r"[0-9a-z]", part) else ""
    after = r"(?![0-9a-z])(?![.,:/]\d)" if re.search(r"[0-9a-z]$", part) else ""
    return re.search(before + re.escape(part) + after, text) is not None
