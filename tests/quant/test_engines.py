"""Engines of every scheme and method: built, told of, proven, aligned with the weights that they have."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM, SamplingParams
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.engine.engine_diff import compare_engines
from ingot.engine.engine_loader import setting_of
from ingot.engine.manifest import CalibrationEntry, Manifest
from ingot.engine.proof_file import read_proof
from ingot.layers.decoder import Decoder
from ingot.layers.linear import linears
from ingot.measure.align.align_report import facts, report_json
from ingot.measure.align.align_session import align
from ingot.measure.side.open_side import open_side
from ingot.measure.side.side_spec import SideSpec
from ingot.measure.side.token_load import Ask
from ingot.memory.ledger import ledger
from ingot.proof.golden_replay import replay
from ingot.proof.repro_run import capture_layer
from ingot.proof.repro_run import replay as replay_layer
from ingot.proof.verify_engine import verify
from ingot.quant.schemes.half_packed import HalfPacked
from ingot.quant.schemes.in_panels import InPanels, Int8InPanels
from ingot.quant.schemes.int8_both import Int8Both
from tests.quant.conftest import Made
from tests.tiny_models import random_ids

IDS = random_ids(30, seed=5)
KINDS = ("llama", "mistral", "qwen", "qwen2", "qwen3", "gpt2", "relu", "tied")
INNER = {"layers.1.mlp.*": "w8a16"}
WEIGHT_ONLY = {
    "w8a16": QuantConfig("w8a16"),
    "w4a16": QuantConfig("w4a16"),
    "w4a16 symmetric": QuantConfig("w4a16", 32, symmetric=True, head="w8a16"),
    "w4a16 mixed": QuantConfig(
        "w4a16", 32, head="w8a16", layers={"*.mlp.*": "w8a16", "*.o_proj": "none", "layers.1.*": "w8a16"}
    ),
}
SCHEMES = WEIGHT_ONLY | {
    "w8a8": QuantConfig("w8a8"),
    "w8a8 by tensor": QuantConfig("w8a8", weight_scales="tensor"),
    "w8a8 mixed": QuantConfig("w8a8", head="w8a16", layers={"*.down_proj": "w8a16", "layers.1.*": "none"}),
    "w4a8": QuantConfig("w4a8", 64),
    "w4a8 plain": QuantConfig("w4a8", rotation=False),
    "w4a8 gptq": QuantConfig("w4a8", method="gptq"),
    "w4a8 mixed": QuantConfig(
        "w4a8", head="w8a16", layers={"*.down_proj": "w8a8", "*.o_proj": "w4a16", "layers.1.mlp.*": "none"}
    ),
    "gptq": QuantConfig("w4a16", 32, method="gptq"),
    "gptq mixed": QuantConfig(
        "w4a16", 64, symmetric=True, head="w8a16", method="gptq", layers=INNER | {"*.o_proj": "none"}
    ),
    "gptq w8a16": QuantConfig("w8a16", method="gptq"),
    "awq": QuantConfig("w4a16", 32, method="awq"),
    "awq mixed": QuantConfig(
        "w4a16", 64, symmetric=True, head="w8a16", method="awq", layers=INNER | {"*.qkv_proj": "none"}
    ),
    "awq w8a16": QuantConfig("w8a16", method="awq"),
    "smoothed": QuantConfig("w8a8", method="smoothquant"),
    "static": QuantConfig("w8a8", activations="static"),
    "smoothed static": QuantConfig("w8a8", method="smoothquant", alpha="search", activations="static"),
    "smoothed mixed": QuantConfig(
        "w8a8",
        method="smoothquant",
        head="w8a16",
        layers={"*.qkv_proj": "w8a16", "layers.1.mlp.*": "none"},
    ),
    "rptq-w8a8": QuantConfig("rptq-w8a8", 32),
    "rptq-w4a8": QuantConfig("rptq-w4a8", 32),
    "rptq-w4a4": QuantConfig("rptq-w4a4", 32),
    "rptq rounded": QuantConfig("rptq-w4a8", 64, method="round", head="w8a16"),
    "rptq mixed": QuantConfig(
        "rptq-w8a8",
        32,
        layers={"*.qkv_proj": "w4a16", "layers.1.mlp.gate_up_proj": "none", "*.1.*.o_proj": "w8a8"},
    ),
}
TURNS = [  # every scheme on a kind in turn, in bf16 or as it is; `make test-all` knows the others
    pytest.param(
        name, kind, dtype, marks=() if (i - j) % 8 == 0 and (i + i // 8) % 2 == half else pytest.mark.slow
    )
    for i, name in enumerate(SCHEMES)
    for j, kind in enumerate(KINDS)
    for half, dtype in enumerate(("bf16", "auto"))
]
SCHEMES |= {  # whose layers round their inputs beside layers whose numbers are chosen
    f"{method} beside w8a8": QuantConfig(
        "w4a16", 32, method=method, layers={"*.gate_up_proj": "w8a8", "layers.1.*": "w8a8"}
    )
    for method in ("gptq", "awq")
}
SCHEMES |= {
    "w8a8-fp8": QuantConfig("w8a8-fp8"),
    "w8a8-fp8 mixed": QuantConfig(
        "w8a8-fp8",
        weight_scales="tensor",
        head="w8a16",
        layers={"*.down_proj": "w8a8", "layers.1.mlp.*": "none"},
    ),
}
SCHEMES["rptq rounded beside w4a16"] = QuantConfig(  # which needs no samples of its own
    "rptq-w8a8", 32, method="round", layers={"*.gate_up_proj": "w4a16"}
)
TURNS += [(f"{method} beside w8a8", "llama", "auto") for method in ("gptq", "awq")]
TURNS += [("rptq rounded beside w4a16", "llama", "auto")]
TURNS += [("w8a8-fp8", "qwen3", "bf16"), ("w8a8-fp8", "llama", "auto"), ("w8a8-fp8 mixed", "gpt2", "auto")]
OFF = {
    "rptq-w4a4": 0.7,
    "rptq mixed": 0.4,
    "w8a8-fp8": 0.2,
    "w8a8-fp8 mixed": 0.2,
}  # of logits, relative; others by their weights' bits


def scheme_of(name: str, kind: str) -> QuantConfig:
    """In the names of the kind's layers; what has layer norms is not rotated."""
    quant = SCHEMES[name]
    if kind not in ("gpt2", "relu"):
        return quant
    layers = {pattern.replace("gate_up", "up"): scheme for pattern, scheme in quant.layers.items()}
    return quant.replace(layers=layers, rotation=False)


@pytest.mark.stays(
    *("rptq-w4a4-tied-auto", "rptq-w4a8-relu-bf16", "rptq-w8a8-gpt2-auto", "static-qwen-bf16"),
    *("w4a16-mistral-auto", "w4a8-tied-auto", "w8a16-llama-bf16", "w8a8-qwen3-bf16", "awq mixed-tied-bf16"),
    "w8a8-fp8-qwen3-bf16",
)
@pytest.mark.parametrize(("name", "kind", "dtype"), TURNS)
def test_it_is_built_described_proven_and_aligned(
    checkpoints: dict[str, Path], samples: Path, made: Made, name: str, kind: str, dtype: str
) -> None:
    quant, checkpoint = scheme_of(name, kind), checkpoints[kind]
    folder = made(kind, quant, dtype=dtype, proof=True)
    manifest = Manifest.read(folder)
    digest = hashlib.sha256(samples.read_bytes()).hexdigest()
    entry = (
        CalibrationEntry(digest, samples=6, tokens=360, length=256 if kind == "qwen" else 128)
        if quant.calibrated
        else None
    )
    assert (manifest.quant, manifest.calibration) == (quant, entry)
    static = any(leaf.endswith(".input_scale") for leaf in manifest.tensors)
    assert static == (quant.activations == "static")
    found = verify(folder, "cpu", note=False)
    assert found.verdict == "proven", found.failures
    llm, exact = LLM(folder, "cpu"), exact_logits(checkpoint)
    most = OFF.get(name, 0.5 if "w4" in quant.scheme else 0.2 if quant.calibrated else 0.1)
    assert 1e-4 < float((llm.logits(IDS) - exact).norm() / exact.norm()) < most
    if dtype == "auto" and not quant.calibrated:
        assert torch.equal(LLM(checkpoint, "cpu", quant=quant).logits(IDS), llm.logits(IDS))
    if dtype == "bf16" and quant.scheme in ("w8a8", "w8a8-fp8", "w4a8"):
        check_floors(folder)
    original = "auto" if dtype == "auto" else "ingot"
    report = align(folder, checkpoint, [random_ids(19)], steps=2, device="cpu", original=original)
    assert report.aligned, report.first_stage
    reported = dict(facts(report))["quantized"]
    assert quant.scheme in reported
    assert "the reference computes with these weights" in reported
    rounds = {"w8a8", "w8a8-fp8", "w4a8"} & {quant.scheme, *quant.layers.values()}
    assert ("rounds activations as it does" in reported) == bool(rounds)
    assert report_json(report)["quantized"] == reported


@functools.cache
def exact_logits(checkpoint: Path) -> torch.Tensor:
    return LLM(checkpoint, "cpu").logits(IDS)


def check_floors(folder: Path) -> None:
    """In 16 bits the engine is within the floors of 16 bits, which are of the size of what really happens."""
    proof = read_proof(folder)
    assert proof is not None
    floors = proof.claims.floors
    assert all(floors["bf16"].modules[n] >= floor for n, floor in floors["fp32"].modules.items())
    narrow = replay(LLM(folder, "cpu", compute_dtype="bf16"), proof.claims, lambda what: None)
    assert not narrow.failures
    assert max(narrow.worst.values()) > 0.1


def dense_reference(checkpoint: Path, quantized: LLM) -> LLM:
    """A dense model whose weights are the quantized one's, dequantized."""
    llm = LLM(checkpoint, "cpu", runtime=RuntimeConfig(fused_decode=False))
    model = llm.engine.model
    if model.tied and not quantized.engine.model.tied:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    own = linears(quantized.engine.model)
    for name, linear in linears(model).items():
        assert isinstance(linear.weight, torch.Tensor)
        linear.weight.copy_(own[name].dequantized(linear.weight.dtype))
    return llm


@pytest.mark.stays("llama-w8a16", "qwen2-w4a16 mixed", "qwen-w4a16 symmetric", "tied-w8a16")
@pytest.mark.grid(1)
@pytest.mark.parametrize("name", WEIGHT_ONLY)
@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_with_what_its_numbers_mean(checkpoints: dict[str, Path], kind: str, name: str) -> None:
    """By modules, and by the small kernels' twins: steps of one row and of several."""
    packed = LLM(checkpoints[kind], "cpu", quant=WEIGHT_ONLY[name])
    stored = RuntimeConfig(fused_decode=False)
    llm = LLM(checkpoints[kind], "cpu", quant=WEIGHT_ONLY[name], runtime=stored)
    reference, prompt = dense_reference(checkpoints[kind], llm), random_ids(30, seed=5)
    for one in (packed, llm):
        torch.testing.assert_close(one.logits(prompt), reference.logits(prompt), rtol=1e-4, atol=1e-4)
    params = SamplingParams(max_new_tokens=8, ignore_eos=True, logprobs=0)
    forward = llm.executor.runner.forward
    for prompts in ([random_ids(9)], [random_ids(n, seed=n) for n in (3, 17, 1)]):
        expected = reference.generate(prompts, params)
        for forward.fused in (False, True):
            if forward.fused:
                assert next(iter(forward.kernels().values())) == "small kernels"  # of few rows
            for one, other in zip(expected, llm.generate(prompts, params), strict=True):
                assert one.token_ids == other.token_ids
                for a, b in zip(one.logprobs, other.logprobs, strict=True):
                    assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        forward.fused = False


@pytest.mark.parametrize(
    ("name", "kind"),
    [("w4a16 mixed", "llama"), ("w4a16 mixed", "gpt2"), ("w8a8", "gpt2"), ("w8a8-fp8", "llama")],
)
def test_batch_invariance(checkpoints: dict[str, Path], name: str, kind: str) -> None:
    """Of a mixture and of layer norms; `tests/e2e/test_same_tokens.py` holds each scheme to it."""
    llm = LLM(checkpoints[kind], "cpu", quant=SCHEMES[name], runtime=RuntimeConfig(batch_invariant=True))
    assert not llm.executor.runner.forward.fused
    prompts = [random_ids(n, seed=n) for n in (3, 17, 1)]
    params = SamplingParams(max_new_tokens=4, ignore_eos=True, logprobs=0)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        alone = llm.generate(prompt, params)[0]
        assert [p.logprob for p in alone.logprobs] == [p.logprob for p in output.logprobs]


def held_bytes(model: Decoder) -> int:
    """Of parameters, and of what linear layers have packed: panels, or 2 bytes per value, rows in whole
    sixteens.
    """
    found = sum(p.nbytes for p in model.parameters())
    for linear in linears(model).values():
        packed = linear.scheme
        if isinstance(packed, HalfPacked):
            parts = [torch.ops.quantized.linear_unpack_fp16(part)[0] for part in packed.parts]
            found += sum(-(-len(part) // 16) * 16 * part.shape[1] * 2 for part in parts)
        elif isinstance(packed, (InPanels, Int8InPanels)):
            held = vars(packed.panels).values()
            found += sum(part.nbytes for part in held if isinstance(part, torch.Tensor))
    return found


@pytest.mark.parametrize("kind", ["llama", "gpt2", "tied"])
@pytest.mark.parametrize("name", [*WEIGHT_ONLY, "w8a8", "w8a8-fp8", "w4a8 plain"])
def test_the_ledger_is_right_to_the_byte(checkpoints: dict[str, Path], kind: str, name: str) -> None:
    engine = LLM(checkpoints[kind], "cpu", quant=SCHEMES[name]).engine
    found = ledger(setting_of(engine.manifest, engine.dtype, engine.device)).items
    reported = sum(i.bytes for i in found if i.kind == "weights" and i.name != "rotary table")
    # Where the values decide how a weight is packed, the larger form counts: with a scale per row.
    spare = [
        m.out_features for m in linears(engine.model).values() if getattr(m.scheme, "split", "") == "groups"
    ]
    assert reported == held_bytes(engine.model) + 4 * sum(spare)


@pytest.mark.usefixtures("without_llvmlite")
@pytest.mark.parametrize("kind", ["llama", "gpt2", "tied"])
@pytest.mark.parametrize("name", [*WEIGHT_ONLY, "w8a8", "w4a8 plain"])
def test_the_ledger_is_right_to_the_byte_without_llvmlite(
    checkpoints: dict[str, Path], kind: str, name: str
) -> None:
    test_the_ledger_is_right_to_the_byte(checkpoints, kind, name)


LEAVES = {  # of a layer, as they are stored; those that a narrow model keeps wide
    "w4a16 mixed": ({"words": "I16", "scales": "BF16", "zeros": "U8"}, {}),
    "w8a8 mixed": ({"weight": "I8", "scales": "F32"}, {"scales": torch.float32, "weight": torch.int8}),
    "w8a8-fp8 mixed": (
        {"weight": "F8_E4M3", "scales": "F32"},
        {"scales": torch.float32, "weight": torch.float8_e4m3fn},
    ),
    "w4a8": (
        {"pairs": "U8", "steps": "U8", "zeros": "U8", "scales": "F32"},
        {"scales": torch.float32, "steps": torch.uint8},
    ),
}


@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.usefixtures("weights_as_stored")
def test_the_manifest_holds_the_scheme_and_every_tensor(made: Made, name: str) -> None:
    folder, again = (made("tied", SCHEMES[name], place, dtype="bf16") for place in "ab")
    assert compare_engines(folder, again).equal
    manifest, prefix = Manifest.read(folder), "layers.0.self_attn.qkv_proj."
    stored, loaded = LEAVES[name]
    own = {n.removeprefix(prefix): e.dtype for n, e in manifest.tensors.items() if n.startswith(prefix)}
    assert list(own.items()) == list(stored.items())
    layer = LLM(folder, "cpu", compute_dtype="bf16").engine.model.layers[0].self_attn.qkv_proj
    assert {leaf: getattr(layer, leaf).dtype for leaf in loaded} == loaded
    head = {n for n in manifest.tensors if n.startswith("lm_head")}
    assert head == ({"lm_head.weight"} if name == "w4a8" else {"lm_head.words", "lm_head.scales"})


def test_what_two_engines_differ_in_is_named(made: Made) -> None:
    folders = {name: made("tied", SCHEMES[name], name) for name in ("w8a16", "w4a8 plain", *LEAVES)}
    for left, right, names in (
        ("w4a16 mixed", "w8a16", {"quant.scheme", "quant.head"}),
        ("w8a8 mixed", "w8a16", {"quant.scheme", "quant.head"}),
        ("w4a8", "w4a8 plain", {"quant.rotation", "quant.group"}),
    ):
        changes = {c.name: (c.left, c.right) for c in compare_engines(folders[left], folders[right]).config}
        assert names <= set(changes)
        schemes = (SCHEMES[left].scheme, SCHEMES[right].scheme)
        assert changes.get("quant.scheme", schemes) == schemes
    assert "lm_head.weight" not in Manifest.read(folders["w4a8 plain"]).tensors  # it is tied there


def test_an_output_product_has_a_scale_a_head(checkpoints: dict[str, Path]) -> None:
    llm = LLM(checkpoints["llama"], "cpu", quant="w8a8")
    groups = {
        name.rpartition(".")[2]: linear.origin.input_group
        for name, linear in linears(llm.engine.model).items()
        if isinstance(linear.origin, Int8Both)
    }
    head_dim = llm.engine.manifest.model.head_dim
    assert groups == {"qkv_proj": 0, "o_proj": head_dim, "gate_up_proj": 0, "down_proj": 0}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("w4a16 mixed", "llama"), ("w8a8", "llama"), ("w8a8", "gpt2"), ("w4a8", "llama"), ("w8a8-fp8", "gpt2")],
)
def test_one_layer_replays(checkpoints: dict[str, Path], name: str, kind: str, dtype: str) -> None:
    llm = LLM(checkpoints[kind], "cpu", quant=SCHEMES[name], compute_dtype=dtype)
    for layer in (0, 1):
        found = replay_layer(capture_layer(llm, random_ids(7), layer), torch.device("cpu"))
        assert (found.agrees, found.repeats) == (True, True)


@pytest.mark.parametrize("quant", ["w4a16", "w8a8", "w4a8", "w8a8-fp8"])
def test_random_weights(checkpoints: dict[str, Path], quant: Any) -> None:
    spec = SideSpec(random_weights=str(checkpoints["tied"]), device="cpu", quant=quant, max_batch_size=2)
    side = open_side(spec)
    assert side.facts()["quantization"] == quant
    assert side.answer([Ask(3, 2)], [[1, 2, 3]]).tokens == (2,)


def test_an_int8_cache_goes_with_4_and_8_bits(made: Made) -> None:
    folder = made("llama", "w4a8", kv_dtype="int8", proof=True)
    assert verify(folder, "cpu", note=False).verdict == "proven"
