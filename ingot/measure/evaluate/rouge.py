"""ROUGE of summaries in English and Chinese, by the library rouge-score.

Source: Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ingot.errors import ConfigError, DeviceError, to_install

KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
LANGUAGES = ("auto", "en", "zh")

# Han with its extensions and compatibility forms, kana, Hangul syllables: scripts written without spaces, or
# whose words the library drops.
_CJK = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\u3040-\u30ff\uac00-\ud7af\U00020000-\U0003ffff"
_IS_CJK = re.compile(f"[{_CJK}]")
_WORDS_OR_CHARACTERS = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])\s*")


@dataclass(frozen=True)
class RougeScore:
    """Precision, recall and their harmonic mean, each 0 to 100."""

    precision: float
    recall: float
    f1: float


class Characters:
    """A tokenizer for rouge-score: each CJK character, each run of other letters and digits in lower case."""

    def tokenize(self, text: str) -> list[str]:
        return _WORDS_OR_CHARACTERS.findall(text.lower())


class Rouge:
    """ROUGE-1, 2, L and Lsum.

    Args:
        language: ``en`` counts the library's words (runs of a-z and 0-9 in lower case), ``zh`` characters;
            ``auto`` takes characters where a reference holds any of CJK.
        stemmer: Porter's, for ``en``.

    Raises:
        DeviceError: rouge-score is not installed.
    """

    def __init__(self, language: str = "auto", *, stemmer: bool = False) -> None:
        if language not in LANGUAGES:
            raise ConfigError("unknown language", seen=language, allowed=LANGUAGES, field="lang")
        check_rouge()
        from rouge_score.rouge_scorer import RougeScorer

        self._language = language
        self._words = RougeScorer(list(KINDS), use_stemmer=stemmer)
        self._characters = RougeScorer(list(KINDS), tokenizer=Characters())

    def score(self, prediction: str, references: Sequence[str]) -> dict[str, RougeScore]:
        """The scores against the reference that gives the highest F1, for each kind by itself."""
        found = [self._one(prediction, reference) for reference in references]
        return {kind: max((one[kind] for one in found), key=lambda score: score.f1) for kind in KINDS}

    def figures(self, prediction: str, references: Sequence[str]) -> dict[str, float]:
        """The same by name: ``rouge1`` is F1, beside ``rouge1_precision`` and ``rouge1_recall``."""
        scores = self.score(prediction, references)
        found = {kind: one.f1 for kind, one in scores.items()}
        for kind, one in scores.items():
            found |= {f"{kind}_precision": one.precision, f"{kind}_recall": one.recall}
        return found

    def _one(self, prediction: str, reference: str) -> dict[str, RougeScore]:
        chinese = is_cjk(reference) if self._language == "auto" else self._language == "zh"
        scorer = self._characters if chinese else self._words
        plain = scorer.score(reference, prediction)
        lines = scorer.score(sentences(reference), sentences(prediction))
        raw = {kind: (lines if kind == "rougeLsum" else plain)[kind] for kind in KINDS}
        return {
            kind: RougeScore(100 * one.precision, 100 * one.recall, 100 * one.fmeasure)
            for kind, one in raw.items()
        }


def is_cjk(text: str) -> bool:
    return _IS_CJK.search(text) is not None


def sentences(text: str) -> str:
    """The text with one sentence per line, as ROUGE-Lsum needs it; a text of several lines keeps them."""
    stripped = text.strip()
    return stripped if "\n" in stripped else "\n".join(filter(None, _SENTENCE_END.split(stripped)))


def check_rouge() -> None:
    """Raise DeviceError if rouge-score is not installed."""
    if importlib.util.find_spec("rouge_score") is None:
        raise DeviceError(
            "rouge-score is not installed, and summaries and captions are scored with it",
            fix=f"{to_install('eval')} (or pip install rouge-score)",
        )
