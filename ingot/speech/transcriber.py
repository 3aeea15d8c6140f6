"""Recordings to text with one engine.

Owns the calls: files and samples in, transcripts out, many recordings sharing decode steps. Knows no window.

    t = Transcriber("engine")
    print(t("talk.mp3").text)
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, Self, TypeVar

import numpy as np
import torch

from ingot.config.model import DecoderConfig
from ingot.errors import RequestError
from ingot.llm.llm import LLM
from ingot.llm.outputs import Output
from ingot.llm.prompts import Input, Prompt
from ingot.processors.audio import read_audio
from ingot.speech.options import TranscribeOptions
from ingot.speech.recording import Transcript, transcribe_recording
from ingot.speech.segments import Segment
from ingot.speech.window import Asked, Decoded, Vocabulary, decode_window

Source = str | Path | bytes | torch.Tensor | np.ndarray
Found = TypeVar("Found")


class Transcriber:
    """An engine that hears.

    Args:
        source: an engine, or a checkpoint of Whisper.
        options: of ``LLM``: device, compute_dtype, quant, max_batch_size …

    Raises:
        RequestError: the model takes no speech.
    """

    def __init__(self, source: str | Path, device: str = "auto", **options: Any) -> None:
        self._setup(LLM(source, device, **options))

    @classmethod
    def of_llm(cls, llm: LLM) -> Self:
        """An engine that is loaded already.

        Raises:
            RequestError: the model takes no speech.
        """
        transcriber = cls.__new__(cls)
        transcriber._setup(llm)
        return transcriber

    def _setup(self, llm: LLM) -> None:
        manifest = llm.engine.manifest
        config = manifest.model
        self.llm, self._mels = llm, mel_bins(config)
        tokenizer, longest = llm.engine.text.tokenizer, config.max_positions
        self.vocabulary = Vocabulary.of_model(config, tokenizer, longest, manifest.generation)

    def __call__(self, source: Source, **options: Any) -> Transcript:
        """Transcribe one recording: a file, its bytes, or samples [N] at 16 kHz.

        Args:
            options: fields of ``TranscribeOptions``.

        Raises:
            RequestError: it is no audio that can be read, or an option is out of range.
        """
        return self._transcribe(_samples(source), TranscribeOptions(**options))

    def batch(self, sources: Sequence[Source], **options: Any) -> list[Transcript]:
        """Transcribe recordings whose windows share steps; each gives what it gives alone."""
        wanted = TranscribeOptions(**options)
        together = max(1, min(len(sources), self.llm.executor.admission.max_batch_size))
        with ThreadPoolExecutor(together) as pool:
            return list(pool.map(lambda source: self._transcribe(_samples(source), wanted), sources))

    def follow(
        self, source: Source, heard: Callable[[Segment], None], left: Event, **options: Any
    ) -> Transcript:
        """Transcribe one recording; ``heard`` is told each segment as it is known.

        Raises:
            CancelledError: ``left`` was set; windows that wait are not begun.
        """
        return self._transcribe(_samples(source), TranscribeOptions(**options), heard, left)

    def stream(self, source: Source, **options: Any) -> Generator[Segment, None, Transcript]:
        """Segments of one recording, each as soon as it is known; the generator's value is the transcript.
        Closing it ends the work.
        """
        wanted, samples = TranscribeOptions(**options), _samples(source)
        heard: SimpleQueue[Segment | BaseException | Transcript] = SimpleQueue()
        left = Event()

        def work() -> None:
            try:
                heard.put(self._transcribe(samples, wanted, heard.put, left))
            except BaseException as error:  # goes on in the reader's thread
                heard.put(error)

        thread = Thread(target=work, daemon=True)
        thread.start()
        try:
            while not isinstance(found := heard.get(), Transcript):
                if isinstance(found, BaseException):
                    raise found
                yield found
            return found
        finally:
            left.set()
            thread.join()

    def decode(self, features: torch.Tensor, previous: Sequence[int] = (), **options: Any) -> Decoded:
        """One window; features: [mels, 3000]. ``previous``: tokens that were said before."""
        wanted = TranscribeOptions(**options)
        language = wanted.language or ("en" if self.vocabulary.tokens.multilingual else None)
        return self._answered(decode_window(self.vocabulary, features, wanted, language, previous))

    def logits(self, features: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
        """Teacher-forced logits, float32 [len(token_ids), vocab_size]; features: [mels, frames]."""
        return self.llm.logits(Prompt([Input(features), list(token_ids)]))

    def _transcribe(
        self,
        samples: torch.Tensor,
        options: TranscribeOptions,
        heard: Callable[[Segment], None] = lambda segment: None,
        left: Event | None = None,
    ) -> Transcript:
        on_device = samples.to(self.llm.engine.device)
        asking = transcribe_recording(self.vocabulary, on_device, self._mels, options, heard)
        return self._answered(asking, left)

    def _answered(self, asking: Generator[Asked, Output, Found], left: Event | None = None) -> Found:
        """What becomes of someone who asks, once all is answered; ``left``: he no longer waits."""
        try:
            asked = next(asking)
            while left is None or not left.is_set():
                asked = asking.send(self.llm.generate(asked.prompt, asked.params)[0])
        except StopIteration as ended:
            found: Found = ended.value
            return found
        raise CancelledError


def mel_bins(config: DecoderConfig) -> int:
    """Of the features that a model hears.

    Raises:
        RequestError: it takes no speech.
    """
    if config.kind != "cross" or config.encoder is None:
        seen = f"{config.architecture} ({config.kind})"
        raise RequestError("this engine does not take speech", seen=seen, fix="an engine of Whisper")
    return config.encoder.features[0]


def _samples(source: Source) -> torch.Tensor:
    """float32 [N] at 16 kHz."""
    if isinstance(source, str | Path | bytes):
        return read_audio(source)
    samples = torch.as_tensor(source).float().cpu()
    if samples.dim() != 1 or not samples.isfinite().all():
        seen = f"shape {tuple(samples.shape)}"
        raise RequestError("samples must be numbers [N], one channel at 16 kHz", seen=seen)
    return samples
