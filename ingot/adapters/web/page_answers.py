"""An answer as the page shows it while it grows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ingot.adapters.web.page_client import AnswerError, Api, ConversationTooLongError, TextDelta
from ingot.adapters.web.page_messages import PictureTooLargeError, Values, body, files, without_oldest

SHOW_SECONDS = 0.05  # between two updates: each holds the whole answer
BEAT_SECONDS = 1.0  # without news: Gradio ends an answer whose reader has left when it gets an update


@dataclass(frozen=True)
class Shown:
    """An answer so far; ``thought`` is a reasoning model's, ``error`` why it ends here, ``ended``: nothing
    follows.
    """

    thought: str = ""
    text: str = ""
    error: str = ""
    ended: bool = False


async def answers(
    api: Api,
    model: str | None,
    system: str,
    history: Sequence[Mapping[str, Any]],
    message: Any,
    values: Values,
) -> AsyncGenerator[Shown, None]:
    """One answer as it grows, the last state ``ended``; closing the generator ends it on the server.

    Args:
        model: None: the server's first, which was not there when the page was opened.
        history, message: as ``page_messages.body`` takes them.
    """
    shown, last_update = Shown(), 0.0
    try:
        name = model or (await api.models())[0].name
        recordings = files(message)
        if recordings and any(one.is_speech for one in await api.models() if one.name == name):
            asked = api.transcripts(name, recordings)
        else:
            # In a thread: it reads the files of all messages.
            asked = _fitting(api, await asyncio.to_thread(body, name, system, history, message, values))
        async with aclosing(_with_beats(asked)) as deltas:
            async for delta in deltas:
                shown = Shown(shown.thought + delta.thought, shown.text + delta.text)
                if time.monotonic() - last_update >= SHOW_SECONDS:
                    yield shown
                    last_update = time.monotonic()
    except (AnswerError, PictureTooLargeError) as error:
        shown = replace(shown, error=str(error))
    except FileNotFoundError as error:
        gone = Path(error.filename).name
        shown = replace(shown, error=f"{gone} is gone. Clear the chat and add it again.")
    yield replace(shown, ended=True)


def is_empty(message: Any) -> bool:
    text = message.get("text") if isinstance(message, Mapping) else message
    return not (text or "").strip() and not files(message)


async def _fitting(api: Api, asked: dict[str, Any]) -> AsyncGenerator[TextDelta, None]:
    """The answer to a request; its oldest turns are dropped where the server finds it too long."""
    while True:
        try:
            async with aclosing(api.answer(asked)) as deltas:
                async for delta in deltas:
                    yield delta
            return
        except ConversationTooLongError:
            kept = without_oldest(asked["messages"])
            if kept is None:
                raise
            asked = {**asked, "messages": kept}


async def _with_beats(deltas: AsyncGenerator[TextDelta, None]) -> AsyncGenerator[TextDelta, None]:
    """The deltas, and an empty one whenever none has come for a while."""
    coming: asyncio.Future[TextDelta | None] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(deltas, None))
            await asyncio.wait({coming}, timeout=BEAT_SECONDS)
            if not coming.done():
                yield TextDelta()
                continue
            delta, coming = coming.result(), None
            if delta is None:
                return
            yield delta
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
        await deltas.aclose()
