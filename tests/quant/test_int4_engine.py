"""Engines in w4a8: built, loaded, run, proven, aligned, told of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM, SamplingParams, build
from ingot.align.session import align
from ingot.align.trace import run_steps, trace
from ingot.bench.load import Ask
from ingot.bench.opening import open_side
from ingot.bench.side import SideSpec
from ingot.config.quant import QuantConfig
from ingot.config.quant_file import read_quant
from ingot.config.runtime import RuntimeConfig
from ingot.engine.compare import compare_engines
from ingot.engine.manifest import Manifest
from ingot.engine.proof import read_proof
from ingot.errors import CheckpointError, ConfigError
from ingot.kernels.rows.int8_rows import Int8Weight, dequantize_rows, int8_product
from ingot.kernels.weight.int4_weight import Int4Weight
from ingot.llm.replay import replay
from ingot.llm.repro import capture_layer
from ingot.llm.repro import replay as replay_layer
from ingot.llm.verify import verify
from ingot.quant import int4_in_int8
from ingot.quant.int4_in_int8 import Int4InInt8
from tests.e2e.terminal import ingot
from tests.e2e.tiny import write_tiny
from tests.tiny_models import make_model, random_ids, save_model, tiny_config

PLAIN, TURNED = QuantConfig("w4a8", rotation=False), QuantConfig("w4a8", 64)
CHOSEN = QuantConfig("w4a8", method="gptq")
MIXED = QuantConfig(
    "w4a8", head="w8a16", layers={"*.down_proj": "w8a8", "*.o_proj": "w4a16", "layers.1.mlp.*": "none"}
)
CONFIGS = {"plain": PLAIN, "rotated": TURNED, "gptq": CHOSEN, "mixed": MIXED}
KINDS = ("llama", "qwen", "qwen2", "qwen3", "tied")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    write_tiny(root / "qwen")
    for kind in ("llama", "qwen2", "qwen3", "gpt2", "tied"):
        tied: dict[str, Any] = {"tie_word_embeddings": True} if kind == "tied" else {}
        save_model(tiny_config("llama" if kind == "tied" else kind, **tied), root / kind, seed=3)
    return {folder.name: folder for folder in root.iterdir()}


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("samples") / "ids.jsonl"
    path.write_text("".join(json.dumps({"token_ids": random_ids(60, seed=n)}) + "\n" for n in range(12)))
    return path


def given(quant: QuantConfig, samples: Path) -> dict[str, Any]:
    return {"quant": quant, "device": "cpu", **({"calib": samples} if quant.calibrated else {})}


@pytest.mark.grid(1)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_built_and_proven(
    checkpoints: dict[str, Path], samples: Path, kind: str, name: str, tmp_path: Path
) -> None:
    quant = CONFIGS[name]
    folder = build(checkpoints[kind], tmp_path / "e", dtype="bf16", **given(quant, samples))
    llm, dense = LLM(folder, "cpu"), LLM(checkpoints[kind], "cpu")
    assert llm.engine.manifest.quant == quant
    found, exact = llm.logits(random_ids(30, seed=5)), dense.logits(random_ids(30, seed=5))
    assert 1e-3 < float((found - exact).norm() / exact.norm()) < 0.5
    assert verify(folder, "cpu", note=False).verdict == "proven"
    proof = read_proof(folder)
    assert proof is not None
    narrow = replay(LLM(folder, "cpu", compute_dtype="bf16"), proof.claims, lambda what: None)
    assert not narrow.failures


@pytest.mark.parametrize("name", ["plain", "rotated"])
@pytest.mark.parametrize("kind", KINDS)
def test_built_and_in_memory_are_one(
    checkpoints: dict[str, Path], kind: str, name: str, tmp_path: Path
) -> None:
    folder = build(checkpoints[kind], tmp_path / "e", quant=CONFIGS[name], device="cpu", proof=False)
    prompt = random_ids(30, seed=5)
    in_memory = LLM(checkpoints[kind], "cpu", quant=CONFIGS[name])
    assert torch.equal(in_memory.logits(prompt), LLM(folder, "cpu").logits(prompt))


@pytest.mark.grid(1)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "tied"])
def test_it_is_aligned_with_its_own_weights(
    checkpoints: dict[str, Path], samples: Path, kind: str, name: str, tmp_path: Path
) -> None:
    """The reference has the rotated embedding, norms and head, and its weights as 4 bits hold them."""
    folder = build(checkpoints[kind], tmp_path / "e", proof=False, **given(CONFIGS[name], samples))
    report = align(folder, checkpoints[kind], [random_ids(19)], steps=2, device="cpu")
    assert report.aligned, report.first_stage
    assert "rounds activations" in str(report.quant)


def test_a_trace_has_another_stream(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    model = make_model(tiny_config("llama"), seed=3)
    with trace(model, tmp_path / "trace"):
        run_steps(model, random_ids(6), 1)
    for name, quant in (("turned", TURNED), ("plain", PLAIN)):
        build(checkpoints["llama"], tmp_path / name, quant=quant, device="cpu", proof=False)
    with pytest.raises(
        CheckpointError, match=r"a trace holds the original's hidden states.*--reference CHECKPOINT"
    ):
        align(tmp_path / "turned", tmp_path / "trace", device="cpu")
    assert "differences are expected" in str(
        align(tmp_path / "plain", tmp_path / "trace", device="cpu").quant
    )


@pytest.mark.parametrize("invariant", [False, True])
def test_company_does_not_matter(checkpoints: dict[str, Path], invariant: bool) -> None:
    runtime = RuntimeConfig(batch_invariant=invariant)
    llm = LLM(checkpoints["llama"], "cpu", quant="w4a8", runtime=runtime)
    prompts = [random_ids(n, seed=n) for n in (3, 17, 1)]
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        assert llm.generate(prompt, params)[0].token_ids == output.token_ids


def test_an_int8_cache_goes_with_it(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = build(checkpoints["llama"], tmp_path / "e", quant="w4a8", kv_dtype="int8", device="cpu")
    assert verify(folder, "cpu", note=False).verdict == "proven"


def test_the_manifest_holds_every_tensor(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folders = [
        build(checkpoints["tied"], tmp_path / name, quant=quant, dtype="bf16", device="cpu", proof=False)
        for name, quant in (("a", TURNED), ("b", TURNED), ("c", PLAIN))
    ]
    manifest = Manifest.read(folders[0])
    prefix = "layers.0.self_attn.qkv_proj."
    assert {n.removeprefix(prefix): e.dtype for n, e in manifest.tensors.items() if n.startswith(prefix)} == {
        "pairs": "U8",
        "steps": "U8",
        "zeros": "U8",
        "scales": "F32",
    }
    assert compare_engines(folders[0], folders[1]).equal
    changes = {change.name for change in compare_engines(folders[0], folders[2]).config}
    assert {"quant.rotation", "quant.group"} <= changes
    assert "lm_head.weight" in manifest.tensors  # it has the final norm's weight in it
    assert "lm_head.weight" not in Manifest.read(folders[2]).tensors
    loaded = LLM(folders[0], "cpu", compute_dtype="bf16").engine.model.layers[0].self_attn.qkv_proj
    assert (loaded.scales.dtype, loaded.steps.dtype) == (torch.float32, torch.uint8)


def test_steps_of_other_rows_are_named(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build(checkpoints["llama"], tmp_path / "e", quant="w4a8", device="cpu")
    right = int4_in_int8.expand_int8

    def rolled(weight: Any) -> Int8Weight:
        found = right(weight)
        return Int8Weight(found.values.roll(1, dims=0), found.scales)

    monkeypatch.setattr(int4_in_int8, "expand_int8", rolled)
    found = verify(folder, "cpu", note=False)
    assert (found.verdict, found.first_bad_module) == ("failed", "layers.0.self_attn")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_layer_replays(checkpoints: dict[str, Path], dtype: str) -> None:
    llm = LLM(checkpoints["llama"], "cpu", quant="w4a8", compute_dtype=dtype)
    for layer in (0, 1):
        found = replay_layer(capture_layer(llm, random_ids(7), layer), torch.device("cpu"))
        assert found.repeats
        assert found.agrees


def test_random_weights(checkpoints: dict[str, Path]) -> None:
    spec = SideSpec(random_weights=str(checkpoints["tied"]), device="cpu", quant="w4a8", max_batch_size=2)
    side = open_side(spec)
    assert side.facts()["quantization"] == "w4a8"
    assert side.answer([Ask(3, 2)], [[1, 2, 3]]).tokens == (2,)


def test_weights_take_half_a_byte() -> None:
    tensors = Int4InInt8(128).layout(512, 4096, False, torch.float16)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    assert size == 512 * (4096 // 2 + 2 * 4096 // 128 + 4)


def test_layer_norms_are_not_rotated(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    for make in (
        lambda: build(checkpoints["gpt2"], tmp_path / "e", quant="w4a8", device="cpu"),
        lambda: LLM(checkpoints["gpt2"], "cpu", quant="w4a8"),
    ):
        with pytest.raises(ConfigError, match=r"layer_norm.*--no-rotate"):
            make()
    folder = build(checkpoints["gpt2"], tmp_path / "e", quant=PLAIN, device="cpu")
    assert verify(folder, "cpu", note=False).verdict == "proven"


class TestVerb:
    def test_build_and_inspect(self, checkpoints: dict[str, Path], tmp_path: Path) -> None:
        engine, source = str(tmp_path / "engine"), str(checkpoints["llama"])
        flags = ("--quant", "w4a8", "--group-size", "64", "--no-rotate", "--no-proof", "--device", "cpu")
        done = ingot("build", source, "-o", engine, *flags)
        assert done.exit_code == 0, done.stderr
        text = " ".join(ingot("inspect", engine, "--tensors").stdout.split())
        assert "w4a8, one inner scale per 64 columns, not rotated, dynamic activations, by rounding" in text
        assert json.loads(ingot("inspect", engine, "--json").stdout)["quant"]["rotation"] is False
        planned = ingot("plan", source, "--quant", "w4a8", "--gpu", "24GiB")
        assert planned.exit_code == 0
        assert "w4a8" in planned.stdout

    def test_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "q.yaml"
        path.write_text("scheme: w4a8\nrotation: false\nlayers:\n  '*.down_proj': w8a16\n")
        assert read_quant(str(path)) == PLAIN.replace(layers={"*.down_proj": "w8a16"})
        assert read_quant(str(path), rotation=True).rotation is True

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (("--quant", "w4a8", "--group-size", "32"), ("--group-size", "64, 128")),
            (("--quant", "w4a8", "--symmetric"), ("--asymmetric", "False")),
            (("--quant", "w4a8", "--activations", "static"), ("--activations", "dynamic")),
            (("--quant", "w4a8", "--method", "awq"), ("--method", "gptq")),
            (("--quant", "w4a8", "--method", "gptq"), ("--calib",)),
            (("--quant", "w8a8", "--rotate"), ("--rotate", "w8a8", "w4a8")),
        ],
    )
    def test_misuse(
        self, checkpoints: dict[str, Path], tmp_path: Path, flags: tuple[str, ...], words: tuple[str, ...]
    ) -> None:
        done = ingot("build", str(checkpoints["llama"]), "-o", str(tmp_path / "engine"), *flags)
        assert done.exit_code == 2
        for word in words:
            assert word in done.stderr


@pytest.mark.parametrize("rows", [1, 16, 17])
def test_few_rows_read_the_weight_as_it_is_stored(rows: int) -> None:
    """Without a temporary, with the same result."""
    scheme = Int4InInt8(group=64)
    tensors = scheme.pack(torch.randn(40, 192, generator=torch.Generator().manual_seed(1)), None)
    x = torch.randn(rows, 192, generator=torch.Generator().manual_seed(2))
    assert isinstance(scheme.int8_weight(tensors, 192, rows), Int4Weight if rows <= 16 else Int8Weight)
    numbers = scheme.quantize_input(x, tensors)
    expected = int8_product(numbers, scheme.plain_weight(tensors, 192), x.dtype)
    assert torch.equal(scheme.apply(x, tensors), expected)
    wide = dequantize_rows(numbers).double() @ scheme.dequantize(tensors, 192, torch.float64).T
    torch.testing.assert_close(expected.double(), wide, rtol=1e-5, atol=1e-5)
