"""`torch.multinomial` without validation of its input, which would synchronise with the device.

Source: Gumbel 1954 and Maddison et al. 2014: the k largest values of weights divided by exponential
noise are k draws without replacement.
"""

import torch
from torch import Tensor


def draw(weights: Tensor, count: int) -> Tensor:
    """Return the same samples as `torch.multinomial(weights, count)`, from the same random numbers.

    Args:
        weights: (N, V) floating point. Values must be finite and non-negative, with a positive one
            in each row; this is not checked. Not modified.
        count: number of samples per row.

    Returns:
        (N, count) int64, drawn without replacement.
    """
    noise = torch.empty_like(weights).exponential_()
    ratios = torch.div(weights, noise, out=noise)
    return ratios.argmax(-1, keepdim=True) if count == 1 else ratios.topk(count, -1).indices
