"""Check interrupts at random instants, and calls inside signal handlers.

No state is left behind and no call deadlocks.
"""

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

import fastgen
from fastgen import context
from fastgen.context import assigned, changed, isolated
from fastgen.models.routing import routes
from fastgen.patches.engine import engine
from tests import interrupts

BACKENDS = ("auto", "native")


@pytest.mark.parametrize("ops", BACKENDS)
@pytest.mark.parametrize("how", interrupts.HOW)
@pytest.mark.parametrize(
    ("family", "method"),
    [("bart", "beams"), ("llama", "greedy"), ("gpt2", "sampling"), ("t5", "stream")],
)
@pytest.mark.slow
def test_interrupted(family: str, method: str, how: str, ops: str) -> None:
    """Run in a subprocess: a late interrupt must not hit pytest."""
    code = f"""
    from tests.interrupts import *
    torch.set_num_threads(1)
    tf.logging.set_verbosity_error()
    model = build({family!r})
    call = call_of(model, {method!r})
    with fastgen.disabled():
        stock = call()
    struck, found = run(call, [model], 150, {how!r}, seed=0)
    assert not found, found
    assert struck > 10, struck
    assert call() == stock
    """
    _run(code, ops)


@pytest.mark.parametrize("how", interrupts.HOW)
@pytest.mark.slow
def test_fairseq(how: str) -> None:
    pytest.importorskip("fairseq")
    code = f"""
    from tests.interrupts import *
    torch.set_num_threads(1)
    model, call = fairseq_call(3)
    with fastgen.disabled():
        stock = call()
    struck, found = run(call, [model], 100, {how!r}, seed=0)
    assert not found, found
    assert struck > 10, struck
    assert call() == stock
    """
    _run(code, "auto")


def _run(code: str, ops: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True, text=True, check=False, timeout=600,
        env=os.environ | {"FASTGEN_OPS": ops},
    )  # fmt: skip
    if "there are no operations in C here" in done.stderr:
        pytest.skip("no operations in C")
    assert done.returncode == 0, done.stderr


@contextmanager
def _within(call: Callable[[], object], seconds: float) -> Iterator[list[int]]:
    """Call a function repeatedly from a signal handler; yield a list with the count."""
    count = [0]

    def handle(*_: object) -> None:
        call()
        count[0] += 1
        # Fire again after the interrupted code has run for a while.
        signal.setitimer(signal.ITIMER_REAL, seconds)

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield count
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("what", ["release", "generate", "status"])
def test_in_a_signal_handler(what: str) -> None:
    """A handler takes no lock that the interrupted code may hold."""
    model = interrupts.build("bart")
    call = interrupts.call_of(model, "beams")
    calls = {"release": fastgen.release, "generate": call, "status": fastgen.status}
    with fastgen.disabled():
        stock = call()
    with _within(calls[what], 0.002) as count:
        while count[0] < 25:
            assert call() == stock
    assert not interrupts.left_behind(model)


class _Raises(LogitsProcessor):
    """Raise at the second step, and keep the traceback as interactive shells do."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > 1:
            raise KeyboardInterrupt
        return scores


@pytest.mark.parametrize("beams", [1, 3])
def test_with_the_traceback_kept(beams: int) -> None:
    model = interrupts.build("bart")
    ids = torch.arange(4, 40).view(3, 12)
    with pytest.raises(KeyboardInterrupt) as kept:
        model.generate(ids, num_beams=beams, max_new_tokens=5, logits_processor=[_Raises()])
    assert kept.tb is not None
    assert not interrupts.left_behind(model)
    fastgen.disable()
    fastgen.enable()


def test_a_plan_that_was_left_in_the_list_is_no_plan_that_runs() -> None:
    def interrupted() -> None:
        engine.running("never left").__enter__()

    isolated(interrupted)
    fastgen.disable()
    fastgen.enable()
    with engine.running("under way"), pytest.raises(RuntimeError, match="1 patched generate call"):
        fastgen.disable()
    fastgen.disable()
    fastgen.enable()


def test_routes_that_were_left_go_when_the_model_is_routed_again() -> None:
    model = interrupts.build("bart").eval()
    routes.routed(model).__enter__()
    assert any("forward" in vars(module) for module in model.modules())
    with routes.routed(model) as count:
        assert count > 0
    assert not interrupts.left_behind(model)


def test_an_interrupt_while_routes_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = interrupts.build("bart")

    def install(forwards: dict[Any, Any]) -> None:
        for module, forward in list(forwards.items())[:3]:
            module.__dict__["forward"] = forward
        raise interrupts.Interrupt

    monkeypatch.setattr(routes, "install", install)
    with pytest.raises(interrupts.Interrupt):
        routes.routed(model).__enter__()
    assert not interrupts.left_behind(model)


def test_routes_of_a_long_call_are_not_collected() -> None:
    """`fairseq-generate` is one call that routes its models for every batch."""
    model = interrupts.build("bart")

    def batches() -> int:
        for _ in range(50):
            with routes.routed(model):
                pass
        return len(context._callbacks.get() or ())

    assert isolated(batches) == 0


def test_all_context_variables_have_the_prefix() -> None:
    folder = Path(context.__file__).parent
    names = [
        name
        for file in folder.rglob("*.py")
        for name in re.findall(r'ContextVar\(\s*f?"([^"]*)', file.read_text())
    ]
    assert names
    assert all(name.startswith((context.PREFIX, "{PREFIX}")) for name in names), names


_ours: ContextVar[int] = ContextVar("fastgen_of_a_test", default=0)
_theirs: ContextVar[int] = ContextVar("of_a_user", default=0)


@dataclass(frozen=True)
class _Record:
    a: int = 0
    b: int = 0


_DEFAULT = _Record()
_record: ContextVar[_Record] = ContextVar("fastgen_record_of_a_test", default=_DEFAULT)


def test_fields_of_a_record_are_restored_in_any_order() -> None:
    first, second = changed(_record, a=1), changed(_record, b=2)
    first.__enter__()
    assert second.__enter__() == _record.get() == _Record(1, 2)
    first.__exit__()
    assert _record.get() == _Record(0, 2)
    second.__exit__()
    assert _record.get() == _DEFAULT


def test_isolated() -> None:
    def call(number: int, fail: bool) -> int:
        assigned(_ours, number).__enter__()  # interrupted before the block ends
        _theirs.set(number)
        if fail:
            raise interrupts.Interrupt
        return _ours.get()

    assert isolated(call, 3, fail=False) == 3
    assert (_ours.get(), _theirs.get()) == (0, 3)
    with pytest.raises(interrupts.Interrupt):
        isolated(call, 4, fail=True)
    assert (_ours.get(), _theirs.get()) == (0, 4)
