"""Flags live in the terminal alone: what the package says elsewhere names fields, each of which is there and
has a flag or is declared to have none.
"""

from __future__ import annotations

import ast
import functools
import io
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer.main

import ingot
from ingot.cli.main import app
from ingot.cli.terminal.console import PrintableLog, print_error
from ingot.cli.terminal.field_flags import WITHOUT_FLAG, flag_of, flags_of, in_flags
from ingot.errors import BuildError, ConfigError, IngotError, RequestError

PACKAGE = Path(ingot.__file__).parent
FLAG = re.compile(r"(?<![\w-])--[a-z]")
NAMING = re.compile(r"\bfield=|(?<!`)`[a-z_]+(=[^`]*)?`(?!`)")
IN_TEXT = re.compile(r"(?<!`)`([a-z_]+)(?:=[^`]*)?`(?!`)")
OTHERS_FLAGS = {
    "measure/align/trace.py",  # a script by itself, with a command line of its own
    "measure/side/machine.py",  # of git and nvidia-smi
}
NO_FIELDS = {"infer", "key", "int"}  # in backticks: a call of Triton's, parts of msgspec's messages


@functools.cache
def sources() -> dict[str, str]:
    """The package's modules outside the terminal."""
    paths = [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))]
    return {str(p): (PACKAGE / p).read_text(encoding="utf-8") for p in paths if p.parts[0] != "cli"}


def nodes_of(pattern: re.Pattern[str]) -> dict[str, list[ast.AST]]:
    """The syntax of those in whose source the pattern is."""
    return {p: list(ast.walk(ast.parse(text))) for p, text in sources().items() if pattern.search(text)}


def texts(nodes: Sequence[ast.AST], *, docstrings: bool) -> Iterator[str]:
    """Every string literal, parts of an f-string together."""
    skipped = set()
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(one) for one in node.values}
        elif isinstance(node, ast.Expr) and not docstrings:
            skipped.add(id(node.value))
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield "".join(one.value if isinstance(one, ast.Constant) else "…" for one in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.value


def fields_at_fault(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """What errors say with ``field=``, where it is written out."""
    for node in nodes:
        if isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("Error"):
            for keyword in node.keywords:
                value = keyword.value
                listed = value.elts if isinstance(value, ast.Tuple) else [value]
                if keyword.arg == "field":
                    yield from (
                        str(one.value) for one in listed if isinstance(one, ast.Constant) and one.value
                    )


@functools.cache
def named() -> dict[str, str]:
    """Field → a module that names it in an error or in a text."""
    found: dict[str, str] = {}
    for place, nodes in nodes_of(NAMING).items():
        for field in fields_at_fault(nodes):
            found.setdefault(field, place)
        for text in texts(nodes, docstrings=False):
            for match in IN_TEXT.finditer(text):
                found.setdefault(match[1], place)
    return {field: place for field, place in found.items() if field not in NO_FIELDS}


@functools.cache
def there() -> set[str]:
    """Parameters of functions and fields of classes: what the package annotates."""
    return {
        name
        for text in sources().values()
        for name in re.findall(r"(?:[(,] ?|^ +)(\w+): ", text, re.MULTILINE)
    }


@functools.cache
def options() -> dict[str, set[str]]:
    """Parameter of a verb → its flags, of all verbs together; an argument has its name in capitals."""
    found: dict[str, set[str]] = {}
    verbs: list[Any] = [typer.main.get_command(app)]
    for verb in verbs:
        verbs += getattr(verb, "commands", {}).values()
        for param in verb.params:
            found.setdefault(param.name, set()).update(param.opts, param.secondary_opts)
    return found


class TestThePackage:
    def test_outside_the_terminal_no_text_has_a_flag(self) -> None:
        found = {
            place: text
            for place, nodes in nodes_of(FLAG).items()
            for text in texts(nodes, docstrings=True)
            if FLAG.search(text)
        }
        assert found.keys() <= OTHERS_FLAGS, {k: v for k, v in found.items() if k not in OTHERS_FLAGS}
        assert len(OTHERS_FLAGS) <= 5

    def test_a_field_that_is_named_is_there(self) -> None:
        assert len(named()) > 80
        odd = {field: place for field, place in named().items() if field not in there() | options().keys()}
        assert not odd

    def test_it_has_a_flag_or_is_declared_to_have_none(self) -> None:
        every = {flag for flags in options().values() for flag in flags}
        odd = {}
        for field, place in named().items():
            flags = re.findall("-[a-z-]+", flag_of(field)) or [field]  # an argument
            if (field in WITHOUT_FLAG) == (set(flags) <= every):
                odd[field] = place
        assert not odd

    def test_none_is_declared_for_nothing(self) -> None:
        assert not WITHOUT_FLAG - named().keys()


class TestFlags:
    @pytest.mark.parametrize(
        ("field", "flag"),
        [
            ("max_seq_len", "--max-seq-len"),
            ("stop_token_ids", "--stop-token-id"),
            ("n", "-n"),
            ("temperatures", "--temperature"),
            ("rotation", "--rotate"),
            ("files", "FILE"),
            ("messages[0].content", "messages[0].content"),
            ("logits_processors", "logits_processors"),
        ],
    )
    def test_of_a_field(self, field: str, flag: str) -> None:
        assert flag_of(field) == flag

    @pytest.mark.parametrize("options_of", [{"stop_token_ids"}, {"temperatures", "no_speech", "suppress"}])
    def test_of_a_verb_are_those_of_the_table(self, options_of: set[str]) -> None:
        for field in options_of:
            assert flag_of(field) in options()[field]

    @pytest.mark.parametrize(
        ("text", "shown"),
        [
            ("build with `dtype=bf16`", "build with --dtype bf16"),
            ("`max_batch_size=1`, `max_seq_len=64`", "--max-batch-size 1, --max-seq-len 64"),
            ("`force=True` replaces it", "--force replaces it"),
            ("build with `tune=False`", "build with --no-tune"),
            ("`rotation=False`", "--no-rotate"),
            ('`ids="1 2 3"`', '--ids "1 2 3"'),
            ("`ingot eval` of an engine", "`ingot eval` of an engine"),
            ("`logits_processors`", "`logits_processors`"),
            ("`Dtype` and `a.b`", "`Dtype` and `a.b`"),
        ],
    )
    def test_in_a_text(self, text: str, shown: str) -> None:
        assert in_flags(text) == shown

    def test_a_field_at_fault_that_the_verb_does_not_take_keeps_its_name(self) -> None:
        assert flags_of(["top_k"], {"--top-k", "--seed"}) == "--top-k"
        assert flags_of(["top_k", "seed"], {"--seed"}) == "top_k, --seed"
        assert flags_of(["engine"], {"--seed"}) == "ENGINE"


def shown(error: IngotError, takes: set[str], capsys: pytest.CaptureFixture[str]) -> str:
    print_error(error, takes)
    return capsys.readouterr().err


class TestErrors:
    def test_python_names_the_field_and_the_terminal_the_flag(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        error = ConfigError("`calib_samples` is too small", seen="`dtype`", allowed=8, field="calib_samples")
        assert str(error).endswith("to fix: calib_samples")
        lines = shown(error, {"--calib-samples"}, capsys).splitlines()
        assert lines == [
            "error: --calib-samples is too small",
            "  seen: `dtype`",  # what a user wrote stays as it is
            "  allowed: 8",
            "  fix: --calib-samples",
        ]

    def test_a_fix_names_flags_of_other_verbs_too(self, capsys: pytest.CaptureFixture[str]) -> None:
        error = RequestError("no template", field="chat", fix="build with `chat_template=chatml`")
        assert "fix: build with --chat-template chatml" in shown(error, {"--device"}, capsys)

    def test_allowed_values_too(self, capsys: pytest.CaptureFixture[str]) -> None:
        error = BuildError("no", allowed="prompts of `ids`")
        assert "allowed: prompts of --ids" in shown(error, {"--device"}, capsys)

    def test_several_fields(self, capsys: pytest.CaptureFixture[str]) -> None:
        error = ConfigError("no", field=("prompt_tokens", "new_tokens"))
        assert (error.fields, error.field) == (("prompt_tokens", "new_tokens"), None)
        assert error.fix == "prompt_tokens, new_tokens"
        assert "--prompt-tokens, --new-tokens" in shown(error, {"--prompt-tokens", "--new-tokens"}, capsys)

    def test_a_log_line_has_flags_where_the_code_wrote_fields(self) -> None:
        out = io.StringIO()
        handler = logging.StreamHandler(out)
        handler.setFormatter(PrintableLog())
        record = logging.LogRecord("x", logging.WARNING, "", 0, "more of `calib`: %s", ("`dtype`",), None)
        handler.handle(record)
        handler.handle(record)  # a second handler sees the same
        assert out.getvalue() == "more of --calib: `dtype`\n" * 2
