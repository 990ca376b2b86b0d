"""What is kept between calls: by module, weakly, and released on request."""

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fastgen.models import state
from fastgen.models.memory import budget
from fastgen.models.state import CachedState, ModelState, cached_state_of, process_state, state_of


class _Buffers(CachedState):
    label = "tested buffers"

    def __init__(self) -> None:
        self.bytes = 0

    @property
    def nbytes(self) -> int:
        return self.bytes

    def release(self) -> bool:
        self.bytes = 0
        return False


class _Copies(CachedState):
    def release(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _undeclared() -> Iterator[None]:
    """Memory of these tests is in no report of other tests."""
    yield
    for kind in (_Buffers, _Copies):
        for module, _ in state.iter_cached_states(kind):
            state_of(module).drop(kind)
        process_state().drop(kind)


def _layer() -> nn.Module:
    return nn.Linear(2, 2, dtype=torch.float32, device="cpu")


def test_a_value_is_created_once_and_found_by_its_class() -> None:
    layer, other = _layer(), _layer()
    assert cached_state_of(layer, _Buffers) is None
    value = state_of(layer).of(_Buffers)
    assert state_of(layer).of(_Buffers) is value is cached_state_of(layer, _Buffers)
    assert cached_state_of(layer, _Copies) is None
    assert state_of(other).of(_Buffers) is not value
    newer = _Buffers()
    state_of(layer).keep(newer)
    assert cached_state_of(layer, _Buffers) is newer
    state_of(layer).drop(_Buffers)
    state_of(layer).drop(_Buffers)
    assert cached_state_of(layer, _Buffers) is None


def test_it_is_freed_with_its_module() -> None:
    layer = _layer()
    value = weakref.ref(state_of(layer).of(_Buffers))
    module = weakref.ref(layer)
    del layer
    gc.collect()
    assert module() is None
    assert value() is None
    assert not list(state.iter_cached_states(_Buffers))


def test_copies_of_a_module_begin_without_it() -> None:
    layer = _layer()
    attributes = dict(vars(layer))
    state_of(layer).of(_Buffers)
    assert vars(layer) == attributes
    for copied in (copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert cached_state_of(copied, _Buffers) is None


def test_release_frees_and_drops() -> None:
    layer = _layer()
    buffers = state_of(layer).of(_Buffers)
    for holder in (state_of(layer), process_state()):
        holder.of(_Copies)
    buffers.bytes = 5
    state.release(_Copies)
    assert cached_state_of(layer, _Copies) is process_state().get(_Copies) is None
    assert buffers.bytes == 5
    state.release()
    assert cached_state_of(layer, _Buffers) is buffers
    assert buffers.bytes == 0


def test_bytes_of_a_value_that_modules_share_count_once() -> None:
    layers = [_layer(), _layer()]
    shared = _Buffers()
    shared.bytes = 7
    for layer in layers:
        state_of(layer).keep(shared)
    assert budget.held_bytes()["tested buffers"] == 7
    state_of(layers[0]).keep(_Buffers())
    state_of(layers[0]).of(_Buffers).bytes = 3
    assert budget.held_bytes()["tested buffers"] == 10
    assert budget.held_by_model()["Linear"]["tested buffers"] == 10


def test_threads_get_one_state() -> None:
    barrier, layers = threading.Barrier(4), [_layer() for _ in range(200)]
    found: list[list[ModelState]] = [[] for _ in range(4)]

    def ask(number: int) -> None:
        barrier.wait()
        for layer in layers:
            found[number].append(state_of(layer))
            state_of(layer).of(_Buffers)
            list(state.iter_cached_states(_Buffers))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len({id(one[place]) for one in found}) == 1 for place in range(len(layers)))
