"""Drawing a token from the distribution that temperature, top-k, top-p, min-p and typical-p leave.

Nothing is sorted. Each filter keeps the tokens at or above some logit, or within some distance of one, and that
threshold is found by bisection over the order of floating-point numbers: 32 passes over a row that the device's cache
holds. The draw is a maximum over logits plus Gumbel noise, so that no probability is written either.

Sources: Holtzman et al. 2020 (top-p), Nguyen et al. 2024 (min-p), Meister et al. 2023 (typical-p), Gumbel 1954 and
Maddison et al. 2014 (the draw).
"""

import torch
from torch import Tensor

from fastgen.ops.dispatch import constexpr, jit, launch, power_of_two, tl, use_triton

BLOCK = 4096
"""Tokens that a program of the kernel looks at together."""

_ROUNDING = 3e-6
"""How far sums of a row's probabilities may be apart that add them in another order."""


def filtered_reference(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
) -> Tensor:
    """Return logits / temperature, -inf where a filter leaves a token out; in this order, each on what is left.

    Args:
        logits: (R, V) floating point. Not modified.
        temperature: > 0.
        top_k: keep the k highest and what equals the last of them; 0 for all.
        top_p: keep the most probable ones up to a mass of top_p in all, and what equals the last of them; 1 for all.
        min_p: keep those with at least min_p times the highest probability; 0 for all.
        typical_p: keep those whose negative log-probability is nearest to the entropy, up to a mass of typical_p in
            all, and what is as near as the last of them; 1 for all.
    Returns:
        (R, V) fp32, or fp64 for fp64.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    if 0 < top_k < wide.shape[1]:
        wide = wide.masked_fill(wide < wide.topk(top_k).values[:, -1:], -torch.inf)
    if top_p < 1.0:
        left = int((wide > -torch.inf).sum(1).max())  # what is out already needs no order
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
    """Return a copy of scores with -inf at what top-p leaves out, found among the `count` highest of each row.

    The same tokens as transformers' warper leaves, which sorts whole rows, at a tenth of the time where few are left.

    Args:
        scores: (R, V) fp32 or fp64.
        top_p: keep the most probable tokens, until those kept have a mass of top_p.
        least: keep as many at least.
    Returns:
        (R, V), and (R,) bool: False where this is not known, as the highest `count` are too few, or as rounding or the
        order of equal scores decides.
    """
    v = scores.shape[1]
    top, where = scores.topk(min(v, max(count, least) + 1))
    # The normaliser is that of the whole row, most of which may be out already.
    total = torch.logsumexp(
        top if bool((top[:, -1] == -torch.inf).all()) else scores, 1, keepdim=True
    )
    mass = (top - total).exp_().cumsum_(1)
    above = torch.nn.functional.pad(mass[:, :-1], (1, 0))  # of those ranked before
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
        1, where, top.masked_fill_(~kept, -torch.inf)
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
    """Return a token (R,) int64 per row, drawn from the softmax of `filtered_reference`; arguments as there.

    The same state of the generator gives the same tokens on the same path; kernel and reference draw differently. The
    toolkits' samplers draw with `torch.multinomial`, whose random numbers this does not repeat.
    Traffic: one read of the logits from memory, the passes of the bisections from the device's cache.

    Raises:
        ValueError: an option out of its range, or a wrong rank; the message holds the value.
    """
    if logits.dim() != 2 or not logits.shape[1]:
        raise ValueError(f"logits {tuple(logits.shape)} must be (R, V)")
    for name, value, fine in (
        ("temperature", temperature, temperature > 0),
        ("top_k", top_k, top_k >= 0),
        ("top_p", top_p, 0 < top_p <= 1),
        ("min_p", min_p, 0 <= min_p <= 1),
        ("typical_p", typical_p, 0 < typical_p <= 1),
    ):
        if not fine:
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
        _sample_kernel, (rows,), logits, tokens, seed, v, logits.stride(0), 1.0 / temperature, top_k, top_p, min_p,
        typical_p, TOP_K=0 < top_k < v, TOP_P=top_p < 1.0, MIN_P=min_p > 0.0, TYPICAL_P=typical_p < 1.0,
        BLOCK=min(BLOCK, power_of_two(v)), num_warps=8,
    )  # fmt: skip
    return tokens


@jit()
def _ordered(value):
    """Floating-point numbers as int32 of the same order."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit()
def _block(row_ptr, start, vocabulary, sharpness, BLOCK: constexpr):
    """One block of a row, tempered; -inf beyond its end."""
    token = start + tl.arange(0, BLOCK)
    value = tl.load(row_ptr + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    return token, value * sharpness


@jit()
def _is_left(value, least, highest, min_p, MIN_P: constexpr):
    """Whether tokens are left by top-k, top-p and min-p."""
    left = (_ordered(value) >= least) & (value > float("-inf"))
    if MIN_P:
        left = left & (tl.exp(value - highest) >= min_p)
    return left


@jit()
def _sample_kernel(
    logits_ptr, tokens_ptr, seed_ptr, vocabulary, row_stride, sharpness, top_k, top_p, min_p, typical_p,
    TOP_K: constexpr, TOP_P: constexpr, MIN_P: constexpr, TYPICAL_P: constexpr, BLOCK: constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    highest = tl.full([], float("-inf"), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        token, value = _block(row_ptr, start, vocabulary, sharpness, BLOCK)
        highest = tl.maximum(highest, tl.max(value, 0))
    least = tl.full([], -0x80000000, tl.int64)  # the threshold, in the order of _ordered
    if TOP_K:
        # The largest threshold that at least k tokens reach.
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
        whole = tl.full([], 0.0, tl.float32)
        for start in range(0, vocabulary, BLOCK):
            token, value = _block(row_ptr, start, vocabulary, sharpness, BLOCK)
            whole += tl.sum(tl.where(_ordered(value) >= least, tl.exp(value - highest), 0.0), 0)
        # The largest threshold whose tokens have a mass of top_p.
        low, high = least, _ordered(highest).to(tl.int64)
        for _ in range(33):
            middle = (low + high + 1) >> 1
            mass = tl.full([], 0.0, tl.float32)
            for start in range(0, vocabulary, BLOCK):
                token, value = _block(row_ptr, start, vocabulary, sharpness, BLOCK)
                mass += tl.sum(tl.where(_ordered(value) >= middle, tl.exp(value - highest), 0.0), 0)
            low = tl.where(mass >= top_p * whole, middle, low)
            high = tl.where(mass >= top_p * whole, high, middle - 1)
        least = low
    typical, within = (
        highest,
        tl.full([], 0x7F800000, tl.int64),
    )  # a logit, and how far one may be from it, as _ordered
    if TYPICAL_P:
        whole, weighted = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
        for start in range(0, vocabulary, BLOCK):
            token, value = _block(row_ptr, start, vocabulary, sharpness, BLOCK)
            left = _is_left(value, least, highest, min_p, MIN_P)
            share = tl.where(left, tl.exp(value - highest), 0.0)
            whole += tl.sum(share, 0)
            weighted += tl.sum(share * tl.where(left, value - highest, 0.0), 0)
        typical = highest + weighted / whole  # its negative log-probability is the entropy
        # The smallest distance within which tokens have a mass of typical_p.
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
            high = tl.where(mass >= typical_p * whole, middle, high)
            low = tl.where(mass >= typical_p * whole, low, middle + 1)
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
