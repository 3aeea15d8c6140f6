"""``ingot profile`` on tiny models: what it prints, writes and refuses, and the work that it counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ingot.errors import ConfigError, DeviceError
from ingot.kernels.norm import rms_norm as norm_room
from ingot.kernels.norm.rms_norm import rms_norm, rms_norm_reference
from ingot.layers.norm import Norm
from ingot.layers.products.layer_products import Product
from ingot.measure.bench.profile import profile_session
from ingot.measure.bench.profile.module_ranges import Ranges, WorkCount, named_modules
from ingot.measure.bench.profile.module_work import of_attention
from ingot.measure.bench.profile.profile_report import profile_headline, profile_tables
from ingot.measure.bench.profile.profile_session import Profile, profile_side
from ingot.measure.bench.profile.profiled_step import ready_step
from ingot.measure.bench.profile.pytorch_operators import OPERATIONS, without_kernels
from ingot.measure.side.ingot_side import IngotSide
from ingot.measure.side.side_spec import SideSpec
from ingot.measure.side.text_table import plain
from ingot.runtime.sampling import sampler as sampler_room
from tests.e2e.terminal import ingot
from tests.encoders.speech import write_speech
from tests.measure.bench.conftest import MADE_UP

pytestmark = pytest.mark.usefixtures("weights_as_stored")

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2, 32, 48, 4, 2, 8, 97


@pytest.fixture(autouse=True)
def ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_session, "measure_ceiling", lambda device, dtype: MADE_UP)


@pytest.fixture
def side(checkpoint: Path) -> Iterator[IngotSide]:
    spec = SideSpec(path=str(checkpoint), device="cpu", max_batch_size=4, max_seq_len=64)
    with IngotSide(spec) as opened:
        yield opened


def profiled(*words: object) -> dict[str, Any]:
    result = ingot("profile", *words, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_the_record_and_the_trace_of_a_decode_step(checkpoint: Path, tmp_path: Path) -> None:
    trace, file = tmp_path / "new" / "trace.json", tmp_path / "profile.json"
    words = ("--batch", 3, "--prompt-tokens", 6, "--repeats", 2, "--trace", trace, "--json-file", file)
    record = profiled(checkpoint, *words)
    assert record == json.loads(file.read_text())
    assert (record["schema"], record["verb"]) == (1, "profile")
    assert record["wanted"]["batch"] == 3
    (side,) = record["sides"]
    (found,) = side["results"]
    assert (found["requests"], found["tokens"], found["cached_tokens"]) == (3, 3, 18)
    modules = {module["module"]: module for module in found["kernels"]["modules"]}
    layers = {"qkv", "rope", "attention", "o", "norm", "gate_up", "activation", "down"}
    assert {*layers, "head", "embed", "sampling"} <= modules.keys()
    assert {"aten::mm", "aten::linear"} <= {kernel["kernel"] for kernel in modules["down"]["kernels"]}
    products = [kernel for kernel in modules["down"]["kernels"] if kernel["kernel"] == "aten::linear"]
    assert products[0]["launches"] == LAYERS
    assert found["graph"] is None
    events = json.loads(trace.read_text())["traceEvents"]  # Chrome's format, which Perfetto opens
    assert {"qkv", "aten::linear", "ingot step"} <= {event.get("name") for event in events}
    assert sum(event.get("name") == "ingot step" for event in events) == 2


def test_what_it_prints(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("--step", "mixed", "--batch", 2, "--prompt-tokens", 6, "--repeats", 1, "--device", "cpu")
    result = ingot("profile", checkpoint, *words)
    assert result.exit_code == 0, result.stderr
    assert "mixed step of 2 requests (1 decode), 7 tokens, 6 in the cache" in result.stdout
    assert "PyTorch's operators of one mixed step" in result.stdout
    assert "aten::linear" in result.stdout
    assert "of ceiling" in result.stdout
    assert "USDT" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "what", "allowed"),
    [
        (("--step", "encode"), "encodes nothing", "prompt, decode, mixed"),
        (("--step", "Decode"), "unknown kind of step", "prompt, decode, mixed, encode"),
        (("--step", "mixed", "--batch", 1), "a prompt beside at least one decode", "2 or more"),
        (("--without", "rms_norm", "--without", "flash"), "unknown operation", "rms_norm, layer_norm, rope"),
        (("--without", "rms_norm"), "no kernel to leave out", None),
        (("--prompt-tokens", 200), "longer than the engine's limit", "<= 126"),
        (("--trace", "-"), "it takes a file", None),
    ],
)
def test_what_it_refuses(checkpoint: Path, words: tuple[object, ...], what: str, allowed: str | None) -> None:
    result = ingot("profile", checkpoint, *words, "--device", "cpu")
    assert result.exit_code == 2
    assert what in result.stderr
    assert allowed is None or allowed in result.stderr
    assert words[-2] in result.stderr


def test_one_of_a_thing_and_a_narrow_screen(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    result = ingot("profile", checkpoint, "--prompt-tokens", 6, "--repeats", 1, "--device", "cpu")
    assert max(map(len, result.stdout.splitlines())) <= 40
    text = " ".join(result.stdout.split())
    assert "decode step of 1 request, 1 token, 6 in the cache" in text
    shown = [line.split() for line in result.stdout.splitlines()]
    assert ["module,", "operator", "launches", "µs"] in shown
    assert [line[:2] for line in shown].count(["module,", "operator"]) > 1
    assert ["down", "48"] not in shown  # its other columns are below, under its name
    assert sum(line[0] == "down" for line in shown if line) > 1


def test_a_trace_that_cannot_be_written_is_refused_first(checkpoint: Path, tmp_path: Path) -> None:
    result = ingot("profile", checkpoint, "--device", "cpu", "--trace", tmp_path)
    assert result.exit_code == 2
    assert "--trace: cannot be written" in result.stderr


def test_a_trace_and_a_record_in_one_file(checkpoint: Path, tmp_path: Path) -> None:
    words = ("--trace", tmp_path / "a.json", "--json-file", tmp_path / "." / "a.json")
    result = ingot("profile", checkpoint, "--device", "cpu", *words)
    assert result.exit_code == 2
    assert "the same file" in result.stderr


def test_random_weights_of_a_config(checkpoint: Path) -> None:
    words = ("--random-weights", checkpoint / "config.json", "--step", "prompt", "--repeats", 1)
    (side,) = profiled(*words, "--prompt-tokens", 4, "--max-seq-len", 64)["sides"]
    assert side["results"][0]["tokens"] == 4


def test_a_batch_beyond_the_engines(side: IngotSide) -> None:
    with pytest.raises(ConfigError, match="max_batch_size") as caught:
        profile_side(side, Profile(batch=5))
    assert caught.value.field == "batch"


def test_a_step_runs_again_with_the_same_result(side: IngotSide) -> None:
    """Each run computes the same tokens at the same places, as the first one did."""
    step = ready_step(side, "decode", 3, 5)
    first = step.outputs()
    tokens = step.run()
    for _ in range(2):
        assert step.run() == tokens
        assert torch.equal(step.outputs(), first)
    assert first.shape == (3, VOCAB)
    assert tokens == first.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("kind", "tokens", "cached"), [("prompt", 12, 0), ("mixed", 7, 6), ("decode", 2, 12)]
)
def test_kinds_of_steps(side: IngotSide, kind: str, tokens: int, cached: int) -> None:
    facts = ready_step(side, kind, 2, 6).facts
    assert (facts["requests"], facts["tokens"], facts["cached_tokens"]) == (2, tokens, cached)


def test_requests_that_the_cache_does_not_hold(checkpoint: Path) -> None:
    spec = SideSpec(path=str(checkpoint), device="cpu", max_batch_size=4, max_seq_len=64, cache_tokens=64)
    with IngotSide(spec) as small, pytest.raises(ConfigError, match="cache does not hold") as caught:
        ready_step(small, "decode", 4, 40)
    assert caught.value.fields == ("batch", "prompt_tokens")


@pytest.mark.parametrize(("kind", "batch"), [("decode", 3), ("prompt", 2)])
def test_work_is_that_of_the_model(side: IngotSide, kind: str, batch: int) -> None:
    """Counted by hand: products by their shapes, attention key by key."""
    step, counted = ready_step(side, kind, batch, 5), WorkCount()
    with named_modules(side.llm.engine.model, counted):
        step.run()
    work = counted.work
    rows = step.facts["tokens"]
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    shapes = {
        "qkv": (HIDDEN, width),
        "o": (HEADS * HEAD_DIM, HIDDEN),
        "gate_up": (HIDDEN, 2 * INNER),
        "down": (INNER, HIDDEN),
    }
    for name, (k, n) in shapes.items():
        assert work[name].flops == LAYERS * 2 * rows * k * n, name
        assert work[name].num_bytes == LAYERS * 4 * (k * n + rows * (k + n)), name
    assert work["head"].flops == 2 * batch * HIDDEN * VOCAB
    keys = batch * ([6] if kind == "decode" else [1, 2, 3, 4, 5])
    read = 6 if kind == "decode" else 5
    assert work["attention"].flops == LAYERS * 4 * sum(keys) * HEADS * HEAD_DIM
    cached = batch * read * 2 * KV_HEADS * HEAD_DIM * 4
    assert work["attention"].num_bytes == LAYERS * (cached + 2 * rows * HEADS * HEAD_DIM * 4)


def test_a_window_bounds_what_attention_reads() -> None:
    """Two requests of 2 tokens each, behind 10 and 1 in the cache; a window of 4."""
    keys = torch.zeros(3, KV_HEADS, 16, HEAD_DIM)
    cache: Any = SimpleNamespace(keys=keys, nbytes=2 * keys.nbytes)
    batch: Any = SimpleNamespace(seq_lens=torch.tensor([12, 3]), query_start=torch.tensor([0, 2, 4]))
    query = torch.zeros(4, HEADS, HEAD_DIM)

    def moved(window: int) -> tuple[float, float]:
        attention: Any = SimpleNamespace(scoring=SimpleNamespace(window=window))
        work = of_attention(attention, query, batch, cache)
        return (work.num_bytes - 2 * query.nbytes) / (2 * KV_HEADS * HEAD_DIM * 4), work.flops

    pair = 4 * HEADS * HEAD_DIM
    assert moved(0) == (12 + 3, (11 + 12 + 2 + 3) * pair)
    assert moved(4) == (5 + 3, (4 + 4 + 2 + 3) * pair)  # the second query's window begins one later


def test_modules_are_wrapped_only_inside(side: IngotSide) -> None:
    before = (vars(Product)["join"], vars(Norm)["ended"])

    def fails() -> None:
        with named_modules(side.llm.engine.model, Ranges()):
            assert vars(Product)["join"] is not before[0]
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert (vars(Product)["join"], vars(Norm)["ended"]) == before


def test_an_encode_step(tmp_path: Path) -> None:
    write_speech(tmp_path)
    with IngotSide(SideSpec(path=str(tmp_path), device="cpu", max_batch_size=2)) as speech:
        result, _ = profile_side(speech, Profile("encode", 2, repeats=1))
        assert (result["inputs"], result["positions"] > 0) == (2, True)
        names = {module["module"] for module in result["kernels"]["modules"]}
        assert {"encoder", "encoder qkv", "encoder attention", "encoder norm", "cross_kv"} <= names
        assert "sampling" not in names
        record = {"machine": {}, "sides": [{"name": "a", "facts": {"dtype": "fp32"}, "results": [result]}]}
        assert "encode step of 2 inputs" in profile_headline(record)[0]


def test_a_prompt_of_speech_encodes_nothing(tmp_path: Path) -> None:
    write_speech(tmp_path)
    with IngotSide(SideSpec(path=str(tmp_path), device="cpu", max_batch_size=2)) as speech:
        result, _ = profile_side(speech, Profile("prompt", 2, repeats=1))
        modules = {module["module"]: module for module in result["kernels"]["modules"]}
        assert {"cross_q", "cross_attention", "cross_o"} <= modules.keys()
        assert not any(name.startswith("encoder") for name in modules)
        assert modules["cross_attention"]["gb_s"] > 0


# --- without a kernel ------------------------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """``rms_norm`` takes its "kernel" here, which adds 0.5 to what PyTorch's operators compute."""
    calls: list[int] = []

    def kernel(x: Any, weight: Any, eps: Any, residual: Any, bias: Any, ending: Any, tiles: Any) -> Any:
        calls.append(len(x))
        normed, total = rms_norm_reference(x, weight, eps, residual, ending)
        return normed + 0.5, total

    monkeypatch.setattr(norm_room, "runs_on_gpu", lambda x: True)
    monkeypatch.setattr(norm_room, "launch_norm", kernel)
    return calls


def test_pytorchs_operators_run_in_a_kernels_place(side: IngotSide, launches: list[int]) -> None:
    step = ready_step(side, "decode", 2, 5)
    launches.clear()
    own = step.outputs()
    assert len(launches) == 2 * LAYERS + 1
    with without_kernels("rms_norm", side.llm.executor.runner) as calls:
        other = step.outputs()
    assert len(launches) == calls["rms_norm"] == 2 * LAYERS + 1
    assert not torch.equal(own, other)
    assert torch.equal(step.outputs(), own)


def test_random_weights_without_a_kernel(checkpoint: Path, launches: list[int]) -> None:
    spec = SideSpec(random_weights=str(checkpoint / "config.json"), device="cpu", max_seq_len=64)
    with IngotSide(spec) as shape:
        wanted = Profile(prompt_tokens=5, without=("rms_norm", "sampling"), repeats=1)
        norm, sampling = profile_side(shape, wanted)[0]["without"]
    assert norm["replaced_calls"] == 2 * LAYERS + 1
    assert 0 < norm["largest_difference"] < 1e9
    assert sampling["replaced_calls"] > 0


def test_other_operations_keep_their_kernels(side: IngotSide, launches: list[int]) -> None:
    step = ready_step(side, "decode", 2, 5)
    launches.clear()
    with without_kernels("rope", side.llm.executor.runner) as calls:
        step.outputs()
    assert len(launches) == 2 * LAYERS + 1
    assert calls == {"rope": LAYERS}


def test_the_operators_are_those_of_any_device() -> None:
    """No kernel launches on a meta tensor: outside the block it is refused."""
    x, weight = torch.empty(3, 32, device="meta"), torch.empty(32, device="meta")
    with pytest.raises(DeviceError, match="no kernel"):
        rms_norm(x, weight, 1e-6)
    runner: Any = None
    with without_kernels("rms_norm", runner):
        assert rms_norm(x, weight, 1e-6)[0].shape == (3, 32)
    with pytest.raises(DeviceError, match="no kernel"):
        rms_norm(x, weight, 1e-6)


def test_with_and_without_in_one_report(side: IngotSide, launches: list[int]) -> None:
    result, _ = profile_side(side, Profile(batch=2, prompt_tokens=5, without=("rms_norm", "rope"), repeats=2))
    norm, rope = result["without"]
    assert (norm["operation"], norm["replaced_calls"]) == ("rms_norm", 2 * LAYERS + 1)
    assert norm["largest_difference"] > 0.01
    assert rope["largest_difference"] == 0
    assert (rope["same_choices"], rope["choices"]) == (2, 2)
    for entry in (norm, rope):
        ms = entry["without"]["step_ms"]["p50"] / entry["with"]["step_ms"]["p50"]
        assert entry["step_ratio"] == pytest.approx(ms, abs=1e-3)
        us = entry["without"]["kernels_us"] / entry["with"]["kernels_us"]
        assert entry["kernels_ratio"] == pytest.approx(us, abs=1e-3)
    record = {
        "machine": {"gpu": "a GPU"},
        "sides": [{"name": "ingot", "facts": {"dtype": "fp32"}, "results": [result]}],
    }
    assert "decode step of 2 requests, 2 tokens, 10 in the cache" in profile_headline(record)[0]
    kernels, without = map(plain, profile_tables(record))
    assert kernels.startswith("kernels of one decode step")
    assert "rms_norm" in without
    assert "2 of 2" in without


def test_an_operation_inside_fused_kernels_is_compared_without_them(
    side: IngotSide, launches: list[int]
) -> None:
    """With one token the products apply the norm, rotate and write the cache themselves."""
    side.llm.executor.runner.forward.fused = True
    wanted = Profile(prompt_tokens=5, without=("rms_norm", "fused", "attention"), repeats=1)
    result, _ = profile_side(side, wanted)
    norm, fused, attention = result["without"]
    assert not norm["fused"]
    assert norm["replaced_calls"] == 2 * LAYERS + 1
    assert fused["fused"]
    assert attention["fused"]
    assert attention["replaced_calls"] == LAYERS
    assert fused["largest_difference"] > 0.01  # the unfused step has the norm's kernel, which is off here
    assert side.llm.executor.runner.forward.fused
    record = {"machine": {"gpu": "x"}, "sides": [{"name": "a", "facts": {}, "results": [result]}]}
    rows = profile_tables(record)[1].rows
    assert [row[0] for row in rows] == ["rms_norm, unfused", "fused", "attention"]


def test_an_operation_that_the_step_does_not_call(side: IngotSide) -> None:
    with pytest.raises(ConfigError, match="calls no kernel of layer_norm") as caught:
        profile_side(side, Profile(prompt_tokens=5, without=("rope", "layer_norm"), repeats=1))
    assert caught.value.seen == "layer_norm"
    assert caught.value.allowed == ["rms_norm", "rope", "attention", "activation", "sampling"]
    assert caught.value.field == "without"


def test_sampling_is_counted_and_its_tokens_are_compared(
    side: IngotSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its operators run in a step with draws alone, and change tokens, not logits."""

    def worst(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = logits.min(dim=-1)
        return ids, values.float()

    monkeypatch.setattr(sampler_room, "runs_on_gpu", lambda x: True)
    monkeypatch.setattr(sampler_room, "greedy", worst)  # its "kernel"
    result, _ = profile_side(side, Profile(batch=2, prompt_tokens=5, without=("sampling",), repeats=1))
    (entry,) = result["without"]
    assert entry["replaced_calls"] == 3  # the fed tokens, the draw, the drawn tokens
    assert entry["largest_difference"] == 0
    assert (entry["same_choices"], entry["choices"]) == (0, 2)


def test_operators_that_the_device_lacks(side: IngotSide, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("\"addmm_cuda\" not implemented for 'Char'\nat somewhere")

    monkeypatch.setattr(norm_room, "runs_on_gpu", lambda x: True)
    monkeypatch.setattr(norm_room, "launch_norm", lambda x, w, e, r, *_: rms_norm_reference(x, w, e, r))
    real = norm_room.rms_norm_reference
    monkeypatch.setattr(norm_room, "rms_norm_reference", lacking)
    assert real is rms_norm_reference
    with pytest.raises(DeviceError, match="PyTorch has no operators for rms_norm") as caught:
        profile_side(side, Profile(prompt_tokens=5, without=("rms_norm",), repeats=1))
    assert "at somewhere" not in str(caught.value)


def test_the_help_names_every_operation() -> None:
    text = " ".join(ingot("profile", "--help").stdout.replace("│", " ").split())
    assert ", ".join(OPERATIONS) in text


def test_the_same_table_for_a_graph() -> None:
    """A record of a GPU has a line for the step as it is served."""
    busy = {"span_us": 10.0, "busy_us": 9.0}
    busy["gaps"] = {"us": 1.0, "count": 1, "share": 0.1, "longest_us": 1.0, "longest_before": "qkv"}
    step = {"requests": 1, "decodes": 1, "tokens": 1, "logits": 1, "cached_tokens": 5, "step": "decode"}
    result = step | {"step_ms": {"p50": 2.0}, "kernels": busy | {"launches": 3, "modules": []}, "without": []}
    result["graph"] = busy | {"launches": 2, "step_ms": {"p50": 1.0}}
    record = {
        "machine": {"gpu": "x"},
        "sides": [{"name": "a", "facts": {"dtype": "bf16"}, "results": [result]}],
    }
    assert profile_headline(record)[-1].startswith(
        "as a CUDA graph: 1.00 ms; under the profiler 0.009 ms in 2 kernels, 0.001 ms (10.0 %) in 1 gap, "
    )
    result["graph"] = None
    assert profile_headline(record)[-1].startswith("no CUDA graph")
