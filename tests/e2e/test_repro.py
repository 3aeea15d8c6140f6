"""One layer cut out of a running engine, as a file, and replayed: on every architecture, right and wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from errno import ENOMEM
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ingot import LLM, SamplingParams, build
from ingot.config.runtime_config import RuntimeConfig
from ingot.device import parse_dtype
from ingot.errors import (
    BuildError,
    CheckpointError,
    EngineError,
    NoSuchPathError,
    OutOfMemoryError,
    RequestError,
)
from ingot.layers import mlp as mlps
from ingot.layers import norm as norms
from ingot.layers.linear import linears
from ingot.proof import repro_layer
from ingot.proof.repro_bundle import read_bundle, write_bundle
from ingot.proof.repro_layer import built_layer
from ingot.proof.repro_run import capture_layer, relative_l2, replay
from tests.e2e.mixed import Make
from tests.e2e.terminal import ingot
from tests.e2e.tiny import write_tiny
from tests.tiny_models import random_ids, save_model, tiny_config

CPU = torch.device("cpu")
IDS = random_ids(23)


@pytest.fixture
def bundle_file(make: Make, tmp_path: Path) -> Path:
    """A bundle of a LLaMA's second layer, with two decode steps."""
    path = tmp_path / "layer1.safetensors"
    write_bundle(path, capture_layer(make("llama"), IDS, layer=1, step=2))
    return path


def wrong_silu_mul(x: torch.Tensor, **_: Any) -> torch.Tensor:
    """The activation on the wrong branch."""
    gate, up = x.chunk(2, dim=-1)
    return gate * torch.nn.functional.silu(up)


# --- right -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3", "window", "gemma3"])
@pytest.mark.parametrize(("layer", "step"), [(0, 0), (1, 3)])
def test_round_trip(make: Make, tmp_path: Path, kind: str, layer: int, step: int) -> None:
    captured = capture_layer(make(kind), IDS, layer, step)
    size = write_bundle(tmp_path / "b.safetensors", captured)
    assert size == (tmp_path / "b.safetensors").stat().st_size
    bundle = read_bundle(tmp_path / "b.safetensors")
    assert bundle.facts == captured.facts
    assert bundle.facts.counts == (len(IDS), *[1] * step)
    found = replay(bundle, CPU)
    assert found.agrees
    assert found.against_output == 0  # the same arithmetic in the same calls
    assert 0 < found.against_expected == bundle.facts.output_error <= found.floor < 1e-5


def test_qwen2(tmp_path: Path) -> None:
    save_model(tiny_config("qwen2"), tmp_path, seed=1)
    assert replay(capture_layer(LLM(tmp_path, "cpu"), IDS, 1, 1), CPU).agrees


def test_qwen1_beyond_its_training_length(tmp_path: Path) -> None:
    """Log-n scaling and a stretched rotary base."""
    write_tiny(tmp_path / "tiny", seq_length=16, max_position_embeddings=128)
    bundle = capture_layer(LLM(tmp_path / "tiny", "cpu"), random_ids(40), 1, 2)
    assert not torch.equal(bundle.inputs.rope_rows, bundle.inputs.positions)
    assert replay(bundle, CPU).agrees


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_sixteen_bits(make: Make, dtype: str) -> None:
    bundle = capture_layer(make("llama", dtype=dtype), IDS, 1, 2)
    found = replay(bundle, CPU)
    assert (found.agrees, found.against_output, found.dtype) == (True, 0, dtype)
    assert bundle.output.dtype == bundle.inputs.hidden.dtype == parse_dtype(dtype)
    assert bundle.facts.expected_from == "plain PyTorch in float32"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_on_a_gpu(make: Make, kind: str, dtype: str) -> None:
    """The kernels give what plain PyTorch gives, and their twins on a CPU too."""
    bundle = capture_layer(make(kind, "cuda", dtype=dtype), IDS, 1, 2)
    assert bundle.facts.as_expected
    for device in (torch.device("cuda"), CPU):
        assert replay(bundle, device).agrees


def test_chunks_and_batch_invariance_are_kept(folders: dict[str, Path]) -> None:
    runtime = RuntimeConfig(block_size=16, cache_tokens=256, token_budget=9, batch_invariant=True)
    llm = LLM(folders["llama"], "cpu", max_batch_size=2, max_seq_len=128, runtime=runtime)
    bundle = capture_layer(llm, IDS, 1, 1)
    assert len(bundle.facts.counts) > 2
    assert sum(bundle.facts.counts) == len(IDS) + 1
    assert (bundle.facts.batch_invariant, bundle.facts.block_size) == (True, 16)
    assert replay(bundle, CPU).against_output == 0


def test_weights_are_stored_as_in_the_engine(folders: dict[str, Path], tmp_path: Path) -> None:
    engine = build(folders["llama"], tmp_path / "engine", dtype="fp16", device="cpu")
    bundle = capture_layer(LLM(engine, "cpu"), IDS, 1)
    stored = load_file(engine / "weights.safetensors")
    assert {f"layers.1.{name}" for name in bundle.weights} == {n for n in stored if n.startswith("layers.1.")}
    assert all(torch.equal(t, stored[f"layers.1.{n}"]) for n, t in bundle.weights.items())
    assert {t.dtype for t in bundle.weights.values()} == {torch.float16}


def test_a_cpu_multiplies_by_what_the_engine_does(tmp_path: Path) -> None:
    """Weights of 16 bits stay so under sums in fp32, packed as the engine's are."""
    save_model(tiny_config("llama", hidden_size=64, intermediate_size=128), tmp_path / "tiny", seed=3)
    llm = LLM(build(tmp_path / "tiny", tmp_path / "engine", dtype="bf16", device="cpu"), "cpu")
    bundle = capture_layer(llm, IDS, 1)
    layer = built_layer(bundle, CPU, torch.float32)
    forms = [
        [(type(one.scheme), getattr(one.scheme, "stored_dtype", None)) for one in linears(model).values()]
        for model in (layer, llm.engine.model.layers[1])
    ]
    assert forms[0] == forms[1]
    assert {dtype for _, dtype in forms[0]} == {torch.bfloat16}


def test_capture_changes_nothing(make: Make) -> None:
    llm, params = make("llama"), SamplingParams(max_new_tokens=4)
    before = llm.generate([IDS], params)[0].token_ids
    capture_layer(llm, IDS, 0, 2)
    assert llm.generate([IDS], params)[0].token_ids == before
    assert not llm.engine.model.layers[0]._forward_pre_hooks


def test_no_prompt_in_the_facts(bundle_file: Path) -> None:
    with safe_open(bundle_file, framework="pt") as file:
        assert not [name for name in file.keys() if "ids" in name]  # noqa: SIM118
        text = file.metadata()["ingot_repro"]
    assert ", ".join(map(str, IDS[:5])) not in text
    assert "share it only as you would share the prompt" in text


def test_each_token_has_a_floor_too(make: Make) -> None:
    """A few tokens of large activations, which decide the error of all together, must not hide the others."""
    bundle = capture_layer(make("llama"), IDS, 1)
    found = replay(bundle, CPU)
    assert 0 < found.worst <= found.token_floor
    assert bundle.facts.as_expected
    for values in ({"worst": 0.01}, {"against_expected": 0.01}):
        assert not replace(found, **values).agrees
    for values in ({"worst_repeat": 0.01}, {"against_output": 0.01}):
        assert not replace(found, **values).repeats
    assert not bundle.facts.replace(output_worst=0.01).as_expected


@pytest.mark.usefixtures("cpu_kernels")
def test_noise_of_inputs_that_a_cpu_splits(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding them to 23 bits is measured in the same layer, and no more is allowed."""
    llm = LLM(folders["llama"], "cpu", quant="w8a16")
    bundle = capture_layer(llm, IDS, 1, 2)
    found = replay(bundle, CPU)
    assert found.agrees
    assert found.against_output == 0
    assert bundle.facts.floor < 2**-18
    monkeypatch.setattr(repro_layer, "split_columns", lambda scheme, columns: 0)
    assert bundle.facts.noise > 1.2 * capture_layer(llm, IDS, 1, 2).facts.noise


# --- wrong -----------------------------------------------------------------------------------------------


def test_a_changed_kernel_is_detected(bundle_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ingot("repro", "--run", bundle_file, "--device", "cpu").exit_code == 0
    norm = norms.rms_norm

    def off_by_little(x: torch.Tensor, weight: torch.Tensor, eps: float, *rest: Any, **more: Any) -> Any:
        return norm(x, weight, eps + 1e-4, *rest, **more)

    monkeypatch.setattr(norms, "rms_norm", off_by_little)
    shown = ingot("repro", "--run", bundle_file, "--device", "cpu")
    assert shown.exit_code == 1
    assert "not as expected, and not the same as recorded" in shown.stdout


def test_a_recorded_failure_differs_from_its_absence(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured under a wrong kernel: repeated by it, not by the right one."""
    path = tmp_path / "b.safetensors"
    with monkeypatch.context() as wrong:
        wrong.setattr(mlps, "silu_mul", wrong_silu_mul)
        bundle = capture_layer(make("llama"), IDS, 1)
        write_bundle(path, bundle)
        assert bundle.facts.output_error > 100 * bundle.facts.floor
        assert not bundle.facts.as_expected
        found = replay(bundle, CPU)
        assert (found.agrees, found.repeats) == (False, True)
        assert (
            "not as expected, the same as recorded" in ingot("repro", "--run", path, "--device", "cpu").stdout
        )
    found = replay(bundle, CPU)
    assert (found.agrees, found.repeats) == (True, False)
    shown = ingot("repro", "--run", path, "--device", "cpu")
    assert shown.exit_code == 0
    assert "the recorded failure does not occur here" in shown.stdout


def test_numbers_that_are_none_are_kept(folders: dict[str, Path]) -> None:
    """A layer that overflows ends generation with an error, and is what a bundle is for."""
    llm = LLM(folders["llama"], "cpu", max_batch_size=2, max_seq_len=64)
    llm.engine.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    bundle = capture_layer(llm, IDS, 1)
    assert not bundle.output.isfinite().all()
    assert bundle.facts.floor < 1e-5
    found = replay(bundle, CPU)
    assert (found.agrees, found.repeats) == (True, True)  # its weights give no numbers in any arithmetic
    assert not llm.executor.has_work
    with pytest.raises(EngineError, match="logits are not numbers"):
        capture_layer(llm, IDS, 1, step=2)


def test_relative_l2() -> None:
    ones = torch.ones(2, 3)
    assert relative_l2(1.5 * ones, ones) == pytest.approx(0.5)
    assert relative_l2(ones, ones) == 0
    nan, inf = ones * float("nan"), ones * float("inf")
    assert relative_l2(nan, ones) == relative_l2(ones, inf) == relative_l2(nan, inf) == float("inf")
    assert relative_l2(nan, nan) == relative_l2(inf, inf) == 0


# --- a trace's output ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]) -> Path:
    """Hugging Face's hidden states of the LLaMA's layers, in the keys of a trace."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folders["llama"], dtype=torch.float32).eval()
    found = {"0/input_ids": torch.tensor([IDS])}

    def keep(key: str, output: Any) -> None:
        found[key] = output[0] if isinstance(output, tuple) else output

    for i, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda _, __, out, i=i: keep(f"0/model.layers.{i}", out))
    with torch.no_grad():
        model(torch.tensor([IDS]))
    path = tmp_path_factory.mktemp("trace") / "trace.safetensors"
    save_file({k: t.clone() for k, t in found.items()}, path)
    return path


def test_expected_from_a_trace(make: Make, trace: Path) -> None:
    bundle = capture_layer(make("llama"), IDS, 1, expected=trace)
    assert bundle.facts.expected_from == "the trace trace.safetensors"
    assert bundle.facts.output_error < 1e-5


def test_traces_that_do_not_fit(make: Make, trace: Path, tmp_path: Path) -> None:
    llm = make("llama")
    with pytest.raises(CheckpointError, match="different tokens"):
        capture_layer(llm, [*IDS[:-1], 0], 1, expected=trace)
    with pytest.raises(CheckpointError, match="for all tokens"):
        capture_layer(llm, IDS, 1, step=2, expected=trace)
    with pytest.raises(NoSuchPathError):
        capture_layer(llm, IDS, 1, expected=tmp_path / "none")
    (tmp_path / "text").write_text("no trace")
    with pytest.raises(CheckpointError, match="cannot be read"):
        capture_layer(llm, IDS, 1, expected=tmp_path / "text")


# --- refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layer", "step"), [(2, 0), (-1, 0), (0, -1), (0, 106)])
def test_no_such_layer_or_step(make: Make, layer: int, step: int) -> None:
    with pytest.raises(RequestError, match="no such"):
        capture_layer(make("llama"), IDS, layer, step)


def test_only_when_idle(make: Make) -> None:
    llm = make("llama")
    stream = llm.stream(IDS, SamplingParams(max_new_tokens=8))
    next(stream)
    with pytest.raises(RequestError, match="requests are running"):
        capture_layer(llm, IDS, 0)
    stream.close()


def changed(path: Path, **facts: Any) -> Path:
    """A copy with other facts."""
    with safe_open(path, framework="pt") as file:
        reported = json.loads(file.metadata()["ingot_repro"])
    copy = path.with_name("changed.safetensors")
    save_file(load_file(path), copy, {"ingot_repro": json.dumps(reported | facts)})
    return copy


def without(path: Path, *names: str) -> Path:
    """A copy that lacks tensors."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    copy = path.with_name("without.safetensors")
    save_file({k: t for k, t in load_file(path).items() if k not in names}, copy, metadata)
    return copy


def test_other_files_are_refused(bundle_file: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="not a bundle"):
        read_bundle(next(folders["llama"].glob("*.safetensors")))
    (tmp_path / "text").write_text("hello")
    (tmp_path / "cut").write_bytes(bundle_file.read_bytes()[:-100])
    for name in ("text", "cut"):
        with pytest.raises(EngineError, match="cannot be read"):
            read_bundle(tmp_path / name)
    with pytest.raises(NoSuchPathError):
        read_bundle(tmp_path / "none")
    with pytest.raises(EngineError, match="a different format version"):
        read_bundle(changed(bundle_file, version=99))
    for facts in ({"counts": [5]}, {"dtype": 3, "unknown": 1}, {"model": None}):
        with pytest.raises(EngineError, match="damaged"):
            read_bundle(changed(bundle_file, **facts))
    with pytest.raises(EngineError, match="damaged"):
        read_bundle(without(bundle_file, "expected"))
    with pytest.raises(EngineError, match="do not match its layer"):
        replay(read_bundle(without(bundle_file, "weights.mlp.down_proj.weight")), CPU)


def test_only_a_bundle_is_replaced(bundle_file: Path, tmp_path: Path) -> None:
    bundle = read_bundle(bundle_file)
    write_bundle(bundle_file, bundle)
    (tmp_path / "mine").write_text("precious")
    for place in ("mine", "nowhere/b"):
        with pytest.raises(BuildError):
            write_bundle(tmp_path / place, bundle)
    assert (tmp_path / "mine").read_text() == "precious"
    assert not list(tmp_path.glob(".*"))


# --- the verb ----------------------------------------------------------------------------------------------


def test_the_verb(tmp_path: Path) -> None:
    engine = build(write_tiny(tmp_path / "tiny"), tmp_path / "engine", max_batch_size=2, device="cpu")
    target = tmp_path / "out.safetensors"
    words = ("--layer", 1, "--prompt", "secret", "--step", 2, "--out", target, "--device", "cpu")
    shown = ingot("repro", engine, *words)
    assert shown.exit_code == 0
    assert "8: the prompt and 2 decode steps" in shown.stdout
    assert "as expected" in shown.stdout
    assert "hidden states of a prompt" in shown.stderr
    target.unlink()
    reported = json.loads(ingot("repro", engine, *words, "--json").stdout)
    assert reported["bytes"] == target.stat().st_size < (engine / "weights.safetensors").stat().st_size
    assert reported["command"] == "ingot repro engine --layer 1 --step 2"
    assert "secret" not in json.dumps(reported)
    ran = ingot("repro", "--run", target, "--device", "cpu", "--json")
    found = json.loads(ran.stdout)
    assert (ran.exit_code, found["agrees"], found["repeats"]) == (0, True, True)
    assert found["bundle"]["layer"] == 1


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        ((), "give ENGINE and --layer"),
        (("{engine}",), "give ENGINE and --layer"),
        (("{engine}", "--layer", 0), "one of --messages, --prompt and --ids"),
        (("{engine}", "--layer", 0, "--ids", "1 x"), "--ids takes token ids"),
        (("{engine}", "--layer", 9, "--ids", "1 2", "--device", "cpu"), "no such layer"),
        (("{engine}", "--layer", 0, "--ids", "999", "--device", "cpu"), "outside the vocabulary"),
        (("{engine}", "--run", "x"), "leave out ENGINE"),
        (("--run", "x", "--layer", 1), "leave out --layer"),
        (("--run", "x"), "no such file"),
    ],
)
def test_misuse(folders: dict[str, Path], words: tuple[Any, ...], reported: str) -> None:
    shown = ingot("repro", *(str(w).replace("{engine}", str(folders["llama"])) for w in words))
    assert shown.exit_code == 2 or reported == "outside the vocabulary"
    assert reported in " ".join(shown.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. Error"),
        RuntimeError("CUDA error: out of memory"),
        OSError(ENOMEM, "Cannot allocate memory"),
    ],
    ids=["device", "host", "call", "mapping"],
)
def test_a_replay_without_memory(
    error: Exception, bundle_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    bundle = read_bundle(bundle_file)
    monkeypatch.setattr("ingot.proof.repro_run.layer_output", fail)
    with pytest.raises(OutOfMemoryError, match=r"does not fit on the device.*`device=cpu`"):
        replay(bundle, CPU)
    error = RuntimeError("another")
    with pytest.raises(RuntimeError, match="another"):
        replay(bundle, CPU)
