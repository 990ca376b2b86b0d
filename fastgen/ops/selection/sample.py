"""Sampling of a token after temperature, top-k, top-p, min-p and typical-p.

The kernel sorts nothing. Each filter keeps the tokens at or above some logit, or within some
distance of one. Bisection over the order of floating-point numbers finds that threshold, in 32 or
33 passes over a row that the device's cache holds. The draw is a maximum over logits plus Gumbel
noise, so no probability is written either.

Sources: Holtzman et al. 2020 (top-p), Nguyen et al. 2024 (min-p), Meister et al. 2023 (typical-p),
Gumbel 1954 and Maddison et al. 2014 (the draw).
"""

import torch
from torch import Tensor

from fastgen.ops.dispatch import constexpr, jit, launch, power_of_two, tl, use_triton

BLOCK = 4096
"""Tokens that a program of the kernel processes at a time."""

_ROUNDING = 3e-6
"""Largest difference of sums of a row's probabilities that are added in different orders."""


def filtered_reference(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
) -> Tensor:
    """Return logits / temperature, with -inf at the tokens that a filter removes.

    The filters apply in the order of the arguments, each to the tokens that remain.

    Args:
        logits: (R, V) floating point. Not modified.
        temperature: > 0.
        top_k: keep the k highest, and those equal to the last of them; 0 for all.
        top_p: keep the most probable up to a total mass of top_p, and those equal to the last of
            them; 1 for all.
        min_p: keep those with at least min_p times the highest probability; 0 for all.
        typical_p: keep those whose negative log-probability is nearest to the entropy, up to a
            total mass of typical_p, and those as near as the last of them; 1 for all.

    Returns:
        (R, V) fp32, or fp64 for fp64.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    if 0 < top_k < wide.shape[1]:
        wide = wide.masked_fill(wide < wide.topk(top_k).values[:, -1:], -torch.inf)
    if top_p < 1.0:
        left = int((wide > -torch.inf).sum(1).max())  # removed tokens need no order
        ordered = wide.topk(max(1, left)).values
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        last = ordered.masked_fill((before >= top_p) & (before > 0), torch.inf).amin(
            1, keepdim=True
        )
        wide = wide.masked_fill(wide < last, -torch.inf)
    if min_p > 0.0:
        wide = wide.masked_fill(
            wide.softmax(-1) < min_p * wide.softmax(-1).amax(1, keepdim=True), -torch.inf
        )
    if typical_p < 1.0:
        log_probs = wide.log_softmax(-1)
        distance = (log_probs - (log_probs * log_probs.exp()).nansum(-1, keepdim=True)).abs()
        ordered, order = distance.sort(-1)
        short = log_probs.exp().gather(1, order).cumsum(-1) < typical_p
        last = ordered.gather(1, short.sum(1, keepdim=True).clamp(max=wide.shape[1] - 1))
        wide = wide.masked_fill(distance > last, -torch.inf)
    return wide


def nucleus(scores: Tensor, top_p: float, least: int = 1, count: int = 64) -> tuple[Tensor, Tensor]:
    """Return a copy of scores with top-p applied, using only the `count` highest of each row.

    Keeps the same tokens as transformers' warper, which sorts whole rows, in a tenth of the time if
    few tokens remain.

    Args:
        scores: (R, V) fp32 or fp64.
        top_p: keep the most probable tokens until their mass reaches top_p.
        least: the least number of tokens to keep.
        count: how many of the highest scores of a row to rank.

    Returns:
        The filtered scores (R, V), -inf at removed tokens; and (R,) bool, False if the result of
        the row is uncertain: `count` was too small, or rounding or the order of equal scores
        decides.
    """
    v = scores.shape[1]
    top, tokens = scores.topk(min(v, max(count, least) + 1))
    # The normaliser covers the whole row; earlier filters may have removed most of it.
    total = torch.logsumexp(
        top if bool((top[:, -1] == -torch.inf).all()) else scores, 1, keepdim=True
    )
    mass = (top - total).exp_().cumsum_(1)
    above = torch.nn.functional.pad(mass[:, :-1], (1, 0))  # mass of the tokens ranked before
    kept = above < top_p
    kept[:, :least] = True
    last, width = kept.sum(1, keepdim=True) - 1, top.shape[1]
    after = torch.where(
        last + 1 < width, top.gather(1, (last + 1).clamp(max=width - 1)), -torch.inf
    )
    sure = ((above - top_p).abs() > _ROUNDING).all(1) & (top.gather(1, last) > after)[:, 0]
    if width < v:
        sure &= last[:, 0] < width - 1
    return torch.full_like(scores, -torch.inf).scatter_(
        1, tokens, top.masked_fill_(~kept, -torch.inf)
    ), sure


def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return a token (R,) int64 per row, drawn from the softmax of `filtered_reference`.

    Arguments as there. The same state of the generator gives the same tokens on the same path;
    kernel and reference draw differently. The toolkits' samplers draw with `torch.multinomial`,
    whose random numbers this function does not reproduce.
    Traffic: one read of the logits from memory; the device's cache serves the passes of the
    bisections.

    Raises:
        ValueError: an option is out of its range, or the rank is wrong; the message holds the
            value.
    """
    if logits.dim() != 2 or not logits.shape[1]:
        raise ValueError(f"logits {tuple(logits.shape)} must be (R, V)")
    for name, value, in_range in (
        ("temperature", temperature, temperature > 0),
        ("top_k", top_k, top_k >= 0),
        ("top_p", top_p, 0 < top_p <= 1),
        ("min_p", min_p, 0 <= min_p <= 1),
        ("typical_p", typical_p, 0 < typical_p <= 1),
    ):
        if not in_range:
            raise ValueError(f"{name} = {value} is out of range")
    if not use_triton(
        "sample", lambda: logits.dtype != torch.float64 and logits.stride(1) == 1, logits
    ):
        probabilities = filtered_reference(
            logits, temperature, top_k, top_p, min_p, typical_p
        ).softmax(-1)
        noise = torch.empty_like(probabilities).exponential_(generator=generator)
        return (probabilities / noise).argmax(-1)
    rows, v = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    seed = torch.randint(
        0, 2**31 - 1, (1,), generator=generator, device=logits.device, dtype=torch.int64
    )
    launch(
        _sample_kernel, (rows,), logits, tokens, seed, v, logits.stride(0), 1.0 / temperature,
        top_k, top_p, min_p, typical_p, TOP_K=0 < top_k < v, TOP_P=top_p < 1.0, MIN_P=min_p > 0.0,
        TYPICAL_P=typical_p < 1.0, BLOCK=min(BLOCK, power_of_two(v)), num_warps=8,
    )  # fmt: skip
    return tokens


@jit()
def _ordered(value):
    """Map floating-point numbers to int32 of the same order."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit()
def _block(row_ptr, start, vocabulary, sharpness, BLOCK: constexpr):
    """Load one block of a row, with temperature applied; -inf beyond its end."""
    token = start + tl.arange(0, BLOCK)
    value = tl.load(row_ptr + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    return token, value * sharpness


@jit()
def _is_left(value, least, highest, min_p, MIN_P: constexpr):
    """Return which tokens remain after top-k, top-p and min-p."""
    left = (_ordered(value) >= least) & (value > float("-inf"))
    if MIN_P:
        left = left & (tl.exp(value - highest) >= min_p)
    return left


@jit()
def _sample_kernel(
    logits_ptr, tokens_ptr, seed_ptr, vocabulary, row_stride, sharpness, top_k, top_p, min_p,
    typical_p, TOP_K: constexpr, TOP_P: constexpr, MIN_P: constexpr, TYPICAL_P: constexpr,
    BLOCK: constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    highest = tl.full([], float("-inf"), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        token, value = _block(row_ptr, start, vocabulary, sharpness, BLOCK)
        highest = tl.maximum(highest, tl.max(value, 0))
    least = tl.full([], -0x80000000, tl.int64)  # the threshold, in the order of `_ordered`
    if TOP_K:
        # Find the largest threshold that at least k tokens reach.
        low, high = tl.full([], -0x80000000, tl.int64), _ordered(highest).to(tl.int64)
        for _ in range(33):
            middle = (low + high + 1) >> 1
            count = tl.full([], 0, tl.int32)
            for start in range(0, vocabulary, BLOCK):
                token, value = _block(row_ptr, start, vocabulary, sharpness, BLOCK)
                count += tl.sum(
                    ((_ordered(value) >= middle) & (token < vocabulary)).to(tl.int32), 0
                )
            low = tl.where(count >= top_k, middle, low)
            high = tl.where(count >= top_k, high, middle - 1)
        least = low
    if TOP_P:
        total_mass = tl.full([], 0.0, tl.float32)
        for start in range(0, vocabulary, BLOCK):
            token, value = _block(row_ptr, start, vocabulary, sharpness, BLOCK)
            total_mass += tl.sum(
                tl.where(_ordered(value) >= least, tl.exp(value - highest), 0.0), 0
            )
        # Find the largest threshold whose tokens have a mass of top_p.
        low, high = least, _ordered(highest).to(tl.int64)
        for _ in range(33):
            middle = (low + high + 1) >> 1
            mass = tl.full([], 0.0, tl.float32)
            for start in range(0, vocabulary, BLOCK):
                token, value = _block(row_ptr, start, vocabulary, sharpness, BLOCK)
                mass += tl.sum(tl.where(_ordered(value) >= middle, tl.exp(value - highest), 0.0), 0)
            low = tl.where(mass >= top_p * total_mass, middle, low)
            high = tl.where(mass >= top_p * total_mass, high, middle - 1)
        least = low
    # A logit, and the largest distance from it in the order of `_ordered`.
    typical, within = highest, tl.full([], 0x7F800000, tl.int64)
    if TYPICAL_P:
        total_mass, weighted = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
        for start in range(0, vocabulary, BLOCK):
            token, value = _block(row_ptr, start, vocabulary, sharpness, BLOCK)
            left = _is_left(value, least, highest, min_p, MIN_P)
            weight = tl.where(left, tl.exp(value - highest), 0.0)
            total_mass += tl.sum(weight, 0)
            weighted += tl.sum(weight * tl.where(left, value - highest, 0.0), 0)
        typical = highest + weighted / total_mass  # its negative log-probability is the entropy
        # Find the smallest distance within which tokens have a mass of typical_p.
        low, high = tl.full([], 0, tl.int64), within
        for _ in range(32):
            middle = (low + high) >> 1
            mass = tl.full([], 0.0, tl.float32)
            for start in range(0, vocabulary, BLOCK):
                token, value = _block(row_ptr, start, vocabulary, sharpness, BLOCK)
                near = _is_left(value, least, highest, min_p, MIN_P) & (
                    _ordered(tl.abs(value - typical)) <= middle
                )
                mass += tl.sum(tl.where(near, tl.exp(value - highest), 0.0), 0)
            high = tl.where(mass >= typical_p * total_mass, middle, high)
            low = tl.where(mass >= typical_p * total_mass, low, middle + 1)
        within = high
    best, drawn = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
    seed = tl.load(seed_ptr)
    for start in range(0, vocabulary, BLOCK):
        token, value = _block(row_ptr, start, vocabulary, sharpness, BLOCK)
        left = _is_left(value, least, highest, min_p, MIN_P)
        if TYPICAL_P:
            left = left & (_ordered(tl.abs(value - typical)) <= within)
        uniform = tl.maximum(tl.rand(seed, row * vocabulary + token), 1e-20)
        noisy = tl.where(left, value - tl.log(-tl.log(uniform)), float("-inf"))
        top = tl.max(noisy, 0)
        first = tl.min(tl.where(noisy == top, token, 0x7FFFFFFF), 0)
        drawn = tl.where(top > best, first, drawn)
        best = tl.maximum(best, top)
    tl.store(tokens_ptr + row, drawn.to(tl.int64))
