"""CUDA graphs of token selection that later calls replay.

Token selection reads and writes tensors that every call makes anew: scores, tables of tokens,
n-grams of a source. A graph records their addresses. A later call with the same fingerprint
(shapes, dtypes, numbers and options of everything that the function depends on) moves its tensors
to these addresses, and can then replay the graph.

A graph belongs to the static buffers of the decode step whose logits it reads, and one call at a
time uses it.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor

from fastgen.models.cuda_graphs.graph import BorrowedPool, CapturedFunction

MOST = 16
"""Maximum number of graphs over one set of static buffers: one for each number of sentences and
phase of the logits transforms, and for each set of options."""

MOST_VALUES = 64
"""Maximum number of elements of a host tensor that is compared by value."""

Holder = tuple[Any, Any]
"""An object or list, and the name or index at which it holds a tensor."""


class NotKept(Exception):
    """A part of the state is not covered, so that no later call can use the graph."""


class CallState:
    """Everything that a captured function reads of a call.

    Args:
        device: Device of the function's tensors.
        parts: Objects, each with the names of the attributes that the function reads.

    Attributes:
        fingerprint: What has to be equal for a graph of one call to be valid for another.
        holders: Where the call holds its tensors, in an order that equal facts imply.

    Raises:
        NotKept: The state holds a tensor that cannot be moved, or something unknown.
    """

    def __init__(self, device: torch.device, parts: Sequence[tuple[Any, Sequence[str]]]) -> None:
        self.device = device
        self.holders: list[Holder] = []
        self._tensors: dict[int, int] = {}  # number of each tensor, by id
        self._open: list[object] = []  # objects that are being described
        self.fingerprint: object = tuple(
            self._fingerprint(getattr(part, name), (part, name))
            for part, names in parts
            for name in names
        )

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the call holds now."""
        return [cast(Tensor, _held(holder)) for holder in self.holders]

    def number(self, tensor: Tensor) -> int | None:
        """Return the place of a tensor in `holders`; None if it is not part of the state."""
        return self._tensors.get(id(tensor))

    def _fingerprint(self, part: Any, holder: Holder | None) -> object:
        kind: Any = type(part)
        if part is None or kind in (bool, int, float, str, torch.dtype, torch.device):
            return part
        if isinstance(part, Tensor):
            return self._fingerprint_of_tensor(part, holder)
        if any(part is each for each in self._open):
            raise NotKept(f"{kind.__name__} holds itself")
        self._open.append(part)
        try:
            return kind, self._fingerprint_of_object(part)
        finally:
            self._open.pop()

    def _fingerprint_of_object(self, part: Any) -> object:
        kind: Any = type(part)
        if issubclass(kind, list) and not getattr(part, "__dict__", None):
            return tuple(self._fingerprint(each, (part, place)) for place, each in enumerate(part))
        if isinstance(part, tuple):
            return tuple(self._fingerprint(each, None) for each in part)
        if isinstance(part, Mapping):
            return tuple(
                (self._fingerprint(key, None), self._fingerprint(each, None))
                for key, each in part.items()
            )
        if kind is FunctionType and part.__closure__ is None:
            return part
        if kind is MethodType:
            return part.__func__, self._fingerprint(part.__self__, None)
        known = kind.__module__.startswith(("fastgen.", "transformers.", "fairseq."))
        if not known or not _is_described_by_attributes(kind):
            raise NotKept(kind.__name__)
        unread = getattr(part, "unread", ())
        own = kind.__module__.startswith("fastgen.")
        return tuple(
            (name, self._fingerprint(each, (part, name) if own else None))
            for name, each in vars(part).items()
            if name not in unread
        )

    def _fingerprint_of_tensor(self, part: Tensor, holder: Holder | None) -> object:
        if part.device != self.device:
            if part.numel() > MOST_VALUES or part.device.type != "cpu":
                raise NotKept(f"{part.numel()} numbers on {part.device}")
            return part.dtype, part.shape, part.flatten().tolist()
        if holder is None or 0 in part.stride():
            raise NotKept("a tensor that cannot be replaced")
        if (number := self._tensors.get(id(part))) is not None:
            self.holders.append(holder)
            return "again", number
        self._tensors[id(part)] = len(self.holders)
        self.holders.append(holder)
        return part.shape, part.stride(), part.dtype


@functools.cache
def _is_described_by_attributes(kind: type) -> bool:
    """Return whether `vars` of an object of this class has everything that the object holds."""
    bases = [base for base in kind.__mro__ if base is not object]
    return not any(base.__module__ == "builtins" or vars(base).get("__slots__") for base in bases)


def _held(holder: Holder) -> Tensor | None:
    of, name = holder
    return of[name] if isinstance(of, list) else getattr(of, name)


def _hold(holder: Holder, tensor: Tensor) -> None:
    of, name = holder
    if isinstance(of, list):
        of[name] = tensor
    else:
        setattr(of, name, tensor)


@dataclass(eq=False)
class KeptGraph:
    """A graph and the memory that it reads and writes.

    Attributes:
        fingerprint: What has to be equal for the graph to be valid.
        inputs: Inputs of the function, which keep the memory of the facts allocated.
        memory: The tensors of the state.
        launch: Replays the graph.
        result: What it returns.
    """

    fingerprint: object
    inputs: tuple[object, ...]
    memory: list[Tensor]
    launch: Callable[[], object]
    result: Any


_lock = threading.Lock()


class KeptGraphs:
    """The graphs over a set of static buffers. One call at a time uses them, as their memory.

    Attributes:
        borrowed_pool: The pool to capture in.
    """

    def __init__(self) -> None:
        self.borrowed_pool = BorrowedPool()
        self._graphs: list[KeptGraph] = []  # from least to most recently used
        self._user: weakref.ref[object] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that graphs read and write."""
        memory = {id(each): each.nbytes for kept in self._graphs for each in kept.memory}
        return sum(memory.values())

    def claim(self, user: object) -> bool:
        """Return whether a call may use the graphs from now on: no other one does."""
        with _lock:
            now = None if self._user is None else self._user()
            if now is None:
                self._user = weakref.ref(user)
            return now is None or now is user

    def leave(self) -> None:
        """Allow another call to use the graphs."""
        self._user = None

    def find(self, fingerprint: object) -> KeptGraph | None:
        """Return the graph that is valid for a call with these facts, or None."""
        for kept in self._graphs:
            if kept.fingerprint == fingerprint:
                self._graphs.remove(kept)
                self._graphs.append(kept)
                return kept
        return None

    def add(self, kept: KeptGraph) -> None:
        """Keep a graph, and drop the least recently used one beyond the limit."""
        self._graphs.append(kept)
        del self._graphs[:-MOST]

    def drop(self, logits: Tensor) -> None:
        """Drop the graphs that read these logits, as no step will write them again."""
        self._graphs[:] = [
            kept for kept in self._graphs if not any(each is logits for each in kept.inputs)
        ]

    def lose(self) -> None:
        """Drop all graphs, as a failed capture left their pool in an unknown state."""
        self._graphs.clear()

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is memory of a graph."""
        return any(tensor is each for kept in self._graphs for each in kept.memory)


class KeptFunction(CapturedFunction):
    """A captured function over tensors of a call, whose graphs serve later calls."""

    def __init__(self) -> None:
        super().__init__()
        self._shared: KeptGraphs | None = None
        self._is_shared = True  # until a part of the state turns out not to be covered
        self._holders: list[Holder] = []  # those that may hold memory of a graph

    def run(
        self,
        function: Callable[[], Any],
        device: torch.device,
        shared: KeptGraphs | None,
        reads: Callable[[], Sequence[tuple[Any, Sequence[str]]]],
        *inputs: object,
    ) -> Any:
        """Return the function's result, which the next run may overwrite.

        Replaces the call's tensors by those of an earlier call whose graph is valid for this one.

        Args:
            function: The function to run or replay.
            device: The device it runs on.
            shared: Graphs of earlier calls; None for none.
            reads: Returns what the function reads of the call, as `CallState` takes it.
            inputs: As for a `CapturedFunction`. Those that are not part of the state have to be the
                same memory as in the earlier call.

        Raises:
            NotCaptured: As `capture`; the function has not run.
        """
        if self.replays(inputs) or not self._claims(shared):
            return self(function, device, *inputs)
        assert shared is not None
        try:
            state = CallState(device, reads())
        except NotKept:
            self._is_shared = False
            return self(function, device, *inputs)
        fingerprint = _fingerprint_of(state, inputs)
        kept = shared.find(fingerprint)
        if kept is not None:
            self._inputs = _moved(state, kept.memory, inputs)
            self._launch, self._result = kept.launch, kept.result
            self._holders += state.holders
            kept.launch()
            return kept.result
        result = self(function, device, *inputs)
        if self._launch is None:
            self._move_to_own_memory(device, reads, inputs)
        else:
            memory = state.tensors
            shared.add(KeptGraph(fingerprint, inputs, memory, self._launch, self._result))
            self._holders += state.holders
        return result

    def leave(self) -> None:
        """Move the call's tensors out of the memory of graphs, which another call may then use."""
        self.forget()
        shared, self._shared, self._is_shared = self._shared, None, True
        if shared is None:
            return
        for holder in self._holders:
            tensor = _held(holder)
            if tensor is not None and shared.holds(tensor):
                _hold(holder, tensor.clone())
        self._holders.clear()
        self._borrowed_pool = BorrowedPool()
        shared.leave()

    def _move_to_own_memory(
        self,
        device: torch.device,
        reads: Callable[[], Sequence[tuple[Any, Sequence[str]]]],
        inputs: Sequence[object],
    ) -> None:
        """Move the call's tensors to new memory, over which the next run is captured.

        Later calls overwrite that memory. Until now it may have belonged to others, such as a
        logits processor of the user's.
        """
        try:
            state = CallState(device, reads())
        except NotKept:
            self._is_shared = False
            return
        copies = {id(each): each.clone() for each in state.tensors}
        memory = [copies[id(each)] for each in state.tensors]
        self._inputs = _moved(state, memory, inputs)

    def _claims(self, shared: KeptGraphs | None) -> bool:
        """Return whether the call uses these graphs. It uses those of one set of buffers only."""
        if self._shared is None and self._is_shared and shared is not None and shared.claim(self):
            self.forget()
            self._shared, self._borrowed_pool = shared, shared.borrowed_pool
        return self._is_shared and shared is not None and shared is self._shared

    def _captured(
        self, function: Callable[[], Any], device: torch.device
    ) -> tuple[Callable[[], object], Any]:
        try:
            return super()._captured(function, device)
        except BaseException:
            if self._shared is not None:
                self._shared.lose()
            raise


def _fingerprint_of(state: CallState, inputs: Sequence[object]) -> object:
    def of(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        number = state.number(value)
        memory = value.data_ptr(), value.shape, value.stride(), value.dtype
        return memory if number is None else number

    return state.fingerprint, tuple(map(of, inputs))


def _moved(
    state: CallState, memory: Sequence[Tensor], inputs: Sequence[object]
) -> tuple[object, ...]:
    """Move the tensors of a call to the memory of a graph; return its inputs with those tensors."""
    tensors, places = state.tensors, {id(each) for each in memory}
    news = [
        # It may be overwritten before it is moved.
        new.clone() if new is not kept and id(new) in places else new
        for new, kept in zip(tensors, memory, strict=True)
    ]
    for holder, new, kept in zip(state.holders, news, memory, strict=True):
        if new is not kept:
            kept.copy_(new)
            _hold(holder, kept)
    moved = {id(old): kept for old, kept in zip(tensors, memory, strict=True)}
    return tuple(moved.get(id(each), each) for each in inputs)
