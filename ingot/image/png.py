"""A picture's values as a file.

Covers the encoding.

    data = png_of(values)               # uint8 [height, width, 3] → the bytes of a PNG
"""

from __future__ import annotations

import io

import numpy as np

from ingot.image.image_decoder import check_package


def png_of(values: np.ndarray) -> bytes:
    """RGB, uint8 [height, width, 3], without a loss.

    Raises:
        RequestError: Pillow is missing.
    """
    check_package()
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    return file.getvalue()
