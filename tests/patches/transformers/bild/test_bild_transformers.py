"""Compare big-little decoding in `generate` with its definition.

The definition runs the live models on each text by itself, without a cache.
"""

import copy
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from transformers import GenerationMixin
from transformers.generation import logits_process as lp

import fastgen
from fastgen import config
from fastgen.decoding.speculative.adaptive_drafting import DraftTiming, timing_of
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.runtime.ragged_step import Span
from fastgen.models.specs.registry import SPECS
from fastgen.patches.transformers.bild import bild as transformers_bild
from fastgen.patches.transformers.bild.bild import BildDecoderOnlyOutput, BildEncoderDecoderOutput
from fastgen.patches.transformers.generate.fused_decoder import FusedDecoder
from fastgen.patches.transformers.generate.report import last_call
from tests.support import zoo
from tests.support.bild_oracle import Scores, bild
from tests.support.parity import counts

FAMILIES = sorted(name for name in zoo.FAMILIES if SPECS[name].mask_token is None)
ENDS = [zoo.EOS, 7, 9, 30]
NEW = 14


def pair(family: str, seed: int = 0, apart: float = 0.1) -> tuple[Any, Any]:
    """Return a model and a copy whose weights are perturbed slightly."""
    large = zoo.build(family, seed=seed)
    if getattr(large.config, "sliding_window", None):
        large.config.sliding_window = 64  # longer than the texts here
        for layer in large.get_decoder().layers:
            if getattr(layer.self_attn, "sliding_window", None):
                layer.self_attn.sliding_window = 64
    small = copy.deepcopy(large)
    torch.manual_seed(seed + 1)
    with torch.no_grad():
        for weight in small.parameters():
            weight += apart * weight.std(correction=0) * torch.randn_like(weight)
    return large, small


def scores_of(
    model: Any, inputs: dict[str, Tensor], row: int, edit: Callable[[Tensor, Tensor], Tensor]
) -> Scores:
    """Return a function from a text of one row to a model's next-token scores.

    It uses the model's `forward`, uncached and unpadded.
    """
    source = inputs["input_ids"][row][inputs["attention_mask"][row].bool()][None]
    prompt = zoo.START if model.config.is_encoder_decoder else None

    def scores(text: Sequence[int]) -> Tensor:
        with torch.no_grad(), fastgen.disabled():
            if prompt is None:
                padding = inputs["input_ids"].shape[1] - source.shape[1]
                logits = model(input_ids=torch.tensor([text[padding:]])).logits
            else:
                logits = model(input_ids=source, decoder_input_ids=torch.tensor([text])).logits
        return edit(torch.tensor([text]), logits[:, -1].float())[0]

    return scores


def unedited(_: Tensor, scores: Tensor) -> Tensor:
    return scores


def expected(
    large: Any, small: Any, inputs: dict[str, Tensor], fallback: float, rollback: float,
    max_draft: int, edit: Callable[[Tensor, Tensor], Tensor] = unedited, paper_compat: bool = False,
) -> list[tuple[list[int], dict[str, int]]]:  # fmt: skip
    """Return the tokens and event counts of each row, by definition."""
    found: list[tuple[list[int], dict[str, int]]] = []
    for row, ids in enumerate(inputs["input_ids"].tolist()):
        prompt = [zoo.START] if large.config.is_encoder_decoder else ids
        longest = len(prompt) + NEW
        ends = lambda text, longest=longest: text[-1] in ENDS or len(text) == longest  # noqa: E731
        models = [scores_of(model, inputs, row, edit) for model in (large, small)]
        tokens, events = bild(*models, prompt, ends, fallback, rollback, max_draft, paper_compat)
        kinds = [kind for kind, _, _ in events]
        names = {"drafted": "draft", "fallbacks": "fallback", "rollbacks": "rollback"}
        found.append((tokens, {name: kinds.count(kind) for name, kind in names.items()}))
    return found


def generated(
    large: Any, inputs: dict[str, Tensor], **options: Any
) -> list[tuple[list[int], dict[str, int]]]:
    """Return the tokens and event counts of each row, by `generate`."""
    settings = {
        "max_new_tokens": NEW,
        "eos_token_id": ENDS,
        "num_beams": 1,
        "return_dict_in_generate": True,
    }
    output = large.generate(**inputs, **settings | options)
    start = 1 if large.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    found: list[tuple[list[int], dict[str, int]]] = []
    for row, ids in enumerate(output.sequences[:, start:].tolist()):
        end = next((i + 1 for i, token in enumerate(ids) if token in ENDS), len(ids))
        assert set(ids[end:]) <= {zoo.PAD}
        assert int(output.bild["tokens"][row]) == end
        counts = {
            name: int(output.bild[name][row]) for name in ("drafted", "fallbacks", "rollbacks")
        }
        found.append((ids[:end], counts))
    return found


def greedy(large: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    """Return the greedy output of unpatched transformers."""
    with fastgen.disabled():
        return large.generate(
            **inputs, max_new_tokens=NEW, eos_token_id=ENDS, num_beams=1, **options
        )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_every_text_is_that_of_the_definition(family: str) -> None:
    rng = random.Random(family)
    large, small = pair(family)
    inputs = zoo.batch(large, 4, 9)
    if family.startswith("gemma"):
        inputs = zoo.batch(large, 4, 9, padding="none")  # its own `forward` gives NaN for padding
    if family == "umt5" and not torch.equal(
        greedy(large, inputs), greedy(large, inputs, use_cache=False)
    ):
        pytest.skip("of this version, says other things with a cache than without")
    drafted = 0
    for fallback, rollback in ((0.4, 2.0), (rng.uniform(0.1, 0.6), rng.uniform(0.0, 4.0))):
        options = {
            "fallback_threshold": fallback,
            "rollback_threshold": rollback,
            "max_draft": rng.choice([2, 5, 10]),
        }
        found = generated(large, inputs, assistant_model=small, **options)
        assert found == expected(large, small, inputs, fallback, rollback, options["max_draft"])
        drafted += sum(counts["drafted"] for _, counts in found)
    assert drafted


@pytest.mark.parametrize("family", FAMILIES)
def test_lossless_is_the_large_models_greedy_output(family: str) -> None:
    large, small = pair(family, seed=2, apart=0.03)
    padding = "none" if family.startswith("gemma") else "natural"
    for inputs in (zoo.batch(large, 5, 7, padding, seed=1), zoo.batch(large, 1, 7)):
        options = {"max_new_tokens": NEW, "eos_token_id": ENDS, "num_beams": 1}
        output = large.generate(
            **inputs, assistant_model=small, lossless=True, fallback_threshold=0.2,
            adaptive_draft=False, return_dict_in_generate=True, **options,
        )  # fmt: skip
        assert torch.equal(output.sequences, greedy(large, inputs))
        assert int(output.bild["drafted"].sum()) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["marian", "t5", "gpt2", "llama"])
def test_other_dtypes(family: str, dtype: torch.dtype) -> None:
    large, small = (model.to(dtype) for model in pair(family, apart=0.03))
    inputs = zoo.batch(large, 3, 6)
    options = {"lossless": True, "fallback_threshold": 0.2, "adaptive_draft": False}
    output = generated(large, inputs, assistant_model=small, **options)
    if dtype == torch.float32:
        start = 1 if large.config.is_encoder_decoder else 6
        for row, (tokens, _) in zip(greedy(large, inputs)[:, start:].tolist(), output, strict=True):
            assert row[: len(tokens)] == tokens
    assert sum(counts["drafted"] for _, counts in output)


EDITS: dict[str, Callable[[], list[Any]]] = {
    "n-grams and a penalty": lambda: [
        lp.RepetitionPenaltyLogitsProcessor(1.4),
        lp.NoRepeatNGramLogitsProcessor(2),
    ],
    "bad words": lambda: [
        lp.NoBadWordsLogitsProcessor([[68], [22, 33], [88], [0]], eos_token_id=zoo.EOS)
    ],
    "a minimal length": lambda: [lp.MinLengthLogitsProcessor(40, ENDS)],
    "a forced end": lambda: [lp.ForcedEOSTokenLogitsProcessor(12, zoo.EOS)],
    "a temperature": lambda: [lp.TemperatureLogitsWarper(0.5)],
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("family", ["bart", "gpt2"])
def test_processors_look_at_drafts_and_checks_alike(family: str, name: str) -> None:
    large, small = pair(family, seed=4)
    inputs = zoo.batch(large, 3, 8)
    processors = lp.LogitsProcessorList(EDITS[name]())
    options = {"fallback_threshold": 0.3, "rollback_threshold": 1.5, "max_draft": 6}
    found = generated(large, inputs, assistant_model=small, logits_processor=processors, **options)
    assert found == expected(large, small, inputs, 0.3, 1.5, 6, processors)
    if name == "a minimal length":
        assert {len(tokens) for tokens, _ in found} == {NEW}
    elif name != "a temperature":  # a temperature does not change the most likely token
        assert [tokens for tokens, _ in found] != [
            tokens for tokens, _ in generated(large, inputs, assistant_model=small, **options)
        ]


@pytest.mark.parametrize("padding", ["none", "natural"])
def test_a_penalty_passes_over_the_padding_of_each_text(padding: str) -> None:
    """transformers' newest release passes the start of each prompt to its processor."""
    large, small = pair("llama", seed=4)
    inputs, options = (
        zoo.batch(large, 5, 9, padding),
        {"max_new_tokens": 24, "repetition_penalty": 1.5},
    )
    alone = large.generate(**inputs, **options)
    for draft in (1, 4):
        drafted = {
            "assistant_model": small,
            "lossless": True,
            "max_draft": draft,
            "adaptive_draft": False,
        }
        assert torch.equal(large.generate(**inputs, **options, **drafted), alone)


def _exit_of(model: Any, layers: int) -> Any:
    """Return a model of the first layers only, run through its own modules."""
    early = copy.deepcopy(model)
    decoder = early.get_decoder() if early.config.is_encoder_decoder else early
    decoder = getattr(
        decoder, "transformer", getattr(decoder, "gpt_neox", getattr(decoder, "model", decoder))
    )
    for name in ("layers", "h", "block"):
        if isinstance(getattr(decoder, name, None), torch.nn.ModuleList):
            setattr(decoder, name, getattr(decoder, name)[:layers])
    return early


@pytest.mark.parametrize(
    "family", ["bart", "mbart", "marian", "t5", "gpt2", "llama", "phi", "gpt_neox", "gemma2"]
)
def test_the_first_layers_draft(family: str) -> None:
    large, _ = pair(family, seed=3)
    inputs = zoo.batch(large, 3, 7, "none" if family == "gemma2" else "natural")
    early = _exit_of(large, 1)
    found = generated(
        large,
        inputs,
        assistant_early_exit=1,
        fallback_threshold=0.3,
        rollback_threshold=3.0,
        max_draft=4,
    )
    assert found == expected(large, early, inputs, 0.3, 3.0, 4)
    assert sum(counts["drafted"] for _, counts in found)
    options = {"max_new_tokens": NEW, "eos_token_id": ENDS, "num_beams": 1}
    lossless = large.generate(
        **inputs, assistant_early_exit=1, lossless=True, fallback_threshold=0.2, **options
    )
    assert torch.equal(lossless, greedy(large, inputs))


def test_rows_are_what_they_are_alone() -> None:
    large, small = pair("marian", seed=6)
    inputs = zoo.batch(large, 12, 9)
    options = {"assistant_model": small, "fallback_threshold": 0.3, "rollback_threshold": 2.0}
    together = generated(large, inputs, **options)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    assert generated(large, {k: v[order] for k, v in inputs.items()}, **options) == [
        together[i] for i in order
    ]
    for row in range(12):
        length = int(inputs["attention_mask"][row].sum())
        alone = {name: value[row : row + 1, :length] for name, value in inputs.items()}
        assert generated(large, alone, **options) == [together[row]]


class _Late(DraftTiming):
    """A pace that starts drafting in the seventh round."""

    rounds = 0

    def drafts(self, texts: int) -> bool:
        self.rounds += 1
        return self.rounds > 6

    def note(self, drafted: bool, texts: int, tokens: int, seconds: float) -> None:
        pass


@pytest.mark.parametrize("early_exit", [False, True])
def test_drafts_that_begin_when_texts_have_left(
    early_exit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_bild, "timing_of", lambda *_: _Late())
    large, small = pair("marian", seed=6)
    inputs, drafts = (
        zoo.batch(large, 24, 9),
        {"assistant_early_exit": 1} if early_exit else {"assistant_model": small},
    )
    options = {
        "max_new_tokens": NEW,
        "eos_token_id": ENDS,
        "num_beams": 1,
        "return_dict_in_generate": True,
    }
    output = large.generate(**inputs, **drafts, lossless=True, fallback_threshold=0.1, **options)
    assert int((output.bild["tokens"] <= 6).sum()) >= 3, "these have left"
    assert torch.equal(output.sequences, greedy(large, inputs))


def test_as_the_paper_has_it() -> None:
    large, small = pair("bart", seed=1)
    inputs = zoo.batch(large, 3, 6)
    found = generated(
        large, inputs, assistant_model=small, fallback_threshold=0.3, paper_compat=True
    )
    assert found == expected(large, small, inputs, 0.3, 2.0, 10, paper_compat=True)


@pytest.mark.parametrize("more", [-5, 8])
def test_vocabularies_may_be_padded_differently(more: int) -> None:
    large, small = pair("gpt2", seed=5, apart=0.02)
    rows = small.config.vocab_size + more
    small.resize_token_embeddings(rows, mean_resizing=False)
    # These tokens would always be chosen if they were considered.
    with torch.no_grad():
        small.transformer.wte.weight[zoo.VOCABULARY :] = 1e3
    inputs = {
        "input_ids": torch.randint(4, 90, (2, 6)),
        "attention_mask": torch.ones(2, 6, dtype=torch.int64),
    }
    output = large.generate(
        **inputs,
        assistant_model=small,
        lossless=True,
        fallback_threshold=0.1,
        max_new_tokens=NEW,
        eos_token_id=ENDS,
    )
    assert torch.equal(output, greedy(large, inputs))


def test_outputs_and_status() -> None:
    for family, kind in (("marian", BildEncoderDecoderOutput), ("llama", BildDecoderOnlyOutput)):
        large, small = pair(family)
        before = fastgen.status().bild
        options = {"assistant_model": small, "fallback_threshold": 0.3, "max_new_tokens": 6}
        output = large.generate(**zoo.batch(large, 3, 5), return_dict_in_generate=True, **options)
        assert type(output) is kind
        assert "bild" in output
        after = fastgen.status().bild
        for name, values in output.bild.items():
            assert after[name] - before.get(name, 0) == int(values.sum())
        plain = large.generate(**zoo.batch(large, 3, 5), **options)
        assert torch.equal(plain, output.sequences)
    assert "drafts: " in str(fastgen.status())


def test_the_generation_config_may_ask() -> None:
    large, small = pair("marian", seed=2)
    inputs = zoo.batch(large, 2, 6)
    options = {
        "assistant_model": small,
        "fallback_threshold": 0.35,
        "rollback_threshold": 1.0,
        "max_draft": 3,
    }
    found = generated(large, inputs, **options)
    settings = tf.GenerationConfig(
        fallback_threshold=0.35, rollback_threshold=1.0, max_draft=3,
        decoder_start_token_id=zoo.START, pad_token_id=zoo.PAD,
    )  # fmt: skip
    assert generated(large, inputs, assistant_model=small, generation_config=settings) == found
    assert (
        generated(
            large,
            inputs,
            assistant_model=small,
            generation_config=tf.GenerationConfig(**settings.to_dict()),
        )
        == found
    )
    large.generation_config = tf.GenerationConfig.from_dict(settings.to_dict())
    other = tf.GenerationConfig(
        max_new_tokens=NEW, decoder_start_token_id=zoo.START, pad_token_id=zoo.PAD
    )
    assert generated(large, inputs, assistant_model=small, generation_config=other) == found, (
        "the model's own says"
    )
    assert generated(large, inputs, assistant_model=small) == found
    plain = large.generate(**inputs, max_new_tokens=NEW, eos_token_id=ENDS)
    assert torch.equal(plain, greedy(large, inputs)), (
        "without an assistant the thresholds ask for nothing"
    )


def test_an_assistant_alone_is_transformers_own() -> None:
    large, small = pair("gpt2")
    before = fastgen.status().bild
    inputs = zoo.batch(large, 1, 5)
    output = large.generate(**inputs, assistant_model=small, max_new_tokens=NEW, eos_token_id=ENDS)
    assert torch.equal(output, greedy(large, inputs))
    assert fastgen.status().bild == before


def test_sampling_is_that_of_the_random_state() -> None:
    large, small = pair("llama")
    inputs, found = zoo.batch(large, 3, 5), list[Tensor]()
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(
            large.generate(
                **inputs, assistant_model=small, lossless=True, fallback_threshold=0.1,
                do_sample=True, top_k=20, max_new_tokens=NEW,
            )
        )  # fmt: skip
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


class _Noting(tf.generation.BaseStreamer):
    def __init__(self) -> None:
        self.put_tokens: list[int] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.put_tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_a_streamer_hears_what_stands() -> None:
    large, small = pair("gpt2")
    inputs, streamer = zoo.batch(large, 1, 5), _Noting()
    output = large.generate(
        **inputs,
        assistant_model=small,
        fallback_threshold=0.2,
        max_new_tokens=NEW,
        streamer=streamer,
    )
    assert streamer.put_tokens == output[0].tolist()
    assert streamer.ended


def test_a_change_of_weights_is_seen() -> None:
    large, small = pair("bart")
    inputs = zoo.batch(large, 2, 6)
    options = {
        "assistant_model": small,
        "lossless": True,
        "fallback_threshold": 0.2,
        "max_new_tokens": NEW,
    }
    before = large.generate(**inputs, **options, eos_token_id=ENDS)
    with torch.no_grad():
        for weight in large.get_decoder().parameters():
            weight.mul_(1.5)
    after = large.generate(**inputs, **options, eos_token_id=ENDS)
    assert torch.equal(after, greedy(large, inputs))
    assert not torch.equal(before, after)


class _Vocabulary:
    def __init__(self, **tokens: int) -> None:
        self.tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return self.tokens


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a fallback above 1": (
        {"fallback_threshold": 1.5}, ValueError, "fallback_threshold is 1.5; it must be from 0"
    ),
    "a negative fallback": ({"fallback_threshold": -0.1}, ValueError, "fallback_threshold is -0.1"),
    "no number": ({"fallback_threshold": math.nan}, ValueError, "fallback_threshold is nan"),
    "a fallback that is text": (
        {"fallback_threshold": "0.6"}, TypeError, "fallback_threshold is a str, '0.6'"
    ),
    "a negative rollback": (
        {"rollback_threshold": -1.0}, ValueError, "rollback_threshold is -1.0; it must be 0"
    ),
    "no draft": ({"max_draft": 0}, ValueError, "max_draft is 0; it must be 1 or more"),
    "half a token": ({"max_draft": 2.5}, TypeError, "max_draft is a float, 2.5"),
    "two rollbacks": (
        {"lossless": True, "rollback_threshold": 2.0}, ValueError,
        "rollback_threshold=2.0 would keep"
    ),
    "a clock that would change the output": (
        {"fallback_threshold": 0.5, "adaptive_draft": True}, ValueError,
        "adaptive_draft=True goes by the clock"
    ),
    "beams": (
        {"fallback_threshold": 0.5, "num_beams": 4}, ValueError, "num_beams is 4, and must be 1"
    ),
    "samples": (
        {"lossless": True, "do_sample": True, "num_return_sequences": 2}, ValueError,
        "num_return_sequences is 2"
    ),
    "scores": (
        {"lossless": True, "return_dict_in_generate": True, "output_scores": True}, ValueError,
        "output_scores=True"
    ),
    "no small model": (
        {"fallback_threshold": 0.5, "assistant_model": None}, ValueError, "got neither"
    ),
    "two small models": (
        {"fallback_threshold": 0.5, "assistant_early_exit": 1}, ValueError, "got both"
    ),
    "an exit behind the last layer": (
        {"fallback_threshold": 0.5, "assistant_model": None, "assistant_early_exit": 2}, ValueError,
        "an exit behind layer 2 of a decoder of 2: it must be one of 1 to 1",
    ),
    "tokenizers": (
        {
            "fallback_threshold": 0.5, "tokenizer": _Vocabulary(a=1, b=2),
            "assistant_tokenizer": _Vocabulary(a=1, b=3),
        },
        ValueError, "'b' is 2 to the large one and 3 to the small one",
    ),
    "a strange stop": (
        {
            "fallback_threshold": 0.5,
            "stopping_criteria": tf.StoppingCriteriaList([tf.generation.ConfidenceCriteria(0.5)]),
        },
        ValueError, "where a ConfidenceCriteria ends a text",
    ),
    "a processor of the batch": (
        {"fallback_threshold": 0.5, "encoder_repetition_penalty": 1.5}, ValueError,
        "may look at the whole batch"
    ),
    "no cache": ({"fallback_threshold": 0.5, "use_cache": False}, ValueError, "use_cache=False"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_said(name: str) -> None:
    options, error, message = WRONG[name]
    large, small = pair("marian")
    with pytest.raises(error, match=re.escape(message)):
        large.generate(
            **zoo.batch(large, 3, 5), **{"assistant_model": small, "max_new_tokens": 5} | options
        )
    inputs = zoo.batch(large, 3, 5)  # nothing is left behind
    assert torch.equal(
        large.generate(**inputs, max_new_tokens=NEW, eos_token_id=ENDS), greedy(large, inputs)
    )


@pytest.mark.parametrize("name", WRONG)
def test_explain_says_what_the_call_would(name: str) -> None:
    options, error, message = WRONG[name]
    large, small = pair("marian")
    with pytest.raises(error, match=re.escape(message)):
        fastgen.explain(
            large,
            **zoo.batch(large, 3, 5),
            **{"assistant_model": small, "max_new_tokens": 5} | options,
        )


EXPLAINED: dict[str, tuple[dict[str, Any], str]] = {
    "lossy": ({"fallback_threshold": 0.3}, "big-little decoding"),
    "lossless": ({"lossless": True}, "big-little decoding"),
    "drawn": ({"lossless": True, "do_sample": True}, "big-little decoding"),
    "first layers": (
        {"assistant_model": None, "assistant_early_exit": 1, "lossless": True},
        "big-little decoding"
    ),
    "beams": ({"lossless": True, "num_beams": 3, "speculative_beams": True}, "beam search"),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPLAINED)
@pytest.mark.parametrize("family", ["marian", "llama", "t5"])
def test_explain_says_what_then_runs(family: str, name: str) -> None:
    options, method = EXPLAINED[name]
    large, small = pair(family)
    call = (
        {"assistant_model": small, "max_new_tokens": 6, "min_new_tokens": 6}
        | options
        | zoo.batch(large, 2, 5)
    )
    before = counts()
    explained = fastgen.explain(large, **call)
    assert counts() == before, "and nothing has run"
    assert explained.plan is not None
    assert explained.plan.method == method
    first = (
        "the first 1 layers draft"
        if "assistant_early_exit" in options
        else f"{type(small).__name__} drafts"
    )
    assert first in explained.notes
    large.generate(**call)
    report = last_call()
    assert report is not None
    assert report.plan == explained.plan
    if method == "big-little decoding":
        alone = {"max_new_tokens": 6, "min_new_tokens": 6} | zoo.batch(large, 2, 5)
        models = 1 if "assistant_early_exit" in options else 2
        assert explained.kv_bytes == models * fastgen.explain(large, **alone).kv_bytes


def test_models_of_different_tokenizers_are_told_apart() -> None:
    large, small = pair("marian")
    inputs = zoo.batch(large, 2, 5)
    with pytest.raises(ValueError, match="cannot draft for a MarianMTModel"):
        large.generate(**inputs, assistant_model=zoo.build("gpt2"), fallback_threshold=0.5)
    other = zoo.build("marian")
    other.resize_token_embeddings(5096, mean_resizing=False)
    with pytest.raises(ValueError, match="vocabularies have 96 and 5096 tokens"):
        large.generate(**inputs, assistant_model=other, fallback_threshold=0.5)
    small.generation_config.eos_token_id = 50
    with pytest.raises(ValueError, match="eos_token_id is 2 and 50"):
        large.generate(**inputs, assistant_model=small, fallback_threshold=0.5)


def test_a_model_whose_steps_are_not_from_the_weights_is_refused() -> None:
    large, small = pair("marian")
    inputs = zoo.batch(large, 2, 5)
    small.get_decoder().layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="a hook on a MarianDecoderLayer"):
        large.generate(**inputs, assistant_model=small, fallback_threshold=0.5)
    with fastgen.disabled(), pytest.raises(ValueError, match="fallback_threshold"):
        large.generate(**inputs, assistant_model=small, fallback_threshold=0.5)


@pytest.fixture
def parity(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FASTGEN_PARITY", "1")
    config.reload()
    yield
    monkeypatch.undo()
    config.reload()


@pytest.mark.usefixtures("parity")
def test_parity_mode_compares_what_is_lossless() -> None:
    large, small = pair("marian")
    inputs = zoo.batch(large, 2, 5)
    before = fastgen.status().parity
    options = {"assistant_model": small, "max_new_tokens": NEW, "fallback_threshold": 0.2}
    large.generate(**inputs, lossless=True, **options)
    large.generate(**inputs, **options)
    after = fastgen.status().parity
    gained = {
        name: count - before.get(name, 0)
        for name, count in after.items()
        if count != before.get(name, 0)
    }
    assert gained.pop("equal") == 1
    assert [name.partition(":")[0] for name in gained] == ["run once"]


def test_in_a_stream() -> None:
    large, small = pair("marian", seed=3, apart=0.03)
    sentences = [
        row[mask.bool()].tolist()
        for row, mask in zip(*zoo.batch(large, 9, 8).values(), strict=True)
    ]
    options = {"max_new_tokens": NEW, "eos_token_id": ENDS, "num_beams": 1}
    together = fastgen.generate_stream(
        large,
        sentences,
        max_tokens=24,
        assistant_model=small,
        lossless=True,
        fallback_threshold=0.2,
        **options,
    )
    with fastgen.disabled():
        alone = [large.generate(torch.tensor([sentence]), **options) for sentence in sentences]
    for found, stock in zip(together, alone, strict=True):
        assert torch.equal(found, stock)


def test_a_config_may_come_by_position() -> None:
    large, small = pair("gpt2")
    inputs = zoo.batch(large, 1, 5)["input_ids"]
    with pytest.raises(ValueError, match="num_beams is 4"):
        large.generate(
            inputs, tf.GenerationConfig(num_beams=4), assistant_model=small, fallback_threshold=0.5
        )
    found = large.generate(
        inputs, tf.GenerationConfig(max_new_tokens=4), assistant_model=small, lossless=True
    )
    with fastgen.disabled():
        assert torch.equal(found, large.generate(inputs, max_new_tokens=4))


def test_a_call_asks_for_more_than_the_config_says() -> None:
    large, small = pair("marian", seed=2)
    inputs = zoo.batch(large, 2, 6)
    large.generation_config.lossless = True
    options = {"assistant_model": small, "fallback_threshold": 0.1, "max_draft": 5}
    assert generated(large, inputs, rollback_threshold=3.0, **options) == expected(
        large, small, inputs, 0.1, 3.0, 5
    )
    assert generated(large, inputs, lossless=False, **options) == expected(
        large, small, inputs, 0.1, 2.0, 5
    )


def test_what_is_off_asks_for_nothing() -> None:
    large, small = pair("gpt2")
    before = fastgen.status().bild
    inputs = zoo.batch(large, 1, 5)
    for options in (
        {"lossless": False},
        {"speculative_beams": False},
        {"lossless": False, "assistant_model": small},
    ):
        output = large.generate(**inputs, max_new_tokens=NEW, eos_token_id=ENDS, **options)
        assert torch.equal(output, greedy(large, inputs))
    assert fastgen.status().bild == before


def test_another_way_to_decode_is_not_taken_for_it() -> None:
    large, small = pair("gpt2")
    inputs = zoo.batch(large, 1, 5)
    with pytest.raises(ValueError, match="generate ran another way to decode"):
        large.generate(
            **inputs,
            assistant_model=small,
            fallback_threshold=0.5,
            prompt_lookup_num_tokens=3,
            max_new_tokens=5,
        )
    large.generation_config.assistant_early_exit = 1
    with pytest.raises(ValueError, match="assistant_early_exit=1 is in the generation config"):
        large.generate(**inputs, assistant_model=small, fallback_threshold=0.5, max_new_tokens=5)


def test_a_call_within_a_call_is_its_own() -> None:
    large, small = pair("gpt2")
    inputs, other = zoo.batch(large, 1, 5), zoo.batch(large, 1, 4, seed=9)
    within = list[Tensor]()

    class Calling(_Noting):
        def put(self, value: Tensor) -> None:
            super().put(value)
            if not within:
                within.append(large.generate(**other, max_new_tokens=5, eos_token_id=ENDS))

    before = fastgen.status().bild.get("tokens", 0)
    output = large.generate(
        **inputs,
        assistant_model=small,
        fallback_threshold=0.2,
        max_new_tokens=NEW,
        streamer=Calling(),
    )
    with fastgen.disabled():
        assert torch.equal(within[0], large.generate(**other, max_new_tokens=5, eos_token_id=ENDS))
    assert fastgen.status().bild["tokens"] - before == output.shape[1] - 5


def test_a_small_model_with_settings_of_its_own() -> None:
    large, small = pair("t5", seed=3)
    inputs = zoo.batch(large, 2, 6)
    small.generation_config.num_return_sequences = 2
    options = {
        "assistant_model": small,
        "fallback_threshold": 0.3,
        "rollback_threshold": 2.0,
        "max_draft": 5,
    }
    assert generated(large, inputs, **options) == expected(large, small, inputs, 0.3, 2.0, 5)
    small.generation_config.max_new_tokens = 3
    with pytest.raises(ValueError, match="max_new_tokens=3: set it to None"):
        generated(large, inputs, **options)


class _Counting(tf.LogitsProcessor):
    """A processor that could keep state between calls."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


def test_a_users_own_call_of_transformers_processor_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large, small = pair("gpt2")
    monkeypatch.setattr(
        tf.RepetitionPenaltyLogitsProcessor, "__call__", lambda _, ids, scores: scores
    )
    with pytest.raises(ValueError, match="RepetitionPenaltyLogitsProcessor may look"):
        generated(
            large,
            zoo.batch(large, 2, 6),
            assistant_model=small,
            repetition_penalty=1.3,
            fallback_threshold=0.5,
        )


def test_a_processor_that_may_remember_is_refused() -> None:
    large, small = pair("gpt2")
    with pytest.raises(ValueError, match="_Counting may remember"):
        large.generate(
            **zoo.batch(large, 1, 5), assistant_model=small, lossless=True,
            logits_processor=[_Counting()], max_new_tokens=5,
        )  # fmt: skip


@pytest.mark.parametrize("family", ["bart", "llama"])
def test_a_call_that_would_not_draft_is_the_large_models_own(family: str) -> None:
    """A model that lost time with drafts stops drafting.

    Output, fields and counts equal those of a call that drafts.
    """
    large, small = pair(family, seed=2, apart=0.03)
    inputs = zoo.batch(large, 5, 7, seed=1)
    call = {
        "max_new_tokens": NEW,
        "eos_token_id": ENDS,
        "num_beams": 1,
        "assistant_model": small,
        "lossless": True,
    }
    first = large.generate(**inputs, **call, return_dict_in_generate=True)
    timing = timing_of(large, small, None, 5)
    assert timing.total > 0, "the first call goes by the clock"
    timing.lost, before = 1e6, counts()
    rested = large.generate(**inputs, **call, return_dict_in_generate=True)
    report = last_call()
    assert report is not None
    assert report.plan.method == "greedy search"
    assert type(rested) is type(first)
    assert torch.equal(rested.sequences, greedy(large, inputs))
    assert torch.equal(rested.bild["tokens"], first.bild["tokens"])
    assert torch.equal(rested.bild["large_calls"], rested.bild["tokens"])
    assert not rested.bild["drafted"].any()
    assert torch.equal(large.generate(**inputs, **call), greedy(large, inputs))
    after = counts()
    assert after["bild"]["tokens"] - before["bild"]["tokens"] == 2 * int(
        rested.bild["tokens"].sum()
    )
    whole, spent = timing._calls.without_drafts, timing.total
    assert whole is not None
    assert whole > 0
    timing.lost = 0.0
    next(iter(timing._costs.values())).pays = True
    large.generate(**inputs, **call)
    report = last_call()
    assert report is not None
    assert report.plan.method == "big-little decoding", "drafts pay by now"
    assert timing.total > spent


@pytest.mark.parametrize("by", ["model", "layers"])
def test_a_proven_model_reads_the_first_token_with_the_first_draft(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, small = pair("bart", seed=1, apart=0.03)
    inputs, passes = zoo.batch(large, 1, 7, seed=1), list[tuple[bool, int]]()
    extend = FusedDecoder.extend

    def noted(
        self: FusedDecoder, spans: Sequence[Span], step: DecoderStep | None = None
    ) -> torch.Tensor:
        passes.append(
            (
                (step or self.step) is self.step and self.step.module is large.model.decoder,
                spans[0].start,
            )
        )
        return extend(self, spans, step)

    monkeypatch.setattr(FusedDecoder, "extend", noted)
    drafts = {"assistant_model": small} if by == "model" else {"assistant_early_exit": 1}
    call = {
        "max_new_tokens": NEW,
        "num_beams": 1,
        "lossless": True,
        "adaptive_draft": False,
    } | drafts
    outputs = [large.generate(**inputs, **call, return_dict_in_generate=True)]
    passes.clear()
    monkeypatch.setattr(
        GenerationMixin, "_prefill", lambda *_, **__: pytest.fail("it has run a prompt by itself")
    )
    outputs.append(large.generate(**inputs, **call, return_dict_in_generate=True))
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert {name: int(n) for name, n in outputs[1].bild.items()} == {
        n: int(v) for n, v in outputs[0].bild.items()
    }
    assert next(start for is_large, start in passes if is_large) == -1
    assert sum(is_large for is_large, _ in passes) == int(outputs[1].bild["large_calls"])
    assert len(passes) == int(outputs[1].bild["large_calls"] + outputs[1].bild["small_calls"])


def test_a_resting_call_raises_what_any_other_does() -> None:
    large, small = pair("bart")
    inputs = zoo.batch(large, 2, 7)
    call = {"max_new_tokens": NEW, "num_beams": 1, "assistant_model": small, "lossless": True}
    large.generate(**inputs, **call)
    timing_of(large, small, None, 2).lost = 1e6
    with pytest.raises(ValueError, match="output_scores=True is not possible"):
        large.generate(**inputs, **call, return_dict_in_generate=True, output_scores=True)
    large.model.decoder.layers[0].fc1.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="a hook on a Linear"):
        large.generate(**inputs, **call)
