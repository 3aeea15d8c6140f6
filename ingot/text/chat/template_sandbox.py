"""The Jinja sandbox of chat templates, which runs in a process of its own (``LimitedProcess``)."""

from __future__ import annotations

import functools
import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, meta, nodes, parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_CHARS = 8 * 1024 * 1024
_MOST_ERROR = 2000  # characters of an error
_MOST_TEXT = 64  # characters of a string in ``texts``


class TemplateRefusal(jinja2.TemplateError):
    """A template called ``raise_exception``: the messages do not fit it."""


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Render a template.

    Args:
        question: ``source``, the Jinja text, and ``variables``; None: only parse it.

    Returns:
        ``text``; where it is only parsed, ``names``, the variables that it reads, and ``texts``, the strings
        that it compares and prints; or ``fault`` with ``kind`` (``syntax``; ``refusal``: the template called
        ``raise_exception``; ``failure``: anything else) and ``line``, if known.
    """
    try:
        template = _compiled(question["source"])
    except MemoryError:
        raise
    except Exception as error:  # whatever the parser of an untrusted text raises
        return _fault("syntax", error)
    if question["variables"] is None:
        sandbox = TemplateSandbox()
        tree = sandbox.parse(question["source"])  # the search for names changes it
        texts = {one.value for one in tree.find_all(nodes.Const) if isinstance(one.value, str)}
        names = meta.find_undeclared_variables(tree) - set(sandbox.globals)
        return {"names": sorted(names), "texts": sorted(one for one in texts if len(one) <= _MOST_TEXT)}
    pieces, size = [], 0
    try:
        for piece in template.generate(**question["variables"]):
            size += len(piece)
            if size > MAX_CHARS:
                raise jinja2.TemplateError(f"the template writes more than {MAX_CHARS} characters")
            pieces.append(piece)
        return {"text": "".join(pieces)}
    except MemoryError:
        raise
    except TemplateRefusal as error:
        return _fault("refusal", error)
    except Exception as error:  # whatever an untrusted program raises
        return _fault("failure", error)


def _fault(kind: str, error: Exception) -> dict[str, Any]:
    text = str(error)[:_MOST_ERROR] or type(error).__name__
    return {"fault": text, "kind": kind, "line": getattr(error, "lineno", None)}


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment in which Hugging Face renders chat templates."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals = {
            "range": self.globals["range"],
            "cycler": self.globals["cycler"],
            "joiner": self.globals["joiner"],
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),  # not the class, which has attributes
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": lambda pattern: datetime.now().strftime(pattern),
        }


@functools.lru_cache(maxsize=1)
def _compiled(source: str) -> jinja2.Template:
    return TemplateSandbox().from_string(source)


class _Generation(ext.Extension):
    """``{% generation %}`` marks the assistant's text for training; here its body is plain."""

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


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's ``tojson``: JSON without Jinja's HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusal(str(message))
