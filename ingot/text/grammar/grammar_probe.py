"""What a grammar does to a process that compiles it: tried in one with limits (``LimitedProcess``).

Covers the search for the part of a schema that is at fault.

    answer({"lark": lark_of(grammar), "schemas": grammar.schemas()})      # {"fault": None}
"""

from __future__ import annotations

import ctypes
import functools
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer  # loaded before the first question, whose time is counted

from ingot.text.grammar.lark import lark_of_schema
from ingot.text.grammar.vocabulary import fault_of, new_matcher, vocabulary

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_MOST_FORCED = 128  # bytes that are tried at the start
_ONE = ("items", "additionalProperties", "not", "contains")
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Whether llguidance takes a grammar.

    Args:
        question: ``lark``, and ``schemas``, those in it by name.

    Returns:
        ``fault``, None if there is none, and ``part``: where in which schema; without a fault, ``bytes``:
        what the compiled grammar takes.
    """
    before = _resident_bytes()
    matcher = new_matcher(_bytes(), question["lark"])
    fault = _fault_of_start(matcher)
    if fault is None:
        return {"fault": None, "bytes": max(0, _resident_bytes() - before)}
    for name, schema in question["schemas"].items():
        inner = _fault(lark_of_schema(schema))
        if inner is not None:
            path = ".".join([*([name] if name else []), *_part(schema, schema, inner)])
            return {"fault": inner, "part": path or "the schema itself"}
    return {"fault": fault, "part": None}


def _resident_bytes() -> int:
    """Memory of this process, after what is free was given back; 0 where the system does not say."""
    if _TRIM is not None:
        _TRIM(0)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def _fault(lark: str) -> str | None:
    """Of a grammar, as ``_fault_of_start``."""
    return _fault_of_start(new_matcher(_bytes(), lark))


def _fault_of_start(matcher: LLMatcher) -> str | None:
    """Of compiling, and of the first bytes: those that must come, and each that may come then."""
    following = _following(matcher)
    for _ in range(_MOST_FORCED):
        if len(following) != 1 or not matcher.consume_tokens(following):
            break
        following = _following(matcher)
    for byte in following:
        ahead = matcher.deep_copy()
        if not ahead.consume_tokens([byte]):
            return fault_of(ahead)
    return fault_of(matcher)


@functools.cache
def _bytes() -> LLTokenizer:
    return vocabulary([bytes([byte]) for byte in range(256)])


def _following(matcher: LLMatcher) -> list[int]:
    """The bytes that may come next; none after a fault."""
    if matcher.is_error():
        return []
    bits = matcher.compute_bitmask()
    return [] if matcher.is_error() else [byte for byte in range(256) if bits[byte >> 3] >> (byte & 7) & 1]


def _part(schema: Any, root: Any, fault: str) -> list[str]:
    """The path of the innermost schema that by itself has the same fault."""
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    for path, inner in _inner(schema):
        if _fault(lark_of_schema({**shared, **inner})) == fault:
            return [*path, *_part(inner, root, fault)]
    return []


def _inner(schema: Any) -> Iterator[tuple[list[str], dict[str, Any]]]:
    for key, value in schema.items():
        found: list[tuple[list[str], Any]] = []
        if key in _MAPS and isinstance(value, dict):
            found = [([key, name], inner) for name, inner in value.items()]
        elif key in _LISTS and isinstance(value, list):
            found = [([f"{key}[{place}]"], inner) for place, inner in enumerate(value)]
        elif key in _ONE:
            found = [([key], value)]
        yield from ((path, inner) for path, inner in found if isinstance(inner, dict))


_fault('start: "a"')  # what the library loads with its first grammar is not that of a request
