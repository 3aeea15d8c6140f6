"""Tables and lines on screens that are narrower than they are."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ingot.cli.terminal import console
from ingot.measure.side.text_table import Table, counted, narrow, plain

WIDE = Table(
    "kernels",
    ("module", "launches", "share", "of ceiling"),
    (
        ("qkv", "3", "27.3 %", "81.0 % read"),
        ("  a kernel with a long name", "2", "17.3 %", ""),
        ("", "1", "", ""),
    ),
)
TEXTS = Table("answers", ("item", "one", "other"), (("a1", "a quick fox " * 6, "a lazy dog " * 6),))


def shown(monkeypatch: pytest.MonkeyPatch, width: int, table: Table) -> str:
    """What a terminal of this width gets."""
    text = io.StringIO()
    terminal = Console(file=text, force_terminal=True, width=width, soft_wrap=True, color_system=None)
    monkeypatch.setattr(console, "stdout", lambda: terminal)
    console.print_table(table)
    return text.getvalue()


def test_columns_continue_below_the_names() -> None:
    parts = [plain(part).splitlines() for part in narrow(WIDE, 30)]
    assert parts == [
        [
            "kernels",
            "module           launches",
            "qkv                     3",
            "  a kernel wit…         2",
            " " * 24 + "1",
        ],
        ["…", "module            share", "qkv              27.3 %", "  a kernel wit…  17.3 %"],
        ["…", "module   of ceiling", "qkv     81.0 % read"],
    ]


@pytest.mark.parametrize("width", range(20, 80))
def test_every_value_is_in_one_part(width: int) -> None:
    parts = list(narrow(WIDE, width))
    assert [name for part in parts for name in part.columns[1:]] == list(WIDE.columns[1:])
    values = sorted(value for part in parts for row in part.rows for value in row[1:] if value)
    assert values == sorted(value for row in WIDE.rows for value in row[1:] if value)
    assert all(len(line) <= width for part in parts for line in plain(part).splitlines())


def test_a_table_that_fits_is_whole() -> None:
    widest = max(map(len, plain(WIDE).splitlines()))
    assert list(narrow(WIDE, widest)) == [WIDE]
    empty = Table("nothing", ("name",), ())
    assert list(narrow(empty, 20)) == [empty]


def test_a_number_that_is_wider_than_the_screen() -> None:
    wide = Table("wide", ("name", "text"), (("a name of a row", "x" * 50),))
    (part,) = narrow(wide, 20)
    assert part.rows == (("a name …", "x" * 50),)


def test_a_terminal_rules_what_fits_and_cuts_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "│ 81.0 % read │" in shown(monkeypatch, 90, WIDE)
    text = shown(monkeypatch, 40, WIDE)
    assert "│" not in text
    assert "27.3 %" in text
    assert "81.0 % read" in text
    assert max(map(len, text.splitlines())) <= 40


def test_a_terminal_wraps_long_texts_within_their_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, 60, TEXTS)
    assert "│ a1   │" in text
    assert text.count("fox") == 6
    assert max(map(len, text.splitlines())) <= 60


def test_lines_go_on_below_on_a_screen_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "  method: one step, run again and again with /a/path/that/is/never/cut/in/two.json"
    monkeypatch.delenv("COLUMNS", raising=False)
    console.print_report([line, ""], [WIDE])
    assert capsys.readouterr().out == f"{line}\n\n\n{plain(WIDE)}\n"
    monkeypatch.setenv("COLUMNS", "24")
    console.print_lines([line, ""])
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["  method: one step, run", "  again and again with", f"  {line.split()[-1]}", ""]
    for odd in ("", "wide", "0", "-4"):
        monkeypatch.setenv("COLUMNS", odd)
        console.print_lines(["1 2"])
        assert capsys.readouterr().out == "1 2\n"


def test_facts_go_on_below_themselves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = [("limits", "64 requests per step, 8192 tokens per request"), ("size", "12.3 MB"), ("", "")]
    monkeypatch.delenv("COLUMNS", raising=False)
    console.print_facts(facts, 8)
    assert capsys.readouterr().out == f"  limits  {facts[0][1]}\n  size    12.3 MB\n          \n"
    monkeypatch.setenv("COLUMNS", "33")
    console.print_facts(facts, 8)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "  limits  64 requests per step,",
        "          8192 tokens per request",
        "  size    12.3 MB",
        "",
    ]


def test_a_verdict_s_line_goes_on_below(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "engines/pocket-chat on cpu in fp32, 1.2 s"
    monkeypatch.delenv("COLUMNS", raising=False)
    console.print_verdict("unproven here", text, "bold red")
    assert capsys.readouterr().out == f"unproven here {text}\n"
    for width in (20, 40, 54, 55):
        monkeypatch.setenv("COLUMNS", str(width))
        console.print_verdict("unproven here", text, "bold red")
        lines = capsys.readouterr().out.splitlines()
        assert " ".join(lines) == f"unproven here {text}"
        assert max(map(len, lines)) <= width
        assert len(lines) == (1 if width == 55 else 4 if width == 20 else 2)


ROWS = [
    ("weights", "mlp", "5.9 MB", "fp16"),
    ("", "norms", "6.7 kB", "fp16, w4a16"),
    ("needed", "", "2.2 GB", ""),
]


def test_rows_go_on_below_themselves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    console.print_rows(ROWS, right=(2,))
    wide = capsys.readouterr().out.splitlines()
    assert wide[1:] == ["           norms  6.7 kB  fp16, w4a16", "  needed          2.2 GB"]
    monkeypatch.setenv("COLUMNS", "37")
    console.print_rows(ROWS, right=(2,))
    assert capsys.readouterr().out.splitlines() == wide  # exactly as wide as the screen
    monkeypatch.setenv("COLUMNS", "25")
    console.print_rows(ROWS, right=(2,))
    narrowed = [
        "  weights  mlp  5.9 MB",
        "    fp16",
        "  norms  6.7 kB  fp16,",
        "    w4a16",
        "  needed  2.2 GB",
    ]
    assert capsys.readouterr().out.splitlines() == narrowed
    console.print_rows([])
    assert capsys.readouterr().out == ""


def test_columns_with_names_go_on_below_with_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [("dtype", "quant", "8GiB", "16GiB"), ("fp16", "none", "113", "265"), ("fp32", "none", "5", "9")]
    monkeypatch.setenv("COLUMNS", "25")
    console.print_rows(rows, range(2, 4), names=2)
    assert capsys.readouterr().out.splitlines() == [
        *("  dtype quant  8GiB", "  fp16 none     113", "  fp32 none       5"),
        *("  dtype quant  16GiB", "  fp16 none      265", "  fp32 none        9"),
    ]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 gaps"), (1, "1 gap"), (1.2, "1 gap"), (2, "2 gaps"), (1715.4, "1,715 gaps")]
)
def test_counted(count: float, text: str) -> None:
    assert counted(count, "gap") == text
