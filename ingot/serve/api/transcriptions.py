"""``/v1/audio/transcriptions`` and ``/v1/audio/translations``."""

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
    """A checked request; raises ApiError where a value cannot be served. ``file`` gives the recording's bytes
    and is called in a thread.
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
        async with aclosing(self._service.segments(self._file, self._options)) as found:
            async for one in found:
                if isinstance(one, TranscriptionResult):
                    return self._response(one.transcript)
        raise AssertionError("a recording ends with its whole")

    async def events(self) -> AsyncGenerator[bytes, None]:
        """A delta for each segment, then the whole text; closing it ends the request. Raises ApiError."""
        begun = False
        async with aclosing(self._service.segments(self._file, self._options)) as found:
            async for one in found:
                if isinstance(one, TranscriptionResult):
                    text, given = one.transcript.text.strip(), one.prompt_tokens + one.audio_tokens
                    details = {"text_tokens": one.prompt_tokens, "audio_tokens": one.audio_tokens}
                    usage = {  # in tokens: OpenAI's schema has no other here
                        "type": "tokens",
                        "input_tokens": given,
                        "input_token_details": details,
                        "output_tokens": one.new_tokens,
                        "total_tokens": given + one.new_tokens,
                    }
                    yield event({"type": "transcript.text.done", "text": text, "usage": usage})
                elif text := one.text if begun else one.text.lstrip():
                    begun = True
                    yield event({"type": "transcript.text.delta", "delta": text})

    def _response(self, found: Transcript) -> Response:
        if self._format in ("text", "srt", "vtt"):
            text = found.text.strip() + "\n" if self._format == "text" else WRITERS[self._format](found)
            return Response(text, media_type="text/plain; charset=utf-8")
        usage = {"type": "duration", "seconds": found.duration}
        if self._format == "json":
            return json_answer({"text": found.text.strip(), "usage": usage})
        code = "en" if self._task == "translate" or found.language is None else found.language
        body: dict[str, Any] = {
            "task": self._task,
            "language": NAMES.get(code, code),  # a checkpoint may have languages of its own
            "duration": found.duration,
            "text": found.text.strip(),
        }
        if self._wants_words:
            words = [word for segment in found.segments for word in segment.words or ()]
            body["words"] = [{"word": w.text.strip(), "start": w.start, "end": w.end} for w in words]
        if self._wants_segments:
            body["segments"] = [
                {name: getattr(one, name) for name in _OF_A_SEGMENT} for one in found.segments if one.text
            ]
        return json_answer(body | {"usage": usage})


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
