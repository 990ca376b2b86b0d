"""Check an installed fastgen: `python -P tests/installed.py native`, or `torch`.

Generates with a tiny random model, with and without fastgen. With `native`, operations must have
run in C; with `torch`, none may have. The script imports nothing from the checkout and downloads
nothing.
"""

import os
import sys
from pathlib import Path

os.environ["FASTGEN_OPS"] = (
    "native" if sys.argv[1:] == ["native"] else "auto"
)  # runs in C on every supported processor

import torch
from transformers import MarianConfig, MarianMTModel

import fastgen
from fastgen.ops import native

PACKAGE = Path(fastgen.__file__).resolve().parent


def main(expected: str) -> None:
    """Generate twice; raise AssertionError if outputs differ or another implementation ran."""
    checkout = Path(__file__).resolve().parents[1]
    assert checkout != PACKAGE.parent, f"{PACKAGE} is the checkout's, not installed"
    torch.manual_seed(0)
    config = MarianConfig(
        vocab_size=101, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
        max_position_embeddings=64, init_std=0.4, pad_token_id=100, eos_token_id=0,
        decoder_start_token_id=100, forced_eos_token_id=None,
    )  # fmt: skip
    model = MarianMTModel(config).eval()
    sources = torch.randint(1, 100, (3, 7))
    with fastgen.disabled():
        stock = model.generate(sources, num_beams=4, max_new_tokens=12)
    made = model.generate(sources, num_beams=4, max_new_tokens=12)
    assert torch.equal(made, stock), (made, stock)
    status = fastgen.status()
    assert [call.not_accelerated for call in status.calls] == [0], str(status)
    in_c = sum(paths.get("native", 0) for paths in status.operations.values())
    assert (in_c > 0, native.found().library is not None) == ((expected == "native"),) * 2, str(
        status
    )
    print(
        f"fastgen {fastgen.__version__} in {PACKAGE}: same output; operations in C: {status.native}"
    )


if __name__ == "__main__":
    if sys.argv[1:] not in (["native"], ["torch"]):
        sys.exit(__doc__)
    main(sys.argv[1])
