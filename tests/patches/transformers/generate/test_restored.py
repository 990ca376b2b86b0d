"""Check diverse beam, constrained beam and contrastive search, which transformers 5 removed."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from transformers import GenerationConfig, LogitsProcessorList, TextStreamer
from transformers.generation import logits_process as lp

import fastgen
from fastgen import config as switches
from fastgen.constraints import DisjunctiveConstraint, PhrasalConstraint, Progress
from fastgen.patches.transformers.compat import CACHE
from tests.support import restored_oracle as oracle
from tests.support import zoo
from tests.support.parity import fallbacks, left_off
from tests.support.recorded import models
from tests.support.recorder import Graphs
from tests.support.zoo import DECODERS, ENCODER_DECODERS, EOS, PAD, alone, batch, build

DIVERSE = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.5}
CONSTRAINED = {"num_beams": 4, "force_words_ids": [[20, 21], [[30, 31], [9]]]}
CONTRASTIVE = {"penalty_alpha": 0.6, "top_k": 4}
METHODS = {"diverse": DIVERSE, "constrained": CONSTRAINED, "contrastive": CONTRASTIVE}
NAMES = {
    f"{name} beam search" if name != "contrastive" else "contrastive search": o
    for name, o in METHODS.items()
}
RECORDED = [
    json.loads(file.read_text()) for file in sorted(Path(models.__file__).parent.glob("*.json"))
]


def rows(model: Any, inputs: dict[str, torch.Tensor], processors: Any = ()) -> list[oracle.Model]:
    ids, mask = inputs["input_ids"].tolist(), inputs["attention_mask"].tolist()
    return [oracle.Model(model, *sentence, processors) for sentence in zip(ids, mask, strict=True)]


def expected(
    model: Any, inputs: dict[str, torch.Tensor], options: dict[str, Any], processors: Any = ()
) -> tuple[list[list[int]], list[float]]:
    """Return the plain search's output, padded as `generate` pads it, and the beam scores."""
    ends, longest = options["eos_token_id"], options["max_new_tokens"]
    given = rows(model, inputs, processors)
    prompt = len(given[0].prompt)
    if "penalty_alpha" in options:
        texts = [
            oracle.contrastive(r, ends, longest, options["top_k"], options["penalty_alpha"])
            for r in given
        ]
        width = max(map(len, texts))
        return [text + [PAD] * (width - len(text)) for text in texts], []
    settings = oracle.Settings(
        options["num_beams"], options.get("num_return_sequences", 1), longest, ends,
        options.get("length_penalty", 1.0), options.get("early_stopping", False),
    )  # fmt: skip
    if "num_beam_groups" in options:
        run: Callable[[oracle.Model], list[oracle.Beam]] = lambda r: oracle.diverse(  # noqa: E731
            r, settings, options["num_beam_groups"], options["diversity_penalty"]
        )
    else:
        words = [
            word if isinstance(word[0], list) else [word] for word in options["force_words_ids"]
        ]
        run = lambda r: oracle.constrained(r, settings, words)  # noqa: E731
    found = [kept for row in given for kept in run(row)]
    texts = oracle.padded([text for _, text in found], ends, PAD, prompt + longest)
    return texts, [score for score, _ in found]


def assert_as_expected(
    model: Any, inputs: dict[str, torch.Tensor], options: dict[str, Any]
) -> None:
    processors = [
        lp.NoRepeatNGramLogitsProcessor(n) for n in [options.get("no_repeat_ngram_size")] if n
    ]
    texts, scores = expected(model, inputs, options, processors)
    before = fallbacks()
    assert model.generate(**inputs, **options).tolist() == texts
    found = model.generate(
        **inputs, **options, return_dict_in_generate=True, output_scores=True, output_logits=True
    )
    assert fallbacks() == before
    assert found.sequences.tolist() == texts
    if scores:
        torch.testing.assert_close(
            found.sequences_scores, torch.tensor(scores), atol=1e-9, rtol=1e-9
        )


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda found: found["transformers"])
def test_outputs_are_those_of_the_last_release_that_had_the_method(
    recorded: dict[str, Any],
) -> None:
    built = {kind: models.build(kind) for kind in models.KINDS}
    assert len(recorded["calls"]) > 15
    for call in recorded["calls"]:
        model = built[call["model"]]
        inputs = models.inputs(model, call["seed"])
        found = model.generate(
            **inputs, **call["options"], return_dict_in_generate=True, output_scores=True
        )
        assert found.sequences.tolist() == call["sequences"], call
        assert model.generate(**inputs, **call["options"]).tolist() == call["sequences"], call
        if call["scores"]:
            wanted = torch.tensor(call["scores"])
            torch.testing.assert_close(found.sequences_scores, wanted, atol=1e-6, rtol=1e-6)


OPTIONS: list[dict[str, Any]] = [
    DIVERSE
    | {"num_return_sequences": 4, "early_stopping": True, "eos_token_id": [EOS, 20, 21, 22]},
    DIVERSE
    | {"num_beams": 6, "num_beam_groups": 3, "length_penalty": -1.0, "early_stopping": "never"},
    DIVERSE | {"num_beam_groups": 4, "num_return_sequences": 2, "no_repeat_ngram_size": 2},
    CONSTRAINED
    | {"num_return_sequences": 4, "early_stopping": True, "eos_token_id": [EOS, 22, 23]},
    CONSTRAINED
    | {"length_penalty": 2.0, "early_stopping": "never", "force_words_ids": [[5, 6, 7], [5, 8]]},
    CONTRASTIVE | {"eos_token_id": [EOS, 20, 21, 22, 23, 24, 25, 26]},
    CONTRASTIVE | {"penalty_alpha": 0.9, "no_repeat_ngram_size": 2},
]


@pytest.mark.parametrize("kind", models.KINDS)
@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_outputs_are_those_of_the_plain_search(kind: str, options: dict[str, Any]) -> None:
    model = models.build(kind)
    assert_as_expected(
        model, models.inputs(model, 3), {"max_new_tokens": 9, "eos_token_id": [EOS], **options}
    )


@pytest.mark.parametrize("family", ["t5", "opt", "mistral", "m2m_100"])
@pytest.mark.parametrize("method", METHODS)
def test_of_other_families(family: str, method: str) -> None:
    assert family in ENCODER_DECODERS | DECODERS
    model = build(family)
    options = METHODS[method] | {"max_new_tokens": 6, "eos_token_id": [EOS, 40, 41]}
    assert_as_expected(model, batch(model, 3, 5), options)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", ["module", "alone", "use_cache", "attention"])
def test_any_stepper_gives_the_same(method: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("bart")
    inputs, options = (
        batch(model, 4, 6),
        METHODS[method] | {"max_new_tokens": 20, "eos_token_id": [EOS, 40, 41, 42]},
    )
    before = model.generate(**inputs, **options)
    seen = left_off()
    if way == "module":
        monkeypatch.setenv("FASTGEN_STEP", "module")
        switches.reload()
    elif way == "alone":
        model = alone(model)
    elif way == "attention":
        model.set_attn_implementation("tests_own")
    elif method == "contrastive":
        pytest.skip("contrastive search needs a cache")
    else:
        options |= {"use_cache": False}
    assert torch.equal(model.generate(**inputs, **options), before)
    assert left_off() - seen, "nothing was left off"
    monkeypatch.undo()
    switches.reload()


@pytest.mark.parametrize("method", METHODS)
def test_a_family_that_is_not_known_decodes_unshared(method: str) -> None:
    model, known = build("gpt2"), build("gpt2")
    model.config.model_type = known.config.model_type + "-of-nobody"
    inputs, options = batch(model, 3, 5), METHODS[method] | {"max_new_tokens": 6}
    seen = left_off()
    assert torch.equal(model.generate(**inputs, **options), known.generate(**inputs, **options))
    assert any("has no spec" in reason for reason in left_off() - seen)


@pytest.mark.parametrize("options", OPTIONS[:4], ids=range(4))
def test_beam_indices_lead_to_the_scores(options: dict[str, Any]) -> None:
    model = models.build("bart")
    given = {"max_new_tokens": 9, **options, "eos_token_id": [EOS], "length_penalty": 0.0}
    returned = {"return_dict_in_generate": True, "output_scores": True}
    found = model.generate(**models.inputs(model, 3), **given, **returned)
    of_tokens = model.compute_transition_scores(found.sequences, found.scores, found.beam_indices)
    torch.testing.assert_close(of_tokens.sum(1), found.sequences_scores, atol=1e-5, rtol=1e-5)


def test_the_penalty_comes_where_transformers_4_had_it() -> None:
    """It follows sequence biases and precedes all other processors."""
    model = models.build("bart")
    inputs = models.inputs(model, 1)
    bias = {(7,): 3.0, (8, 9): 5.0}
    options = DIVERSE | {"max_new_tokens": 8, "eos_token_id": [EOS]}
    processors = [lp.SequenceBiasLogitsProcessor(bias), lp.RepetitionPenaltyLogitsProcessor(1.7)]
    settings = oracle.Settings(4, 4, 8, [EOS], 1.0, False)
    found, other = (
        [
            kept
            for row in rows(model, inputs, processors)
            for kept in oracle.diverse(row, settings, 2, 1.5, before)
        ]
        for before in (1, 2)
    )
    assert found != other, "the order is of no matter here"
    returned = {"return_dict_in_generate": True, "output_scores": True, "num_return_sequences": 4}
    ours = model.generate(
        **inputs, **options, **returned, sequence_bias=bias, repetition_penalty=1.7
    )
    assert ours.sequences.tolist() == oracle.padded([text for _, text in found], [EOS], PAD, 9)
    torch.testing.assert_close(ours.sequences_scores, torch.tensor([score for score, _ in found]))


def test_a_processor_of_the_users_sees_all_rows() -> None:
    model, shapes = models.build("bart"), set()

    def noting(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        shapes.add((len(ids), len(scores)))
        return scores

    inputs, options = models.inputs(model), DIVERSE | {"max_new_tokens": 5}
    given = {**options, "logits_processor": LogitsProcessorList([noting])}
    assert torch.equal(model.generate(**inputs, **given), model.generate(**inputs, **options))
    assert shapes == {(12, 12)}


def test_objects_are_the_same_constraints_as_lists() -> None:
    model = models.build("bart")
    inputs = models.inputs(model)
    objects = [PhrasalConstraint([20, 21]), DisjunctiveConstraint([[30, 31], [9]])]
    options = {"num_beams": 4, "max_new_tokens": 8}
    ours = model.generate(**inputs, **options, constraints=objects)
    assert torch.equal(
        ours, model.generate(**inputs, **options, force_words_ids=CONSTRAINED["force_words_ids"])
    )
    config = GenerationConfig(**options, constraints=copy.deepcopy(objects))
    assert torch.equal(ours, model.generate(**inputs, generation_config=config))
    for text in ours.tolist():
        assert Progress.start(objects).behind(20).bank == 1
        assert oracle.standing(text, [[[20, 21]], [[30, 31], [9]]])[2]


@pytest.mark.parametrize(
    "text", [[20, 21, 9], [20, 20, 21, 30, 31], [20, 9, 20, 21, 30, 9], [9, 30, 20, 21, 5], []]
)
def test_progress(text: list[int]) -> None:
    constraints = [PhrasalConstraint([20, 21]), DisjunctiveConstraint([[30, 31], [9]])]
    progress = Progress.start(constraints)
    for token in text:
        progress = progress.behind(token)
    wanted = oracle.standing(text, [[[20, 21]], [[30, 31], [9]]])
    assert (progress.bank, progress.wanted, progress.complete) == wanted


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (
            {"num_beams": 4, "num_beam_groups": 3, "diversity_penalty": 0.5},
            ValueError,
            "num_beams=4 .* num_beam_groups=3",
        ),
        ({"num_beams": 4, "num_beam_groups": 2}, ValueError, r"diversity_penalty=0\.0"),
        (DIVERSE | {"do_sample": True}, ValueError, "do_sample=True"),
        (DIVERSE | {"streamer": TextStreamer(None)}, ValueError, "streamer"),
        ({"force_words_ids": [[5]]}, ValueError, "num_beams is 1"),
        (CONSTRAINED | {"do_sample": True}, ValueError, "do_sample=True"),
        (CONSTRAINED | {"num_beam_groups": 2}, ValueError, "num_beam_groups=2"),
        ({"num_beams": 2, "force_words_ids": []}, ValueError, r"not \[\]"),
        ({"num_beams": 2, "force_words_ids": [[-5]]}, ValueError, r"not \[\[-5\]\]"),
        (
            {"num_beams": 2, "force_words_ids": [[96]]},
            ValueError,
            "token 96, and the vocabulary has 96",
        ),
        (
            {"num_beams": 2, "force_words_ids": [[[4], [4, 5]]]},
            ValueError,
            r"\[4\] is the beginning of another",
        ),
        ({"num_beams": 2, "constraints": ["word"]}, TypeError, "not 'word'"),
        (CONTRASTIVE | {"use_cache": False}, ValueError, "use_cache=True, and it is False"),
        (CONTRASTIVE | {"prefill_chunk_size": 2}, ValueError, "prefill_chunk_size is 2"),
        (
            DIVERSE | {"synced_gpus": True},
            ValueError,
            "diverse beam search of BartFor.*: synced_gpus=True",
        ),
    ],
)
def test_what_does_not_go_together_raises(
    options: dict[str, Any], error: type[Exception], said: str
) -> None:
    model = build("bart")
    with pytest.raises(error, match=said):
        model.generate(**batch(model, 2, 5), **options, max_new_tokens=3)


@pytest.mark.parametrize(("name", "options"), NAMES.items())
def test_it_is_explained_counted_and_undone(name: str, options: dict[str, Any]) -> None:
    model = build("bart")
    inputs = batch(model, 2, 5)
    explained = fastgen.explain(model, **inputs, **options, max_new_tokens=4)
    assert explained.plan is not None, explained.reason
    assert (explained.plan.method, explained.plan.shared, explained.plan.fused) == (
        name,
        True,
        True,
    )
    assert (explained.plan.sentences, explained.plan.beams) == (2, 4)
    hits = fastgen.status()["transformers.generation_mode"].hits
    model.generate(**inputs, **options, max_new_tokens=4)
    assert fastgen.status()["transformers.generation_mode"].hits == hits + 1
    with fastgen.disabled(), pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(**inputs, **options, max_new_tokens=4)


@pytest.mark.parametrize(("name", "options"), NAMES.items())
def test_models_that_nobody_has_proven_are_explained_as_they_run(
    name: str, options: dict[str, Any]
) -> None:
    model, wanted = zoo.unproven(), {**options, "max_new_tokens": 4}
    inputs = zoo.batch(model, 2, 5, "none")
    explained, seen = fastgen.explain(model, **inputs, **wanted), left_off()
    assert explained.plan is not None, explained.reason
    assert (explained.plan.method, explained.plan.shared) == (name, False)
    model.generate(**inputs, **wanted)
    assert set(explained.plan.left_off) == set(left_off() - seen)


@pytest.mark.parametrize("options", [CONTRASTIVE, DIVERSE])
def test_counts_of_numpy(options: dict[str, Any]) -> None:
    model = build("gpt2")
    inputs = batch(model, 2, 5)
    counts = {
        name: np.int64(value) if isinstance(value, int) else value
        for name, value in options.items()
    }
    expected = model.generate(**inputs, **options, max_new_tokens=9)
    assert torch.equal(model.generate(**inputs, **counts, max_new_tokens=np.int64(9)), expected)


def test_the_steps_of_contrastive_search_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    Graphs(monkeypatch)
    model = build("gpt2")
    explained = fastgen.explain(model, **batch(model, 2, 5), **CONTRASTIVE, max_new_tokens=20)
    assert explained.plan is not None
    assert not explained.plan.graphs
    assert any("head reads" in reason for reason in explained.plan.left_off)


def test_parity_mode_has_nothing_to_compare_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGEN_PARITY", "1")
    switches.reload()
    model, counted = build("bart"), fastgen.status().parity
    for name, options in NAMES.items():
        model.generate(**batch(model, 2, 5), **options, max_new_tokens=3)
        outcome = f"run once: transformers has no {name}"
        assert fastgen.status().parity[outcome] == counted.get(outcome, 0) + 1
    monkeypatch.undo()
    switches.reload()


def test_a_streamer_hears_of_contrastive_search() -> None:
    class Heard(TextStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    model, heard = build("gpt2"), Heard()
    found = model.generate(**batch(model, 1, 5), **CONTRASTIVE, max_new_tokens=6, streamer=heard)
    assert heard.tokens == [*found[0].tolist(), -1]


def test_the_cache_of_contrastive_search_goes_on() -> None:
    model = models.build("gpt2")
    inputs = {"input_ids": torch.arange(5, 11)[None]}
    found = model.generate(**inputs, **CONTRASTIVE, max_new_tokens=5, return_dict_in_generate=True)
    cache = found[CACHE]
    assert cache.get_seq_length() == found.sequences.shape[1] - 1
    with torch.no_grad():
        ours = model(input_ids=found.sequences[:, -1:], **{CACHE: cache}).logits[:, -1]
        plain = model(input_ids=found.sequences).logits[:, -1]
    torch.testing.assert_close(ours, plain, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_a_stream_and_its_scores(method: str) -> None:
    model = build("bart")
    options = METHODS[method] | {"max_new_tokens": 6}
    sentences = [[5, 6, 7, 8, EOS], [9, 10, EOS], [11, 12, 13, EOS]]
    for sentence, (sequences, scores) in zip(
        sentences,
        fastgen.generate_stream(model, sentences, max_tokens=12, scores=True, **options),
        strict=True,
    ):
        alone_ = model.generate(
            torch.tensor([sentence]), **options, return_dict_in_generate=True, output_scores=True
        )
        length = sequences.shape[1]
        assert sequences.tolist() == alone_.sequences[:, :length].tolist()
        if method != "contrastive":
            torch.testing.assert_close(
                scores, alone_.sequences_scores.to(scores.dtype), atol=1e-6, rtol=0
            )
        else:
            of_tokens = model.compute_transition_scores(
                alone_.sequences, alone_.scores, normalize_logits=True
            )
            torch.testing.assert_close(scores, of_tokens.sum(1).to(scores.dtype), atol=1e-5, rtol=0)


def test_what_is_no_call_of_these_methods_is_transformers_own() -> None:
    """A penalty without groups and a user's own loop run as without fastgen."""
    model = zoo.build("bart", torch.float32)
    call = zoo.batch(model, 2, 6) | {"num_beams": 4, "max_new_tokens": 5}
    with fastgen.disabled():
        wanted = model.generate(**call, diversity_penalty=0.5)
    assert torch.equal(model.generate(**call, diversity_penalty=0.5), wanted)

    def own(model: Any, *args: Any, **kwargs: Any) -> str:
        return "own"

    hits = fastgen.status()["transformers.generation_mode"].hits
    asked = {"num_beam_groups": 2, "diversity_penalty": 0.0, "constraints": [object()]}
    assert model.generate(**call, **asked, custom_generate=own) == "own"
    assert fastgen.status()["transformers.generation_mode"].hits == hits


class _OwnSample(tf.GPT2LMHeadModel):
    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("ran as greedy search")


@pytest.mark.parametrize(
    ("build", "options", "said"),
    [
        (lambda: _mamba(), DIVERSE, "diverse beam search of MambaForCausalLM"),
        (
            lambda: _mamba(),
            {"penalty_alpha": 0.6, "top_k": 4},
            "MambaForCausalLM has no cache|MambaForCausalLM keeps other state",
        ),
        (
            lambda: zoo.build("unilm"),
            {"penalty_alpha": 0.6, "top_k": 4},
            "UniLMForConditionalGeneration returns none",
        ),
        (
            lambda: zoo.build("gpt2"),
            {"penalty_alpha": 0.6, "top_k": 4, "cache_implementation": "static"},
            "cache_implementation='static'",
        ),
        (
            lambda: tf.OpenAIGPTLMHeadModel(
                tf.OpenAIGPTConfig(vocab_size=zoo.VOCABULARY, n_embd=16, n_layer=1, n_head=2)
            ).eval(),
            {"penalty_alpha": 0.6, "top_k": 4, "pad_token_id": 0},
            "OpenAIGPTLMHeadModel has no cache",
        ),
        (
            lambda: _OwnSample(zoo.build("gpt2").config).eval(),
            {"penalty_alpha": 0.6, "top_k": 4},
            "trust_remote_code",
        ),
    ],
    ids=["states", "states seen", "no hidden states", "static", "no cache", "own loop"],
)
def test_models_that_cannot_decode_so(build: Any, options: dict[str, Any], said: str) -> None:
    model = build()
    with pytest.raises(ValueError, match=said):
        model.generate(**zoo.batch(model, 2, 6, "none") | options, max_new_tokens=4)


def _mamba() -> Any:
    sizes = {
        "vocab_size": zoo.VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "state_size": 4,
    }
    return tf.MambaForCausalLM(
        tf.MambaConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    ).eval()
