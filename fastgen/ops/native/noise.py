"""Random numbers of torch's generator for CPUs, made in C."""

import torch

from fastgen.ops.native import Library

_STATE = 5056
"""Bytes of the generator's state, which C reads."""

_COUNTS = 3, 313
"""Lengths of compared noise. A generator refreshes its state every 312 numbers."""


def is_torchs(by: Library) -> bool:
    """Return whether `exponential_noise` makes the numbers of `Tensor.exponential_`.

    It does unless torch draws them by MKL, as it may on Intel processors.
    """
    generator = torch.Generator("cpu").manual_seed(1)
    state = generator.get_state()
    if len(state) != _STATE:
        return False
    for count in _COUNTS:
        wanted = torch.empty(count, dtype=torch.float32, device="cpu")
        found = torch.full_like(wanted, torch.nan)
        wanted.exponential_(generator=generator)
        by.exponential_noise(by.run, 1, found.data_ptr(), state.data_ptr(), count)
        if not torch.equal(found, wanted) or not torch.equal(state, generator.get_state()):
            return False
    return True
