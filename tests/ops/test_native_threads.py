"""How threads share operations and steps in C: results, late threads, and threads that are lost."""

import ctypes
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MarianConfig, MarianMTModel

from fastgen.ops import native
from fastgen.ops.counts import calls
from fastgen.ops.native import products as native_products
from fastgen.ops.native import selection as native_selection
from tests.ops.test_native import own_variant as variant  # noqa: F401  a fixture

PATIENCE = 20.0
_WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_RUN = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


class Threads:
    """A stand-in for GOMP_parallel, whose threads come and go when they are told to.

    Attributes:
        late: seconds that each further thread waits before it begins; None for until the work of
            the calling thread is over.
        parting: seconds between the end of the work and the return.
        sizes: the number of threads of each call.
        waited: whether the calling thread's work was not over while a thread waited for that.
    """

    def __init__(self, late: Sequence[float | None], parting: float = 0.0) -> None:
        self.late, self.parting, self.waited = late, parting, False
        self.sizes = list[int]()
        self._function = _RUN(self._run)
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value

    def _run(self, work: int, job: int, threads: int, flags: int) -> None:
        function, over = _WORK(work), threading.Event()

        def begin(late: float | None) -> None:
            if late is not None:
                time.sleep(late)
            else:
                self.waited |= not over.wait(PATIENCE)
            function(job)

        helpers = [
            threading.Thread(target=begin, args=(late,)) for late in self.late[: threads - 1]
        ]
        for helper in helpers:
            helper.start()
        function(job)
        over.set()
        for helper in helpers:
            helper.join()
        time.sleep(self.parting)
        self.sizes.append(threads)

    def serve(self, variant: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
        """Run the operations on these threads, by a library that has not seen others."""
        shutil.copytree(native.LIBRARIES, folder / "lib")
        monkeypatch.setattr(native, "LIBRARIES", folder / "lib")
        by = native.load(variant)._replace(run=self.address)
        monkeypatch.setattr(native, "found", lambda: native.Found(variant, by))


@pytest.fixture(autouse=True)
def _number() -> Iterator[None]:
    own = torch.get_num_threads()
    yield
    torch.set_num_threads(own)


@pytest.fixture
def model() -> MarianMTModel:
    """Return a random model whose products pay for several threads."""
    torch.manual_seed(0)
    config = MarianConfig(
        vocab_size=6_007, d_model=64, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=256,
        decoder_ffn_dim=256, encoder_attention_heads=4, decoder_attention_heads=4,
        max_position_embeddings=64, pad_token_id=6_006, eos_token_id=0,
        decoder_start_token_id=6_006, forced_eos_token_id=None, init_std=0.3,
    )  # fmt: skip
    return MarianMTModel(config).eval()


def _texts(model: Any, beams: int = 1) -> Tensor:
    ids = torch.randint(1, 6_000, (5, 9), generator=torch.Generator().manual_seed(1))
    more = {"repetition_penalty": 1.3} if beams == 1 else {"no_repeat_ngram_size": 3}
    return model.generate(ids, num_beams=beams, max_new_tokens=12, min_new_tokens=12, **more)


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _product(by: native.Library) -> Sequence[Tensor]:
    packed = native_products.packed(by, _randn(1_000, 72))
    return [
        native_products.product(by, _randn(rows, 72, seed=rows), packed, None, "gelu", None, out)
        for rows in (1, 7, 200)
        for out in (torch.empty(rows, 1_000),)
    ]


def _attention(by: native.Library) -> Sequence[Tensor]:
    keys, values = _randn(3, 2, 50, 64, seed=1), _randn(3, 2, 50, 64, seed=2)
    return [native.beam_attention(by, _randn(3, 4, 8, 64), keys, values, None, 0.2)]


def _k_best(by: native.Library) -> Sequence[Tensor]:
    found = native_selection.k_best(
        by, _randn(5, 4, 3_001), _randn(5, 4, seed=1), 8, normalised=False
    )
    assert found is not None
    return found


def _move_rows(by: native.Library) -> Sequence[Tensor]:
    tables = [_randn(11, 4, 30, seed=1), _randn(11, 4, 30, seed=2)]
    parents = torch.randint(4, (11, 4), generator=torch.Generator().manual_seed(3))
    given = [(each, _randn(11, 4, 1, seed=4), 0) for each in tables]
    assert native.move_rows(by, given, (), parents, None, 20)
    return tables


OPERATIONS: Sequence[Callable[[native.Library], Sequence[Tensor]]] = (
    _product, _attention, _k_best, _move_rows,
)  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each.__name__.strip("_"))
def test_operations(
    variant: str,  # noqa: F811
    operation: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Results do not depend on the number of threads, which may exceed the number of cores."""
    by = native.load(variant)
    monkeypatch.setattr(native, "threads_for", lambda work: 1)
    wanted = operation(by)
    for threads in (2, 3, 9):
        monkeypatch.setattr(native, "threads_for", lambda work, threads=threads: threads)
        for _ in range(20):
            found = operation(by)
            assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True)), threads


def test_no_more_threads_than_tasks(
    variant: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A product of one panel is one task, and no other thread wakes up for it."""
    threads = Threads([0.0, 0.0])
    threads.serve(variant, tmp_path, monkeypatch)
    monkeypatch.setattr(native, "threads_for", lambda work: 3)
    by = native.found().library
    assert by is not None
    x = _randn(1, 32)
    for panels in (1, 2, 3):
        weight, out = _randn(panels * by.panel, 32, seed=1), torch.empty(1, panels * by.panel)
        found = native_products.product(
            by, x, native_products.packed(by, weight), None, None, None, out
        )
        torch.testing.assert_close(found, x @ weight.T)
    assert threads.sizes == [2, 3]


@pytest.mark.parametrize("beams", [1, 4])
def test_searches(variant: str, beams: int, model: MarianMTModel) -> None:  # noqa: F811
    """Whole searches are the same on any number of threads."""
    torch.set_num_threads(1)
    wanted = [_texts(model, beams) for _ in range(2)][-1]
    assert calls["search", "native"]
    for threads in (2, 3, 9):
        torch.set_num_threads(threads)
        for _ in range(3):
            assert torch.equal(_texts(model, beams), wanted)


@pytest.mark.parametrize("late", [(0.0, 0.0), (0.003, 0.0), (None, None)], ids=str)
@pytest.mark.parametrize("beams", [1, 4])
def test_late_threads(
    variant: str,  # noqa: F811
    beams: int,
    late: tuple[float | None, ...],
    model: MarianMTModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search does not wait for a thread that comes in its middle, or when all is over."""
    threads = Threads(late)
    threads.serve(variant, tmp_path, monkeypatch)
    torch.set_num_threads(1)
    wanted = [_texts(model, beams) for _ in range(2)][-1]
    torch.set_num_threads(3)
    assert torch.equal(_texts(model, beams), wanted)
    assert max(threads.sizes) == 3
    assert not threads.waited


def test_fewer_threads_where_time_is_lost(
    variant: str,  # noqa: F811
    model: MarianMTModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the leader waits most of the time, it works alone, and no longer a second later."""
    threads = Threads((0.0,), parting=0.1)
    threads.serve(variant, tmp_path, monkeypatch)
    torch.set_num_threads(1)
    wanted = [_texts(model) for _ in range(2)][-1]
    torch.set_num_threads(2)
    counts = [-1, 0]
    while counts[-1] > counts[-2] and len(counts) < 12:
        assert torch.equal(_texts(model), wanted)
        counts.append(len(threads.sizes))
    assert counts[-1] == counts[-2]
    assert set(threads.sizes) == {2}
    time.sleep(1.1)
    assert torch.equal(_texts(model), wanted)
    assert len(threads.sizes) > counts[-1]


def test_calls_at_the_same_time(variant: str, model: MarianMTModel) -> None:  # noqa: F811
    """Several Python threads have teams of their own."""
    torch.set_num_threads(1)
    wanted = [[_texts(model, beams) for beams in (1, 4)] for _ in range(2)][-1]
    found = list[Any]()

    def run() -> None:
        torch.set_num_threads(3)
        found.extend((_texts(model, 1), _texts(model, 4)) for _ in range(4))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12
    for each in found:
        for pair in zip(each, wanted, strict=True):
            assert torch.equal(*pair)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_after_a_fork(variant: str, model: MarianMTModel) -> None:  # noqa: F811
    """A forked process, which has no other threads, runs the operations on one."""
    torch.set_num_threads(3)
    wanted = [_texts(model, 4) for _ in range(2)][-1]
    child = os.fork()
    if not child:
        status = 1
        try:
            torch.set_num_threads(1)
            assert torch.equal(_texts(model, 4), wanted)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
