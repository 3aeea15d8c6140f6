"""Engines, folders and packages that several verbs open, and the checks of what they are given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ingot.cli.options.flags import given, set_threads
from ingot.cli.options.limit_flags import Limits
from ingot.cli.terminal.console import size_text, stderr
from ingot.cli.terminal.step_list import status_shown
from ingot.config.modality import TRANSCRIBE, expect_text
from ingot.errors import CheckpointError, EngineError, NoSuchPathError, to_install

if TYPE_CHECKING:
    from ingot.llm import LLM


def expect_model(name: str | Path, revision: str | None = None) -> None:
    """Refuse an engine, checkpoint or id that is nowhere, before a verb imports PyTorch: seconds earlier."""
    from ingot.checkpoint.hub import expect_checkpoint
    from ingot.engine.manifest import is_engine

    if not is_engine(Path(name)):
        expect_checkpoint(name, revision)


def open_llm(
    path: str,
    device: str | None,
    threads: int | None,
    limits: Limits,
    verb: str,
    instead: str | None = TRANSCRIBE,
) -> LLM:
    """Load an engine for ``verb``. ``instead``: the verb that takes a speech engine; None: this one does."""
    expect_model(path)
    with status_shown("loading"):
        from ingot.llm import LLM

        set_threads(threads)
        llm = LLM(path, **given(device=device), **limits.arguments())
    if instead is not None:
        expect_text(llm.engine.manifest.model.modality, verb, instead)
    executor, runtime = llm.executor, llm.runtime
    tokens = executor.blocks.num_blocks * runtime.block_size
    by_default = llm.engine.device.type == "cpu" and runtime.cache_tokens is None
    if by_default and tokens < executor.max_batch_size * executor.max_seq_len:
        size = size_text(sum(cache.nbytes for cache in executor.runner.caches))
        stderr().print(f"KV cache: {tokens} tokens, {size}; --cache-tokens sets the size", style="dim")
    return llm


def local_folder(name: str) -> Path:
    """A folder, or an id's snapshot in the local cache; nothing is downloaded."""
    from ingot.checkpoint.hub import local_path, resolve_checkpoint

    try:
        return resolve_checkpoint(name, offline=True)
    except CheckpointError:
        if local_path(name).exists():
            raise
        raise NoSuchPathError(
            "neither a folder nor a Hugging Face id in the local cache",
            seen=name,
            fix="correct the path, or `ingot build` the id first",
        ) from None


def check_key(key: str | None) -> None:
    """Refuse a key that no HTTP header can carry."""
    if key is not None and (not key.isascii() or not key.isprintable() or not key.strip()):
        raise typer.BadParameter("the key must be printable ASCII", param_hint="--api-key")


@contextmanager
def server_packages() -> Iterator[None]:
    """Turn a package of the server that is missing into an ``EngineError``."""
    try:
        yield
    except ModuleNotFoundError as error:
        what = "a package that the server needs is not installed"
        raise EngineError(what, seen=error.name, fix=to_install("serve")) from None
