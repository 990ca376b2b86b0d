"""Attention of one decode step over latent vectors, from which keys and values are computed.

A token's keys and values are projections of one latent vector, and all heads share the rotated part
of the keys. With the projections moved to the query and to the output, a head attends to the latent
vectors themselves, so that keys and values never exist.

Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1.
"""

import torch
from torch import Tensor


def latent_attention_reference(
    query: Tensor,
    latents: Tensor,
    rope_keys: Tensor,
    mask: Tensor | None,
    scale: float,
    seen: Tensor | None = None,
) -> Tensor:
    """Return the attention of M beams over latent vectors, written as two einsums.

    Args:
        query: (B, M, H, C + E) floating point; one token per beam, in the space of the latent
            vectors and, after that, of the rotated part.
        latents: (B, 1, N, C), which are keys and values.
        rope_keys: (B, 1, N, E), the rotated part of the keys.
        mask: additive, broadcastable to (B, H, M, N); or None.
        scale: the factor of query times key.
        seen: as in `beam_attention_reference`.

    Returns:
        (B, M, H, C) in the query's dtype.
    Numerics: fp32 (fp64 for fp64) up to the weights, which are rounded to the dtype of `latents`.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    keys = torch.cat([latents, rope_keys], 3)[:, 0]
    scores = torch.einsum("bmhd,bnd->bhmn", query.to(wide), keys.to(wide)).mul(scale)
    if mask is not None:
        scores = scores + mask
    values = latents[:, 0]
    if seen is not None:
        unseen = torch.arange(keys.shape[1], device=keys.device, dtype=torch.int64) >= seen
        scores = scores.masked_fill(unseen, -torch.inf)
        values = values.masked_fill(unseen[:, None], 0.0)
    weights = torch.softmax(scores, -1).to(values.dtype)
    return torch.einsum("bhmn,bnd->bmhd", weights, values)


def latent_attention(
    query: Tensor,
    latents: Tensor,
    rope_keys: Tensor,
    mask: Tensor | None,
    scale: float,
    seen: Tensor | None = None,
) -> Tensor:
    """Return the attention of M beams over latent vectors.

    Three batched products over strided views copy neither part of the keys.

    Args:
        query: as in `latent_attention_reference`, like all arguments.

    Raises:
        ValueError: the shapes do not fit; the message holds them.
    """
    (b, m, h, d), (_, _, n, c) = query.shape, latents.shape
    if latents.shape[:3] != (b, 1, n) or rope_keys.shape != (b, 1, n, d - c):
        raise ValueError(
            f"query {tuple(query.shape)} (B, M, H, C + E) does not fit {tuple(latents.shape)} "
            f"(B, 1, N, C) and {tuple(rope_keys.shape)} (B, 1, N, E)"
        )
    if seen is not None:
        return latent_attention_reference(query, latents, rope_keys, mask, scale, seen)
    folded, keys, rope_keys = query.reshape(b, m * h, d), latents[:, 0], rope_keys[:, 0]
    scores = torch.bmm(folded[..., c:], rope_keys.transpose(1, 2))
    scores.baddbmm_(folded[..., :c], keys.transpose(1, 2), beta=scale, alpha=scale)
    if mask is not None:
        scores.view(b, m, h, n).add_(mask.transpose(1, 2))
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores, -1, dtype=wide).to(keys.dtype)
    return torch.bmm(weights, keys).view(b, m, h, c)
