"""How sums of products in 8 bits end, the same in every kernel of many rows, to the bit.

A Gluon kernel takes the function as ``gluon.jit(ended.fn)``.

    y = ended(acc, x_scales[:, None], weight_scales[None, :], None, None, tl.float16)
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr, tensor


@triton.jit
def ended(
    sums: tensor,
    x_scales: tensor,
    weight_scales: tensor,
    bias: tensor,
    residual: tensor,
    DTYPE: constexpr,
) -> tensor:
    """Scale sums by the rows' and the weight's scales, add bias and residual, each if there is one, and round
    once. All of them broadcast over the sums.
    """
    y = sums.to(tl.float32)
    if x_scales is not None:
        y *= x_scales
    if weight_scales is not None:
        y *= weight_scales
    if bias is not None:
        y += bias.to(tl.float32)
    if residual is not None:
        y += residual.to(tl.float32)
    return y.to(DTYPE)
