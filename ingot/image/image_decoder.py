"""Picture files to RGB at a model's size, by Pillow.

A file's first bytes choose one of Pillow's readers; the others are neither asked nor imported.
"""

from __future__ import annotations

import codecs
import importlib
import importlib.util
import io
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ingot.errors import RequestError, to_install

if TYPE_CHECKING:
    from PIL import Image

FORMATS = "PNG, JPEG, WebP, GIF, BMP, TIFF"
MOST_PIXELS = 1 << 26  # of a camera with 64 megapixels
FIRST_FRAME = "the picture has several frames or pages; only the first is read"
Decoded = tuple[np.ndarray, tuple[str, ...]]  # uint8 [side, side, 3], notes for people
_READERS = {  # how a file begins: its format, and the class in PIL that reads it
    rb"\x89PNG\r\n\x1a\n": ("PNG", "PngImagePlugin.PngImageFile"),
    rb"\xff\xd8\xff": ("JPEG", "JpegImagePlugin.JpegImageFile"),
    rb"RIFF....WEBP": ("WebP", "WebPImagePlugin.WebPImageFile"),
    rb"GIF8[79]a": ("GIF", "GifImagePlugin.GifImageFile"),
    rb"BM.{12}[\x0c\x28\x34\x38\x40\x6c\x7c]\0\0\0": ("BMP", "BmpImagePlugin.BmpImageFile"),
    rb"II[*+]\0|MM\0[*+]": ("TIFF", "TiffImagePlugin.TiffImageFile"),
}
_OTHERS = {  # other files that people send
    rb"....ftyp(hei|hev|mif1|msf1)": "HEIC",
    rb"....ftypavi": "AVIF",
    rb"....ftyp": "a video",
    rb"%PDF": "PDF",
    rb"%!PS": "PostScript",
    rb"8BPS": "Photoshop",
    rb"\xff\x0a|....JXL ": "JPEG XL",
    rb"....jP  |\xff\x4f\xff\x51": "JPEG 2000",
    rb"\0\0[\1\2]\0": "an icon",
    rb"(?i)\s*(<!doctype html|<html)": "HTML",
    rb"(\xef\xbb\xbf)?\s*(<[?!].*)?<svg": "SVG",  # after a declaration, comments, a document type
}
_HEAD = 4096  # bytes that say what a file is
_ORIENTATION, _BITS, _PHOTOMETRIC, _WHITE_IS_ZERO = 274, 258, 262, 0  # tags of EXIF and TIFF, and a value
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV")
_TURNS = {  # by EXIF's orientation
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


def check_package() -> None:
    """Raise ``RequestError`` where Pillow is missing."""
    if importlib.util.find_spec("PIL") is None:
        raise RequestError("reading pictures needs Pillow", fix=to_install("image"))


def decode(data: bytes | bytearray | memoryview, side: int) -> Decoded:
    """A file's picture, resized to the square. Raises ``RequestError`` if its format is not supported, it has
    too many pixels, is damaged or cut off.
    """
    if not len(data):
        raise RequestError("the picture is empty", seen="0 bytes", fix="another file")
    head = bytes(data[:_HEAD])
    kind, name = _format(head)
    if kind == "WebP":  # its reader allocates all pixels as it opens the file
        check_size(*_webp_size(head))
    module, _, reader = name.partition(".")
    open_file = getattr(importlib.import_module(f"PIL.{module}"), reader)
    with _decoding(kind):
        image = open_file(io.BytesIO(data))
    return square(image, side, kind)


def square(image: Image.Image, side: int, kind: str = "PIL image") -> Decoded:
    """A picture resized to the square as in MiniGPT-4: bicubic, antialiased, not cropped. Raises
    ``RequestError`` if it has too many pixels, cannot be decoded, or has values without a known scale.
    """
    from PIL.Image import Resampling, Transpose

    check_size(*image.size)
    with _decoding(kind):
        several = getattr(image, "is_animated", False) and image.tell() == 0
        image.load()
        turn = _TURNS.get(_orientation(image))  # after loading, as TIFF's reader turns by itself
        rgb = _rgb(image)
        if turn is not None:
            rgb = rgb.transpose(Transpose[turn])
        values = np.array(rgb.resize((side, side), Resampling.BICUBIC))
    return values, (FIRST_FRAME,) if several else ()


def check_size(width: int, height: int) -> None:
    """Raise ``RequestError`` for a picture of more than ``MOST_PIXELS``."""
    if width * height > MOST_PIXELS:
        seen, allowed = f"{width} x {height} = {width * height:,}", f"at most {MOST_PIXELS:,}"
        raise RequestError("the picture has too many pixels", seen=seen, allowed=allowed, fix="scale it down")


def format_of(data: bytes) -> str:
    """One of ``FORMATS``, by a file's first bytes; raises ``RequestError`` for any other file."""
    return _format(data[:_HEAD])[0]


def png_of(values: np.ndarray) -> bytes:
    """A PNG of RGB values, uint8 [height, width, 3]; raises ``RequestError`` where Pillow is missing."""
    check_package()
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    return file.getvalue()


def _format(head: bytes) -> tuple[str, str]:
    """A format, and the class in PIL that reads it."""
    for begins, found in _READERS.items():
        if re.match(begins, head, re.DOTALL):
            return found
    kinds = (kind for begins, kind in _OTHERS.items() if re.match(begins, head, re.DOTALL))
    seen = next(kinds, None) or ("text" if _is_text(head) else f"unknown content ({head[:8].hex(' ')} …)")
    what, fix = "this is no picture that can be read", "convert it to PNG or JPEG"
    raise RequestError(what, seen=seen, allowed=FORMATS, fix=fix)


def _is_text(head: bytes) -> bool:
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # whose end may cut a character
    except UnicodeDecodeError:
        return False
    return all(c.isprintable() or c.isspace() for c in text)


def _webp_size(head: bytes) -> tuple[int, int]:
    """Width and height in a WebP's header; (0, 0) where it has none."""
    try:
        if head[12:16] == b"VP8X":
            return 1 + int.from_bytes(head[24:27], "little"), 1 + int.from_bytes(head[27:30], "little")
        if head[12:16] == b"VP8L":
            (bits,) = struct.unpack_from("<I", head, 21)
            return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        width, height = struct.unpack_from("<HH", head, 26)
    except struct.error:
        return 0, 0
    return width & 0x3FFF, height & 0x3FFF


def _rgb(image: Image.Image) -> Image.Image:
    """An RGB picture of one in any mode; transparent pixels become white."""
    from PIL import Image

    if image.mode.startswith("I;16"):
        image = _grey_of_16_bits(image)
    if image.mode not in _MODES:
        what, fix = "values of this picture have no known scale", "convert it to 8 bits per channel, RGB"
        raise RequestError(what, seen=f"mode {image.mode}", allowed=", ".join((*_MODES, "I;16")), fix=fix)
    if not image.has_transparency_data:
        return image.convert("RGB")
    clear = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(clear, mask=clear.getchannel("A"))
    return white


def _grey_of_16_bits(image: Image.Image) -> Image.Image:
    """Scaled to 8 bits: Pillow's own conversion clips at 255."""
    from PIL import Image

    tags: Any = getattr(image, "tag_v2", {})
    values = np.asarray(image)
    most = (1 << tags.get(_BITS, (16,))[0]) - 1
    scaled = ((values.astype(np.uint32) * 255 + most // 2) // most).clip(max=255).astype(np.uint8)
    if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
        scaled = 255 - scaled
    grey = Image.fromarray(scaled)
    if "transparency" in image.info:  # the value of transparent pixels
        clear = values == image.info["transparency"]
        grey.putalpha(Image.fromarray(np.where(clear, 0, 255).astype(np.uint8)))
    return grey


def _orientation(image: Image.Image) -> Any:
    """EXIF's orientation; None where there is none, or EXIF is damaged, which harms no pixel."""
    try:
        return image.getexif().get(_ORIENTATION)
    except Exception:
        return None


@contextmanager
def _decoding(kind: str) -> Iterator[None]:
    """Turns Pillow's errors of many types over a damaged file into ours."""
    from PIL import Image

    try:
        yield
    except (RequestError, MemoryError):
        raise
    except Image.DecompressionBombError as error:  # a limit of Pillow's own, when it opens a file
        allowed = f"at most {MOST_PIXELS:,} pixels"
        what, seen = "the picture has too many pixels", f"{kind}: {error}"
        raise RequestError(what, seen=seen, allowed=allowed, fix="scale it down") from None
    except Exception as error:
        seen = f"{kind}: {error}" if str(error) else f"{kind}: {type(error).__name__}"
        fix = "get the file again, or convert it to PNG"
        raise RequestError("the picture is damaged or cut off", seen=seen, fix=fix) from None
