"""The options of a transcriber's calls by name.

Covers their types for type checkers and editors; what they mean, ``TranscribeOptions`` and ``LLM`` say.

    def batch(self, sources: Sequence[Source], **options: Unpack[TranscribeValues]) -> list[Transcript]: ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.models.speech_tokens import Task


class TranscribeValues(TypedDict, total=False):
    """Fields of ``TranscribeOptions``."""

    language: str | None
    task: Task
    timestamps: bool
    word_timestamps: bool
    prepend_punctuations: str
    append_punctuations: str
    chunked: bool
    clip_timestamps: Sequence[float] | str
    temperatures: Sequence[float] | float
    beam_size: int | None
    patience: float | None
    length_penalty: float | None
    best_of: int | None
    compression_ratio: float | None
    logprob: float | None
    no_speech: float | None
    hallucination_silence_threshold: float | None
    condition_on_previous_text: bool
    initial_prompt: str | None
    carry_initial_prompt: bool
    prefix: str | None
    hotwords: str | None
    suppress: Sequence[int] | None
    suppress_blank: bool
    max_initial_timestamp: float | None
    seed: int
    max_new_tokens: int | None


class EngineValues(TypedDict, total=False):
    """What ``LLM`` takes beside path and device."""

    compute_dtype: str
    runtime: RuntimeConfig | None
    max_batch_size: int | None
    max_seq_len: int | None
    layers: str | None
    quant: str | QuantConfig | None
    chat_template: str | None
    revision: str | None
