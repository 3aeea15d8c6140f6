"""Transcription for the server: recordings to transcripts, window by window, on a shared engine."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar

import torch

from ingot.audio.audio_file import PACKAGES
from ingot.audio.audio_worker import limits, question, samples_of
from ingot.audio.recording_samples import RATE
from ingot.config.server_config import ServeConfig
from ingot.engine.manifest import Manifest
from ingot.errors import EngineError, RequestError, to_install
from ingot.llm.outputs import Output
from ingot.sandbox.limited_process import LimitedProcess, ProcessEndedError
from ingot.serve.api_errors import ApiError, bad_request, queue_full, refused, stopping
from ingot.serve.engine_calls.answering import Job
from ingot.serve.engine_calls.engine_client import EngineClient
from ingot.serve.engine_calls.process_protocol import MOST_BYTES
from ingot.serve.engine_calls.speech_windows import Windows
from ingot.speech.dtw_alignment import alignment_heads
from ingot.speech.recording_features import Transcript, transcribe_recording
from ingot.speech.segments import Segment
from ingot.speech.speech_options import TranscribeOptions
from ingot.speech.window_decoding import Vocabulary
from ingot.speech.word_times import Scored, ScoreRequest
from ingot.text.prompt import Input
from ingot.text.tokenizer.tokenizer import Tokenizer

Value = TypeVar("Value")
_WORKERS = 2  # files that are decoded at once, and then made into features
_HELD = 4  # recordings of the most seconds, whose samples and features are held


@dataclass(frozen=True)
class TranscriptionResult:
    """A transcript, and the tokens and encoded positions that it took."""

    transcript: Transcript
    prompt_tokens: int
    audio_tokens: int
    new_tokens: int


def check_packages(name: str) -> None:
    """Raises EngineError where a package that reads recordings is missing."""
    missing = [one for one in (*PACKAGES, "python_multipart") if importlib.util.find_spec(one) is None]
    if missing:
        text = f"{name} is a speech model, and packages that read recordings are missing"
        raise EngineError(text, seen=", ".join(missing), fix=to_install("serve,speech"))


class SpeechService:
    """Transcription with one model; for the event loop's thread."""

    def __init__(
        self, manifest: Manifest, tokenizer: Tokenizer, engine: EngineClient, config: ServeConfig
    ) -> None:
        model = manifest.model
        assert model.encoder is not None
        longest = min(model.max_positions, engine.limits.max_seq_len)
        self.vocabulary = Vocabulary.of_model(model, tokenizer, longest, manifest.generation)
        self._heads = alignment_heads(manifest.generation, model)
        self._engine = engine
        self._positions = model.encoder.max_positions
        self._most_seconds = config.max_audio_seconds
        self._held = 0.0
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="audio")
        # One thread per answer, so that no request waits for another's window.
        self._threads = ThreadPoolExecutor(engine.most_answers, thread_name_prefix="window")
        kept = limits(self._most_seconds)
        self._all = [LimitedProcess("ingot.audio.audio_worker", kept) for _ in range(_WORKERS)]
        self._processes: SimpleQueue[LimitedProcess] = SimpleQueue()
        for process in self._all:
            self._processes.put(process)
        self._closed = False

    def close(self) -> None:
        """Take no more; a file that is being decoded ends with an error."""
        self._closed = True
        self._pool.shutdown(wait=False)
        self._threads.shutdown(wait=False)
        for process in self._all:
            process.end()

    async def segments(
        self, data: Callable[[], bytes], options: TranscribeOptions
    ) -> AsyncGenerator[Segment | TranscriptionResult, None]:
        """Segments as they are transcribed, then the result; closing the generator cancels the work. ``data``
        gives the file's bytes, in a thread.

        Raises:
            ApiError: the file or an option cannot be served, too much is in flight (429), or the engine is
            lost.
        """
        engine, windows = self._engine, self._engine.windows
        assert windows is not None
        with engine.places(1):
            self._check(options)
            samples = await _in(self._pool, self._samples, data)
            seconds = len(samples) / RATE
            with self._room(seconds), windows.slot() as slot:
                work = _Work(self.vocabulary, samples, windows, slot, options, self._heads)
                del samples
                job = await _in(self._pool, work.next, None)
                while job is not None:
                    output = await self._answered(job)
                    job = await _in(self._threads, work.next, output)
                    for segment in work.take_segments():
                        yield segment
                engine.metrics.count_audio_seconds(seconds)
                yield work.result(self._positions)

    def _check(self, options: TranscribeOptions) -> None:
        """Refuse what the model does not know, before anything is decoded."""
        scores = 4 * len(self._heads) * self._positions * self.vocabulary.longest
        if options.word_timestamps and scores > MOST_BYTES // 2:
            text = f"{self._engine.name} does not know which of its heads place words; ask for segments"
            raise bad_request(text, "timestamp_granularities", "unsupported_parameter")
        try:
            self.vocabulary.tokens.prompt(options.language, options.task, timestamps=options.timestamps)
        except RequestError as error:
            raise refused(error) from None

    async def _answered(self, job: Job) -> Output | Scored:
        with self._engine.answering([job], None, by_piece=False) as found:
            await found.finish()
            if job.attend is None:
                return Output(job.ids, found.answers(0))
            values = torch.frombuffer(bytearray(found.vectors[0]), dtype=torch.float32)
            logprobs, scores = values.split([len(job.ids) - 1, len(values) - len(job.ids) + 1])
            return logprobs, scores.view(len(job.ids), len(job.attend[0]), -1)

    def _samples(self, data: Callable[[], bytes]) -> torch.Tensor:
        """Samples of a file, decoded in a limited process."""
        process = self._processes.get()
        try:
            asked = question(data(), self._most_seconds)
            return torch.from_numpy(samples_of(process.ask_bytes(asked)))
        except ProcessEndedError as error:
            if self._closed:
                raise stopping() from None
            text = f"decoding the recording {error}; send a shorter one, or convert it to wav or flac"
            raise ApiError(400, text, param="file") from None
        except RequestError as error:
            raise refused(error, "file") from None
        finally:
            self._processes.put(process)

    @contextmanager
    def _room(self, seconds: float) -> Iterator[None]:
        """Room for samples and features; raises ApiError where too much is held already."""
        if self._held + seconds > _HELD * self._most_seconds:
            raise queue_full(f"{self._engine.name} already holds {self._held:.0f} s of audio")
        self._held += seconds
        try:
            yield
        finally:
            self._held -= seconds


class _Work:
    """One recording in progress; all but ``take_segments`` is for any thread, one after another."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        samples: torch.Tensor,
        windows: Windows,
        slot: int,
        options: TranscribeOptions,
        heads: list[tuple[int, int]],
    ) -> None:
        self._segments: list[Segment] = []
        self._windows, self._slot = windows, slot
        self._written: bytes | None = None  # the name of what the slot holds
        self._asking = transcribe_recording(
            vocabulary, samples, windows.shape[0], options, self._segments.append, heads
        )
        self._transcript: Transcript | None = None
        self._prompt_tokens = self._new_tokens = self._num_windows = 0

    def next(self, output: Output | Scored | None) -> Job | None:
        """The next job, given the output of the last; None: done."""
        if isinstance(output, Output):
            self._new_tokens += sum(len(answer.token_ids) for answer in output.answers)
        try:
            asked = next(self._asking) if output is None else self._asking.send(output)
        except StopIteration as ended:
            self._transcript = ended.value
            return None
        given, ids = asked.prompt.parts
        assert isinstance(given, Input)
        assert given.name is not None
        if given.name != self._written:
            self._windows.put(self._slot, given.features)
            self._written = given.name
            self._num_windows += 1
        if isinstance(asked, ScoreRequest):
            attend = [*asked.heads], asked.below
            return Job(list(ids), None, slot=self._slot, attend=attend)  # type: ignore[arg-type]
        self._prompt_tokens += len(ids)  # type: ignore[arg-type]
        return Job(list(ids), asked.params, slot=self._slot)  # type: ignore[arg-type]

    def take_segments(self) -> list[Segment]:
        """Segments since the last call."""
        found = self._segments.copy()
        self._segments.clear()
        return found

    def result(self, positions: int) -> TranscriptionResult:
        """The result; ``positions``: of an encoded window."""
        assert self._transcript is not None
        audio = self._num_windows * positions
        return TranscriptionResult(self._transcript, self._prompt_tokens, audio, self._new_tokens)


async def _in(pool: ThreadPoolExecutor, work: Callable[..., Value], *args: object) -> Value:
    """What ``work`` returns. A cancelled caller waits for it all the same once it has begun: it writes where
    others will.
    """
    running = pool.submit(work, *args)
    waiting = asyncio.wrap_future(running)
    try:
        return await asyncio.shield(waiting)
    finally:
        while not (running.cancel() or waiting.done()):
            with suppress(asyncio.CancelledError):  # the first one is on its way already
                await asyncio.wait({waiting})
