"""UniLM as an encoder-decoder of transformers: one BERT stack reads the source, writes the target.

The formulation is that of s2s-ft (fine-tuning with pseudo-masks); UniLM 1, 1.2 and MiniLM decode
the same way. A sequence consists of a source, a target, and mask tokens. Source tokens attend to
the whole source, bidirectionally. A target token attends to the source, to earlier targets, and to
itself. The mask at a target's position attends to the source, to the targets before that position,
and to itself; its output predicts that target. So a decode step runs two tokens: the newest target,
whose keys and values are cached, and a mask, whose keys and values no later token sees.

Sources: Dong et al. 2019 (UniLM); Bao et al. 2020 (UniLMv2, pseudo-masks); Bao et al. 2021
(s2s-ft).
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertPreTrainedModel, GenerationMixin
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput
from transformers.models.bert.modeling_bert import (
    BertEmbeddings,
    BertIntermediate,
    BertOnlyMLMHead,
    BertOutput,
    BertSelfOutput,
)

from fastgen.patches.transformers.compat import CACHE, cache_of
from fastgen.unilm.attention import UniLMSelfAttention
from fastgen.unilm.config import UniLMConfig

IGNORED = -100
"""Label of positions that are not targets, as everywhere in transformers."""


class UniLMAttention(nn.Module):
    """Self-attention with output projection, residual and norm; BERT checkpoints' module names."""

    def __init__(self, config: UniLMConfig, layer: int) -> None:
        super().__init__()
        self.self = UniLMSelfAttention(config, layer)
        self.output = BertSelfOutput(config)
        self.head_dim, self.scaling = self.self.head_dim, self.self.scaling

    def forward(self, x: Tensor, *around: Any) -> Tensor:
        return self.output(self.self(x, *around), x)


class UniLMLayer(nn.Module):
    """A BERT layer with `UniLMSelfAttention`."""

    def __init__(self, config: UniLMConfig, layer: int) -> None:
        super().__init__()
        self.attention = UniLMAttention(config, layer)
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config)

    def forward(self, x: Tensor, *around: Any) -> Tensor:
        x = self.attention(x, *around)
        return self.output(self.intermediate(x), x)


class UniLMLayers(nn.Module):
    """All layers; the arguments are those of `UniLMSelfAttention.forward`."""

    def __init__(self, config: UniLMConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(
            UniLMLayer(config, index) for index in range(config.num_hidden_layers)
        )

    def forward(self, x: Tensor, masks: int, visible: Tensor | None, past: Cache | None) -> Tensor:
        for layer in self.layer:
            x = layer(x, masks, visible, past)
        return x


class UniLMStack(nn.Module):
    """Embeddings and layers.

    As an encoder it only embeds the source; the layers process it together with the target.
    """

    main_input_name = "input_ids"

    def __init__(self, config: UniLMConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = BertEmbeddings(config)
        self.encoder = UniLMLayers(config)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutput:
        """Embed a source.

        Args:
            input_ids: (B, S) int64.
            attention_mask: (B, S) int64; padding may be on either side.
            output_attentions: Unused.
            output_hidden_states: Unused.
            return_dict: Unused.

        Returns:
            The embeddings (B, S, C), as `last_hidden_state`.
        """
        if attention_mask is None:
            positions = torch.arange(
                input_ids.shape[1], device=input_ids.device, dtype=torch.int64
            ).expand_as(input_ids)
        else:
            positions = (attention_mask.long().cumsum(1) - 1).clamp_(0)
        embedded = self.embed(input_ids, positions, self.config.source_type_id, input_ids.shape[1])
        return BaseModelOutput(last_hidden_state=cast(Any, embedded))

    def embed(self, ids: Tensor, positions: Tensor, type_id: int, most: int) -> Tensor:
        """Return the embeddings (B, L, C) of tokens.

        Args:
            ids: (B, L) int64.
            positions: (B, L) int64, all below `most`.
            type_id: Token type of all tokens.
            most: Upper bound of the positions, known without reading the device.

        Raises:
            ValueError: A position is not below `max_position_embeddings`.
        """
        there = self.config.max_position_embeddings
        if most > there and int(positions.max()) >= there:
            raise ValueError(
                f"source and target have {int(positions.max()) + 1} positions, and "
                f"max_position_embeddings is {there}"
            )
        return self.embeddings(ids, torch.full_like(ids, type_id), positions)


class UniLMForConditionalGeneration(BertPreTrainedModel, GenerationMixin):
    """UniLM with its head: `generate` as for any encoder-decoder, and `labels` for fine-tuning.

    `input_ids` is the source, `[CLS] ... [SEP]`. `decoder_input_ids` and the output of `generate`
    begin with `decoder_start_token_id`, which only marks the start of a target. Load checkpoints
    with `fastgen.unilm.load`.
    """

    config_class = UniLMConfig
    base_model_prefix = "bert"
    main_input_name = "input_ids"
    _tied_weights_keys = {  # noqa: RUF012 - transformers declares it so
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
    # Also in checkpoints of s2s-ft and BERT: a copy of the embeddings, and pretraining heads.
    _keys_to_ignore_on_load_unexpected = [  # noqa: RUF012
        r"cls\.predictions\.decoder_weight", r"bert\.pooler\.", r"cls\.seq_relationship\."
    ]  # fmt: skip
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = (
        False
    )
    supports_gradient_checkpointing = False
    _can_record_outputs = None

    def __init__(self, config: UniLMConfig) -> None:
        super().__init__(config)
        self.bert = UniLMStack(config)
        self.cls = BertOnlyMLMHead(config)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a model as transformers does; the config supplies missing generation settings.

        A plain BERT's directory has no generation settings.
        """
        loaded: Any = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for name in ("decoder_start_token_id", "eos_token_id", "pad_token_id"):
            if getattr(model.generation_config, name) is None:
                setattr(model.generation_config, name, getattr(model.config, name))
        return loaded

    def get_encoder(self, modality: str | None = None) -> UniLMStack:
        return self.bert

    def get_input_embeddings(self) -> nn.Module:
        return self.bert.embeddings.word_embeddings

    def set_input_embeddings(self, value: Any) -> None:
        self.bert.embeddings.word_embeddings = value

    def get_output_embeddings(self) -> nn.Module:
        return self.cls.predictions.decoder

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.cls.predictions.decoder = new_embeddings
        self.cls.predictions.bias = new_embeddings.bias

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Return decoder_input_ids (B, T) for labels (B, T), shifted by the start token."""
        start = labels.new_full((labels.shape[0], 1), self.config.decoder_start_token_id)
        targets = labels[:, :-1].masked_fill(
            labels[:, :-1] == IGNORED, self.config.pad_token_id or 0
        )
        return torch.cat([start, targets], 1)

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        cast(Any, super())._validate_model_kwargs(model_kwargs)
        past = cache_of(model_kwargs)
        if past is not None and past.get_seq_length():
            # `generate` would count the source's tokens in the cache as target tokens.
            raise ValueError(
                "a UniLM begins with an empty cache, and the one given holds "
                f"{past.get_seq_length()} tokens"
            )

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Seq2SeqLMOutput | tuple[Any, ...]:
        """Predict the target that follows each token of `decoder_input_ids`.

        Args:
            input_ids: (B, S) int64, the source.
            attention_mask: (B, S) int64, the mask of the source.
            decoder_input_ids: (B, T) int64, the start token and the targets so far; with a
                non-empty `cache`, only those that the cache does not contain. None: derived from
                `labels`.
            decoder_attention_mask: Must be None: targets have no padding but after the end of their
                labels.
            encoder_outputs: The embedded source (B, S, C), instead of `input_ids`.
            cache: KV cache of source and target, which this call extends.
            past_key_values: The name of `cache` before transformers 5.24.
            position_ids: Must be None. transformers passes None too after a prompt that it ran in
                chunks.
            labels: (B, T) int64, the targets; -100 is ignored.
            use_cache: Whether to create a cache if none is passed.
            output_attentions: Must not be set.
            output_hidden_states: Must not be set.
            return_dict: False returns a tuple.

        Returns:
            The logits (B, T, V) of a mask after each token; with `labels` also the mean
            cross-entropy, smoothed by the config's `label_smoothing`.

        Raises:
            ValueError: There is no source or no target; they have more positions than the model;
                the mask does not match the source; the cache has a fixed size, which `generate`
                sets for the target alone; or attentions, hidden states, position ids or a mask of
                the target are passed or requested.
        """
        if output_attentions or output_hidden_states:
            raise ValueError(
                f"{output_attentions=}, {output_hidden_states=}: a UniLM returns neither"
            )
        if position_ids is not None:
            raise ValueError(
                f"position_ids are given, {tuple(position_ids.shape)}: a UniLM counts its "
                "positions itself"
            )
        if decoder_input_ids is None:
            if labels is None:
                raise ValueError("a UniLM needs decoder_input_ids or labels, and both are None")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        if encoder_outputs is None:
            if input_ids is None:
                raise ValueError("a UniLM needs input_ids or encoder_outputs, and both are None")
            encoder_outputs = self.bert(input_ids, attention_mask)
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache:
            cache = EncoderDecoderCache(
                DynamicCache(config=self.config), DynamicCache(config=self.config)
            )
        # One softmax covers source and target, so that their keys and values share one cache.
        past = getattr(cache, "self_attention_cache", cache)
        if past is not None and past.is_compileable:
            raise ValueError(
                f"a UniLM's cache holds source and target, for which a {type(past).__name__} has "
                "no room"
            )
        if decoder_attention_mask is not None:
            raise ValueError(
                f"decoder_attention_mask is given, {tuple(decoder_attention_mask.shape)}: targets "
                "have none"
            )
        hidden = self._read(encoder_outputs[0], attention_mask, decoder_input_ids, past, labels)
        logits = self.cls(hidden)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED,
                label_smoothing=self.config.label_smoothing,
            )  # fmt: skip
        outputs = Seq2SeqLMOutput(
            loss=cast(Any, loss), logits=logits, encoder_last_hidden_state=encoder_outputs[0],
            **{CACHE: cast(Any, cache)},
        )  # fmt: skip
        return outputs.to_tuple() if return_dict is False else outputs

    def _read(
        self,
        source: Tensor,
        source_mask: Tensor | None,
        ids: Tensor,
        past: Cache | None,
        labels: Tensor | None,
    ) -> Tensor:
        """Return the last layer's output (B, T, C) for a mask after each of ids (B, T)."""
        masks, length = ids.shape[1], source.shape[1]
        if source_mask is not None and source_mask.shape[1] != length:
            raise ValueError(
                f"attention_mask is {tuple(source_mask.shape)}, and the source has {length} tokens"
            )
        held = 0 if past is None else past.get_seq_length()
        targets = ids if held else ids[:, 1:]
        before = held - length if held else 0
        end = before + targets.shape[1]
        # Target indices: the new targets, which are cached, then the predictions.
        index = torch.cat(
            [
                torch.arange(before, end, dtype=torch.int64, device=ids.device),
                torch.arange(end + 1 - masks, end + 1, dtype=torch.int64, device=ids.device),
            ]
        ).to(ids.device)
        positions = index + (length if source_mask is None else source_mask.sum(1, keepdim=True))
        positions = positions.expand(ids.shape[0], -1)
        if labels is not None:  # ignored labels must not exceed the position table
            positions = positions * torch.cat([labels[:, : masks - 1], labels], 1).ne(IGNORED)
        both = torch.cat([targets, torch.full_like(ids, self.config.mask_token_id)], 1)
        x = self.bert.embed(both, positions, self.config.target_type_id, length + end + 1)
        visible = (
            None
            if source_mask is None
            else F.pad(source_mask.bool(), (0, end), value=True)[:, None, None]
        )
        if end and (masks > 1 or not held):
            # A token's rank is the number of targets up to and including itself. A query sees the
            # tokens whose rank is not above its own limit.
            none, start = index.new_zeros(length), 0 if held else length
            seen = torch.cat([none[:start], index[: end - before] + 1, index[end - before :]])
            ranks = torch.cat(
                [none, torch.arange(1, end + 1, device=ids.device, dtype=torch.int64)]
            )
            causal = (ranks <= seen[:, None])[None, None]
            visible = causal if visible is None else visible & causal
        if visible is not None:
            visible = torch.zeros_like(visible, dtype=x.dtype).masked_fill_(
                ~visible, torch.finfo(x.dtype).min
            )
        x = x if held else torch.cat([source, x], 1)
        return self.bert.encoder(x, masks, visible, past)[:, -masks:]
