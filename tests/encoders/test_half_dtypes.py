"""A dtype for each half: ``encoder=fp16,decoder=fp32``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ingot import LLM, Input, Prompt, SamplingParams, build
from ingot.building.ledger_source import read_setting
from ingot.config.half_dtypes import HalfDtypes
from ingot.config.quantization.quant_config import QuantConfig
from ingot.engine import engine_loader
from ingot.engine.manifest import WEIGHTS_FILE, Manifest
from ingot.engine.proof_file import read_proof
from ingot.errors import ConfigError, EngineError
from ingot.layers.decoder_forward import fuses
from ingot.layers.linear import held_bytes
from ingot.measure.align.align_session import align
from ingot.memory.host_memory import host_ledger
from ingot.memory.ledger import ledger
from ingot.proof.repro_bundle import read_bundle, write_bundle
from ingot.proof.repro_run import capture_layer, replay
from ingot.proof.verify_engine import verify
from ingot.quant.schemes.scheme_registry import make_scheme
from tests.e2e.terminal import ingot
from tests.encoders.conftest import Side
from tests.encoders.speech import FRAMES, MELS
from tests.tiny_models import random_ids, save_model, tiny_config

STORED = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
HALVES = ("encoder=fp16,decoder=fp32", "encoder=fp32,decoder=bf16")
BOTH_16 = "encoder=bf16,decoder=fp16"
CPU = torch.device("cpu")
GREEDY = SamplingParams(max_new_tokens=5, ignore_eos=True)


def spoken(seed: int = 1, tokens: int = 4) -> Prompt:
    features = torch.randn(MELS, FRAMES, generator=torch.Generator().manual_seed(seed))
    return Prompt([Input(features), random_ids(tokens, seed=seed)])


def named(dtypes: str) -> dict[str, str]:
    return dict(part.split("=") for part in dtypes.split(","))


def made(side: Side, folder: Path, dtypes: str, **options: Any) -> Path:
    return build(side.folder, folder / "engine", dtype=dtypes, device="cpu", **options)


@pytest.fixture(scope="module")
def engines(speech: Side, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By their dtypes, with proofs."""
    return {one: made(speech, tmp_path_factory.mktemp("halves"), one) for one in (*HALVES, BOTH_16)}


@pytest.fixture
def computes_as_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU computes in the engine's own dtypes, as a GPU does."""
    monkeypatch.setattr(engine_loader, "compute_dtypes", lambda manifest, *_: manifest.build.dtypes)


@pytest.mark.parametrize("dtypes", HALVES)
def test_each_half_is_stored_in_its_own(engines: dict[str, Path], dtypes: str) -> None:
    engine = engines[dtypes]
    wanted = named(dtypes)
    text = json.loads((engine / "manifest.json").read_text())["build"]
    assert (text["dtype"], text["encoder_dtype"]) == (wanted["decoder"], wanted["encoder"])
    kinds = {half: {"fp16": "F16", "bf16": "BF16", "fp32": "F32"}[name] for half, name in wanted.items()}
    entries = Manifest.read(engine).tensors
    of_half = [
        entry.dtype == kinds["encoder" if n.startswith("encoder.") else "decoder"]
        for n, entry in entries.items()
    ]
    assert all(of_half)
    assert len({entry.dtype for entry in entries.values()}) == 2


@pytest.mark.parametrize("dtypes", HALVES)
def test_a_cpu_computes_with_the_rounded_weights(
    speech: Side, engines: dict[str, Path], tmp_path: Path, dtypes: str
) -> None:
    """As a checkpoint does whose tensors were rounded by hand."""
    rounded = tmp_path / "rounded"
    rounded.mkdir()
    for file in speech.folder.iterdir():
        (rounded / file.name).write_bytes(file.read_bytes())
    wanted = {half: STORED[name] for half, name in named(dtypes).items()}
    tensors = load_file(rounded / "model.safetensors")
    tensors = {
        name: tensor.to(wanted["encoder" if ".encoder." in f".{name}" else "decoder"]).float()
        for name, tensor in tensors.items()
    }
    save_file(tensors, rounded / "model.safetensors", {"format": "pt"})
    found = LLM(engines[dtypes], "cpu")
    assert str(found.engine.dtypes) == "fp32"
    exact, whole = LLM(rounded, "cpu"), speech.open()
    assert torch.equal(found.logits(spoken()), exact.logits(spoken()))
    assert not torch.equal(found.logits(spoken()), whole.logits(spoken()))
    answers = [one.generate(spoken(), GREEDY)[0].token_ids for one in (found, exact)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("dtypes", [*HALVES, BOTH_16])
@pytest.mark.usefixtures("computes_as_built")
def test_proof_and_replay_in_both_arithmetics(engines: dict[str, Path], dtypes: str) -> None:
    """Golden cases, steps place by place, and the encoding, each half judged by its own noise."""
    found = verify(engines[dtypes], "cpu", note=False)
    assert (found.verdict, found.dtype) == ("proven", dtypes)
    assert found.proven_by is not None
    assert found.proven_by["dtype"] == dtypes


def test_a_cpu_verifies_in_fp32(engines: dict[str, Path]) -> None:
    found = verify(engines[HALVES[0]], "cpu", note=False)
    assert (found.verdict, found.dtype) == ("proven", "fp32")


@pytest.mark.parametrize(
    ("dtypes", "fault", "factor", "kind"),
    [
        (HALVES[0], "encoder.norm", 1.1, "module"),
        (HALVES[0], "layers.0.self_attn.o_proj", 1.0005, "module"),  # which fp16 would not show
        (HALVES[0], "layers.1.encoder_attn.kv_proj", 1.0005, "step"),  # likewise; it reads fp16's outputs
        (HALVES[1], "encoder.norm", 1.0005, "module"),
        (HALVES[1], "layers.1.encoder_attn.kv_proj", 1.3, "module"),
    ],
)
@pytest.mark.usefixtures("computes_as_built")
def test_a_fault_is_judged_by_the_noise_of_its_half(
    engines: dict[str, Path],
    dtypes: str,
    fault: str,
    factor: float,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = engine_loader.load_engine

    def faulty(*args: Any, **options: Any) -> Any:
        loaded = load(*args, **options)
        weight = loaded.model.get_submodule(fault).weight
        weight.data = (weight.data.float() * factor).to(weight.dtype)
        return loaded

    monkeypatch.setattr("ingot.proof.verify_engine.load_engine", faulty)
    found = verify(engines[dtypes], "cpu", note=False)
    assert found.verdict == "failed"
    assert kind in {failure.kind for failure in found.failures}


@pytest.mark.parametrize("dtypes", [*HALVES, BOTH_16])
def test_no_noise_is_below_that_of_fp32(engines: dict[str, Path], dtypes: str) -> None:
    """Before the other half's outputs come in, a reference in fp32 differs from itself by nothing."""
    proof = read_proof(engines[dtypes])
    assert proof is not None
    floors = proof.claims.floors
    assert set(floors) == {"fp32", dtypes}
    least, own = floors["fp32"].modules, floors[dtypes].modules
    assert all(own[name] >= least[name] for name in least)
    halves = {
        half: [v / least[n] for n, v in own.items() if n.startswith("encoder.") == half]
        for half in (True, False)
    }
    rounded = [half for half, ratios in halves.items() if min(ratios) > 10]
    names = named(dtypes)
    assert rounded == [
        half for half, name in ((True, "encoder"), (False, "decoder")) if names[name] != "fp32"
    ]


@pytest.mark.parametrize("dtypes", ["encoder=bf16,decoder=fp32", "encoder=fp32,decoder=bf16"])
def test_the_decoder_takes_the_outputs_in_its_own_dtype(speech: Side, dtypes: str) -> None:
    """The encoder is that of a model in its dtype, bit by bit, and its outputs are cast behind it."""
    mixed, plain = (
        LLM(speech.folder, "cpu", compute_dtype=name) for name in (dtypes, named(dtypes)["encoder"])
    )
    own, decoder = (STORED[named(dtypes)[half]] for half in ("encoder", "decoder"))
    model = mixed.engine.model
    assert (model.encoder_dtype, model.dtype, str(mixed.engine.dtypes)) == (own, decoder, dtypes)
    features = torch.randn(MELS, FRAMES, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        given, wanted = model.encode(features), plain.engine.model.encode(features)
    assert (given.dtype, wanted.dtype) == (decoder, own)
    assert torch.equal(given, wanted.to(decoder))
    cache = mixed.executor.runner.caches[0]
    assert cache.encoded is not None
    assert cache.encoded.keys.dtype == decoder
    assert len(mixed.generate(spoken(), GREEDY)[0].token_ids) == 5
    model.layers[0].mlp.up_proj.scheme = make_scheme(QuantConfig("w8a16"))
    assert not fuses(model)  # only 16 bits have kernels for it


def test_rows_of_pictures_are_spliced_in_the_decoder_s_dtype(pictures: Side, tmp_path: Path) -> None:
    engine = made(pictures, tmp_path, "encoder=bf16, llm=fp32", proof=False)
    assert Manifest.read(engine).build.dtypes == HalfDtypes("fp32", "bf16")
    llm = LLM(engine, "cpu", compute_dtype="encoder=bf16,decoder=fp32")
    encoding = llm.executor.runner.encoding
    assert encoding is not None
    assert encoding._rows.dtype == torch.float32
    config = llm.engine.manifest.model
    assert config.encoder is not None
    shape = llm.engine.model.encoder.longest  # type: ignore[union-attr]
    picture = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = llm.generate(Prompt([Input(picture), [5, 6]]), GREEDY)[0]
    assert len(found.token_ids) == 5
    with torch.inference_mode():
        encoded = llm.engine.model.encode(picture)
    assert all(bool((encoding._rows == row).all(1).any()) for row in encoded)


@pytest.mark.parametrize(("dtypes", "original"), list(zip(HALVES, ("hf", "ingot"), strict=True)))
def test_align_finds_nothing(speech: Side, engines: dict[str, Path], dtypes: str, original: str) -> None:
    """The original's weights are rounded to each half's dtype."""
    report = align(engines[dtypes], str(speech.folder), device="cpu", original=original, steps=1)
    assert (report.first, report.findings, report.dtype) == (None, [], "fp32")
    assert report.tensors is not None
    assert report.tensors.differences == ()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtypes", HALVES)
def test_plan_counts_each_half_in_its_dtype(
    speech: Side, engines: dict[str, Path], dtypes: str, device: Any
) -> None:
    engine = engines[dtypes]
    setting = read_setting(str(engine), device=device)
    assert setting == replace(
        read_setting(str(speech.folder), dtype="auto" if device == "cpu" else dtypes, device=device),
        stored_dtype=setting.stored_dtype,
        stored_encoder_dtype=setting.stored_encoder_dtype,
    )
    computes = "fp32" if device == "cpu" else dtypes
    llm = LLM(engine, "cpu", compute_dtype=computes)
    bill = {item.name: item for item in ledger(setting).items if item.kind == "weights"}
    assert llm.engine.model.encoder is not None
    assert bill["encoder"].bytes == held_bytes(llm.engine.model.encoder)
    assert sum(item.bytes for item in bill.values()) == held_bytes(llm.engine.model)
    assert bill["encoder"].note == ("fp32" if device == "cpu" else named(dtypes)["encoder"])
    stored = (engine / WEIGHTS_FILE).stat().st_size
    assert 0 <= host_ledger(setting).build_disk - stored < 64 << 20


def test_a_layer_of_the_encoder_is_captured_in_its_dtype(speech: Side, tmp_path: Path) -> None:
    llm = LLM(speech.folder, "cpu", compute_dtype="encoder=bf16,decoder=fp32", max_batch_size=2)
    for half, dtype in (("encoder", "bf16"), ("decoder", "fp32")):
        captured = capture_layer(llm, spoken(), 0, 0, half=half)
        write_bundle(tmp_path / "b.safetensors", captured)
        found = replay(read_bundle(tmp_path / "b.safetensors"), CPU)
        assert (captured.facts.dtype, found.agrees, found.against_output) == (dtype, True, 0)


def test_the_command_line(speech: Side, tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    options = ("--device", "cpu", "--no-proof", "--dtype", "encoder=fp16")
    done = ingot("build", speech.folder, "-o", engine, *options)
    assert done.exit_code == 0, done.output
    shown = " ".join(ingot("inspect", engine).stdout.split())
    assert "weights encoder=fp16,decoder=fp32 (checkpoint: fp32)" in shown
    planned = ingot("plan", engine, "--gpu", "24GiB", "--json").stdout
    assert json.loads(planned)["setting"]["encoder_dtype"] == "fp16"


def test_one_dtype_for_both_is_the_same_engine(speech: Side, tmp_path: Path) -> None:
    one, two = (
        build(speech.folder, tmp_path / f"{place}", dtype=dtype, device="cpu", proof=False)
        for place, dtype in enumerate(("fp16", "decoder=float16,encoder=fp16"))
    )
    for name in (WEIGHTS_FILE, "manifest.json"):
        assert (one / name).read_bytes() == (two / name).read_bytes()


@pytest.mark.parametrize(
    "dtypes",
    [
        "encoder=fp16,vision=fp32",
        "encoder=fp16,encoder=fp32",
        "decoder=fp16,llm=fp32",
        "=fp16",
        "encoder=fp16,",
        "a=b=c",
    ],
)
def test_halves_that_are_not_named_well(speech: Side, tmp_path: Path, dtypes: str) -> None:
    with pytest.raises(ConfigError, match=r"halves of a model.*encoder=DTYPE,decoder=DTYPE") as error:
        made(speech, tmp_path, dtypes)
    assert error.value.field == "dtype"


@pytest.mark.parametrize("dtypes", ["encoder=int8", "encoder=,decoder=fp16", "decoder=fp16=2"])
def test_dtypes_that_are_not_there(speech: Side, tmp_path: Path, dtypes: str) -> None:
    with pytest.raises(ConfigError, match="unknown dtype"):
        made(speech, tmp_path, dtypes)


def test_a_model_of_one_half(tmp_path: Path) -> None:
    save_model(tiny_config("llama"), tmp_path)
    with pytest.raises(ConfigError, match="llama model has no encoder") as error:
        build(tmp_path, tmp_path / "engine", dtype="encoder=fp16,decoder=bf16", device="cpu")
    assert (error.value.field, error.value.fix) == ("dtype", "`dtype=bf16`")
    done = ingot("build", tmp_path, "-o", tmp_path / "engine", "--dtype", "decoder=fp16")
    assert done.exit_code == 2
    assert "--dtype fp16" in " ".join(done.stderr.split())
    assert not (tmp_path / "engine").exists()


def test_a_manifest_with_another_dtype_is_refused(speech: Side, tmp_path: Path) -> None:
    engine = made(speech, tmp_path, HALVES[0], proof=False)
    text = (engine / "manifest.json").read_text()
    assert text.count('"encoder_dtype": "fp16"') == 1
    (engine / "manifest.json").write_text(text.replace('"encoder_dtype": "fp16"', '"encoder_dtype": "int3"'))
    with pytest.raises(EngineError, match="unknown dtype"):
        Manifest.read(engine)
