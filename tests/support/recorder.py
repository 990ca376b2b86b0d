"""A CUDA graph for the CPU, which records what a function runs and replays it on the same tensors.

As in a real capture, everything that Python computed is fixed, and nothing may read a value. A test
therefore fails if a number that changes from step to step is not read from memory, or if memory has
moved.
"""

import ctypes
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from fastgen.decoding.kv_cache import room
from fastgen.models import state
from fastgen.models.cuda_graphs import graph
from fastgen.models.cuda_graphs.graph_buffers import BufferPools
from fastgen.models.cuda_graphs.replay import JointReplay
from fastgen.ops import native

_T = TypeVar("_T")
_ASKS = (
    "_local_scalar_dense",
    "nonzero",
    "is_nonzero",
    "equal",
    "masked_select",
    "unique",
    "item",
    "isin",
)
_ALLOCATES = ("empty", "empty_like", "new_empty", "empty_strided")


class Recorder(TorchDispatchMode):
    """A mode that records operators and kernels while active; `undo` reverts what they wrote."""

    def __init__(self) -> None:
        super().__init__()
        # Contents of storages before they were written, by address.
        self._before: dict[int, tuple[torch.UntypedStorage, bytes]] = {}
        self.runs: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []
        # Memory that the function reads or writes and has not allocated, by address.
        self.outside: dict[int, Tensor] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _ASKS:
            raise RuntimeError(f"{func}: operation not permitted when stream is capturing")
        # A capture can fill in a single number, but cannot copy an array from the host.
        if func.overloadpacket.__name__ == "lift_fresh" and args[0].dim():
            raise RuntimeError("numbers of the host's are copied while the stream is capturing")
        if func.overloadpacket.__name__ == "lift_fresh":
            self._made.add(args[0].untyped_storage().data_ptr())
        self._look_at(args, kwargs)
        if func._schema.is_mutable:
            self._note(args, kwargs)
        result = func(*args, **(kwargs or {}))
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        self._made |= {each.untyped_storage().data_ptr() for each in made} - self.outside.keys()
        self.runs.append((func, args, kwargs or {}, result))
        return result

    def launch(self, original: Callable[..., None], *args: Any, **constants: Any) -> None:
        """Record a kernel launch, but not the interpreter's own operators."""
        self.runs.append((original, args, constants, None))
        self._look_at(args)
        with _disable_current_modes():
            self._note(args)
            original(*args, **constants)

    def _look_at(self, *arguments: Any) -> None:
        for leaf in tree_leaves(arguments):
            if isinstance(leaf, Tensor):
                at = leaf.untyped_storage().data_ptr()
                if at not in self._made:
                    self.outside[at] = leaf

    def _note(self, *arguments: Any) -> None:
        for leaf in tree_leaves(arguments):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                at = storage.data_ptr()
                if at not in self._before:
                    self._before[at] = storage, ctypes.string_at(at, storage.nbytes())

    @property
    def kernels(self) -> Counter[str]:
        """Count what a device would run, by name: kernels, and operators that write memory."""
        found: Counter[str] = Counter()
        for run, args, kwargs, result in self.runs:
            if not isinstance(run, torch._ops.OpOverload):
                found[args[0].__name__] += 1
            elif run._schema.is_mutable or not _views(result, (args, kwargs)):
                found[run.overloadpacket.__name__] += 1
        return found - Counter({name: found[name] for name in _ALLOCATES})

    def undo(self) -> None:
        # A storage noted later may lie within one noted earlier.
        for at, (_, before) in reversed(self._before.items()):
            ctypes.memmove(at, before, len(before))

    def replay(self) -> None:
        for run, args, kwargs, result in self.runs:
            if isinstance(run, torch._ops.OpOverload) and run.overloadpacket.__name__ in _ALLOCATES:
                continue
            again = run(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)


def _views(result: Any, arguments: Any) -> bool:
    """Return whether all tensors of a result are views of the arguments' memory."""
    given, made = (
        {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves(tree)
            if isinstance(leaf, Tensor)
        }
        for tree in (arguments, result)
    )
    return bool(made) and made <= given


class Graphs:
    """A stand-in for `graph` on a CPU that counts captures and replays by function name.

    Attributes:
        captured: number of captures of each function.
        replayed: number of replays of each function.
        kernels: what the newest capture of each function runs.
        outside: for each capture of each function, the memory that it reads or writes and has not
            allocated, by address; only where `keeps_outside`, as later calls then cannot use it.
        keeps_outside: whether `outside` is recorded.
        texts: number of joint replays, by how many texts took part.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.replaying = False
        self.captured: Counter[str] = Counter()
        self.replayed: Counter[str] = Counter()
        self.kernels: dict[str, Counter[str]] = {}
        self.outside: dict[str, list[dict[int, Tensor]]] = {}
        self.keeps_outside = False
        self.texts: Counter[int] = Counter()
        self._recording: Recorder | None = None
        state.release(BufferPools)  # graphs of earlier tests are not counted here
        monkeypatch.setattr(graph, "enabled", lambda _: True)
        # Compaction at intervals is for CPUs only.
        monkeypatch.setattr(room, "COMPACT_EVERY", 10**9)
        # Operations in C are for CPUs only too, and no dispatcher sees what they do.
        monkeypatch.setattr(native, "library", lambda *_: None)
        monkeypatch.setattr(graph, "capture", self._capture)
        monkeypatch.setattr(JointReplay, "__call__", self._counting(JointReplay.__call__))
        for name, module in list(sys.modules.items()):
            if name.startswith("fastgen.ops.") and "launch" in vars(module):
                monkeypatch.setattr(module, "launch", self._launching(module.launch))

    @property
    def captures(self) -> int:
        return self.captured.total()

    @property
    def replays(self) -> int:
        return self.replayed.total()

    def _counting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(replay: JointReplay, decoders: Any, texts: Any) -> Any:
            before = self.replays
            found = original(replay, decoders, texts)
            self.texts[len(texts)] += self.replays - before
            return found

        return call

    def _launching(self, original: Callable[..., None]) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            if self._recording is None:
                with _disable_current_modes():
                    original(*args, **constants)
            else:
                self._recording.launch(original, *args, **constants)

        return launch

    def _capture(
        self, function: Callable[[], _T], device: torch.device, place: None
    ) -> tuple[Callable[[], object], _T]:
        self._recording = recorder = Recorder()
        random_state = torch.get_rng_state()
        try:
            with recorder:
                result = function()
        except RuntimeError as error:
            raise graph.NotCaptured(str(error)) from error
        finally:
            self._recording = None
            recorder.undo()
            torch.set_rng_state(random_state)
        name = cast(Any, function).func.__name__
        self.captured[name] += 1
        self.kernels[name] = recorder.kernels
        if self.keeps_outside:
            self.outside.setdefault(name, []).append(recorder.outside)
        for leaf in tree_leaves(result):  # a capture computes nothing
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                leaf.fill_(torch.nan)

        def launch() -> None:
            self.replayed[name] += 1
            self.replaying = True
            recorder.replay()
            self.replaying = False

        return launch, result
