"""Pictures in conversations, made into inputs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ingot.config.decoder_config import DecoderConfig
from ingot.config.modality import PICTURE
from ingot.config.picture_config import PictureFeatures
from ingot.device import on_device
from ingot.errors import RequestError
from ingot.image.image_reader import PictureReader
from ingot.text.prompt import Input

if TYPE_CHECKING:
    from ingot.engine.engine_loader import Engine
    from ingot.image.image_reader import Source

_log = logging.getLogger(__name__)
PARTS = ("image_url", "input_image", "image")  # types of parts that are pictures
Messages = Sequence[Mapping[str, Any]]


class Pictures:
    """Reads pictures for one model; safe to share between threads.

    Args:
        files: take parts ``{"type": "image", "image": …}``, which may name a file of this machine; else only
            ``image_url`` with a data URL, as a server must.
    """

    def __init__(self, features: PictureFeatures, *, files: bool = True) -> None:
        self._features = features
        self._files = files
        self._reader = PictureReader()

    @classmethod
    def of(cls, config: DecoderConfig, *, files: bool = True) -> Pictures | None:
        """For a model that takes pictures; None for any other."""
        if config.modality is not PICTURE or config.encoder is None:
            return None
        return cls(PictureFeatures(config.encoder.features[-1]), files=files)

    def close(self) -> None:
        """End the process that reads files; the next file starts another."""
        self._reader.close()

    def end(self) -> None:
        """End it for good, without waiting: a file that is being decoded is refused."""
        self._reader.end()

    def read(self, source: Source) -> Input:
        """A picture as a model takes it; raises RequestError where it cannot be read."""
        picture = self._reader.read(source, self._features.side)
        for note in picture.notes:
            _log.warning(note)
        return Input(picture.pixels(self._features))

    def in_messages(self, messages: Messages) -> Messages:
        """The messages with each picture's part as ``{"type": "input", "input": Input(…)}``; anything else
        stays as it is. Raises as ``of_part``.
        """
        return with_inputs(messages, self.of_part)

    def of_part(self, part: Mapping[str, Any], where: str) -> Input:
        """The picture of a part whose type is one of ``PARTS``; a RequestError names the part, ``where``."""
        try:
            return self.read(self._source(part, part["type"]))
        except RequestError as error:
            found = RequestError(
                f"{where}: {error.what}", seen=error.seen, allowed=error.allowed, field=where
            )
            found.fix = error.fix or where
            raise found from None

    def _source(self, part: Mapping[str, Any], kind: str) -> Source:
        if kind == "image":
            if not self._files or "image" not in part:
                what = "a picture is a part of type image_url here"
                allowed = '{"type": "image_url", "image_url": {"url": "data:…"}}'
                raise RequestError(what, seen=kind, allowed=allowed)
            found: Source = part["image"]
            return found
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, Mapping) else url
        if not isinstance(url, str) or url[:5].lower() != "data:":
            seen = url[:80] if isinstance(url, str) else type(url).__name__
            what = "the address of a picture must be a data URL: nothing is fetched"
            raise RequestError(what, seen=seen, allowed="data:image/png;base64,…")
        return url


def with_inputs(messages: Messages, read: Callable[[Mapping[str, Any], str], Input]) -> Messages:
    """The messages with what ``read`` makes of each picture's part and its place."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        return messages

    def part_read(part: Any, where: str) -> Any:
        kind = part.get("type") if isinstance(part, Mapping) else None
        return part if kind not in PARTS else {"type": "input", "input": read(part, where)}

    def taken(message: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, (list, tuple)):
            return message
        return {
            **message,
            "content": [part_read(part, f"{where}.content[{i}]") for i, part in enumerate(content)],
        }

    return [taken(message, f"messages[{i}]") for i, message in enumerate(messages)]


@torch.inference_mode()
def encoded(engine: Engine, picture: Input) -> torch.Tensor:
    """A picture's outputs, float32 [positions, hidden_size] on the CPU; no step may run meanwhile."""
    with on_device(engine.device):
        found = engine.model.encode(picture.features.to(engine.device))
    return found.float().cpu()
