"""Tiny random fairseq models, and comparison of its generator with fastgen and without."""

import functools
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from fairseq import search, utils
from fairseq.data import Dictionary
from fairseq.models.bart import BARTModel
from fairseq.models.bart.model import bart_base_architecture
from fairseq.models.lstm import LSTMModel
from fairseq.models.lstm import base_architecture as lstm_architecture
from fairseq.models.multilingual_transformer import (
    MultilingualTransformerModel,
    base_multilingual_architecture,
)
from fairseq.models.transformer import TransformerModel, base_architecture
from fairseq.models.transformer_lm import TransformerLanguageModel, base_lm_architecture
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.multilingual_translation import MultilingualTranslationTask
from torch import Tensor

import fastgen

WORDS = 28
PAD, EOS = 1, 2


@functools.cache
def dictionary() -> Dictionary:
    words = Dictionary()
    for i in range(WORDS):
        words.add_symbol(f"w{i}")
    return words


class Task:
    source_dictionary = target_dictionary = property(lambda _: dictionary())


_SIZES: dict[str, Any] = {
    f"{part}_{name}": value
    for part in ("encoder", "decoder")
    for name, value in {
        "embed_dim": 16,
        "ffn_embed_dim": 24,
        "attention_heads": 2,
        "layers": 2,
    }.items()
} | {
    "max_source_positions": 64,
    "max_target_positions": 64,
    "dropout": 0.0,
    "tokens_per_sample": 64,
}


def _transformer(**options: Any) -> Any:
    args = Namespace(**_SIZES, **options)
    base_architecture(args)
    return TransformerModel.build_model(args, Task())


def _bart() -> Any:
    args = Namespace(**_SIZES)
    bart_base_architecture(args)
    args.max_source_positions = args.max_target_positions = 64
    return BARTModel.build_model(args, Task())


def _multilingual() -> Any:
    """Return a multilingual model of two language pairs."""
    args = Namespace(**_SIZES, source_lang=None, target_lang=None, lang_pairs=["en-es", "es-en"])
    base_multilingual_architecture(args)
    task = MultilingualTranslationTask(
        args, {"en": dictionary(), "es": dictionary()}, training=True
    )
    return MultilingualTransformerModel.build_model(args, task)


def _lm(**options: Any) -> Any:
    args = Namespace(**_SIZES, **options)
    base_lm_architecture(args)
    return TransformerLanguageModel.build_model(args, Task())


def _lstm() -> Any:
    args = Namespace(
        encoder_embed_dim=16,
        decoder_embed_dim=16,
        decoder_out_embed_dim=16,
        dropout=0.0,
        criterion="",
    )
    lstm_architecture(args)
    return LSTMModel.build_model(args, Task())


MODELS: dict[str, Callable[[], Any]] = {
    "transformer": _transformer,
    "prenorm": lambda: _transformer(
        encoder_normalize_before=True, decoder_normalize_before=True, encoder_learned_pos=True,
        decoder_learned_pos=True, activation_fn="gelu", share_decoder_input_output_embed=True,
    ),
    "scaled": lambda: _transformer(
        layernorm_embedding=True, no_scale_embedding=True, scale_attn=True, scale_fc=True,
    ),
    "adaptive": lambda: _transformer(adaptive_softmax_cutoff="10,20"),
    "bart": _bart,
    "multilingual": _multilingual,
}  # fmt: skip
LANGUAGE_MODELS: dict[str, Callable[[], Any]] = {
    "lm": _lm,
    "lm_learned": lambda: _lm(
        decoder_learned_pos=True, activation_fn="gelu", share_decoder_input_output_embed=True
    ),
}
OTHERS: dict[str, Callable[[], Any]] = {"lstm": _lstm}


@functools.cache
def build(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """Return a model whose weights have a large standard deviation.

    End tokens are about as likely as any other token. The encoder's second set of weights, which
    PyTorch's fused layers use and which only some versions have, is left as it is.
    """
    torch.manual_seed(seed)
    model = (MODELS | LANGUAGE_MODELS | OTHERS)[name]().eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "_weight" not in parameter_name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5
    if name not in OTHERS and name != "adaptive":
        _end_often(model.decoder)
    return model.to(dtype)


def _end_often(decoder: Any) -> None:
    """Make one of the features constant, and let it raise the score of the end token alone."""
    norm = decoder.layers[-1].final_layer_norm if decoder.layer_norm is None else decoder.layer_norm
    norm.weight.data[0], norm.bias.data[0] = 0.0, 1.0
    weight = decoder.output_projection.weight.data
    weight *= 0.35
    weight[:, 0] = 0.0
    weight[EOS, 0] = 1.1


def batch(sentences: int, length: int, padding: str = "left", seed: int = 0) -> dict[str, Any]:
    """Return a batch like those of fairseq's datasets; `padding` is left, right or none."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(4, WORDS + 4, (sentences, length), generator=generator)
    source[:, -1] = EOS
    for row in range(0 if padding == "none" else sentences):
        short = row * (length - 3) // sentences
        source[row] = torch.cat([torch.full((short,), PAD), source[row, short:]])
        if padding == "right":
            source[row] = source[row].roll(-short)
    return {
        "id": torch.arange(sentences) + 10,
        "net_input": {"src_tokens": source, "src_lengths": source.ne(PAD).sum(1)},
    }


SEARCHES: dict[str, Callable[[], Any]] = {
    "diverse": lambda: search.DiverseBeamSearch(dictionary(), 2, 0.6),
    "siblings": lambda: search.DiverseSiblingsSearch(dictionary(), 0.4),
    "sampling": lambda: search.Sampling(dictionary()),
    "top_k": lambda: search.Sampling(dictionary(), sampling_topk=5),
    "top_p": lambda: search.Sampling(dictionary(), sampling_topp=0.8),
    "length": lambda: search.LengthConstrainedBeamSearch(dictionary(), 0.5, 1, 1.0, 2),
    "prefix": lambda: search.PrefixConstrainedBeamSearch(
        dictionary(),
        lambda sentence, text: (
            [EOS] if len(text) > 9 else [4 + sentence % 5, 11, 12, 13, 20 + len(text)]
        ),
    ),
    "ordered": lambda: search.LexicallyConstrainedBeamSearch(dictionary(), "ordered"),
    "unordered": lambda: search.LexicallyConstrainedBeamSearch(dictionary(), "unordered"),
}


def call(models: list[Any], sample: dict[str, Any], options: dict[str, Any], seed: int = 0) -> Any:
    """Run a new generator once.

    `prefix_tokens`, `constraints` and `bos_token` are passed to `generate`, all other options to
    the constructor.
    """
    given = {
        name: options[name]
        for name in ("prefix_tokens", "constraints", "bos_token")
        if name in options
    }
    made = {name: value for name, value in options.items() if name not in given}
    kind = made.pop("generator", SequenceGenerator)
    if "search_strategy" in made:
        made["search_strategy"] = SEARCHES[made["search_strategy"]]()
    torch.manual_seed(seed)
    generator = kind(models, dictionary(), **made)
    copied = utils.apply_to_sample(torch.clone, sample)
    found = generator.generate(models, copied, **utils.apply_to_sample(torch.clone, given))
    return found, torch.get_rng_state()


def assert_same(
    models: list[Any], sample: dict[str, Any], options: dict[str, Any], tolerance: float = 1e-5
) -> Any:
    """Assert that fastgen does not change a call.

    Compares the order of hypotheses, tokens, scores, attention, alignment and the random state.
    """
    ours, state = _tried(models, sample, options)
    with fastgen.disabled():
        stock, stock_state = _tried(models, sample, options)
    if isinstance(ours, Exception) or isinstance(stock, Exception):
        assert (type(ours), str(ours)) == (type(stock), str(stock))
        return ours
    assert len(ours) == len(stock)
    for mine, theirs in zip(ours, stock, strict=True):
        assert [h["tokens"].tolist() for h in mine] == [h["tokens"].tolist() for h in theirs]
        for one, other in zip(mine, theirs, strict=True):
            assert one.keys() == other.keys()
            for name in other:
                if isinstance(other[name], Tensor):
                    assert one[name].dtype == other[name].dtype, name
                    torch.testing.assert_close(
                        one[name], other[name], atol=tolerance, rtol=tolerance, msg=name
                    )
                else:
                    assert one[name] == other[name], name
    assert torch.equal(state, stock_state)
    return ours


def _tried(*args: Any) -> tuple[Any, Any]:
    try:
        return call(*args)
    except (AssertionError, IndexError, RuntimeError) as error:
        return error, None


def hits() -> int:
    return next(row.hits for row in fastgen.status().rows if row.name == "fairseq.generate")


def fallbacks() -> dict[str, int]:
    return dict(
        next(row.fallbacks for row in fastgen.status().rows if row.name == "fairseq.generate")
    )
