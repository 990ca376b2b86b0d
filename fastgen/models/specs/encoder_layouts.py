"""Specs of encoders: the names under which a live model holds the parts of an encoder's layers."""

from dataclasses import replace

from fastgen.models.specs.decoder_layouts import LAYOUTS, Attention, Layout


def _encoder(decoder: Layout) -> Layout:
    """Return the layout of the encoder that belongs to a decoder."""
    return replace(decoder, decoder="", head="", source=None, bias=None, norm_tokens=False)


_T5_ENCODER = replace(
    _encoder(LAYOUTS["t5"]),
    wide="layer.1.DenseReluDense.wi",
    gated="layer.1.DenseReluDense.wi_1",
    wide_gated="layer.1.DenseReluDense.wi_0",
    activation="layer.1.DenseReluDense.act",
    narrow="layer.1.DenseReluDense.wo",
    feed_norm="layer.1.layer_norm",
)
_BERT = Layout(
    "", head="", layers="layer", tokens="",
    text=Attention(
        "attention", "attention.output.LayerNorm", ("self.query", "self.key", "self.value"),
        "output.dense", core="self"
    ),
    source=None, wide="intermediate.dense", activation="intermediate.intermediate_act_fn",
    narrow="output.dense",
    feed_norm="output.LayerNorm", norm_first=False, dims="attention_head_size",
)  # fmt: skip

_OTHERS = ("fairseq", "fsmt", "led", "mvp", "whisper")
"""Families with BART-like decoders whose encoders differ from BART's or have not been verified."""

ENCODERS = {
    **{
        name: _encoder(layout)
        for name, layout in LAYOUTS.items()
        if layout.source is not None and layout.text is LAYOUTS["bart"].text and name not in _OTHERS
    },
    **dict.fromkeys(("t5", "mt5", "umt5"), _T5_ENCODER),
    **dict.fromkeys(("bert", "camembert", "electra", "roberta", "xlm-roberta"), _BERT),
    "fairseq": replace(_encoder(LAYOUTS["fairseq"]), tokens=""),
    "distilbert": replace(
        _BERT, text=Attention("attention", "sa_layer_norm", ("q_lin", "k_lin", "v_lin"), "out_lin"),
        wide="ffn.lin1",
        activation="ffn.activation", narrow="ffn.lin2", feed_norm="output_layer_norm",
    ),
}  # fmt: skip
"""Layouts by the `model_type` of a transformers config; "fairseq" for fairseq's models."""
