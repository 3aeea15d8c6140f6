"""Where chat templates run.

Owns the Jinja sandbox: what templates may call, and the limits on time and size. Knows no messages and no
tokens.

    sandbox.render(sandbox.compile_template("{{ messages[0].content }}"), messages=[{"content": "Hi"}])
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, nodes, parser, runtime
from jinja2.filters import FILTERS
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_CHARS = 8 * 1024 * 1024
MAX_SECONDS = 5.0
_MAX_POWER = 64
_WIDTH = re.compile(r"[%:{][^a-zA-Z%}]*?(\d{6,18})")


class TemplateLimitError(jinja2.TemplateError):
    """A template writes too much or runs too long."""


class TemplateRefusal(jinja2.TemplateError):
    """A template called ``raise_exception``: the messages do not fit it."""


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment in which Hugging Face renders chat templates, with limits.

    Time is looked at whenever a template reads an attribute or an item, calls something or writes text, so
    only a bare loop over a ready list escapes it; a ``range`` has at most 100,000 items (Jinja's
    ``MAX_RANGE``). Values may not grow beyond ``max_chars`` characters.
    """

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, *, max_chars: int = MAX_CHARS, max_seconds: float = MAX_SECONDS) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols])
        self.max_chars = max_chars
        self.max_seconds = max_seconds
        self.clock: Callable[[], float] = time.monotonic
        self._local = threading.local()
        self.filters["tojson"] = _to_json
        for name in ("center", "indent", "format", "batch", "slice", "truncate", "wordwrap"):
            self.filters[name] = self._limited(self.filters[name])
        self.globals = {
            "range": self.globals["range"],
            "cycler": self.globals["cycler"],
            "joiner": self.globals["joiner"],
            "dict": _make_dict,
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def compile_template(self, source: str) -> jinja2.Template:
        """Parse a template.

        Raises:
            jinja2.TemplateSyntaxError: with the line.
        """
        return self.from_string(source)

    def render(self, template: jinja2.Template, **variables: Any) -> str:
        """Text of a compiled template.

        Raises:
            TemplateLimitError: too long a text, or too long a time.
            TemplateRefusal: the template refuses the variables.
            jinja2.TemplateError: any other fault of the template.
        """
        self._local.deadline = self.clock() + self.max_seconds
        pieces, size = [], 0
        for piece in template.generate(**variables):
            self._check_time()
            size += len(piece)
            if size > self.max_chars:
                raise TemplateLimitError(f"the template writes more than {self.max_chars} characters")
            pieces.append(piece)
        return "".join(pieces)

    def call_binop(self, context: runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse to grow values out of bounds."""
        self._check_time()
        if operator == "*":
            self._check_size(_repeated_size(left, right))
        elif operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, type(left)):
            self._check_size(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            self._check_format(left)
        elif operator == "**" and isinstance(right, (int, float)) and abs(right) > _MAX_POWER:
            raise TemplateLimitError(f"the template raises to a power above {_MAX_POWER}")
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As Jinja's sandbox, with the limits checked."""
        return self._checked(super().getattr(obj, attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """As Jinja's sandbox, with the limits checked."""
        return self._checked(super().getitem(obj, argument))

    def call(__self, __context: runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """As Jinja's sandbox, with the limits checked."""
        __self._check_numbers(*args, *kwargs.values())
        if getattr(__obj, "__name__", "") in ("format", "format_map"):
            __self._check_format(getattr(__obj, "__self__", ""))
        return __self._checked(super().call(__context, __obj, *args, **kwargs))

    def _checked(self, value: Any) -> Any:
        self._check_time()
        if isinstance(value, str):
            self._check_size(len(value))
        return value

    def _limited(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that pads, refusing to pad out of bounds."""

        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            self._check_numbers(*args, *kwargs.values())
            if function is FILTERS["format"]:
                self._check_format(args[0])
            return function(*args, **kwargs)

        return limited

    def _check_numbers(self, *values: Any) -> None:
        for value in values:
            if isinstance(value, int):
                self._check_size(value)

    def _check_format(self, pattern: Any) -> None:
        """Widths inside a format string, of either kind."""
        for width in _WIDTH.findall(str(pattern)):
            self._check_size(int(width))

    def _check_size(self, size: int) -> None:
        if size > self.max_chars:
            raise TemplateLimitError(f"the template makes a value of more than {self.max_chars} items")

    def _check_time(self) -> None:
        deadline = getattr(self._local, "deadline", None)
        if deadline is not None and self.clock() > deadline:
            raise TemplateLimitError(f"the template runs longer than {self.max_seconds} seconds")


class _Generation(ext.Extension):
    """``{% generation %}`` marks what the assistant wrote, for training; here its body is plain."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Jinja's ``namespace`` without names that reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        for name in dict(*rest, **kwargs):
            _check_name(name)
        Namespace.__init__(self, *rest, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}")


def _repeated_size(left: Any, right: Any) -> int:
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, (str, list, tuple)) and isinstance(count, int):
            return len(sequence) * max(count, 0)
    return 0


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's HTML escapes, as Hugging Face gives it to templates."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusal(str(message))
