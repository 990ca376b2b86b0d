"""Operations in C under AddressSanitizer and UndefinedBehaviorSanitizer, in separate processes.

`make sanitize` runs more rounds of the same.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from fastgen.ops.native import build
from tests import native_fuzz

ROOT = Path(__file__).parents[2]
REASON = native_fuzz.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of libraries built with sanitizers."""
    made = tmp_path_factory.mktemp("sanitized") / "lib"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", "gcc")
        assert build.main(["--sanitize", str(made)]) is None
    return made


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.native_fuzz", str(folder), *arguments]
    environment = native_fuzz.environment()
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("rows", "AddressSanitizer: heap-buffer-overflow"),
        ("address", "runtime error: store to misaligned address"),
    ],
)
@pytest.mark.slow
def test_a_wrong_call_is_found(folder: Path, kind: str, message: str) -> None:
    """One row too many, and a misaligned address."""
    done = _run(folder, "--wrong", kind)
    assert done.returncode != 0
    assert message in done.stderr


@pytest.mark.slow
def test_odd_shapes(folder: Path) -> None:
    done = _run(folder, "--rounds", "31")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("31 rounds") == len(native_fuzz.variants())


@pytest.mark.slow
def test_tests_of_operations_and_steps(folder: Path) -> None:
    """Run the tests of search operations, of the largest number of rows, and of fairseq."""
    chosen = "not test_in_c or test_many_beams_and_heads or (test_fairseq and (bart or prenorm))"
    chosen = f"not neon and ({chosen})"
    done = _run(
        folder,
        "--pytest",
        "tests/ops/test_native_search.py",
        "tests/models/test_in_c.py",
        "-k",
        chosen,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
