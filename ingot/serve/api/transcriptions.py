"""``/v1/audio/transcriptions`` and ``/v1/audio/translations``.

Covers what the fields of a request mean, the five formats of an answer, and the events of a stream.

    await TranscriptionCall(ears, decode(AudioRequest, data), "transcribe", file).answer()
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from ingot.errors import RequestError
from ingot.models.speech_tokens import Task
from ingot.serve.api_call import event
from ingot.serve.api_errors import bad_request, refused
from ingot.serve.http.http_bodies import json_answer
from ingot.serve.request_schemas import AudioRequest
from ingot.serve.speech_service import SpeechService, TranscriptionResult
from ingot.speech.recording_features import Transcript
from ingot.speech.segments import Segment
from ingot.speech.speech_options import TranscribeOptions
from ingot.speech.transcript_writers import WRITERS
from ingot.text.languages import NAMES

TRANSCRIPTIONS = "/v1/audio/transcriptions"
TRANSLATIONS = "/v1/audio/translations"
_OF_A_SEGMENT = (
    *("id", "seek", "start", "end", "text", "tokens"),
    *("temperature", "avg_logprob", "compression_ratio", "no_speech_prob"),
)


class TranscriptionCall:
    """A checked request.

    Args:
        file: gives the recording's bytes; called in a thread.

    Raises:
        ApiError: a value cannot be served.
    """

    def __init__(
        self, service: SpeechService, body: AudioRequest, task: Task, file: Callable[[], bytes]
    ) -> None:
        self._service = service
        self._task = task
        self._file = file
        self._format = body.response_format or "json"
        asked = body.timestamp_granularities or []
        self._wants_words = "word" in asked
        self._wants_segments = not asked or "segment" in asked
        if asked and self._format != "verbose_json":
            text = "timestamp_granularities: times go with response_format verbose_json"
            raise bad_request(text, "timestamp_granularities")
        if body.stream and self._format not in ("json", "text"):
            raise bad_request(f"stream: {self._format} is not streamed; leave it out", "stream")
        self._options = _options(body, task, self._wants_words)

    async def answer(self) -> Response:
        """The whole answer.

        Raises:
            ApiError: it cannot be served.
        """
        async with aclosing(self._service.segments(self._file, self._options)) as found:
            async for one in found:
                if isinstance(one, TranscriptionResult):
                    return self._response(one.transcript)
        raise AssertionError("a recording ends with its whole")

    async def events(self) -> AsyncGenerator[bytes, None]:
        """A delta for each segment, then the whole text; closing it ends the request.

        Raises:
            ApiError: it cannot be served, or was ended.
        """
        begun = False
        async with aclosing(self._service.segments(self._file, self._options)) as found:
            async for one in found:
                if isinstance(one, TranscriptionResult):
                    yield event(_done(one))
                elif text := one.text if begun else one.text.lstrip():
                    begun = True
                    yield event({"type": "transcript.text.delta", "delta": text})

    def _response(self, found: Transcript) -> Response:
        if self._format == "text":
            return _text(found.text.strip() + "\n")
        if self._format in ("srt", "vtt"):
            return _text(WRITERS[self._format](found))
        if self._format == "json":
            return json_answer({"text": found.text.strip(), "usage": _seconds(found)})
        return json_answer(self._verbose(found))

    def _verbose(self, found: Transcript) -> dict[str, Any]:
        code = "en" if self._task == "translate" or found.language is None else found.language
        body: dict[str, Any] = {
            "task": self._task,
            "language": NAMES.get(code, code),  # a checkpoint may have languages of its own
            "duration": found.duration,
            "text": found.text.strip(),
        }
        if self._wants_words:
            body["words"] = [word for segment in found.segments for word in _words(segment)]
        if self._wants_segments:
            body["segments"] = [_segment(segment) for segment in found.segments if segment.text]
        return body | {"usage": _seconds(found)}


def _options(body: AudioRequest, task: Task, words: bool) -> TranscribeOptions:
    """As OpenAI's: temperature 0 falls back on others, any other stands alone."""
    alone = {"temperatures": (body.temperature,)} if body.temperature else {}
    try:
        return TranscribeOptions(
            language=body.language,
            task=task,
            initial_prompt=body.prompt,
            carry_initial_prompt=bool(body.carry_initial_prompt),
            hotwords=" ".join(body.keywords or ()) or None,
            word_timestamps=words,
            **alone,  # type: ignore[arg-type]
        )
    except RequestError as error:
        raise refused(error) from None


def _text(text: str) -> Response:
    return Response(text, media_type="text/plain; charset=utf-8")


def _seconds(found: Transcript) -> dict[str, Any]:
    return {"type": "duration", "seconds": found.duration}


def _done(result: TranscriptionResult) -> dict[str, Any]:
    """The last event, whose usage is in tokens: OpenAI's schema has no other there."""
    given = result.prompt_tokens + result.audio_tokens
    usage = {
        "type": "tokens",
        "input_tokens": given,
        "input_token_details": {"text_tokens": result.prompt_tokens, "audio_tokens": result.audio_tokens},
        "output_tokens": result.new_tokens,
        "total_tokens": given + result.new_tokens,
    }
    return {"type": "transcript.text.done", "text": result.transcript.text.strip(), "usage": usage}


def _segment(segment: Segment) -> dict[str, Any]:
    return {name: getattr(segment, name) for name in _OF_A_SEGMENT}


def _words(segment: Segment) -> list[dict[str, Any]]:
    return [{"word": one.text.strip(), "start": one.start, "end": one.end} for one in segment.words or ()]
