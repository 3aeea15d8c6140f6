"""Tool calls in text: the same deltas however the text is split, and nothing is lost."""

from __future__ import annotations

import json
import random

import pytest

from ingot.text.parsing.tool_calls import (
    ArgumentsDelta,
    CallStart,
    ContentDelta,
    Delta,
    ToolCallParser,
    new_call_id,
)

ARGUMENTS = '{"a": "x</tool_call>\\"}", "b": [1, {"c": null}], "é": "<tool_call>"}'
CALL = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'


def content(text: str) -> ContentDelta:
    return ContentDelta(text)


def called(index: int, name: str, arguments: str) -> list[Delta]:
    return [CallStart(index, f"id{index}", name), ArgumentsDelta(index, arguments)]


CASES: list[tuple[str, list[Delta]]] = [
    ("", []),
    ("  \n", [content("  \n")]),
    ("a < b <tool_cal", [content("a < b <tool_cal")]),
    (CALL, called(0, "f", ARGUMENTS)),
    (f"Hi.\n\n{CALL}\n{CALL}\n", [content("Hi."), *called(0, "f", ARGUMENTS), *called(1, "f", ARGUMENTS)]),
    (f"{CALL}{CALL} So.", [*called(0, "f", ARGUMENTS), *called(1, "f", ARGUMENTS), content(" So.")]),
    # order, other keys, no arguments, arguments of other kinds
    ('<tool_call>{"arguments":{"a":1} ,"name":"g"}</tool_call>', called(0, "g", '{"a":1}')),
    ('<tool_call>{"id":[{"name":"x"}],"name":"g","arguments":{}}</tool_call>', called(0, "g", "{}")),
    ('<tool_call>{"name":"g"}</tool_call>', called(0, "g", "{}")),
    (
        '<tool_call>{"name":"f","arguments":[]}</tool_call><tool_call>{"name":"g"}</tool_call>',
        [*called(0, "f", "[]"), *called(1, "g", "{}")],
    ),
    ('<tool_call>{"name":"g","arguments":-1.5e3}</tool_call>', called(0, "g", "-1.5e3")),
    ('<tool_call>{"name":"g","arguments":null }</tool_call>', called(0, "g", "null")),
    ('<tool_call>{"name":"g","arguments":"{\\"a\\":1}"}</tool_call>', called(0, "g", '"{\\"a\\":1}"')),
    ('<tool_call>{"name":"\\u00e9","arguments":[]}</tool_call>', called(0, "é", "[]")),
    # no call: content as it was written
    (
        "a \n<tool_call>\nnot json</tool_call> b",
        [content("a \n<tool_call>\nnot json</tool_call> b")],
    ),
    ('<tool_call>{"name":3}</tool_call>', [content('<tool_call>{"name":3}</tool_call>')]),
    ("<tool_call>{}</tool_call>", [content("<tool_call>{}</tool_call>")]),
    ('x <tool_call>{"na', [content('x <tool_call>{"na')]),
    (f"<tool_call>[1]{CALL}", [content("<tool_call>[1]"), *called(0, "f", ARGUMENTS)]),
    # not closed, or broken after the name: the arguments as they are
    ('<tool_call>{"name":"f","arguments":{"a":"b', called(0, "f", '{"a":"b')),
    ('<tool_call>{"name":"f","arguments":{"a":1}}', called(0, "f", '{"a":1}')),
    (
        '<tool_call>{"name":"f","arguments":{"a":1}}\n</tool_c',
        called(0, "f", '{"a":1}'),
    ),
    ('<tool_call>{"name":"f","arguments":{"a":1}\n</tool_call>x', [*called(0, "f", '{"a":1}'), content("x")]),
    (
        f'<tool_call>{{"name":"f","arguments":{{"a":1\n</tool_call>{CALL}',
        [*called(0, "f", '{"a":1\n'), *called(1, "f", ARGUMENTS)],
    ),
    ('<tool_call>{"name":"f","arguments":{"a":"b\nc}}\n</tool_call>', called(0, "f", '{"a":"b\nc}}\n')),
    ('<tool_call>{"name":"f","arguments":{"a":"b\nc"}}</tool_call>', called(0, "f", '{"a":"b\nc"}')),
    ('<tool_call>{"name":"f","arguments":{"a":"b\nc</tool_', called(0, "f", '{"a":"b\nc</tool_')),
    ('<tool_call>{"name":"f","arguments":{} oops}</tool_call>x', [*called(0, "f", "{}"), content("oops}x")]),
]


def joined(deltas: list[Delta]) -> list[Delta]:
    """Neighbours of one kind and call as one."""
    found: list[Delta] = []
    for delta in deltas:
        last = found[-1] if found else None
        if isinstance(delta, ContentDelta) and isinstance(last, ContentDelta):
            found[-1] = ContentDelta(last.text + delta.text)
        elif isinstance(delta, ArgumentsDelta) and isinstance(last, ArgumentsDelta):
            assert last.index == delta.index
            found[-1] = ArgumentsDelta(delta.index, last.text + delta.text)
        else:
            found.append(delta)
    return found


def parsed(pieces: list[str]) -> list[Delta]:
    ids = (f"id{i}" for i in range(99))
    parser = ToolCallParser(lambda: next(ids))
    return joined([delta for piece in pieces for delta in parser.feed(piece)] + parser.flush())


@pytest.mark.parametrize(("text", "expected"), CASES, ids=lambda value: repr(value)[:40])
def test_every_split_gives_the_same(text: str, expected: list[Delta]) -> None:
    assert parsed([text]) == expected
    assert parsed(list(text)) == expected
    for a in range(len(text) + 1):
        assert parsed([text[:a], text[a:]]) == expected
        for b in range(a, len(text) + 1, 7):
            assert parsed([text[:a], text[a:b], text[b:]]) == expected


def test_nothing_is_lost_of_any_text() -> None:
    """Random pieces of the format: every letter comes back once, except in the JSON around a call."""
    random.seed(1)
    parts = [
        "<tool_call>",
        "</tool_call>",
        "{",
        "}",
        '"name"',
        ":",
        '"f"',
        ",",
        '"arguments"',
        " ",
        "\n",
        "z",
        '"',
    ]
    for _ in range(3000):
        text = "".join(random.choices(parts, k=random.randint(1, 24)))
        whole = parsed([text])
        assert parsed(list(text)) == whole
        if not any(isinstance(delta, CallStart) for delta in whole):
            assert "".join(delta.text for delta in whole if isinstance(delta, ContentDelta)) == text


def test_arguments_stream_as_they_arrive() -> None:
    parser = ToolCallParser()
    deltas = [
        parser.feed(piece) for piece in ("Hi", '<tool_call>{"name": "f"', ', "arguments": {"a"', ": 1}")
    ]
    assert deltas[0] == [ContentDelta("Hi")]
    assert isinstance(deltas[1][0], CallStart)
    assert deltas[2:] == [[ArgumentsDelta(0, '{"a"')], [ArgumentsDelta(0, ": 1}")]]
    assert parser.num_calls == 1


def test_ids_differ() -> None:
    assert len({new_call_id() for _ in range(100)}) == 100
    assert json.dumps(new_call_id()).startswith('"call_')


def test_unclosed_brackets_are_not_a_name() -> None:
    text = '<tool_call>{"name": ' + "[" * 3000 + "]" * 3000 + ', "arguments": {}}</tool_call>'
    assert "".join(delta.text for delta in parsed([text]) if isinstance(delta, ContentDelta)) == text


def test_an_end_tag_that_broke_a_call_is_the_only_one() -> None:
    """After it other end tags, complete or cut, are text."""
    text = '<tool_call>\n{"name": "f", "arguments": {"a": <</tool_call> and </tool_call> then </'
    for size in (1, 7, len(text)):
        parser = ToolCallParser()
        found = [one for at in range(0, len(text), size) for one in parser.feed(text[at : at + size])]
        found += parser.flush()
        shown = "".join(one.text for one in found if isinstance(one, ContentDelta))
        assert shown == " and </tool_call> then </"
        assert parser.num_calls == 1
