"""What every attention kernel takes a score to be: an exponent of 2, finite even where it is masked.

weight = tl.exp2(score * LOG2_E - top)    # top starts at LEAST_SCORE
"""

from __future__ import annotations

import math

import triton.language as tl

LOG2_E = math.log2(math.e)
LEAST_SCORE = tl.constexpr(-1.0e38)  # finite, so that exp2(masked - running maximum) is 0 and never NaN
