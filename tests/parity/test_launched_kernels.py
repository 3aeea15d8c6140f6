"""A warm-up's launches of some layers: every kernel that all layers launch, once."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.step_sizes import DRAW_KINDS
from ingot.runtime.step.graphs import KINDS, DecodeGraphs
from ingot.runtime.step.prompt_graphs import PromptGraphs
from ingot.runtime.step.sampled_step import sampled_step
from tests.tiny_models import save_model, tiny_config

LAYERS = 7  # the first and the last one of Gemma-2 have the same window
MIXED = {"layers.0.self*": "w8a8", "layers.1.mlp*": "w8a8", "layers.2.*": "w4a16", "layers.5.*": "none"}
MODELS: dict[str, tuple[str, dict[str, Any], QuantConfig]] = {
    "alike": ("llama", {}, QuantConfig()),
    "in 4 bits": ("qwen3", {}, QuantConfig("w4a16")),
    "windows": ("gemma2", {}, QuantConfig()),
    "mixed": ("llama", {}, QuantConfig("w8a16", layers=MIXED)),
    "gpt2": ("gpt2", {}, QuantConfig("w8a8")),
}


def described(value: Any) -> Any:
    """What decides which kernel a launch takes: shapes, dtypes and numbers."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return {name: described(one) for name, one in value.items()}
    if isinstance(value, (tuple, list)):
        return [described(one) for one in value]
    if dataclasses.is_dataclass(value):
        return described(vars(value)) if hasattr(value, "__dict__") else type(value)
    return value if isinstance(value, (int, float, str, type(None))) else type(value)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[Any]:
    """Counts the calls of ops with kernels, by place and arguments."""
    counted: Counter[Any] = Counter()
    for name, module in list(sys.modules.items()):
        if name.startswith("ingot.kernels.") and "runs_on_gpu" in vars(module):

            def seen(x: torch.Tensor, *rest: Any, name: str = name) -> bool:
                frame = sys._getframe(1)
                counted[name, frame.f_code.co_name, str(described(dict(frame.f_locals)))] += 1
                return False

            monkeypatch.setattr(module, "runs_on_gpu", seen)
    return counted


def graphs_of(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[DecodeGraphs, PromptGraphs]:
    """Those that a GPU would have, which capture nothing."""
    kind, values, quant = MODELS[name]
    save_model(
        tiny_config(kind, **{"n_layer" if kind == "gpt2" else "num_hidden_layers": LAYERS} | values),
        folder,
        seed=3,
    )
    llm = LLM(folder, device="cpu", quant=quant, max_batch_size=16)
    runner = llm.executor.runner
    runner.forward.fused = True
    for place in ("graphs", "prompt_graphs"):
        monkeypatch.setattr(f"ingot.runtime.step.{place}.Recorder", lambda device: None)
    parts = (runner.forward, runner.feed, torch.device("cpu"), 16, runner.max_seq_len)
    return DecodeGraphs(*parts), PromptGraphs(*parts)


def of(calls: Counter[Any], run: Callable[[], None]) -> Counter[Any]:
    calls.clear()
    run()
    return Counter(calls)


@pytest.mark.parametrize("name", MODELS)
def test_some_layers_launch_what_all_launch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Counter[Any]
) -> None:
    decodes, prompts = graphs_of(name, tmp_path, monkeypatch)

    def decode() -> None:
        for bucket in decodes.buckets:
            buffer = decodes._buffer(bucket)
            buffer.fill_padding()
            buffer.upload()
            batch = buffer.padded_batch(1, decodes.max_seq_len)
            for kind in DRAW_KINDS:
                draws = buffer.draws(bucket, KINDS[kind])
                sampled_step(decodes.forward, batch, buffer.feed_rows, draws, decodes.feed)

    def prompt() -> None:
        for size in prompts.sizes(16, 100):
            _, batch = prompts._padding(*size)
            prompts.forward(batch)

    with torch.inference_mode():
        every = of(calls, decode)
        some = of(calls, lambda: decodes.launch_all(range(1, 17), DRAW_KINDS))
        assert every.keys() - some.keys() == set()
        if name == "alike":
            assert some.total() < every.total() / 4
        every = of(calls, prompt)
        some = of(calls, lambda: prompts.launch_all(16, 100))
        assert every.keys() - some.keys() == set()
        if name == "alike":
            assert some.total() < every.total() / 2
