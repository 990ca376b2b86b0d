"""Check the rows of a layer's keys and values that stay when sentences leave."""

import pytest
import torch

from fastgen.decoding.kv_cache.layer_kv import LayerKV
from fastgen.models.memory.scratch import scratch_pool_of
from tests.patches.transformers.streaming.test_generate_batch import ENDS
from tests.support import zoo


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("beams", [1, 2])
def test_rows_move_only_where_nobody_has_a_view(beams: int, private: bool) -> None:
    layer = LayerKV(4, scratch_pool_of(torch.nn.Linear(1, 1)), expected=beams, prompt=10)
    layer.is_private, layer.beams = private, beams
    keys = torch.randn(5, 2, 10, 8)
    layer.extend(keys, -keys)
    before, stay = layer.keys.data_ptr(), torch.tensor([0, 4, 2])
    held, copy = layer.keys, layer.keys.clone()
    layer.keep(stay, (torch.tensor([1]), torch.tensor([4])))
    assert torch.equal(layer.keys, keys[stay])
    assert torch.equal(layer.values, -keys[stay])
    moves = private or beams > 1
    assert (layer.keys.data_ptr() == before) == moves
    assert torch.equal(held, copy) != moves


def test_a_cache_knows_who_has_views() -> None:
    """Modules get views of the buffers in decode steps, but not in prefill."""
    model = zoo.build("llama")
    seen = list[bool]()
    keep = LayerKV.keep

    def noting(self: LayerKV, *args: object) -> None:
        seen.append(self.is_private)
        keep(self, *args)  # pyright: ignore[reportArgumentType]

    def run() -> bool:
        seen.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LayerKV, "keep", noting)
            ids = torch.arange(40, 64).view(8, 3)
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, **ENDS)
        assert seen
        return all(seen)

    assert not run()  # the first step runs through the modules, too
    assert run()
