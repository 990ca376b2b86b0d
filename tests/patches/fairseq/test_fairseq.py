"""Compare fairseq's generator with and without fastgen: hypotheses, their order and scores."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

import fastgen
from fastgen import config
from fastgen.decoding.kv_cache import room
from fastgen.decoding.kv_cache.layer_kv import LayerKV
from fastgen.models.runtime import encoder as encoders

pytest.importorskip("fairseq")
from fairseq import utils
from fairseq.data import TokenBlockDataset
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models.bart.hub_interface import BARTHubInterface
from fairseq.models.transformer.transformer_decoder import TransformerDecoderBase
from fairseq.modules import LayerDropModuleList
from fairseq.sequence_generator import SequenceGenerator, SequenceGeneratorWithAlignment
from fairseq.sequence_scorer import SequenceScorer
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from fairseq.token_generation_constraints import pack_constraints
from omegaconf import OmegaConf

from fastgen.patches.fairseq.generator.generate import source_lengths
from tests.support import fairseq_zoo as zoo
from tests.support.recorder import Graphs


@pytest.fixture(autouse=True)
def _double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fairseq's softmax compute in fp64, which it would otherwise round to fp32."""
    monkeypatch.setattr(utils, "softmax", lambda x, dim, onnx_trace=False: torch.softmax(x, dim))


def _served(
    models: list[Any], sample: dict[str, Any], options: dict[str, Any], tolerance: float = 1e-5
) -> Any:
    before, declined = zoo.hits(), zoo.fallbacks()
    found = zoo.assert_same(models, sample, options, tolerance)
    assert zoo.hits() == before + (not isinstance(found, Exception))
    assert zoo.fallbacks() == declined
    return found


@pytest.mark.parametrize("name", zoo.MODELS)
@pytest.mark.parametrize("beams", [1, 4, 5])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_model(name: str, beams: int, padding: str, dtype: torch.dtype) -> None:
    options = {"beam_size": beams, "max_len_a": 1.2, "max_len_b": 9}
    for seed in (0, 1):
        found = _served(
            [zoo.build(name, dtype, seed)], zoo.batch(4, 9, padding, seed), options, 1e-4
        )
    assert all(len(hypotheses) == beams for hypotheses in found)


def test_hypotheses_end_at_different_lengths() -> None:
    """The output of these models ends at many lengths, so sentences leave early and late."""
    found = _served(
        [zoo.build("prenorm", seed=1)], zoo.batch(9, 9), {"beam_size": 4, "max_len_b": 30}
    )
    lengths = {len(hypothesis["tokens"]) for hypotheses in found for hypothesis in hypotheses}
    assert len(lengths) >= 6


OPTIONS: dict[str, dict[str, Any]] = {
    "min_len": {"min_len": 5},
    "no_normalization": {"normalize_scores": False},
    "len_penalty": {"len_penalty": 2.0},
    "unk_penalty": {"unk_penalty": 1.5},
    "unk_bonus": {"unk_penalty": -2.0},
    "temperature": {"temperature": 0.6},
    "match_source_len": {"match_source_len": True},
    "ngrams_1": {"no_repeat_ngram_size": 1},
    "ngrams_2": {"no_repeat_ngram_size": 2},
    "ngrams_3": {"no_repeat_ngram_size": 3, "min_len": 8},
    "suppress": {"tokens_to_suppress": ("w3", "w5")},
    "max_len": {"max_len": 6},
    "eos": {"eos": 7},
    "bos": {"bos_token": 0},
    "one_token": {"max_len_b": 1},
    "prefix": {"prefix_tokens": torch.tensor([[5, 6], [7, 1], [9, 2], [1, 1], [4, 4]])},
    "long_prefix": {
        "prefix_tokens": torch.randint(4, 30, (5, 9), generator=torch.Generator().manual_seed(0))
    },
    **{
        name: {"search_strategy": name}
        for name in zoo.SEARCHES
        if name not in ("ordered", "unordered")
    },
    "sampling_ngrams": {"search_strategy": "top_k", "no_repeat_ngram_size": 2},
    "diverse_prefix": {"search_strategy": "diverse", "prefix_tokens": torch.full((5, 1), 6)},
}


@pytest.mark.parametrize("name", ["transformer", "bart"])
@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("option", OPTIONS)
def test_option(name: str, beams: int, option: str) -> None:
    if option.startswith("diverse") and beams == 1:
        pytest.skip("groups of beams")
    options = {"beam_size": beams, "max_len_b": 14} | OPTIONS[option]
    for seed in range(3):
        _served([zoo.build(name, seed=seed)], zoo.batch(5, 8, seed=seed), options)


@pytest.mark.parametrize("switched_off", [False, True])
def test_no_ngram_is_repeated(switched_off: bool) -> None:
    """fastgen fixes the option in fairseq's own code too, which would otherwise block nothing."""
    model, sample = zoo.build("transformer", torch.float32), zoo.batch(8, 9)
    options = {"beam_size": 4, "max_len_b": 25, "min_len": 15}
    with fastgen.disabled() if switched_off else nullcontext():
        for size in (2, 3):
            blocked, _ = zoo.call([model], sample, options | {"no_repeat_ngram_size": size})
            free, _ = zoo.call([model], sample, options)
            assert (_repeated(blocked, size), _repeated(free, size) > 0) == (0, True)


def _repeated(found: Any, size: int) -> int:
    """Return the number of hypotheses that contain an n-gram twice."""
    texts = [hypothesis["tokens"].tolist() for hypotheses in found for hypothesis in hypotheses]
    ngrams = [[tuple(text[i : i + size]) for i in range(len(text) - size + 1)] for text in texts]
    return sum(len(set(of_text)) < len(of_text) for of_text in ngrams)


class _Words:
    """A BPE that takes words as its pieces."""

    encode = decode = staticmethod(str)


def test_bart_from_the_hub() -> None:
    """`bart.sample` starts every hypothesis with a given token."""
    cfg: Any = OmegaConf.structured(FairseqConfig())
    task = TranslationTask(TranslationConfig(), zoo.dictionary(), zoo.dictionary())
    bart = BARTHubInterface(cfg, task, zoo.build("bart", torch.float32)).eval()
    bart.bpe = _Words()
    sentences = ["w1 w5 w9 w3", "w2 w2", "w8 w7 w6 w5 w4 w3"]
    options: dict[str, Any] = {
        "beam": 4,
        "lenpen": 2.0,
        "max_len_b": 14,
        "min_len": 3,
        "no_repeat_ngram_size": 3,
    }
    before = zoo.hits()
    ours = bart.sample(sentences, **options)
    assert zoo.hits() > before
    with fastgen.disabled():
        assert bart.sample(sentences, **options) == ours
    assert all(ours)


@pytest.mark.parametrize("beams", [2, 4])
def test_diverse_beams_of_the_first_sentences(beams: int) -> None:
    """The fork's search uses a sentence's id as its index in the batch.

    Ids beyond the batch size raise an error there.
    """
    sample = zoo.batch(5, 8) | {"id": torch.randperm(5, generator=torch.Generator().manual_seed(0))}
    found = _served(
        [zoo.build("transformer")],
        sample,
        {"beam_size": beams, "max_len_b": 14} | OPTIONS["diverse"],
    )
    assert not isinstance(found, Exception)


def test_lengths_of_sources() -> None:
    """Use the given lengths, end of sentence included, if fairseq reads them.

    The fork reads them; other versions count the tokens.
    """
    net_input = zoo.batch(3, 8, "none")["net_input"]
    generator = SequenceGenerator([zoo.build("transformer")], zoo.dictionary())
    asking, other = (lambda x: x["src_lengths"]), (lambda x: x["src_tokens"])
    assert source_lengths(asking, generator, net_input).tolist() == [8, 8, 8]
    assert source_lengths(other, generator, net_input).tolist() == [7, 7, 7]
    del net_input["src_lengths"]
    assert source_lengths(asking, generator, net_input).tolist() == [7, 7, 7]


@pytest.mark.parametrize("search", ["ordered", "unordered"])
def test_constraints(search: str) -> None:
    wanted = [
        [torch.tensor([5, 6]), torch.tensor([9])],
        [],
        [torch.tensor([11])],
        [torch.tensor([4, 7, 8])],
    ]
    options = {
        "beam_size": 6,
        "max_len_b": 18,
        "search_strategy": search,
        "constraints": pack_constraints(wanted),
    }
    found = _served([zoo.build("transformer")], zoo.batch(4, 8), options)
    assert "5 6" in " ".join(map(str, found[0][0]["tokens"].tolist()))


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize(
    "members", [["transformer", "prenorm"], ["bart", "transformer", "transformer"]]
)
def test_ensemble(members: list[str], beams: int) -> None:
    models = [zoo.build(name, seed=seed) for seed, name in enumerate(members)]
    _served(
        models, zoo.batch(4, 8), {"beam_size": beams, "max_len_b": 14, "no_repeat_ngram_size": 2}
    )


@pytest.mark.parametrize("name", zoo.LANGUAGE_MODELS)
@pytest.mark.parametrize("beams", [1, 4])
def test_language_model(name: str, beams: int) -> None:
    """Prompts of different lengths are passed as prefixes."""
    sample = zoo.batch(4, 7, "right")
    options = {
        "beam_size": beams,
        "max_len_b": 12,
        "prefix_tokens": sample["net_input"]["src_tokens"][:, :5],
    }
    _served([zoo.build(name)], sample, options)


@pytest.mark.parametrize("name", zoo.LANGUAGE_MODELS)
@pytest.mark.parametrize(
    "options",
    [
        {}, {"beam_size": 1}, {"temperature": 0.7, "unk_penalty": 0.4}, {"no_repeat_ngram_size": 2},
        {"min_len": 9}, {"max_len_b": 4}, {"search_strategy": "top_k"},
        {"search_strategy": "diverse"}, {"bos_token": 0},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("length", [1, 6, 40])
def test_prompt(name: str, options: dict[str, Any], length: int) -> None:
    """Plain beam search prefills a prompt of all sentences at once, and keeps all token scores."""
    generator = torch.Generator().manual_seed(length)
    prompt = torch.stack(
        [torch.randperm(zoo.WORDS, generator=generator)[:length] + 4 for _ in range(3)]
    )
    prompt[0, 0] = 3  # an unknown word
    sample = {"net_input": {"src_tokens": prompt, "src_lengths": torch.full((3,), length)}}
    given = {"beam_size": 4, "max_len_b": length + 9, "prefix_tokens": prompt} | options
    for members in ([zoo.build(name)], [zoo.build(name), zoo.build(name, seed=1)]):
        _served(members, sample, given)


def test_a_prompt_takes_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = zoo.build("lm"), []
    kind: Any = type(model.decoder)
    own = kind.forward
    prompt = torch.arange(4, 24).repeat(2, 1)
    sample = {"net_input": {"src_tokens": prompt, "src_lengths": torch.full((2,), 20)}}

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    monkeypatch.setattr(TransformerDecoderBase, "forward", forward)
    zoo.call(
        [model], sample, {"beam_size": 4, "max_len_b": 23, "min_len": 23, "prefix_tokens": prompt}
    )
    assert len(calls) == 1 + 3


@pytest.mark.parametrize("by", ["a hook", "a replaced forward"])
@pytest.mark.parametrize("beams", [1, 3])
def test_what_is_put_on_a_module_finds_a_row_for_each_beam(beams: int, by: str) -> None:
    model = copy.deepcopy(zoo.build("transformer"))
    sample, options = zoo.batch(3, 7), {"beam_size": beams, "max_len_b": 8}
    _served([model], sample, options)
    rows: list[int] = []
    vectors = torch.randn(3 * beams, generator=torch.Generator().manual_seed(1)).double()

    def add(_: Any, __: Any, output: Any) -> Any:
        rows.append(output.shape[1])
        return output + vectors[: rows[-1], None]

    layer = model.decoder.layers[0].fc2
    own = layer.forward
    if by == "a hook":
        layer.register_forward_hook(add)
    else:
        layer.forward = lambda x: add(layer, (x,), own(x))
    before = zoo.fallbacks()
    zoo.assert_same([model], sample, options)
    ours, stock = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    assert ours == stock
    reason = f"{by} on a Linear" if by == "a hook" else f"{by} of a Linear"
    reason += " may look at rows, or at the cache"
    assert zoo.fallbacks().get(reason, 0) == before.get(reason, 0) + 1


@pytest.mark.parametrize("beams", [1, 4])
def test_language_model_beside(beams: int) -> None:
    options = {"beam_size": beams, "max_len_b": 12, "lm_model": zoo.build("lm"), "lm_weight": 0.3}
    _served([zoo.build("transformer")], zoo.batch(4, 7), options)


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_alignment(kind: str) -> None:
    options = {
        "generator": SequenceGeneratorWithAlignment,
        "print_alignment": kind,
        "beam_size": 3,
        "max_len_b": 12,
    }
    found = _served([zoo.build("transformer")], zoo.batch(4, 7), options)
    assert len(found[0][0]["alignment"]) > 0


@pytest.mark.parametrize("every", [1, 3, 16])
@pytest.mark.parametrize("name", ["transformer", "prenorm", "lm"])
def test_many_sentences(name: str, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some sentences leave while others continue and move to other rows.

    KV slots that no live beam references are freed.
    """
    monkeypatch.setattr(room, "COMPACT_EVERY", every)
    swept: list[int] = []
    compact = LayerKV.compact
    monkeypatch.setattr(
        LayerKV, "compact", lambda layer, slots: (swept.append(1), compact(layer, slots))
    )
    options = {"beam_size": 3, "max_len_b": 40, "no_repeat_ngram_size": 3}
    _served([zoo.build(name, seed=1)], zoo.batch(60, 12), options)
    assert swept or every > 1 or name == "lm"


def test_beams_of_one_call_do_not_reach_the_next() -> None:
    """fairseq's BART keeps the number of beams of an earlier call.

    With fewer beams it then attends to another sentence.
    """
    model, sample = zoo.build("bart"), zoo.batch(4, 8)
    options = {"beam_size": 1, "max_len_b": 14}
    alone, _ = zoo.call([zoo.build("bart")], sample, options)
    zoo.call([model], sample, options | {"beam_size": 4})
    after, _ = zoo.call([model], sample, options)
    assert [h[0]["tokens"].tolist() for h in after] == [h[0]["tokens"].tolist() for h in alone]


@pytest.mark.parametrize("switched_off", [True, False])
def test_generators_of_one_model_keep_their_beams(switched_off: bool) -> None:
    """A generator survives a later one, in fairseq's own code and in fastgen's."""
    model, sample = copy.deepcopy(zoo.build("bart")), zoo.batch(4, 8)
    alone = {
        beams: _tokens(
            SequenceGenerator([copy.deepcopy(model)], zoo.dictionary(), beams, max_len_b=14), sample
        )
        for beams in (1, 4)
    }
    generators = {
        beams: SequenceGenerator([model], zoo.dictionary(), beams, max_len_b=14) for beams in alone
    }
    with fastgen.disabled() if switched_off else nullcontext():
        for beams in (1, 4, 1):
            assert _tokens(generators[beams], sample) == alone[beams]


def _tokens(generator: SequenceGenerator, sample: dict[str, Any]) -> list[list[int]]:
    return [found[0]["tokens"].tolist() for found in generator.generate([], sample)]


def test_an_encoder_that_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded encoder keeps PyTorch's fused layers.

    It runs layer by layer where linear layers are routed, and the fused layers otherwise.
    """
    model = zoo.MODELS["transformer"]().eval()
    model.load_state_dict(zoo.build("transformer", torch.float32).state_dict())
    layers = model.encoder.layers
    if not hasattr(layers[0], "load_to_BT"):
        pytest.skip("this version of fairseq has no fused layers")
    assert layers[0].load_to_BT
    options = {"beam_size": 3, "max_len_b": 9}
    for padding in ("none", "left", "right"):
        _served([model], zoo.batch(4, 9, padding), options, 1e-4)
        assert layers[0].load_to_BT
    monkeypatch.setenv("FASTGEN_LINEAR", "off")
    config.reload()
    _served([model], zoo.batch(4, 9), options, 1e-4)
    monkeypatch.undo()
    config.reload()


def test_threads_share_a_model() -> None:
    model = zoo.build("transformer", torch.float32)

    def texts(seed: int) -> list[list[list[int]]]:
        found, _ = zoo.call([model], zoo.batch(4, 9, seed=seed), {"beam_size": 3, "max_len_b": 20})
        return [
            [hypothesis["tokens"].tolist() for hypothesis in hypotheses] for hypotheses in found
        ]

    alone = [texts(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(texts, range(4))) == alone


def _retained() -> Any:
    model = zoo.MODELS["transformer"]().eval()
    model.decoder.dropout_module.apply_during_inference = True
    return model


class _OwnFinish(SequenceGenerator):
    def is_finished(self, *args: Any) -> bool:
        return super().is_finished(*args)


DECLINED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "lstm": (lambda: zoo.build("lstm", torch.float32), {}, "LSTMDecoder is no transformer decoder"),
    "dropout": (_retained, {}, "dropout is retained"),
    "subclass": (
        lambda: zoo.build("transformer"),
        {"generator": _OwnFinish},
        "_OwnFinish has its own is_finished",
    ),
}


@pytest.mark.parametrize("what", DECLINED)
def test_declined(what: str) -> None:
    """fairseq's own code runs what fastgen does not support; a fallback is counted."""
    make, options, reason = DECLINED[what]
    before = zoo.hits()
    zoo.assert_same([make()], zoo.batch(3, 7), options | {"beam_size": 3, "max_len_b": 8}, 1e-4)
    assert zoo.hits() == before
    assert any(reason in counted for counted in zoo.fallbacks())


def test_errors_are_fairseqs() -> None:
    with pytest.raises(AssertionError, match="min_len cannot be larger"):
        zoo.call(
            [zoo.build("transformer")],
            zoo.batch(2, 5),
            {"beam_size": 2, "min_len": 9, "max_len_b": 4},
        )
    constraints = torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match="constraints"):
        zoo.call(
            [zoo.build("transformer")],
            zoo.batch(2, 5),
            {"beam_size": 2, "constraints": constraints},
        )


def test_status_names_fairseq() -> None:
    row = next(row for row in fastgen.status().rows if row.name == "fairseq.ngram_block")
    assert row.state == "applied"


def test_a_name_that_numpy_has_given_up() -> None:
    """Datasets of language models work with a numpy that has removed the name.

    The namespace of numpy stays unchanged.
    """
    texts, before = [torch.arange(4, 9), torch.arange(4, 6)], set(dir(np))
    hits = fastgen.status()["fairseq.token_blocks"].hits
    blocks: Any = TokenBlockDataset(texts, [5, 2], None, zoo.PAD, zoo.EOS, break_mode="eos")
    assert [block.tolist() for block in blocks] == [text.tolist() for text in texts]
    assert fastgen.status()["fairseq.token_blocks"].hits == hits + 1
    assert set(dir(np)) == before


@pytest.mark.parametrize("names", [["lm"], ["transformer"], ["transformer", "prenorm"]])
def test_scores_of_given_texts(names: list[str]) -> None:
    """Check `SequenceScorer`, which `fairseq-eval-lm` and `--score-reference` use.

    Its linear layers are routed.
    """
    models = [zoo.build(name, torch.float32, seed) for seed, name in enumerate(names)]
    sample = zoo.batch(40, 9)
    target = torch.randint(4, 4 + zoo.WORDS, (40, 12))
    sample["net_input"] = (
        {"src_tokens": target}
        if names == ["lm"]
        else sample["net_input"] | {"prev_output_tokens": target}
    )
    sample["target"] = target.roll(-1, 1)
    scorer = SequenceScorer(zoo.dictionary())
    hits = lambda: {row.name: row.hits for row in fastgen.status().rows}["fairseq.score"]  # noqa: E731
    before = hits()
    ours = scorer.generate(models, sample)
    assert hits() == before + 1
    with fastgen.disabled():
        stock = scorer.generate(models, sample)
    for (one,), (other,) in zip(ours, stock, strict=True):
        assert one["tokens"].tolist() == other["tokens"].tolist()
        torch.testing.assert_close(
            one["positional_scores"], other["positional_scores"], atol=1e-5, rtol=0
        )
        torch.testing.assert_close(one["score"], other["score"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["transformer", "prenorm", "bart"])
def test_replayed_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are captured once and replayed while sentences leave."""
    graphs = Graphs(monkeypatch)
    models = [zoo.build(name, torch.float64)]
    for options in (
        {"beam_size": 4, "min_len": 20},
        {"beam_size": 2, "min_len": 9, "temperature": 0.7},
    ):
        _served(models, zoo.batch(9, 9), options | {"max_len_b": 30}, 1e-4)
    assert graphs.captures >= 1
    assert graphs.replays >= 10


def test_replayed_steps_of_an_ensemble(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch)
    models = [
        zoo.build(name, torch.float64, seed) for seed, name in enumerate(["prenorm", "prenorm"])
    ]
    _served(models, zoo.batch(5, 9), {"beam_size": 3, "max_len_b": 30, "min_len": 25}, 1e-4)
    assert graphs.replays >= 10


@pytest.fixture
def pays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let small encoders run from the weights; return the row count of each run."""
    rows = list[int]()
    run = encoders.Encoder.__call__
    for name, value in (("READING", -1), ("CALL", 0)):
        monkeypatch.setattr(encoders, name, value)
    monkeypatch.setattr(
        encoders.Encoder,
        "__call__",
        lambda encoder, x, sentences: (rows.append(len(x)), run(encoder, x, sentences))[1],
    )
    return rows


def _left_off() -> dict[str, int]:
    """Return the reasons and counts of encoders that fastgen left alone so far."""
    return {
        of: n
        for of, n in fastgen.status()["fairseq.generate"].left_off.items()
        if of.startswith("the encoder")
    }


@pytest.mark.parametrize("name", zoo.MODELS)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_encoder_from_the_weights(
    name: str, padding: str, dtype: torch.dtype, pays: list[int]
) -> None:
    """The first call runs both and returns the modules' output; no computed row is padding."""
    model, before = copy.deepcopy(zoo.build(name, dtype)), _left_off()
    sample = zoo.batch(4, 9, padding)
    for calls in range(3):
        _served([model], sample, {"beam_size": 3, "max_len_a": 1.2, "max_len_b": 9}, 1e-4)
        assert len(pays) == calls + 1
    tokens = sample["net_input"]["src_tokens"].ne(zoo.PAD).sum(1)
    assert pays == [int(tokens[0]), *[int(tokens.sum())] * 2]
    assert _left_off() == before


def test_encoders_of_an_ensemble_and_after_a_change_of_weights(pays: list[int]) -> None:
    models, options = (
        [copy.deepcopy(zoo.build(name)) for name in ("transformer", "prenorm")],
        {"beam_size": 3},
    )
    for _ in range(2):
        _served(models, zoo.batch(4, 9), options)
    models[0].encoder.layers[0].fc1.weight.data.mul_(0.5)
    models[1].encoder.layers[1].self_attn.k_proj.weight.data.neg_()
    _served(models, zoo.batch(4, 9), options)
    assert len(pays) == 6


@pytest.mark.parametrize("name", ["transformer", "lm"])
def test_hooks_that_fairseq_does_not_run(name: str, pays: list[int]) -> None:
    """fairseq calls `forward` of encoders and decoders directly, so their hooks never run.

    Such hooks do not disable any feature.
    """
    model, calls = copy.deepcopy(zoo.build(name)), []
    sample, options = zoo.batch(4, 9), {"beam_size": 3, "max_len_b": 12}
    if name == "lm":
        options["prefix_tokens"] = sample["net_input"]["src_tokens"][:, :5]
    for part in (model, *model.children()):
        part.register_forward_hook(lambda *_: calls.append(1))
        part.register_forward_pre_hook(lambda *_: calls.append(1))
    before = fastgen.status()["fairseq.generate"].left_off
    for _ in range(2):
        _served([model], sample, options)
    assert calls == []
    assert fastgen.status()["fairseq.generate"].left_off == before
    assert len(pays) == (0 if name == "lm" else 2)


class _Doubling(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return 2 * super().forward(input)


def _adapted(encoder: Any) -> None:
    layer = encoder.layers[0]
    linear, layer.fc1 = layer.fc1, _Doubling(layer.fc1.in_features, layer.fc1.out_features).double()
    layer.fc1.load_state_dict(linear.state_dict())


def _activated(encoder: Any) -> None:
    encoder.layers[1].activation_fn = torch.sigmoid


def _nothing_beside(encoder: Any) -> None:
    encoder.layers[0].self_attn.add_zero_attn = True


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "class": (_adapted, "a tests._Doubling in place of a linear layer"),
    "activation": (_activated, "an activation function sigmoid"),
    "hook": (
        lambda encoder: encoder.layers[0].fc2.register_forward_hook(
            lambda _, given, found: found + 1
        ),
        "a hook on a Linear",
    ),
    "hook on a layer": (
        lambda encoder: encoder.layers[0].register_forward_hook(
            lambda _, given, found: found * 0.5
        ),
        "layers that are not fairseq's own",
    ),
    "zero attention": (_nothing_beside, "layers that are not fairseq's own"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_encoder_that_is_not_what_its_weights_say(change: str, pays: list[int]) -> None:
    make, reason = CHANGES[change]
    model = copy.deepcopy(zoo.build("transformer"))
    make(model.encoder)
    before = _left_off()
    _served([model], zoo.batch(4, 9), {"beam_size": 3})
    said = f"the encoder runs through its own modules: {reason}"
    assert _left_off() == before | {said: before.get(said, 0) + 1}
    assert not pays


def _layerdrop(model: Any) -> None:
    model.encoder.layers = LayerDropModuleList(0.2, model.encoder.layers)


def _one_layer(model: Any) -> None:
    """Use one layer three times."""
    model.encoder.layers = torch.nn.ModuleList([model.encoder.layers[0]] * 3)


@pytest.mark.parametrize("change", [_layerdrop, _one_layer])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layers_in_lists_of_other_kinds(
    change: Callable[[Any], None], dtype: torch.dtype, pays: list[int]
) -> None:
    """Random numbers are drawn as in fairseq, and no module loses a parameter."""
    model = copy.deepcopy(zoo.build("transformer", dtype))
    change(model)
    names = [name for name, _ in model.named_parameters()]
    for calls in range(3):
        _served([model], zoo.batch(4, 9), {"beam_size": 3, "search_strategy": "top_k"}, 1e-4)
        assert len(pays) == calls + 1
    assert [name for name, _ in model.named_parameters()] == names


def test_an_encoder_whose_first_pass_fails(
    pays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This call and the next return the output of the modules."""

    def failing(*_: Any) -> Any:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(encoders.Encoder, "__call__", failing)
    model = copy.deepcopy(zoo.build("transformer"))
    before = _left_off()
    for _ in range(2):
        _served([model], zoo.batch(4, 9), {"beam_size": 3, "search_strategy": "top_k"})
    said = "the encoder runs through its own modules: first-step outputs differ from the family's"
    assert _left_off() == before | {said: before.get(said, 0) + 2}


def test_a_source_of_padding_alone(pays: list[int]) -> None:
    sample = zoo.batch(4, 9, "left")
    sample["net_input"]["src_tokens"][1] = zoo.PAD
    zoo.assert_same([zoo.build("transformer")], sample, {"beam_size": 3, "max_len_b": 9})
    assert not pays
