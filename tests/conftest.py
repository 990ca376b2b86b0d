"""What must hold before a test module is imported: no network, one thread, Triton's interpreter without a GPU."""

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
# Tests compare bits and run several at a time: one thread each. Processes that tests start inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
# What fastgen keeps for later calls must neither come from nor go to the user's own folder.
os.environ["FASTGEN_CACHE_DIR"] = tempfile.mkdtemp(prefix="fastgen-tests-")
atexit.register(shutil.rmtree, os.environ["FASTGEN_CACHE_DIR"], ignore_errors=True)
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        "1"  # read when a kernel is declared, so before fastgen.ops is imported
    )
    with contextlib.suppress(ModuleNotFoundError):
        from tests.support import interpreter

        interpreter.hasten()


def pytest_configure() -> None:
    """End the run if it is not on the transformers that it was to be on (`make test-all` names the oldest one)."""
    wanted = os.environ.get("EXPECT_TRANSFORMERS")
    found = _version("transformers")
    if wanted and found != wanted:
        pytest.exit(
            f"EXPECT_TRANSFORMERS={wanted}, but transformers {found} is the one that would be imported",
            4,
        )
    if os.environ.get("PRETEND_GPU") == "1":
        from tests.support.pretended import Pretended

        Pretended(pytest.MonkeyPatch())


LONGEST = (
    "graphs", "corpus_run", "kernels", "ray", "fairseq_cli", "compiled", "serve", "fairseq_workers", "kernel_calls",
    "sanitizers",
)  # fmt: skip
"""Files that take more than a minute and a half each."""


def pytest_collection_finish() -> None:
    """Leave what there is now out of garbage collection, which would look at millions of objects each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _canary() -> None:
    """On a transformers newer than tested, have the canary answer before a test replaces something that it runs."""
    from fastgen.patches.transformers import TOOLKIT

    version = _version("transformers")
    if version != "not installed" and not TOOLKIT.has_tested(version):
        from tests.support import zoo

        model = zoo.build("gpt2")
        model.generate(**zoo.batch(model, 1, 2), max_new_tokens=1)


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """What a test, or a command that it calls in this process, sets for the whole process is set back behind it."""
    from fastgen.models.layers import packed_weights

    threads = torch.get_num_threads()
    with torch.random.fork_rng(), torch.set_grad_enabled(torch.is_grad_enabled()):
        yield
    torch.set_num_threads(threads)
    if packed_weights.has_given_up():
        packed_weights.release()


@pytest.fixture(autouse=True)
def _processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is faster depends on the processor: here it is always one of the kind on which most goes to oneDNN."""
    from fastgen.ops import processor

    monkeypatch.setattr(processor, "on_intel", lambda: False)
    monkeypatch.setattr(processor, "on_amd", lambda: True)
    monkeypatch.setattr(processor, "on_zen5", lambda: False)


@pytest.fixture(autouse=True)
def _system_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are packed whatever else takes the machine's memory now."""
    from fastgen.models.memory import budget

    monkeypatch.setattr(budget, "system_memory", lambda: None)


@pytest.fixture
def by_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there are no operations in C."""
    from fastgen.ops import native

    monkeypatch.setattr(native, "library", lambda: None)


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Sets a `FASTGEN_*` variable for the time of a test."""
    from fastgen import config

    def change(name: str, value: str) -> None:
        monkeypatch.setenv(name, value)
        config.reload()

    yield change
    monkeypatch.undo()
    config.reload()


def pytest_report_header() -> str:
    return f"torch {torch.__version__}, transformers {_version('transformers')}, cuda {torch.version.cuda or 'none'}"


@pytest.hookimpl(tryfirst=True)  # before pytest looks at `-m`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest files first, so that no worker waits in the end; mark what the sample leaves out."""
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
    """Return the numbers of tests, where a worker of pytest-xdist reports them from."""
    output: dict[str, dict[str, int]] = getattr(config, "workeroutput", vars(config))
    return output.setdefault("fastgen_tests", {})


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node: Any) -> None:
    """Take over the numbers that a worker has counted: the process that reports collects nothing itself."""
    _counts(node.config).update(getattr(node, "workeroutput", {}).get("fastgen_tests", {}))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    counts = _counts(config)
    if counts:
        terminalreporter.write_line(
            f"of {counts['tests']} tests `make test` runs {counts['sample']}, `make test-all` {counts['all']}, "
            "and `make test-every` every combination of parameters"
        )


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
