"""What a file shows is what a model sees: every mode, every rotation, and refusals by name."""

from __future__ import annotations

import io
import subprocess
import sys
import warnings
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from ingot.errors import RequestError
from ingot.image import image_decoder as module
from ingot.image.image_decoder import FIRST_FRAME, MOST_PIXELS, decode
from tests.image.pictures import MODEL, SIDE, bicubic, file_of, over_white, png

ALPHA = np.random.default_rng(8).integers(0, 256, (SIDE, SIDE), np.uint8)
GREY16 = np.linspace(0, 65535, SIDE * SIDE).round().astype(np.uint16).reshape(SIDE, SIDE)


def seen(data: bytes, side: int = SIDE) -> np.ndarray:
    values, notes = decode(data, side)
    assert (values.shape, values.dtype, notes) == ((side, side, 3), np.uint8, ())
    return values


def grey(values: np.ndarray) -> np.ndarray:
    return np.repeat(values[..., None], 3, -1)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("WEBP", {"lossless": True}),
        ("BMP", {}),
        ("TIFF", {}),
        *(("TIFF", {"compression": c}) for c in ("tiff_lzw", "tiff_adobe_deflate", "packbits")),
    ],
)
def test_exact_formats(kind: str, options: dict[str, object]) -> None:
    np.testing.assert_array_equal(seen(file_of(MODEL, kind, **options)), MODEL)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"icc_profile": b"not a profile"}])
def test_jpeg(options: dict[str, object]) -> None:
    smooth = bicubic(MODEL[:4, :4], 32).round().astype(np.uint8)
    found = seen(file_of(smooth, "JPEG", quality=98, subsampling=0, **options), 32)
    assert np.abs(found.astype(int) - smooth).max() <= 8


@pytest.mark.parametrize("shape", [(40, 70), (9, 33), (5, 3), (16, 64), (300, 8)])
def test_a_picture_is_resized_straight_to_the_square(shape: tuple[int, int]) -> None:
    """Within the rounding of the first pass and of the second."""
    values = np.random.default_rng(3).integers(0, 256, (*shape, 3), np.uint8)
    expected = bicubic(values, SIDE)
    assert np.abs(seen(file_of(values)) - expected).max() <= 1.01
    assert np.abs(seen(file_of(values)) - expected).mean() < 0.4


@pytest.mark.parametrize("shape", [(1, 1), (10, 20_000), (20_000, 10), (1, 70_000)])
def test_extreme_shapes(shape: tuple[int, int]) -> None:
    one = np.array([10, 200, 30], np.uint8)
    np.testing.assert_array_equal(seen(file_of(np.broadcast_to(one, (*shape, 3)).copy())) - one, 0)


# What a viewer does with stored pixels, by EXIF's definition of where row 0 and column 0 are.
SHOWN: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a.swapaxes(0, 1)[:, ::-1],
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: a.swapaxes(0, 1)[::-1],
}


@pytest.mark.parametrize("orientation", SHOWN)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("WEBP", {"lossless": True}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("JPEG", {"quality": 100, "subsampling": 0}),
    ],
)
def test_a_camera_s_rotation_is_applied(kind: str, options: dict[str, object], orientation: int) -> None:
    exif = Image.Exif()
    exif[274] = orientation
    blocks = np.repeat(np.repeat(MODEL[:2, :2], 8, 0), 8, 1)  # whose pixels JPEG keeps
    found = seen(file_of(blocks, kind, exif=exif, **options))
    assert np.abs(found.astype(int) - SHOWN[orientation](blocks)).max() <= (4 if kind == "JPEG" else 0)


def test_a_rotation_comes_before_the_resizing() -> None:
    exif = Image.Exif()
    exif[274] = 6
    wide = np.random.default_rng(4).integers(0, 256, (20, 60, 3), np.uint8)
    np.testing.assert_array_equal(seen(file_of(wide, exif=exif)), seen(file_of(SHOWN[6](wide).copy())))


@pytest.mark.parametrize("exif", [b"Exif\0\0junk", b"Exif\0\0II*\0\xff\xff\xff\xff", b"\0"])
def test_damaged_exif_costs_nothing(exif: bytes) -> None:
    with warnings.catch_warnings(action="ignore"):
        np.testing.assert_array_equal(seen(file_of(MODEL, exif=exif)), MODEL)
    exif_of_no_meaning = Image.Exif()
    exif_of_no_meaning[274] = 9
    np.testing.assert_array_equal(seen(file_of(MODEL, exif=exif_of_no_meaning)), MODEL)


def test_transparent_pictures_stand_on_white() -> None:
    file = file_of(np.concatenate([MODEL, ALPHA[..., None]], -1))
    assert np.abs(seen(file) - over_white(MODEL, ALPHA)).max() <= 0.51
    file = file_of(np.stack([MODEL[..., 0], ALPHA], -1))
    assert np.abs(seen(file) - over_white(grey(MODEL[..., 0]), ALPHA)).max() <= 0.51
    hidden = np.concatenate([MODEL, np.zeros_like(MODEL[..., :1])], -1)
    assert (seen(file_of(hidden, "WEBP", lossless=True, exact=True)) == 255).all()


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_palettes(kind: str) -> None:
    """Also with a colour that is transparent, or as PNG has it, colours that are a little."""
    colours = np.array([[255, 0, 0], [0, 200, 10], [5, 6, 7], [90, 80, 255]], np.uint8)
    index = MODEL[..., 0] % 4
    image = Image.fromarray(index).convert("P")
    image.putpalette(colours.tobytes())
    np.testing.assert_array_equal(seen(file_of(image, kind)), colours[index])
    expected = np.where((index == 2)[..., None], 255, colours[index])
    np.testing.assert_array_equal(seen(file_of(image, kind, transparency=2)), expected)
    if kind == "PNG":
        alpha = np.array([0, 100, 255, 30], np.uint8)
        file = file_of(image, transparency=alpha.tobytes())
        assert np.abs(seen(file) - over_white(colours[index], alpha[index])).max() <= 0.51


def test_one_colour_of_a_png_is_transparent() -> None:
    file = file_of(MODEL, transparency=tuple(map(int, MODEL[3, 5])))
    expected = MODEL.copy()
    expected[3, 5] = 255
    np.testing.assert_array_equal(seen(file), expected)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bits_of_grey_are_scaled(kind: str) -> None:
    found = seen(file_of(GREY16, kind))
    assert np.abs(found - grey(GREY16.astype(np.float64) / 257)).max() <= 0.51
    assert (found.min(), found.max()) == (0, 255)


def test_16_bits_of_other_pngs() -> None:
    raw = GREY16.astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in raw)
    expected = grey((GREY16 / 257).round().astype(np.uint8))
    expected[2, 4] = 255
    found = seen(png(SIDE, SIDE, 16, 0, rows, (b"tRNS", raw[2, 4].tobytes())))
    np.testing.assert_array_equal(found, expected)
    colours = np.stack([raw, raw.T, raw[::-1]], -1)
    found = seen(png(SIDE, SIDE, 16, 2, b"".join(b"\0" + row.tobytes() for row in colours)))
    assert np.abs(found - colours.astype(np.float64) / 257).max() <= 1


def test_fax_and_white_is_zero() -> None:
    lines = MODEL[..., 0] > 127
    for kind, options in (("PNG", {}), ("TIFF", {}), ("TIFF", {"compression": "group4"}), ("BMP", {})):
        found = seen(file_of(Image.fromarray(lines), kind, **options))
        np.testing.assert_array_equal(found, grey(np.where(lines, 255, 0)))
    file = bytearray(file_of(GREY16, "TIFF"))
    tag = file.index(b"\x06\x01\x03\x00\x01\x00\x00\x00\x01")  # photometric interpretation, black is zero
    file[tag + 8] = 0
    assert np.abs(seen(bytes(file)) - (255 - grey(GREY16 / 257))).max() <= 0.51


@pytest.mark.parametrize("kind", ["TIFF", "JPEG"])
def test_cmyk(kind: str) -> None:
    inks = np.repeat(np.repeat(MODEL[:2, :2, [0, 1, 2, 0]] // 2, 8, 0), 8, 1)
    options = {"quality": 100} if kind == "JPEG" else {}
    found = seen(file_of(Image.fromarray(inks, "CMYK"), kind, **options))
    left = 255 - inks.astype(np.float64)
    assert np.abs(found - left[..., :3] * left[..., 3:] / 255).max() <= (6 if kind == "JPEG" else 1.5)


@pytest.mark.parametrize(
    ("kind", "options"), [("GIF", {}), ("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {})]
)
def test_of_an_animation_the_first_frame(kind: str, options: dict[str, object]) -> None:
    first, second = (Image.new("RGB", (SIDE, SIDE), colour) for colour in ("red", "blue"))
    file = file_of(first, kind, save_all=True, append_images=[second], **options)
    values, notes = decode(file, SIDE)
    assert notes == (FIRST_FRAME,)
    np.testing.assert_array_equal(values, np.broadcast_to([255, 0, 0], values.shape))


def test_a_photo_with_a_second_picture_behind_it() -> None:
    """As phones write them: no animation."""
    red, blue = (Image.new("RGB", (SIDE, SIDE), colour) for colour in ("red", "blue"))
    file = file_of(red, "MPO", save_all=True, append_images=[blue])
    assert np.abs(seen(file).astype(int) - [255, 0, 0]).max() <= 2


def bomb(side: int) -> bytes:
    return png(side, side, 8, 0, bytes(side + 1) * 1100)


def test_too_many_pixels() -> None:
    with pytest.raises(RequestError, match=r"too many.*20000 x 20000 = 400,000,000.*at most 67,108,864"):
        decode(bomb(20_000), SIDE)
    webp = b"RIFF\x1e\0\0\0WEBPVP8X\x0a\0\0\0\x10\0\0\0" + 2 * (16382).to_bytes(3, "little")
    with pytest.raises(RequestError, match=r"too many pixels.*16383 x 16383"):
        decode(webp, SIDE)
    gif = bytearray(file_of(np.zeros((4, 4), np.uint8), "GIF"))
    at = gif.index(b",") + 5
    gif[at : at + 4] = b"\x60\xea\x60\xea"  # a frame of 60,000 x 60,000 on a canvas of 4 x 4
    with pytest.raises(RequestError, match="too many pixels"):
        decode(bytes(gif), SIDE)


@pytest.mark.parametrize("options", [{"lossless": True}, {}])
@pytest.mark.parametrize("alpha", [False, True])
def test_the_limit_is_checked_before_a_webp_is_opened(
    options: dict[str, bool], alpha: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = file_of(
        Image.new("RGBA" if alpha else "RGB", (30, 20), (1, 2, 3, 90)[: 3 + alpha]), "WEBP", **options
    )
    monkeypatch.setattr(module, "MOST_PIXELS", 600)
    seen(file)
    monkeypatch.setattr(module, "MOST_PIXELS", 599)
    monkeypatch.setattr("PIL.WebPImagePlugin.WebPImageFile", None)
    with pytest.raises(RequestError, match="30 x 20 = 600"):
        decode(file, SIDE)


def test_the_most_pixels_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_PIXELS >= 9248 * 6944  # of a camera
    monkeypatch.setattr(module, "MOST_PIXELS", SIDE * SIDE)
    np.testing.assert_array_equal(seen(file_of(MODEL)), MODEL)
    with pytest.raises(RequestError, match="16 x 17"):
        decode(file_of(np.concatenate([MODEL, MODEL[:1]])), SIDE)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"a letter", "text"),
        ("Grüße ".encode() * 2000, "text"),
        (b"BM is how this begins", "text"),
        (b'<?xml version="1.0"?>\n<!-- by hand -->\n<svg xmlns="http://www.w3.org/2000/svg">', "SVG"),
        (b" <svg/>", "SVG"),
        (b"<!DOCTYPE html><p>404", "HTML"),
        (b"%PDF-1.7\n\xe2\xe3", "PDF"),
        (b"%!PS-Adobe-3.0 EPSF", "PostScript"),
        (b"\0\0\0\x24ftypheic\0\0\0\0", "HEIC"),
        (b"\0\0\0\x24ftypmif1\0\0\0\0", "HEIC"),
        (b"\0\0\0\x20ftypavif\0\0\0\0", "AVIF"),
        (b"\0\0\0\x20ftypisom\0\0\0\0", "a video"),
        (b"\0\0\1\0\1\0\x10\x10", "an icon"),
        (b"P6 1 1 255 abc", "text"),
        (b"\xff", "unknown content"),
        (bytes(50), "unknown content"),
    ],
)
def test_what_is_no_picture_is_named(data: bytes, named: str) -> None:
    text = (
        rf"no picture that can be read; seen: {named}.*allowed: PNG, JPEG, WebP, GIF, BMP, TIFF; to fix: conv"
    )
    with pytest.raises(RequestError, match=text):
        decode(data, SIDE)


def test_an_empty_file() -> None:
    with pytest.raises(RequestError, match="the picture is empty; seen: 0 bytes"):
        decode(b"", SIDE)


@pytest.mark.parametrize("mode", ["I", "F", "LAB"])
def test_values_without_a_scale_are_refused(mode: str) -> None:
    with pytest.raises(RequestError, match=rf"no known scale; seen: mode {mode};.*8 bits per channel"):
        decode(file_of(Image.new(mode, (4, 4)), "TIFF"), SIDE)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("WEBP", {}),
        ("GIF", {}),
        ("BMP", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
    ],
)
def test_a_file_that_is_cut_off_is_refused(kind: str, options: dict[str, bool]) -> None:
    """Wherever it is cut, unless every pixel is there."""
    file = file_of(MODEL, kind, **options)
    whole, refused = seen(file), 0
    for end in range(len(file)):
        try:
            np.testing.assert_array_equal(seen(file[:end]), whole)
        except RequestError:
            refused += 1
    assert refused >= len(file) - 24  # the checksums and the end of a PNG


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_damage_is_a_refusal_or_another_picture(kind: str) -> None:
    """No other error comes out of Pillow."""
    file, random = file_of(MODEL, kind), np.random.default_rng(5)
    for _ in range(60):
        damaged = bytearray(file)
        for at in random.integers(0, min(len(file), 200), 3):
            damaged[at] = random.integers(0, 256)
        try:
            values, _ = decode(bytes(damaged), 4)
            assert values.shape == (4, 4, 3)
        except RequestError:
            continue


def test_other_readers_of_pillow_are_not_imported() -> None:
    """Nor torch, which would be most of the process's memory."""
    program = (
        "import sys; from ingot.image.image_worker import answer_bytes, question\n"
        f"assert answer_bytes(question({file_of(MODEL)!r}, 4))[0] == b'rgb8'\n"
        "assert answer_bytes(question(b'%!PS-Adobe-3.0 EPSF', 4))[0] == b'fail'\n"
        "print([name for name in sys.modules if name == 'torch' or name.endswith('ImagePlugin')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "['PIL.PngImagePlugin']\n"


def test_an_image_that_pillow_has_only_opened_is_decoded() -> None:
    image = Image.open(io.BytesIO(file_of(MODEL)))
    np.testing.assert_array_equal(module.square(image, SIDE)[0], MODEL)
    np.testing.assert_array_equal(np.asarray(image), MODEL)
