"""Latent attention in C: against the reference in fp64, and whole calls against transformers."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastgen.decoding.kv_cache.layer_kv import LayerKV
from fastgen.models.layers import packed_weights
from fastgen.models.layers.head_products import HeadProducts, HeadValues
from fastgen.models.layers.linear import Linear
from fastgen.models.layers.norm import Norm
from fastgen.models.memory.scratch import ScratchPool
from fastgen.models.runtime.native.step import native_step
from fastgen.models.runtime.step_inputs import CallStepInputs
from fastgen.models.runtime.sublayers import LatentAttention, Sublayer
from fastgen.ops import native
from fastgen.ops.counts import calls
from fastgen.ops.latent_attention import latent_attention_reference
from fastgen.patches.transformers.generate.report import last_call
from tests.models.test_in_c import assert_changes_count, widen
from tests.ops.test_native import own_variant, variant  # noqa: F401  fixtures
from tests.patches.transformers.planning.test_common_prompt import COMMON, prompts
from tests.support import zoo
from tests.support.parity import assert_same

FLOOR = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SHAPES = [
    # B, M, H, C, E, tokens before
    (1, 1, 1, 64, 16, 0),
    (3, 1, 4, 64, 32, 37),
    (2, 3, 5, 192, 48, 130),
    (2, 4, 64, 64, 16, 33),  # more rows per sentence than C has at once
    (9, 2, 2, 320, 112, 21),
]


@pytest.fixture(autouse=True)
def _packed_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(packed_weights.Packed, "uses_to_pack", 1)
    monkeypatch.setattr(native, "most_rows", lambda _: math.inf)  # whatever this processor has
    yield
    packed_weights.release()


def _drawn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(dtype)


def _angles(x: Tensor, positions: Tensor, dims: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine; those of different positions are not alike."""
    angle = (positions[..., None] + 1) * (torch.arange(dims) % (dims // 2) + 1) * 0.37
    return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


class _Case:
    """A sublayer of latent attention with random weights, and a step of random inputs.

    Attributes:
        x: (B * M, width) input.
        stream: (B * M, width) residual stream.
        keys: (B, 1, S, C) latent vectors of the tokens before.
        rope_keys: (B, 1, S, E).
        mask: (B, 1, M, S + M), -inf for other beams' newest tokens and some others.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, form: int) -> None:
        self.b, self.m, self.h, self.c, self.e, self.s = shape
        self.dtype, self.nope, self.d, width = dtype, 10, 64, 48
        self.apart, self.interleaved = form == 1, form == 2
        shapes = {
            "compress": (self.c + self.e, width), "out": (width, self.h * self.d),
            "expand": (self.h * (self.nope + self.d), self.c),
            "down": (24, width), "up": (self.h * (self.nope + self.e), 24 if form else width),
        }  # fmt: skip
        if not form:
            del shapes["down"]
        self.weights = {
            name: _drawn(*size, seed=i, dtype=torch.float64).div(size[1] ** 0.5).to(dtype)
            for i, (name, size) in enumerate(shapes.items())
        }
        self.norms = {
            size: _drawn(size, seed=size, dtype=torch.float64).mul(0.1).add(1).to(dtype)
            for size in (self.c, 24)
        }
        rows = self.b * self.m
        self.x, self.stream = (_drawn(rows, width, seed=seed, dtype=dtype) for seed in (21, 22))
        self.keys = _drawn(self.b, 1, self.s, self.c, seed=23, dtype=dtype)
        self.rope_keys = _drawn(self.b, 1, self.s, self.e, seed=24, dtype=dtype)
        hidden = _drawn(self.b, 1, self.m, self.s + self.m, seed=25, dtype=torch.float64) > 0.8
        own = torch.arange(self.m)
        hidden[..., self.s :] = own[:, None] != own
        self.mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)

    def sublayer(self) -> Sublayer:
        memory, layers = ScratchPool(), dict[str, Any]()
        for name, weight in self.weights.items():
            layers[name] = nn.Linear(*weight.shape[::-1], bias=False, dtype=self.dtype)
            layers[name].weight = nn.Parameter(weight, requires_grad=False)
        self.layers = layers  # products refer to them weakly
        routed = {name: Linear(layer, False, memory) for name, layer in layers.items()}
        norm = lambda size: Norm(self.norms[size], None, 1e-6, rms=True)  # noqa: E731
        of_heads = layers["expand"], self.h, self.nope
        return Sublayer(
            0,
            LatentAttention(
                tuple(routed[name] for name in ("down", "up") if name in routed), self.h,
                self.nope + self.e, 0.2, norm(24) if "down" in routed else None, norm(self.c),
                rotary=lambda x, at: _angles(x, at, self.e), interleaved=self.interleaved,
                compress=routed["compress"], rope_dim=self.e, pairs_apart=self.apart,
                expand=self.weights["expand"].view(self.h, -1, self.c),
                of_heads=(HeadProducts(*of_heads), HeadValues(*of_heads)),
            ),
            routed["out"],
        )  # fmt: skip

    def inputs(self, common: int = 0) -> CallStepInputs:
        layer = LayerKV(4, ScratchPool(), self.m, self.s)
        if common:
            layer.share(self.keys[:1, :, :common], self.rope_keys[:1, :, :common])
        layer.extend(self.keys[:, :, common:], self.rope_keys[:, :, common:])
        layer.beams = self.m
        return CallStepInputs(
            self.b, self.s + 1, self.s, self.s, text=[layer], source=[], text_mask=self.mask
        )

    def exact(self) -> Tensor:
        """Return the residual sum in fp64, by the reference."""
        w = {name: weight.double() for name, weight in self.weights.items()}
        rms = lambda x: (  # noqa: E731
            x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * self.norms[x.shape[-1]].double()
        )
        x = self.x.double()
        query = (rms(x @ w["down"].T) if "down" in w else x) @ w["up"].T
        query = query.view(len(x), self.h, -1)
        latent, key = (x @ w["compress"].T).split([self.c, self.e], 1)
        cosine, sine = _angles(self.x, torch.full((1, 1), self.s), self.e)

        def turned(x: Tensor) -> Tensor:
            """Rotate complex numbers, one for each pair of channels."""
            first, second = (
                (x[..., ::2], x[..., 1::2]) if self.apart or self.interleaved else x.chunk(2, -1)
            )
            at = slice(None, None, 2) if self.interleaved else slice(0, self.e // 2)
            angle = torch.complex(cosine.double(), sine.double())[..., at].flatten()
            found = torch.view_as_real(torch.complex(first, second) * angle)
            return found.flatten(-2) if self.interleaved else torch.cat(found.unbind(-1), -1)

        to_keys, to_values = w["expand"].view(self.h, -1, self.c).split([self.nope, self.d], 1)
        asked = torch.einsum("rhn,hnc->rhc", query[..., : self.nope], to_keys)
        query = torch.cat([asked, turned(query[..., self.nope :])], 2)
        keys, rope_keys = (
            torch.cat([old.double(), new.view(self.b, 1, self.m, -1)], 2)
            for old, new in ((self.keys, rms(latent)), (self.rope_keys, turned(key)))
        )
        mixed = latent_attention_reference(
            query.view(self.b, self.m, self.h, -1), keys, rope_keys, self.mask.double(), 0.2
        ).view(len(x), self.h, -1)
        made = torch.einsum("rhc,hdc->rhd", mixed, to_values).flatten(1)
        return self.stream.double() + made @ w["out"].T


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", FLOOR)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference(
    variant: str,  # noqa: F811
    shape: tuple[int, ...],
    dtype: torch.dtype,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C is at most twice as far from fp64 as single operations, and writes the same keys."""
    monkeypatch.setattr(native, "threads_for", lambda _: threads)
    for form in range(3):
        case = _Case(shape, dtype, form)
        sublayer, context = case.sublayer(), case.inputs()
        run, exact = native_step([sublayer], True), case.exact()
        assert run is not None
        with torch.inference_mode():
            plainly = case.inputs()
            allowed = (sublayer(case.x, case.stream, plainly)[1].double() - exact).abs().max()
            found = run(case.x.clone(), case.stream.clone(), context)
        assert found is not None
        assert calls["decoder_step", "native"] == form + 1
        assert (found.double() - exact).abs().max() <= 2 * allowed + FLOOR[dtype]
        for mine, other in zip(context.text[0].own, plainly.text[0].own, strict=True):
            kept, wanted = (each[:, :, : case.s + case.m].float() for each in (mine, other))
            torch.testing.assert_close(kept, wanted, atol=FLOOR[dtype], rtol=1e-2)


@pytest.mark.parametrize("dtype", FLOOR)
def test_common_latents(variant: str, dtype: torch.dtype) -> None:  # noqa: F811
    """Latent vectors that all sentences begin with are read from one copy."""
    case = _Case((3, 2, 5, 192, 48, 130), dtype, 1)
    case.keys[:], case.rope_keys[:] = case.keys[:1].clone(), case.rope_keys[:1].clone()
    run = native_step([case.sublayer()], True)
    assert run is not None
    with torch.inference_mode():
        outputs = [
            run(case.x.clone(), case.stream.clone(), case.inputs(common)) for common in (0, 100)
        ]
    assert all(output is not None for output in outputs)
    assert torch.equal(*outputs)


FAMILIES = ["axk1", "deepseek_v2", "deepseek_v3", "deepseek_v3-plain", "minicpm3"]
CALLS: dict[str, dict[str, Any]] = {
    "outgrowing": {"max_new_tokens": 90, "min_new_tokens": 90},
    "outgrowing beams": {"max_new_tokens": 70, "min_new_tokens": 70, "num_beams": 3},
    "chunks": {"prefill_chunk_size": 3, "max_new_tokens": 12},
    "chunks of beams": {"prefill_chunk_size": 3, "max_new_tokens": 12, "num_beams": 4},
    "many beams": {"num_beams": 40, "max_new_tokens": 5},
    "finishing": {"eos_token_id": [2, *range(10, 30)], "max_new_tokens": 24, "num_beams": 3},
    "drafts": {"prompt_lookup_num_tokens": 3, "max_new_tokens": 20},
}


@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize("family", FAMILIES)
def test_calls(
    own_variant: str,  # noqa: F811
    family: str,
    case: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    widen(monkeypatch)
    model = zoo.build(family, torch.float32)
    sentences = 1 if case == "drafts" else 3
    for padding in ("none", "natural"):
        kwargs = zoo.batch(model, sentences, 11, padding) | CALLS[case]
        for _ in range(2):
            assert assert_same(model, kwargs, tolerance=1e-3).error is None
            call = last_call()
            assert call is not None
            assert call.plan.fused
            assert not call.plan.not_in_c
    assert calls["decoder_step", "native"] + calls["search", "native"] > 0


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("method", [{}, {"num_beams": 3}])
def test_a_common_prompt(
    own_variant: str,  # noqa: F811
    method: dict[str, Any],
    padded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    widen(monkeypatch)
    monkeypatch.setattr("fastgen.decoding.kv_cache.common_prefix.SAVED", 0)
    model = zoo.build("deepseek_v3", torch.float32)
    for _ in range(2):
        assert_same(model, prompts(padded) | method | {"max_new_tokens": 9}, tolerance=1e-3)
        call = last_call()
        assert call is not None
        assert call.plan.common == COMMON
    assert calls["search", "native"] > 0


def test_weights_may_change_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both copies of the weights of keys and values are made again."""
    widen(monkeypatch)
    model = zoo.build("deepseek_v3", torch.float32)
    kwargs = zoo.batch(model, 3, 9) | {"max_new_tokens": 12, "min_new_tokens": 12}
    expand = model.model.layers[1].self_attn.kv_b_proj
    dims = model.config.qk_nope_head_dim + model.config.v_head_dim
    keys = expand.weight.data.view(-1, dims, expand.in_features)[:, : model.config.qk_nope_head_dim]
    changes = (
        lambda: keys.mul_(-3.0),
        lambda: expand.weight.neg_(),
        lambda: setattr(expand, "weight", nn.Parameter(expand.weight.flip(0))),
    )
    assert_changes_count(model, kwargs, changes)


def test_shapes_that_c_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads whose values fill no panel, and rotated parts that fill no vectors, run in torch."""
    model = zoo.build("deepseek_v3", torch.float32)  # of 10 and 4 dimensions
    assert assert_same(model, zoo.batch(model, 3, 9) | {"max_new_tokens": 12}).error is None
    call = last_call()
    assert call is not None
    assert call.plan.fused
    assert call.plan.not_in_c == "its layers are not written in C"
    widen(monkeypatch)
    by = native.library()
    assert by is not None
    model = zoo.build("deepseek_v3", torch.float32)
    config = type(model.config)(**model.config.to_dict() | {"v_head_dim": by.panel + 8})
    torch.manual_seed(0)
    model = type(model)(config).eval()
    assert assert_same(model, zoo.batch(model, 3, 9) | {"max_new_tokens": 12}).error is None
    call = last_call()
    assert call is not None
    assert call.plan.fused
    assert call.plan.not_in_c == "the shape or dtype of a weight is not read by C"
