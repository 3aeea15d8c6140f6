"""Thoughts apart from the answer: the same parts however the text is split."""

from __future__ import annotations

import pytest

from ingot.text.parsing.thinking import Split, ThinkingSplitter, opens_thinking

CASES = [
    ("<think>\nHm, 3 < 4.\n\nSo\n</think>\n\nYes.\n", False, Split("Hm, 3 < 4.\n\nSo", "Yes.\n")),
    ("Hm.\n</think>\n\nYes <think>no</think>", True, Split("Hm.", "Yes <think>no</think>")),
    ("\n<think></think>Yes", False, Split("", "Yes")),
    ("<think>\n\n</think>\n\n", False, Split("", "")),
    (" \n Yes </think>", False, Split("", " \n Yes </think>")),
    ("<thinking>a", False, Split("", "<thinking>a")),
    ("  <thi", False, Split("", "  <thi")),
    ("<think>\nnot done </thin", False, Split("not done </thin", "")),
    ("\n\nnot done\n", True, Split("not done\n", "")),
    ("</thi\n</think></think>", True, Split("</thi", "</think>")),
    ("", True, Split("", "")),
]


def split(pieces: list[str], opened: bool) -> Split:
    splitter = ThinkingSplitter(opened=opened)
    found = [splitter.feed(piece) for piece in pieces] + [splitter.flush()]
    return Split("".join(one.reasoning for one in found), "".join(one.content for one in found))


@pytest.mark.parametrize(("text", "opened", "expected"), CASES)
def test_every_split_gives_the_same(text: str, opened: bool, expected: Split) -> None:
    assert split([text], opened) == expected
    assert split(list(text), opened) == expected
    for a in range(len(text) + 1):
        for b in range(a, len(text) + 1):
            assert split([text[:a], text[a:b], text[b:]], opened) == expected


def test_text_is_given_as_soon_as_it_is_certain() -> None:
    splitter = ThinkingSplitter()
    fed = [splitter.feed(text) for text in ("<think>", "Hm", " </", "b", "</think>", "\n", "Yes", " ")]
    hm = [Split("Hm"), Split(" "), Split("</b")]
    assert fed == [Split(), *hm, Split(), Split(), Split("", "Yes"), Split("", " ")]


def test_whether_the_prompt_opened_the_block() -> None:
    assert opens_thinking("<|im_start|>assistant\n<think>\n")
    assert not opens_thinking("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not opens_thinking("<|im_start|>assistant\n")
