"""Pictures of requests, on their way to an engine.

Covers how many are held at once, the slots that they are written to, and their placeholders in the prompt.
Independent of HTTP and of chat formats.

    with pictures.slots(2) as slots:
        ids, starts = pictures.with_placeholders(ids, places)
        pictures.read(messages, slots, cancelled)       # in a thread
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ingot.config.decoder_config import DecoderConfig
from ingot.config.encoder_config import EncoderConfig
from ingot.errors import RequestError
from ingot.llm.picture_prompts import Pictures
from ingot.serve.api_errors import RETRY_SECONDS, ApiError, bad_request
from ingot.serve.engine_calls.engine_client import EngineClient
from ingot.serve.engine_calls.speech_windows import Windows
from ingot.serve.media_parts import picture_places

MOST_HELD = 512  # pictures of one engine, 0.6 MB each at 224 pixels
BODY_BYTES = 16 << 20  # of a body with pictures, in base64


class ServedPictures:
    """Of one model. A request has its slots before anything is decoded, so that what waits for the process
    that decodes has a bound.
    """

    def __init__(self, pictures: Pictures, encoder: EncoderConfig, engine: EngineClient) -> None:
        self._pictures = pictures
        self._encoder = encoder
        self._engine = engine

    @classmethod
    def of(cls, config: DecoderConfig, engine: EngineClient) -> ServedPictures | None:
        """For a model of pictures; None for any other."""
        pictures = Pictures.of(config, files=False)
        if pictures is None or config.encoder is None:
            return None
        return cls(pictures, config.encoder, engine)

    def close(self) -> None:
        """Decode no more; a picture that is being decoded is refused."""
        self._pictures.end()

    @property
    def _windows(self) -> Windows:
        windows = self._engine.windows
        assert windows is not None, "who starts an engine of pictures gives it room for them"
        return windows

    def num_tokens(self, count: int) -> int:
        """Placeholders of so many pictures."""
        return count * self._encoder.max_positions

    @contextmanager
    def slots(self, count: int) -> Iterator[list[int]]:
        """Room for the pictures of a request; for the event loop's thread.

        Raises:
            ApiError: there is none now (429), or never will be (400).
        """
        windows, name = self._windows, self._engine.name
        if count > MOST_HELD:
            text = f"the request has {count} images; {name} takes {MOST_HELD} at once"
            raise bad_request(text, "messages")
        if windows.taken + count > MOST_HELD:
            text = f"{name} already holds {windows.taken} of {MOST_HELD} images; try again later"
            wait = {"Retry-After": str(RETRY_SECONDS)}
            raise ApiError(429, text, code="queue_full", headers=wait)
        with ExitStack() as stack:
            yield [stack.enter_context(windows.slot()) for _ in range(count)]

    def with_placeholders(self, ids: Sequence[int], places: Sequence[int]) -> tuple[list[int], list[int]]:
        """The ids with each picture's placeholders, and where these begin.

        Args:
            places: how many of the ids are before each picture.
        """
        size, token = self._encoder.max_positions, self._encoder.placeholder_id
        found: list[int] = []
        starts: list[int] = []
        done = 0
        for place in places:
            found += ids[done:place]
            starts.append(len(found))
            found += [token] * size
            done = place
        return [*found, *ids[done:]], starts

    def read(
        self, messages: Sequence[Mapping[str, Any]], slots: Sequence[int], cancelled: threading.Event
    ) -> None:
        """Decode each picture into its slot, one after another; none any more once ``cancelled`` is set.

        Raises:
            RequestError: one cannot be read; it names the part.
        """
        for (i, j), slot in zip(picture_places(messages), slots, strict=True):
            where = f"messages[{i}].content[{j}]"
            if cancelled.is_set():
                raise RequestError("the request was cancelled", seen=where)
            self._windows.put(slot, self._pictures.of_part(messages[i]["content"][j], where).features)
