"""Compare random calls of `generate` with and without fastgen: `make fuzz N=1000`.

The same as a command: ``python -m tests.fuzz -n 1000``. Call i is drawn from the number ``--seed``
+ i alone, so ``--seed S -n 1`` reproduces a difference. The table `OPTIONS` holds everything that
can be drawn; `tests/patches/transformers/generate/test_fuzz.py` draws from it too.
"""

import argparse
import copy
import functools
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers as tf
from tqdm import tqdm
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

import fastgen
from fastgen.decoding.kv_cache import room
from fastgen.models.state import state_of
from fastgen.ops.selection import kbest
from fastgen.patches.transformers.compat import CACHE
from fastgen.patches.transformers.planning import sharing
from tests.support import families as models
from tests.support import zoo
from tests.support.parity import assert_same, fallbacks, hits, same
from tests.support.parity import call as run
from tests.support.surroundings import SURROUNDINGS

V = zoo.VOCABULARY
ROUNDING = 1e-6
"""Upper bound of one fp32 rounding; the toolkit keeps scores in fp32 whatever the model's dtype."""


class Witness:
    """An argument that records its calls. A copy starts empty and is listed in `made`."""

    made: ClassVar[list["Witness"]] = []

    def __init__(self, variant: int = 0) -> None:
        self.variant = variant
        self.seen: list[Any] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "Witness":
        twin = type(self)(self.variant)
        Witness.made.append(twin)
        return twin

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.variant})"


class Favour(Witness, LogitsProcessor):
    """A user's logits processor.

    Variant 0 shifts the scores of whole rows, 1 bans tokens in place, 2 bans every token, 3 returns
    NaN.
    """

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append((input_ids.tolist(), tuple(scores.shape), scores.dtype))
        if self.variant == 0:
            return scores + (input_ids.sum(1, keepdim=True) % 7 == 0) * torch.linspace(
                0, 2, scores.shape[1]
            )
        if self.variant == 1:
            return scores.masked_fill_(
                torch.arange(scores.shape[1]) % 5 == input_ids.shape[1] % 5, -torch.inf
            )
        return torch.full_like(scores, -torch.inf if self.variant == 2 else torch.nan)


class Stops(Witness, StoppingCriteria):
    """A user's stopping criterion.

    Variant 0 stops after two even tokens, 1 at a length, 2 stops every other row.
    """

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append((input_ids.tolist(), None if scores is None else len(scores)))
        if self.variant == 0:
            return (input_ids[:, -2:] % 2 == 0).all(1)
        rows = input_ids.shape[0]
        if self.variant == 1:
            return torch.full((rows,), input_ids.shape[1] >= 9)
        return (torch.arange(rows) % 2 == 0) & (input_ids[:, -1] % 3 == 0)


class Allowed(Witness):
    """A `prefix_allowed_tokens_fn`.

    Variant 0 allows several tokens, 1 a single one, 2 only the end token for some sentences.
    """

    def __call__(self, sentence: int, ids: torch.Tensor) -> list[int]:
        self.seen.append((sentence, ids.tolist()))
        several = [zoo.EOS, 4 + sentence, 10 + len(ids) % 5, 30, 31]
        return (
            several,
            [4 + len(ids) % 3],
            [zoo.EOS] if (sentence + len(ids)) % 3 == 0 else several,
        )[self.variant]


class Listener(Witness, BaseStreamer):
    """A streamer that records what it receives."""

    def put(self, value: torch.Tensor) -> None:
        self.seen.append(value.tolist())

    def end(self) -> None:
        self.seen.append("end")


@dataclass
class Call:
    """A call of `generate`: a model, its arguments, and the sizes at which fastgen changes methods.

    Attributes:
        small: whether k-best works over groups of tokens and the KV cache is compacted often, as
            for large inputs.
        growth: slots by which KV buffers grow.
        around: names in `tests.support.surroundings`, each with the seed of its choices.
    """

    family: str
    model: Any
    kwargs: dict[str, Any]
    sentences: int
    length: int
    torch_seed: int
    small: bool = True
    growth: int = 32
    around: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def encoder_decoder(self) -> bool:
        return bool(self.model.config.is_encoder_decoder)

    def __str__(self) -> str:
        sizes = (
            f"kbest in groups: {self.small}, cache growth: {self.growth}, "
            f"torch seed: {self.torch_seed}"
        )
        sizes += f", around: {self.around}" if self.around else ""
        return f"{self.family} ({sizes})\n  " + "\n  ".join(
            f"{k}={_short(v)}" for k, v in self.kwargs.items()
        )


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor({value.tolist() if value.numel() <= 80 else tuple(value.shape)})"
    if isinstance(value, tf.PreTrainedModel | tf.PreTrainedTokenizerBase):
        return type(value).__name__
    return repr(value)


Drawn = dict[str, Any]


@dataclass(frozen=True)
class Option:
    """An option that is drawn with probability `chance`; `draw` returns the arguments it adds."""

    chance: float
    draw: Callable[[Random, Call], Drawn]


def _pick(name: str, *values: Any) -> Callable[[Random, Call], Drawn]:
    return lambda r, _: {name: copy.deepcopy(r.choice(values))}


def _between(name: str, low: float, high: float) -> Callable[[Random, Call], Drawn]:
    return lambda r, _: {name: low + (high - low) * r.randint(0, 1000) / 1000}


def _tokens(r: Random, most: int, least: int = 1) -> list[int]:
    return [r.randrange(V) for _ in range(r.randint(least, most))]


def _words(r: Random, most: int) -> list[list[int]]:
    return [_tokens(r, 3) for _ in range(r.randint(1, most))]


def _lengths(r: Random, call: Call) -> Drawn:
    drawn: Drawn = {}
    if r.random() < 0.2:
        drawn["max_length"] = r.randint(1, 24)
    if not drawn or r.random() < 0.1:
        drawn["max_new_tokens"] = r.choice([1, 2, 3, *range(4, 15), 40])
    return drawn


def _returned(r: Random, call: Call) -> Drawn:
    names = ("output_scores", "output_logits", "output_hidden_states")
    return {"return_dict_in_generate": r.random() < 0.9} | {
        name: True for name in names if r.random() < 0.6
    }


def _attentions(r: Random, call: Call) -> Drawn:
    # Otherwise the implementation is sdpa, which returns no attentions. The toolkit's behaviour is
    # compared in that case too.
    if (
        r.random() < 0.8
        and models.has_attention_interface(call.family)
        and (call.encoder_decoder or not bool((call.kwargs["input_ids"] == zoo.PAD).any()))
    ):
        call.model = model_of(call.family, call.model.dtype, "eager")
    return {"return_dict_in_generate": True, "output_attentions": True}


def _embeds(r: Random, call: Call) -> Drawn:
    ids = call.kwargs.get("input_ids")
    if ids is None:
        return {}
    with torch.no_grad():
        drawn = {"inputs_embeds": call.model.get_input_embeddings()(ids).detach().clone()}
    if call.encoder_decoder or r.random() < 0.8:
        del call.kwargs["input_ids"]
    return drawn


def _decoder_prompt(r: Random, call: Call) -> Drawn:
    if not call.encoder_decoder:
        return {}
    length = r.randint(1, 5)
    prompt = torch.tensor([[_token(r) for _ in range(length)] for _ in range(call.sentences)])
    if r.random() < 0.7:
        prompt[:, 0] = zoo.START
    drawn: Drawn = {"decoder_input_ids": prompt}
    if r.random() < 0.4:
        mask = torch.ones_like(prompt)
        mask[r.randrange(call.sentences), : r.randrange(length)] = 0
        drawn["decoder_attention_mask"] = mask
    return drawn


def _token(r: Random) -> int:
    return r.randrange(4, V)


def _encoder_outputs(r: Random, call: Call) -> Drawn:
    if not call.encoder_decoder or "input_ids" not in call.kwargs:
        return {}
    with torch.no_grad():
        mask = call.kwargs.get("attention_mask")
        outputs = call.model.get_encoder()(
            call.kwargs["input_ids"], attention_mask=mask, return_dict=True
        )
    if r.random() < 0.5:
        del call.kwargs["input_ids"]
    return {"encoder_outputs": outputs}


def _no_mask(r: Random, call: Call) -> Drawn:
    call.kwargs.pop("attention_mask", None)
    return {}


def _positions(r: Random, call: Call) -> Drawn:
    if call.encoder_decoder or "attention_mask" not in call.kwargs:
        return {}
    return {"position_ids": (call.kwargs["attention_mask"].cumsum(1) - 1).clamp(min=0)}


def _token_types(r: Random, call: Call) -> Drawn:
    if call.family != "gpt2":
        return {}
    return {
        "token_type_ids": torch.tensor(
            [[r.randrange(4) for _ in range(call.length)]] * call.sentences
        )
    }


def _given_past(r: Random, call: Call) -> Drawn:
    """Add a user-provided cache: empty, or filled with the start of the prompt.

    It mostly has as many rows as the call.
    """
    if call.family == "unilm":  # takes no cache, as it would have to hold the source too
        return {}
    config, filled = call.model.config, r.random() < 0.8
    cache: Any = (
        tf.StaticCache(config, max_cache_len=80)
        if r.random() < 0.3
        else tf.DynamicCache(config=config)
    )
    if call.encoder_decoder:
        cache = tf.EncoderDecoderCache(cache, tf.DynamicCache(config=config))
    if filled and "input_ids" in call.kwargs and call.kwargs["input_ids"].shape[1] > 1:
        rows = call.kwargs.get("num_beams", 1)
        rows = call.kwargs.get("num_return_sequences", 1) if rows == 1 else rows
        rows = r.choice([1, 2]) if r.random() < 0.1 else rows
        names = ("input_ids", "attention_mask", "decoder_input_ids")
        seen = {
            name: call.kwargs[name].repeat_interleave(rows, 0)
            for name in names
            if name in call.kwargs
        }
        if call.encoder_decoder:
            prompt = seen.setdefault(
                "decoder_input_ids", torch.full((call.sentences * rows, 1), zoo.START)
            )
            call.kwargs.setdefault("decoder_attention_mask", torch.ones_like(prompt[::rows]))
            seen["decoder_input_ids"] = prompt[:, :-1] if prompt.shape[1] > 1 else prompt
        else:
            past = r.randint(1, seen["input_ids"].shape[1] - 1)
            seen = {name: value[:, :past] for name, value in seen.items()}
            if "attention_mask" in call.kwargs and r.random() < 0.3:
                # The attention mask still covers the whole prompt.
                call.kwargs["input_ids"] = call.kwargs["input_ids"][:, past:]
        with torch.no_grad():
            call.model(**seen, **{CACHE: cache})
    return {CACHE: cache}


def _alone(r: Random, call: Call) -> Drawn:
    call.model = model_of(
        call.family, call.model.dtype, call.model.config._attn_implementation, alone=True
    )
    return {}


def _stop_strings(r: Random, call: Call) -> Drawn:
    return {"stop_strings": [r.choice(["t5", "9", "1t", "t44t4"])], "tokenizer": tokenizer()}


def _assistant(r: Random, call: Call) -> Drawn:
    if r.random() < 0.5:
        # In fp32 fastgen drafts for batches too, which transformers refuses.
        is_refused = call.sentences > 1 and call.model.dtype == torch.float32
        return {} if is_refused else {"prompt_lookup_num_tokens": r.randint(1, 4)}
    return {"assistant_model": model_of(call.family, call.model.dtype, "", 1)}


def _as_config(r: Random, call: Call) -> Drawn:
    """Pass the options in a GenerationConfig, as scripts do."""
    known = set(tf.GenerationConfig().to_dict())
    options = {name: value for name, value in call.kwargs.items() if name in known}
    ids: Drawn = {"pad_token_id": zoo.PAD, "eos_token_id": zoo.EOS, "bos_token_id": 1}
    if call.encoder_decoder:
        ids["decoder_start_token_id"] = zoo.START
    try:
        config = tf.GenerationConfig(**(ids | options))
    except ValueError:  # contradictory options, which `generate` itself has to reject
        return {}
    for name in options:
        del call.kwargs[name]
    return {"generation_config": config}


def _switched(name: str) -> Callable[[Random, Call], Drawn]:
    return lambda r, _: {name: True}


def _witness(
    name: str, kind: Callable[[int], Any], *variants: int
) -> Callable[[Random, Call], Drawn]:
    return lambda r, _: {name: kind(r.choice(variants))}


def _streamer(r: Random, call: Call) -> Drawn:
    # With several beams transformers rejects a streamer, or never calls its `end`
    # (`test_beam_streamer.py`).
    return {} if call.kwargs.get("num_beams", 1) > 1 else {"streamer": Listener(0)}


OPTIONS: dict[str, Option] = {
    # Decoding method and length.
    "beams": Option(0.75, _pick("num_beams", 1, 2, 2, 3, 3, 4, 4, 5)),
    "sampling": Option(0.35, _pick("do_sample", True)),
    "sequences": Option(0.3, _pick("num_return_sequences", 1, 2, 2, 3, 5)),
    "lengths": Option(0.97, _lengths),
    "length penalty": Option(
        0.35, _pick("length_penalty", -2.0, -1.0, -0.3, 0.0, 0.4, 0.6, 1.0, 2.0, 5)
    ),
    "early stopping": Option(0.4, _pick("early_stopping", True, "never", False)),
    # Sampling.
    "temperature": Option(0.15, _pick("temperature", 0.1, 0.7, 1.0, 1.3, 3.0)),
    "top_k": Option(0.15, _pick("top_k", 0, 1, 2, 5, 20, 200)),
    "top_p": Option(0.1, _pick("top_p", 0.05, 0.5, 0.9, 1.0)),
    "min_p": Option(0.06, _pick("min_p", 0.01, 0.1, 0.5)),
    "top_h": Option(0.03, _pick("top_h", 0.1, 0.4)),
    "typical_p": Option(0.06, _pick("typical_p", 0.2, 0.9)),
    "epsilon": Option(0.06, _pick("epsilon_cutoff", 1e-3, 0.2)),
    "eta": Option(0.06, _pick("eta_cutoff", 1e-3, 0.2)),
    # Banned, forced and biased tokens.
    "minimum": Option(
        0.15, lambda r, _: {r.choice(["min_length", "min_new_tokens"]): r.randint(0, 18)}
    ),
    "repetition": Option(0.15, _between("repetition_penalty", 0.5, 2.5)),
    "encoder repetition": Option(0.08, _between("encoder_repetition_penalty", 0.5, 2.5)),
    "n-grams": Option(0.3, _pick("no_repeat_ngram_size", 0, 1, 2, 2, 3, 3, 4)),
    "encoder n-grams": Option(0.1, _pick("encoder_no_repeat_ngram_size", 1, 2, 3, 4)),
    "bad words": Option(0.15, lambda r, _: {"bad_words_ids": _words(r, 4)}),
    "single bad words": Option(
        0.1, lambda r, _: {"bad_words_ids": [[token] for token in _tokens(r, 30)]}
    ),
    "bias": Option(
        0.12,
        lambda r, _: {
            "sequence_bias": {tuple(w): r.choice([-50.0, -2.5, 0.5, 4.0]) for w in _words(r, 5)}
        },
    ),
    "suppress": Option(0.12, lambda r, _: {"suppress_tokens": _tokens(r, r.choice([2, 30]), 0)}),
    "suppress first": Option(
        0.12, lambda r, _: {"begin_suppress_tokens": _tokens(r, r.choice([2, 30]), 0)}
    ),
    "forced first": Option(0.1, lambda r, _: {"forced_bos_token_id": r.randrange(V)}),
    "forced last": Option(
        0.12, lambda r, _: {"forced_eos_token_id": r.choice([zoo.EOS, _token(r), _tokens(r, 3)])}
    ),
    "decay": Option(
        0.1,
        lambda r, _: {
            "exponential_decay_length_penalty": (r.randint(0, 8), r.choice([0.7, 1.01, 1.3, 3.0]))
        },
    ),
    "renormalize": Option(0.15, _switched("renormalize_logits")),
    "remove invalid": Option(0.1, _switched("remove_invalid_values")),
    "guidance": Option(0.05, _pick("guidance_scale", 1.0, 1.5, 3.0)),
    "watermark": Option(
        0.03,
        lambda r, _: {
            "watermarking_config": tf.WatermarkingConfig(bias=r.choice([0.5, 3.0]), context_width=1)
        },
    ),
    # Where a text ends.
    "ends": Option(0.35, lambda r, _: {"eos_token_id": _tokens(r, r.choice([1, 2, 6, 20]))}),
    "end is padding": Option(
        0.08, lambda r, _: dict.fromkeys(("eos_token_id", "pad_token_id"), _token(r))
    ),
    "padding": Option(0.15, lambda r, _: {"pad_token_id": r.choice([0, 1, _token(r)])}),
    "time": Option(0.05, _pick("max_time", 1000.0, 1e-9)),
    "stop strings": Option(0.04, _stop_strings),
    # User-provided callbacks.
    "allowed": Option(0.08, _witness("prefix_allowed_tokens_fn", Allowed, 0, 0, 1, 2)),
    "processor": Option(
        0.1,
        _witness(
            "logits_processor",
            lambda variant: LogitsProcessorList([Favour(variant)]),
            0,
            0,
            0,
            1,
            1,
            1,
            2,
            3,
        ),
    ),
    "criterion": Option(
        0.1,
        _witness(
            "stopping_criteria", lambda variant: StoppingCriteriaList([Stops(variant)]), 0, 1, 2
        ),
    ),
    "streamer": Option(0.06, _streamer),
    # Inputs and outputs.
    "decoder prompt": Option(0.2, _decoder_prompt),
    "encoder outputs": Option(0.06, _encoder_outputs),
    "no mask": Option(0.1, _no_mask),
    "positions": Option(0.04, _positions),
    "token types": Option(0.2, _token_types),
    "fields": Option(0.45, _returned),
    "attentions": Option(0.08, _attentions),
    "attends alone": Option(0.08, _alone),
    "no cache": Option(0.1, _pick("use_cache", False)),
    "cache": Option(0.1, _pick("cache_implementation", "dynamic", "static", "static", "offloaded")),
    "given past": Option(0.1, _given_past),
    "chunked prefill": Option(0.07, _pick("prefill_chunk_size", 1, 3, 4, 20)),
    "assistant": Option(0.03, _assistant),
    "embeds": Option(0.08, _embeds),
    "config": Option(0.12, _as_config),
}


@functools.cache
def model_of(
    family: str, dtype: torch.dtype, attention: str = "", seed: int = 0, alone: bool = False
) -> Any:
    model = models.build(family, dtype, seed)
    if attention:
        model.set_attn_implementation(attention)
    return zoo.alone(model) if alone else model


@functools.cache
def tokenizer() -> Any:
    """Return a tokenizer whose token i is the text `ti`."""
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(V)}, unk_token="t1"))
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="t1", pad_token="t0", eos_token="t2"
    )


def draw(
    r: Random, families: Sequence[str] = models.FAMILIES, dtype: torch.dtype = torch.float64
) -> Call:
    """Draw a call from `OPTIONS`."""
    family = r.choice(families)
    attention = {0: "eager", 1: zoo.OWN_ATTENTION}.get(int(r.random() * 10), "")
    softcaps = family == "gemma2"  # which the other implementations do not support
    if (softcaps and attention == zoo.OWN_ATTENTION) or not models.has_attention_interface(family):
        attention = ""
    eager = attention == "eager"
    dtype = models.dtype_of(family, dtype)
    model = model_of(family, dtype, attention, int(r.random() < 0.3))
    sentences, length = r.randint(1, 5), r.randint(1, 14)
    padding = r.choice(["none", "natural", "natural", "left", "right"])
    if softcaps or (eager and not model.config.is_encoder_decoder):
        # Stock transformers returns NaN here: its eager attention computes the softmax in fp32,
        # where the lowest fp64 number of the mask becomes -inf.
        padding = "none"
    inputs = models.inputs_of(family, model, sentences, length, padding, r)
    call = Call(
        family,
        model,
        inputs,
        sentences,
        length,
        r.randrange(1 << 30),
        r.random() < 0.7,
        r.choice([1, 2, 5, 32]),
    )
    # Half of the calls combine few options, so that they reach fastgen's decode loops.
    few = r.random() < 0.5
    for option in OPTIONS.values():
        if r.random() < option.chance * (0.4 if few else 1.0):
            with suppress(Exception):  # a forward that the option runs, which rejects it
                call.kwargs |= option.draw(r, call)
    call.around = {
        name: r.randrange(1 << 30) for name in SURROUNDINGS if r.random() < (0.05 if few else 0.02)
    }
    # transformers creates their tensors in the default dtype and then cannot use them.
    if any(_has(call, name) for name in ("sequence_bias", "bad_words_ids")):
        call.around.pop("default_dtype", None)
    return call


def _has(call: Call, name: str) -> bool:
    return getattr(call.kwargs.get("generation_config"), name, call.kwargs.get(name)) is not None


@contextmanager
def small_sizes(call: Call) -> Iterator[None]:
    """Let small inputs take the code paths of large ones.

    k-best works over groups of tokens, KV buffers grow, and the KV cache is compacted often.
    """
    before = kbest.SMALL, kbest.GROUP, room.GROWTH, room.COMPACT_EVERY
    if call.small:
        kbest.SMALL, kbest.GROUP, room.COMPACT_EVERY = 0, 4, 2
    room.GROWTH = call.growth
    try:
        yield
    finally:
        kbest.SMALL, kbest.GROUP, room.GROWTH, room.COMPACT_EVERY = before


@contextmanager
def surrounded(call: Call) -> Iterator[None]:
    """Enter the surroundings that were drawn for a call."""
    with warnings.catch_warnings(), ExitStack() as around:
        warnings.simplefilter("ignore")
        for name, seed in call.around.items():
            around.enter_context(SURROUNDINGS[name](call.model, Random(seed)))
        yield


def check(call: Call, tolerance: float = 1e-9) -> BaseException | None:
    """Assert that fastgen does not change a call; return the exception that both runs raised."""
    if call.family == "gemma2" or call.model.config._attn_implementation == "eager":
        # The toolkit's eager attention computes its softmax in fp32.
        tolerance = max(tolerance, 1e-3)
    Witness.made.clear()
    # No decision carries over from an earlier call.
    state_of(call.model).drop(sharing.SharedCacheRefusal)
    with small_sizes(call), surrounded(call):
        result = assert_same(call.model, call.kwargs, call.torch_seed, tolerance)
    half = len(Witness.made) // 2
    for ours, stock in zip(Witness.made[:half], Witness.made[half:], strict=True):
        if result.error is None:
            assert ours.seen == stock.seen, (
                f"{ours!r} was called otherwise: {ours.seen} instead of {stock.seen}"
            )
    return result.error


def is_near_tie(call: Call, tolerance: float) -> bool:
    """Return whether the toolkit's own output changes when its weights change by one ulp.

    Tries 16 such perturbations.
    """
    with fastgen.disabled(), surrounded(call):
        stock = run(call.model, copy.deepcopy(call.kwargs), call.torch_seed)
        for seed in range(16):
            with by_an_ulp(call.model, seed):
                other = run(call.model, copy.deepcopy(call.kwargs), call.torch_seed)
            try:
                same(other.value, stock.value, tolerance=tolerance)
            except AssertionError:
                return True
    return False


@contextmanager
def by_an_ulp(model: Any, seed: int) -> Iterator[None]:
    """Perturb every weight of a model by one ulp, up or down at random, inside the context."""
    before = {weight: weight.detach().clone() for weight in model.parameters()}
    numbers = torch.Generator().manual_seed(seed)
    for weight, own in before.items():
        up = torch.rand(own.shape, generator=numbers, dtype=own.dtype, device="cpu") < 0.5
        end = torch.tensor(torch.inf, dtype=own.dtype, device="cpu")
        weight.data.copy_(torch.where(up, own.nextafter(end), own.nextafter(-end)))
    try:
        yield
    finally:
        for weight, own in before.items():
            weight.data.copy_(own)


@dataclass
class Tally:
    """Counts of a fuzzing run, and the seeds of calls whose outputs were not equal."""

    calls: int = 0
    raised: Counter[str] = field(default_factory=Counter[str])
    rounded: list[int] = field(default_factory=list)
    near_ties: list[int] = field(default_factory=list)
    differences: list[int] = field(default_factory=list)


def fuzz(n: int, seed: int, families: Sequence[str], dtype: torch.dtype, verbose: bool) -> Tally:
    """Compare n random calls and print each difference."""
    tally = Tally()
    for number in tqdm(range(seed, seed + n), unit="call", disable=None):
        call = draw(Random(number), families, dtype)
        if verbose:
            tqdm.write(f"--seed {number}: {call}")
        tally.calls += 1
        in_fp64 = call.model.dtype == torch.float64
        tolerance = 1e-9 if in_fp64 else 1e-4
        try:
            error = check(call, tolerance)
            tally.raised.update([type(error).__name__] if error is not None else [])
        except AssertionError as difference:
            rounded = max(tolerance * (1 if in_fp64 else 100), ROUNDING)
            try:
                check(call, rounded)
            except AssertionError:
                if not in_fp64 and is_near_tie(call, rounded):
                    tally.near_ties.append(number)
                    continue
                tally.differences.append(number)
                command = f"python -m tests.fuzz --seed {number} -n 1"
                if len(families) < len(models.FAMILIES):
                    command += f" --family {' '.join(families)}"
                tqdm.write(
                    f"DIFFERENCE: {command}\n{call}\n  {str(difference)[:1500]}\n", file=sys.stderr
                )
            else:
                tally.rounded.append(number)
    return tally


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__.splitlines()[0]
    )
    parser.add_argument("-n", type=int, default=1000, help="how many calls")
    parser.add_argument("--seed", type=int, default=0, help="the first call's number")
    parser.add_argument(
        "--family", nargs="+", choices=models.FAMILIES, metavar="NAME", default=models.FAMILIES
    )
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    parser.add_argument("--verbose", action="store_true", help="print every call")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tf.logging.set_verbosity_error()
    before, served = Counter(fallbacks()), hits()
    tally = fuzz(
        given.n, given.seed, given.family, getattr(torch, given.dtype), given.verbose,
    )  # fmt: skip
    print(
        f"{tally.calls} calls: {hits() - served} loops run by fastgen, "
        f"{sum(tally.raised.values())} raised alike"
    )
    for name, count in tally.raised.most_common():
        print(f"  raised {name}: {count}")
    for reason, count in (Counter(fallbacks()) - before).most_common():
        print(f"  fell back, {reason}: {count}")
    if tally.rounded:
        print(
            f"  equal tokens, scores a rounding of float32 apart: {len(tally.rounded)}, "
            f"seeds {tally.rounded}"
        )
    if tally.near_ties:
        print(
            f"  transformers' own output differs by an ulp, too: {len(tally.near_ties)}, "
            f"seeds {tally.near_ties}"
        )
    print(
        f"{len(tally.differences)} differences"
        f"{f': seeds {tally.differences}' if tally.differences else ''}"
    )
    return int(bool(tally.differences))


if __name__ == "__main__":
    sys.exit(main())
