"""Check how the tokens that prompts begin with in common are found, and ordered."""

import pytest
import torch
from torch import Tensor

from fastgen.decoding.kv_cache import common_prefix
from fastgen.decoding.kv_cache.layer_kv import LayerKV
from fastgen.models.memory.scratch import scratch_pool_of


def _padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return ids and mask (B, P) of rows that are padded on the left with token 0."""
    length = max(map(len, rows))
    ids = torch.tensor([[0] * (length - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def _random_rows(generator: torch.Generator) -> list[list[int]]:
    def drawn(most: int, tokens: int) -> list[int]:
        length = int(torch.randint(0, most, (), generator=generator))
        return torch.randint(0, tokens, (length,), generator=generator).tolist()

    common = drawn(60, 9)
    return [[*common, *drawn(5, 2), 1] for _ in range(int(len(common) % 4) + 2)]


def _expected(rows: list[list[int]]) -> int:
    """Return the length of the longest common beginning that leaves each row a token."""
    common = 0
    while all(len(row) > common + 1 and row[common] == rows[0][common] for row in rows):
        common += 1
    return common


@pytest.mark.parametrize("seed", range(40))
def test_common_tokens_and_their_order(seed: int) -> None:
    rows = _random_rows(torch.Generator().manual_seed(seed))
    ids, mask = _padded(rows)
    padding, expected = common_prefix.padding_of(mask), _expected(rows)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    assert (padding is None) == (len(set(map(len, rows))) == 1)
    assert common_prefix.have_common_prefix(ids, padding) == (expected >= common_prefix.LEAST)
    assert common_prefix.common_tokens(ids, padding, positions) == expected
    assert common_prefix.common_tokens(ids, padding, None) == expected
    if padding is None:
        return
    assert common_prefix.is_on_the_left(mask, padding)
    order = common_prefix.common_first(padding, expected, ids.shape[1])
    assert torch.equal(order.sort(1).values, torch.arange(ids.shape[1]).expand_as(ids))
    for row, moved in zip(rows, ids.gather(1, order).tolist(), strict=True):
        between = [0] * (ids.shape[1] - len(row))
        assert moved == row[:expected] + between + row[expected:]


def test_positions_count() -> None:
    ids = torch.arange(60).expand(3, -1)
    positions = ids.clone()
    positions[1, 41:] += 1
    assert common_prefix.common_tokens(ids, None, positions) == 41
    assert common_prefix.common_tokens(ids, None, positions[:1]) == 59


def test_padding_elsewhere() -> None:
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[0, 3] = 0
    padding = common_prefix.padding_of(mask)
    assert padding is not None
    assert not common_prefix.is_on_the_left(mask, padding)


@pytest.mark.parametrize(
    ("sentences", "length", "common", "width", "expected"),
    [
        (2, 282, 256, 512, True),
        (2, 282, 256, 64, False),  # too little work
        (2, 1006, 256, 512, False),  # too small a share
        (1, 600, 500, 512, False),  # no other sentence
        (90, 40, 31, 512, False),  # too few tokens
        (32, 1050, 1000, 512, True),
    ],
)
def test_where_it_pays(
    sentences: int, length: int, common: int, width: int, expected: bool
) -> None:
    assert common_prefix.pays(sentences, length, common, width) == expected


def _layers(beams: int) -> tuple[LayerKV, LayerKV]:
    """Return a layer whose common tokens are stored once, and one with the same content."""
    generator = torch.Generator().manual_seed(beams)
    drawn = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    model = torch.nn.Linear(1, 1)
    apart, whole = (LayerKV(40, scratch_pool_of(model), beams, prompt=12) for _ in range(2))
    common, own = [drawn(1, 2, 9, 8), drawn(1, 2, 9, 8)], [drawn(4, 2, 3, 8), drawn(4, 2, 3, 8)]
    apart.share(*common)
    whole.extend(*(each.expand(4, -1, -1, -1) for each in common))
    for layer in (apart, whole):
        layer.extend(*own)
        layer.beams = beams
    for _ in range(7):
        keys, values = drawn(4 * beams, 2, 1, 8), drawn(4 * beams, 2, 1, 8)
        for layer in (apart, whole):
            layer.append(keys, values)
    return apart, whole


def _equal(apart: LayerKV, whole: LayerKV) -> bool:
    """Return whether two layers hold the same; common tokens stay as they are stored."""
    counts = [(each.slots, each.length, each.filled, each.slot_nbytes) for each in (apart, whole)]
    pairs = zip(apart.joined(), whole.joined(), strict=True)
    return counts[0] == counts[1] and all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("beams", [1, 3])
def test_common_tokens_are_stored_once(beams: int) -> None:
    apart, whole = _layers(beams)
    assert apart.common is not None
    assert _equal(apart, whole)
    assert apart.nbytes == whole.nbytes - 3 * 9 * apart.slot_nbytes
    for layer in (apart, whole):  # more than the buffers have room for
        for _ in range(33):
            layer.append(*(torch.full((4 * beams, 2, 1, 8), 3.0) for _ in range(2)))
    assert _equal(apart, whole)
    assert apart.common is not None
    if beams > 1:
        slots = torch.tensor([[1, 4, 5], [0, 2, 9], [3, 4, 8], [2, 3, 6]])
        for layer in (apart, whole):
            layer.compact(slots)
        assert _equal(apart, whole)
    for layer in (apart, whole):
        layer.keep(torch.tensor([0, 3]), (torch.tensor([1]), torch.tensor([3])))
    assert _equal(apart, whole)
    assert apart.common is not None
    assert len(apart.joined()[0]) == 2


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("reader", ["keys", "values", "capacity_buffers"])
def test_readers_that_do_not_know_of_common_tokens(beams: int, reader: str) -> None:
    apart, whole = _layers(beams)
    free = apart.free_slots
    getattr(apart, reader)
    assert apart.common is None
    assert (apart.nbytes, apart.free_slots) == (whole.nbytes, free)
    assert _equal(apart, whole)
    for layer in (apart, whole):
        layer.append(*(torch.ones(4 * beams, 2, 1, 8) for _ in range(2)))
    assert _equal(apart, whole)


def test_room_for_the_whole_prompt_is_reserved_at_once() -> None:
    model = torch.nn.Linear(1, 1)
    layer = LayerKV(4, scratch_pool_of(model), expected=1, prompt=10)
    first, rest = torch.randn(3, 2, 6, 8), torch.randn(3, 2, 4, 8)
    layer.extend(first, first)
    buffers = [buffer.data_ptr() for buffer in layer.capacity_buffers]
    layer.extend(rest, rest)
    assert [buffer.data_ptr() for buffer in layer.capacity_buffers] == buffers
    assert torch.equal(layer.keys, torch.cat([first, rest], 2))
