"""The first token of encoder-decoders: from the weights where checked, else from the forward."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GenerationMixin

from fastgen.models.build import equivalence_check
from fastgen.models.runtime import first_token
from tests.support import zoo
from tests.support.parity import assert_same

CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "samples": {"do_sample": True, "num_return_sequences": 2},
}


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list that gets an entry for each prompt that a model's own forward runs."""
    found: list[object] = []
    prefill = GenerationMixin._prefill

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(self)
        return prefill(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "_prefill", noted)
    return found


def _by_modules(model: Any, kwargs: dict[str, Any], prompts: list[object]) -> int:
    """Return how many times a fastgen call runs the prompt through the model.

    The output has to equal that of unpatched transformers.
    """
    kwargs = {"max_new_tokens": 6, "min_new_tokens": 3} | kwargs
    assert assert_same(model, kwargs).error is None
    prompts.clear()
    model.generate(**kwargs)
    return len(prompts)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("family", sorted(zoo.ENCODER_DECODERS))
def test_family(family: str, call: str, prompts: list[object]) -> None:
    model = zoo.build(family)
    for padding in ("natural", "none"):
        kwargs = zoo.batch(model, 4, 9, padding) | CALLS[call]
        assert _by_modules(model, kwargs, prompts) == (family in ("prophetnet", "unilm"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["bart", "marian"])
def test_precision(family: str, dtype: torch.dtype, prompts: list[object]) -> None:
    model = zoo.build(family, dtype)
    kwargs = zoo.batch(model, 3, 7) | {"max_new_tokens": 1, "min_new_tokens": 1}
    model.generate(**kwargs | {"max_new_tokens": 4})
    prompts.clear()
    model.generate(**kwargs | {"max_new_tokens": 4})
    assert not prompts


@pytest.mark.parametrize(
    "more",
    [
        {"decoder_input_ids": torch.full((4, 2), zoo.START)},
        {
            "decoder_input_ids": torch.full((4, 1), zoo.START),
            "decoder_attention_mask": torch.ones(4, 1).long(),
        },
        {"return_dict_in_generate": True, "output_hidden_states": True},
        {"return_dict_in_generate": True, "output_attentions": True},
        {"prefill_chunk_size": 1},
    ],
    ids=["two tokens", "a mask", "hidden states", "attentions", "chunks"],
)
def test_what_more_is_asked_of_a_prompt(more: dict[str, Any], prompts: list[object]) -> None:
    model = zoo.build("bart")
    kwargs = zoo.batch(model, 4, 9)
    assert _by_modules(model, kwargs, prompts) == 0
    assert _by_modules(model, kwargs | more, prompts) == 1
    assert _by_modules(model, kwargs, prompts) == 0


def test_weights_of_today(prompts: list[object]) -> None:
    model = zoo.build("bart")
    kwargs = zoo.batch(model, 4, 9) | {"num_beams": 2}
    assert _by_modules(model, kwargs, prompts) == 0
    with torch.no_grad():
        model.model.decoder.layers[1].encoder_attn.k_proj.weight.mul_(3)
        model.model.decoder.layers[0].encoder_attn.v_proj.bias.add_(2)
    assert _by_modules(model, kwargs, prompts) == 0
    attention = model.model.decoder.layers[1].encoder_attn
    attention.v_proj = nn.Sequential(attention.v_proj)
    assert _by_modules(model, kwargs, prompts) == 1


def test_what_computes_something_else(
    monkeypatch: pytest.MonkeyPatch, prompts: list[object]
) -> None:
    """If the cross-attention KV differ, only the decode steps run from the weights.

    No decode step computes these keys and values.
    """
    source_of = first_token.source_of

    def others(*args: Any) -> list[first_token.KeysValues]:
        first, *rest = source_of(*args)
        return [first, *((keys, 1.01 * values) for keys, values in rest)]

    monkeypatch.setattr(first_token, "source_of", others)
    model = zoo.build("bart")
    kwargs = zoo.batch(model, 4, 9)
    assert _by_modules(model, kwargs, prompts) == 1
    decoder = model.model.decoder
    assert (
        equivalence_check.verdicts_of(decoder).step[1],
        equivalence_check.verdicts_of(decoder).first_token[1],
    ) == (True, False)
