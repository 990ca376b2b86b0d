"""Compare big-little decoding in fairseq with its definition.

The definition runs the live models on each text by itself, without a cache.
"""

import copy
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgen

pytest.importorskip("fairseq")
from fairseq import utils
from fairseq.data import Dictionary
from fairseq.sequence_generator import SequenceGenerator, SequenceGeneratorWithAlignment

from fastgen.decoding.speculative.adaptive_drafting import DraftTiming, timing_of
from fastgen.decoding.speculative.bild import Bild, Counts
from fastgen.patches.fairseq.bild import bild as fairseq_bild
from tests.support import fairseq_zoo as zoo
from tests.support.bild_oracle import Scores, bild

LONGEST = 14
KINDS = ["transformer", "prenorm", "bart"]


@pytest.fixture(autouse=True)
def _double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fairseq's softmax compute in fp64, which it would otherwise round to fp32."""
    monkeypatch.setattr(utils, "softmax", lambda x, dim, onnx_trace=False: torch.softmax(x, dim))


def pair(kind: str, seed: int = 0, apart: float = 0.1) -> tuple[Any, Any]:
    """Return a model and a copy whose weights are perturbed slightly."""
    large = zoo.build(kind, seed=seed)
    small = copy.deepcopy(large)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for weight in small.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight += apart * weight.std(correction=0) * noise
    return large, small


def scores_of(model: Any, source: Sequence[int], options: dict[str, Any]) -> Scores:
    """Return a function from a text to a model's next-token scores.

    It applies a generator's options to the model's `forward`, uncached and unpadded.
    """
    n, longest = options.get("no_repeat_ngram_size", 0), options.get("max_len_b", LONGEST)

    def scores(text: Sequence[int]) -> Tensor:
        # fairseq's attention keeps the number of beams of the last generator.
        for module in model.modules():
            if hasattr(module, "set_beam_size"):
                module.set_beam_size(1)
        with torch.no_grad(), fastgen.disabled():
            encoded = model.encoder(torch.tensor([source]), src_lengths=torch.tensor([len(source)]))
            logits, _ = model.decoder(torch.tensor([text]), encoder_out=encoded)
        found = torch.log_softmax(
            logits[0, -1] / options.get("temperature", 1.0), -1, dtype=torch.float32
        )
        step = len(text) - 1
        found[zoo.PAD] = -torch.inf
        found[3] -= options.get("unk_penalty", 0.0)
        if step >= longest:
            found[torch.arange(len(found)) != zoo.EOS] = -torch.inf
        if step < options.get("min_len", 1):
            found[zoo.EOS] = -torch.inf
        for i in range(len(text) - n + 1 if n else 0):
            if list(text[i : i + n - 1]) == list(text[len(text) - n + 1 :]):
                found[text[i + n - 1]] = -torch.inf
        return found

    return scores


def rows_of(sample: dict[str, Any]) -> list[list[int]]:
    return [
        [token for token in row if token != zoo.PAD]
        for row in sample["net_input"]["src_tokens"].tolist()
    ]


Texts = list[tuple[list[int], list[float]]]


def expected(
    large: Any,
    small: Any,
    sample: dict[str, Any],
    thresholds: dict[str, Any],
    options: dict[str, Any],
) -> tuple[Texts, dict[str, int]]:
    """Return the tokens and large-model scores of each row, and the event counts, by definition."""
    texts, happened = Texts(), dict.fromkeys(("draft", "fallback", "rollback"), 0)
    for source in rows_of(sample):
        models = [scores_of(model, source, options) for model in (large, small)]
        tokens, events = bild(
            *models, [zoo.EOS], lambda text: text[-1] == zoo.EOS, thresholds["fallback_threshold"],
            thresholds["rollback_threshold"], thresholds["max_draft"],
        )  # fmt: skip
        texts.append(
            (
                tokens,
                [float(models[0]([zoo.EOS, *tokens[:i]])[token]) for i, token in enumerate(tokens)],
            )
        )
        for kind in happened:
            happened[kind] += sum(event[0] == kind for event in events)
    return texts, happened


def generated(
    large: Any,
    sample: dict[str, Any],
    small: Any = None,
    options: dict[str, Any] | None = None,
    **asked: Any,
) -> tuple[Texts, Any]:
    """Return the tokens and scores of each row, and the counts, by fastgen's generator."""
    with fastgen.bild(small, **asked) as drafting:
        found, _ = zoo.call(
            [large], sample, {"beam_size": 1, "max_len_b": LONGEST} | (options or {})
        )
    assert all(len(hypotheses) == 1 for hypotheses in found)
    return [
        (h["tokens"].tolist(), h["positional_scores"].tolist()) for (h,) in found
    ], drafting.counts


def assert_like(found: Texts, wanted: Texts) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    for (_, one), (_, other) in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "n-grams": {"no_repeat_ngram_size": 2, "min_len": 10},
    "a minimal length": {"min_len": 9},
    "a short text": {"max_len_b": 4},
    "a temperature": {"temperature": 0.4},
    "unknown words": {"unk_penalty": -2.5},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_text_is_that_of_the_definition(kind: str, name: str) -> None:
    rng, happened = random.Random(name), dict.fromkeys(("draft", "fallback", "rollback"), 0)
    for seed, padding in enumerate(("left", "right", "none")):
        large, small = pair(kind, seed)
        sample = zoo.batch(4, 8, padding, seed)
        thresholds = {
            "fallback_threshold": rng.uniform(0.05, 0.12),
            "rollback_threshold": rng.uniform(2.2, 2.8), "max_draft": rng.choice([2, 5, 10]),
        }  # fmt: skip
        texts, counts = generated(large, sample, small, OPTIONS[name], **thresholds)
        wanted, events = expected(large, small, sample, thresholds, OPTIONS[name])
        assert_like(texts, wanted)
        assert (counts["drafted"], counts["fallbacks"], counts["rollbacks"]) == tuple(
            events.values()
        )
        assert counts["tokens"] == sum(len(tokens) for tokens, _ in texts)
        happened = {kind: count + events[kind] for kind, count in happened.items()}
    assert happened["draft"]
    assert happened["rollback"]


LOSSLESS: dict[str, dict[str, Any]] = OPTIONS | {
    "a length penalty": {"len_penalty": 2.0},
    "no normalization": {"normalize_scores": False},
    "suppressed words": {"tokens_to_suppress": ("w3", "w5")},
    "another start": {"bos_token": 7},
    "another end": {"eos": 7},
    "a share of the source": {"max_len_a": 0.5, "max_len_b": 3},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_is_fairseqs_own_output(kind: str, name: str) -> None:
    drafted, options = 0, {"beam_size": 1, "max_len_b": 20} | LOSSLESS[name]
    for seed in range(2):
        large, small = pair(kind, seed, 0.03)
        sample = zoo.batch(9, 8, "left", seed)
        with fastgen.disabled():
            stock, _ = zoo.call([large], sample, options)
        for drafts in ({"small": small}, {"early_exit": 1}):
            with fastgen.bild(
                **drafts, lossless=True, adaptive_draft=False, fallback_threshold=0.06
            ) as drafting:
                ours, _ = zoo.call([large], sample, options)
            for (one,), (other,) in zip(ours, stock, strict=True):
                assert one.keys() == other.keys()
                assert one["tokens"].tolist() == other["tokens"].tolist()
                for field in ("score", "positional_scores"):
                    torch.testing.assert_close(one[field], other[field], atol=1e-5, rtol=1e-6)
            drafted += drafting.counts["drafted"]
    assert drafted


@pytest.mark.parametrize(
    "name", ["nothing", "n-grams", "a short text", "another start", "another end"]
)
def test_a_call_that_would_not_draft_is_the_large_models_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that lost time with drafts stops drafting.

    Hypotheses, their fields and counts equal those of a call that drafts.
    """
    large, small = pair("transformer", 1, 0.03)
    sample, options = (
        zoo.batch(9, 8, "left", 1),
        {"beam_size": 1, "max_len_b": 20} | (OPTIONS | LOSSLESS)[name],
    )
    with fastgen.bild(small, lossless=True) as drafting:
        first, _ = zoo.call([large], sample, options)
        timing = timing_of(large, small, None, 9)
        assert timing.total > 0, "the first call goes by the clock"
        timing.lost, before, spent = 1e6, dict(drafting.counts), timing.total
        with monkeypatch.context() as patch:
            patch.setattr(Bild, "run", lambda _: pytest.fail("it has decoded together"))
            rested, _ = zoo.call([large], sample, options)
            with pytest.raises(ValueError, match="is not possible with a prefix"):
                zoo.call([large], sample, options | {"prefix_tokens": torch.full((9, 1), 5)})
    for (one,), (other,) in zip(rested, first, strict=True):
        assert one.keys() == other.keys()
        assert one["tokens"].tolist() == other["tokens"].tolist()
        assert one["attention"].shape == other["attention"].shape
        for field in ("score", "positional_scores"):
            torch.testing.assert_close(one[field], other[field], atol=1e-5, rtol=1e-6)
    assert timing.total > spent
    took = {count: drafting.counts[count] - before[count] for count in before}
    tokens = sum(len(hypothesis["tokens"]) for (hypothesis,) in rested)
    assert took == dict.fromkeys(took, 0) | {"tokens": tokens, "large_calls": tokens}
    whole = timing._calls.without_drafts
    assert whole is not None
    assert whole * tokens > timing.total - spent, "the call takes longer than its steps"


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_layers_draft(kind: str) -> None:
    large, _ = pair(kind, seed=1)
    early = copy.deepcopy(large)
    early.decoder.layers = early.decoder.layers[:1]
    sample = zoo.batch(4, 8)
    thresholds = {"fallback_threshold": 0.08, "rollback_threshold": 3.0, "max_draft": 4}
    texts, counts = generated(large, sample, early_exit=1, **thresholds)
    wanted, events = expected(large, early, sample, thresholds, {})
    assert_like(texts, wanted)
    assert (counts["drafted"], counts["fallbacks"], counts["rollbacks"]) == tuple(events.values())
    assert counts["drafted"]


def test_rows_are_what_they_are_alone() -> None:
    large, small = pair("prenorm", 1)
    sample = zoo.batch(12, 9, seed=3)
    asked = {"fallback_threshold": 0.08, "rollback_threshold": 2.5}
    together, counts = generated(large, sample, small, **asked)
    assert counts["rollbacks"]
    assert len({len(tokens) for tokens, _ in together}) > 3, "texts leave at different times"
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    net_input = {name: value[order] for name, value in sample["net_input"].items()}
    assert_like(
        generated(large, {"net_input": net_input}, small, **asked)[0], [together[i] for i in order]
    )
    for source, text in zip(rows_of(sample), together, strict=True):
        alone = {"src_tokens": torch.tensor([source]), "src_lengths": torch.tensor([len(source)])}
        assert_like(generated(large, {"net_input": alone}, small, **asked)[0], [text])


class Late(DraftTiming):
    """A pace that starts drafting in the seventh round."""

    rounds = 0

    def drafts(self, texts: int) -> bool:
        self.rounds += 1
        return self.rounds > 6

    def note(self, drafted: bool, texts: int, tokens: int, seconds: float) -> None:
        pass


@pytest.mark.parametrize("drafts", ["small", "first layers"])
def test_drafts_that_begin_when_texts_have_left(
    drafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fairseq_bild, "timing_of", lambda *_: Late())
    large, small = pair("prenorm", 1)
    sample, options = zoo.batch(24, 9, seed=3), {"beam_size": 1, "max_len_b": 20}
    with fastgen.disabled():
        stock, _ = zoo.call([large], sample, options)
    assert sum(len(h["tokens"]) <= 6 for (h,) in stock) >= 3, "these have left"
    given = {"small": small} if drafts == "small" else {"early_exit": 1}
    with fastgen.bild(**given, lossless=True, fallback_threshold=0.06) as drafting:
        ours, _ = zoo.call([large], sample, options)
    assert [h["tokens"].tolist() for (h,) in ours] == [h["tokens"].tolist() for (h,) in stock]
    assert drafting.counts["drafted"]


def test_where_it_is_faster_the_clock_decides() -> None:
    large, small = pair("transformer")
    with fastgen.bild(small, lossless=True, fallback_threshold=0.06) as drafting:
        zoo.call([large], zoo.batch(3, 6), {"beam_size": 1, "max_len_b": 9})
    assert drafting.counts["large_calls"] > drafting.counts["small_calls"], (
        "the first round is without drafts"
    )


def test_status_sums_what_is_counted() -> None:
    large, small = pair("transformer")
    before, hits = fastgen.status().bild, zoo.hits()
    with fastgen.bild(small, fallback_threshold=0.08) as drafting:
        for seed in range(2):
            zoo.call([large], zoo.batch(3, 6, seed=seed), {"beam_size": 1, "max_len_b": 6})
    after = fastgen.status().bild
    assert drafting.counts["tokens"] > 0
    # These include the counts of drafted beams.
    more = {name: after[name] - before.get(name, 0) for name in after}
    assert {name: count for name, count in more.items() if count} == {
        n: c for n, c in drafting.counts.items() if c
    }
    assert list(drafting.counts) == list(Counts.__dataclass_fields__)
    assert zoo.hits() == hits + 2
    assert str(drafting).startswith(f"Big-little decoding: {drafting.counts['tokens']} tokens, ")


def test_behind_the_context_nothing_is_left() -> None:
    large, small = pair("transformer")
    sample, options = zoo.batch(3, 6), {"beam_size": 3, "max_len_b": 6}
    before = fastgen.status().bild
    with pytest.raises(ValueError, match="beam is 3, and must be 1"), fastgen.bild(small):
        zoo.call([large], sample, options)
    zoo.assert_same([large], sample, options)
    assert fastgen.status().bild == before


def test_a_small_model_that_was_trained_last() -> None:
    large, small = pair("transformer")
    small.train()
    asked = {"lossless": True, "fallback_threshold": 0.06}
    trained, _ = generated(large, zoo.batch(3, 6), small, **asked)
    assert not small.training
    assert_like(generated(large, zoo.batch(3, 6), [small], **asked)[0], trained)


def _other_words(side: str) -> Any:
    words = Dictionary()
    for i in range(zoo.WORDS):
        words.add_symbol("other" if i == 5 else f"w{i}")
    _, small = pair("transformer")
    getattr(small, side).dictionary = words
    return small


def _hooked() -> Any:
    _, small = pair("transformer")
    small.decoder.layers[0].register_forward_hook(lambda *_: None)
    return small


def _short() -> Any:
    _, small = pair("transformer")
    small.decoder.max_target_positions = 9
    return small


PREFIX, CONSTRAINTS = torch.full((3, 1), 6), torch.zeros(3, 1, dtype=torch.int64)
WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "beams": ({}, {"beam_size": 4}, "one text per input: beam is 4, and must be 1"),
    "a language model": ({}, {"lm_model": zoo.build("lm")}, "a language model beside"),
    "sampling": ({}, {"search_strategy": "top_k"}, "the search Sampling"),
    "lengths": ({}, {"match_source_len": True}, "match_source_len"),
    "alignments": ({}, {"generator": SequenceGeneratorWithAlignment}, "alignments"),
    "a prefix": ({}, {"prefix_tokens": PREFIX}, "a prefix"),
    "constraints": ({}, {"constraints": CONSTRAINTS}, "constraints"),
    "an ensemble": ({"small": [1, 2]}, {}, "the small model is an ensemble of 2"),
    "a name": ({"small": "small.pt"}, {}, "of the small model: str is no transformer decoder"),
    "another family": ({"small": zoo.build("lstm")}, {}, "LSTMDecoder is no transformer decoder"),
    "source words": (
        {"small": _other_words("encoder")}, {},
        "symbol 9 of the source is 'w5' to the large one and 'other' to the small one",
    ),
    "target words": ({"small": _other_words("decoder")}, {}, "symbol 9 of the target is 'w5'"),
    "its own layers": ({"small": _hooked()}, {}, "a hook on a TransformerDecoderLayer"),
    "adaptive softmax": ({"small": zoo.build("adaptive")}, {}, "log-probabilities of its own"),
    "few positions": (
        {"small": _short()}, {}, "hypotheses of 15 tokens: the small model reads 9 at most"
    ),
    "nobody": (
        {"small": None}, {},
        "needs a small model, either small or early_exit (layers of the model itself)"
    ),
    "two": ({"early_exit": 1}, {}, "and got both"),
    "all layers": (
        {"small": None, "early_exit": 2}, {}, "an exit behind layer 2 of a decoder of 2"
    ),
    "a fallback": (
        {"fallback_threshold": 1.5}, {}, "fallback_threshold is 1.5; it must be from 0 to 1"
    ),
    "a rollback": (
        {"rollback_threshold": -1.0}, {}, "rollback_threshold is -1.0; it must be 0 or more"
    ),
    "a draft": ({"max_draft": 0}, {}, "max_draft is 0; it must be 1 or more"),
    "lossless": (
        {"lossless": True, "rollback_threshold": 1.0}, {},
        "rollback_threshold=1.0 would keep others"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_said(name: str) -> None:
    asked, options, message = WRONG[name]
    large, small = pair("transformer")
    with pytest.raises(ValueError, match=re.escape(message)):
        generated(large, zoo.batch(3, 6), **{"small": small} | asked, options=options)


def test_two_large_models() -> None:
    large, small = pair("transformer")
    with (
        pytest.raises(ValueError, match="not possible with an ensemble of models"),
        fastgen.bild(small),
    ):
        zoo.call([large, small], zoo.batch(3, 6), {"beam_size": 1})


def test_a_large_model_of_another_family() -> None:
    complaint = pytest.raises(
        ValueError, match="of the large model: LSTMDecoder is no transformer decoder"
    )
    with complaint, fastgen.bild(early_exit=1):
        zoo.call([zoo.build("lstm", torch.float32)], zoo.batch(3, 6), {"beam_size": 1})


def test_where_fairseqs_own_generator_runs() -> None:
    _, small = pair("transformer")
    complaint = pytest.raises(ValueError, match=r"fairseq\.generate is not in it")
    with fastgen.disabled(), complaint, fastgen.bild(small):
        pass
    fastgen.disable()
    try:
        with complaint, fastgen.bild(small):
            pass
    finally:
        fastgen.enable()


def test_a_generator_with_steps_of_its_own() -> None:
    class Own(SequenceGenerator):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            return super()._generate(*args, **kwargs)

    large, small = pair("transformer")
    with pytest.raises(ValueError, match="Own has its own _generate"):
        generated(large, zoo.batch(3, 6), small, {"generator": Own})
