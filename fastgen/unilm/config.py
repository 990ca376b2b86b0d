"""Configuration of UniLM: BERT's, plus the tokens and token types of a target."""

from typing import Any

from transformers import BertConfig

# Keys of published configs that select unsupported variants, and their description in messages.
_REFUSED = {
    "rel_pos_bins": "relative position buckets (unilm2)",
    "new_pos_ids": "position tables of several tasks",
    "seg_emb": "segment embeddings inside attention",
    "ffn_type": "feed-forward layers of another form",
    "fp32_embedding": "embeddings in a precision of their own",
    "no_segment_embedding": "no type embeddings",
}
_ONE = {"num_qkv": "several projections per layer", "relax_projection": "heads of several tasks"}


class UniLMConfig(BertConfig):
    """A BertConfig with the additional settings of s2s-ft.

    Attributes:
        source_type_id: Token type (segment) of source tokens; 4 in UniLM 1.
        target_type_id: Token type (segment) of target tokens; 5 in UniLM 1.
        mask_token_id: The token whose output predicts the target at its position.
        decoder_start_token_id: First token of `decoder_input_ids`; the model does not read it.
        label_smoothing: Label smoothing of the loss; 0.1 in s2s-ft.

    Raises:
        ValueError: The config selects an unsupported variant, or a token or type has no embedding.
    """

    model_type = "unilm"

    is_encoder_decoder: bool = True
    source_type_id: int = 0
    target_type_id: int = 1
    mask_token_id: int = 103
    decoder_start_token_id: int | None = 101
    eos_token_id: int | list[int] | None = 102
    label_smoothing: float = 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        for name, what in _REFUSED.items():
            if kwargs.get(name):
                raise ValueError(f"a UniLM with {what} is not supported: {name}={kwargs[name]!r}")
        for name, what in _ONE.items():
            if (kwargs.get(name) or 0) > 1:
                raise ValueError(f"a UniLM with {what} is not supported: {name}={kwargs[name]!r}")
        super().__post_init__(**kwargs)
        # A BERT config may set these to None.
        self.is_encoder_decoder = True
        self.decoder_start_token_id = (
            101 if self.decoder_start_token_id is None else self.decoder_start_token_id
        )
        self.eos_token_id = 102 if self.eos_token_id is None else self.eos_token_id
        for name, many in (
            ("mask_token_id", self.vocab_size),
            ("decoder_start_token_id", self.vocab_size),
        ):
            _check(name, getattr(self, name), many)
        for name in ("source_type_id", "target_type_id"):
            _check(name, getattr(self, name), self.type_vocab_size)
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is no multiple of {self.num_attention_heads} heads"
            )


def _check(name: str, index: int, many: int) -> None:
    if not 0 <= index < many:
        raise ValueError(f"{name}={index}, where there are {many}")
