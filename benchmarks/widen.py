"""Widen a trained Marian model without changing what it computes.

The residual stream and all heads and feed-forward units are copied N times. A weight becomes N x N
blocks, each an N-th of it plus noise that cancels over the copies of its input. The model then has
about N^2 times the parameters and the same output, so it stands for a large model whose tokens mean
something.
"""

import copy
import math
from typing import Any

import torch
from torch import Tensor
from transformers import MarianMTModel

NOISE = 0.1
"""Standard deviation of the noise, relative to that of a block."""


@torch.no_grad()
def widened(model: Any, copies: int, seed: int = 0) -> Any:
    """Return a model that is `copies` times as wide.

    Args:
        model: A MarianMTModel in fp32, with tied embeddings.
        copies: N.
        seed: Seed of the noise.
    """
    config = copy.deepcopy(model.config)
    for name in (
        "d_model", "encoder_ffn_dim", "decoder_ffn_dim", "encoder_attention_heads",
        "decoder_attention_heads",
    ):  # fmt: skip
        setattr(config, name, copies * getattr(config, name))
    wide: Any = MarianMTModel(config).eval()
    wide.generation_config = copy.deepcopy(model.generation_config)
    wide.final_logits_bias.copy_(model.final_logits_bias)
    generator = torch.Generator().manual_seed(seed)
    modules = dict(model.model.named_modules())
    for name, module in wide.model.named_modules():
        of = modules[name]
        if isinstance(module, torch.nn.Linear):
            module.weight.copy_(_blocks(of.weight, copies, generator))
            module.bias.copy_(of.bias.repeat(copies))
        elif isinstance(module, torch.nn.LayerNorm):
            module.weight.copy_(of.weight.repeat(copies))
            module.bias.copy_(of.bias.repeat(copies))
        elif "embed_positions" in name:
            module.weight.copy_(of.weight.repeat(1, copies))
    # The head adds up the copies of a hidden state, so the embeddings are an N-th.
    wide.model.shared.weight.copy_(model.model.shared.weight.repeat(1, copies) / copies)
    scale = math.sqrt(model.config.d_model) if model.config.scale_embedding else 1.0
    for part in (wide.model.encoder, wide.model.decoder):
        part.embed_scale = scale * copies
    return wide


def _blocks(weight: Tensor, copies: int, generator: torch.Generator) -> Tensor:
    """Return `copies` x `copies` blocks whose sum over the inputs is the weight (N, K)."""
    blocks = weight.repeat(copies, copies) / copies
    if copies == 1:
        return blocks
    noise = torch.randn(blocks.shape, generator=generator) * (NOISE * weight.std() / copies)
    by_copy = noise.unflatten(1, (copies, -1))
    return blocks + (by_copy - by_copy.mean(1, keepdim=True)).flatten(1)
