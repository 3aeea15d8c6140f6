"""The rules of Whisper's .tiktoken vocabularies.

Covers the special tokens behind their last rank: languages, tasks, timestamps. Source: OpenAI's Whisper.

    TiktokenTokenizer.from_ranks(folder, path, whisper_rules(51866))
"""

from __future__ import annotations

from ingot.errors import TokenizerError
from ingot.text.languages import CODES
from ingot.text.tokenizer.tokenizer_tiktoken import END_OF_TEXT, GPT2_SPLIT, TiktokenRules

LANGUAGES = {51864: 99, 51865: 99, 51866: 100}  # by the size of the model's vocabulary
TIMESTAMPS = 1501  # 0.00 to 30.00


def whisper_rules(vocab_size: int | None) -> TiktokenRules:
    """Rules of a published model.

    Raises:
        TokenizerError: none has so large a vocabulary.
    """
    if vocab_size not in LANGUAGES:
        raise TokenizerError(
            "vocab_size of config.json is of no published Whisper", seen=vocab_size, allowed=sorted(LANGUAGES)
        )
    names = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")
    middle = ("startoftranscript", *CODES[: LANGUAGES[vocab_size]], *names)
    times = (f"{index / 50:.2f}" for index in range(TIMESTAMPS))
    return TiktokenRules(GPT2_SPLIT, (END_OF_TEXT, *(f"<|{name}|>" for name in (*middle, *times))))


def whisper_vocabulary(vocab_size: int | None) -> str:
    """The name of OpenAI's file without its end, by the size of the model's vocabulary."""
    return "gpt2" if vocab_size == min(LANGUAGES) else "multilingual"
