"""Compiles a grammar in a limited process (``LimitedProcess``), and finds the part of a schema at fault."""

from __future__ import annotations

import ctypes
import functools
import resource
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer  # loaded before the first question, whose time is counted

from ingot.text.grammar.closed_schemas import inner_schemas
from ingot.text.grammar.lark import lark_of_schema
from ingot.text.grammar.vocabulary import fault_of, new_matcher, vocabulary

_MOST_FORCED = 128  # bytes that are tried at the start
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Whether llguidance takes a grammar.

    Args:
        question: ``lark``, and its ``schemas`` by name.

    Returns:
        ``fault`` and ``part``, where in which schema it is; or ``fault`` None and ``bytes``, the memory of
        the compiled grammar.
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
    """Memory of this process after trimming the heap; 0 where the system does not say."""
    if _TRIM is not None:
        _TRIM(0)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def _fault(lark: str) -> str | None:
    return _fault_of_start(new_matcher(_bytes(), lark))


def _fault_of_start(matcher: LLMatcher) -> str | None:
    """A fault of compiling, or of the first bytes: those that must come, and each that may follow them."""
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
    for key, inner, name in (*inner_schemas(schema), ("not", schema.get("not"), None)):
        if isinstance(inner, dict) and _fault(lark_of_schema({**shared, **inner})) == fault:
            path = [key, name] if isinstance(name, str) else [key if name is None else f"{key}[{name}]"]
            return [*path, *_part(inner, root, fault)]
    return []


_fault('start: "a"')  # what the library loads with its first grammar does not count for a request
