"""Verbs that run out of memory, and the flags that their errors advise.

failed = call(VERBS["run"], tmp_path, engine)
call(VERBS["run"], tmp_path, engine, *shown(failed.stderr)[0].split())
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.e2e.terminal import ingot

MAX_SEQ_LEN = 2048
VERBS = {
    "run": ("run", "{engine}", "Hi", "--max-new-tokens", 3, "--ignore-eos", "--json", "--device", "cpu"),
    "chat": ("chat", "{engine}", "--max-new-tokens", 3, "--device", "cpu"),
    "repro": ("repro", "{engine}", "--layer", 0, "--prompt", "Hi", "--out", "{tmp}/l", "--device", "cpu"),
    "bench": ("bench", "latency", "{engine}", "--batch", 1, "--prompt-tokens", 4, "--new-tokens", 2,
              "--repeats", 1, "--device", "cpu"),
    "eval": ("eval", "perplexity", "{engine}", "--data", "{tmp}/text.txt", "--window", 16, "--device", "cpu"),
}  # fmt: skip


def call(
    words: tuple[object, ...], tmp: Path, engine: Path, *flags: object, checkpoint: Path = Path()
) -> Any:
    """Run a verb with the places filled in."""
    (tmp / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 4)
    for left in tmp.glob("l*"):  # what repro wrote: it keeps a file that exists
        left.unlink()
    reported = [str(word).format(engine=engine, checkpoint=checkpoint, tmp=tmp) for word in words]
    return ingot(*reported, *flags, stdin="Hi\n")


def shown(stderr: str) -> list[str]:
    """The fixes of an error, without what they cost."""
    (line,) = re.findall(r"^  fix: (.*)$", stderr, re.M)
    return [re.sub(r" \(costs \w+\)$", "", fix) for fix in line.split(" or ")]
