"""Tiny models whose weights depend on their names alone, so every version makes the same ones."""

import zlib
from typing import Any

import torch
import transformers as tf

VOCABULARY = 40
PAD, EOS, START = 0, 2, 3

_TOKENS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}
_BART: dict[str, Any] = {
    **_TOKENS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "max_position_embeddings": 64, "decoder_start_token_id": START,
    "forced_eos_token_id": None,
}  # fmt: skip
_GPT2: dict[str, Any] = {**_TOKENS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
_LLAMA: dict[str, Any] = {
    **_TOKENS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "max_position_embeddings": 64,
}  # fmt: skip

KINDS = {
    "bart": lambda: tf.BartForConditionalGeneration(tf.BartConfig(**_BART)),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**_GPT2)),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_LLAMA)),
}


def build(kind: str) -> Any:
    """Return a tiny model in fp64, ready to generate."""
    model = KINDS[kind]().double().eval()
    with torch.no_grad():
        for name, weight in sorted(model.state_dict().items()):
            if weight.is_floating_point():
                _fill(name, weight)
        # A shared weight has several names; take the same one everywhere.
        _fill("embeddings", model.get_input_embeddings().weight)
        if not model.config.tie_word_embeddings:
            _fill("head", model.get_output_embeddings().weight)
    return model


def _fill(name: str, weight: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    spread = 0.1 if weight.dim() == 1 else 0.7
    weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) * spread)
    if weight.dim() == 1 and name.endswith("weight"):
        weight.add_(1.0)


def inputs(
    model: Any, seed: int = 0, sentences: int = 3, length: int = 6
) -> dict[str, torch.Tensor]:
    """Return sentences of different lengths, padded on the side that the model expects."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCABULARY, (sentences, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, sentences):
        padding = slice(length - row, length) if model.config.is_encoder_decoder else slice(0, row)
        ids[row, padding], mask[row, padding] = PAD, 0
    return {"input_ids": ids, "attention_mask": mask}
