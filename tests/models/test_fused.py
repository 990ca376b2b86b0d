"""Fused decode steps: they equal those of the modules, which run whatever fastgen does not know."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn
from transformers.models.bart import modeling_bart
from transformers.models.llama import modeling_llama

from fastgen import config
from fastgen.models.build import equivalence_check
from fastgen.models.build.equivalence_check import OUTPUTS_DIFFER, by_modules
from fastgen.models.layers import linear
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.specs.registry import SPECS
from fastgen.patches.transformers.compat import CACHE
from fastgen.patches.transformers.generate.report import last_call
from fastgen.patches.transformers.planning.sharing import not_shared
from tests.support import zoo
from tests.support.parity import assert_same

FAMILIES = sorted(zoo.FAMILIES)
_SIX_LAYERS = zoo._ENCODER_DECODER | {"decoder_layers": 6}
FIELDS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
METHODS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 4, "eos_token_id": [2, 7, 9, 30], "no_repeat_ngram_size": 2},
    "samples": {"do_sample": True, "num_return_sequences": 3},
}


def _build(family: str, dtype: torch.dtype = torch.float64) -> Any:
    model = zoo.build(family, dtype)
    if getattr(model.config, "sliding_window", None):
        model.config.sliding_window = 64  # longer than the texts here
        # Some families store the window in the layers that use it.
        for layer in model.get_decoder().layers:
            if getattr(layer.self_attn, "sliding_window", None):
                layer.self_attn.sliding_window = 64
    return model


def _left_off(model: Any, kwargs: dict[str, Any]) -> tuple[str, ...]:
    """Return the reasons why a call does not use fused steps; its output has to be unchanged."""
    assert assert_same(model, kwargs).error is None
    model.generate(**kwargs)
    call = last_call()
    assert call is not None
    if call.plan.shared:
        assert call.plan.fused == (
            not any(text.startswith(by_modules("")) for text in call.plan.left_off)
        )
    return tuple(text for text in call.plan.left_off if text.startswith(by_modules("")))


@pytest.mark.parametrize("merged", [False, True], ids=["", "side by side"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_family(
    family: str, method: str, dtype: torch.dtype, merged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if merged:
        monkeypatch.setattr(linear, "MERGED", (2**20, 2**20))
    model = _build(family, dtype)
    # In fp64, transformers returns NaN for Gemma 2 on rows that see nothing.
    for padding in (
        ("none",) if (family, dtype) == ("gemma2", torch.float64) else ("none", "natural")
    ):
        kwargs = zoo.batch(model, 4, 9, padding) | METHODS[method] | {"max_new_tokens": 14}
        kwargs |= FIELDS if dtype == torch.float64 else {}
        for _ in range(2):  # the first step of the first call is computed both ways
            # Only eager attention supports softcapping, and transformers computes its softmax in
            # fp32.
            assert (
                assert_same(model, kwargs, tolerance=1e-5 if family == "gemma2" else 1e-6).error
                is None
            )
        decoder = model.get_submodule(SPECS[family].decoder.path)
        assert equivalence_check.verdicts_of(decoder).step[1]
        assert _fused()


def _fused() -> bool:
    call = last_call()
    assert call is not None
    return call.plan.fused


@pytest.mark.parametrize("family", ["bart", "phi3"])
def test_labels_are_kept_from_the_steps(family: str) -> None:
    """Labels, which `Seq2SeqTrainer` passes, do not reach the forward of a generating model."""
    model = _build(family)
    inputs = zoo.batch(model, 3, 7)
    assert (
        _left_off(
            model, inputs | {"labels": torch.full((3, 5), 6), "num_beams": 3, "max_new_tokens": 6}
        )
        == ()
    )


def test_a_decoder_prompt_with_padding() -> None:
    model = _build("bart")
    prompt = torch.randint(4, zoo.VOCABULARY, (4, 5))
    prompt[:, 0] = zoo.START
    mask = torch.ones_like(prompt)
    mask[1, :3] = mask[3, :1] = 0
    kwargs = zoo.batch(model, 4, 9) | {
        "decoder_input_ids": prompt,
        "decoder_attention_mask": mask,
        "num_beams": 3,
    }
    for _ in range(2):
        assert _left_off(model, kwargs | {"max_new_tokens": 9}) == ()


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGEN_STEP", "module")
    config.reload()
    model = _build("bart")
    assert _left_off(model, zoo.batch(model, 3, 7) | {"num_beams": 3}) == (
        by_modules("FASTGEN_STEP=module"),
    )
    monkeypatch.undo()
    config.reload()


def test_weights_may_change_between_calls() -> None:
    """The next call sees weights that were modified, replaced or converted to another dtype."""
    model = _build("bart", torch.float32)
    kwargs = zoo.batch(model, 4, 9) | {"num_beams": 4, "max_new_tokens": 12, "min_new_tokens": 12}
    layer: Any = model.model.decoder.layers[1]
    changes: list[Callable[[], object]] = [
        lambda: layer.self_attn.v_proj.weight.data.neg_(),
        lambda: layer.fc1.weight.data.mul_(3.0),
        lambda: setattr(layer, "fc2", nn.Linear(24, 16).eval()),
        lambda: nn.init.normal_(layer.encoder_attn_layer_norm.weight),
        lambda: model.lm_head.weight.data.mul_(-1.0),
        lambda: model.final_logits_bias.normal_(),
        lambda: model.double(),
        lambda: model.float(),
    ]
    for change in changes:
        before = model.generate(**kwargs, **FIELDS)
        with torch.no_grad():
            change()
        assert assert_same(model, kwargs | FIELDS, tolerance=2e-4).error is None
        after = model.generate(**kwargs, **FIELDS)
        assert _fused()
        assert not torch.equal(before.logits[1], after.logits[1]), "the change has no effect"


class _Passing(nn.Module):
    """A module that passes its arguments on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def _with(change: Callable[[Any, Any], object]) -> Callable[[], Any]:
    def build() -> Any:
        model = _build("bart")
        with torch.no_grad():
            change(model, model.model.decoder.layers[0])
        return model.eval() if change is not _train else model

    return build


def _train(model: Any, layer: Any) -> None:
    layer.self_attn.train()  # contains nothing random


class _Phi3OfItsOwn(tf.Phi3ForCausalLM):
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return super().prepare_inputs_for_generation(*args, **kwargs)


def _phi3_of_its_own() -> Any:
    model = _build("phi3")
    model.__class__ = _Phi3OfItsOwn
    return model


DECLINED: dict[str, tuple[Callable[[], Any], str]] = {
    "adapter": (
        _with(
            lambda m, layer: setattr(
                layer.self_attn, "q_proj", nn.Sequential(layer.self_attn.q_proj)
            )
        ),
        "a torch.Sequential in place of a linear layer",
    ),
    "inputs of a subclass": (
        _phi3_of_its_own,
        "_Phi3OfItsOwn has its own prepare_inputs_for_generation",
    ),
    "training": (_with(_train), "a BartAttention is in training mode"),
    "part": (
        _with(lambda m, layer: layer.add_module("extra", nn.Linear(2, 2).double())),
        "a part of its own, layers.0.extra.weight",
    ),
    "norm": (
        _with(lambda m, layer: setattr(layer, "final_layer_norm", nn.RMSNorm(16).double())),
        "a torch.RMSNorm in place of a norm",
    ),
    "activation": (
        _with(lambda m, layer: setattr(layer, "activation_fn", nn.Tanh())),
        "an activation function torch.Tanh",
    ),
    "wrapped attention": (
        _with(lambda m, layer: setattr(layer, "self_attn", _Passing(layer.self_attn))),
        "its decoder cannot be read: '_Passing' object has no attribute 'head_dim'",
    ),
    "inputs": (
        _with(
            lambda m, layer: setattr(
                m, "prepare_inputs_for_generation", m.prepare_inputs_for_generation
            )
        ),
        "BartForConditionalGeneration has its own prepare_inputs_for_generation",
    ),
}


@pytest.mark.parametrize("what", DECLINED)
def test_declined(what: str) -> None:
    """The modules compute the steps, the output is unchanged, and the reason is reported."""
    build, reason = DECLINED[what]
    model = build()
    assert _left_off(model, zoo.batch(model, 3, 7) | {"num_beams": 3, "max_new_tokens": 8}) == (
        by_modules(reason),
    )


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, METHODS["samples"]], ids=["beams", "samples"]
)
@pytest.mark.parametrize("length", [5, 11])
@pytest.mark.parametrize("given", [False, True], ids=["", "given cache"])
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text"])
def test_a_text_that_outgrows_its_window(
    family: str, given: bool, length: int, options: dict[str, Any]
) -> None:
    """The window of 8 tokens is a bias; a given cache does not tell of it, but the config does."""
    model = zoo.build(family)
    kwargs = zoo.batch(model, 4, length, "none" if family == "gemma2" else "natural")
    kwargs |= options | FIELDS | {"max_new_tokens": 20, "min_new_tokens": 20}
    for _ in range(2):
        more = {CACHE: tf.DynamicCache()} if given else {}
        tolerance = 1e-5 if family == "gemma2" else 1e-6
        assert assert_same(model, kwargs | more, tolerance=tolerance).error is None
        assert _fused()


@pytest.mark.parametrize(
    "what", ["a hook on a Linear", "a hook on a BartModel", "a replaced forward of a Linear"]
)
def test_what_is_put_on_modules(what: str) -> None:
    """Hooks and replaced forwards receive what transformers passes, in its own cache."""
    model = _with(lambda *_: None)()
    part = model.model if "BartModel" in what else model.model.decoder.layers[0].fc1
    if "forward" in what:
        own = part.forward
        part.forward = lambda x: own(x) + 1.0
    else:
        part.register_forward_hook(
            lambda module, args, y: y * 2.0 if isinstance(y, torch.Tensor) else y
        )
    assert _left_off(model, zoo.batch(model, 3, 7) | {"num_beams": 3, "max_new_tokens": 8}) == ()
    call = last_call()
    assert call is not None
    assert not call.plan.shared
    assert not_shared(f"{what} may look at rows, or at the cache") in call.plan.left_off


def test_layers_one_after_the_other() -> None:
    """GPT-NeoX has both forms, and its config selects one."""
    config = _build("gpt_neox").config
    config.use_parallel_residual = False
    model: Any = tf.GPTNeoXForCausalLM(config).eval().double()
    kwargs = zoo.batch(model, 3, 7) | {"num_beams": 3, "max_new_tokens": 8} | FIELDS
    for _ in range(2):
        assert _left_off(model, kwargs) == ()


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_soft_caps(family: str) -> None:
    """Softcapping of logits, and of attention scores where a family has it.

    The caps are small here, so that they change the output.
    """
    model = _build(family)
    kwargs = zoo.batch(model, 3, 7, "none") | {"num_beams": 3, "max_new_tokens": 8} | FIELDS
    for name, cap in (("attn_logit_softcapping", 0.5), ("final_logit_softcapping", 8.0)):
        before = model.generate(**kwargs)
        setattr(model.config, name, cap)
        for layer in model.model.layers:
            layer.self_attn.attn_logit_softcapping = model.config.attn_logit_softcapping
        assert assert_same(model, kwargs, tolerance=1e-5).error is None
        assert _fused()
        changed = not torch.equal(before.logits[1], model.generate(**kwargs).logits[1])
        assert changed == (family == "gemma2" or name == "final_logit_softcapping")


def test_layers_that_are_not_alike() -> None:
    """Properties that a spec requires of all layers are checked in each of them."""
    model = _build("gpt_neox")
    kwargs = zoo.batch(model, 3, 7) | {"max_new_tokens": 8} | FIELDS
    for _ in range(2):
        assert _left_off(model, kwargs) == ()
    model.gpt_neox.layers[1].use_parallel_residual = False
    reason = by_modules("use_parallel_residual of its layers is [True, False]")
    assert _left_off(model, kwargs) == (reason,)


def test_an_activation_function_that_changes() -> None:
    """A module that was identified once is checked again in later calls."""
    model = _build("gpt2")
    kwargs = zoo.batch(model, 3, 7) | {"max_new_tokens": 8} | FIELDS
    for block in model.transformer.h:
        block.mlp.act = tf.activations.GELUActivation().eval()
    for _ in range(2):
        assert _left_off(model, kwargs) == ()
    for block in model.transformer.h:
        block.mlp.act.act = nn.functional.silu
    assert _left_off(model, kwargs) == ()
    for block in model.transformer.h:
        block.mlp.act.act = nn.functional.softplus
    assert _left_off(model, kwargs) == (
        by_modules("an activation function transformers.GELUActivation"),
    )


def test_a_norm_whose_class_is_given_another_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _build("llama", torch.float32)
    kwargs = zoo.batch(model, 3, 7) | {"max_new_tokens": 8} | FIELDS
    assert assert_same(model, kwargs, tolerance=1e-4).error is None
    kind = type(model.model.norm)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: 1.5 * forward(self, x))
    assert assert_same(model, kwargs, tolerance=1e-4).error is None
    assert not _fused()


def test_functions_of_a_module_that_somebody_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _build("llama")
    kwargs = zoo.batch(model, 3, 7) | {"max_new_tokens": 8} | FIELDS
    assert _left_off(model, kwargs) == ()
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, *_, **__: (q, k))
    assert _left_off(model, kwargs) == (by_modules("a function apply_rotary_pos_emb of its own"),)


def test_positions_that_change_with_the_length() -> None:
    config = _build("llama").config
    config.max_position_embeddings = 16
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    model = tf.LlamaForCausalLM(config).eval().double()
    reason = by_modules(
        "rotary positions of type 'dynamic', which change with the length of the text"
    )
    assert _left_off(model, zoo.batch(model, 3, 9) | {"num_beams": 3, "max_new_tokens": 14}) == (
        reason,
    )


def test_memory_that_runs_out_in_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running out of memory does not count as a mismatch: halves of the batch are checked."""
    model = _build("bart")
    kwargs = zoo.batch(model, 4, 9) | {"num_beams": 3, "max_new_tokens": 9}
    call, failures = DecoderStep.__call__, [torch.OutOfMemoryError("CUDA out of memory")]

    def failing(self: Any, *args: Any) -> Any:
        if failures:
            raise failures.pop()
        return call(self, *args)

    monkeypatch.setattr(DecoderStep, "__call__", failing)
    assert _left_off(model, kwargs) == ()


@pytest.fixture
def another_forward() -> Iterator[None]:
    """Replace the forward of a transformers class, under its own name."""
    kind: Any = modeling_bart.BartDecoderLayer
    original = kind.forward

    @functools.wraps(original)
    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(self, x, *args, **kwargs) * 1.5

    kind.forward = forward
    yield
    kind.forward = original


def test_a_class_with_another_forward(another_forward: None) -> None:
    model = _build("bart")
    kwargs = zoo.batch(model, 3, 7) | {"num_beams": 3, "max_new_tokens": 8}
    assert _left_off(model, kwargs) == (by_modules("a replaced forward of a BartDecoderLayer"),)


@pytest.mark.parametrize("beams", [1, 3])
def test_a_model_that_computes_otherwise(beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts are the same, but the computation differs, which the first step already shows."""
    model = _build("bart")
    # As if positions started one row earlier.
    monkeypatch.setitem(SPECS, "bart", zoo.misplaced("bart", 1))
    kwargs = zoo.batch(model, 3, 7) | {"num_beams": beams, "max_new_tokens": 8}
    for _ in range(2):
        assert _left_off(model, kwargs) == (by_modules(OUTPUTS_DIFFER),)


def test_what_was_written_since_the_proof_asks_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Any] = []
    agree = equivalence_check.agree
    monkeypatch.setattr(
        equivalence_check, "agree", lambda *logits: compared.append(logits) or agree(*logits)
    )
    model = _build("bart")
    layer = model.model.decoder.layers[1]
    changes: list[Callable[[], object]] = [
        lambda: None,
        lambda: setattr(layer.self_attn, "scaling", 0.9),
        lambda: setattr(layer.final_layer_norm, "eps", 0.1),
        lambda: setattr(layer, "activation_fn", nn.ReLU().eval()),
        lambda: setattr(model.model.decoder.embed_tokens, "embed_scale", 2.0),
        lambda: setattr(model.config, "dropout", 0.7),
    ]
    for number, change in enumerate(changes, 1):
        change()
        for _ in range(2):
            assert (
                _left_off(model, zoo.batch(model, 3, 7) | {"num_beams": 3, "max_new_tokens": 8})
                == ()
            )
        # One comparison of the first token, and one of a decode step.
        assert sum(found.dim() == 2 for found, *_ in compared) == 2 * number
    # As another version might need.
    monkeypatch.setitem(SPECS, "bart", zoo.misplaced("bart", 1))
    assert _left_off(model, zoo.batch(model, 3, 7) | {"max_new_tokens": 8}) == (
        by_modules(OUTPUTS_DIFFER),
    )


def test_logits_that_are_not_finite() -> None:
    """Such a call does not decide about the next one."""
    model = _build("bart")
    kwargs = zoo.batch(model, 3, 7) | {"max_new_tokens": 8, "min_new_tokens": 8}
    with torch.no_grad():
        before = model.model.decoder.layers[0].fc2.weight.clone()
        model.model.decoder.layers[0].fc2.weight.fill_(torch.nan)
        model.generate(**kwargs)
        assert not _fused()
        model.model.decoder.layers[0].fc2.weight.copy_(before)
    assert _left_off(model, kwargs) == ()


def test_a_decoder_without_its_encoder() -> None:
    model: Any = (
        tf.BartForCausalLM(tf.BartConfig(**zoo._ENCODER_DECODER | {"is_encoder_decoder": False}))
        .eval()
        .double()
    )
    kwargs = {"input_ids": torch.randint(4, 90, (3, 6)), "num_beams": 3, "max_new_tokens": 8}
    assert assert_same(model, kwargs).error is None


def test_fewer_layers_than_there_are() -> None:
    """transformers runs the number of layers that the config gives."""
    model = _build("llama")
    kwargs = zoo.batch(model, 3, 7) | {"num_beams": 3, "max_new_tokens": 8}
    model.generate(**kwargs)
    model.config.num_hidden_layers = 1
    for _ in range(2):
        assert assert_same(model, kwargs).error is None


def test_another_attention_for_one_row_per_sentence() -> None:
    model = _build("llama")
    model.set_attn_implementation(zoo.OWN_ATTENTION)
    reason = by_modules(f"attention implementation {zoo.OWN_ATTENTION!r}")
    assert _left_off(model, zoo.batch(model, 3, 7) | {"max_new_tokens": 8}) == (reason,)


def test_positions_in_two_scales() -> None:
    """Phi-3 recomputes a text that outgrows its short position range."""
    config = zoo.build("phi3").config
    half = config.hidden_size // config.num_attention_heads // 2
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * half,
        "long_factor": [3.0] * half,
        "rope_theta": 10_000.0,
    }
    rope["original_max_position_embeddings"] = 16
    given = {k: v for k, v in zoo._DECODER.items() if k != "head_dim"} | {"rope_parameters": rope}
    try:
        model: Any = (
            tf.Phi3ForCausalLM(tf.Phi3Config(**given, original_max_position_embeddings=16))
            .eval()
            .double()
        )
    except (KeyError, TypeError, ValueError) as error:
        pytest.skip(f"no such positions in this version: {error}")
    for beams in (1, 3):
        kwargs = zoo.batch(model, 3, 7) | {
            "num_beams": beams,
            "max_new_tokens": 20,
            "min_new_tokens": 20,
        }
        assert_same(model, kwargs)


def test_hooks_of_transformers_own_stay_and_do_not_matter() -> None:
    """transformers leaves inactive hooks on layers once hidden states were requested."""
    model = _build("llama")
    kwargs = zoo.batch(model, 3, 7) | {"num_beams": 3, "max_new_tokens": 8}
    asked = kwargs | {"output_hidden_states": True, "return_dict_in_generate": True}
    assert _left_off(model, asked) == (by_modules("hidden states or attentions are returned"),)
    assert _left_off(model, kwargs) == ()


@pytest.mark.slow
def test_fewer_operators() -> None:
    """A fused step runs fewer operators than the modules do over the same cache."""
    from torch.profiler import ProfilerActivity, profile

    model: Any = tf.BartForConditionalGeneration(tf.BartConfig(**_SIX_LAYERS)).eval()
    inputs = zoo.batch(model, 8, 7)

    def operators(tokens: int) -> int:
        kwargs = inputs | {"num_beams": 3, "max_new_tokens": tokens, "min_new_tokens": tokens}
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            model.generate(**kwargs)
        return len(profiler.events() or [])

    def of_a_step() -> float:
        operators(4)
        return (operators(12) - operators(4)) / 8

    fused = of_a_step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTGEN_STEP", "module")
        config.reload()
        by_modules = of_a_step()
    config.reload()
    assert fused < 0.9 * by_modules


def test_a_tokenizer_given_for_stop_strings_is_no_argument_of_the_model() -> None:
    model = _build("llama")
    kwargs = zoo.batch(model, 1, 6) | {"max_new_tokens": 6, "tokenizer": object()}
    assert _left_off(model, kwargs) == ()
    assert _fused()
