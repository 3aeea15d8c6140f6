"""An engine, a checkpoint or random weights, opened by Ingot.

Owns the opening and the facts. Knows nothing of what is done with it.

    opened = OpenEngine(spec, spec.runtime())
    opened.llm.logits([1, 2, 3])
"""

from __future__ import annotations

import time
from typing import Any

from ingot.config.build_config import DEFAULT_MAX_BATCH_SIZE
from ingot.config.runtime_config import RuntimeConfig
from ingot.device import dtype_name
from ingot.llm import LLM
from ingot.measure.side.freed_memory import free_memory, seconds_since
from ingot.measure.side.model_spec import ModelSpec


class OpenEngine:
    """An ``LLM`` of what a spec names.

    Args:
        max_batch_size: requests in one step; None: an engine's own, or the library's default.
        random_weights: a config.json or its folder, in place of the spec's path.
    """

    def __init__(
        self,
        spec: ModelSpec,
        runtime: RuntimeConfig,
        max_batch_size: int | None = None,
        random_weights: str | None = None,
    ) -> None:
        start = time.perf_counter()
        self.llm = _load(spec, runtime, max_batch_size, random_weights)
        self.device, self.dtype = self.llm.engine.device, self.llm.engine.dtype
        self.load_s = seconds_since(start, self.device)
        self.max_seq_len = self.llm.executor.max_seq_len
        self.vocab_size = self.llm.engine.model.config.vocab_size

    def facts(self) -> dict[str, Any]:
        engine = self.llm.engine
        return {
            "architecture": engine.manifest.model.architecture,
            "parameters": sum(p.numel() for p in engine.model.parameters()),
            "dtype": dtype_name(engine.dtype),
            "quantization": engine.manifest.quant.label,
            "max_seq_len": self.max_seq_len,
            "load_s": round(self.load_s, 3),
        }

    def close(self) -> None:
        """Free weights and cache for the model after this one."""
        del self.llm
        free_memory()


def _load(
    spec: ModelSpec, runtime: RuntimeConfig, max_batch_size: int | None, random_weights: str | None
) -> LLM:
    if random_weights is not None:
        return LLM.from_config(
            random_weights,
            spec.device,
            dtype=spec.dtype,
            runtime=runtime,
            max_batch_size=max_batch_size or DEFAULT_MAX_BATCH_SIZE,
            max_seq_len=spec.max_seq_len,
            quant=spec.quant,
        )
    assert spec.path is not None, "no path and no random weights"
    return LLM(
        spec.path,
        spec.device,
        compute_dtype=spec.dtype,
        runtime=runtime,
        max_batch_size=max_batch_size,
        max_seq_len=spec.max_seq_len,
        quant=None if spec.quant == "none" else spec.quant,
    )
