"""Grammars in llguidance's dialect of Lark.

``no_forcing`` lets every token through that continues a text of the grammar: without it, where only one text
is left, llguidance lets through only the token that a tokenizer would choose.
"""

from __future__ import annotations

import json
import re
from typing import Any

from ingot.config.grammar_spec import Grammar

# Between JSON's tokens: a space, or a line break and an indent. Small models repeat white space endlessly.
WHITESPACE = r"( |\n[ \t]{0,16})?"
CALL_START, CALL_END = "<tool_call>", "</tool_call>"
_HEAD = '%llguidance {"no_forcing": true}'
_THOUGHT = r"thought[lazy]: /(?s:.*)<\/think>/"  # lazy: it ends at the first end tag
_ESCAPES = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}  # what would end a pattern between slashes
_THINKING = {
    "no": [],
    "may": ['think: "<think>" thought /\\n{0,2}/', _THOUGHT],
    "must": ["think: thought /\\n{0,2}/", _THOUGHT],
}


def lark_of(grammar: Grammar) -> str:
    """The grammar's text for llguidance."""
    think = {"no": "", "may": "think? ", "must": "think "}[grammar.thinking]
    before = f"{_text(grammar.before)} " if grammar.before else ""
    lines = [_HEAD, f"start: {before}{think}answer", *_THINKING[grammar.thinking]]
    if grammar.kind == "tool_calls":
        lines += _tool_calls(**grammar.value())
    elif grammar.kind == "regex":
        pattern = re.sub(r"(?s)\\.|[/\n]", lambda match: _ESCAPES.get(match[0], match[0]), grammar.text)
        lines.append(f"answer: /{pattern}/")
    elif grammar.kind == "choice":
        lines.append(f"answer: /{'|'.join(map(_literal, grammar.value()))}/")
    else:
        lines.append(f"answer: {_schema(grammar.value())}")
    return "\n".join(lines)


def lark_of_schema(schema: Any) -> str:
    """The grammar of a JSON schema alone."""
    return f"{_HEAD}\nstart: {_schema(schema)}"


def _tool_calls(tools: dict[str, Any], parallel: bool, otherwise: Any = None) -> list[str]:
    """Calls as Hermes and Qwen write them: JSON between tags, each on a line of its own; or other JSON."""
    rules = [f"call_{place}" for place in range(len(tools))]
    begin, end = _text(f"{CALL_START}\n"), _text(f"}}\n{CALL_END}")
    lines = [f"calls: call{' (NEXT call)*' if parallel else ''}", 'NEXT: "\\n"']
    lines += [f"answer: calls{'' if otherwise is None else ' | other'}"]
    lines += [] if otherwise is None else [f"other: {_schema(otherwise)}"]
    lines.append(f"call: {begin} ({' | '.join(rules)}) {end}")
    for rule, (name, schema) in zip(rules, tools.items(), strict=True):
        head = f'{{"name": {json.dumps(name)}, "arguments": '
        lines.append(f"{rule}: {_text(head)} arguments_{rule}")
        lines.append(f"arguments_{rule}: {_schema(schema)}")
    return lines


def _schema(schema: Any) -> str:
    options = {"whitespace_pattern": WHITESPACE}
    own = schema.get("x-guidance") if isinstance(schema, dict) else None
    whole = {**schema, "x-guidance": {**options, **(own if isinstance(own, dict) else {})}}
    return f"%json {json.dumps(whole)}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _literal(text: str) -> str:
    """A regex that matches just this text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)
