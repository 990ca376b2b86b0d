"""Translate with fairseq: the example's model as a `TransformerModel`, with `SequenceGenerator`.

fairseq's Transformer and transformers' Marian are the same model with the same weight names, so the
weights are copied unchanged. fairseq 0.12.2 cannot be imported on Python 3.11 without fastgen, so
fastgen is imported first.

    python examples/fairseq_translate.py
"""

from argparse import Namespace
from pathlib import Path

import fastgen  # noqa: F401  (isort: skip)
import torch
from fairseq.data import Dictionary
from fairseq.data.data_utils import collate_tokens
from fairseq.models.transformer import TransformerModel, base_architecture
from fairseq.sequence_generator import SequenceGenerator
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

FOLDER = Path(__file__).parent / "en-es"


def as_fairseq(marian: torch.nn.Module, dictionary: Dictionary) -> TransformerModel:
    """Return the same model in fairseq.

    fairseq's dictionary has one symbol more than Marian's vocabulary: the first one, `bos`. Marian
    starts its sequences with the padding token, so the weights of that token also serve `bos`.
    """
    config = marian.config
    sizes = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in {
            "embed_dim": config.d_model,
            "layers": getattr(config, f"{side}_layers"),
            "attention_heads": getattr(config, f"{side}_attention_heads"),
            "ffn_embed_dim": getattr(config, f"{side}_ffn_dim"),
            "learned_pos": True,  # Marian's sinusoids differ slightly from fairseq's
        }.items()
    }
    limits = {
        f"max_{side}_positions": config.max_position_embeddings for side in ("source", "target")
    }
    args = Namespace(**sizes, **limits, activation_fn="gelu", share_all_embeddings=True)
    base_architecture(args)
    model = TransformerModel.build_model(
        args, Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    )

    weights = {name.removeprefix("model."): weight for name, weight in marian.state_dict().items()}
    vocabulary = weights["shared.weight"]
    for side in ("encoder", "decoder"):
        positions = weights[f"{side}.embed_positions.weight"]
        # The first two rows of fairseq's position table are unused.
        weights[f"{side}.embed_positions.weight"] = torch.cat([positions[:2], positions])
        weights[f"{side}.embed_tokens.weight"] = torch.cat([vocabulary[:1], vocabulary])
    weights["decoder.output_projection.weight"] = weights["decoder.embed_tokens.weight"]
    model.load_state_dict(weights, strict=False)
    return model.eval()


tokenizer = AutoTokenizer.from_pretrained(FOLDER / "model")
marian = AutoModelForSeq2SeqLM.from_pretrained(FOLDER / "model", dtype="float32")
dictionary = Dictionary()  # <s> <pad> </s> <unk>
for token in range(3, len(tokenizer)):
    dictionary.add_symbol(tokenizer.convert_ids_to_tokens(token))
model = as_fairseq(marian, dictionary)
generator = SequenceGenerator([model], dictionary, beam_size=4, max_len_b=128)

lines = (FOLDER / "test.en").read_text("utf-8").splitlines()[:16]
for start in range(0, len(lines), 8):
    sources = [torch.tensor(ids) + 1 for ids in tokenizer(lines[start : start + 8])["input_ids"]]
    batch = {
        "src_tokens": collate_tokens(sources, dictionary.pad(), left_pad=True),
        "src_lengths": torch.tensor([len(source) for source in sources]),
    }
    found = generator.generate([model], {"net_input": batch}, bos_token=dictionary.bos())
    for hypotheses in found:
        print(tokenizer.decode(hypotheses[0]["tokens"] - 1, skip_special_tokens=True).strip())
