"""Encoders, and the first token of encoder-decoders, run in C with the same results."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from fastgen.models.build import encoder_builder
from fastgen.models.build.encoder_builder import encoder_of
from fastgen.models.runtime.encoder import Encoder, Group, UnpaddedBatch, unpad, whole
from fastgen.models.specs.registry import ENCODERS
from fastgen.ops import native
from fastgen.ops.counts import calls
from fastgen.patches.transformers.encoders import unpadded_encoder
from tests.models.test_in_c import _wide  # noqa: F401  a fixture
from tests.ops.test_native import own_variant as variant  # noqa: F401  a fixture
from tests.support import zoo
from tests.support.parity import assert_same


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


FAMILIES = sorted(zoo.ENCODER_DECODERS.keys() - {"unilm"})


def _encoded() -> int:
    return calls["encoder", "native"]


@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generate(variant: str, family: str, padding: str) -> None:  # noqa: F811
    """The encoder, first token and decode steps of the second call all run without the modules."""
    model = zoo.build(family, torch.float32)
    kwargs = zoo.batch(model, 4, 9, padding) | {"num_beams": 3, "max_new_tokens": 6}
    for _ in range(2):
        assert assert_same(model, kwargs).error is None
    assert _encoded() > 0
    calls.clear()
    steps = len(model.generate(**kwargs | {"eos_token_id": None})[0]) - 1
    assert _encoded() == 1
    in_a_row = calls["search", "native"] > 0
    # One of them belongs to the first token.
    assert calls["decoder_step", "native"] == (1 if in_a_row else steps)


def _layers(model: Any, length: int) -> Encoder:
    module = model.get_encoder()
    return encoder_of(module, ENCODERS[module.config.model_type], length)


def _batch(kind: str) -> tuple[UnpaddedBatch, int]:
    """Return sentences and their number of positions.

    `kind` selects equal lengths, different lengths, or more tokens than one block of attention.
    """
    lengths = {"alike": [7] * 5, "different": [1, 4, 4, 9, 16], "long": [129, 128, 300]}[kind]
    longest = max(lengths)
    if kind == "alike":
        return whole((len(lengths), longest), "none", torch.device("cpu")), longest
    return unpad(torch.arange(longest) < torch.tensor(lengths)[:, None], "none"), longest


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", ["alike", "different", "long"])
# Norms before and after sublayers, and biases of attention scores.
@pytest.mark.parametrize("family", ["marian", "pegasus", "t5", "umt5"])
def test_layers(
    variant: str,  # noqa: F811
    family: str,
    kind: str,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The results equal single operations, for any number of threads; the input is unmodified."""
    monkeypatch.setattr(native, "threads_for", lambda work: threads)
    model = zoo.build(family, torch.float32)
    sentences, length = _batch(kind)
    # The other families have this many positions.
    layers = _layers(model, length if family.endswith("t5") else 9)
    rows = sum(group.sentences * group.tokens for group in sentences.groups)
    x = torch.randn(rows, model.config.d_model, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    found = layers(x, sentences)
    assert _encoded() == 1
    wanted = replace(layers, run_layers=None)(x, sentences)
    assert torch.equal(x, before)
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", ["alike", "different"])
@pytest.mark.parametrize("family", ["marian", "pegasus", "t5", "umt5"])
def test_layers_in_bfloat16(variant: str, family: str, kind: str) -> None:  # noqa: F811
    """C is as near to the results of the same weights in fp32 as single operations are."""
    model = zoo.build(family, torch.float32).bfloat16()
    sentences, length = _batch(kind)
    length = length if family.endswith("t5") else 9
    rows = sum(group.sentences * group.tokens for group in sentences.groups)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, model.config.d_model, generator=generator).bfloat16()
    layers = _layers(model, length)
    found = layers(x, sentences)
    assert _encoded() == 1
    wanted = replace(layers, run_layers=None)(x, sentences)
    exact = replace(_layers(copy.deepcopy(model).float(), length), run_layers=None)(
        x.float(), sentences
    )
    assert found.dtype == torch.bfloat16
    error, theirs = ((each.float() - exact).norm() for each in (found, wanted))
    assert 0 < error <= 1.25 * theirs


def test_padding_that_is_run(variant: str) -> None:  # noqa: F811
    """Layers run as single operations if padding is computed, or only first positions are read."""
    layers = _layers(zoo.build("marian", torch.float32), 9)
    visible = torch.arange(9) < torch.tensor([4, 9])[:, None]
    for padding, expected in (("run", 0), ("first", 0), ("none", 1)):
        calls.clear()
        sentences: UnpaddedBatch = unpad(visible, padding)  # pyright: ignore[reportArgumentType]
        layers(torch.randn(18, 32)[: sum(_rows(group) for group in sentences.groups)], sentences)
        assert _encoded() == expected, padding


def _rows(group: Group) -> int:
    return group.sentences * (group.tokens + group.padding)


def _on_no_cpu_of_ours(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(native, "library", lambda *_: None)


def _known(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(encoder_builder, "native_encoder", lambda *_: None)


@pytest.mark.parametrize(("where", "read"), [(_on_no_cpu_of_ours, 0), (_known, 1)])
def test_without_padding_only_for_c(
    variant: str,  # noqa: F811
    where: Callable[[pytest.MonkeyPatch], None],
    read: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Padding is removed only if C runs the encoder, as it gains nothing elsewhere.

    A model with parts that C does not support is inspected once.
    """
    where(monkeypatch)
    model, times = zoo.build("marian", torch.float32), list[int]()
    monkeypatch.setattr(
        unpadded_encoder, "encoder_of", lambda *given: times.append(1) or encoder_of(*given)
    )
    for _ in range(3):
        assert assert_same(model, zoo.batch(model, 3, 8) | {"max_new_tokens": 4}).error is None
    assert len(times) == read
    assert _encoded() == 0


def test_weights_may_change_between_calls(variant: str) -> None:  # noqa: F811
    model = zoo.build("marian", torch.float32)
    kwargs = zoo.batch(model, 3, 8) | {"max_new_tokens": 8, "num_beams": 2}
    for _ in range(3):
        assert assert_same(model, kwargs).error is None
        layer = model.model.encoder.layers[1]
        layer.fc1.weight.mul_(-1.5)
        layer.self_attn_layer_norm.weight = torch.nn.Parameter(
            layer.self_attn_layer_norm.weight + 1.0
        )
    assert _encoded() >= 3


@pytest.mark.parametrize("name", ["transformer", "prenorm", "bart"])
def test_fairseq(variant: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    pytest.importorskip("fairseq")
    from tests.support import fairseq_zoo

    for part in ("encoder", "decoder"):
        for size, value in (("embed_dim", 32), ("ffn_embed_dim", 40)):
            monkeypatch.setitem(fairseq_zoo._SIZES, f"{part}_{size}", value)
    model = fairseq_zoo.build.__wrapped__(name, torch.float32)
    for padding in ("none", "left"):
        for _ in range(2):
            calls.clear()
            sample = fairseq_zoo.batch(5, 9, padding=padding)
            found = fairseq_zoo.assert_same([model], sample, {"beam_size": 3, "max_len_b": 14})
            assert not isinstance(found, Exception)
        assert _encoded() == 1, padding
