"""A picture engine's proof is of pixels, encoder and rows in the prompt; what is wrong is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ingot import build
from ingot.building.golden.golden_pictures import exact_pixels, golden_values
from ingot.config.picture_config import PictureFeatures
from ingot.config.runtime_config import RuntimeConfig
from ingot.engine.engine_loader import Engine, load_engine
from ingot.engine.proof_file import read_proof
from ingot.image.image_decoder import png_of
from ingot.image.image_reader import Picture, PictureReader
from ingot.layers.norm import LayerNorm
from ingot.llm.llm import LLM
from ingot.proof.step_check import check_steps
from ingot.proof.verify_engine import verify
from tests.vision.files import LLAMA2, TINY, pixels, write_files
from tests.vision.misplaced import misplace_pictures

VIT, QFORMER = "encoder.vit", "encoder.qformer"


@pytest.fixture(scope="module")
def tiny_engine(long_proofs: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return build(write_files(folder).file, folder / "engine", device="cpu", dtype="fp32")


@pytest.fixture(scope="module")
def joined_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("joined")
    return build(write_files(folder, LLAMA2).file, folder / "engine", device="cpu", dtype="fp32")


def test_the_proof_is_of_the_encoder_and_of_the_rows(tiny_engine: Path) -> None:
    proof = read_proof(tiny_engine)
    assert proof is not None
    claims = proof.claims
    assert [one.size for one in claims.inputs] == [(28, 28), (42, 56)]
    cases = {case.name: case.input for case in claims.cases}
    assert (cases["short"], cases["script"]) == (0, None)  # others have the placeholder's id as a token
    modules = [*claims.inputs[0].modules]
    assert modules[:3] == [f"{VIT}.patch_embedding", f"{VIT}.embed_positions", f"{VIT}.layers.0.self_attn"]
    assert {f"{QFORMER}.layers.{n}.encoder_attn" for n in (0, 2)} < set(modules)
    assert f"{QFORMER}.layers.1.encoder_attn" not in modules
    assert modules[-1] == "encoder.projector"
    assert claims.inputs[0].modules["encoder.ln_vision"].count == 17
    assert claims.inputs[0].modules["encoder.projector"].count == 5
    with_picture = next(case for case in claims.cases if case.input is not None)
    alone = next(case for case in claims.cases if case.input is None)
    assert with_picture.prompt["norm"].count == len(with_picture.prompt_ids) + 5
    assert alone.prompt["norm"].count == len(alone.prompt_ids)


@pytest.mark.parametrize("engine", ["tiny_engine", "joined_engine"])
def test_a_sound_engine_is_proven_far_from_its_limits(engine: str, request: pytest.FixtureRequest) -> None:
    found = verify(request.getfixturevalue(engine), "cpu", note=False)
    assert found.verdict == "proven", found.failures
    assert not found.notes
    assert {"encoder patch_embedding", "encoder ln_vision", "encoder projector"} < set(found.steps)
    assert 0 < max(found.steps.values()) < 0.5
    assert 0 < found.worst["pixels"] < 3


@pytest.mark.stays("w8a16")
@pytest.mark.parametrize("scheme", ["w8a16", "w8a8"])
def test_in_fewer_bits(scheme: str, tmp_path: Path) -> None:
    engine = build(write_files(tmp_path).file, tmp_path / "engine", device="cpu", quant=scheme)
    found = verify(engine, "cpu", note=False)
    assert found.verdict == "proven", found.failures


@pytest.mark.parametrize(("size", "side"), [((28, 28), 28), ((42, 56), 28), ((31, 90), 112), ((200, 64), 28)])
def test_golden_pictures_have_the_pixels_that_requests_have(size: tuple[int, int], side: int) -> None:
    values = golden_values("any", size)
    assert np.array_equal(values, golden_values("any", size))
    exact = exact_pixels(values, side)
    with PictureReader() as reader:
        ours = reader.read(png_of(values), side).pixels(PictureFeatures(side))
    levels = (ours.double() - exact).abs() * torch.tensor(PictureFeatures(side).std).view(3, 1, 1) * 255
    assert float(levels.max()) < 1.01  # a level where a sum is next to the middle of two
    assert float((levels > 0.01).double().mean()) < 1e-3
    pillow = np.asarray(Image.fromarray(values).resize((side, side), Image.Resampling.BICUBIC))
    assert np.mean(np.abs(pillow.astype(int) - _levels(exact)) > 0) < 1e-3


def _levels(exact: torch.Tensor) -> np.ndarray:
    features = PictureFeatures(1)
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (features.mean, features.std))
    return ((exact * std + mean) * 255).round().permute(1, 2, 0).int().numpy()


def test_a_golden_picture_is_no_other_one_when_it_is_turned() -> None:
    values = golden_values("square", (28, 28))
    for other in (values[::-1], values[:, ::-1], values.transpose(1, 0, 2), values[..., ::-1]):
        assert np.abs(other.astype(int) - values).mean() > 20


def _set(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Engine], None]:
    def plant(engine: Engine) -> None:
        tensor = engine.model.get_parameter(name)
        tensor.data.copy_(change(tensor.data).clone())

    return plant


def _module(name: str, attribute: str, value: Any) -> Callable[[Engine], None]:
    return lambda engine: setattr(engine.model.get_submodule(name), attribute, value)


def _eps(prefix: str, value: float) -> Callable[[Engine], None]:
    def plant(engine: Engine) -> None:
        for name, module in engine.model.named_modules():
            if name.startswith(prefix) and isinstance(module, LayerNorm):
                module.eps = value

    return plant


def _twice(engine: Engine) -> None:
    norm = engine.model.get_submodule("encoder.ln_vision")
    once = norm.forward
    norm.forward = lambda x: once(once(x)[0])  # type: ignore[method-assign]


def _halves_swapped(weight: torch.Tensor) -> torch.Tensor:
    return weight.roll(len(weight) // 2, 0)


FAULTS: dict[str, tuple[Callable[[Engine], None], str]] = {
    "embeddings of text": (_set("embed_tokens.weight", lambda w: w * 1.01), "embed_tokens"),
    "patch bias dropped": (_set(f"{VIT}.patch_embedding.bias", lambda b: 0 * b), f"{VIT}.patch_embedding"),
    "patches of BGR": (_set(f"{VIT}.patch_embedding.weight", lambda w: w.flip(1)), f"{VIT}.patch_embedding"),
    "positions of other patches": (
        _set(f"{VIT}.embed_positions.weight", lambda w: torch.cat([w[:1], w[1:].roll(1, 0)])),
        f"{VIT}.embed_positions",
    ),
    "no class token": (_set(f"{VIT}.class_embedding", lambda w: 0 * w), f"{VIT}.embed_positions"),
    "keys with a bias": (
        _set(f"{VIT}.layers.1.self_attn.qkv_proj.bias", lambda b: b + torch.eye(72)[30]),
        f"{VIT}.layers.1.self_attn.qkv_proj (keys)",
    ),
    "eps 1e-5 for 1e-6": (_eps(f"{VIT}.", 1e-5), f"{VIT}.layers.0.input_layernorm"),
    "tanh-GELU": (
        _module(f"{VIT}.layers.0.mlp", "activation", "gelu_tanh"),
        f"{VIT}.layers.0.mlp (activation)",
    ),
    "ln_vision twice": (_twice, "encoder.ln_vision"),
    "ln_vision's eps": (_eps("encoder.ln_vision", 1e-4), "encoder.ln_vision"),
    "one query missing": (
        _set(f"{QFORMER}.queries", lambda w: torch.cat([w[:4], 0 * w[4:]])),
        f"{QFORMER}.norm",
    ),
    "queries' norm": (_eps(f"{QFORMER}.layers.1.self_attn_norm", 1e-3), f"{QFORMER}.layers.1.self_attn_norm"),
    "values for keys": (
        _set(f"{QFORMER}.layers.2.encoder_attn.kv_proj.weight", _halves_swapped),
        f"{QFORMER}.layers.2.encoder_attn.kv_proj",
    ),
    "cross queries": (
        _set(f"{QFORMER}.layers.0.encoder_attn.q_proj.weight", lambda w: w * 1.01),
        f"{QFORMER}.layers.0.encoder_attn.q_proj",
    ),
    "cross output": (
        _set(f"{QFORMER}.layers.0.encoder_attn.o_proj.bias", lambda w: w + 0.01),
        f"{QFORMER}.layers.0.encoder_attn.o_proj",
    ),
    "the text's feed-forward": (
        _set(f"{QFORMER}.layers.1.mlp.down_proj.weight", lambda w: w.roll(1, 1)),
        f"{QFORMER}.layers.1.mlp.down_proj",
    ),
    "last norm": (
        _set(f"{QFORMER}.layers.2.mlp_norm.bias", lambda w: w + 0.01),
        f"{QFORMER}.layers.2.mlp_norm",
    ),
    "projector": (_set("encoder.projector.bias", lambda b: 0 * b), "encoder.projector"),
}


@pytest.mark.stays(
    "embeddings of text",
    "positions of other patches",
    "tanh-GELU",
    "one query missing",
    "cross output",
    "projector",
)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_where_it_is(tiny_engine: Path, fault: str) -> None:
    plant, place = FAULTS[fault]
    runs = RuntimeConfig(cache_tokens=512, encoder_positions=128)
    loaded = load_engine(tiny_engine, torch.device("cpu"), max_seq_len=64, runtime=runs)
    plant(loaded)
    given = pixels(TINY, 2)
    found = check_steps(LLM.of_engine(loaded, runs), tiny_engine, [([5, 7], given[0]), ([9], given[1])], 2)
    assert found.failures[0][0] == place, found.failures


@pytest.mark.stays("projector", "tanh-GELU")
@pytest.mark.parametrize("fault", ["eps 1e-5 for 1e-6", "tanh-GELU", "one query missing", "projector"])
def test_a_fault_fails_verify(tiny_engine: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(*args: Any, **options: Any) -> Engine:
        loaded = load_engine(*args, **options)
        FAULTS[fault][0](loaded)
        return loaded

    monkeypatch.setattr("ingot.proof.verify_engine.load_engine", planted)
    assert verify(tiny_engine, "cpu", note=False).verdict == "failed"


def _pixels_of(
    picture: Picture, features: PictureFeatures, change: Callable[..., torch.Tensor]
) -> torch.Tensor:
    values = torch.from_numpy(picture.values.copy()).permute(2, 0, 1).float() / 255
    return change(values, *(torch.tensor(each).view(3, 1, 1) for each in (features.mean, features.std)))


PREPARED: dict[str, Callable[..., torch.Tensor]] = {
    "ImageNet's mean": lambda x, mean, std: (x - torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)) / std,
    "ImageNet's deviation": lambda x, mean, std: (
        (x - mean) / torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    ),
    "BGR": lambda x, mean, std: (x.flip(0) - mean) / std,
    "mirrored": lambda x, mean, std: (x.flip(2) - mean) / std,
    "on its side": lambda x, mean, std: (x.transpose(1, 2) - mean) / std,
    "of 256 levels": lambda x, mean, std: (x * 255 / 256 - mean) / std,
}


@pytest.mark.stays("BGR", "mirrored")
@pytest.mark.parametrize("fault", PREPARED)
def test_wrong_pixels_fail_verify(tiny_engine: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change = PREPARED[fault]
    monkeypatch.setattr(Picture, "pixels", lambda picture, features: _pixels_of(picture, features, change))
    found = verify(tiny_engine, "cpu", note=False)
    assert [failure.name for failure in found.failures] == ["pixels", "pixels"][: len(found.failures)]
    assert found.verdict == "failed"


def test_another_resize_fails_verify(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = PictureReader.read

    def bilinear(self: PictureReader, source: Any, side: int) -> Picture:
        large = read(self, source, 56).values
        return Picture(np.asarray(Image.fromarray(large).resize((side, side), Image.Resampling.BILINEAR)))

    monkeypatch.setattr(PictureReader, "read", bilinear)
    found = verify(tiny_engine, "cpu", note=False)
    assert found.verdict == "failed"
    assert found.failures[0].name == "pixels"


def _shifted(slots: np.ndarray) -> np.ndarray:
    return np.roll(slots, 1)


def _first_row_twice(slots: np.ndarray) -> np.ndarray:
    taken = np.flatnonzero(slots >= 0)
    slots[taken[1:2]] = slots[taken[:1]]
    return slots


def _backwards(slots: np.ndarray) -> np.ndarray:
    taken = np.flatnonzero(slots >= 0)
    slots[taken] = slots[taken[::-1]]
    return slots


@pytest.mark.stays("_shifted")
@pytest.mark.parametrize("fault", [_shifted, _first_row_twice, _backwards])
def test_rows_in_wrong_places_fail_verify(
    tiny_engine: Path, fault: Callable[[np.ndarray], np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    misplace_pictures(monkeypatch, fault)
    found = verify(tiny_engine, "cpu", note=False)
    assert found.verdict == "failed"
    assert found.first_bad_module == "layers.0.self_attn"


def test_without_pillow_the_rest_is_proven(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    found = verify(tiny_engine, "cpu", note=False)
    assert found.verdict == "proven", found.failures
    assert any("preparation was not compared" in note for note in found.notes)
