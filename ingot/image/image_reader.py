"""Pictures of any kind to the pixels that a model takes.

Files are decoded in a process with limits of time and memory; PIL images and arrays are resized here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ingot.config.picture_config import PictureFeatures
from ingot.errors import RequestError
from ingot.image.image_decoder import check_package, check_size, square
from ingot.image.image_source import File, file_bytes
from ingot.image.image_worker import LIMITS, decoded, question
from ingot.sandbox.limited_process import LimitedProcess, ProcessEndedError

if TYPE_CHECKING:
    from PIL.Image import Image

    Source = File | Image | np.ndarray | torch.Tensor

_WORKER = "ingot.image.image_worker"
_ROUNDING = 1e-4  # by which a value may leave [0, 1]


@dataclass(frozen=True)
class Picture:
    """A picture at a model's size.

    Attributes:
        values: RGB [side, side, 3]: uint8, or of an array of floats float32 in [0, 1].
        notes: sentences for the user, such as about frames that were left out.
    """

    values: np.ndarray
    notes: tuple[str, ...] = ()

    def pixels(self, features: PictureFeatures) -> torch.Tensor:
        """Normalized: float32 [3, side, side]; raises ``RequestError`` where the size differs."""
        if self.values.shape != (features.side, features.side, 3):
            seen = f"shape {self.values.shape}"
            fix = f"read the picture with side {features.side}"
            raise RequestError("the picture has another size than the model takes", seen=seen, fix=fix)
        values = torch.from_numpy(self.values.copy()).permute(2, 0, 1)  # [3, side, side]
        if values.dtype == torch.uint8:
            values = values.to(torch.float32).div(255)
        mean, std = (torch.tensor(each).view(3, 1, 1) for each in (features.mean, features.std))
        return values.sub(mean).div(std).contiguous()


class PictureReader(LimitedProcess):
    """Reads pictures. Safe to share between threads, whose files are decoded in turn. The process starts with
    the first file, serves many, and ends with ``close`` or the reader.
    """

    def __init__(self) -> None:
        super().__init__(_WORKER, LIMITS)

    def read(self, source: Source, side: int) -> Picture:
        """A picture resized straight to the square.

        Args:
            source: a path, a data URL, a file's bytes, a file open for reading bytes, a PIL image, or an
                array or tensor [3, height, width] of RGB before normalization: floats in [0, 1], uint8 or
                uint16.

        Raises:
            RequestError: it is no picture, too large, damaged, out of range, or Pillow is missing.
        """
        if isinstance(source, np.ndarray | torch.Tensor):
            return _of_array(source, side)
        check_package()
        from PIL.Image import Image

        if isinstance(source, Image):
            return Picture(*square(source, side))
        name, data = file_bytes(source)
        try:
            return Picture(*decoded(self.ask_bytes(question(data, side)), side))
        except ProcessEndedError as error:
            fix = "send a smaller picture, or convert it to PNG"
            raise RequestError(f"decoding the picture {error}", seen=name, fix=fix) from None
        except RequestError as error:
            raise RequestError(
                error.what, seen=f"{name}: {error.seen}", allowed=error.allowed, fix=error.fix
            ) from None


def _of_array(array: np.ndarray | torch.Tensor, side: int) -> Picture:
    if array.ndim != 3 or array.shape[0] != 3 or not all(array.shape):
        seen, fix = f"shape {tuple(array.shape)}", "put the channels first, without a batch dimension"
        raise RequestError("pixels must be an array [3, height, width]", seen=seen, fix=fix)
    check_size(array.shape[2], array.shape[1])
    kind = str(array.dtype).removeprefix("torch.")
    if isinstance(array, torch.Tensor):
        array = array.detach().cpu()
        array = (array.float() if array.is_floating_point() else array).numpy()
    if kind == "uint8":  # the same bits as for the PIL image of these values
        check_package()
        from PIL.Image import fromarray

        return Picture(*square(fromarray(np.ascontiguousarray(array.transpose(1, 2, 0))), side))
    if array.dtype.kind != "f" and kind != "uint16":
        what, allowed = "pixels of this type have no known scale", "floats in [0, 1], uint8, uint16"
        raise RequestError(what, seen=kind, allowed=allowed, fix="convert values of 0 to 255 to uint8")
    with np.errstate(over="ignore"):  # infinite values are refused below
        values = array.astype(np.float32)
    if kind == "uint16":
        values /= 65535
    low, high = float(values.min()), float(values.max())
    if not np.isfinite([low, high]).all():
        raise RequestError("the pixels have values that are no numbers", seen=f"{low} to {high}")
    if low < -_ROUNDING or high > 1 + _ROUNDING:
        fix = "divide 0 to 255 by 255, and leave out mean and standard deviation, which the model applies"
        raise RequestError("pixels are out of range", seen=f"{low:g} to {high:g}", allowed="0 to 1", fix=fix)
    pixels = torch.from_numpy(values)
    if pixels.shape[1:] != (side, side):
        pixels = torch.nn.functional.interpolate(
            pixels[None], (side, side), mode="bicubic", antialias=True, align_corners=False
        )[0]
    # [side, side, 3], not rounded to 8 bits; overshoot is clipped, as for files
    return Picture(pixels.clamp(0, 1).permute(1, 2, 0).contiguous().numpy())
