"""`fastgen doctor`, run as a user runs it, in broken or incomplete environments."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fastgen.cli import main
from fastgen.cli.environment import checks, hook
from fastgen.cli.environment.checks import Finding, examine, openmp_runtimes
from fastgen.cli.environment.doctor import CHECKS
from fastgen.cli.environment.self_check import self_check
from fastgen.ops import processor
from fastgen.patches.engine import engine
from fastgen.patches.engine.registry import registry
from fastgen.patches.transformers import PATCHES
from fastgen.patches.transformers.introspection import canary

ROOT = Path(__file__).parents[2]
CODE = """
import sys
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec
hidden = lambda cls, name, *place: None if name.partition(".")[0] in {hidden} else find_spec(name, *place)
PathFinder.find_spec = classmethod(hidden)

from fastgen.cli import main

sys.exit(main())
"""  # noqa: E501
FAIRSEQ = ("fairseq", "fairseq_cli")

PATCHED = len(PATCHES)


def doctor(
    *words: str, hidden: tuple[str, ...] = FAIRSEQ, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `fastgen doctor` with the modules in `hidden` not installed."""
    command = [sys.executable, "-c", CODE.format(hidden=hidden), "doctor", *words]
    environment = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    } | variables
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300, check=False
    )


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, list[dict[str, str]]]:
    """Return the checks printed as JSON, after comparing them with the exit status."""
    assert done.stdout.startswith("{"), done.stderr
    found = json.loads(done.stdout)
    troubles = texts(found["checks"], "trouble")
    assert found["troubles"] == len(troubles)
    assert done.returncode == (1 if troubles else 0)
    return found["checks"]


def texts(found: dict[str, list[dict[str, str]]], level: str, *subjects: str) -> list[str]:
    return [
        f["text"] for subject in subjects or found for f in found[subject] if f["level"] == level
    ]


def stub(folder: Path, version: str, body: str = "") -> str:
    """Write a transformers package whose modules are empty to a folder; return PYTHONPATH."""
    modules = [patch.address.module.split(".") for patch in PATCHES]
    packages = {
        "/".join([*names[:end], "__init__"]) for names in modules for end in range(1, len(names))
    }
    for module in packages | {"/".join(names) for names in modules}:
        file = folder / f"{module}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            f"__version__ = {version!r}\n{body}" if module == "transformers/__init__" else ""
        )
    return f"{folder}{os.pathsep}{ROOT}"


def test_all_is_well() -> None:
    done = doctor(hidden=())
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("fastgen ")
    assert "all is well" in done.stdout.splitlines()[0]
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert set(CHECKS) <= set(lines)
    assert f"ok       torch {torch.__version__}" in done.stdout
    assert f"ok       transformers: {PATCHED} patches applied" in lines
    assert any(line.startswith("ok       fairseq: ") for line in lines)
    by = "BART and GPT-2: 9 parts agree; 12 calls ran fastgen's loops, operations by "
    assert any(line.removeprefix(f"ok       {by}") in ("torch", "C and torch") for line in lines)
    assert any(
        "fairseq's transformer, beams and greedy: equal tokens; 2 calls ran fastgen's" in line
        for line in lines
    )
    assert "trouble" not in done.stdout


@pytest.mark.slow
def test_what_is_missing_and_not_needed_is_no_trouble() -> None:
    found = findings(doctor("--json", hidden=(*FAIRSEQ, "triton")))
    assert not texts(found, "trouble")
    assert "fairseq not installed" in texts(found, "note", "versions")[0]
    assert any(
        "fairseq is not installed; pip install" in text for text in texts(found, "note", "patches")
    )
    if not torch.cuda.is_available():
        assert "Triton is not installed; it is not needed on a CPU" in texts(
            found, "ok", "versions"
        )


@pytest.mark.slow
def test_triton_is_asked_for_and_missing() -> None:
    found = findings(doctor("--json", hidden=(*FAIRSEQ, "triton"), FASTGEN_OPS="triton"))
    assert any(
        "FASTGEN_OPS=triton requests its kernels" in text
        for text in texts(found, "trouble", "versions")
    )
    assert any(
        "there are no kernels here" in text for text in texts(found, "trouble", "self-check")
    )


@pytest.mark.slow
def test_the_interpreter_is_left_on() -> None:
    asked = findings(
        doctor("--json", TRITON_INTERPRET="1", FASTGEN_OPS="triton", FASTGEN_SKIP="transformers")
    )
    assert texts(asked, "trouble") == [
        "TRITON_INTERPRET=1: Triton's kernels run in Python, thousands of times slower"
    ]
    assert any(
        f"transformers: {PATCHED} patches skipped: FASTGEN_SKIP" in text
        for text in texts(asked, "note", "patches")
    )


def test_no_toolkit() -> None:
    found = findings(doctor("--json", hidden=(*FAIRSEQ, "transformers")))
    assert texts(found, "trouble") == ["neither transformers nor fairseq is installed"]


def test_no_torch() -> None:
    found = findings(doctor("--json", hidden=(*FAIRSEQ, "transformers", "torch")))
    assert "torch cannot be imported; nothing runs without it" in texts(
        found, "trouble", "versions"
    )


def test_an_unsupported_transformers(tmp_path: Path) -> None:
    found = findings(doctor("--json", PYTHONPATH=stub(tmp_path, "4.40.0")))
    version, patches = texts(found, "trouble")
    assert version.startswith("transformers 4.40.0 (>=5.17 is supported")
    assert version.endswith("fastgen does not accelerate it")
    assert patches.startswith(
        f"transformers: {PATCHED} patches skipped: transformers 4.40.0 found; "
        ">=5.17 is supported; pip"
    )
    assert (
        texts(found, "note", "self-check")[0]
        == "transformers: not tried: its decode loops are not patched"
    )


def test_a_transformers_whose_functions_are_others(tmp_path: Path) -> None:
    found = findings(doctor("--json", PYTHONPATH=stub(tmp_path, "5.20.0")))
    said = [text.partition(" failed: ")[0] for text in texts(found, "trouble", "patches")]
    assert "transformers.attention:" in said
    assert sum(int(text.split()[1]) if text.endswith(" patches") else 1 for text in said) == PATCHED


def test_a_broken_transformers(tmp_path: Path) -> None:
    done = doctor(PYTHONPATH=stub(tmp_path, "5.20.0", "raise RuntimeError('half installed')"))
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if line.lstrip().startswith("trouble")]
    assert line.endswith("cannot be imported: RuntimeError: half installed")
    assert done.stdout.splitlines()[0].endswith(": 1 trouble")


@pytest.mark.slow
def test_switched_off() -> None:
    found = findings(doctor("--json", FASTGEN="0"))
    assert (
        texts(found, "trouble", "patches")[0] == f"transformers: {PATCHED} patches off: FASTGEN=0"
    )
    assert texts(found, "note", "variables")[0].startswith("FASTGEN=0 (")


def test_variables_that_hold_what_they_cannot() -> None:
    wrong = {
        "FASTGEN": "maybe",
        "FASTGEN_SKIP": "transformers.bem_search",
        "FASTGEN_CACHE_DIR": "~nobody-here/x",
    }
    done = subprocess.run(
        [sys.executable, "-m", "fastgen", "doctor", "--json"],
        capture_output=True, text=True, cwd=ROOT, env=os.environ | wrong, timeout=300, check=False,
    )  # fmt: skip
    found = findings(done)
    troubles = [f for f in found["variables"] if f["level"] == "trouble"]
    assert {f["text"].partition(":")[0] for f in troubles} == {
        f"{name}={value}" for name, value in wrong.items()
    }
    assert {f["advice"] for f in troubles} == {
        "unset it for the default, 1", "did you mean transformers.beam_search?",
        "name another folder, or unset it",
    }  # fmt: skip
    assert len(texts(found, "trouble")) == 3
    assert f"transformers: {PATCHED} patches applied" in texts(found, "ok", "patches")


@pytest.mark.slow
def test_compat() -> None:
    found = findings(doctor("--json", FASTGEN="compat"))
    off = next(f for f in found["patches"] if f["level"] == "trouble")
    assert off["text"] == f"transformers: {PATCHED - 1} patches off: FASTGEN=compat"
    assert off["advice"] == "unset FASTGEN"
    assert "transformers.first_tokens: applied" in texts(found, "ok", "patches")
    assert texts(found, "note", "variables")[0].startswith("FASTGEN=compat (")


@pytest.mark.slow
def test_variables_and_folders(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "cache"
    found = findings(doctor("--json", FASTGEN_STRCT="1", FASTGEN_CACHE_DIR=str(folder)))
    assert not texts(found, "trouble")
    advice = {f["text"]: f["advice"] for fs in found.values() for f in fs}
    assert (
        advice["FASTGEN_STRCT is not a variable of fastgen and has no effect"]
        == "did you mean FASTGEN_STRICT?"
    )
    assert any(
        text.startswith(f"{folder} cannot be written")
        for text in texts(found, "note", "surroundings")
    )


def test_threads_and_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = processor.usable_cores(tmp_path / "no quota")
    quota = tmp_path / "cpu.max"
    for text, allowed in (
        ("max 100000", cores),
        ("100000 100000", 1),
        ("50000 100000", 1),
        ("9900000 100000", cores),
    ):
        quota.write_text(f"{text}\n")
        assert processor.usable_cores(quota) == min(allowed, cores)

    monkeypatch.setattr(processor, "usable_cores", lambda: 4)
    for threads, level in ((8, "note"), (4, "ok"), (1, "note")):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        first = examine(checks.surroundings)[0]
        assert first.level == level
        assert first.text.startswith(f"threads: {threads}, cores: 4")
        assert first.advice == ("OMP_NUM_THREADS=4" if threads > 4 else "")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_two_openmp_runtimes(tmp_path: Path) -> None:
    (libgomp,) = {Path(file) for file in openmp_runtimes(Path("/proc/self/maps").read_text())}
    copy = str(shutil.copy(libgomp, tmp_path / "libgomp-copy.so.1"))
    # Loaded after torch, because otherwise the loader would take the copy for torch's own library:
    # both have the same internal name.
    path = stub(tmp_path, "4.40.0", f"import ctypes, torch; ctypes.CDLL({copy!r})")
    found = findings(doctor("--json", PYTHONPATH=path))
    (text,) = [text for text in texts(found, "note", "surroundings") if "OpenMP" in text]
    assert text.startswith("2 OpenMP runtimes in one process")
    assert str(tmp_path) in text


def test_maps_are_read_to_the_end_of_a_path() -> None:
    line = "7f00-7f01 r-xp 0000 08:01 1234   /opt/with space/{}\n"
    names = ("libgomp.so.1", "libiomp5.so", "libomp-7f.so", "libompi.so", "libc.so.6")
    maps = (
        "".join(line.format(name) for name in names)
        + "7f00-7f01 rw-p 0000 00:00 0 \n"
        + line.format(names[0])
    )
    assert openmp_runtimes(maps) == [f"/opt/with space/{name}" for name in sorted(names[:3])]


def test_other_tokens_are_trouble(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(canary, "agree", lambda: (False, "BART gave other tokens"))
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "trouble  tokens differ from those without fastgen: BART gave other tokens" in shown
    assert "-> set FASTGEN=0 for now" in shown

    monkeypatch.setattr(canary, "agree", lambda: (True, "equal"))  # compares no calls at all
    found = examine(self_check)[0]
    assert (found.level, found.text) == ("trouble", "equal, but fastgen's loops did not run")

    def agrees_in_parity_mode() -> tuple[bool, str]:
        """Report equal outputs: in parity mode, the toolkit's own output is returned both times."""
        engine.compared("different")
        return True, "equal"

    registry.counts.parity.clear()
    monkeypatch.setattr(canary, "agree", agrees_in_parity_mode)
    found = examine(self_check)[0]
    assert (found.level, found.text) == (
        "trouble",
        "tokens differ from those without fastgen: equal",
    )


@pytest.mark.slow
def test_what_tiny_models_leave_off() -> None:
    found = findings(doctor("--json", FASTGEN_STEP="module", FASTGEN_SKIP="transformers.sample"))
    (equal,) = texts(found, "ok", "self-check")
    assert "6 calls ran fastgen's loops" in equal
    (left_off,) = [
        text
        for text in texts(found, "note", "self-check")
        if "in 6 of the calls: decode steps" in text
    ]
    assert left_off.endswith(
        "decode steps run through the model's own modules: FASTGEN_STEP=module"
    )


def test_the_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.sysconfig, "get_path", lambda name: str(tmp_path))

    def said() -> Finding:
        (found,) = [
            finding for finding in examine(checks.surroundings) if hook.NAME in finding.text
        ]
        return found

    assert said().text == f"fastgen.pth is not in {tmp_path}: programs need `import fastgen`"
    (tmp_path / hook.NAME).write_text(hook.LINE)
    assert (
        said().text
        == f"fastgen.pth is in {tmp_path}: every program of this environment runs with fastgen"
    )
    (tmp_path / hook.NAME).write_text("import other")
    assert (said().level, said().text) == (
        "note",
        f"{tmp_path}/fastgen.pth has other content: left unchanged",
    )


def test_a_check_that_fails_is_trouble() -> None:
    def check() -> Any:
        yield Finding("ok", "first")
        raise LookupError("gone")

    assert examine(check) == [
        Finding("ok", "first"),
        Finding("trouble", "this check raised LookupError: gone"),
    ]
