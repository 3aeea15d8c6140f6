"""Sampling parameters: how the next token is chosen and when a request ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, Self, TypedDict

from ingot.config.grammar_spec import Grammar
from ingot.config.json_config import JsonConfig
from ingot.config.transcript_rules import TranscriptRules
from ingot.errors import RequestError

MAX_LOGPROBS = 20
MAX_BIASES = 1024
_LARGEST = 2**63 - 1  # that a step's tensors hold
_BOTH = "max_tokens and max_new_tokens are the same parameter: give only one"


class SamplingValues(TypedDict, total=False):
    """Fields of ``SamplingParams`` for type checkers and editors; ``max_tokens`` is ``max_new_tokens``."""

    max_new_tokens: int | None
    max_tokens: int | None
    min_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    n: int
    num_beams: int
    length_penalty: float
    early_stopping: bool
    logit_bias: Mapping[int, float] | None
    grammar: Grammar | None
    transcript: TranscriptRules | None
    logits_processors: Sequence[Callable[..., Any]]


@dataclass(frozen=True)
class SamplingParams(JsonConfig):
    """Values of one request. ``temperature=0`` is greedy.

    ``max_new_tokens=None`` runs to the end token or the engine's maximum length. ``top_k=0`` (or -1, as in
    vLLM) keeps all tokens. ``logprobs=k`` returns the log-probability of each chosen token and of the k
    likeliest (0: only the chosen; for beams, what the search adds up). ``stop`` are strings,
    ``stop_token_ids`` ids; neither appears in the text. ``ignore_eos`` turns off the model's own end tokens,
    not ``stop``. ``repetition_penalty`` covers prompt and output; presence and frequency penalties the output
    alone. ``num_beams > 1`` is beam search, without sampling but with penalties. ``max_tokens`` is another
    name for ``max_new_tokens``.

    ``logit_bias`` adds a finite number to the logits of up to MAX_BIASES tokens, by id, greedy or not, before
    the penalties, as in vLLM and Hugging Face. Ids may be text, as in JSON.

    The whole text of each answer follows ``grammar`` (``Grammar.json_schema(...)``), the last rule to be
    applied: end tokens are allowed exactly where the text may end. ``transcript`` holds the rules of a speech
    model's transcript, the first to be applied.

    ``logits_processors`` are functions (ids, logits) → logits, applied in order after the penalties. ``ids``
    are the prompt's and the output's so far, ``logits`` float32 [vocab_size] on the engine's device; they may
    return the same tensor. They are not part of the JSON. A request with one, or with beams, takes the host's
    path, and so does every other request in its batch.

    Raises:
        RequestError: a value is of the wrong type or out of range; the message names it.
    """

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False
    logit_bias: dict[int, float] = field(default_factory=dict, hash=False)
    grammar: Grammar | None = None
    transcript: TranscriptRules | None = None
    logits_processors: tuple[Callable[..., Any], ...] = field(default=(), metadata={"json": False})
    max_tokens: InitVar[int | None] = None

    def __post_init__(self, max_tokens: int | None) -> None:
        if max_tokens is not None:
            if self.max_new_tokens not in (max_tokens, type(self).max_new_tokens):
                raise RequestError(_BOTH, seen=(max_tokens, self.max_new_tokens), field="max_new_tokens")
            object.__setattr__(self, "max_new_tokens", max_tokens)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        self._integer("max_new_tokens", 1, optional=True)
        self._integer("min_new_tokens", 0, 2**31 - 1)
        self._integer("top_k", 0, _LARGEST)
        self._integer("seed", -_LARGEST - 1, _LARGEST, optional=True)
        self._integer("logprobs", 0, MAX_LOGPROBS, optional=True)
        self._integer("n", 1, 128)
        self._integer("num_beams", 1, 64)
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            what, allowed = "min_new_tokens exceeds max_new_tokens", f"<= {self.max_new_tokens}"
            raise RequestError(what, seen=self.min_new_tokens, allowed=allowed, field="min_new_tokens")
        self._number("temperature", 0.0, 100.0)
        self._number("top_p", 0.0, 1.0, open_low=True)
        self._number("min_p", 0.0, 1.0)
        self._number("repetition_penalty", 0.0, 100.0, open_low=True)
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        self._number("length_penalty", -10.0, 10.0)
        for name in ("ignore_eos", "early_stopping"):
            flag = getattr(self, name)
            if not isinstance(flag, bool):
                allowed = "true or false"
                raise RequestError(f"{name} must be a boolean", seen=flag, allowed=allowed, field=name)
        self._check_stops()
        if self.num_beams > 1 and self.temperature != 0:
            what, allowed = "beam search does not sample", "temperature=0"
            raise RequestError(what, seen=self.temperature, allowed=allowed, field="temperature")
        if self.num_beams > 1 and self.n > self.num_beams:
            raise RequestError("n exceeds num_beams", seen=self.n, allowed=f"<= {self.num_beams}", field="n")
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            form = "Grammar.json_schema(…), .json_object(), .regex(…), .choice(…) or .tool_calls(…)"
            seen = repr(self.grammar)[:80]
            raise RequestError("grammar must be a Grammar", seen=seen, allowed=form, field="grammar")
        given = self.logits_processors
        if not isinstance(given, (list, tuple)) or not all(callable(one) for one in given):
            what = "logits_processors must be a list of functions (ids, logits) -> logits"
            raise RequestError(what, seen=repr(given)[:80], field="logits_processors")
        object.__setattr__(self, "logits_processors", tuple(given))

    def replace(self, **changes: Any) -> Self:
        """A copy with some values changed. Raises ``RequestError`` if there is no such value, or it is out of
        range.
        """
        return super().replace(**{"max_tokens": None, **named_values(changes)})

    def end_ids(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """Tokens that end this request: ``stop_token_ids``, and unless ignored the model's ``eos_ids``."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else eos_ids)

    def is_end(self, token: int, eos_ids: frozenset[int]) -> bool:
        """Whether ``token`` is one of ``end_ids``; builds no set."""
        return token in self.stop_token_ids or (not self.ignore_eos and token in eos_ids)

    def _check_stops(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            value = () if getattr(self, name) is None else getattr(self, name)
            if not isinstance(value, (list, tuple)):
                raise RequestError(f"{name} must be a list", seen=value, field=name)
            object.__setattr__(self, name, tuple(value))
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise RequestError("a stop string must be non-empty text", seen=text, field="stop")
        for token in self.stop_token_ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= _LARGEST:
                what = "a stop token id must be an integer >= 0, of at most 64 bits"
                raise RequestError(what, seen=token, field="stop_token_ids")

    def _integer(self, name: str, low: int, high: int | None = None, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        allowed = f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"
        ok = isinstance(value, Integral) and not isinstance(value, bool)
        if not ok or value < low or (high is not None and value > high):
            raise RequestError(f"{name} is out of range", seen=_shown(value), allowed=allowed, field=name)
        object.__setattr__(self, name, int(value))

    def _number(self, name: str, low: float, high: float, *, open_low: bool = False) -> None:
        value = getattr(self, name)
        allowed = f"a number in {'(' if open_low else '['}{low}, {high}]"
        ok = isinstance(value, Real) and not isinstance(value, bool)
        if not ok or not low <= value <= high or (open_low and value == low):  # NaN fails every comparison
            raise RequestError(f"{name} is out of range", seen=_shown(value), allowed=allowed, field=name)
        object.__setattr__(self, name, float(value))


# What flags and explanations name: single values, so no grammar, bias or transcript rules.
VALUE_NAMES = tuple(
    one.name
    for one in fields(SamplingParams)
    if one.metadata.get("json", True) and one.name not in ("grammar", "logit_bias", "transcript")
)

# Reading it returns what it sets; the dataclass alone would leave its default there.
SamplingParams.max_tokens = property(lambda self: self.max_new_tokens)  # type: ignore[attr-defined]


def named_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling values by name, ``max_tokens`` as ``max_new_tokens``. Raises ``RequestError`` if a name is
    unknown, or both of these are given.
    """
    known = [one.name for one in fields(SamplingParams)]
    found = {("max_new_tokens" if name == "max_tokens" else name): value for name, value in values.items()}
    for name in found:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            fix = f"did you mean {near[0]}?" if near else None
            raise RequestError("unknown sampling parameter", seen=name, allowed=known, fix=fix)
    if len(found) < len(values):
        raise RequestError(_BOTH, seen=list(values), field="max_new_tokens")
    return found


def _checked_bias(given: object) -> dict[int, float]:
    """The bias by token id, from a caller's mapping or JSON; None: no bias. Raises ``RequestError`` if it is
    not a mapping, has too many entries, an invalid or repeated id, or a value that is not a finite number.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise _bias_error("logit_bias must map token ids to numbers", repr(given)[:80], "{token id: number}")
    if len(given) > MAX_BIASES:
        raise _bias_error("logit_bias has too many entries", len(given), f"<= {MAX_BIASES}")
    found: dict[int, float] = {}
    for key, value in given.items():
        whole = isinstance(key, Integral) and not isinstance(key, bool)
        if not whole and not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20):
            raise _bias_error("an id in logit_bias is not a token id", repr(key)[:80], "an integer >= 0")
        if int(key) < 0 or int(key) in found:
            what = "is there twice" if int(key) in found else "is not a token id"
            raise _bias_error(f"an id in logit_bias {what}", int(key), "integers >= 0, each once")
        number = isinstance(value, Real) and not isinstance(value, bool)
        if not number or not -sys.float_info.max <= value <= sys.float_info.max:  # NaN fails, too
            what = f"logit_bias of token {int(key)} is not a finite number"
            raise _bias_error(what, repr(value)[:80], "a finite number")
        found[int(key)] = float(value)
    return found


def _bias_error(what: str, seen: object, allowed: str) -> RequestError:
    return RequestError(what, seen=seen, allowed=allowed, field="logit_bias")


def _shown(value: object) -> object:
    """A value for a message; text in quotes, so that "1" does not look like a number."""
    return repr(value) if isinstance(value, str) else value
