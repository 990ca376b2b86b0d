"""A tiny decoder-only model with random weights and its tokenizer, as stand-ins for yours.

Both are created offline.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = Path(__file__).parent / "en-es" / "test.en"
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_model() -> tuple[PreTrainedTokenizerFast, LlamaForCausalLM]:
    """Return a tokenizer with a chat template and a two-layer Llama (float32, on the CPU)."""
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer, pieces.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    special = ["<pad>", "<end>", "<user>", "<assistant>"]
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=special, show_progress=False)
    pieces.train_from_iterator(TEXT.read_text("utf-8").splitlines(), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=pieces, pad_token="<pad>", eos_token="<end>", padding_side="left"
    )
    tokenizer.chat_template = TEMPLATE

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        initializer_range=0.3, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return tokenizer, LlamaForCausalLM(config).eval()
