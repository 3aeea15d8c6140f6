"""Formulas in answers: which dollar signs begin and end one.

Covers the brackets by which the page knows formulas, and takes them away again. Independent of Gradio.

    unmarked(marked("$x^2$ costs $5")) == "$x^2$ costs $5"
"""

from __future__ import annotations

import re

LEFT, RIGHT = r"\({}", r"{}\)"  # the brackets of a formula, with what is nothing there and tells it apart
# Code and displayed formulas are passed over. As in Pandoc, a formula neither begins nor ends with white
# space, and no digit follows it: amounts of money are none.
_PARTS = re.compile(
    r"(?P<kept>```.*?(?:```|\Z)|~~~.*?(?:~~~|\Z)|`[^`\n]*`|\$\$.*?(?:\$\$|\Z))"
    r"|(?<![\\$\w])\$(?P<formula>(?=[^\s$])(?:[^$`\n\\]|\\.)*)(?<![\s\\])\$(?![\d$])",
    re.DOTALL,
)


def marked(text: str) -> str:
    """A text with its formulas between ``LEFT`` and ``RIGHT`` in place of single dollar signs."""
    return _PARTS.sub(lambda found: found["kept"] or f"{LEFT}{found['formula']}{RIGHT}", text)


def unmarked(text: str) -> str:
    """The text as it was."""
    return text.replace(LEFT, "$").replace(RIGHT, "$")
