"""A tiny Whisper with random weights.

model = write_speech(tmp_path)      # Hugging Face's class, with the same weights
write_multilingual(tmp_path)        # with the ids and windows of the published models of many languages
write_words(tmp_path)               # a vocabulary for it
"""

from __future__ import annotations

import base64
from itertools import chain, count, islice, product
from pathlib import Path
from typing import Any

from transformers import WhisperConfig, WhisperForConditionalGeneration

from ingot.models.speech_tokens import SpeechTokens
from tests.tiny_models import randomize

SIZE, INNER, LAYERS, HEADS, MELS, FRAMES, POSITIONS, VOCAB = 32, 48, 2, 4, 8, 80, 96, 97


def write_speech(folder: Path, seed: int = 0, **changes: Any) -> WhisperForConditionalGeneration:
    """Write a checkpoint of random weights, with ``changes`` to its config; returns Hugging Face's model."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "d_model": SIZE,
        "encoder_layers": LAYERS,
        "decoder_layers": LAYERS,
        "encoder_attention_heads": HEADS,
        "decoder_attention_heads": HEADS,
        "encoder_ffn_dim": INNER,
        "decoder_ffn_dim": INNER,
        "num_mel_bins": MELS,
        "max_source_positions": FRAMES // 2,
        "max_target_positions": POSITIONS,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    }
    model = randomize(WhisperForConditionalGeneration(WhisperConfig(**sizes | changes)).eval(), seed)
    model.save_pretrained(folder)
    return model


def write_multilingual(folder: Path, seed: int = 0, **changes: int) -> Path:
    """A tiny checkpoint with the ids of many languages and whole windows, without a tokenizer: its text is
    ids.
    """
    names = SpeechTokens.of_vocabulary(51865)
    sizes = {
        "vocab_size": 51865,
        "num_mel_bins": 80,
        "max_source_positions": 1500,
        "max_target_positions": 448,
    }
    ends = {"eos_token_id": names.end, "pad_token_id": names.end, "bos_token_id": names.end}
    write_speech(folder, seed, **sizes | ends | changes, decoder_start_token_id=names.start)
    return folder


def write_words(folder: Path) -> None:
    """A vocabulary as large as the published one of many languages: single bytes, and runs of letters, with a
    space before them and without. Each run is a shorter one and a letter.
    """
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    runs = ("".join(run) for length in count(1) for run in product(letters, repeat=length))
    words = chain.from_iterable((f" {run}", *([run] if len(run) > 1 else [])) for run in runs)
    singles = [bytes([one]) for one in range(256)]
    most = SpeechTokens.of_vocabulary(51865).end
    tokens = islice(chain(singles, (word.encode() for word in words)), most)
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    (folder / "multilingual.tiktoken").write_text("".join(lines))
