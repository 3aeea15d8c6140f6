"""The special tokens around a transcript: start, language, task, timestamps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ingot.errors import CheckpointError, RequestError
from ingot.text.languages import CODES
from ingot.text.tokenizer.tokenizer_base import Tokenizer
from ingot.text.tokenizer.tokenizer_tiktoken import WHISPER_LANGUAGES, whisper_rules

if TYPE_CHECKING:  # reading checkpoints imports torch, which `ingot --help` does not wait for
    from ingot.models.whisper_generation import SpeechGeneration

Task = Literal["transcribe", "translate"]
TIMESTAMP_SECONDS = 0.02  # from one timestamp to the next
_ENGLISH_END = 50256  # of models of English alone, whose words are GPT-2's


@dataclass(frozen=True)
class SpeechTokens:
    """Token ids. ``languages``: by code. An English-only model's prompts have neither languages nor tasks."""

    end: int
    start: int
    translate: int
    transcribe: int
    start_lm: int
    previous: int
    no_speech: int
    no_timestamps: int
    languages: Mapping[str, int]
    multilingual: bool

    @property
    def first_timestamp(self) -> int:
        return self.no_timestamps + 1

    def seconds(self, token: int) -> float:
        return (token - self.first_timestamp) * TIMESTAMP_SECONDS

    def prompt(self, language: str | None, task: Task, *, timestamps: bool) -> list[int]:
        """What a transcript begins with.

        Raises:
            RequestError: the model does not know the language, or is English-only.
        """
        if not self.multilingual:
            other = "or a multilingual model, such as small in place of small.en"
            if task != "transcribe":
                what = "this model knows English alone and does not translate"
                raise RequestError(what, seen=task, allowed=f"transcribe, {other}", field="task")
            if language not in (None, "en"):
                what = "this model knows English alone"
                raise RequestError(what, seen=language, allowed=f"en, {other}", field="language")
            ids = [self.start]
        else:
            ids = [self.start, self.language(language or "en"), getattr(self, task)]
        return ids if timestamps else [*ids, self.no_timestamps]

    def language(self, code: str) -> int:
        """The token of a language.

        Raises:
            RequestError: the model does not know it.
        """
        if code not in self.languages:
            allowed = ", ".join(self.languages)
            raise RequestError(
                "the model does not know this language", seen=code, allowed=allowed, field="language"
            )
        return self.languages[code]

    def with_generation(self, generation: SpeechGeneration) -> SpeechTokens:
        """With the languages that the checkpoint names."""
        languages = self.languages if generation.languages is None else generation.languages
        multilingual = self.multilingual if generation.multilingual is None else generation.multilingual
        return replace(self, languages=languages, multilingual=multilingual)

    @classmethod
    def of_model(cls, vocab_size: int, tokenizer: Tokenizer | None) -> SpeechTokens:
        """By the tokenizer's names or, without one, by the size of the vocabulary.

        Raises:
            CheckpointError: neither tells the ids.
        """
        return cls.of_vocabulary(vocab_size) if tokenizer is None else cls.of_tokenizer(tokenizer)

    @classmethod
    def of_vocabulary(cls, size: int) -> SpeechTokens:
        """Of a published model, by the number of rows of its embedding.

        Raises:
            CheckpointError: no published model has so many.
        """
        if size not in WHISPER_LANGUAGES:
            raise CheckpointError(
                "the ids of the special tokens are unknown",
                seen=f"a vocabulary of {size} and no tokenizer",
                allowed=f"{sorted(WHISPER_LANGUAGES)}, or a folder with its tokenizer",
            )
        specials = whisper_rules(size).specials
        return cls._named({text: size - len(specials) + i for i, text in enumerate(specials)})

    @classmethod
    def of_tokenizer(cls, tokenizer: Tokenizer) -> SpeechTokens:
        """By a tokenizer's names.

        Raises:
            CheckpointError: it lacks one of them.
        """
        return cls._named(tokenizer.special_tokens)

    @classmethod
    def _named(cls, known: Mapping[str, int]) -> SpeechTokens:
        wanted = [
            *("endoftext", "startoftranscript", "translate", "transcribe", "startoflm", "startofprev"),
            *("nospeech" if "<|nospeech|>" in known else "nocaptions", "notimestamps"),
        ]
        missing = [name for name in wanted if f"<|{name}|>" not in known]
        if missing:
            raise CheckpointError(
                "the tokenizer lacks tokens of speech models",
                seen=", ".join(f"<|{name}|>" for name in missing),
                fix="download the tokenizer of this very checkpoint",
            )
        ids = [known[f"<|{name}|>"] for name in wanted]
        languages = {code: known[f"<|{code}|>"] for code in CODES if f"<|{code}|>" in known}
        end, start, translate, transcribe, start_lm, previous, no_speech, no_timestamps = ids
        return cls(
            end, start, translate, transcribe, start_lm, previous, no_speech, no_timestamps,
            languages=languages, multilingual=end != _ENGLISH_END,
        )  # fmt: skip


def non_speech_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that transcripts leave out: brackets, notes, annotations.

    Source: ``non_speech_tokens`` of OpenAI's tokenizer: each symbol alone and after a space, where it is one
    token, or any of the musical notes; and the hyphen and apostrophe that begin a word.
    """
    symbols = list('"#()*+/:;<=>@[\\]^_`{|}~「」『』')
    symbols += ["<<", ">>", "<<<", ">>>", "--", "---", "-(", "-[", "('", '("', "((", "))", "(((", ")))"]
    symbols += ["[[", "]]", "{{", "}}", "♪♪", "♪♪♪"]
    notes = set("♩♪♫♬♭♮♯")
    found = {tokenizer.encode_parts([text])[0] for text in (" -", " '")}
    for symbol in [*symbols, *sorted(notes)]:
        for ids in (tokenizer.encode_parts([symbol]), tokenizer.encode_parts([" " + symbol])):
            if len(ids) == 1 or symbol in notes:
                found.add(ids[0])
    return frozenset(found)
