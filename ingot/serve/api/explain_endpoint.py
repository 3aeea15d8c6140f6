"""``X-Ingot-Explain: 1``: an answer with what ``ingot explain`` says of its request.

Covers where the explanation stands in answers and streams. It is made in the server's process, of the text
side alone: no engine works for it.

    call = ExplainedCall(ChatCall(model, body)) if wants_explanation(header) else ChatCall(model, body)
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from ingot.config.sampling_params import VALUE_NAMES
from ingot.llm.explanation import Explanation
from ingot.serve.api_call import DONE, ApiCall, event
from ingot.serve.api_errors import bad_request

HEADER = "x-ingot-explain"
KEY = "ingot_explain"
_CLIENT_NAMES = {
    "max_new_tokens": ("max_tokens", "max_completion_tokens"),
    "min_new_tokens": ("min_tokens",),
}


def wants_explanation(header: str | None) -> bool:
    """What the header's value means.

    Raises:
        ApiError: it is none of those it can have.
    """
    if header not in (None, "0", "1"):
        raise bad_request(f"{HEADER} is 1 or 0, not {header!r:.40}", HEADER)
    return header == "1"


class ExplainedCall:
    """A call whose answer carries its explanation.

    Raises:
        ApiError: it asks for several prompts, or for no answer.
    """

    def __init__(self, call: ApiCall) -> None:
        self._call = call
        prompts, params = call.asked()
        if len(prompts) > 1 or params is None:
            what = "several prompts" if params is not None else "max_tokens: 0"
            raise bad_request(f"{HEADER} explains one prompt that is answered, not {what}", HEADER)
        self._prompt, self._params = prompts[0], params

    async def answer(self) -> dict[str, Any]:
        """As of the call, with the explanation beside the choices; raises as that does."""
        explanation = await self._explanation()
        return await self._call.answer() | {KEY: explanation}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """As of the call; the last chunk has no choices and the explanation."""
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
        model, given = self._call.model, self._given()
        usual = model.defaults.params
        names = (*VALUE_NAMES, "grammar")
        named = [n for n in names if n in given or getattr(self._params, n) != getattr(usual, n)]
        values = {name: getattr(self._params, name) for name in named}
        return _with_origin(model.explained(self._prompt, values), given).to_json()

    def _given(self) -> frozenset[str]:
        """The sampling values that the body names, by their names in ``SamplingParams``."""
        body = self._call.body
        names = {name: _CLIENT_NAMES.get(name, (name,)) for name in VALUE_NAMES}
        return frozenset(
            name
            for name, theirs in names.items()
            if any(getattr(body, one, None) is not None for one in theirs)
        )


def _with_origin(found: Explanation, given: frozenset[str]) -> Explanation:
    """Where the API sets the length, neither the request nor a file did."""
    if "max_new_tokens" in given or found.value("max_new_tokens").origin != "request":
        return found
    own = [
        replace(one, origin="default", note="the API's own") if one.name == "max_new_tokens" else one
        for one in found.sampling
    ]
    return replace(found, sampling=tuple(own))
