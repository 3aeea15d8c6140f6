"""Thoughts are separated from the answer, however the text is split."""

from __future__ import annotations

import pytest

from ingot.text.parsing.thinking import ThinkingSplitter, ThoughtSplit, opens_thinking

CASES = [
    ("<think>\nHm, 3 < 4.\n\nSo\n</think>\n\nYes.\n", False, ThoughtSplit("Hm, 3 < 4.\n\nSo", "Yes.\n")),
    ("Hm.\n</think>\n\nYes <think>no</think>", True, ThoughtSplit("Hm.", "Yes <think>no</think>")),
    ("\n<think></think>Yes", False, ThoughtSplit("", "Yes")),
    ("<think>\n\n</think>\n\n", False, ThoughtSplit("", "")),
    (" \n Yes </think>", False, ThoughtSplit("", " \n Yes </think>")),
    ("<thinking>a", False, ThoughtSplit("", "<thinking>a")),
    ("  <thi", False, ThoughtSplit("", "  <thi")),
    ("<think>\nnot done </thin", False, ThoughtSplit("not done </thin", "")),
    ("\n\nnot done\n", True, ThoughtSplit("not done\n", "")),
    ("</thi\n</think></think>", True, ThoughtSplit("</thi", "</think>")),
    ("", True, ThoughtSplit("", "")),
]


def split(pieces: list[str], opened: bool) -> ThoughtSplit:
    splitter = ThinkingSplitter(opened=opened)
    found = [splitter.feed(piece) for piece in pieces] + [splitter.flush()]
    return ThoughtSplit("".join(one.reasoning for one in found), "".join(one.content for one in found))


@pytest.mark.parametrize(("text", "opened", "expected"), CASES)
def test_every_split_gives_the_same(text: str, opened: bool, expected: ThoughtSplit) -> None:
    assert split([text], opened) == expected
    assert split(list(text), opened) == expected
    for a in range(len(text) + 1):
        for b in range(a, len(text) + 1):
            assert split([text[:a], text[a:b], text[b:]], opened) == expected


def test_text_is_given_as_soon_as_it_is_certain() -> None:
    splitter = ThinkingSplitter()
    fed = [splitter.feed(text) for text in ("<think>", "Hm", " </", "b", "</think>", "\n", "Yes", " ")]
    hm = [ThoughtSplit("Hm"), ThoughtSplit(" "), ThoughtSplit("</b")]
    assert fed == [
        ThoughtSplit(),
        *hm,
        ThoughtSplit(),
        ThoughtSplit(),
        ThoughtSplit("", "Yes"),
        ThoughtSplit("", " "),
    ]


def test_whether_the_prompt_opened_the_block() -> None:
    assert opens_thinking("<|im_start|>assistant\n<think>\n")
    assert not opens_thinking("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not opens_thinking("<|im_start|>assistant\n")
