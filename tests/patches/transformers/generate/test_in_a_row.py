"""Check native multistep decoding of `generate`, token selection included.

It must equal single steps and transformers' own output.
"""

import contextlib
import ctypes
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.logits_process import (
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from transformers.generation.stopping_criteria import (
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
)

import fastgen
from fastgen.decoding import loop
from fastgen.decoding.backends import native_multistep
from fastgen.decoding.logits.forced_tokens import ForcedTokens
from fastgen.decoding.logits.ngram_block import NGramBlock
from fastgen.decoding.logits.repetition_penalty import RepetitionPenalty
from fastgen.decoding.logits.sequence_bias import SequenceBias
from fastgen.decoding.logits.text import Text
from fastgen.decoding.logits.token_ban import OnlyToken, TokenBan
from fastgen.decoding.logits.transform import LogitsTransform
from fastgen.decoding.search import beam_search, sampling
from fastgen.decoding.search.near_ties import closest_decision
from fastgen.models.runtime.native import step as native_step
from fastgen.ops import native
from fastgen.ops.counts import calls
from fastgen.ops.native import search as c
from fastgen.patches.transformers.compat import CACHE
from fastgen.patches.transformers.generate.report import last_call
from fastgen.patches.transformers.generate.shared_stepper import SharedStepper
from tests.models.test_in_c import _wide  # noqa: F401  a fixture: heads that C can attend with
from tests.ops.test_native import own_variant as variant  # noqa: F401  a fixture
from tests.support import zoo
from tests.support.allocations import allocations
from tests.support.parity import assert_same
from tests.support.together import start_soon

WRITTEN = (
    "bart",
    "marian",
    "mbart",
    "m2m_100",
    "pegasus",
    "blenderbot",
    "gpt2",
    "opt",
    "llama",
    "qwen3",
    "phi",
    "mistral",
    "t5",
    "mt5",
    "umt5",
    "gemma2",  # soft caps of scores and logits, norms of outputs
    "bloom",
    "codegen",
    "cohere",
    "falcon-40b",
    "granite",
    "nemotron",
)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Return a list that records token selections run step by step."""
    made: list[int] = []
    for kind in (beam_search.BeamSearch, sampling.Sampling):
        own = kind.advance

        def advance(self: Any, model: Any, logits: Tensor, own: Any = own) -> bool:
            made.append(self.batch_size)
            return own(self, model, logits)

        monkeypatch.setattr(kind, "advance", advance)
    return made


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngrams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[t, 7] for t in range(4, 60)] + [[3, t, 9] for t in range(60)]},
    "bans": {"bad_words_ids": [[5], [6], [8]], "min_new_tokens": 6, "suppress_tokens": [9, 11]},
    "ends": {"eos_token_id": [2, 7, 9, 30]},
    "no end": {"eos_token_id": None},
    "forced": {"forced_eos_token_id": 6},
    "early": {"early_stopping": True, "length_penalty": 0.0},
    "never": {"early_stopping": "never", "length_penalty": 2},
    "short": {"length_penalty": -1.5, "eos_token_id": [2, 7, 9, 30, 31, 32]},
}  # fmt: skip


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("family", ["marian", "gpt2", "llama"])
def test_options(variant: str, family: str, options: str, beams: int, alone: list[int]) -> None:  # noqa: F811
    model = zoo.build(family, torch.float32)
    for padding in ("none", "natural"):
        kwargs = (
            zoo.batch(model, 5, 9, padding)
            | OPTIONS[options]
            | {"num_beams": beams, "max_new_tokens": 40}
        )
        for _ in range(2):
            calls.clear(), alone.clear()
            assert assert_same(model, kwargs).error is None
        assert calls["search", "native"] > 0
        call = last_call()
        assert call is not None
        steps = len(call.steps)
        assert len(alone) < max(3, steps // 2), "most steps were in a row"


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", WRITTEN)
def test_families(variant: str, family: str, beams: int) -> None:  # noqa: F811
    model = zoo.build(family, torch.float32)
    # Multistep alone, after compaction, and after buffers have grown.
    for length, new in (
        (9, 3),
        (9, 40),
        (1, 70),
    ):
        kwargs = zoo.batch(model, 4, length) | {
            "num_beams": beams,
            "max_new_tokens": new,
            "min_new_tokens": new // 2,
        }
        for _ in range(2):
            assert assert_same(model, kwargs).error is None
    assert calls["search", "native"] > 0


UPDATES: dict[str, dict[str, Any]] = {
    "penalty": {"repetition_penalty": 1.3},
    "reward": {"repetition_penalty": 0.8, "no_repeat_ngram_size": 3},
    "biases": {"sequence_bias": [[[t], 40.0 - t] for t in range(4, 60)]},
    # A penalty of biased scores differs from a bias of penalised ones.
    "bias, then penalty": {
        "sequence_bias": [[[t], 30.0] for t in range(zoo.VOCABULARY)],
        "repetition_penalty": 1.5,
    },
    "all": {
        "sequence_bias": [[[5], 25.5], [[7], -30.0]],
        "repetition_penalty": 1.7,
        "bad_words_ids": [[6], [8, 11]],
        "min_new_tokens": 9,
        "eos_token_id": [2, 7, 9],
        "suppress_tokens": [9, 11],
    },
}


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("options", UPDATES)
@pytest.mark.parametrize("family", ["marian", "gpt2", "llama"])
def test_updates_of_scores(
    variant: str,  # noqa: F811
    family: str,
    options: str,
    beams: int,
    alone: list[int],
) -> None:
    """Penalties and biases apply in C as in transformers."""
    model = zoo.build(family, torch.float32)
    for padding in ("none", "natural"):
        for rows in (1, 5):
            kwargs = zoo.batch(model, rows, 9, padding) | UPDATES[options]
            kwargs |= {"max_new_tokens": 40, "num_beams": beams}
            for _ in range(2):
                calls.clear(), alone.clear()
                assert assert_same(model, kwargs).error is None
            assert calls["search", "native"] > 0
            call = last_call()
            assert call is not None
            assert len(alone) < max(3, len(call.steps) // 2), "most steps were in a row"


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", UPDATES)
def test_updates_of_scores_in_half_precision(
    variant: str,  # noqa: F811
    options: str,
    dtype: torch.dtype,
    beams: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tokens are those that single steps in C select."""
    model = zoo.build("llama", dtype)
    kwargs = zoo.batch(model, 3, 9, "natural") | UPDATES[options]
    kwargs |= {"max_new_tokens": 40, "num_beams": beams}
    model.generate(**kwargs)
    calls.clear()
    found = model.generate(**kwargs)
    assert calls["search", "native"] > 0
    monkeypatch.setattr(loop, "BACKENDS", (loop.Eager,))
    calls.clear()
    assert torch.equal(found, model.generate(**kwargs))
    assert calls["decoder_step", "native"] > calls["search", "native"] == 0


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    "start", [0, 4, 7, 30, torch.tensor([0, 3, 12, 99]), torch.tensor([-2] * 4)]
)
def test_penalty_of_a_part_of_the_text(
    variant: str,  # noqa: F811
    start: int | Tensor,
    beams: int,
) -> None:
    """The first tokens that count differ by row, and rows leave the batch."""
    if isinstance(start, Tensor):
        start = start.repeat_interleave(beams)
    model = zoo.build("gpt2", torch.float32)
    try:
        penalty = RepetitionPenaltyLogitsProcessor(1.6, prompt_ignore_length=start)
    except ValueError as error:
        pytest.skip(f"transformers refuses it: {error}")
    kwargs = zoo.batch(model, 4, 9) | {
        "logits_processor": LogitsProcessorList([penalty]),
        "max_new_tokens": 40,
        "eos_token_id": ENDS,
        "num_beams": beams,
    }
    for _ in range(2):
        assert assert_same(model, kwargs).error is None
    assert calls["search", "native"] > 0


@pytest.mark.parametrize("beams", [1, 2])
def test_penalty_of_a_token_without_a_score(variant: str, beams: int) -> None:  # noqa: F811
    """The result, or the error, is that of the toolkit."""
    model = zoo.build("gpt2", torch.float32)
    model.lm_head = nn.Linear(model.config.n_embd, zoo.VOCABULARY - 20)
    kwargs = zoo.batch(model, 2, 9, "none") | {"repetition_penalty": 1.2, "max_new_tokens": 12}
    kwargs["num_beams"] = beams
    kwargs["input_ids"][0, 3] = zoo.VOCABULARY - 1
    for _ in range(2):
        assert_same(model, kwargs)


ENDS = [2, 7, 9, 30]


@pytest.mark.parametrize("family", ["marian", "t5"])
def test_sentences_leave(variant: str, family: str) -> None:  # noqa: F811
    """Sentences with short texts leave, and results keep their order, after compaction as well."""
    model = zoo.build(family, torch.float32)
    for beams in (1, 4):
        kwargs = zoo.batch(model, 17, 9) | {
            "num_beams": beams,
            "max_new_tokens": 60,
            "eos_token_id": ENDS,
        }
        # This varies the tokens and lets the texts end.
        kwargs |= {"no_repeat_ngram_size": 1}
        for _ in range(2):
            assert assert_same(model, kwargs).error is None
        call = last_call()
        assert call is not None
        assert call.steps[-1][0] < call.steps[0][0]
        assert calls["search", "native"] > 0
        kwargs |= {"num_return_sequences": beams}
        assert assert_same(model, kwargs).error is None


def _mpt() -> Any:
    """Return a model with ALiBi and heads that C attention supports."""
    return transformers.MptForCausalLM(
        transformers.MptConfig(
            d_model=48, n_heads=3, n_layers=2, max_seq_len=64, vocab_size=zoo.VOCABULARY,
            initializer_range=0.5, use_cache=True, pad_token_id=zoo.PAD, bos_token_id=1,
            eos_token_id=zoo.EOS,
        )
    )  # fmt: skip


@pytest.mark.parametrize("most", [1, 2**20])
@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("family", ["t5", "mpt"])
def test_biases_by_distance(
    variant: str,  # noqa: F811
    family: str,
    beams: int,
    most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cover a prompt of several tokens, and space for the biases of only one step."""
    monkeypatch.setattr(native_step, "BIASES", most)
    monkeypatch.setitem(zoo.MORE, "mpt", _mpt)
    model = zoo.build(family, torch.float32)
    prompt = {} if family == "mpt" else {"decoder_input_ids": torch.tensor([[0, 7, 9, 8, 5]] * 4)}
    kwargs = zoo.batch(model, 4, 9, "natural") | {"num_beams": beams, "max_new_tokens": 50} | prompt
    for _ in range(2):
        assert (
            assert_same(model, kwargs | {"min_new_tokens": 40, "no_repeat_ngram_size": 2}).error
            is None
        )
    assert calls["search", "native"] > 0


@pytest.mark.parametrize("beams", [1, 3])
def test_equal_values_are_left_to_torch(
    variant: str,  # noqa: F811
    beams: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens with equal embeddings tie in every step; `torch.topk` decides which ranks first."""
    model = zoo.build("marian", torch.float32)
    with torch.no_grad():
        model.model.shared.weight[50:] = model.model.shared.weight[4:50]
    kwargs = zoo.batch(model, 4, 9) | {"num_beams": beams, "max_new_tokens": 20}
    model.generate(**kwargs)
    found = model.generate(**kwargs)
    assert calls["search", "native"] > 0
    monkeypatch.setattr(loop, "BACKENDS", (loop.Eager,))
    assert torch.equal(found, model.generate(**kwargs))


@pytest.mark.parametrize("beams", [1, 3])
def test_values_that_are_no_numbers(variant: str, beams: int) -> None:  # noqa: F811
    model = zoo.build("marian", torch.float32)
    with torch.no_grad():
        model.final_logits_bias[0, 20] = math.nan
    kwargs = zoo.batch(model, 3, 7) | {"num_beams": beams, "max_new_tokens": 6}
    for _ in range(2):
        model.generate(**kwargs)
    assert model.generate(**kwargs).shape[0] == 3


@pytest.mark.parametrize("beams", [1, 3])
def test_a_token_without_an_embedding(variant: str, beams: int) -> None:  # noqa: F811
    """Both raise torch's own error, as single steps do."""
    model = zoo.build("gpt2", torch.float32)
    head = nn.Linear(model.config.n_embd, zoo.VOCABULARY + 64)
    kwargs = zoo.batch(model, 3, 7, "none") | {
        "num_beams": beams,
        "max_new_tokens": 12,
        "eos_token_id": None,
    }
    for _ in range(2):
        model.generate(**kwargs)
    with torch.no_grad():
        head.weight[: zoo.VOCABULARY], head.bias[:] = model.lm_head.weight, 0.0
        head.weight[zoo.VOCABULARY :] = 0.0
        head.bias[zoo.VOCABULARY :] = 1e4
    model.lm_head = head
    with pytest.raises(IndexError, match="index out of range in self"):
        model.generate(**kwargs)


@pytest.mark.parametrize("beams", [1, 3])
def test_without_memory(variant: str, beams: int, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The batch is split, and the result is the same."""
    model = zoo.build("marian", torch.float32)
    kwargs = zoo.batch(model, 4, 7, "none") | {"num_beams": beams, "max_new_tokens": 8}
    for _ in range(2):
        wanted = model.generate(**kwargs)
    name, refused = "search_beams" if beams > 1 else "search_rows", list[int]()
    own = getattr(c, name)

    def failing(by: native.Library, threads: int, decoder: c.Decoder, *others: Any) -> int:
        rows = ctypes.cast(decoder.step, ctypes.POINTER(native.step.Step)).contents.rows
        if rows > 2 * beams:
            refused.append(rows)
            return c.NO_MEMORY
        return own(by, threads, decoder, *others)

    monkeypatch.setattr(c, name, failing)
    assert torch.equal(model.generate(**kwargs), wanted)
    assert refused[0] == 4 * beams


@pytest.mark.parametrize(
    ("family", "beams"), [("marian", 1), ("marian", 4), ("gpt2", 1), ("gpt2", 4)]
)
def test_nothing_is_allocated_between_steps(variant: str, family: str, beams: int) -> None:  # noqa: F811
    """Between two returns to Python, torch allocates nothing."""
    model = zoo.build(family, torch.float32)
    kwargs = zoo.batch(model, 4, 9, "none") | {"num_beams": beams, "eos_token_id": None}
    for new in (6, 15, 6, 15):
        model.generate(**kwargs, max_new_tokens=new)
    few, many = (
        allocations(lambda n=n: model.generate(**kwargs, max_new_tokens=n)).sizes for n in (6, 15)
    )
    assert calls["search", "native"] > 0
    assert len(many) <= len(few)


def test_structures(variant: str) -> None:  # noqa: F811
    """The structures have equal sizes in Python and C."""
    library = ctypes.CDLL(str(native.LIBRARIES / f"{variant}.so"))
    library.search_size.restype = ctypes.c_int64
    assert library.search_size() == c.SIZE


class _Loud(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


class _Odd(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] > 12)


@pytest.mark.parametrize(
    "listening",
    [
        {"logits_processor": LogitsProcessorList([_Loud()])},
        {"stopping_criteria": StoppingCriteriaList([_Odd()])},
        {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(1e6)])},
        {"output_scores": True, "return_dict_in_generate": True},
        {"sequence_bias": [[[5, 7], 2.5]]},
        {"do_sample": True, "typical_p": 0.8},
    ],
    ids=["processor", "criterion", "time", "scores", "sequences", "draws"],
)
@pytest.mark.parametrize("beams", [1, 3])
def test_whoever_looks_at_a_step_sees_it(
    variant: str,  # noqa: F811
    listening: dict[str, Any],
    beams: int,
) -> None:
    model = zoo.build("marian", torch.float32)
    kwargs = zoo.batch(model, 3, 7) | {"num_beams": beams, "max_new_tokens": 15} | listening
    if "output_scores" in listening:
        with fastgen.disabled():
            wanted = model.generate(**kwargs).sequences
        for _ in range(2):
            assert torch.equal(model.generate(**kwargs).sequences, wanted)
    else:
        for _ in range(2):
            assert assert_same(model, kwargs).error is None
    assert calls["search", "native"] == 0


def test_what_the_caller_gives(variant: str) -> None:  # noqa: F811
    """Cover positions of another dtype, and a length beyond the config's, where both raise."""
    model = zoo.build("gpt2", torch.float32)
    kwargs = zoo.batch(model, 4, 9) | {"max_new_tokens": 12}
    positions = (kwargs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    for beams in (1, 3):
        for _ in range(2):
            assert (
                assert_same(
                    model, kwargs | {"num_beams": beams, "position_ids": positions.int()}
                ).error
                is None
            )
    assert calls["search", "native"] > 0
    longer = StoppingCriteriaList([MaxLengthCriteria(40)])
    kwargs |= {"max_new_tokens": 12, "eos_token_id": None, "stopping_criteria": longer}
    assert assert_same(model, kwargs | {"num_beams": 1}).value.shape[1] == 40
    for turn in (contextlib.nullcontext, fastgen.disabled):
        with turn(), pytest.raises((IndexError, ValueError)):
            model.generate(**kwargs, num_beams=3)


def _assert_decided_alike(
    model: Any,
    sentences: list[Tensor],
    options: dict[str, Any],
    found: list[Any],
    wanted: list[Any],
) -> None:
    """Assert that each sentence equals stock's output for it alone, except for near ties.

    Products round differently alone and in a batch, which may flip a near tie on some processors.
    """
    others = [i for i in range(len(wanted)) if found[i] != wanted[i]]
    assert len(others) < 3
    told = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "num_return_sequences": options["num_beams"],
    }
    for i in others:
        with fastgen.disabled():
            run = model.generate(input_ids=sentences[i][None], **options, **told)
        ends = set(options["eos_token_id"])
        assert closest_decision(run, 0, options["num_beams"], found[i][0], ends) < 1e-3


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("family", ["marian", "t5", "gpt2", "llama"])
@pytest.mark.slow
def test_batches_that_refill(
    family: str, beams: int, alone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that runs alone uses multistep jobs, before and after steps shared with others."""
    model, together = zoo.build(family, torch.float32), start_soon(monkeypatch, 0.5)
    generator = torch.Generator().manual_seed(beams)
    sentences = [
        torch.randint(40, zoo.VOCABULARY, (n,), generator=generator)
        for n in (11, 9, 8, 7, 6, 5, 4, 3, 2) * 3
    ]
    options = {
        "eos_token_id": [2, *range(20, 29)],
        "pad_token_id": 5,
        "max_new_tokens": 40,
        "num_beams": beams,
    }
    options |= {"no_repeat_ngram_size": 3, "min_new_tokens": 3}
    with fastgen.disabled():
        wanted = [
            model.generate(input_ids=sentence[None], **options).tolist() for sentence in sentences
        ]
    for _ in range(2):  # the first pass runs the equivalence check of the step
        calls.clear(), alone.clear(), together.clear()
        found = [
            ids.tolist()
            for ids in fastgen.generate_stream(model, sentences, max_tokens=60, **options)
        ]
        _assert_decided_alike(model, sentences, options, found, wanted)
    in_a_row = calls["search", "native"]
    assert min(in_a_row, len(together)) > 0
    assert max(together) > 1
    monkeypatch.setattr(loop, "BACKENDS", (loop.Eager,))
    one_by_one = len(alone)
    alone.clear()
    found = [
        ids.tolist() for ids in fastgen.generate_stream(model, sentences, max_tokens=60, **options)
    ]
    _assert_decided_alike(model, sentences, options, found, wanted)
    assert calls["search", "native"] == in_a_row
    assert len(alone) > one_by_one


@pytest.mark.parametrize("beams", [1, 3])
def test_keys_and_values_of_the_beams_that_are_returned(variant: str, beams: int) -> None:  # noqa: F811
    model = zoo.build("gpt2", torch.float32)
    kwargs = zoo.batch(model, 4, 9, "none") | {
        "num_beams": beams,
        "max_new_tokens": 40,
        "eos_token_id": ENDS,
    }
    kwargs |= {"return_dict_in_generate": True, "no_repeat_ngram_size": 1}
    for _ in range(2):
        ours = model.generate(**kwargs)
    with fastgen.disabled():
        stock = model.generate(**kwargs)
    assert torch.equal(ours.sequences, stock.sequences)
    assert calls["search", "native"] > 0
    for mine, theirs in zip(ours[CACHE].layers, stock[CACHE].layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(mine.values, theirs.values, atol=1e-3, rtol=1e-3)


def test_drafted_steps_are_not_passed_over(variant: str) -> None:  # noqa: F811
    large, small = zoo.build("gpt2", torch.float32), zoo.build("gpt2", torch.float32)
    kwargs = zoo.batch(large, 1, 9, "none") | {
        "num_beams": 3,
        "max_new_tokens": 20,
        "eos_token_id": None,
    }
    wanted = large.generate(**kwargs)
    for _ in range(2):
        before = dict(fastgen.status().bild)
        found = large.generate(**kwargs, assistant_model=small, lossless=True, speculative_beams=2)
        assert torch.equal(found, wanted)
        after = fastgen.status().bild
        gained = {name: after[name] - before.get(name, 0) for name in ("beam_steps", "large_calls")}
        assert 0 < gained["large_calls"] < gained["beam_steps"]


def test_how_long_the_same_is_banned() -> None:
    text = Text(torch.zeros(2, 5, dtype=torch.int64), 1)
    stop = native_multistep.Stop(torch.tensor([2]), [lambda length: length >= 30], longest=30)

    def steps(*transforms: LogitsTransform) -> int:
        return native_multistep.Steps(stop, transforms).uniform_steps(text)

    assert steps() == 25
    assert steps(TokenBan(torch.tensor([7]), lambda length: length < 9)) == 4
    assert steps(OnlyToken(7, lambda length: length == 9)) == 4
    assert steps(ForcedTokens(torch.tensor([7]), lambda length: length == 9)) == 4
    assert steps(NGramBlock(2), TokenBan(torch.tensor([7]))) == 25
    penalty = RepetitionPenalty(1.2, 0, lambda ids, scores: scores)
    assert native_multistep.supported(stop, [penalty])
    extreme = RepetitionPenalty(1e39, 0, lambda ids, scores: scores)
    assert not native_multistep.supported(stop, [extreme])
    for biases, covered in (
        ({(5,): 2.0}, True),
        ({(5, 7): 2.0}, False),
        ({(5,): -torch.inf}, False),
    ):
        bias = SequenceBias(biases)
        assert native_multistep.supported(stop, [bias]) == covered
    assert not native_multistep.supported(
        native_multistep.Stop(torch.tensor([2]), [lambda _: False]), []
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"num_beams": 3, "return_dict_in_generate": True, "output_scores": True},
        {"do_sample": True, "top_k": 5},
        {"use_cache": False},
    ],
)
def test_explain_tells_how_tokens_are_selected(
    options: dict[str, Any],
    dtype: torch.dtype,
    variant: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = zoo.build("marian", dtype)
    kwargs = zoo.batch(model, 2, 9) | {"max_new_tokens": 5} | options
    said = fastgen.explain(model, **kwargs)
    in_c: list[int] = []
    end_steps = SharedStepper.end_steps

    def noted(stepper: Any, run: int, *args: Any) -> None:
        in_c.append(run)
        end_steps(stepper, run, *args)

    monkeypatch.setattr(SharedStepper, "end_steps", noted)
    model.generate(**kwargs)
    assert said.selection == (
        "in C, many decode steps per call" if in_c else "after each decode step"
    )
    assert f"token selection     {said.selection}\n" in f"{said}\n"
    if not options:
        assert bool(in_c) == (dtype == torch.float32)
