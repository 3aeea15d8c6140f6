"""Formulas in answers: which dollar signs begin and end one."""

from __future__ import annotations

import re

LEFT, RIGHT = r"\({}", r"{}\)"  # brackets of a formula; the empty braces mark them as ours
# Code and displayed formulas are skipped. As in Pandoc, a formula neither begins nor ends with white space,
# and no digit follows it: amounts of money are not formulas.
_PARTS = re.compile(
    r"(?P<kept>```.*?(?:```|\Z)|~~~.*?(?:~~~|\Z)|`[^`\n]*`|\$\$.*?(?:\$\$|\Z))"
    r"|(?<![\\$\w])\$(?P<formula>(?=[^\s$])(?:[^$`\n\\]|\\.)*)(?<![\s\\])\$(?![\d$])",
    re.DOTALL,
)


def marked(text: str) -> str:
    """A text with its formulas between ``LEFT`` and ``RIGHT`` in place of single dollar signs."""
    return _PARTS.sub(lambda found: found["kept"] or f"{LEFT}{found['formula']}{RIGHT}", text)


def unmarked(text: str) -> str:
    return text.replace(LEFT, "$").replace(RIGHT, "$")
