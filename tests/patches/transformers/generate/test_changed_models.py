"""Check models that a user has changed.

Layers are removed, exchanged or quantized, models are in training mode, or parts have custom code.
Each model generates as unpatched transformers does, and disabled features are reported.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.utils.generic import can_return_tuple

import fastgen
from tests.support import zoo
from tests.support.parity import assert_same, fallbacks, left_off

BEAMS: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 8}
GREEDY: dict[str, Any] = {"max_new_tokens": 8}
ASKED = {"greedy": GREEDY, "beams": BEAMS, "with a dict": BEAMS | {"return_dict_in_generate": True}}
LAYERS = {
    "llama": "model.layers", "gpt2": "transformer.h", "bart": "model.decoder.layers",
    "marian": "model.decoder.layers", "t5": "decoder.block", "gpt_neo": "transformer.h",
}  # fmt: skip


def _check(model: Any, more: dict[str, Any], sentences: int = 3) -> Any:
    # GPT-Neo computes attention in fp32.
    tolerance = 1e-4 if model.config.model_type == "gpt_neo" else 1e-9
    return assert_same(model, zoo.batch(model, sentences, 7) | more, tolerance=tolerance).value


def _replaced(model: Any, path: str, layers: list[nn.Module]) -> None:
    outer, _, name = path.rpartition(".")
    setattr(model.get_submodule(outer), name, nn.ModuleList(layers).eval())


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("family", LAYERS)
@pytest.mark.parametrize("warm", [False, True])
def test_a_layer_taken_out(family: str, asked: str, warm: bool) -> None:
    """The remaining layers keep their indices, as in distilled models: the cache has a gap."""
    model = zoo.build(family)
    if warm:
        _check(model, ASKED[asked])
    layers = list(model.get_submodule(LAYERS[family]))
    _replaced(model, LAYERS[family], layers[1:])
    before = left_off()
    _check(model, ASKED[asked])
    reasons = (
        "keys and values are not shared: a layer",
        "decode steps run through the model's own modules: its layers",
    )
    assert any(new.startswith(reasons) for new in left_off() - before)


@pytest.mark.parametrize("asked", ASKED)
# The first layer of T5 holds the relative position bias.
@pytest.mark.parametrize("family", [family for family in LAYERS if family != "t5"])
def test_layers_exchanged_between_calls(family: str, asked: str) -> None:
    model = zoo.build(family)
    _check(model, ASKED[asked])
    layers = model.get_submodule(LAYERS[family])
    layers[0], layers[1] = layers[1], layers[0]
    _check(model, ASKED[asked])


@pytest.mark.parametrize("family", ["gpt2", "bart", "llama"])
@pytest.mark.parametrize(
    "more",
    [
        BEAMS,
        GREEDY,
        {"do_sample": True, "num_return_sequences": 4, "top_k": 0, "max_new_tokens": 3},
    ],
)
def test_training_mode(family: str, more: dict[str, Any]) -> None:
    """With dropout each row draws its own, in the prompt as well.

    A model without dropout shares the cache, and finished sentences leave.
    """
    model = zoo.build(family).train()
    for module in model.modules():
        if family != "llama" and isinstance(module, nn.Dropout):
            module.p = 0.3
        elif family == "bart" and isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.3
    before = left_off()
    _check(model, more | {"eos_token_id": list(range(2, 12))})
    drawn = [new for new in left_off() - before if "training mode draws for the whole batch" in new]
    expected = 0 if family == "llama" else 2 - ("num_beams" not in more)
    assert len(drawn) == expected


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("family", ["llama", "gpt2", "bart", "t5"])
def test_dynamic_quantisation(family: str) -> None:
    """The activations of all rows share one scale, so no row may leave."""
    model = torch.ao.quantization.quantize_dynamic(
        zoo.build(family, torch.float32), {nn.Linear}, dtype=torch.qint8
    )
    before = left_off()
    for more in (GREEDY, BEAMS):
        given = (
            zoo.batch(model, 4, 7)
            | more
            | {"eos_token_id": list(range(2, 14)), "max_new_tokens": 12}
        )
        assert_same(model, given)
    assert (
        "finished sentences stay in the batch: torch.Linear may look at the whole batch"
        in left_off() - before
    )


def _less_mean(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    return output - 3 * output.mean(0, keepdim=True)


@pytest.mark.parametrize("how", ["hook", "forward", "class"])
@pytest.mark.parametrize("family", ["llama", "bart"])
def test_code_that_looks_at_the_whole_batch(
    family: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, before, replaced = zoo.build(family), left_off(), fallbacks()
    own = type(model.lm_head).forward
    if how == "hook":
        model.lm_head.register_forward_hook(_less_mean)
    elif how == "forward":
        model.lm_head.forward = lambda x: _less_mean(model, (), own(model.lm_head, x))
    else:
        norm = next(module for module in model.modules() if "Norm" in type(module).__name__)
        forward = type(norm).forward
        monkeypatch.setattr(
            type(norm), "forward", lambda self, x: _less_mean(self, (), forward(self, x))
        )
    for more in (GREEDY, BEAMS):
        given = (
            zoo.batch(model, 6, 7)
            | more
            | {"eos_token_id": list(range(2, 14)), "max_new_tokens": 12}
        )
        assert_same(model, given)
    if (family, how) == ("bart", "class"):  # torch's own class, which all models use
        assert any("LayerNorm.forward was replaced by" in new for new in fallbacks() - replaced)
    else:
        assert any(new.endswith("may look at the whole batch") for new in left_off() - before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("family", ["t5", "mt5", "bart", "fsmt", "led", "mvp", "prophetnet"])
def test_a_source_of_padding_alone(
    family: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    """Families treat such a source differently in attention."""
    if dtype == torch.bfloat16:  # in C, tokens may differ by rounding
        request.getfixturevalue("by_torch_alone")
    model = zoo.build(family, dtype)
    given = zoo.batch(model, 3, 7)
    for more in (GREEDY, BEAMS):
        assert_same(model, given | more)
        mask = given["attention_mask"].clone()
        mask[1] = 0
        assert_same(model, given | more | {"attention_mask": mask}, tolerance=1e-6)


@pytest.fixture
def sdpa() -> Iterator[Callable[[], None]]:
    """Replace the attention function `sdpa` for the duration of a test."""
    original: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def louder(*args: Any, **kwargs: Any) -> Any:
        mixed, weights = original(*args, **kwargs)
        return 1.5 * mixed, weights

    def replace() -> None:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = louder

    yield replace
    ALL_ATTENTION_FUNCTIONS["sdpa"] = original


@pytest.mark.parametrize("more", [GREEDY, BEAMS])
@pytest.mark.parametrize("family", ["llama", "gpt2", "marian"])
@pytest.mark.parametrize("warm", [False, True])
def test_an_attention_function_of_its_own(
    family: str, more: dict[str, Any], warm: bool, sdpa: Any
) -> None:
    model = zoo.build(family)
    assert model.config._attn_implementation == "sdpa"
    before = _check(model, more) if warm else None
    sdpa()
    found = _check(model, more)
    assert before is None or found.shape != before.shape or bool((found != before).any())


@pytest.mark.parametrize("more", [GREEDY, BEAMS])
def test_an_eager_attention_function_of_its_own_for_a_while(
    more: dict[str, Any], monkeypatch: Any
) -> None:
    model = zoo.build("llama")
    model.set_attn_implementation("eager")
    given = zoo.batch(model, 3, 7, "none") | more  # left padding makes its logits NaN
    assert_same(model, given)
    original: Any = modeling_llama.eager_attention_forward
    before = left_off()
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "eager_attention_forward", lambda *args, **kwargs: (
            1.5 * (found := original(*args, **kwargs))[0], found[1]))  # fmt: skip
        assert_same(model, given)
    assert any("an attention function 'eager' of its own" in new for new in left_off() - before)
    before = left_off()
    assert_same(model, given)
    assert not [new for new in left_off() - before if "attention" in new or "modules" in new]


def test_an_attention_function_of_its_own_in_an_encoder(sdpa: Any) -> None:
    torch.manual_seed(0)
    shape = {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 256,
    }
    model = BertForSequenceClassification(
        BertConfig(vocab_size=99, initializer_range=0.2, **shape)
    ).eval()
    ids = torch.randint(5, 99, (16, 200))
    mask = torch.ones_like(ids)
    mask[1:, 20:] = 0

    def run() -> Tensor:
        with torch.no_grad():
            return model(input_ids=ids, attention_mask=mask).logits

    before = run()
    sdpa()
    found, reasons = run(), fallbacks()
    with fastgen.disabled():
        torch.testing.assert_close(found, run())
    assert not torch.allclose(found, before)
    assert "an attention function 'sdpa' of its own" in reasons


def _noisy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the choice of candidates with noise."""

    def chosen(self: Any, accumulated_log_probs: Tensor, *args: Any, **kwargs: Any) -> Any:
        noise = torch.rand(accumulated_log_probs.shape, generator=torch.Generator().manual_seed(0))
        return original(self, accumulated_log_probs + 5 * noise, *args, **kwargs)

    return chosen


def _over(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the check of a loop so that it ends at once."""
    return lambda self, *args, **kwargs: False


def _turned(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a forward so that it reverses the logits."""

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original(self, *args, **kwargs)
        outputs.logits = outputs.logits.flip(-1)
        return outputs

    return called


@pytest.mark.parametrize(
    ("name", "make", "more"),
    [
        ("_get_top_k_continuations", _noisy, BEAMS), ("_has_unfinished_sequences", _over, GREEDY),
        ("_beam_search_has_unfinished_sequences", _over, BEAMS), ("__call__", _turned, GREEDY),
        ("__call__", _turned, BEAMS),
    ],
)  # fmt: skip
@pytest.mark.parametrize("family", ["llama", "bart"])
def test_a_method_of_a_users_class(family: str, name: str, make: Any, more: dict[str, Any]) -> None:
    model = zoo.build(family)
    plain = _check(model, more)
    kind = type(model)
    own: Any = type(f"Own{kind.__name__}", (kind,), {name: make(getattr(kind, name))})
    model.__class__ = own
    before = left_off() + fallbacks()
    found = _check(model, more)
    assert found.shape != plain.shape or bool((found != plain).any())
    reason = f"{own.__name__} has its own {name}"
    assert any(reason in new for new in left_off() + fallbacks() - before)


@pytest.mark.parametrize("asked", ["greedy", "beams"])
def test_a_forward_of_a_user_under_a_decorator_of_transformers(asked: str) -> None:
    """The decorator is transformers' own; the wrapped `forward`, which changes the text, is not."""

    class Attention(modeling_llama.LlamaAttention):
        @can_return_tuple
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            mixed, weights = super().forward(*args, **kwargs)
            return 2 * mixed, weights

    model = zoo.build("llama")
    _check(model, ASKED[asked])
    for layer in model.model.layers:
        layer.self_attn.__class__ = Attention
    before = left_off()
    _check(model, ASKED[asked])
    assert any("a replaced forward of a Attention" in reason for reason in left_off() - before)
