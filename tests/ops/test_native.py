"""Operations in C against their references, for every instruction set of this processor.

The tests are skipped on a machine without a library; one has to exist wherever there is a compiler.
"""

import contextlib
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import fastgen
from fastgen import config
from fastgen.cli.environment import checks
from fastgen.decoding.search.finishing_rules import TransformersRule
from fastgen.ops import native
from fastgen.ops.beam_attention import beam_attention, beam_attention_reference
from fastgen.ops.counts import calls
from fastgen.ops.native import build
from fastgen.ops.native import products as native_products
from fastgen.ops.native import selection as native_selection
from fastgen.ops.selection.kbest import best_of_log_probs, best_of_log_probs_reference
from fastgen.ops.selection.log_softmax import log_softmax, log_softmax_reference
from tests import native_fuzz
from tests.support import emulated, zoo
from tests.support.beam_choices import assert_alike, choice
from tests.support.poison import poison

ROOT = Path(__file__).parents[2]
SKIPPED = pytest.mark.skip(reason="no library for this processor")
EMULATED = pytest.param(
    emulated.VARIANT,
    marks=pytest.mark.skipif(emulated.why_not() is not None, reason=str(emulated.why_not())),
)
INF = torch.inf
SHAPES = [
    # B, M, Hkv, groups, N, D
    (1, 1, 1, 1, 1, 16),
    # Lengths up to the last lane of a vector.
    *((2, 3, 2, 1, n, 32) for n in (6, 7, 13, 14, 15, 16, 22, 23, 30, 31)),
    (2, 3, 2, 2, 5, 32),
    (3, 4, 4, 1, 37, 48),
    # More than four sentences per thread: a list of keys serves all heads.
    (
        9,
        4,
        2,
        1,
        64,
        64,
    ),
    (2, 5, 3, 1, 130, 80),
    (1, 8, 2, 8, 33, 96),
    (2, 2, 2, 3, 17, 128),
    (2, 3, 2, 2, 21, 256),
    (1, 3, 2, 2, 21, 144),
    (1, 16, 1, 8, 40, 64),  # the maximum number of rows
]


_VARIANTS = native_fuzz.variants() or [pytest.param("", marks=SKIPPED)]


@pytest.fixture(
    params=[*_VARIANTS, *([] if emulated.VARIANT in native_fuzz.variants() else [EMULATED])]
)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run operations by the library for one instruction set, whatever FASTGEN_OPS is.

    Memory that they do not write is poisoned. The library for Arm runs under QEMU on an x86-64
    machine.
    """
    with _run_by(request.param, monkeypatch):
        yield request.param


@pytest.fixture(params=_VARIANTS)
def own_variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run operations as `variant` does, by the libraries that this processor can run."""
    with _run_by(request.param, monkeypatch):
        yield request.param


@contextlib.contextmanager
def _run_by(variant: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    try:
        emulate = variant == emulated.VARIANT not in native_fuzz.variants()
        by = emulated.load() if emulate else native.load(variant)
    except OSError as error:
        if shutil.which("cc") and sys.platform == "linux":
            raise
        pytest.skip(str(error))
    monkeypatch.setattr(native, "found", lambda: native.Found(variant, by))
    poison(monkeypatch)
    monkeypatch.delenv("FASTGEN_OPS", raising=False)
    config.reload()
    calls.clear()
    yield
    monkeypatch.undo()
    config.reload()
    assert all(path != "triton" for _, path in calls)


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _mask(kind: str, b: int, m: int, h: int, n: int) -> Tensor | None:
    if kind == "none":
        return None
    shape = {"sentence": (b, 1, 1, n), "beam": (b, 1, m, n), "head": (1, h, m, n)}[kind]
    mask = torch.zeros(shape).masked_fill_(_randn(*shape, seed=5) > 0.3, -INF)
    # Every row sees something, and all rows of a sentence see some common keys.
    mask[..., : n // 3 + 1] = _randn(*shape[:3], 1, seed=6)
    return mask


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", ["none", "sentence", "beam", "head"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(
    variant: str, shape: tuple[int, ...], kind: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values are views of larger buffers; the mask hides keys from all or some rows."""
    b, m, key_heads, groups, n, d = shape
    monkeypatch.setattr(native, "threads_for", lambda work: threads)
    query = _randn(b, m, key_heads * groups, d)
    keys = _randn(b, n + 3, key_heads, d, seed=1).transpose(1, 2)[:, :, 2 : n + 2]
    values = _randn(b, key_heads, n + 1, d, seed=2)[:, :, :n]
    mask = _mask(kind, b, m, key_heads * groups, n)
    monkeypatch.setattr(native, "FEW_SCORES", 0)
    before = [tensor.clone() for tensor in (query, keys, values)]
    found = beam_attention(query, keys, values, mask, 0.3)
    torch.testing.assert_close(
        found, beam_attention_reference(query, keys, values, mask, 0.3), atol=1e-5, rtol=1e-5
    )
    assert all(
        torch.equal(old, new) for old, new in zip(before, (query, keys, values), strict=True)
    )
    assert calls == {("beam_attention", "native"): 1}
    sinks = _randn(key_heads * groups, seed=3) * 3
    found = beam_attention(query, keys, values, mask, 0.3, sinks=sinks)
    wanted = beam_attention_reference(query, keys, values, mask, 0.3, sinks=sinks)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert calls == {("beam_attention", "native"): 2}


def test_attention_of_large_scores(variant: str) -> None:
    """Scores are large, and masked by the lowest fp32 number, which is not -inf.

    The softmax has to subtract the highest score.
    """
    query, keys, values = (
        _randn(2, 8, 2, 32) * 40,
        _randn(2, 2, 9, 32, seed=1) * 40,
        _randn(2, 2, 9, 32, seed=2),
    )
    mask = torch.zeros(2, 1, 1, 9)
    mask[..., 5:] = torch.finfo(torch.float32).min
    # A row whose keys are all masked attends to all of them equally.
    mask[1] = torch.finfo(torch.float32).min
    found = beam_attention(query, keys, values, mask, 1.0)
    torch.testing.assert_close(
        found, beam_attention_reference(query, keys, values, mask, 1.0), atol=1e-4, rtol=1e-4
    )


def test_attention_to_nothing(variant: str) -> None:
    """A beam that sees no key gets NaN, and the other beams their correct results."""
    query, keys, values = (
        _randn(2, 3, 2, 16),
        _randn(2, 2, 37, 16, seed=1),
        _randn(2, 2, 37, 16, seed=2),
    )
    mask = torch.zeros(2, 1, 3, 37)
    mask[1, :, 2] = -INF
    found, wanted = (
        beam_attention(query, keys, values, mask, 1.0),
        beam_attention_reference(query, keys, values, mask, 1.0),
    )
    assert found[1, 2].isnan().all()
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5, equal_nan=True)


def _double(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return beam_attention(query.double(), keys.double(), values.double(), None, 1.0).float()


def _autocast(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return beam_attention(query, keys, values, None, 1.0).float()


def _gradient(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    found = beam_attention(query.clone().requires_grad_(), keys, values, None, 1.0)
    assert found.requires_grad
    return found.detach()


def _strided(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return beam_attention(
        query, keys.transpose(2, 3).contiguous().transpose(2, 3), values, None, 1.0
    )


def _alignment_layer(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    with FlopCounterMode(display=False):
        return beam_attention(query, keys, values, None, 1.0)


def _mapped(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return torch.vmap(lambda q: beam_attention(q, keys, values, None, 1.0))(query[None])[0]


def _narrow_values(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    found = beam_attention(query, keys, values[..., :8], None, 1.0)
    assert found.shape[3] == 8
    return torch.cat([found, beam_attention_reference(query, keys, values[..., 8:], None, 1.0)], 3)


@pytest.mark.parametrize(
    "how", [_double, _autocast, _gradient, _strided, _alignment_layer, _mapped, _narrow_values]
)
def test_left_to_torch(variant: str, how: Callable[..., Tensor]) -> None:
    query, keys, values = (
        _randn(2, 8, 2, 32),
        _randn(2, 2, 9, 32, seed=1),
        _randn(2, 2, 9, 32, seed=2),
    )
    found = how(query, keys, values)
    assert calls == {("beam_attention", "reference"): 1}
    wanted = beam_attention_reference(query, keys, values, None, 1.0)
    torch.testing.assert_close(found, wanted, atol=5e-2 if how is _autocast else 1e-5, rtol=1e-5)


@pytest.mark.parametrize(("dims", "rows", "count"), [(24, 8, 9), (32, 129, 9), (32, 8, 8)])
def test_shapes_left_to_torch(variant: str, dims: int, rows: int, count: int) -> None:
    """C does not cover the head dimension, the number of rows, or so few scores."""
    query, keys, values = (
        _randn(2, rows, 1, dims),
        _randn(2, 1, count, dims, seed=1),
        _randn(2, 1, count, dims, seed=2),
    )
    found = beam_attention(query, keys, values, None, 1.0)
    torch.testing.assert_close(
        found, beam_attention_reference(query, keys, values, None, 1.0), atol=1e-5, rtol=1e-5
    )
    assert calls == {("beam_attention", "reference"): 1}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("vocabulary", [1, 15, 16, 127, 128, 129, 5000, 50264])
def test_log_softmax(
    variant: str, vocabulary: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is about that of torch at most, and computing in place gives the same result."""
    monkeypatch.setattr(native, "threads_for", lambda work: threads)
    logits = _randn(5, vocabulary + 2)[:, :vocabulary] * 8
    logits[1, vocabulary // 2] = -INF
    found, exact = log_softmax(logits), torch.log_softmax(logits.double(), 1)
    finite = exact.isfinite()
    assert torch.equal(found.isfinite(), finite)
    error, theirs = (
        (x - exact)[finite].abs().max().item() for x in (found, log_softmax_reference(logits))
    )
    assert error <= 2 * theirs + 1e-6
    own = logits.contiguous()
    assert log_softmax(own, out=own) is own
    assert torch.equal(own, found) or vocabulary == 1
    assert calls == {("log_softmax", "native"): 2}


def test_log_softmax_of_nan_and_nothing(variant: str) -> None:
    logits = _randn(4, 40)
    logits[1, 7], logits[2], logits[3, 39] = torch.nan, -INF, INF
    assert torch.equal(log_softmax(logits).isnan(), log_softmax_reference(logits).isnan())


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("k", [1, 8, 63])
@pytest.mark.parametrize(("b", "m", "v"), [(1, 1, 64), (3, 4, 129), (2, 5, 5000), (1, 4, 50264)])
def test_k_best(
    variant: str, b: int, m: int, v: int, k: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "threads_for", lambda work: threads)
    log_probs, scores = _randn(b, m, v), _randn(b, m, seed=1)
    wanted = best_of_log_probs_reference(log_probs, scores, k)
    strided = torch.full((b, m, v + 3), 9.0)
    strided[:, :, :v] = log_probs
    for given, score in ((log_probs, scores), (strided[:, :, :v], scores.t().contiguous().t())):
        found = best_of_log_probs(given, score, k)
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[1], wanted[1])
    assert calls == {("kbest", "native"): 2}


def test_k_best_of_equal_values(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch ranks if two winners, or a winner and the first loser, are equal.

    Other equal values do not matter.
    """
    asked: list[int] = []
    monkeypatch.setattr(
        "fastgen.ops.selection.kbest.best_of_log_probs_reference",
        lambda *given: asked.append(1) or best_of_log_probs_reference(*given),
    )
    log_probs = torch.arange(-600.0, 0.0).view(1, 2, 300)
    for place, again in (((0, 3), False), ((1, 290), True), ((1, 296), True)):
        equal = log_probs.clone()
        equal[0][place] = equal[0, 1, 297] if again else equal[0, 0, 9]
        found, wanted = (
            best(equal, torch.zeros(1, 2), 4)
            for best in (best_of_log_probs, best_of_log_probs_reference)
        )
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[1], wanted[1])
        assert bool(asked) == again
        asked.clear()
    log_probs[0, 0, 5] = torch.nan
    assert best_of_log_probs(log_probs, torch.zeros(1, 2), 4)[0][0, 0].isnan()
    assert asked == [1]


def test_k_best_of_none(variant: str) -> None:
    with pytest.raises(RuntimeError):
        best_of_log_probs(_randn(1, 2, 300), torch.zeros(1, 2), -1)


def test_out_of_another_shape(variant: str) -> None:
    with pytest.warns(UserWarning, match="was resized"):
        assert log_softmax(_randn(8, 40), out=torch.empty(1, 40)).shape == (8, 40)
    assert calls == {("log_softmax", "reference"): 1}


def test_another_default_device(variant: str) -> None:
    log_probs, scores = _randn(2, 3, 300), torch.zeros(2, 3)
    with torch.device("meta"):
        found = best_of_log_probs(log_probs, scores, 4)
    assert torch.equal(found[1], best_of_log_probs_reference(log_probs, scores, 4)[1])


def test_k_best_of_few_that_are_left(variant: str) -> None:
    log_probs = torch.full((2, 3, 200), -INF)
    log_probs[:, :, 150] = _randn(2, 3)
    found = best_of_log_probs(log_probs, torch.zeros(2, 3), 3)
    assert torch.equal(found[1], best_of_log_probs_reference(log_probs, torch.zeros(2, 3), 3)[1])


@pytest.mark.parametrize("family", ["bart", "gpt2", "t5", "llama"])
def test_whole_calls(own_variant: str, family: str) -> None:
    """The tokens are those of transformers, whichever implementation runs."""
    model = zoo.build(family, torch.float32)
    call = zoo.batch(model, 3, 7) | {
        "num_beams": 4,
        "max_new_tokens": 20,
        "no_repeat_ngram_size": 3,
    }
    with fastgen.disabled():
        wanted = model.generate(**call)
    assert torch.equal(model.generate(**call), wanted)
    assert calls["kbest", "native"] > 5
    status = fastgen.status()
    assert status.native == f"for {own_variant}"
    assert f"operations in C for the CPU: for {own_variant}" in str(status)
    calls.clear()
    model.double().generate(**call)
    assert calls["log_softmax", "native"] == calls["beam_attention", "native"] == 0


def test_c_runs_unless_a_setting_says_otherwise(
    variant: str, setting: Callable[[str, str], None]
) -> None:
    for value in ("auto", "native"):
        setting("FASTGEN_OPS", value)
        assert native.library() is not None
        assert native.state() == f"for {variant}"
    setting("FASTGEN_OPS", "reference")
    assert native.library() is None
    assert native.state() == f"for {variant}, not used: FASTGEN_OPS=reference"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Look for libraries in an empty folder, with FASTGEN_OPS unset."""
    monkeypatch.setattr(native, "LIBRARIES", tmp_path)
    monkeypatch.delenv("FASTGEN_OPS", raising=False)
    config.reload()
    native.found.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    native.found.cache_clear()
    config.reload()


def test_no_library(folder: Path, setting: Callable[[str, str], None]) -> None:
    assert native.library() is None
    variant = torch.backends.cpu.get_cpu_capability().lower()
    if variant in build.variants():
        assert f"{variant}.so is missing" in native.state()
    (folder / build.REASON).write_text("there was no compiler\n")
    native.found.cache_clear()
    assert native.state() == "none: there was no compiler"
    setting("FASTGEN_OPS", "native")
    with pytest.raises(
        RuntimeError,
        match="FASTGEN_OPS=native, but there are no operations in C here: there was no",
    ):
        native.library()


def test_doctor_says_why(folder: Path) -> None:
    (folder / build.REASON).write_text("there was no compiler\n")
    (found,) = [finding for finding in checks.devices() if "in C" in finding.text]
    assert (found.level, found.text.partition(": ")[2]) == ("note", "none: there was no compiler")
    assert ("build.py compiles them" in found.advice) == (
        native.found().variant in build.variants()
    )


@pytest.mark.parametrize("early", [True, False, "never"])
@pytest.mark.parametrize("penalty", [1.0, 0.0, -1.5, 2.0])
@pytest.mark.parametrize("beams", [1, 3, 5])
def test_choice(variant: str, beams: int, penalty: float, early: Any) -> None:
    """The result of selecting among a step's candidates follows the rules in torch."""
    decided = 0
    for trial in range(60):
        search, candidates, length = choice(trial, beams, penalty, early)
        calls.clear()
        found = search._choose(candidates, length)
        assert calls["choice", "native"] == 1
        assert_alike(found, search.by_rules(candidates, length))
        decided += bool(((~candidates.hits).sum(1) >= beams).all())
    assert decided > 20


def test_choice_between_equals(variant: str) -> None:
    """torch decides for equal scores, NaN and infinities, and if too few candidates live on."""
    by = native.library()
    assert by is not None
    values, index = torch.tensor([[-1.0, -2.0, -3.0, -4.0]]), torch.arange(4)[None]
    none, nothing = (
        torch.zeros(1, 4, dtype=torch.bool),
        torch.full((1, 2), TransformersRule.mask_value),
    )

    def undecided(values: Tensor, hits: Tensor, finished: Tensor) -> bool:
        done, open_ = finished > -1e8, torch.ones(1, dtype=torch.bool)
        return (
            native_selection.choose(
                by, values, index, index, hits, finished, done, open_, -1e9, 1.0, 1.0, False
            )
            is None
        )

    assert not undecided(values, none, nothing)
    hits = torch.tensor([[True, False, False, False]])
    assert not undecided(values, hits, torch.tensor([[-0.5, -2.5]]))
    assert undecided(values, hits, torch.tensor([[-0.5, -1.0]]))
    assert undecided(values, torch.tensor([[True, True, True, False]]), nothing)
    for wrong in (-1.0, torch.nan, -INF, -1e9):
        assert undecided(torch.tensor([[-1.0, wrong, -3.0, -4.0]]), none, nothing), wrong


def test_without_torchs_threads(
    variant: str, setting: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operations run on one thread, when requested, if torch's OpenMP library lacks a function."""
    by = native.found().library
    assert by is not None
    alone = native.Found(variant, by._replace(run=0))
    monkeypatch.setattr(native, "found", lambda: alone)
    monkeypatch.setattr(native, "threads_for", lambda work: 3)
    assert native.library() is None
    setting("FASTGEN_OPS", "native")
    logits = _randn(5, 300)
    torch.testing.assert_close(log_softmax(logits), log_softmax_reference(logits))
    assert calls == {("log_softmax", "native"): 1}
    assert native.state().startswith(f"for {variant}, on one thread: torch's OpenMP library has no")


def test_library_of_other_sources(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if variant not in native_fuzz.variants():
        pytest.skip("this process cannot load the library")
    monkeypatch.setattr(build, "fingerprint", lambda: 7)
    with pytest.raises(OSError, match=r"was made from other sources; .*build\.py` makes it anew"):
        native.load(variant)


def test_other_instructions() -> None:
    with pytest.raises(
        OSError,
        match=r"torch reports default as the instruction set of this .* processor, and there",
    ):
        native.load("default")


@pytest.mark.skipif(sys.platform != "linux", reason="built on Linux alone")
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "could not be run"),
        (
            "echo vector.h:1: error: no such thing >&2; exit 3",
            "ended with 3: vector.h:1: error: no such thing",
        ),
    ],
)
def test_no_compiler(
    script: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier libraries are removed, and the folder holds the reason."""
    compiler, folder = tmp_path / "compiler", tmp_path / "lib"
    folder.mkdir()
    (folder / "avx2.so").touch()
    if script is not None:
        compiler.write_text(f"#!/bin/sh\n{script}\n")
        compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(compiler))
    assert reason in (build.build(folder) or "")
    assert [path.name for path in folder.iterdir()] == [build.REASON]
    assert reason in (folder / build.REASON).read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="built on Linux alone")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "file" in (build.build(tmp_path / "file" / "lib") or "")


def test_needs_nothing_to_be_built(tmp_path: Path) -> None:
    """The script runs in a Python without torch and without the package."""
    done = subprocess.run(
        [sys.executable, "-S", "-c",
        f"import runpy; runpy.run_path({str(Path(build.__file__))!r})"], cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [0, 1, 4, 7, 8, 13, 97, 150, 301])
def test_products(variant: str, rows: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products cover single and several blocks and tasks, and whole and partial panels.

    Inputs take one pass over K, or several.
    """
    monkeypatch.setattr(native, "threads_for", lambda work: threads)
    by = native.found().library
    assert by is not None
    for outputs, inputs in (
        (1, 1),
        (16, 32),
        (40, 512),
        (130, 513),
        (1100, 64),
        (64, 1030),
        (129, 31),
    ):
        x, weight, bias = (
            _randn(rows, inputs),
            _randn(outputs, inputs, seed=1),
            _randn(outputs, seed=2),
        )
        residual, out = _randn(rows, outputs, seed=3), torch.full((rows, outputs), torch.nan)
        found = native_products.product(
            by, x, native_products.packed(by, weight), bias, "relu", residual, out
        )
        expected = torch.relu(x.double() @ weight.double().T + bias) + residual
        torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


def test_nothing_runs_in_c_where_torch_does_not_say_who_observes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    native.found.cache_clear()
    try:
        monkeypatch.delattr(torch._C, "_len_torch_dispatch_stack")
        assert native.found().library is None
        assert "_len_torch_dispatch_stack" in native.state()
    finally:
        native.found.cache_clear()
