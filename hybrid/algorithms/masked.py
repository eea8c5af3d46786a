"""What a mask leaves of a tensor."""

from __future__ import annotations

import torch
from torch import Tensor


def zero_masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where `mask` (bool) is true, else 0, whatever stands there; float32, float64 for float64.

    Sums over thousands of tokens need more than the 8 bits of a bfloat16.
    """
    precise = values.to(torch.promote_types(values.dtype, torch.float32))
    return torch.where(mask, precise, 0.0)  # selecting, not multiplying: 0 * NaN is NaN
