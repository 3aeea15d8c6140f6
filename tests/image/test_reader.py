"""Files, PIL images and arrays become the same pixels; files do it in a process with limits."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ingot.config.picture_config import CLIP_MEAN, CLIP_STD, PictureFeatures
from ingot.errors import ConfigError, RequestError
from ingot.image import image_reader as module
from ingot.image.image_decoder import FIRST_FRAME
from ingot.image.image_reader import Picture, PictureReader
from ingot.image.image_worker import LIMITS
from tests.image.pictures import MODEL, SIDE, bicubic, file_of
from tests.image.test_decode import bomb

WIDE = np.random.default_rng(9).integers(0, 256, (40, 70, 3), np.uint8)


@pytest.fixture(scope="module")
def reader() -> Iterator[PictureReader]:
    with PictureReader() as found:
        yield found


def test_all_sources_are_the_same_bits(reader: PictureReader, tmp_path: Path) -> None:
    path = tmp_path / "wide.png"
    path.write_bytes(file_of(WIDE))
    first = torch.from_numpy(WIDE.transpose(2, 0, 1).copy())
    sources = [path, path.read_bytes(), Image.fromarray(WIDE), first, first.numpy(), WIDE.transpose(2, 0, 1)]
    expected = reader.read(path, SIDE)
    assert (expected.values.dtype, expected.notes) == (np.uint8, ())
    for source in sources:
        np.testing.assert_array_equal(reader.read(source, SIDE).values, expected.values)


def test_pixels_are_normalized() -> None:
    picture = Picture(MODEL)
    found = picture.pixels(PictureFeatures(SIDE))
    expected = (MODEL.astype(np.float64) / 255 - np.array(CLIP_MEAN)) / np.array(CLIP_STD)
    assert (found.shape, found.dtype, found.is_contiguous()) == ((3, SIDE, SIDE), torch.float32, True)
    np.testing.assert_allclose(found.numpy(), expected.transpose(2, 0, 1), atol=1e-6)
    other = PictureFeatures(SIDE, mean=(0.5, 0.0, 0.25), std=(1.0, 2.0, 4.0))
    expected = (MODEL / 255 - np.array(other.mean)) / np.array(other.std)
    np.testing.assert_allclose(picture.pixels(other).numpy(), expected.transpose(2, 0, 1), atol=1e-6)
    with pytest.raises(RequestError, match=r"another size.*\(16, 16, 3\).*with side 32"):
        picture.pixels(PictureFeatures(32))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_floats_of_the_right_size_stay_as_they_are(reader: PictureReader, dtype: torch.dtype) -> None:
    values = torch.rand(3, SIDE, SIDE, generator=torch.Generator().manual_seed(0)).to(dtype)
    kept = values.clone()
    picture = reader.read(values.requires_grad_(), SIDE)
    np.testing.assert_array_equal(picture.values, kept.float().permute(1, 2, 0).numpy())
    picture.pixels(PictureFeatures(SIDE))
    torch.testing.assert_close(values.detach(), kept, rtol=0, atol=0)


def test_floats_are_resized_without_rounding(reader: PictureReader) -> None:
    values = WIDE.astype(np.float32) / 255
    expected = np.stack(  # by Pillow, channel by channel in floating point
        [
            np.asarray(Image.fromarray(values[..., c].copy()).resize((SIDE, SIDE), Image.Resampling.BICUBIC))
            for c in range(3)
        ],
        -1,
    ).clip(0, 1)
    for source in (values.transpose(2, 0, 1), values.transpose(2, 0, 1).astype(">f8")):
        np.testing.assert_allclose(reader.read(source, SIDE).values, expected, atol=2e-5)
    stripes = np.zeros((3, 4, 4), np.float32)
    stripes[:, ::2] = 1
    found = reader.read(stripes, SIDE).values
    assert (found.min(), found.max()) == (0, 1)  # bicubic interpolation alone leaves [0, 1] here
    np.testing.assert_allclose(found, bicubic(stripes.transpose(1, 2, 0), SIDE).clip(0, 1), atol=1e-5)


def test_16_bits_are_scaled_by_their_type(reader: PictureReader) -> None:
    values = MODEL.transpose(2, 0, 1).astype(np.uint16) * 257
    for source in (values, torch.from_numpy(values)):
        np.testing.assert_allclose(reader.read(source, SIDE).values, MODEL / 255, atol=1e-7)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            np.zeros((SIDE, SIDE, 3), np.uint8),
            r"\[3, height, width\]; seen: shape \(16, 16, 3\); to fix: put the ch",
        ),
        (torch.zeros(1, 3, 4, 4), r"seen: shape \(1, 3, 4, 4\)"),
        (torch.zeros(3, 0, 4), r"seen: shape \(3, 0, 4\)"),
        (torch.zeros(4, 4), r"seen: shape \(4, 4\)"),
        (np.zeros((), np.uint8), r"seen: shape \(\)"),
        (
            torch.zeros(3, 4, 4, dtype=torch.int64),
            "no known scale; seen: int64; allowed: floats.*to fix: conv.*uint8",
        ),
        (torch.zeros(3, 4, 4, dtype=torch.bool), "no known scale; seen: bool"),
        (np.zeros((3, 4, 4), np.int8), "no known scale; seen: int8"),
        (np.full((3, 4, 4), None), "no known scale; seen: object"),
        (torch.zeros(3, 4, 4, dtype=torch.complex64), "no known scale; seen: complex64"),
        (torch.full((3, 4, 4), 200.0), "out of range; seen: 200 to 200; allowed: 0 to 1; to fix: divide"),
        (torch.full((3, 4, 4), -1.8), "out of range; seen: -1.8 to -1.8"),
        (torch.full((3, 4, 4), 1.001), "out of range"),
        (torch.tensor([0.0, float("nan"), 1.0]).view(3, 1, 1), "no numbers; seen: nan"),
        (torch.tensor([0.0, float("inf"), 1.0]).view(3, 1, 1), "no numbers; seen: 0.0 to inf"),
        (np.full((3, 1, 1), 1e300), "no numbers"),
        (np.broadcast_to(np.uint8(0), (3, 20_000, 20_000)), "too many pixels; seen: 20000 x 20000"),
    ],
)
def test_arrays_that_are_no_pixels(reader: PictureReader, source: Any, text: str) -> None:
    with pytest.raises(RequestError, match=text):
        reader.read(source, SIDE)


def test_a_little_rounding_is_no_fault(reader: PictureReader) -> None:
    values = torch.tensor([-1e-6, 1 + 1e-6, 0.5]).view(3, 1, 1).expand(3, SIDE, SIDE)
    np.testing.assert_array_equal(reader.read(values, SIDE).values[0, 0], [0, 1, 0.5])


def test_images_of_pillow(reader: PictureReader, tmp_path: Path) -> None:
    """Modes, rotation, frames and limits as of files."""
    grey16 = Image.fromarray(np.full((4, 4), 25700, np.uint16))
    assert (reader.read(grey16, 4).values == 100).all()
    exif = Image.Exif()
    exif[274] = 3
    (tmp_path / "turned.png").write_bytes(file_of(MODEL, exif=exif))
    with Image.open(tmp_path / "turned.png") as turned:
        np.testing.assert_array_equal(reader.read(turned, SIDE).values, MODEL[::-1, ::-1])
    colours = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    (tmp_path / "moving.gif").write_bytes(
        file_of(colours[0], "GIF", save_all=True, append_images=colours[1:])
    )
    with Image.open(tmp_path / "moving.gif") as moving:
        first = reader.read(moving, 4)
        moving.seek(1)
        second = reader.read(moving, 4)
    assert (first.notes, second.notes) == ((FIRST_FRAME,), ())
    assert (first.values[0, 0].tolist(), second.values[0, 0].tolist()) == ([255, 0, 0], [0, 0, 255])
    (tmp_path / "cut.png").write_bytes(file_of(MODEL)[:-200])
    with Image.open(tmp_path / "cut.png") as cut, pytest.raises(RequestError, match="damaged or cut off"):
        reader.read(cut, SIDE)
    with pytest.raises(RequestError, match=r"no known scale; seen: mode F"):
        reader.read(Image.new("F", (4, 4)), 4)
    with pytest.raises(RequestError, match="too many pixels"):
        reader.read(Image.new("1", (20_000, 4_000)), 4)


def test_errors_and_notes_come_back_from_the_process(reader: PictureReader, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("milk, bread")
    with pytest.raises(RequestError, match=rf"no picture.*seen: {path}: text; allowed: PNG.*to fix: convert"):
        reader.read(path, SIDE)
    assert 20_000 < len(bomb(20_000)) < 22_000
    with pytest.raises(RequestError, match=r"seen: the bytes: 20000 x 20000 = 400,000,000; allowed: at most"):
        reader.read(bomb(20_000), SIDE)
    frames = [Image.new("L", (4, 4), value) for value in (9, 200)]
    moving = file_of(frames[0], "PNG", save_all=True, append_images=frames[1:])
    picture = reader.read(moving, SIDE)
    assert (picture.notes, set(picture.values.flat)) == ((FIRST_FRAME,), {9})


def test_limits_end_the_process_and_not_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header below the limit of pixels, in a process with too little memory or time for them."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # whose stacks would fill the memory where there are many
    big = file_of(Image.new("1", (8000, 8000)))
    assert len(big) < 100_000
    for limit, text in (
        ({"memory": 350 << 20}, "more than 350 MiB of memory"),
        ({"seconds": 0.05}, "0.05 sec"),
    ):
        monkeypatch.setattr(module, "LIMITS", dataclasses.replace(LIMITS, **limit))
        with PictureReader() as tight:
            with pytest.raises(
                RequestError, match=rf"decoding the picture needs more than.*{text[-8:]}.*smaller"
            ):
                tight.read(big, SIDE)
            if "memory" in limit:
                np.testing.assert_array_equal(tight.read(file_of(MODEL), SIDE).values, MODEL)


def test_the_process_ends_with_its_reader() -> None:
    with PictureReader() as own:
        own.read(file_of(MODEL), SIDE)
        assert own._running is not None
        pid = own._running.process.pid
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files name what to install; arrays of floats need none."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"reading pictures needs Pillow; to fix: pip install.*\[image\]"):
        PictureReader().read(file_of(MODEL), SIDE)
    assert PictureReader().read(torch.zeros(3, 4, 4), SIDE).values.shape == (SIDE, SIDE, 3)


def test_features_are_checked() -> None:
    features = PictureFeatures(56, mean=(0.5, 0.4, 0.3))
    assert PictureFeatures.from_json(json.loads(json.dumps(features.to_json()))) == features
    assert (PictureFeatures(224).mean, PictureFeatures(224).std) == (CLIP_MEAN, CLIP_STD)
    for wrong in (
        *({"side": side} for side in (0, -1, 5000, 2.5, True, "224")),
        *({"mean": mean} for mean in ((0.5, 0.5), (0.5,) * 4, ("a",) * 3, (0.5, 0.5, float("nan")), 0.5)),
        *({"std": std} for std in ((1, 1), (1, 0, 1), (1, -1, 1), (1, 1, float("inf")), None)),
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            PictureFeatures(**{"side": 224, **wrong})
    with pytest.raises(ConfigError, match="no such field"):
        PictureFeatures.from_json({"side": 224, "crop": True})


def test_the_original_s_pixels(reader: PictureReader, golden: Path) -> None:
    """MiniGPT-4's evaluation preprocessing, bit for bit: at 224 by hash, at 56 by value."""
    folder = golden / "minigpt4"
    expected = json.loads((folder / "preprocess_224.json").read_text())["images"]
    crops, small = np.load(folder / "preprocess_224.npz"), np.load(folder / "vision.npz")["pixel_values"]
    for i, (name, facts) in enumerate(expected.items()):
        path = folder / "images" / name
        pixels = reader.read(path, 224).pixels(PictureFeatures(224)).numpy()
        y, x = facts["crop_origin_yx"]
        crop = crops[facts["crop_key"]].astype(np.float32)
        np.testing.assert_allclose(pixels[:, y : y + 32, x : x + 32], crop, atol=1e-3)
        assert hashlib.sha256(pixels.tobytes()).hexdigest() == facts["sha256_float32"]
        found = reader.read(path, 56).pixels(PictureFeatures(56)).numpy()
        np.testing.assert_array_equal(found, small[i])
