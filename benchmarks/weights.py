"""Random weights with which beam search neither ties nor repeats one token forever.

With transformers' own initialisation the logits are almost equal, so that rounding decides. Deep
random decoders also collapse: the output of the attention layers and the mean of the activations
are nearly the same at every step and outweigh the current token, so one token is repeated. The
weights here differ in four ways. Projections are large (`gain`), the output of the decoder's
attention layers is damped (`mixing`), the second feed-forward matrices ignore the mean of their
input, and the logits spread over a few nats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

QUERY_AND_KEY_GAIN = 1.5
FEED_FORWARD_OUTPUTS = ("fc2", "DenseReluDense.wo", "mlp.c_proj", "mlp.down_proj")
ATTENTION_OUTPUTS = (
    "self_attn.out_proj",
    "encoder_attn.out_proj",
    "SelfAttention.o",
    "EncDecAttention.o",
)


@dataclass(frozen=True)
class Weights:
    """Distribution of the random weights.

    Attributes:
        gain: standard deviation of a projection's output for unit input.
        embedding: standard deviation of the embeddings, which are tied to the output projection.
        mixing: factor on the output projections of the decoder's attention layers.
        final_norm: factor on the last normalisation before the output projection, hence on all
            logits.
    """

    gain: float
    embedding: float
    mixing: float = 1.0
    final_norm: float = 1.0

    def fill(self, model: nn.Module, decoder: nn.Module, seed: int = 0) -> None:
        """Overwrite the weight matrices of `model`.

        Biases, normalisations (except for `final_norm`) and fixed position tables stay.

        Args:
            model: the model.
            decoder: the part of it that generates; `model` itself if it is decoder-only.
            seed: seed of the random numbers.
        """
        import torch
        from torch import nn
        from transformers.pytorch_utils import Conv1D

        generator = torch.Generator().manual_seed(seed)
        in_decoder = set(decoder.modules())
        filled, last_norm = set(), None
        with torch.no_grad():
            for name, module in model.named_modules():
                leaf = name.rsplit(".", 1)[-1]
                if leaf in ("final_layer_norm", "ln_f", "norm") and module in in_decoder:
                    last_norm = module
                if (
                    not isinstance(module, nn.Linear | nn.Embedding | Conv1D)
                    or id(module.weight) in filled
                ):
                    continue
                weight = module.weight
                if not weight.requires_grad:  # sinusoidal positions
                    continue
                filled.add(id(weight))
                if isinstance(module, nn.Embedding):
                    std = self.embedding
                else:
                    std = (
                        QUERY_AND_KEY_GAIN if leaf in ("q", "k", "q_proj", "k_proj") else self.gain
                    )
                    std /= math.sqrt(
                        weight.shape[0] if isinstance(module, Conv1D) else weight.shape[1]
                    )
                    if leaf == "q":  # T5 does not scale its attention scores
                        std /= math.sqrt(model.config.d_kv)
                    if name.endswith(ATTENTION_OUTPUTS) and module in in_decoder:
                        std *= self.mixing
                weight.normal_(0, std, generator=generator)
                if name.endswith(FEED_FORWARD_OUTPUTS):
                    weight.sub_(weight.mean(0 if isinstance(module, Conv1D) else 1, keepdim=True))
                if getattr(module, "padding_idx", None) is not None:
                    weight[module.padding_idx] = 0
            assert last_norm is not None
            last_norm.weight.mul_(self.final_norm)
