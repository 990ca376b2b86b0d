"""`torch.multinomial` without a look at what is drawn from, for which a device would be waited for.

Source: Gumbel 1954 and Maddison et al. 2014: of weights over exponential noise the k largest are k draws without
replacement.
"""

import torch
from torch import Tensor


def draw(weights: Tensor, count: int) -> Tensor:
    """Return what `torch.multinomial(weights, count)` does, with the same random numbers.

    Args:
        weights: (N, V) floating point, finite, none negative, some of each row positive; nobody looks. Not modified.
    Returns:
        (N, count) int64, without replacement.
    """
    noise = torch.empty_like(weights).exponential_()
    ratios = torch.div(weights, noise, out=noise)
    return ratios.argmax(-1, keepdim=True) if count == 1 else ratios.topk(count, -1).indices
