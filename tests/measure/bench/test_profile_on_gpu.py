"""``ingot profile`` on a GPU: kernels by module, the step's graph, and PyTorch's operators in their place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.terminal import ingot
from tests.tiny_models import save_model, tiny_config

pytestmark = pytest.mark.gpu
SIZES = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("larger")
    save_model(tiny_config("llama", **SIZES), folder)
    return folder


def profiled(*words: object) -> dict[str, Any]:
    result = ingot("profile", *words, "--prompt-tokens", 16, "--repeats", 2, "--dtype", "bf16", "--json")
    assert result.exit_code == 0, result.stderr
    (side,) = json.loads(result.stdout)["sides"]
    return side["results"][0]


@pytest.mark.parametrize(("step", "batch"), [("prompt", 2), ("decode", 1), ("decode", 4), ("mixed", 3)])
def test_kernels_have_modules(step: str, batch: int, larger: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    found = profiled(larger, "--step", step, "--batch", batch, "--trace", trace)
    modules = {module["module"]: module for module in found["kernels"]["modules"]}
    assert {"qkv", "attention", "o", "gate_up", "down", "head", "sampling"} <= modules.keys()
    assert modules.get("other", {"share": 0})["share"] < 0.2
    assert not any(
        "aten::" in kernel["kernel"] for module in modules.values() for kernel in module["kernels"]
    )
    assert found["graph"]["launches"] > 0
    assert found["graph"]["span_us"] < found["kernels"]["span_us"]
    assert any(event.get("cat") == "kernel" for event in json.loads(trace.read_text())["traceEvents"])


@pytest.mark.parametrize("batch", [1, 4])
def test_every_operation_by_pytorchs_operators(batch: int, larger: Path) -> None:
    names = ("rms_norm", "rope", "attention", "activation", "products", "sampling", "fused")
    entries = profiled(larger, "--batch", batch, *(w for name in names for w in ("--without", name)))[
        "without"
    ]
    assert [entry["operation"] for entry in entries] == list(names)
    for entry in entries:
        name = entry["operation"]
        assert entry["replaced_calls"] != 0, f"no call of {name} was replaced"
        assert entry["largest_difference"] < 0.05 * entry["largest_output"], name
        assert entry["without"]["kernels_us"] > 0, name
