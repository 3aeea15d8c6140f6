"""``X-Ingot-Explain: 1``: an answer with what ``ingot explain`` says of its request, by the text side
alone.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from ingot.config.sampling_params import VALUE_NAMES
from ingot.serve.api_call import DONE, ApiCall, event
from ingot.serve.api_errors import bad_request

HEADER = "x-ingot-explain"
KEY = "ingot_explain"
_CLIENT_NAMES = {
    "max_new_tokens": ("max_tokens", "max_completion_tokens"),
    "min_new_tokens": ("min_tokens",),
}


def wants_explanation(header: str | None) -> bool:
    """What the header's value means; raises ApiError where it is not 0 or 1."""
    if header not in (None, "0", "1"):
        raise bad_request(f"{HEADER} is 1 or 0, not {header!r:.40}", HEADER)
    return header == "1"


class ExplainedCall:
    """A call whose answer carries its explanation; raises ApiError for several prompts, or for no answer."""

    def __init__(self, call: ApiCall) -> None:
        self._call = call
        prompts, params = call.asked()
        if len(prompts) > 1 or params is None:
            what = "several prompts" if params is not None else "max_tokens: 0"
            raise bad_request(f"{HEADER} explains one prompt that is answered, not {what}", HEADER)
        self._prompt, self._params = prompts[0], params

    async def answer(self) -> dict[str, Any]:
        """The call's answer with the explanation; raises as that does."""
        explanation = await self._explanation()
        return await self._call.answer() | {KEY: explanation}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The call's events; the last chunk has no choices and the explanation."""
        explanation = await self._explanation()
        events = self._call.events()
        try:
            async for data in events:
                if data == DONE:
                    yield event(self._call.head(self._call.chunk_kind) | {"choices": [], KEY: explanation})
                yield data
        finally:
            await events.aclose()

    async def _explanation(self) -> dict[str, Any]:
        with self._call.model.engine.places(1):
            return await self._call.model.in_thread(self._explained)

    def _explained(self) -> dict[str, Any]:
        model, body = self._call.model, self._call.body
        given = {
            name
            for name in VALUE_NAMES
            if any(getattr(body, one, None) is not None for one in _CLIENT_NAMES.get(name, (name,)))
        }
        usual = model.defaults.params
        names = (*VALUE_NAMES, "grammar")
        named = [n for n in names if n in given or getattr(self._params, n) != getattr(usual, n)]
        found = model.explained(self._prompt, {name: getattr(self._params, name) for name in named})
        limit = found.value("max_new_tokens")
        if "max_new_tokens" not in given and limit.origin == "request":  # neither request nor file set it
            own = replace(limit, origin="default", note="the API's own")
            found = replace(found, sampling=tuple(own if one is limit else one for one in found.sampling))
        return found.to_json()
