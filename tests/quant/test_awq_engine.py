"""Engines whose numbers AWQ chose: factors folded into what makes an input; proven, aligned, nearer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ingot import LLM, build
from ingot.align.session import align
from ingot.config.quant import QuantConfig
from ingot.engine.calibrate import Load
from ingot.engine.manifest import CalibrationEntry, Manifest
from ingot.engine.rescaling import fold, rescaling_sites
from ingot.errors import BuildError, ConfigError
from ingot.llm.verify import verify
from tests.e2e.terminal import ingot
from tests.e2e.tiny import write_tiny
from tests.quant.models import divergence, log_probs, opened
from tests.tiny_models import make_model, random_ids, save_model, tiny_config

ROOT = Path(__file__).parents[2]
POCKET = ROOT / "models" / "pocket-chat"
NARROW = QuantConfig("w4a16", 32, method="awq")
MIXED = QuantConfig(
    "w4a16",
    64,
    symmetric=True,
    head="w8a16",
    method="awq",
    layers={"*.qkv_proj": "none", "layers.1.mlp.*": "w8a16"},
)
KINDS = ("llama", "qwen2", "qwen3", "gpt2", "relu", "tied", "qwen")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    for kind in ("llama", "qwen2", "qwen3", "gpt2"):
        save_model(tiny_config(kind), root / kind, seed=3)
    save_model(tiny_config("gpt2", activation_function="relu"), root / "relu", seed=3)
    save_model(tiny_config("llama", tie_word_embeddings=True), root / "tied", seed=3)
    write_tiny(root / "qwen")
    return {folder.name: folder for folder in root.iterdir()}


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("samples") / "ids.jsonl"
    path.write_text("".join(json.dumps({"token_ids": random_ids(60, seed=n)}) + "\n" for n in range(12)))
    return path


class Held:
    """A checkpoint's tensors that can be replaced."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self.changes: dict[str, torch.Tensor] = {}

    def weight(self, name: str) -> torch.Tensor:
        return self.changes[name] if name in self.changes else self._load(name)

    def replace(self, name: str, tensor: torch.Tensor) -> None:
        assert tensor.shape == self._load(name).shape
        self.changes[name] = tensor


@pytest.mark.parametrize("kind", KINDS)
def test_folded_factors_change_no_output(checkpoints: dict[str, Path], kind: str) -> None:
    """Random factors at every site of every layer; with heads that share values, biases, ReLU."""
    decoder, load = opened(checkpoints[kind])
    held = Held(load)
    generator = torch.Generator().manual_seed(1)
    for index in range(len(decoder.layers)):
        own = rescaling_sites(decoder.config, index)
        assert len(own) == (3 if kind == "gpt2" else 4)
        for site in own:
            size = held.weight(f"{site.reader}.weight").shape[1]
            scales = torch.exp(torch.randn(size, generator=generator))
            if site.classes is not None:
                scales = scales[: int(site.classes.max()) + 1][site.classes]
            fold(site, scales, held)
    ids = [random_ids(20), random_ids(9, seed=5)]
    exact = log_probs(decoder, load, ids)
    torch.testing.assert_close(log_probs(decoder, load, ids, held.changes), exact, rtol=1e-4, atol=1e-4)
    one = dict(list(held.changes.items())[:1])
    assert not torch.allclose(log_probs(decoder, load, ids, one), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.grid(1)
@pytest.mark.parametrize("quant", [NARROW, MIXED, QuantConfig("w8a16", method="awq")], ids=lambda q: q.label)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_built_told_of_and_proven(
    checkpoints: dict[str, Path], samples: Path, kind: str, quant: QuantConfig, tmp_path: Path
) -> None:
    folder = build(
        checkpoints[kind], tmp_path / "engine", quant=quant, calib=samples, calib_samples=6, device="cpu"
    )
    manifest = Manifest.read(folder)
    assert manifest.quant == quant
    assert manifest.calibration is not None
    assert manifest.calibration.samples == 6
    assert verify(folder, "cpu", note=False).verdict == "proven"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "tied", "qwen"])
def test_it_is_aligned_by_its_own_norms_biases_and_weights(
    checkpoints: dict[str, Path], samples: Path, kind: str, dtype: str, tmp_path: Path
) -> None:
    folder = build(
        checkpoints[kind],
        tmp_path / "engine",
        quant=MIXED,
        calib=samples,
        dtype=dtype,
        device="cpu",
        proof=False,
    )
    report = align(folder, checkpoints[kind], [random_ids(9)], steps=2, device="cpu", dtype=dtype)
    assert report.aligned, report.first_stage


def test_what_it_folds_is_in_the_norms_and_what_it_cannot_stays(
    checkpoints: dict[str, Path], samples: Path, tmp_path: Path
) -> None:
    """Against rounding: only norms before narrow products, and what makes the inputs of others, change."""
    hashes = []
    for method, calib in (("awq", samples), ("round", None)):
        quant = MIXED.replace(method=method)
        folder = build(
            checkpoints["gpt2"], tmp_path / method, quant=quant, calib=calib, device="cpu", proof=False
        )
        hashes.append({name: entry.sha256 for name, entry in Manifest.read(folder).tensors.items()})
    changed = {name for name in hashes[0] if hashes[0][name] != hashes[1][name]}
    assert {name.split(".")[0] for name in changed} == {"layers"}
    for index in (0, 1):
        own = {name.removeprefix(f"layers.{index}.") for name in changed if f".{index}." in name}
        assert {"post_attention_layernorm.weight", "post_attention_layernorm.bias"} <= own
        assert {"self_attn.qkv_proj.weight", "self_attn.qkv_proj.bias"} <= own  # makes o_proj's input
        assert not own & {"input_layernorm.weight", "input_layernorm.bias", "mlp.up_proj.bias"}


def test_its_outputs_are_nearer_than_those_of_rounding_where_channels_are_loud(
    samples: Path, tmp_path: Path
) -> None:
    model = make_model(tiny_config("llama", hidden_size=64, intermediate_size=128), seed=3)
    loud = torch.ones(64)
    loud[[3, 40]] = 30.0
    with torch.no_grad():
        for layer in model.model.layers:
            for norm, readers in (
                (layer.input_layernorm, [getattr(layer.self_attn, f"{n}_proj") for n in "qkv"]),
                (layer.post_attention_layernorm, [layer.mlp.gate_proj, layer.mlp.up_proj]),
            ):
                norm.weight *= loud
                for reader in readers:
                    reader.weight /= loud
    model.save_pretrained(tmp_path / "checkpoint")
    found = {}
    for method, calib in (("awq", samples), ("round", None)):
        quant = QuantConfig("w4a16", 64, method=method)
        folder = build(
            tmp_path / "checkpoint", tmp_path / method, quant=quant, calib=calib, device="cpu", proof=False
        )
        found[method] = LLM(folder, "cpu")
    ids = random_ids(120, seed=99)
    wanted = LLM(tmp_path / "checkpoint", "cpu").logits(ids).log_softmax(-1)
    costs = {m: divergence(wanted, llm.logits(ids).log_softmax(-1)) for m, llm in found.items()}
    assert costs["awq"] < 0.75 * costs["round"]


def test_the_same_inputs_give_the_same_bytes(
    checkpoints: dict[str, Path], samples: Path, tmp_path: Path
) -> None:
    folders = [
        build(checkpoints["qwen2"], tmp_path / name, quant=NARROW, calib=samples, device="cpu", proof=False)
        for name in ("one", "two")
    ]
    for name in ("weights.safetensors", "manifest.json"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name


def test_refusals_name_the_method_and_the_layer(
    checkpoints: dict[str, Path], samples: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"seen: method awq.*--calib FILE"):
        build(checkpoints["llama"], tmp_path / "engine", quant=NARROW, device="cpu")
    with pytest.raises(ConfigError, match=r"AWQ needs calibration.*--quant w4a16 --method awq --calib FILE"):
        LLM(checkpoints["llama"], "cpu", quant=NARROW)
    model = make_model(tiny_config("llama"))
    model.model.layers[1].mlp.down_proj.weight.data[5, 7] = 3e38
    model.save_pretrained(tmp_path / "odd")
    with pytest.raises(BuildError, match=r"layers\.1"):
        build(tmp_path / "odd", tmp_path / "engine", quant=NARROW, calib=samples, device="cpu")
    assert not (tmp_path / "engine").exists()


def test_the_verb_on_the_pocket_model(tmp_path: Path) -> None:
    """Nearer than rounding on conversations of the same kind that it was not calibrated with."""
    lines = (ROOT / "recipes" / "heldout.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    calib = tmp_path / "calib.jsonl"
    calib.write_text("".join(lines[::2]), encoding="utf-8")
    flags = ("--quant", "w4a16", "--method", "awq", "--calib", str(calib), "--calib-samples", "16")
    folder = tmp_path / "engine"
    done = ingot("build", str(POCKET), "-o", str(folder), *flags, "--no-proof", "--device", "cpu")
    assert done.exit_code == 0, done.stderr
    text = ingot("inspect", str(folder)).stdout
    assert "w4a16, one scale per 128 columns, asymmetric, by AWQ" in text
    assert "16 samples, " in text
    assert isinstance(Manifest.read(folder).calibration, CalibrationEntry)
    exact, plain, near = LLM(POCKET, "cpu"), LLM(POCKET, "cpu", quant="w4a16"), LLM(folder, "cpu")
    chat, tokenizer = exact.chat_format, exact.tokenizer
    assert chat is not None
    asked = [json.loads(line)["messages"] for line in lines[1::40]]
    prompts = [chat.prompt_ids(messages, tokenizer) for messages in asked]

    def cost(llm: LLM) -> float:
        pairs = ((exact.logits(ids).log_softmax(-1), llm.logits(ids).log_softmax(-1)) for ids in prompts)
        return sum(divergence(*pair) for pair in pairs)

    assert cost(near) < 0.9 * cost(plain)
