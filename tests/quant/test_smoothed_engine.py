"""Engines in w8a8 whose activations were made quieter, or have static scales: proven, aligned, nearer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ingot import LLM, build
from ingot.align.session import align
from ingot.config.quant import QuantConfig
from ingot.engine import input_statistics
from ingot.engine.assemble import Assembly
from ingot.engine.calibrate import CalibratedLayer, Held, Load
from ingot.engine.calibration_cache import cache_path
from ingot.engine.manifest import CalibrationEntry, Manifest
from ingot.engine.smooth_layers import SmoothLayers
from ingot.errors import BuildError
from ingot.layers.linear import linears
from ingot.llm.verify import verify
from ingot.quant.calibration import InputStatistics
from tests.e2e.terminal import ingot
from tests.quant.loud_pocket import POCKET, ROOT, write_loud
from tests.quant.models import divergence, log_probs, opened, planned
from tests.tiny_models import make_model, random_ids, save_model, tiny_config

CPU = torch.device("cpu")
SMOOTH = QuantConfig("w8a8", method="smoothquant")
STATIC = QuantConfig("w8a8", activations="static")
BOTH = QuantConfig("w8a8", method="smoothquant", alpha="search", activations="static")
MIXED = QuantConfig(
    "w8a8", method="smoothquant", head="w8a16", layers={"*.qkv_proj": "w8a16", "layers.1.mlp.*": "none"}
)
CONFIGS = {"smooth": SMOOTH, "static": STATIC, "both": BOTH, "mixed": MIXED}
KINDS = ("llama", "qwen2", "qwen3", "gpt2", "relu", "tied")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    for kind in ("llama", "qwen2", "qwen3", "gpt2"):
        save_model(tiny_config(kind), root / kind, seed=3)
    save_model(tiny_config("gpt2", activation_function="relu"), root / "relu", seed=3)
    save_model(tiny_config("llama", tie_word_embeddings=True), root / "tied", seed=3)
    return {folder.name: folder for folder in root.iterdir()}


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("samples") / "ids.jsonl"
    path.write_text("".join(json.dumps({"token_ids": random_ids(60, seed=n)}) + "\n" for n in range(12)))
    return path


@pytest.mark.grid(1)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_built_told_of_and_proven(
    checkpoints: dict[str, Path], samples: Path, kind: str, name: str, tmp_path: Path
) -> None:
    quant = CONFIGS[name]
    folder = build(
        checkpoints[kind],
        tmp_path / "e",
        quant=quant,
        dtype="bf16",
        calib=samples,
        calib_samples=6,
        device="cpu",
    )
    manifest = Manifest.read(folder)
    assert manifest.quant == quant
    assert manifest.calibration is not None
    assert manifest.calibration.samples == 6
    static = {n for n in manifest.tensors if n.endswith(".input_scale")}
    assert bool(static) == (quant.activations == "static")
    found = verify(folder, "cpu", note=False)
    assert found.verdict == "proven", found.failures
    ids = random_ids(30, seed=5)
    exact, near = LLM(checkpoints[kind], "cpu").logits(ids), LLM(folder, "cpu").logits(ids)
    assert float((near - exact).norm() / exact.norm()) < 0.2


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_beside_layers_whose_numbers_are_chosen(
    checkpoints: dict[str, Path], samples: Path, method: str, tmp_path: Path
) -> None:
    quant = QuantConfig("w4a16", 32, method=method, layers={"*.gate_up_proj": "w8a8", "layers.1.*": "w8a8"})
    folder = build(checkpoints["llama"], tmp_path / "e", quant=quant, calib=samples, device="cpu")
    found = verify(folder, "cpu", note=False)
    assert found.verdict == "proven", found.failures
    report = align(folder, checkpoints["llama"], [random_ids(19)], steps=2, device="cpu")
    assert report.aligned, report.first_stage


@pytest.mark.parametrize("name", ["both", "mixed"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_it_is_aligned_with_what_it_was_folded_into(
    checkpoints: dict[str, Path], samples: Path, kind: str, name: str, tmp_path: Path
) -> None:
    folder = build(
        checkpoints[kind], tmp_path / "e", quant=CONFIGS[name], calib=samples, device="cpu", proof=False
    )
    report = align(folder, checkpoints[kind], [random_ids(19)], steps=2, device="cpu")
    assert report.aligned, report.first_stage


def test_a_layer_s_weights_are_read_once(
    checkpoints: dict[str, Path], samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The walk over samples and the folding share them."""
    asked: list[str] = []
    load = Assembly.load

    def counted(self: Assembly, name: str, *given: Any, **named: Any) -> torch.Tensor:
        asked.append(name)
        return load(self, name, *given, **named)

    monkeypatch.setattr(Assembly, "load", counted)
    build(checkpoints["llama"], tmp_path / "engine", quant=SMOOTH, calib=samples, proof=False, device="cpu")
    layers = [name for name in asked if name.startswith("layers.")]
    assert len(layers) == len(set(layers)) == 2 * 6


@pytest.mark.parametrize("kind", KINDS)
def test_folding_alone_changes_nothing(checkpoints: dict[str, Path], samples: Path, kind: str) -> None:
    """The smoothed weights, before any is rounded, compute what the checkpoint does."""
    decoder, load = opened(checkpoints[kind], 128)
    assembly = planned(checkpoints[kind], SMOOTH.replace(alpha=0.8))
    changes: dict[str, torch.Tensor] = {}
    for index, seen in enumerate(seen_of(decoder, load)):
        layer = smoothed(assembly, load, index, seen)
        names = [n for n, _ in decoder.named_parameters() if n.startswith(f"layers.{index}.")]
        changes |= {name: layer.weight(name).float() for name in names}
    moved = {n.rpartition(".")[0] for n, t in changes.items() if not torch.equal(t, load(n).float())}
    ids = [random_ids(40, seed=7)]
    torch.testing.assert_close(
        log_probs(decoder, load, ids, changes), log_probs(decoder, load, ids), rtol=1e-4, atol=1e-4
    )
    down = {"layers.0.mlp.down_proj"} if kind != "gpt2" else set()  # a GELU lies before it
    assert {"layers.0.input_layernorm", "layers.0.self_attn.o_proj", *down} <= moved
    assert ("layers.0.mlp.down_proj" in moved) == bool(down)


def smoothed(
    assembly: Assembly, load: Load, index: int, seen: dict[str, InputStatistics]
) -> CalibratedLayer[InputStatistics]:
    """A layer as the class that builds use leaves it."""
    layer = CalibratedLayer(index, seen, Held(load, CPU))
    assert not list(SmoothLayers(assembly, CPU).choose(layer)), "no input is static"
    return layer


def seen_of(decoder: torch.nn.Module, load: Load) -> Iterator[dict[str, InputStatistics]]:
    """What random samples give each layer, gathered by a feed of its own."""
    found: dict[str, InputStatistics] = {}

    def feed(name: str, x: torch.Tensor) -> torch.Tensor:
        found.setdefault(name, InputStatistics.of(x.shape[1], sample=64)).add(x)
        return x

    log_probs(decoder, load, [random_ids(60, seed=n) for n in range(12)], feed=feed)  # type: ignore[arg-type]
    for index in (0, 1):
        yield {name: seen for name, seen in found.items() if name.startswith(f"layers.{index}.")}


@pytest.mark.parametrize("alpha", [0.5, 0.8])
def test_norm_and_columns_are_the_paper_s(golden: Path, alpha: float, tmp_path: Path) -> None:
    """The authors' scales and folded weights, by the class that builds use."""
    with np.load(golden / "quant" / "smoothquant_scales.npz", allow_pickle=False) as file:
        given = {part: torch.from_numpy(file[part]) for part in file.files}
    shape = {"hidden_size": 96, "head_dim": 26, "num_attention_heads": 4, "num_key_value_heads": 2}
    save_model(tiny_config("llama", **shape), tmp_path / "c", seed=1)
    decoder, load = opened(tmp_path / "c", 128)
    own = {
        "layers.0.input_layernorm.weight": given["rms_weight"],
        "layers.0.self_attn.qkv_proj.weight": torch.cat([given[f"weight{i}"] for i in range(3)]),
    }
    seen = next(seen_of(decoder, load))
    loud = InputStatistics.of(96)
    loud.add(given["act_max"][None])
    assembly = planned(tmp_path / "c", SMOOTH.replace(alpha=alpha))
    seen |= {"layers.0.self_attn.qkv_proj": loud}
    layer = smoothed(assembly, lambda n: own.get(n, load(n)), 0, seen)
    norm, columns = (layer.weight(name) for name in own)
    alive = given["act_max"] > 1e-5
    told = f"rms_a{alpha}_"
    torch.testing.assert_close(norm[alive], given[told + "norm_weight_after"][alive], rtol=1e-6, atol=1e-7)
    assert torch.equal(norm[~alive], given["rms_weight"][~alive])
    expected = given[told + "weight0_after"][:, alive]
    torch.testing.assert_close(columns[:80, alive], expected, rtol=1e-5, atol=1e-7)


def test_a_static_scale_is_the_largest_magnitude_that_was_seen(
    checkpoints: dict[str, Path], samples: Path, tmp_path: Path
) -> None:
    decoder, load = opened(checkpoints["llama"], 128)
    folder = build(
        checkpoints["llama"],
        tmp_path / "e",
        quant=STATIC,
        dtype="fp32",
        calib=samples,
        device="cpu",
        proof=False,
    )
    found = linears(LLM(folder, "cpu").engine.model)
    for layer in seen_of(decoder, load):
        for name, seen in layer.items():
            scale = float(found[name].input_scale)  # type: ignore[arg-type]
            assert scale == pytest.approx(float(seen.ranges.absmax().amax()) / 127, rel=1e-5)


def test_a_norm_s_rounding_costs_nothing(checkpoints: dict[str, Path]) -> None:
    """In bf16 a norm's weight is off by up to 0.4 %: the columns take that up."""
    decoder, load = opened(checkpoints["llama"], 128)
    folder = checkpoints["llama"]
    assembly = planned(folder, SMOOTH, "bf16")
    layer = smoothed(assembly, load, 0, next(seen_of(decoder, load)))
    name = "layers.0.input_layernorm.weight"
    norm = assembly.cast(name, layer.weight(name))
    assert norm.dtype == torch.bfloat16
    columns = layer.weight("layers.0.self_attn.qkv_proj.weight")
    exact = load("layers.0.self_attn.qkv_proj.weight") * load("layers.0.input_layernorm.weight")
    rows = slice(0, 48)  # queries and keys; values are divided by the output's scales
    torch.testing.assert_close((columns * norm.float())[rows], exact[rows], rtol=1e-5, atol=1e-6)


class TestRangesBesideTheEngine:
    def test_a_second_build_reads_them(
        self, checkpoints: dict[str, Path], samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[str] = []
        given = {"calib": samples, "device": "cpu", "proof": False, "force": True}

        def made(quant: QuantConfig, **changes: object) -> bytes:
            told.clear()
            options = {**given, **changes, "progress": lambda what, done, total: told.append(what)}
            folder = build(checkpoints["qwen2"], tmp_path / "e", quant=quant, **options)  # type: ignore[arg-type]
            return (folder / "weights.safetensors").read_bytes()

        first = made(STATIC)
        assert "calibration 100 %" in told
        assert cache_path(tmp_path / "e").is_file()
        walked = input_statistics.Walk
        monkeypatch.setattr(input_statistics, "Walk", None)
        assert made(STATIC) == first
        assert "ranges of e.calibration.safetensors" in told
        made(SMOOTH.replace(alpha=0.7))
        monkeypatch.setattr(input_statistics, "Walk", walked)
        for quant, changes in ((BOTH, {}), (STATIC, {"calib_samples": 5}), (STATIC, {"dtype": "bf16"})):
            made(quant, **changes)
            assert "calibration 100 %" in told, quant
        assert made(STATIC) == first

    def test_a_failed_build_leaves_none(
        self, checkpoints: dict[str, Path], samples: Path, tmp_path: Path
    ) -> None:
        def fail(folder: Path) -> None:
            raise BuildError("no", seen="no", fix="no")

        with pytest.raises(BuildError, match="no"):
            build(
                checkpoints["llama"], tmp_path / "e", quant=SMOOTH, calib=samples, device="cpu", finish=fail
            )
        assert not list(tmp_path.iterdir())


def test_what_cannot_be_calibrated(samples: Path, tmp_path: Path) -> None:
    model = make_model(tiny_config("llama"), seed=3)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(3e38)
    model.save_pretrained(tmp_path / "c")
    with pytest.raises(BuildError, match=r"not finite.*layers\.1"):
        build(tmp_path / "c", tmp_path / "e", quant=SMOOTH, calib=samples, device="cpu")
    assert not (tmp_path / "e").exists()


def test_the_verb(checkpoints: dict[str, Path], samples: Path, tmp_path: Path) -> None:
    engine = str(tmp_path / "engine")
    flags = (
        "--method",
        "smoothquant",
        "--alpha",
        "search",
        "--activations",
        "static",
        "--calib",
        str(samples),
    )
    done = ingot(
        "build",
        str(checkpoints["llama"]),
        "-o",
        engine,
        "--quant",
        "w8a8",
        *flags,
        "--no-proof",
        "--device",
        "cpu",
    )
    assert done.exit_code == 0, done.stderr
    text = " ".join(ingot("inspect", engine).stdout.split())
    assert "w8a8, static activations, by SmoothQuant with alpha search" in text
    assert "12 samples, 720 tokens" in text
    entry = Manifest.read(Path(engine)).calibration
    assert isinstance(entry, CalibrationEntry)


@pytest.fixture(scope="module")
def loud_pocket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_loud(tmp_path_factory.mktemp("loud") / "checkpoint")


def test_smoothing_beats_none_where_channels_are_loud(loud_pocket: Path, tmp_path: Path) -> None:
    """KL in nats from the pocket model, on conversations that were not calibrated with."""
    lines = (ROOT / "recipes" / "heldout.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    calib = tmp_path / "calib.jsonl"
    calib.write_text("".join(lines[::2]), encoding="utf-8")
    exact = LLM(POCKET, "cpu")
    chat, tokenizer = exact.chat_format, exact.tokenizer
    assert chat is not None
    prompts = [chat.prompt_ids(json.loads(line)["messages"], tokenizer) for line in lines[1::40]]
    wanted = [exact.logits(ids).log_softmax(-1) for ids in prompts]

    def cost(name: str, quant: QuantConfig) -> float:
        given = {"calib": calib, "calib_samples": 16} if quant.calibrated else {}
        llm = LLM(
            build(loud_pocket, tmp_path / name, quant=quant, device="cpu", proof=False, **given),  # type: ignore[arg-type]
            "cpu",
        )
        pairs = ((a, llm.logits(ids).log_softmax(-1)) for a, ids in zip(wanted, prompts, strict=True))
        return sum(divergence(*pair) for pair in pairs) / len(prompts)

    found = {
        "dynamic": cost("dynamic", QuantConfig("w8a8")),
        "static": cost("static", STATIC),
        "dynamic, smoothed": cost("smooth", SMOOTH),
        "static, smoothed": cost("both", SMOOTH.replace(activations="static")),
        "static, searched": cost("search", BOTH),
    }
    # On one core: 1.0e-3 and 1.6e-2; smoothed 1.9e-4, 2.6e-3, and 1.1e-3 with searched alphas.
    assert found["dynamic, smoothed"] < 0.3 * found["dynamic"], found
    assert found["static, smoothed"] < 0.3 * found["static"], found
    assert found["static, searched"] < found["static, smoothed"], found
    assert found["dynamic"] < found["static"], found


@pytest.mark.parametrize(("length", "warned"), [(7, True), (40, False)])
def test_fewer_tokens_than_a_model_is_wide_are_warned_of(
    length: int, warned: bool, checkpoints: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The tiny model has 32 channels."""
    calib = tmp_path / "calib.jsonl"
    calib.write_text(json.dumps({"token_ids": list(range(1, 1 + length))}) + "\n", encoding="utf-8")
    build(checkpoints["llama"], tmp_path / "e", quant=SMOOTH, calib=calib, device="cpu", proof=False)
    told = [
        record.message for record in caplog.records if "the quantization may overfit them" in record.message
    ]
    assert bool(told) == warned
    assert all(f"{length} tokens" in one for one in told)
