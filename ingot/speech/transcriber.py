"""The transcriber: recordings to text with one engine."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypedDict, TypeVar, Unpack

import numpy as np
import torch

from ingot.audio.log_mel import HOP, RATE, WINDOW, LongLogMel
from ingot.audio.recording_samples import Recording, read_audio, samples_of_array
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.errors import RequestError
from ingot.llm.llm import LLM
from ingot.llm.prompt_inputs import Input, Prompt
from ingot.speech.batched_windows import CancelToken, run_concurrently, run_in_order
from ingot.speech.dtw_alignment import alignment_heads
from ingot.speech.recording_features import Request, Transcript, mel_bins, transcribe_recording
from ingot.speech.segments import Segment, moved
from ingot.speech.speech_options import TranscribeOptions, TranscribeValues
from ingot.speech.voice_activity import Detector, VoiceDetector, silences, speech_chunks
from ingot.speech.window_decoding import Decoded, Vocabulary, decode_window, detect_language
from ingot.speech.word_times import ScoreRequest

_FILES_IN_CHUNKS = 2  # at once: while one ends, the next fills the steps
_VAD = "samples -> [(start, end), ...] in seconds"
OnSegment = Callable[[Segment], None]
Source = Recording | torch.Tensor | np.ndarray | list[float]
Found = TypeVar("Found")


class EngineValues(TypedDict, total=False):
    """What ``LLM`` takes besides path and device, for type checkers and editors."""

    compute_dtype: str
    runtime: RuntimeConfig | None
    max_batch_size: int | None
    max_seq_len: int | None
    layers: str | None
    quant: str | QuantConfig | None
    chat_template: str | None
    tokenizer: str | Path | None
    revision: str | None


class Transcriber:
    """A speech model: ``Transcriber("engine")("talk.mp3").text``.

    Args:
        source: an engine, or a checkpoint of Whisper.
        options: of ``LLM``: compute_dtype, quant, max_batch_size …

    Raises:
        RequestError: the model takes no speech.
    """

    def __init__(self, source: str | Path, device: str = "auto", **options: Unpack[EngineValues]) -> None:
        self._setup(LLM(source, device, **options))

    @classmethod
    def of_llm(cls, llm: LLM) -> Self:
        """A transcriber with a loaded engine; raises ``RequestError`` where the model takes no speech."""
        transcriber = cls.__new__(cls)
        transcriber._setup(llm)
        return transcriber

    def close(self) -> None:
        """``LLM.close``: work in progress ends with an error; weights and caches are freed."""
        self.llm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _setup(self, llm: LLM) -> None:
        manifest = llm.engine.manifest
        config = manifest.model
        self.llm, self._mels = llm, mel_bins(config)
        longest = min(config.max_positions, llm.executor.max_seq_len)
        tokenizer = llm.engine.text.tokenizer
        self.vocabulary = Vocabulary.of_model(config, tokenizer, longest, manifest.generation)

    def __call__(
        self,
        source: Source,
        *,
        vad: Detector | None = None,
        allow_truncated: bool = False,
        **options: Unpack[TranscribeValues],
    ) -> Transcript:
        """Transcribe one recording.

        Args:
            source: a path, a file's bytes, a file open for reading bytes, or samples [N] at 16 kHz: floats
                from -1 to 1, int16, int32 or uint8.
            vad: with ``chunked``: samples → (start, end) in seconds of each stretch of speech, in place of
                ``VoiceDetector()``.
            allow_truncated: transcribe what is there of a file that was cut off or damaged.
            options: fields of ``TranscribeOptions``.

        Raises:
            RequestError: the audio cannot be read, or an option is out of range.
        """
        return self._transcribe(source, _Wanted.of(vad, allow_truncated, options))

    def batch(
        self,
        sources: Sequence[Source],
        *,
        vad: Detector | None = None,
        allow_truncated: bool = False,
        **options: Unpack[TranscribeValues],
    ) -> list[Transcript]:
        """Transcribe recordings whose windows share steps; each result is the same as alone. Raises
        ``RequestError``: as ``__call__``, for one of them; the others are cancelled then.
        """
        wanted = _Wanted.of(vad, allow_truncated, options)
        width = self.files_at_once(wanted.options)
        return list(
            run_in_order(lambda one, cancel: self._transcribe(one, wanted, cancel=cancel), sources, width)
        )

    def files_at_once(self, options: TranscribeOptions) -> int:
        """Recordings that fill the steps; more would only take memory."""
        return _FILES_IN_CHUNKS if options.chunked else self._width

    def follow(
        self,
        source: Source,
        on_segment: OnSegment,
        cancel: CancelToken,
        *,
        allow_truncated: bool = False,
        **options: Unpack[TranscribeValues],
    ) -> Transcript:
        """Transcribe one recording; ``on_segment`` is called with each segment as soon as it is known. Raises
        ``CancelledError`` if ``cancel`` was set; waiting windows are not started.
        """
        return self._transcribe(source, _Wanted.of(None, allow_truncated, options), on_segment, cancel)

    def stream(
        self,
        source: Source,
        *,
        vad: Detector | None = None,
        allow_truncated: bool = False,
        **options: Unpack[TranscribeValues],
    ) -> Generator[Segment, None, Transcript]:
        """Segments of one recording as they come; the generator's value is the transcript. Closing it ends
        the work.
        """
        wanted = _Wanted.of(vad, allow_truncated, options)

        def work(source: Source, on_segment: OnSegment, cancel: CancelToken) -> Transcript:
            return self._transcribe(source, wanted, on_segment, cancel)

        with closing(run_concurrently(work, [source], width=1)) as events:
            while isinstance(found := next(events)[1], Segment):
                yield found
            return found

    def decode(
        self, features: torch.Tensor, previous: Sequence[int] = (), **options: Unpack[TranscribeValues]
    ) -> Decoded:
        """Decode one window; features: [mels, 3000]. ``previous``: tokens of the text before it."""
        wanted = _Wanted.of(None, False, options).options
        language = wanted.language or ("en" if self.vocabulary.tokens.multilingual else None)
        return self._answered(decode_window(self.vocabulary, Input(features), wanted, language, previous))

    def logits(self, features: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
        """Teacher-forced logits, float32 [len(token_ids), vocab_size]; features: [mels, frames]."""
        return self.llm.logits(Prompt([Input(features), list(token_ids)]))

    def prompt_ids(self, language: str | None = None, text: str = "") -> list[int]:
        """The ids with which a transcript without timestamps begins, and those of a text after them. Raises
        ``RequestError`` if the model does not know the language, or there is no tokenizer for the text.
        """
        frame = self.vocabulary.tokens.prompt(language, "transcribe", timestamps=False)
        return [*frame, *self.vocabulary.ids(text)]

    @property
    def _width(self) -> int:
        """Most windows that share a step."""
        return self.llm.executor.admission.max_batch_size

    def _transcribe(
        self,
        source: Source,
        wanted: _Wanted,
        on_segment: OnSegment = lambda segment: None,
        cancel: CancelToken | None = None,
    ) -> Transcript:
        beams = wanted.options.beam_size or 1
        if beams > self._width:
            allowed = f"at most {self._width}, the engine's max_batch_size"
            raise RequestError("too many beams", seen=beams, allowed=allowed, field="beam_size")
        samples, cancel = _samples(source, wanted.allow_truncated), cancel or CancelToken()
        options, found = wanted.options, Transcript(duration=len(samples) / RATE)
        if not options.chunked:
            return self._one_by_one(samples, options, on_segment, cancel)
        detector = wanted.detector(len(samples) / RATE)
        chunks = speech_chunks(samples, detector)
        found.language = options.language
        if chunks and found.language is None and self.vocabulary.tokens.multilingual:
            first = LongLogMel(samples[slice(*chunks[0])], self._mels, self.llm.engine.device)
            asking = detect_language(self.vocabulary, first.window(0, WINDOW // HOP))
            found.language, found.language_probability = next(iter(self._answered(asking, cancel).items()))
        options = options.replace(language=found.language, clip_timestamps=())

        def work(chunk: tuple[int, int], cancel: CancelToken) -> Transcript:
            return self._one_by_one(samples[slice(*chunk)], options, lambda segment: None, cancel)

        for (start, end), silence, transcript in zip(
            chunks, silences(chunks, detector), run_in_order(work, chunks, self._width, cancel), strict=True
        ):
            for segment in transcript.segments:
                number = len(found.segments)
                found.segments.append(moved(segment, number, start / RATE, end / RATE, silence))
                on_segment(found.segments[-1])
        return found

    def _one_by_one(
        self, samples: torch.Tensor, options: TranscribeOptions, on_segment: OnSegment, cancel: CancelToken
    ) -> Transcript:
        engine = self.llm.engine
        manifest, names = engine.manifest, options.word_timestamps
        heads = alignment_heads(manifest.generation, manifest.model) if names else []
        asking = transcribe_recording(
            self.vocabulary, samples, self._mels, options, on_segment, heads, engine.device
        )
        return self._answered(asking, cancel)

    def _answered(self, asking: Generator[Request, Any, Found], cancel: CancelToken | None = None) -> Found:
        """The result of a generator of requests, once the model has answered them all."""
        try:
            asked = next(asking)
            while cancel is None or not cancel.is_set():
                if isinstance(asked, ScoreRequest):
                    asked = asking.send(self.llm.cross_attention(asked.prompt, asked.heads, asked.below))
                else:
                    asked = asking.send(self.llm.generate(asked.prompt, asked.params)[0])
        except StopIteration as ended:
            found: Found = ended.value
            return found
        raise CancelledError


@dataclass(frozen=True)
class _Wanted:
    """Checked options of one call."""

    options: TranscribeOptions
    vad: Detector | None
    allow_truncated: bool

    @classmethod
    def of(cls, vad: Detector | None, allow_truncated: bool, options: Mapping[str, Any]) -> _Wanted:
        wanted = TranscribeOptions(**options)
        if vad is not None and not callable(vad):
            raise RequestError("vad must be a function", seen=repr(vad)[:80], allowed=_VAD, field="vad")
        if vad is not None and (not wanted.chunked or wanted.clip_timestamps):
            seen = f"chunked={wanted.chunked}, clip_timestamps={wanted.clip_timestamps}"
            allowed = "chunked=True, without clip_timestamps"
            raise RequestError("nobody asks the voice detector", seen=seen, allowed=allowed, field="vad")
        return cls(wanted, vad, allow_truncated)

    def detector(self, seconds: float) -> Detector:
        """The voice detector; given clips replace it."""
        times = [time for time in self.options.clip_timestamps if time < seconds]
        if self.options.clip_timestamps:
            clips = zip(times[::2], [*times[1::2], seconds], strict=False)
            sounding = [(start, end) for start, end in clips if start < end]
            return lambda samples: sounding
        return self.vad or VoiceDetector()


def _samples(source: Source, allow_truncated: bool) -> torch.Tensor:
    """float32 [N] at 16 kHz."""
    if isinstance(source, torch.Tensor):
        tensor = source.detach().cpu()
        source = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    if isinstance(source, list):
        source = np.asarray(source)
    if isinstance(source, np.ndarray):
        return torch.from_numpy(samples_of_array(source))
    return read_audio(source, allow_truncated=allow_truncated)
