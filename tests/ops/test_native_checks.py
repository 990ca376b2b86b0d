"""Inputs that C does not cover go to torch: other dtypes, shapes that do not fit, bad indices."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

import fastgen
from fastgen.models.runtime.native.step import NativeStep
from fastgen.ops import int8, linear, native
from fastgen.ops.beam_attention import beam_attention
from fastgen.ops.cache import move_sentences_
from fastgen.ops.counts import calls
from fastgen.ops.embedding import embedding
from fastgen.ops.native import products as native_products
from fastgen.ops.selection.kbest import LogitsUpdates, kbest
from fastgen.ops.selection.ngram_block import ngram_mask_
from fastgen.ops.selection.token_mask import add_tokens_, empty_mask
from fastgen.ops.tables import Table, extend_rows_, finish_rows_
from tests.models.test_in_c import _wide  # noqa: F401  a fixture
from tests.ops.test_native import own_variant as variant  # noqa: F401  a fixture
from tests.support import zoo
from tests.support.parity import assert_same

CPU = torch.device("cpu")


def _integers(*shape: int, below: int = 3) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(0))


def _attention(mask: Tensor) -> Any:
    keys = torch.ones(2, 2, 9, 32)
    return beam_attention(torch.ones(2, 8, 2, 32), keys, keys, mask, 1.0)


def _product(x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    by = native.library()
    assert by is not None
    packed = linear.PanelWeight(native_products.packed(by, torch.ones(64, 32)), 64, 32)
    return linear.linear(x, packed, bias, residual=residual)


def _int8_product(x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    by = native.library()
    assert by is not None
    packed = native_products.packed_bytes(by, *int8.rounded(torch.ones(64, 32)))
    return int8.int8_linear(x, packed, bias, residual=residual)


def _extend(parents: Tensor) -> None:
    extend_rows_([Table(torch.zeros(2, 3, 8), torch.zeros(2, 3, 1))], parents, 2)


def _finish(order: Tensor, beams: Tensor) -> None:
    finish_rows_(
        [torch.zeros(2, 3, 8)], [Table(torch.zeros(2, 3, 8), torch.zeros(2, 6, 1))], order, beams, 2
    )


WRONG: dict[str, Callable[[], Any]] = {
    "mask of more sentences": lambda: _attention(torch.zeros(3, 1, 1, 9)),
    "mask of fewer beams": lambda: _attention(torch.zeros(2, 1, 7, 9)),
    "mask of more heads": lambda: _attention(torch.zeros(1, 3, 1, 9)),
    "mask of fewer keys": lambda: _attention(torch.zeros(2, 1, 1, 8)),
    "inputs of another width": lambda: _product(torch.ones(4, 33)),
    "inputs of twice the width": lambda: _product(torch.ones(2, 4, 64)),
    "bias of another width": lambda: _product(torch.ones(4, 32), torch.ones(65)),
    "residual of fewer rows": lambda: _product(torch.ones(4, 32), residual=torch.ones(3, 64)),
    "inputs of another width, int8": lambda: _int8_product(torch.ones(4, 33)),
    "bias of another width, int8": lambda: _int8_product(torch.ones(4, 32), torch.ones(65)),
    "residual of fewer rows, int8": lambda: _int8_product(
        torch.ones(4, 32), residual=torch.ones(3, 64)
    ),
    "position of another width": lambda: embedding(
        _integers(4), torch.ones(9, 32), 1.0, torch.ones(31)
    ),
    "positions of fewer rows": lambda: embedding(
        _integers(4), torch.ones(9, 32), 1.0, torch.ones(3, 32)
    ),
    "parents beyond the beams": lambda: _extend(torch.full((2, 3), 7)),
    "parents below 0": lambda: _extend(torch.full((2, 3), -9)),
    "order beyond the candidates": lambda: _finish(torch.full((2, 3), 9), _integers(2, 6)),
    "running rows beyond the beams": lambda: _finish(torch.full((2, 3), 5), torch.full((2, 6), 3)),
    "sentences beyond the last": lambda: move_sentences_(
        torch.ones(4, 2, 3, 8), torch.tensor([4]), torch.tensor([0])
    ),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_torch_raises(variant: str, call: Callable[[], Any]) -> None:  # noqa: F811
    with pytest.raises((IndexError, RuntimeError)):
        call()


def _with_bans(dtype: torch.dtype) -> Tensor:
    logits = torch.randn(1, 2, 150, generator=torch.Generator().manual_seed(0))
    banned = torch.ones(2, 5, dtype=dtype) * 5
    return kbest(logits, torch.zeros(1, 2), 4, LogitsUpdates(banned=banned)).indices


def _moved(dtype: torch.dtype) -> Tensor:
    buffer = torch.arange(96.0).view(4, 2, 3, 4)
    move_sentences_(buffer, torch.tensor([0, 1], dtype=dtype), torch.tensor([3, 2], dtype=dtype))
    return buffer


OTHERS: dict[str, tuple[Callable[[torch.dtype], Tensor], torch.dtype]] = {
    "sets of tokens in k best": (_with_bans, torch.int32),
    "places of sentences": (_moved, torch.int64),
    "tokens that are added": (
        lambda dtype: add_tokens_(empty_mask(2, 90, CPU), _integers(2, 5, below=90).to(dtype), 90),
        torch.int64,
    ),
    "texts of n-grams": (
        lambda dtype: ngram_mask_(empty_mask(2, 9, CPU), _integers(2, 30).to(dtype), 2, 9),
        torch.int64,
    ),
    "ids of an embedding": (
        lambda dtype: embedding(_integers(5).to(dtype), torch.arange(96.0).view(3, 32), 1.0),
        torch.int64,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("made", "dtype"), OTHERS.values(), ids=OTHERS)
def test_integers_of_another_type(
    variant: str,  # noqa: F811
    made: Callable[[torch.dtype], Tensor],
    dtype: torch.dtype,
) -> None:
    """Other integer dtypes give the same result as in torch, without C."""
    wanted = made(dtype)
    in_c = [operation for operation, path in calls if path == "native"]
    assert in_c
    calls.clear()
    assert torch.equal(made(torch.int32 if dtype == torch.int64 else torch.int64), wanted)
    assert not any(calls[operation, "native"] for operation in in_c)


ROWS = list(itertools.product((1, 2, 3, 6), (None, 1, 3, 6), (7, 6, 8)))


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", ["bart", "t5"])
@pytest.mark.parametrize("ops", ["native", "reference"])
def test_states_of_other_rows_than_the_mask(
    family: str, beams: int, ops: str, setting: Callable[[str, str], None]
) -> None:
    """The result, or the error, is that of the toolkit."""
    if ops == "native" and native.found().library is None:
        pytest.skip(str(native.found().reason))
    setting("FASTGEN_OPS", ops)
    model = zoo.build(family, torch.float32)
    options = {"num_beams": beams, "max_new_tokens": 6}
    for _ in range(2):
        model.generate(**zoo.batch(model, 3, 7), **options)
    for rows, of_mask, length in ROWS:
        states = torch.randn(
            rows, 7, model.config.d_model, generator=torch.Generator().manual_seed(1)
        )
        mask = None if of_mask is None else torch.ones(of_mask, length, dtype=torch.int64)
        if mask is not None:
            mask[0, -2:] = 0
        given = {
            "encoder_outputs": BaseModelOutput(last_hidden_state=states),
            "attention_mask": mask,
        }
        assert_same(model, given | options, tolerance=1e-4)


def test_keys_of_other_rows_than_the_call(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """A step in C is rejected if its cache has other sentences, or another mask, than the call."""
    model = zoo.build("bart", torch.float32)
    call = zoo.batch(model, 3, 7, "right") | {"num_beams": 2, "max_new_tokens": 6}
    refused: list[bool] = []
    own = NativeStep._covers

    def covers(self: Any, places: Any, steps: int) -> bool:
        part = places[0].part
        there, sentences = own(self, places, steps), part.sentences
        for layer in range(len(self._checked)):
            self._checked[layer] = None
        part.sentences = sentences + 1
        refused.append(not own(self, places, steps))
        part.sentences = sentences
        return there

    monkeypatch.setattr(NativeStep, "_covers", covers)
    for _ in range(2):
        found = model.generate(**call)
    with fastgen.disabled():
        assert torch.equal(model.generate(**call), found)
    assert refused
    assert all(refused)
