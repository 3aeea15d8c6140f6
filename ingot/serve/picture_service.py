"""Pictures of requests, on their way to an engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ingot.config.decoder_config import DecoderConfig
from ingot.config.encoder_config import EncoderConfig
from ingot.errors import RequestError
from ingot.llm.picture_prompts import Pictures
from ingot.serve.api_errors import bad_request, queue_full
from ingot.serve.engine_calls.engine_client import EngineClient
from ingot.serve.engine_calls.speech_windows import Windows
from ingot.serve.media_parts import picture_places

MOST_HELD = 512  # pictures of one engine, 0.6 MB each at 224 pixels
BODY_BYTES = 16 << 20  # of a body with pictures, in base64


class ServedPictures:
    """Pictures of one model. A request has its slots before anything is decoded, which bounds what waits for
    the decoding process.
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
        assert windows is not None, "an engine of pictures is started with room for them"
        return windows

    def num_tokens(self, count: int) -> int:
        return count * self._encoder.max_positions

    @contextmanager
    def slots(self, count: int) -> Iterator[list[int]]:
        """Room for the pictures of a request, in the event loop's thread; raises ApiError where there is none
        now (429), or never will be (400).
        """
        windows, name = self._windows, self._engine.name
        if count > MOST_HELD:
            raise bad_request(f"the request has {count} images; {name} takes {MOST_HELD} at once", "messages")
        if windows.taken + count > MOST_HELD:
            raise queue_full(f"{name} already holds {windows.taken} of {MOST_HELD} images")
        with ExitStack() as stack:
            yield [stack.enter_context(windows.slot()) for _ in range(count)]

    def with_placeholders(self, ids: Sequence[int], places: Sequence[int]) -> tuple[list[int], list[int]]:
        """The ids with each picture's placeholders, and where these begin; ``places``: how many of the ids
        are before each picture.
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
        """Decode each picture into its slot, until ``cancelled`` is set; a RequestError names the part that
        cannot be read.
        """
        for (i, j), slot in zip(picture_places(messages), slots, strict=True):
            where = f"messages[{i}].content[{j}]"
            if cancelled.is_set():
                raise RequestError("the request was cancelled", seen=where)
            self._windows.put(slot, self._pictures.of_part(messages[i]["content"][j], where).features)
