"""Routing of a live model's linear layers, norms and activation functions for one call."""

import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from torch import nn

from fastgen.context import at_end, not_at_end
from fastgen.models.build.patched_torch import replaced
from fastgen.models.layers import activation, experts, head_bias, linear, norm
from fastgen.models.layers import packed_weights as packed
from fastgen.models.memory.scratch import scratch_pool_of
from fastgen.models.routing import instance
from fastgen.models.routing.instance import install, own_forwards, reason_compiled, restore
from fastgen.models.specs.model_spec import ModelSpec
from fastgen.models.state import CachedState, cached_state_of, state_of

_lock = threading.RLock()


@dataclass(eq=False)
class Route(CachedState):
    """State of a routed model, kept while it is routed.

    Each user refreshes `modules`, `touched` and `compiled`, as the model may have changed.

    Attributes:
        modules: All modules of the model.
        touched: Result of `models.routing.instance.touched_among`.
        before: The instance forward, or None, of each routed module.
        layers: The routed linear layers.
        users: The active `routed` blocks.
        compiled: Fallback reason of a compiled model, which is not routed; None otherwise.
    """

    modules: list[nn.Module] = field(default_factory=list)
    touched: list[nn.Module] = field(default_factory=list)
    before: dict[nn.Module, Any] = field(default_factory=dict)
    layers: list[nn.Module] = field(default_factory=list)
    users: "WeakSet[routed]" = field(default_factory=WeakSet)
    compiled: str | None = None


class routed:
    """Context manager that routes a model's modules to `ops`; yields the number of routed modules.

    Nested and concurrent blocks of one model share the routes, which the last block removes. After
    an interrupt within `__exit__`, routes are removed when the `isolated` call ends, or when the
    model is routed again.

    Args:
        model: The model.
        spec: Names the layers whose output has a single reader, which may overwrite it.
    """

    def __init__(self, model: nn.Module, spec: ModelSpec | None = None) -> None:
        self._model, self._spec = model, spec

    def __enter__(self) -> int:
        at_end(self.restore)
        try:
            return self._install()
        except BaseException:
            self.restore()
            raise

    def __exit__(self, *_: object) -> None:
        self.restore()
        not_at_end(self.restore)

    def _install(self) -> int:
        with _lock:
            route = state_of(self._model).of(Route)
            is_first = not route.users
            route.users.add(self)
            if is_first:
                restore(route.before)  # left by an interrupt
            modules = route.modules = instance.modules_of(self._model)
            route.touched = instance.touched_among(modules)
            route.compiled = reason_compiled(self._model, modules, route.touched)
            if is_first:
                off = route.compiled or replaced()
                forwards = {} if off else _forwards(self._model, modules, self._spec)
                route.layers = [
                    module
                    for module, forward in forwards.items()
                    if isinstance(forward, linear.Linear)
                ]
                # Record them before the first forward is installed.
                route.before = own_forwards(forwards)
                install(forwards)
            return len(route.before)

    def restore(self) -> None:
        """Remove the routes if this block is their last user; safe to repeat after an interrupt."""
        with _lock:
            route = cached_state_of(self._model, Route)
            if route is None:
                return
            if all(user is self for user in route.users):
                restore(route.before)
                route.before = {}
                state_of(self._model).drop(Route)
            route.users.discard(self)


def all_routed(models: Iterable[nn.Module]) -> ExitStack:
    """Route several models at once."""
    stack = ExitStack()
    for model in models:
        stack.enter_context(routed(model))
    return stack


def withdraw(model: nn.Module) -> None:
    """Remove a model's routes for the rest of its running calls, as one of them compiles it."""
    with _lock:
        route = cached_state_of(model, Route)
        if route is not None:
            restore(route.before)
            route.before, route.layers = {}, []


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return a model's modules, from its route if there is one."""
    route = cached_state_of(model, Route)
    return instance.modules_of(model) if route is None else route.modules


def touched_of(model: nn.Module) -> list[nn.Module]:
    """Return `models.routing.instance.touched_among`, from the model's route if there is one."""
    route = cached_state_of(model, Route)
    return instance.touched_among(instance.modules_of(model)) if route is None else route.touched


def why_compiled(model: nn.Module) -> str | None:
    """Return `models.routing.instance.reason_compiled`, from the model's route if there is one."""
    route = cached_state_of(model, Route)
    return reason_compiled(model) if route is None else route.compiled


def _forwards(
    model: nn.Module, modules: list[nn.Module], spec: ModelSpec | None
) -> dict[nn.Module, Callable[..., Any]]:
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    if norm.applies(model):
        forwards.update({forward.module: forward for forward in norm.norms(modules)})
    if linear.reason_off(model) is not None:
        packed.forget(model)
        for module in modules:
            experts.forget(module)
        return forwards
    memory = scratch_pool_of(model)
    for module in modules:
        for weight in experts.weights_of(module):
            packed.check(weight)
    for layer, transposed in linear.layers(modules):
        packed.check(layer)
        forwards[layer] = linear.Linear(layer, transposed, memory)
    if spec is None or not any(isinstance(forward, linear.Linear) for forward in forwards.values()):
        return forwards
    for layer, function, kind in activation.pairs(modules, spec.activated):
        before = forwards.get(layer)
        if isinstance(before, linear.Linear):
            before.handed_on = activation.hand_over
            forwards[function] = activation.Activation(function, kind)
    head = head_bias.head_and_handing_on(model, spec.head)
    if head is not None and isinstance(before := forwards.get(head[0]), linear.Linear):
        before.handed_on = head[1]
    return forwards


@dataclass(frozen=True)
class Survey:
    """What `routed` would do to a model.

    Attributes:
        layers: Number of linear layers it would route.
        packed_bytes: Maximum size of the packed copies in bytes.
        missing_bytes: Size of the copies that do not exist yet, in bytes.
    """

    layers: int
    packed_bytes: int
    missing_bytes: int


def survey(model: nn.Module) -> Survey:
    """Describe what `routed` would do to a model, without doing it."""
    with _lock:
        route = cached_state_of(model, Route)
        layers: list[Any] = [module for module, _ in linear.layers(model.modules())]
        layers += [] if route is None else route.layers
    # Tied weights share one copy.
    by_weight = {id(module.weight): module for module in layers}.values()
    sizes = [(linear.bytes_to_pack(module), packed.has_copy(module)) for module in by_weight]
    missing = sum(size for size, there in sizes if not there)
    return Survey(len(layers), sum(size for size, _ in sizes), missing)
