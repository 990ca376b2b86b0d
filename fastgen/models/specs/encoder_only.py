"""Specs of encoders that classify or embed texts."""

from dataclasses import replace

from fastgen.models.specs.model_spec import Attention, Mlp, Stack

_BERT = Stack(
    "",
    self_attention=Attention(
        "attention", "attention.output.LayerNorm", ("self.query", "self.key", "self.value"),
        "output.dense", inner="self", head_dim="attention_head_size",
    ),
    mlp=Mlp(
        "intermediate.dense", "output.dense", "intermediate.intermediate_act_fn",
        "output.LayerNorm",
    ),
    layers="layer",
    embedding=None,
    pre_norm=False,
)  # fmt: skip

ENCODER_ONLY = {
    **dict.fromkeys(("bert", "camembert", "electra", "roberta", "xlm-roberta"), _BERT),
    "distilbert": replace(
        _BERT,
        self_attention=replace(
            _BERT.self_attention, norm="sa_layer_norm", qkv=("q_lin", "k_lin", "v_lin"),
            out="out_lin", inner="",
        ),
        mlp=Mlp("ffn.lin1", "ffn.lin2", "ffn.activation", "output_layer_norm"),
    ),
}  # fmt: skip
