"""Checks of a request's grammar before an engine compiles it."""

from __future__ import annotations

import importlib.util
import threading

from ingot.config.grammar_spec import Grammar
from ingot.config.sampling_params import SamplingParams
from ingot.errors import DeviceError, RequestError, to_install
from ingot.sandbox.limited_process import LimitedProcess, ProcessEndedError, ProcessLimits
from ingot.text.grammar.lark import lark_of
from ingot.text.tokenizer.tokenizer_base import Tokenizer

COMPILE_LIMITS = ProcessLimits(seconds=5, memory=512 << 20)
MOST_BYTES = 64 << 20  # of a compiled grammar, as long as it is kept
SIMPLER = "use a simpler grammar: fewer alternatives, shorter repeats"


class TrialDiedError(RequestError):
    """The process of a trial died; another trial of the same grammar may succeed."""


def new_probe(limits: ProcessLimits = COMPILE_LIMITS) -> LimitedProcess:
    """A process that tries to compile grammars; it starts with the first one."""
    return LimitedProcess("ingot.text.grammar.grammar_probe", limits)


def try_grammar(probe: LimitedProcess, grammar: Grammar, cancelled: threading.Event | None = None) -> int:
    """Compile a grammar in the probe; returns the bytes that it takes there.

    Args:
        cancelled: set it before ``probe.interrupt`` to end the trial.

    Raises:
        TrialDiedError: the process crashed, or was interrupted.
        RequestError: llguidance refuses the grammar, or it takes too long or too much memory.
    """
    try:
        found = probe.ask({"lark": lark_of(grammar), "schemas": grammar.schemas()}, cancelled)
    except ProcessEndedError as error:
        kind = RequestError if error.by_time else TrialDiedError
        raise kind(f"the grammar {error}", fix=SIMPLER) from None
    if found["fault"] is not None:
        where = f" ({found['part']})" if found["part"] else ""
        raise RequestError(f"the grammar is refused{where}", seen=found["fault"], field="grammar")
    size: int = found["bytes"]
    if size > MOST_BYTES:
        seen, allowed = (f"{count >> 20} MiB" for count in (size, MOST_BYTES))
        raise RequestError("the compiled grammar is too large", seen=seen, allowed=allowed, fix=SIMPLER)
    return size


def grammar_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer, if its tokens can follow grammars.

    Raises:
        RequestError: there is none, or its text is not its tokens' bytes.
        DeviceError: llguidance is not installed.
    """
    if importlib.util.find_spec("llguidance") is None:
        what = "llguidance is not installed, and grammars need it"
        raise DeviceError(what, fix=f"{to_install('grammar')} (or pip install llguidance)")
    if tokenizer is None:
        raise RequestError("the engine has no tokenizer, so it takes no grammars", field="grammar")
    if not tokenizer.joins_bytes:
        raise RequestError(
            "this tokenizer's text is not its tokens' bytes, so it takes no grammars", field="grammar"
        )
    return tokenizer


def check_ends(params: SamplingParams, stop_ids: frozenset[int], vocab_size: int) -> None:
    """Raise ``RequestError`` for a request with a grammar and no end token."""
    if not any(0 <= token < vocab_size for token in params.end_ids(stop_ids)):
        raise RequestError(
            "a grammar needs an end token, and this request has none",
            seen=f"ignore_eos={params.ignore_eos}",
            allowed="ignore_eos=False, or stop_token_ids",
            field="ignore_eos",
        )
