"""Grammars compiled for one engine's tokenizer, and what they allow after each token."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ingot.config.grammar_spec import Grammar
from ingot.config.sampling_params import SamplingParams
from ingot.errors import DeviceError, RequestError
from ingot.sandbox.limited_process import ProcessLimits
from ingot.text.grammar.grammar_check import (
    COMPILE_LIMITS,
    SIMPLER,
    check_ends,
    grammar_tokenizer,
    new_probe,
    try_grammar,
)
from ingot.text.grammar.lark import lark_of
from ingot.text.grammar.vocabulary import DEAD_END, STATES_BYTES, fault_of, new_matcher, vocabulary
from ingot.text.tokenizer.tokenizer_base import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_KEPT_BYTES = 256 << 20  # of compiled grammars that no request may need any more
_PROMPT_WINDOW = 16


class Grammars:
    """Grammars of one engine; safe to share between threads.

    Args:
        tokenizer: None: the engine takes no grammars.
        vocab_size: width of the logits; ids beyond the tokenizer's are never allowed.
        limits: of the process in which a grammar is compiled for the first time.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, limits: ProcessLimits = COMPILE_LIMITS
    ) -> None:
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._probe = new_probe(limits)
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, tuple[LLMatcher, int]] = OrderedDict()

    def prepare(
        self, params: SamplingParams, stop_ids: frozenset[int], *, tried: int | None = None
    ) -> GrammarMatcher | None:
        """The state of an answer's grammar before its first token; None without a grammar. The first use of a
        grammar may take seconds, on any thread.

        ``tried``: what ``try_grammar`` returned, where it ran before.

        Raises:
            RequestError: llguidance refuses the grammar, it takes too long or too much memory, no token of
                the vocabulary can begin its text, or nothing ends the answer.
            DeviceError: llguidance is not installed.
        """
        if params.grammar is None:
            return None
        check_ends(params, stop_ids, self.vocab_size)
        bits = np.zeros(mask_words(self.vocab_size), np.int32)
        is_used = params.grammar in self._compiled
        matcher = self.matcher(params, stop_ids, tried=tried)
        try:
            matcher.mask_into(bits, ())
        except RequestError:
            if not is_used:
                raise
            with self._lock:
                self._compiled.pop(params.grammar, None)  # earlier answers have used up its lexer states
            matcher = self.matcher(params, stop_ids, tried=tried)
            matcher.mask_into(bits, ())
        return matcher

    def read_vocabulary(self) -> None:
        """Read the vocabulary now, which may take seconds; does nothing where grammars are refused."""
        with contextlib.suppress(DeviceError, RequestError):
            self._tokens()

    def matcher(
        self, params: SamplingParams, stop_ids: frozenset[int], *, tried: int | None = None
    ) -> GrammarMatcher:
        """``prepare`` without the check that a token can begin the grammar's text."""
        assert params.grammar is not None
        ends = sorted(token for token in params.end_ids(stop_ids) if 0 <= token < self.vocab_size)
        start = self._start(params.grammar, tried=tried)
        return GrammarMatcher(start, self.vocab_size, ends, params.min_new_tokens)

    def _start(self, grammar: Grammar, *, tried: int | None) -> LLMatcher:
        with self._lock:
            found = self._compiled.get(grammar)
        if found is None:  # compiled outside the lock: steps that use others do not wait for it
            found = self._compile(grammar, tried)
        with self._lock:
            self._compiled[grammar] = found
            self._compiled.move_to_end(grammar)
            held = sum(size for _, size in self._compiled.values())
            while held > _KEPT_BYTES and len(self._compiled) > 1:
                held -= self._compiled.popitem(last=False)[1][1]
        return found[0]

    def _compile(self, grammar: Grammar, tried: int | None) -> tuple[LLMatcher, int]:
        """A matcher at the start, and the bytes that it may take. A limited process compiles it first."""
        tokens = self._tokens()
        size = try_grammar(self._probe, grammar) if tried is None else tried
        matcher = new_matcher(tokens, lark_of(grammar))
        fault = fault_of(matcher)
        if fault is not None:
            raise RequestError("the grammar is refused", seen=fault, field="grammar")
        return matcher, size + STATES_BYTES

    def _tokens(self) -> LLTokenizer:
        """The engine's vocabulary, read when a grammar first needs it."""
        tokenizer = grammar_tokenizer(self._tokenizer)
        if self._vocabulary is None:
            special = [i for i in range(self.vocab_size) if tokenizer.is_special(i)]
            tokens = [tokenizer.token_bytes(i) for i in range(self.vocab_size)]
            self._vocabulary = vocabulary(tokens, special)
        return self._vocabulary


class GrammarMatcher:
    """What a grammar allows after the tokens of one answer. For one thread at a time.

    Args:
        start: a matcher that has read nothing; it is copied.
        end_ids: tokens that end the answer, allowed exactly where the text may end; never text.
        min_new_tokens: no end token before that, unless nothing else is allowed.
    """

    def __init__(
        self, start: LLMatcher, vocab_size: int, end_ids: Sequence[int], min_new_tokens: int = 0
    ) -> None:
        self._start = start
        self._vocab_size = vocab_size
        ends = np.zeros(mask_words(vocab_size) * 32, np.uint8)
        ends[list(end_ids)] = 1
        text = np.arange(len(ends)) < vocab_size
        self._ends = np.packbits(ends, bitorder="little").view(np.int32)
        self._text = np.packbits(text & (ends == 0), bitorder="little").view(np.int32)
        self._min_new_tokens = min_new_tokens
        self._matcher = start.deep_copy()
        self._ids: list[int] = []

    def mask_into(self, bits: npt.NDArray[np.int32], output_ids: Sequence[int]) -> None:
        """Set the bits of the tokens that may follow ``output_ids``.

        Args:
            bits: int32 [ceil(vocab_size / 32)], overwritten; bit ``t % 32`` of word ``t // 32`` is token t's.

        Raises:
            RequestError: no token may follow, or the grammar reached a limit.
        """
        self._advance(output_ids)
        data = self._matcher.compute_bitmask()
        fault = fault_of(self._matcher)
        if fault not in (None, DEAD_END):
            raise RequestError(f"the grammar fails after {len(output_ids)} tokens", seen=fault, fix=SIMPLER)
        bits[:] = np.frombuffer(data, np.int32)[: len(bits)] & self._text if fault is None else 0
        if self._matcher.is_accepting() and (len(output_ids) >= self._min_new_tokens or not bits.any()):
            bits |= self._ends
        if not bits.any():
            raise RequestError(
                f"no token of this engine's vocabulary continues the grammar after {len(output_ids)} tokens",
                fix="a grammar that the vocabulary can write, without the request's stop_token_ids",
            )

    def may_end(self, output_ids: Sequence[int]) -> bool:
        """Whether ``output_ids`` are a whole text of the grammar. Quick after ``mask_into`` for them."""
        try:
            self._advance(output_ids)
        except RequestError:
            return False
        return bool(self._matcher.is_accepting())

    def copy(self) -> GrammarMatcher:
        """A matcher for another answer with the same tokens so far."""
        made = copy(self)
        made._matcher, made._ids = self._matcher.deep_copy(), list(self._ids)
        return made

    def _advance(self, output_ids: Sequence[int]) -> None:
        """Read the new tokens; all of them where earlier ones have changed."""
        known = len(self._ids)
        if list(output_ids[:known]) != self._ids:
            self._matcher, self._ids, known = self._start.deep_copy(), [], 0
        fresh = list(output_ids[known:])
        if fresh and not self._matcher.consume_tokens(fresh):
            fault = fault_of(self._matcher)
            self._matcher, self._ids = self._start.deep_copy(), []
            raise RequestError(
                f"the grammar cannot follow the answer after {known} tokens", seen=fault, fix=SIMPLER
            )
        self._ids += fresh


def mask_words(vocab_size: int) -> int:
    """int32 words of a mask: ceil(vocab_size / 32)."""
    return -(-vocab_size // 32)


def with_text_start(
    params: SamplingParams, tokenizer: Tokenizer | None, context: Sequence[int]
) -> SamplingParams:
    """The parameters, with the space in the grammar with which SentencePiece begins a text, and which
    decoding drops. An answer has it unless it continues the text of ``context``.
    """
    if params.grammar is None or tokenizer is None:
        return params
    shown = (i for i in context[-_PROMPT_WINDOW:] if not tokenizer.is_special(i))
    if any(tokenizer.token_bytes(i) for i in shown) or tokenizer.text_stream().feed(b" "):
        return params
    return params.replace(grammar=params.grammar.replace(before=" "))
