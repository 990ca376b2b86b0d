"""Set up the test process: no network, one thread, and Triton's interpreter if there is no GPU."""

import atexit
import contextlib
import gc
import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests import sample

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Tests compare results bit for bit, and several run at a time, so each uses one thread. Processes
# that tests start inherit this setting.
os.environ["OMP_NUM_THREADS"] = "1"
# Keep fastgen's persistent cache out of the user's own folder.
os.environ["FASTGEN_CACHE_DIR"] = tempfile.mkdtemp(prefix="fastgen-tests-")
atexit.register(shutil.rmtree, os.environ["FASTGEN_CACHE_DIR"], ignore_errors=True)
torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Triton reads this when a kernel is declared, so set it before fastgen.ops is imported.
    os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(ModuleNotFoundError):
        from tests.support import interpreter

        interpreter.hasten()


def pytest_configure() -> None:
    """End the run if transformers is not the version in EXPECT_TRANSFORMERS.

    `make test-all` sets it to the oldest supported version.
    """
    wanted = os.environ.get("EXPECT_TRANSFORMERS")
    found = _version("transformers")
    if wanted and found != wanted:
        pytest.exit(
            f"EXPECT_TRANSFORMERS={wanted}, but transformers {found} is the one "
            "that would be imported",
            4,
        )
    if os.environ.get("PRETEND_GPU") == "1":
        from tests.support.pretended import Pretended

        Pretended(pytest.MonkeyPatch())


LONGEST = (
    "graphs", "corpus_run", "kernels", "ray", "fairseq_cli", "compiled", "serve", "fairseq_workers",
    "kernel_calls", "sanitizers",
)  # fmt: skip
"""Names of the test files that take more than 90 seconds each."""


def pytest_collection_finish() -> None:
    """Exclude everything collected so far from garbage collection.

    Otherwise each collection would traverse millions of objects.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _small_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fastgen run calls that it leaves to transformers because they are tiny."""
    from fastgen.patches.transformers.planning import small_call

    monkeypatch.setattr(small_call, "LIMITS", {})


@pytest.fixture(scope="session", autouse=True)
def _canary() -> None:
    """Run the canary before a test replaces what it runs, if transformers is newer than tested."""
    from fastgen.patches.transformers import TOOLKIT

    version = _version("transformers")
    if version != "not installed" and not TOOLKIT.has_tested(version):
        from tests.support import zoo

        model = zoo.build("gpt2")
        model.generate(**zoo.batch(model, 1, 2), max_new_tokens=1)


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Restore process-wide settings that a test, or a command it calls in this process, changes."""
    from fastgen.models.layers import packed_weights

    threads = torch.get_num_threads()
    with torch.random.fork_rng(), torch.set_grad_enabled(torch.is_grad_enabled()):
        yield
    torch.set_num_threads(threads)
    if packed_weights.has_stopped_packing():
        packed_weights.release()


@pytest.fixture(autouse=True)
def _processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that MKL is not native here, so that products of any number of rows run in C."""
    from fastgen.ops import processor

    monkeypatch.setattr(processor, "mkl_is_native", lambda: False)


@pytest.fixture(autouse=True)
def _system_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack weights regardless of how much of the machine's memory is in use."""
    from fastgen.models.memory import budget

    monkeypatch.setattr(budget, "system_memory", lambda: None)


@pytest.fixture
def by_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the operations in C."""
    from fastgen.ops import native

    monkeypatch.setattr(native, "library", lambda *_: None)


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Yield a function that sets a `FASTGEN_*` variable for the duration of a test."""
    from fastgen import config

    def change(name: str, value: str) -> None:
        monkeypatch.setenv(name, value)
        config.reload()

    yield change
    monkeypatch.undo()
    config.reload()


def pytest_report_header() -> str:
    return (
        f"torch {torch.__version__}, transformers {_version('transformers')}, "
        f"cuda {torch.version.cuda or 'none'}"
    )


@pytest.hookimpl(tryfirst=True)  # before pytest looks at `-m`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the longest files first, so that no worker idles at the end; mark unsampled tests."""
    order = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
    not_in_cover, not_in_sample = sample.beyond(items)
    for item in not_in_cover:
        item.add_marker(pytest.mark.combination)
    for item in (*not_in_cover, *not_in_sample):
        item.add_marker(pytest.mark.slow)
    slow = sum(item.get_closest_marker("slow") is not None for item in items)
    _counts(config).update(
        tests=len(items), sample=len(items) - slow, all=len(items) - len(not_in_cover)
    )
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def _counts(config: pytest.Config) -> dict[str, int]:
    """Return the test counts, stored where a pytest-xdist worker reports them from."""
    output: dict[str, dict[str, int]] = getattr(config, "workeroutput", vars(config))
    return output.setdefault("fastgen_tests", {})


@pytest.hookimpl(optionalhook=True)  # from pytest-xdist
def pytest_testnodedown(node: Any) -> None:
    """Take over the counts of a worker, as the reporting process does not collect tests itself."""
    _counts(node.config).update(getattr(node, "workeroutput", {}).get("fastgen_tests", {}))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    counts = _counts(config)
    if counts:
        terminalreporter.write_line(
            f"of {counts['tests']} tests `make test` runs {counts['sample']}, "
            f"`make test-all` {counts['all']}, "
            "and `make test-every` every combination of parameters"
        )


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
