"""Rotary position embedding, fused on a device with writing keys and values to their KV slots.

With torch's operators a decode step needs ten launches per layer to rotate queries and keys, and
one more to write the slots. One kernel reads queries, keys and values once, returns the rotated
queries and writes keys and values to their slots.

Source: Su et al. 2021 (RoFormer), section 3.4.2.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.ops.cache import write_slots_
from fastgen.ops.dispatch import constexpr, jit, launch, power_of_two, tl, use_triton

_KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Rotation(NamedTuple):
    """Rotary angles of the first E dimensions of each head.

    Attributes:
        cosine: (1 or R, 1, E), of the queries' dtype, or of fp32 to compute the products in fp32.
        sine: as `cosine`.
        interleaved: whether the two dimensions of a rotated pair are adjacent, instead of E / 2
            apart.
        fp32: whether queries and keys are rounded to fp32 first.
    """

    cosine: Tensor
    sine: Tensor
    interleaved: bool = False
    fp32: bool = False


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """Return x (R, H, D) with the rotation applied."""
    cosine, sine, interleaved, fp32 = rotation
    rotary, rest = x[..., : cosine.shape[-1]], x[..., cosine.shape[-1] :]
    rotary = rotary.float() if fp32 else rotary
    if interleaved:
        swapped = torch.stack([-rotary[..., 1::2], rotary[..., ::2]], -1).flatten(-2)
    else:
        first, second = rotary.chunk(2, -1)
        swapped = torch.cat([-second, first], -1)
    rotary = (rotary * cosine + swapped * sine).to(x.dtype)  # OLMo 2 rotates in fp32
    return torch.cat([rotary, rest], -1) if rest.shape[-1] else rotary


def rotate_into_slots_(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotation: Rotation,
    keys: Tensor,
    values: Tensor,
    start: int | Tensor,
) -> Tensor:
    """Write the newest tokens' rotated keys, and their values, to their KV slots.

    Args:
        query: (R, H, D), R = B * M; the last dimension is contiguous.
        key: (R, Hkv, D), the last dimension contiguous.
        value: (R, Hkv, D), the last dimension contiguous.
        rotation: the angles for queries and keys.
        keys: (B, Hkv, N, D), the buffer of keys, as in `ops.cache.write_slots_`.
        values: (B, Hkv, N, D), the buffer of values.
        start: the first of the M slots of each sentence; (1,) int64 if only the device knows it.

    Returns:
        The rotated queries, (R, H, D).

    Raises:
        ValueError: the shapes do not fit; the message holds them.
    """
    (rows, heads, dims), (b, kv_heads, _, d) = query.shape, keys.shape
    fits = key.shape == value.shape == (rows, kv_heads, d) and dims == d and b > 0 and rows % b == 0
    if not fits:
        raise ValueError(
            f"query {tuple(query.shape)} (R, H, D), key {tuple(key.shape)} and value "
            f"{tuple(value.shape)} (R, Hkv, D) do not fit {tuple(keys.shape)} (B, Hkv, N, D)"
        )
    if not use_triton(
        "rotation",
        lambda: _supported(query, key, value, rotation, keys, values),
        query,
        key,
        value,
        keys,
    ):
        query, key = rotated(query, rotation), rotated(key, rotation)
        write_slots_(keys, values, key[:, :, None], value[:, :, None], start)
        return query
    cosine, sine, interleaved, fp32 = rotation
    out = query.new_empty(query.shape)
    launch(
        _rotate_kernel, (rows, heads + 2 * kv_heads), query, key, value, cosine, sine, out, keys,
        values, start, rows // b, heads, kv_heads, dims, cosine.shape[-1], *query.stride()[:2],
        *key.stride()[:2], *value.stride()[:2], cosine.stride(0) if cosine.shape[0] > 1 else 0,
        *keys.stride()[:3], *values.stride()[:3], NEIGHBOURS=interleaved,
        ROUNDS=cosine.dtype == query.dtype != torch.float32 and not fp32,
        COUNTED=isinstance(start, Tensor),
        BLOCK=power_of_two(dims), num_warps=1 if dims <= 128 else 4,
    )  # fmt: skip
    return out


def _supported(
    query: Tensor, key: Tensor, value: Tensor, rotation: Rotation, *buffers: Tensor
) -> bool:
    cosine, sine = rotation[:2]
    contiguous = all(each.stride(-1) == 1 for each in (query, key, value, cosine, sine, *buffers))
    same = key.dtype == value.dtype == query.dtype and all(
        each.dtype == query.dtype for each in buffers
    )
    angles = (
        cosine.dtype == sine.dtype
        and cosine.dtype in (query.dtype, torch.float32)
        and cosine.stride() == sine.stride()
    )
    return (
        query.dtype in _KERNEL_DTYPES
        and contiguous
        and same
        and angles
        and cosine.shape[-1] % 2 == 0
    )


@jit(
    "beams",
    "heads",
    "kv_heads",
    "start",
    "query_r",
    "key_r",
    "value_r",
    "angle_r",
    "keys_b",
    "values_b",
)
def _rotate_kernel(
    query_ptr, key_ptr, value_ptr, cosine_ptr, sine_ptr, out_ptr, keys_ptr, values_ptr, start,
    beams, heads, kv_heads, dims, turned, query_r, query_h, key_r, key_h, value_r, value_h, angle_r,
    keys_b, keys_h, keys_n, values_b, values_h, values_n, NEIGHBOURS: constexpr, ROUNDS: constexpr,
    COUNTED: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Process one head of one row of the queries, keys or values."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if COUNTED:
        start = tl.load(start)
    sentence, slot = row // beams, start + row % beams
    dim = tl.arange(0, BLOCK)
    is_dim = dim < dims
    if head >= heads + kv_heads:
        head -= heads + kv_heads
        value = tl.load(value_ptr + row * value_r + head * value_h + dim, mask=is_dim)
        tl.store(
            values_ptr + sentence * values_b + head * values_h + slot * values_n + dim,
            value,
            mask=is_dim,
        )
    else:
        if head < heads:
            from_ptr = query_ptr + row * query_r + head * query_h
            to_ptr = out_ptr + (row * heads + head) * dims
        else:
            head -= heads
            from_ptr = key_ptr + row * key_r + head * key_h
            to_ptr = keys_ptr + sentence * keys_b + head * keys_h + slot * keys_n
        if NEIGHBOURS:
            partner, first = dim ^ 1, dim % 2 == 0
        else:
            first = dim < turned // 2
            partner = tl.where(first, dim + turned // 2, dim - turned // 2)
        is_turned = dim < turned
        x = tl.load(from_ptr + dim, mask=is_dim, other=0.0)
        other = tl.load(from_ptr + partner, mask=is_turned, other=0.0).to(tl.float32)
        cosine = tl.load(cosine_ptr + row * angle_r + dim, mask=is_turned, other=0.0).to(tl.float32)
        sine = tl.load(sine_ptr + row * angle_r + dim, mask=is_turned, other=0.0).to(tl.float32)
        cosine_term, sine_term = x.to(tl.float32) * cosine, tl.where(first, -other, other) * sine
        if ROUNDS:  # torch's operators round each product
            cosine_term, sine_term = (
                cosine_term.to(x.dtype).to(tl.float32),
                sine_term.to(x.dtype).to(tl.float32),
            )
        tl.store(
            to_ptr + dim, tl.where(is_turned, (cosine_term + sine_term).to(x.dtype), x), mask=is_dim
        )
