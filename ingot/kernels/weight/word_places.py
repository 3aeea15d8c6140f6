"""Where a weight's words lie, for kernels that read tiles of rows and columns.

Owns the addresses of the layout that stored_weight.py describes. Knows no product.

    words = tl.load(word_places(weight_ptr, weight_stride, rows, cols))
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor


@triton.jit
def word_places(ptr: tensor, stride: tensor, rows: tensor, cols: tensor) -> tensor:
    """Pointers to words [N, W]; ``stride`` words a row, four neighbouring columns side by side."""
    row = rows.to(tl.int64) // 16 * (16 * stride) + rows % 16 // 2 * 32 + rows % 2 * 4
    column = cols // 32 * 512 + cols % 8 // 4 * 256 + cols % 32 // 8 * 8 + cols % 4
    # The compiler does not see that four are neighbours, and would copy them one by one.
    return ptr + tl.max_contiguous(tl.multiple_of(row[:, None] + column[None, :], (4, 4)), (1, 4))
