"""Mixtures of experts as C records (`ops.native.step.Mixture`)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastgen.models.layers.experts import Experts, Routing
from fastgen.models.layers.linear import Linear
from fastgen.models.layers.norm import Norm, NormLike
from fastgen.ops import native
from fastgen.ops.native import step as c

MOST_GROUPS = 64
"""Maximum number of groups of experts, as in experts.c."""


def is_supported(mix: Experts) -> bool:
    """Return whether C implements a mixture, as far as its parts tell without their shapes."""
    routing = mix.routing
    return (
        routing is not None
        and all(isinstance(part, Linear) for part in routing.shared)
        and (routing.norm is None or type(routing.norm) is Norm)
    )


def norm(mix: Experts) -> NormLike | None:
    """Return the norm of a mixture's output; None for none."""
    return _of(mix).norm


def products(mix: Experts) -> Sequence[Any]:
    """Return all products of a mixture: of the shared expert, its output last, and of all others.

    The last two are those of the experts that rows choose.
    """
    routing = _of(mix)
    return [*routing.shared, routing.up, routing.down]


def has_shapes(mix: Experts, width: int, panel: int) -> bool:
    """Return whether the shapes and layouts of a mixture match, and panels begin at its halves."""
    routing = _of(mix)
    up, down, shared = routing.up, routing.down, routing.shared
    count, inner = up.count, up.each // 2
    fits = (
        routing.router.shape == (count, width)
        and (down.count, down.each, down.inputs) == (count, width, inner)
        and (up.inputs, up.each) == (width, 2 * inner)
        and 0 < routing.chosen <= count
        and inner > 0
        and inner * (1 if routing.clamp is None else 2) % panel == width % panel == 0
        and up.dtype == down.dtype
        and (routing.router.dtype == up.dtype or (routing.precise and _is_wide(routing)))
        and (routing.correction is None or routing.correction.shape == (count,))
    )
    groups, kept, scores = routing.groups
    fits = fits and 0 < kept <= groups <= MOST_GROUPS and count % groups == 0
    fits = fits and (
        groups == 1 or (scores * groups <= count and routing.chosen <= kept * count // groups)
    )
    for bias, shape, like in (
        (routing.router_bias, (count,), routing.router),
        (routing.up_bias, (count, 2 * inner), up),
        (routing.down_bias, (count, width), up),
    ):
        fits = fits and (
            bias is None
            or (bias.shape == shape and bias.dtype == like.dtype and bias.is_contiguous())
        )
    if shared:
        gate, wide, out = shared
        sizes = {
            (gate.inputs, gate.outputs),
            (wide.inputs, wide.outputs),
            (out.outputs, out.inputs),
        }
        fits = fits and sizes == {(width, gate.outputs)}
    scale = routing.shared_gate
    return fits and (
        scale is None
        or (scale.shape == (1, width) and scale.dtype == up.dtype and scale.is_contiguous())
    )


def record(
    mix: Experts, weights: Sequence[c.Weight], at: Callable[[Tensor | None], int | None]
) -> tuple[c.Sublayer, c.Mixture]:
    """Return the record of a mixture's sublayer without its norm, and that of the mixture itself.

    Args:
        mix: The mixture.
        weights: Those of its `products`.
        at: Returns the address of a tensor.
    """
    routing = _of(mix)
    *shared, up, down = weights
    mixture = c.Mixture(
        router=at(routing.router),
        router_bias=at(routing.router_bias),
        correction=at(routing.correction),
        up=up.panels,
        down=down.panels,
        up_bias=at(routing.up_bias),
        down_bias=at(routing.down_bias),
        shared_gate=at(routing.shared_gate),
        count=routing.up.count,
        chosen=routing.chosen,
        inner=routing.up.each // 2,
        normalised=routing.normalised,
        rounded=routing.rounded,
        wide=_is_wide(routing),
        precise=routing.precise,
        sigmoid=routing.sigmoid,
        groups=routing.groups[0],
        kept=routing.groups[1],
        group_scores=routing.groups[2],
        factor=routing.factor,
    )
    if routing.margin is not None:
        mixture.thinned, mixture.margin = True, routing.margin
    if routing.clamp is not None:
        mixture.clamped, (mixture.alpha, mixture.limit) = True, routing.clamp
    sublayer = c.Sublayer(kind=c.EXPERTS, activation=native.ACTIVATIONS[routing.activation])
    if shared:
        sublayer.parts, sublayer.part, sublayer.out = 2, tuple(shared[:2]), shared[2]
    return sublayer, mixture


def scratch(mix: Experts, rows: int, width: int) -> int:
    """Return the elements of scratch memory that C needs for a mixture (`mixing_of`)."""
    routing = _of(mix)
    count, pairs, each = routing.up.count, rows * routing.chosen, routing.up.each
    wide = each if routing.clamp is None else each + each // 2
    # Logits and scores; weights, inputs and outputs, wide layers, experts and places of pairs; the
    # shared expert's output; where experts begin.
    of_pairs = pairs * (1 + width + wide + 2)
    return 2 * rows * count + of_pairs + rows * width + 2 * count + 2


def made(mix: Experts) -> tuple[int, int]:
    """Return the elements per row of the shared expert's wide layer, and of its gated output."""
    shared = _of(mix).shared
    return (shared[0].outputs, shared[1].outputs) if shared else (0, 0)


def work(product: Any, mix: Any) -> int:
    """Return the multiply-adds of a product, for one row."""
    size = product.outputs * product.inputs
    if isinstance(mix, Experts) and product in (_of(mix).up, _of(mix).down):
        return size * _of(mix).chosen // product.count
    return size


def _is_wide(routing: Routing) -> bool:
    return routing.router.dtype == torch.float32 != routing.up.dtype


def _of(mix: Experts) -> Routing:
    assert mix.routing is not None
    return mix.routing
