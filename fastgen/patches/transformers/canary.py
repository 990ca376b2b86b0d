"""One small question to a transformers newer than tested: does it still generate what we generate?"""

from typing import Any, cast

import torch

from fastgen.patches._engine import disabled


def agrees() -> tuple[bool, str]:
    """Generate with tiny models, patched and not; return whether all tokens are equal, and what was compared."""
    from transformers import BartConfig, BartForConditionalGeneration, GPT2Config, GPT2LMHeadModel

    untyped = cast(Any, torch)  # its random functions lack types
    with untyped.random.fork_rng(), torch.no_grad():
        untyped.manual_seed(0)
        bart: Any = BartForConditionalGeneration(
            BartConfig(
                vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
                decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=64,
                init_std=1.0, forced_eos_token_id=None,
            )
        ).double().eval()  # fmt: skip
        gpt2: Any = GPT2LMHeadModel(
            GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=1.0,
                       bos_token_id=1, eos_token_id=2)
        ).double().eval()  # fmt: skip
        ids = torch.randint(4, 64, (2, 7))
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        for model in (bart, gpt2):
            for options in ({"num_beams": 3, "no_repeat_ngram_size": 2}, {}):
                call = {"attention_mask": mask, "max_new_tokens": 8, "pad_token_id": 1, **options}
                ours = model.generate(ids, **call)
                with disabled():
                    stock = model.generate(ids, **call)
                if not torch.equal(ours, stock):
                    return False, f"{type(model).__name__}.generate({options}) gave other tokens"
    return True, "BART and GPT-2, beams and greedy: equal tokens"
