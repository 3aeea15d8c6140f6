"""A modality with an encoder from outside the package: two files of its own, four modules to register in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from ingot import LLM, Embeddings, Input, Prompt, build, verify
from ingot.building.calibration.sample_readers import SAMPLE_READERS, reader_of, register_samples
from ingot.building.golden.golden_encoder import GOLDEN_INPUTS, golden_inputs, register_golden_inputs
from ingot.config.encoder_config import EncoderConfig
from ingot.config.modality import MODALITIES, PICTURE, Modality, register_modality
from ingot.config.quantization.quant_config import QuantConfig
from ingot.engine.manifest import Manifest
from ingot.errors import ConfigError
from ingot.measure.align.align_session import align
from ingot.models.model_registry import ARCHITECTURES
from tests.e2e.terminal import ingot
from tests.seams import dummy_modality
from tests.seams.dummy_modality import SERIES, GoldenSeries
from tests.seams.dummy_series import CLASS, DUMMY, KEYS, NAME, PARTS, register_dummy
from tests.seams.registrations import patches, registrations, touched_files
from tests.tiny_models import random_ids, save_model, tiny_config

FILES = ("dummy_modality.py", "dummy_series.py")
CHANNELS, WIDTH, STEPS, TOKEN = 6, 24, 12, 96
BEFORE, AFTER = random_ids(5, seed=4, vocab_size=TOKEN), random_ids(4, seed=5, vocab_size=TOKEN)


def series(steps: int, seed: int) -> torch.Tensor:
    return torch.randn(steps, CHANNELS, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modality") / "hf"
    save_model(tiny_config("llama"), folder, seed=1)
    own = torch.Generator().manual_seed(3)
    tensors = load_file(folder / "model.safetensors")
    for part, shape in zip(PARTS, ((WIDTH, CHANNELS), (32, WIDTH)), strict=True):
        tensors[f"{part}.weight"] = torch.randn(*shape, generator=own) / shape[1] ** 0.5
        tensors[f"{part}.bias"] = torch.randn(shape[0], generator=own) / 4
    save_file(tensors, folder / "model.safetensors")
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config |= dict(zip(KEYS, (CHANNELS, WIDTH, STEPS, TOKEN), strict=True))
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [CLASS], "model_type": NAME}))
    return folder


@pytest.fixture(scope="module")
def registered() -> Iterator[None]:
    dummy_modality.register()
    register_dummy()
    yield
    ARCHITECTURES.remove(DUMMY)
    del MODALITIES[SERIES.name], GOLDEN_INPUTS[SERIES], SAMPLE_READERS[SERIES]


@pytest.fixture(scope="module")
def engine(registered: None, checkpoint: Path) -> Path:
    return build(checkpoint, checkpoint.parent / "engine", dtype="fp32", device="cpu")


@pytest.fixture(scope="module")
def llm(engine: Path) -> LLM:
    return LLM(engine, "cpu", max_batch_size=2)


def test_a_modality_takes_eight_files_at_most() -> None:
    assert registrations(*FILES) == {
        "ingot.config.modality.register_modality",
        "ingot.building.golden.golden_encoder.register_golden_inputs",
        "ingot.building.calibration.sample_readers.register_samples",
        "ingot.models.model_registry.register",
    }
    assert patches(*FILES) == []
    assert touched_files(*FILES) <= 8


def test_names_are_refused_that_are_not_registered() -> None:
    with pytest.raises(ConfigError, match="unknown modality of an encoder; seen: series; allowed"):
        EncoderConfig(32, 12, (0, 6), 8, SERIES.name)
    with pytest.raises(ConfigError, match="no calibration samples are read for this modality"):
        reader_of(SERIES)


def test_a_modality_alone_is_no_proof(checkpoint: Path, tmp_path: Path) -> None:
    register_modality(SERIES)
    register_dummy()
    try:
        with pytest.raises(ConfigError, match=r"no golden inputs are registered.*seen: series"):
            build(checkpoint, tmp_path / "engine", device="cpu")
    finally:
        ARCHITECTURES.remove(DUMMY)
        del MODALITIES[SERIES.name]


def test_a_registration_is_checked() -> None:
    register_modality(PICTURE)  # the same again changes nothing
    with pytest.raises(ValueError, match="another modality is named picture"):
        register_modality(Modality("picture", "a model of something else"))
    with pytest.raises(ValueError, match="modality picture has golden inputs already"):
        register_golden_inputs(PICTURE, GoldenSeries)
    with pytest.raises(ValueError, match="modality picture has a reader of samples already"):
        register_samples(PICTURE, SAMPLE_READERS[PICTURE])
    assert MODALITIES["picture"] is PICTURE
    assert GOLDEN_INPUTS[PICTURE] is not GoldenSeries


def test_an_engine_of_it_is_proven_by_its_golden_inputs(engine: Path, checkpoint: Path) -> None:
    found = verify(engine, "cpu", note=False, source=checkpoint)
    assert found.verdict == "proven", found.failures
    assert "series" in found.worst
    given = golden_inputs(Manifest.read(engine).model)
    assert [one.features.shape for one in given] == [(STEPS, CHANNELS)] * 2


def test_prompts_hold_a_series(llm: LLM, checkpoint: Path) -> None:
    tensors, given = load_file(checkpoint / "model.safetensors"), series(7, seed=8)
    hidden = F.linear(given, tensors[f"{PARTS[0]}.weight"], tensors[f"{PARTS[0]}.bias"])
    rows = F.linear(F.gelu(hidden), tensors[f"{PARTS[1]}.weight"], tensors[f"{PARTS[1]}.bias"])
    prompts = [Prompt([BEFORE, one, AFTER]) for one in (Input(given), Embeddings(rows), Input(-given))]
    answers = llm.generate(prompts, max_new_tokens=5, temperature=0, logprobs=1)
    own, by_hand, other = ([one.logprob for one in found.logprobs or ()] for found in answers)
    assert answers[0].token_ids == answers[1].token_ids
    assert own == pytest.approx(by_hand, abs=1e-4)
    assert own != pytest.approx(other, abs=1e-3)


def test_its_samples_calibrate(registered: None, checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "series.jsonl"
    records = [{"series": series(8, seed=n).tolist(), "token_ids": random_ids(9, seed=n)} for n in range(6)]
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    quant = QuantConfig("w8a16", method="gptq")
    with pytest.raises(ConfigError, match=r'needs calibration data.*"series": \[\[…\]\]'):
        build(checkpoint, tmp_path / "none", quant=quant, device="cpu")
    with pytest.raises(ConfigError, match="only questions about pictures are drawn; seen: a model of series"):
        build(checkpoint, tmp_path / "none", quant=quant, calib=path, calib_prompt_seed=1, device="cpu")
    engine = build(checkpoint, tmp_path / "engine", quant=quant, calib=path, dtype="fp32", device="cpu")
    found = verify(engine, "cpu", note=False, source=checkpoint)
    assert found.verdict == "proven", found.failures
    calibration = Manifest.read(engine).calibration
    assert calibration is not None


def test_verbs_take_it(engine: Path, checkpoint: Path) -> None:
    shown = ingot("inspect", engine)
    assert shown.exit_code == 0, shown.stderr
    assert "a model of series and text" in shown.stdout
    planned = ingot("plan", checkpoint)
    assert planned.exit_code == 0, planned.stderr
    assert "encoder" in planned.stdout


def test_align_says_that_it_knows_no_stages_of_it(engine: Path, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot compare.*series.*speech.*picture.*ingot verify"):
        align(engine, checkpoint, [[5, 6, 7]], device="cpu")
