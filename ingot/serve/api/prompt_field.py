"""Prompts of every form.

Covers what ``prompt`` and ``input`` may be: a text, token ids, or a list of either.

    prompts_of([[1, 2], [3]], "input") == [[1, 2], [3]]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from ingot.serve.api_errors import bad_request


def prompts_of(given: str | list[Any], field: str) -> Sequence[str | list[int]]:
    """The prompts of a request, in order.

    Raises:
        ApiError: texts and token ids are mixed.
    """
    if isinstance(given, str):
        return [given]
    kinds = {type(one) for one in given}
    if kinds == {int}:
        return [cast(list[int], given)]
    if len(kinds) > 1:
        raise bad_request(f"{field}: texts and token ids are mixed in one list", field)
    return given
