"""Check forwards in which linear layers compute only the rows that are read."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastgen
from fastgen.models.layers import read_rows
from fastgen.models.layers.linear import Linear
from fastgen.models.memory.scratch import scratch_pool_of
from tests.support import zoo
from tests.support.parity import assert_same

DECODERS = sorted(zoo.DECODERS | zoo.MORE)


@pytest.fixture
def skipped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let every forward with padding skip rows; return how many each layer has skipped."""
    monkeypatch.setattr(read_rows, "LEAST_WORK", 1)
    monkeypatch.setattr(read_rows, "LEAST_SHARE", 0)
    counts: list[int] = []
    own = read_rows._Rows.placed

    def counted(self: Any, y: Tensor, shape: torch.Size) -> Tensor:
        counts.append(shape.numel() - len(y))
        return own(self, y, shape)

    monkeypatch.setattr(read_rows._Rows, "placed", counted)
    return counts


def _padded(model: Any, lengths: tuple[int, ...]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(40, zoo.VOCABULARY, (len(lengths), max(lengths)), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : max(lengths) - length] = zoo.PAD
        mask[row, : max(lengths) - length] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", DECODERS)
def test_prompts_of_unequal_lengths(family: str, beams: int, skipped: list[int]) -> None:
    model = zoo.build(family, torch.float32)
    if model.config.is_encoder_decoder:
        pytest.skip("its prompt is one token")
    given = _padded(model, (9, 2, 5)) | {"num_beams": beams, "max_new_tokens": 8}
    assert assert_same(model, given).error is None
    assert all(skipped)


def test_rows_are_skipped(skipped: list[int]) -> None:
    model = zoo.build("llama", torch.float32)
    given = _padded(model, (9, 2, 5)) | {"max_new_tokens": 3}
    model.generate(**given)
    assert set(skipped) == {3 * 9 - 16}
    count = sum(isinstance(module, nn.Linear) for module in model.modules())
    assert len(skipped) == count - 1  # the head gets the last position alone
    skipped.clear()
    model.generate(**given, return_dict_in_generate=True)  # the caller may see padding
    model.generate(**given | {"attention_mask": torch.ones(3, 9, dtype=torch.int64)})
    with fastgen.disabled():
        model.generate(**given)
    assert not skipped


def test_a_prompt_of_padding_alone(skipped: list[int]) -> None:
    """Its padding is read, as attention with nothing to attend to reads all positions."""
    model = zoo.build("llama", torch.float32)
    model.set_attn_implementation("eager")
    given = _padded(model, (9, 2, 5)) | {"max_new_tokens": 3}
    given["attention_mask"][1] = 0
    assert_same(model, given)
    assert not skipped


def test_prompts_that_begin_alike(skipped: list[int]) -> None:
    model = zoo.build("llama", torch.float32)
    given = _padded(model, (90, 80, 77))
    for row, length in enumerate((90, 80, 77)):
        given["input_ids"][row, 90 - length : 160 - length] = given["input_ids"][0, :70]
    assert assert_same(model, given | {"max_new_tokens": 6}).error is None
    assert set(skipped) == {23}


def test_a_layer() -> None:
    layer = nn.Linear(24, 40)
    forward = Linear(layer, False, scratch_pool_of(layer))
    x, source = torch.randn(3, 7, 24), torch.randn(3, 5, 24)
    read, visible = torch.rand(3, 7) < 0.5, torch.rand(3, 5) < 0.5
    with torch.no_grad():
        expected, of_source = layer(x), layer(source)
        expected[~read] = 0
        of_source[~visible] = 0
        x[~read] = torch.nan
        with read_rows.reading(read, 4096, source, visible):
            torch.testing.assert_close(forward(x), expected)
            torch.testing.assert_close(forward(x), expected)
            torch.testing.assert_close(forward(source), of_source)
            torch.testing.assert_close(forward(source.clone()), layer(source))
        assert read_rows.read_rows.get() is None


@pytest.mark.parametrize(
    ("shape", "unread", "width", "visible", "pays"),
    [
        ((4, 100), 200, 512, None, True),
        ((4, 100), 20, 512, None, False),  # a small share
        ((4, 100), 200, 64, None, False),  # little work
        ((4, 100), 400, 512, None, False),  # nothing is read
        ((20, 20), 200, 512, None, False),  # the shape is that of transposed texts
        ((4, 100), 200, 512, (4, 100), False),  # the shape is that of the sources
        ((4, 100), 200, 512, (4, 90), True),
    ],
)
def test_where_it_pays(
    shape: tuple[int, int], unread: int, width: int, visible: tuple[int, int] | None, pays: bool
) -> None:
    read = torch.ones(shape, dtype=torch.bool)
    read.view(-1)[:unread] = False
    seen = None if visible is None else torch.ones(visible, dtype=torch.bool)
    source = None if visible is None else torch.zeros(*visible, 3)
    with read_rows.reading(read, width, source, seen):
        assert (read_rows.read_rows.get() is not None) == pays
