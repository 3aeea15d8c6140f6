"""Text that might be the start of a tag.

Covers how much of a text must wait for more of it.

    held("a <to", "<tool_call>") == 3
"""

from __future__ import annotations


def held(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` that starts ``tag`` and is not all of it."""
    longest = min(len(text), len(tag) - 1)
    return next((n for n in range(longest, 0, -1) if tag.startswith(text[-n:])), 0)
