"""The prompts of golden cases, with what a kernel, a cache block or a script could get wrong."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ingot.config.runtime_config import RuntimeConfig
from ingot.text.prompt import Input, Prompt
from ingot.text.tokenizer.tokenizer import Tokenizer

_SHORT = "The sky is blue because"
_LONG = (
    "In the spring the ferry began to cross the river again, twice a day, with sheep and letters and "
    "1,250 kg of flour. Nobody in the village could say who had mended it. The old pilot, who kept the "
    'accounts, wrote: "Tuesday, 7:45. Wind from the west; two passengers, one dog (free)." He read it '
    "aloud, slowly, and was content. Across the water the lamps of the mill went on one after another, "
    "and somebody sang. "
)
_SCRIPT = "天空为什么是蓝色的？因为阳光穿过大气时，蓝光被散射得最多。Небо синее, и море тоже. السماء زرقاء"
_BLOCK = (
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n\nprint(mean([1, 2, 3.5]))  # 2.1666\n"
)
_MOST_TIMES = 64
_BLOCK_SIZE = RuntimeConfig().block_size
_LENGTHS = {
    "short": 8,
    "long": 200,
    "script": 40,
    "one block": _BLOCK_SIZE,
    "over one block": _BLOCK_SIZE + 1,
}
_TEXTS = {"short": _SHORT, "long": _LONG, "script": _SCRIPT, "one block": _BLOCK, "over one block": _BLOCK}


@dataclass(frozen=True)
class GoldenPrompt:
    """A prompt by name; ``text`` is None where there is no tokenizer."""

    name: str
    text: str | None
    ids: tuple[int, ...]


def golden_prompts(tokenizer: Tokenizer | None, vocab_size: int, longest: int) -> list[GoldenPrompt]:
    """A short one, one of 200 tokens, one in other scripts, one that fills a cache block and one over it.

    Prompts are cut to the ``longest`` tokens; none are left of 0.
    """
    found = []
    for name, length in _LENGTHS.items():
        text = None
        if tokenizer is not None:
            text = _repeated(tokenizer, _TEXTS[name], 1 if name in ("short", "script") else length)
            ids = tokenizer.encode(text)[:length]
        else:  # drawn, the same everywhere; a block and one over it begin alike
            data = hashlib.shake_256(name.removeprefix("over ").encode()).digest(4 * length)
            words = (data[i : i + 4] for i in range(0, len(data), 4))
            ids = [int.from_bytes(word, "little") % vocab_size for word in words]
        ids = ids[:longest]
        if ids and max(ids) < vocab_size:
            found.append(GoldenPrompt(name, text, tuple(ids)))
    return found


def spliced_ids(ids: tuple[int, ...], count: int, placeholder: int) -> tuple[int, ...]:
    """A prompt with ``count`` placeholders behind its first token, unless it has the id itself."""
    return ids if placeholder in ids else (*ids[:1], *([placeholder] * count), *ids[1:])


def with_input(ids: Sequence[int], features: torch.Tensor | None, *, splices: bool) -> Prompt:
    """The same as a request, with an input's features behind the first token where they are spliced."""
    if features is None:
        return Prompt([list(ids)])
    if not splices:
        return Prompt([Input(features), list(ids)])
    rest = [list(ids[1:])] if ids[1:] else []
    return Prompt([list(ids[:1]), Input(features), *rest])


def _repeated(tokenizer: Tokenizer, text: str, tokens: int) -> str:
    """The text repeated until it has so many tokens."""
    once = max(len(tokenizer.encode(text)), 1)
    for times in range(-(-tokens // once), _MOST_TIMES):
        if len(tokenizer.encode(text * times)) >= tokens:
            return text * times
    return text
