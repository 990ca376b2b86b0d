"""Linear layers of a live model through `ops.linear`: which ones, and the packed copies of their weights.

Layers that are quantised, parametrised, hooked, or already overridden keep their own forward. `models.routes` puts the
forwards in place.
"""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fastgen import config
from fastgen.models.instance import Routed, untouched
from fastgen.models.memory import Memory
from fastgen.ops import linear as ops
from fastgen.ops.activation import FUNCTIONS, activation_

MERGED = (0, 4 * 2**20)
"""Bytes of a weight up to which those of layers that read the same are copied into one, on a CPU and on a device.

It saves launches. On a CPU it gains nothing (4 to 128 rows, 256 x 256 three times, 2 cores).
"""

LARGE = 16 * 2**20
"""Bytes of an output from which on it lies in memory that is used again (`models.memory`)."""

_lock = threading.RLock()
_packed: "WeakTensorKeyDictionary" = WeakTensorKeyDictionary()


@dataclass
class _Packed:
    """A packed copy of a weight and what tells whether the weight is still the one it was made from.

    probe: every stride-th element, compared at the start of each call to notice writes through `.data`, which no
        version shows.
    """

    address: int
    version: int
    stride: int
    probe: Tensor
    uses: int = 0
    copy: Tensor | None = None

    def is_stale(self, weight: Tensor) -> bool:
        return self.address != weight.data_ptr() or self.version != weight._version

    def probe_differs(self, weight: Tensor) -> bool:
        return not torch.equal(self.probe, _sample(weight, self.stride))


def _sample(weight: Tensor, stride: int) -> Tensor:
    return weight.detach().reshape(-1)[::stride]  # no copy but of weights that change within a call


def _stride(rows: int, columns: int) -> int:
    """The largest stride, about, that comes to every row and to every column of a contiguous matrix."""
    # No longer than a row, so that none is left out; K of them in succession are at K columns if K has no factor of it.
    return next((s for s in range(min(rows, columns) - 1, 1, -1) if math.gcd(s, columns) == 1), 1)


def _entry(weight: Tensor) -> _Packed:
    entry = _packed.get(weight)
    if entry is None or entry.is_stale(weight):
        stride = _stride(*weight.shape)
        entry = _Packed(weight.data_ptr(), weight._version, stride, _sample(weight, stride).clone())
        with _lock:
            _packed[weight] = entry
    return entry


class Product(Protocol):
    """A linear layer with what comes right behind it.

    fuses: whether it activates, or adds a residual, while it computes. outputs: N.
    """

    fuses: bool

    @property
    def outputs(self) -> int: ...

    def apply(self, x: Tensor, activation: str | None = None, residual: Tensor | None = None) -> Tensor:
        """Return the layer's output (R, N) for x (R, K), fresh; through `activation`, or with `residual` (R, N) added.

        activation: a kind that `ops.activation` knows.
        """
        ...


class Linear(Routed):
    """The forward of one linear layer while it is routed.

    transposed: the weight is (K, N), as GPT-2's Conv1D has it.
    handed_on: what the fresh output goes through where it is known that a single thing reads it, and may overwrite it.
    """

    fuses = True

    def __init__(self, module: nn.Module, transposed: bool, memory: Memory) -> None:
        super().__init__(module)
        self.memory = memory
        self.transposed = transposed
        self.handed_on: Callable[[Tensor], Tensor] | None = None
        self.mode = config.settings().linear
        self.entry: _Packed | None = None
        outputs, inputs = _sizes(self.module)
        self.outputs = outputs
        least, dear = (max(1, ops.least_rows(outputs, inputs, kind) * inputs) for kind in (None, ops.DEAR[0]))
        self.least = {kind: dear if kind in ops.DEAR else least for kind in (None, *FUNCTIONS)}
        self.own: Own | None = None

    def __call__(self, x: Tensor) -> Tensor:
        form = self._form(x, None)
        y = type(self.module).forward(self.module, x) if form is None else self._by_onednn(x, form)
        return y if self.handed_on is None or y.requires_grad else self.handed_on(y)

    def apply(self, x: Tensor, activation: str | None = None, residual: Tensor | None = None) -> Tensor:
        form = self._form(x, activation)
        if form is not None:
            return self._by_onednn(x, form, activation, residual)
        if self.own is None:
            self.own = Own(self.module)
        return self.own.apply(x, activation, residual)

    def _by_onednn(
        self, x: Tensor, form: Tensor, activation: str | None = None, residual: Tensor | None = None
    ) -> Tensor:
        bias = self.module.bias
        if 4 * (x.numel() // x.shape[-1]) * self.outputs < LARGE:
            return ops.linear(x, form, bias, activation, residual)
        y = self.memory.take(x, *x.shape[:-1], self.outputs)
        ops.linear_into(y, x, form, bias, activation)
        return y if residual is None else y.add_(residual)

    def _form(self, x: Tensor, activation: str | None) -> Tensor | None:
        """The weight as `ops.linear` takes it; None where the layer's own product is to run."""
        # Few rows of a small weight, first: in small calls this is most of the layers and a good part of their time.
        if x.numel() < self.least[activation]:
            return None
        weight = self.module.weight
        if x.dtype != torch.float32 or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return None
        if self.memory.planned:  # nothing is computed, and a copy would take memory
            return None if self.transposed and self.mode == "plain" else weight.t() if self.transposed else weight
        entry = self.entry
        if entry is None or entry.is_stale(weight):
            entry = self.entry = _entry(weight)
        entry.uses += 1
        if (
            entry.copy is None
            and self.mode != "plain"
            and entry.uses > 2  # a copy pays where it is used again and again: a proof alone uses a weight twice
            and (self.mode == "packed" or _affordable(weight))
        ):
            entry.copy = ops.pack(weight.t() if self.transposed else weight)
        if entry.copy is None and self.transposed:
            return None
        return weight if entry.copy is None else entry.copy


class Own:
    """A linear layer by torch's own product; of rows (R, K) without the module around it, for as long as a call lasts.

    The module costs about 2 us, where a product of one row takes 5 to 50. The result is the module's, bit by bit.
    """

    fuses = False

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self.outputs = _sizes(module)[0]
        weight, self.bias = self.module.weight, self.module.bias
        bare = type(weight) in (Tensor, nn.Parameter) and (type(module) is nn.Linear or is_transposed(module))
        self.weight: Tensor | None = (weight if is_transposed(module) else weight.t()) if bare else None

    def apply(self, x: Tensor, activation: str | None = None, residual: Tensor | None = None) -> Tensor:
        weight, bias = self.weight, self.bias
        if weight is None or x.dim() != 2:
            return _finished(type(self.module).forward(self.module, x), activation, residual)
        y = torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
        return _finished(y, activation, residual)


class SideBySide:
    """Linear layers that read the same, as one product whose outputs lie side by side; for as long as a call lasts."""

    fuses = False

    def __init__(self, modules: Sequence[Any]) -> None:
        self.weight = torch.cat([module.weight.detach() for module in modules])
        biases = [module.bias for module in modules if module.bias is not None]
        self.bias = torch.cat([bias.detach() for bias in biases]) if biases else None

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]

    def apply(self, x: Tensor, activation: str | None = None, residual: Tensor | None = None) -> Tensor:
        return _finished(nn.functional.linear(x, self.weight, self.bias), activation, residual)


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is GPT-2's linear layer, whose weight is (K, N)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _sizes(module: Any) -> tuple[int, int]:
    """Outputs and inputs of a linear layer."""
    rows, columns = module.weight.shape
    return (columns, rows) if is_transposed(module) else (rows, columns)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer: torch's, GPT-2's, or Falcon's, which rounds once more in half precision."""
    kind = type(module)
    falcon = kind.__name__ == "FalconLinear" and kind.__module__.startswith("transformers.")
    return kind is nn.Linear or falcon or is_transposed(module)


def product(module: nn.Module) -> Product:
    """The product of a linear layer: as it is routed now, else its own."""
    own = module.__dict__.get("forward")
    return own if isinstance(own, Linear) else Own(module)


def products(modules: Sequence[Any]) -> tuple[Product, ...]:
    """The products of linear layers that read the same: on a device a single one, where weights are not too large."""
    first = modules[0].weight
    limit = MERGED[first.device.type != "cpu"]
    alike = all(type(module) is nn.Linear and module.weight.dtype == first.dtype for module in modules)
    if (
        len(modules) > 1
        and alike
        and len({module.bias is None for module in modules}) == 1
        and all(module.weight.nbytes <= limit for module in modules)
    ):
        return (SideBySide(modules),)
    return tuple(product(module) for module in modules)


def _finished(y: Tensor, activation: str | None, residual: Tensor | None) -> Tensor:
    if activation is not None:
        y = activation_(y, activation, exactly=False)
    return y if residual is None else y.add_(residual)


def _affordable(weight: Tensor) -> bool:
    """Whether packed copies, with one of this weight, take no more memory than they leave free."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return True  # not Linux: the system does not say
    free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return packed_bytes() + 2 * 4 * weight.numel() <= free


def is_plain(module: nn.Module) -> bool:
    """Whether a linear layer can be routed."""
    weight = module._parameters.get("weight")
    return (
        weight is not None
        and type(weight) is nn.Parameter
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and not weight.is_inference()
        and untouched(module)
    )


def layers(modules: Iterable[nn.Module], rows: int | None = None) -> Iterator[tuple[nn.Module, bool]]:
    """Yield (layer, transposed) for every linear layer that can be routed, and gains from it with so many rows."""
    for module in modules:
        if is_linear(module) and gains(module, rows) and is_plain(module):
            yield module, is_transposed(module)


def gains(module: nn.Module, rows: int | None) -> bool:
    """Whether a product of so many rows with a layer's weight may be faster by oneDNN; None: any number of them."""
    if rows is None:
        return True
    if module._parameters.get("weight") is None:
        return False
    outputs, inputs = _sizes(module)
    kind = ops.DEAR[0] if outputs > inputs else None  # a layer that widens may have an activation behind it
    return rows >= ops.least_rows(outputs, inputs, kind)


def reason_off(model: nn.Module) -> str | None:
    """Why linear layers keep torch's own product for this model, or None when they are routed."""
    if config.settings().linear == "off":
        return "FASTGEN_LINEAR=off"
    weight = next(iter(model.parameters()), None)
    if weight is None or weight.device.type != "cpu":
        return "not on a CPU"
    if weight.dtype != torch.float32:
        return f"weights are {str(weight.dtype).removeprefix('torch.')}, not float32"
    if not ops.available():
        return "this torch has no oneDNN linear operators"
    return None


def check(module: nn.Module) -> None:
    """Drop the packed copy of a layer's weight where the weight is no longer what it was."""
    weight: Any = module.weight
    entry = _packed.get(weight)
    if entry is not None and entry.copy is not None and (entry.is_stale(weight) or entry.probe_differs(weight)):
        del _packed[weight]


def forget(model: nn.Module) -> None:
    """Drop the packed copies of a model's weights, which have left the CPU or fp32 since."""
    with _lock:
        for weight in model.parameters() if _packed else ():
            _packed.pop(weight, None)


def packed_bytes() -> int:
    """Bytes that packed copies of weights hold now."""
    with _lock:
        return sum(4 * entry.copy.numel() for entry in _packed.values() if entry.copy is not None)


def release() -> None:
    """Drop every packed copy; the next calls make them again."""
    with _lock:
        _packed.clear()
