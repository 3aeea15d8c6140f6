"""How a verb opens the engine that it was given.

Covers what is shown meanwhile, and the error where the server's packages are missing.

    llm = open_llm(engine, device, threads, limits, "`ingot run`")
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ingot.cli.options.flags import given, set_threads
from ingot.cli.options.limit_flags import Limits
from ingot.cli.terminal.console import size_text, stderr
from ingot.cli.terminal.step_list import status_shown
from ingot.config.modality import TRANSCRIBE, expect_text
from ingot.errors import EngineError, to_install

if TYPE_CHECKING:
    from ingot.llm import LLM


def open_llm(
    path: str,
    device: str | None,
    threads: int | None,
    limits: Limits,
    verb: str,
    instead: str | None = TRANSCRIBE,
) -> LLM:
    """Load an engine for ``verb``, showing so on a terminal; ``instead``: what a speech engine has in
    its place, None: the verb takes it, too.
    """
    with status_shown("loading"):
        from ingot.llm import LLM

        set_threads(threads)
        llm = LLM(path, **given(device=device), **limits.arguments())
    if instead is not None:
        expect_text(llm.engine.manifest.model.modality, verb, instead)
    _note_cache(llm)
    return llm


@contextmanager
def server_packages() -> Iterator[None]:
    """Around imports of the server.

    Raises:
        EngineError: one of its packages is not there.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        what = "a package that the server needs is not installed"
        raise EngineError(what, seen=error.name, fix=to_install("serve")) from None


def _note_cache(llm: LLM) -> None:
    """Say on stderr how large a KV cache a CPU took, where nobody said and it holds no full batch."""
    executor, runtime = llm.executor, llm.runtime
    tokens = executor.blocks.num_blocks * runtime.block_size
    unasked = llm.engine.device.type == "cpu" and runtime.cache_tokens is None
    if unasked and tokens < executor.max_batch_size * executor.max_seq_len:
        size = size_text(sum(cache.nbytes for cache in executor.runner.caches))
        stderr().print(f"KV cache: {tokens} tokens, {size}; --cache-tokens sets the size", style="dim")
