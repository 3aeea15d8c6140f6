"""Word and character error rates by jiwer, of texts normalised as OpenAI's Whisper does it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from ingot.errors import DeviceError, to_install
from ingot.text.languages import NO_SPACES


@dataclass(frozen=True)
class Rates:
    """Edits over the words, or characters, of all references, in percent; None if these have none."""

    wer: float | None
    cer: float | None
    substitutions: int
    deletions: int
    insertions: int
    words: int


class Wer:
    """Error rates of normalised texts.

    English is normalised by Whisper's English normaliser, other languages by its basic one, which takes
    letters as words in languages without spaces.

    Raises:
        DeviceError: jiwer or whisper-normalizer is not installed.
    """

    def __init__(self) -> None:
        modules = {"jiwer": "jiwer", "whisper_normalizer": "whisper-normalizer"}
        missing = [name for module, name in modules.items() if importlib.util.find_spec(module) is None]
        if missing:
            what = f"{' and '.join(missing)} is not installed, and eval wer needs it"
            raise DeviceError(what, fix=to_install("eval"))
        from whisper_normalizer.basic import BasicTextNormalizer
        from whisper_normalizer.english import EnglishTextNormalizer

        self._english = EnglishTextNormalizer()
        self._basic = BasicTextNormalizer()
        self._letters = BasicTextNormalizer(split_letters=True)

    def normalised(self, text: str, language: str) -> str:
        if language == "en":
            return str(self._english(text)).strip()
        return str((self._letters if language in NO_SPACES else self._basic)(text)).strip()

    def rates(self, references: Sequence[str], found: Sequence[str], languages: Sequence[str]) -> Rates:
        import jiwer

        right = [self.normalised(text, code) for text, code in zip(references, languages, strict=True)]
        hypotheses = [self.normalised(text, code) for text, code in zip(found, languages, strict=True)]
        words = jiwer.process_words(right, hypotheses)
        letters = jiwer.process_characters(_letters(right, languages), _letters(hypotheses, languages))
        count = sum(len(text.split()) for text in right)
        return Rates(
            100 * words.wer if count else None,
            100 * letters.cer if count else None,
            words.substitutions,
            words.deletions,
            words.insertions,
            count,
        )


def _letters(texts: Sequence[str], languages: Sequence[str]) -> list[str]:
    """Normalised texts without the spaces between letters that were taken as words."""
    both = zip(texts, languages, strict=True)
    return [text.replace(" ", "") if code in NO_SPACES else text for text, code in both]
