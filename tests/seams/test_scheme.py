"""A quantization scheme from outside the package: its own two files, two modules that it registers in."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ingot import LLM, RuntimeConfig, build, verify
from ingot.building.source.plain_readings import READINGS, reading_of, register_reading
from ingot.building.source.source_check import compare_with_source
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.quantization.scheme_table import SCHEMES, SchemeInfo, ladder, ladder_schemes, narrow_schemes
from ingot.engine.engine_diff import compare_engines
from ingot.errors import BuildError, ConfigError
from ingot.measure.align.align_session import align
from ingot.measure.evaluate.data_file import read_data
from ingot.measure.evaluate.doctor import Wanted, doctor
from ingot.measure.evaluate.perplexity import perplexity
from ingot.measure.side.side_spec import SideSpec
from ingot.quant.schemes.scheme_registry import MAKERS, register_scheme
from ingot.quant.schemes.weight_only import WeightOnly
from tests.seams import dummy_reading, dummy_scheme
from tests.seams.dummy_scheme import NAME, Dummy8
from tests.seams.registrations import patches, registrations, touched_files
from tests.tiny_models import random_ids, save_model, tiny_config

FILES = ("dummy_scheme.py", "dummy_reading.py")
EXPONENTS = "layers.0.mlp.down_proj.exponents"
IDS = random_ids(20, seed=4)


@pytest.fixture(scope="module")
def registered() -> Iterator[None]:
    dummy_scheme.register()
    dummy_reading.register()
    yield
    del SCHEMES[NAME], MAKERS[NAME], READINGS[Dummy8]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scheme") / "hf"
    save_model(tiny_config("llama"), folder, seed=1)
    return folder


@pytest.fixture(scope="module")
def engine(registered: None, checkpoint: Path) -> Path:
    return build(checkpoint, checkpoint.parent / "engine", quant=NAME, dtype="fp32", device="cpu")


@pytest.fixture(scope="module")
def samples(checkpoint: Path) -> Path:
    path = checkpoint.parent / "ids.jsonl"
    path.write_text("".join(f'{{"token_ids": {random_ids(24, seed=n)}}}\n' for n in range(2)))
    return path


def test_a_scheme_takes_five_files_at_most() -> None:
    assert registrations(*FILES) == {
        "ingot.quant.schemes.scheme_registry.register_scheme",
        "ingot.building.source.plain_readings.register_reading",
    }
    assert patches(*FILES) == []
    assert touched_files(*FILES) <= 5


def test_names_are_refused_that_are_not_registered() -> None:
    with pytest.raises(ConfigError, match=rf"unknown quantization scheme; seen: {NAME}; allowed: .*w4a16"):
        QuantConfig(NAME)
    with pytest.raises(LookupError, match=f"scheme {NAME} has no plain reading"):
        reading_of(Dummy8())


def test_a_registration_is_checked() -> None:
    known, schemes = READINGS[WeightOnly], dict(SCHEMES)
    with pytest.raises(ValueError, match="a scheme named w8a8 is registered already"):
        register_scheme("w8a8", SchemeInfo(8, 8), lambda config, place: Dummy8())
    for info in (SchemeInfo(8, wider="w9a16"), SchemeInfo(8, method=("luck",)), SchemeInfo(8, group=(48,))):
        with pytest.raises(ValueError, match=f"scheme {NAME}: unknown methods, groups or wider scheme"):
            register_scheme(NAME, info, lambda config, place: Dummy8())
    with pytest.raises(ValueError, match="WeightOnly has a plain reading already"):
        register_reading(WeightOnly, known)
    assert schemes == SCHEMES
    assert READINGS[WeightOnly] is known


def test_an_engine_of_it_is_proven_and_answers(engine: Path, checkpoint: Path) -> None:
    found = verify(engine, "cpu", note=False, source=checkpoint)
    assert found.verdict == "proven"
    assert found.source is not None
    llm = LLM(engine, "cpu", max_batch_size=2)
    alone = llm.generate([IDS], max_tokens=4, temperature=0)[0].token_ids
    invariant = LLM(engine, "cpu", max_batch_size=2, runtime=RuntimeConfig(batch_invariant=True))
    assert invariant.generate([IDS, IDS[:5]], max_tokens=4, temperature=0)[0].token_ids == alone


def test_every_measure_takes_it(engine: Path, checkpoint: Path, samples: Path) -> None:
    data = read_data(samples)
    sides = [SideSpec(str(one), device="cpu") for one in (engine, checkpoint)]
    found = perplexity(sides[0], sides[1], data, ())
    assert all(math.isfinite(side["metrics"]["perplexity"]) for side in found.record["sides"])
    diagnosis = doctor(Wanted(str(checkpoint), QuantConfig(NAME), 10.0, device="cpu"), data)
    assert len(diagnosis.layers) == 8
    assert all(layer.kl[NAME] > 0 for layer in diagnosis.layers)
    assert ladder(NAME) == (NAME, "none")
    assert NAME in ladder_schemes()
    assert NAME in narrow_schemes()
    report = align(engine, checkpoint, [IDS], steps=1, device="cpu", original="ingot")
    assert report.aligned, report.first_stage


def test_engines_of_it_are_compared_with_others(engine: Path, checkpoint: Path) -> None:
    options: dict[str, Any] = {"dtype": "fp32", "device": "cpu", "proof": False}
    dense = build(checkpoint, checkpoint.parent / "dense", **options)
    found = compare_engines(engine, dense)
    assert found.incomparable is None
    assert {layer.name for layer in found.layers} >= {"layers.0.mlp.down_proj"}
    again = build(checkpoint, checkpoint.parent / "again", quant=NAME, **options)
    assert not compare_engines(engine, again).tensors


def test_its_tensors_are_judged_by_the_plain_reading(
    registered: None, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = Dummy8._stored_values

    def doubled(self: Dummy8, *given: object) -> dict[str, torch.Tensor]:
        stored = own(self, *given)  # type: ignore[arg-type]
        return stored | {"exponents": stored["exponents"] + 1}

    monkeypatch.setattr(Dummy8, "_stored_values", doubled)
    with pytest.raises(BuildError, match="a stored tensor is not what the checkpoint holds"):
        build(checkpoint, tmp_path / "engine", quant=NAME, dtype="fp32", device="cpu")


def test_a_changed_exponent_is_not_what_the_checkpoint_holds(
    engine: Path, checkpoint: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(engine, tmp_path / "engine")
    weights = load_file(folder / "weights.safetensors")
    weights[EXPONENTS][3] += 1
    save_file(weights, folder / "weights.safetensors")
    found = compare_with_source(folder, checkpoint, torch.device("cpu"))
    assert {one.name for one in found.differences} == {EXPONENTS.replace("exponents", "weight")}
