"""From a path to an engine in memory, and to the executor that runs it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ingot.checkpoint.hub import resolve_checkpoint
from ingot.config.runtime_config import RuntimeConfig
from ingot.engine.engine_loader import Engine, engine_in_memory, load_engine
from ingot.engine.manifest import is_engine, refuse_build_values
from ingot.engine.proof_file import standing
from ingot.kernels.triton_hooks import hash_compiler
from ingot.runtime.executor import Executor
from ingot.runtime.setup import make_executor
from ingot.text.grammar.grammar_compiler import Grammars

_log = logging.getLogger(__name__)


def open_engine(
    path: str | Path,
    device: torch.device,
    compute_dtype: str = "auto",
    *,
    given: Mapping[str, Any],
    revision: str | None = None,
    limits: Mapping[str, Any],
) -> Engine:
    """An engine folder, or a checkpoint assembled in memory, on a device.

    Args:
        given: ``layers``, ``quant``, ``chat_template`` and ``tokenizer``, which only a checkpoint takes;
            None: not given.
        limits: ``max_batch_size``, ``max_seq_len`` and ``runtime``, as ``load_engine`` takes them.

    Raises:
        ConfigError: a limit is larger than the engine's, or a value is the build's alone.
        EngineError, CheckpointError: the folder cannot be loaded.
        OutOfMemoryError: the device cannot hold the weights.
    """
    if device.type == "cuda":
        hash_compiler()
    if not is_engine(Path(path)):
        folder = resolve_checkpoint(path, revision=revision)
        return engine_in_memory(folder, device, compute_dtype, **given, **limits)
    refuse_build_values(Path(path), given)
    engine = load_engine(Path(path), device, compute_dtype, **limits)
    if (doubt := standing(Path(path))) is not None:
        _log.warning("%s", doubt)
    return engine


def executor_of(engine: Engine, runtime: RuntimeConfig) -> Executor:
    """The executor of an engine; ``runtime`` without ``auto`` (``RuntimeConfig.of_engine``). Raises
    OutOfMemoryError where the device is too small.
    """
    limits = engine.manifest.build
    return make_executor(
        engine.model,
        engine.device,
        engine.dtype,
        stop_ids=frozenset(engine.text.stop_ids),
        max_batch_size=limits.max_batch_size,
        max_seq_len=limits.max_seq_len,
        config=runtime,
        grammars=Grammars(engine.text.tokenizer, engine.manifest.model.vocab_size),
    )
