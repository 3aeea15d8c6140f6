"""Every shape of record that is read as it is, and every way of being none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ingot.errors import ConfigError
from ingot.measure.evaluate.data_file import read_data
from ingot.measure.evaluate.data_item import BadRecord, item_of
from ingot.measure.evaluate.scored_answers import question_check

USER = {"role": "user", "content": "Hi"}


def write(folder: Path, *lines: Any, name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"text": "abc"}, {"text": "abc"}),
        ({"token_ids": [1, 2]}, {"token_ids": (1, 2)}),
        ({"article": "a", "highlights": "h", "id": "x7"}, {"article": "a", "references": ("h",), "id": "x7"}),
        ({"article": "a", "summary": "s", "id": 3}, {"article": "a", "references": ("s",), "id": "3"}),
        ({"prompt": "p", "answer": "a"}, {"prompt": "p", "references": ("a",)}),
        ({"prompt": "p", "answers": ["a", "b"]}, {"prompt": "p", "references": ("a", "b")}),
        ({"messages": [USER], "answer": "a"}, {"messages": (USER,), "references": ("a",)}),
        (
            {"messages": [USER, {"role": "assistant", "content": "Yo"}, USER]},
            {"messages": (USER,), "references": ("Yo",)},
        ),
        (
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]},
            {"messages": (USER,), "references": ("Yo",)},
        ),
        ({"messages": [USER]}, {"messages": (USER,)}),
    ],
)
def test_shapes(record: dict[str, Any], expected: dict[str, Any]) -> None:
    item = item_of(record, 4)
    assert item.number == 4
    assert {name: getattr(item, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (3, "int instead of an object"),
        ({"body": "x"}, "none of the known fields"),
        ({"text": 3}, "text is int"),
        ({"text": " "}, "text is empty"),
        ({"text": "\ud800"}, "surrogate"),
        ({"prompt": "p", "answers": []}, "not a list of texts"),
        ({"prompt": "p", "answers": [1]}, "int instead of text"),
        ({"prompt": "p", "answer": "a", "summary": "s"}, "cannot be combined"),
        ({"token_ids": [1, True]}, "not a list of token ids"),
        ({"messages": []}, "not a list of messages"),
        ({"messages": [{"role": "robot", "content": "x"}], "answer": "a"}, "'robot'"),
        ({"messages": [{"content": "x"}], "answer": "a"}, "robot|None"),
        ({"messages": [{"role": "assistant", "content": "x"}], "answer": "a"}, "is not the user's"),
        ({"conversations": [{"value": "x"}]}, "None"),
        ({"conversations": "x"}, "not a list of turns"),
    ],
)
def test_records_that_are_no_item(record: object, why: str) -> None:
    with pytest.raises(BadRecord, match=why):
        item_of(record, 1)


def test_cnn_dailymail_and_sharegpt_as_they_are(data: Path) -> None:
    (article,) = read_data(data / "text" / "cnn_dailymail_article.jsonl", needs=question_check).items
    assert article.article is not None
    assert article.article.startswith("(CNN)James Best")
    assert article.references[0].startswith("James Best, who played")
    assert article.id == "00200e794fa41d3f7ce92cbf43e9fd4cd652bb09"
    chats = read_data(data / "text" / "fastchat" / "dummy_conversation.json", limit=100, needs=question_check)
    assert len(chats.items) == 100
    assert chats.items[0].messages == ({"role": "user", "content": "Who are you?"},)


def test_bad_lines_are_named_and_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {"text": "a"}, "", "{", "[1]", {"text": "b"})
    with pytest.raises(ConfigError) as caught:
        read_data(path)
    assert "line 3: not JSON" in str(caught.value)
    assert "line 4: list instead" in str(caught.value)
    assert str(caught.value.fix).startswith("`skip_bad`")
    found = read_data(path, skip_bad=True)
    assert [item.number for item in found.items] == [1, 5]
    assert found.facts()["bad_lines"] == [3, 4]


def test_many_bad_lines_are_counted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"8 lines of .*; and 3 more: 6, 7, 8"):
        read_data(write(tmp_path, *["x"] * 8))


def test_bad_records_of_a_list_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="record 2: text is empty"):
        read_data(write(tmp_path, json.dumps([{"text": "a"}, {"text": ""}]), name="a.json"))


def test_limit_stops_before_later_bad_lines(tmp_path: Path) -> None:
    path = write(tmp_path, {"text": "a"}, {"text": "b"}, "x")
    assert len(read_data(path, limit=2).items) == 2


def test_where_chooses_records_before_they_are_judged(tmp_path: Path) -> None:
    path = write(tmp_path, {"kind": 1, "text": "a"}, {"kind": 2}, {"kind": 1, "text": "b"})
    assert [item.text for item in read_data(path, where=[("kind", "1")]).items] == ["a", "b"]
    with pytest.raises(ConfigError, match="has kind=3 and text=a; seen: kind: 1, 2; text: a, b"):
        read_data(path, where=[("kind", "3"), ("text", "a")])


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b"", "no item"),
        ("a.jsonl", b"\xff\n", "line 1: not UTF-8"),
        ("a.json", b"{}", "list of records"),
        ("a.json", b"[", "not JSON"),
        ("a.txt", b" \n", "empty"),
        ("a.txt", b"\xff", "not UTF-8"),
    ],
)
def test_files_that_hold_nothing(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        read_data(tmp_path / name)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_data(tmp_path / "none.jsonl")


def test_byte_order_marks_and_windows_line_ends(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n')
    assert [item.text for item in read_data(tmp_path / "a.jsonl").items] == ["a", "b"]


def test_running_text_is_one_item(tmp_path: Path) -> None:
    path = write(tmp_path, "One", "", "two", name="a.txt")
    assert read_data(path).items[0].text == "One\n\ntwo"
    with pytest.raises(ConfigError, match="where"):
        read_data(path, where=[("a", "b")])


def test_running_text_is_refused_where_questions_are_asked(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("Some text.")
    assert read_data(path).items[0].text == "Some text."
    with pytest.raises(ConfigError, match=r"running text.*text\.txt: no question.*data"):
        read_data(path, needs=question_check)


def test_a_pipe_has_the_hash_of_what_it_gave() -> None:
    def read(*texts: str) -> str:
        reads, writes = os.pipe()
        os.write(writes, "".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
        os.close(writes)
        data = read_data(Path(f"/dev/fd/{reads}"))
        assert [item.text for item in data.items] == list(texts)
        found = data.facts()["sha256"]
        os.close(reads)
        return str(found)

    assert read("one", "two") == read("one", "two")
    assert read("one", "two") != read("one", "three")
