"""Checks of `fastgen doctor`: each is a function that yields findings and changes nothing."""

import difflib
import importlib
import os
import platform
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import fastgen
from fastgen.cli.environment import hook
from fastgen.cli.environment.status import import_targets
from fastgen.config import VARIABLES, settings
from fastgen.errors import CommandError
from fastgen.patches import fairseq, transformers


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    Attributes:
        level: ok; note, for what costs speed or is good to know; trouble, if fastgen does not run,
            or not as requested.
        text: what was found.
        advice: what to do; may be empty.
    """

    level: Literal["ok", "note", "trouble"]
    text: str
    advice: str = ""


Check = Callable[[], Iterable[Finding]]


def examine(check: Check) -> list[Finding]:
    """Return the findings of a check; an exception counts as trouble, whatever the environment."""
    found: list[Finding] = []
    try:
        found.extend(check())
    except Exception as error:
        found.append(Finding("trouble", f"this check raised {error_line(error)}"))
    return found


def error_line(error: Exception) -> str:
    """Return an exception's type and message as one string."""
    return f"{type(error).__name__}: {error}"


def versions() -> Iterator[Finding]:
    """Check Python, torch, Triton and the toolkits against the versions that fastgen supports."""
    python = metadata.metadata("fastgen-nlp")["Requires-Python"]
    yield _against("Python", platform.python_version(), python, advice="install a supported Python")
    torch = _torch()
    if torch is None:
        yield Finding(
            "trouble", "torch cannot be imported; nothing runs without it", "pip install torch"
        )
        return
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs"
    yield _against("torch", torch.__version__, _required("torch"), build)
    yield _triton(torch)
    import_targets()
    toolkits = fastgen.status().toolkits
    hints = {
        toolkit.name: toolkit.install_hint for toolkit in (transformers.TOOLKIT, fairseq.TOOLKIT)
    }
    for toolkit in toolkits:
        found = str(getattr(sys.modules.get(toolkit.name), "__version__", toolkit.found))
        fits = found[0].isdigit() and SpecifierSet(toolkit.supported).contains(
            found, prereleases=True
        )
        text = (
            f"{toolkit.name} {found} "
            f"({toolkit.supported} is supported, {toolkit.tested} the newest tested)"
        )
        if not fits and found[0].isdigit():
            yield Finding("trouble", f"{text}: fastgen does not accelerate it", hints[toolkit.name])
        elif fits and Version(found) > Version(toolkit.tested):
            yield Finding(
                "note",
                f"{text}: newer than tested, so compared before it is accelerated",
            )
        else:
            yield Finding("ok" if fits else "note", text)
    if all(toolkit.found == "not installed" for toolkit in toolkits):
        yield Finding(
            "trouble",
            "neither transformers nor fairseq is installed",
            f'pip install "transformers{_required("transformers")}"',
        )


def devices() -> Iterator[Finding]:
    """Report the GPUs, the vector units of the CPU, and the kernels that use them."""
    torch = _torch()
    if torch is None:
        return
    from fastgen.ops import linear, native

    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        size = (
            f"{device.total_memory / 2**30:.0f} GiB, "
            f"compute capability {device.major}.{device.minor}"
        )
        yield Finding("ok", f"cuda:{index}: {device.name}, {size}")
    if torch.version.cuda and not torch.cuda.is_available():
        yield Finding(
            "note",
            "torch is built for CUDA but finds no device",
            "run nvidia-smi to see whether the driver finds one",
        )
    if not torch.version.cuda and Path("/dev/nvidia0").exists():
        yield Finding(
            "note",
            "there is an NVIDIA device, but this torch is built for CPUs only",
            "install torch's CUDA build",
        )

    capabilities = torch.cpu.get_capabilities()
    units = {
        "avx2": "AVX2",
        "avx512_f": "AVX-512",
        "avx512_bf16": "AVX-512 for bf16",
        "amx_bf16": "AMX",
    }
    available = (
        ", ".join(text for name, text in units.items() if capabilities.get(name))
        or "no x86-64 extensions"
    )
    yield Finding(
        "ok",
        f"CPU: {capabilities.get('cpu_name') or platform.machine()}; vector units: {available}",
    )
    yield Finding("ok", f"fp32 linear layers on the CPU: {linear.described()}")
    text = f"attention and token selection in fp32 on the CPU, in C: {native.state()}"
    if native.found().library is None:
        compilable = native.found().variant in native.build.variants()
        yield Finding(
            "note",
            text,
            f"python {native.build.__file__} compiles them (needs cc, gcc or clang)"
            if compilable
            else "",
        )
    else:
        yield Finding("ok", text)
    if not (
        capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16")
    ):
        yield Finding(
            "note",
            "this CPU has no bf16 instructions: bf16 models are slow on it",
            "load in fp32",
        )


def patches() -> Iterator[Finding]:
    """Report patches by toolkit, state and reason, and toolkits that fail to import."""
    modules: defaultdict[str, list[str]] = defaultdict(list)
    for module, problem in import_targets().items():
        modules[problem].append(module)
    for problem, names in modules.items():
        advice = (
            "fairseq needs fastgen's patches to be imported: unset FASTGEN"
            if settings().mode == "0"
            else ""
        )
        yield Finding("trouble", f"{', '.join(names)} cannot be imported: {problem}", advice)

    groups: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
    for row in fastgen.status().rows:
        groups[row.name.partition(".")[0], row.state, row.reason].append(row.name)
    for (toolkit, state, reason), names in groups.items():
        subject = f"{toolkit}: {len(names)} patches" if len(names) > 1 else f"{names[0]}:"
        text = f"{subject} {state}" + (f": {reason}" if reason else "")
        if state == "applied":
            differs = "as the canary found" in reason
            yield Finding("trouble" if differs else "note" if reason else "ok", text)
        elif "is not installed" in reason or reason == "FASTGEN_SKIP":
            yield Finding("note", text)
        elif not modules or state != "pending":  # the failed imports above explain the others
            yield Finding("trouble", text, "unset FASTGEN" if state == "off" else "")


def variables() -> Iterator[Finding]:
    """Report the environment variables that are set, their values and their effect."""
    known = {variable.name: variable for variable in VARIABLES}
    values = {name: variable.read(os.environ) for name, variable in known.items()}
    changed = [name for name, value in values.items() if value != known[name].default]
    if not changed:
        yield Finding("ok", "all FASTGEN_* variables have their defaults")
    for name in changed:
        yield Finding("note", f"{name}={values[name]} ({known[name].help})")
    for name in sorted(os.environ):
        if name.startswith("FASTGEN") and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            advice = f"did you mean {close[0]}?" if close else "`fastgen status --all` lists them"
            yield Finding("note", f"{name} is not a variable of fastgen and has no effect", advice)
    if os.environ.get("TRITON_INTERPRET") == "1":
        torch, text = (
            _torch(),
            "TRITON_INTERPRET=1: Triton's kernels run in Python, thousands of times slower",
        )
        used = settings().ops == "triton" or (torch is not None and torch.cuda.is_available())
        yield (
            Finding("trouble", text, "unset it")
            if used
            else Finding("note", f"{text}; not needed here")
        )


def surroundings() -> Iterator[Finding]:
    """Check threads, OpenMP, the `.pth` file of `fastgen install-hook`, and the cache folder."""
    torch = _torch()
    if torch is not None:
        from fastgen.ops import processor

        threads, cores = torch.get_num_threads(), processor.usable_cores()
        text = f"threads: {threads}, cores: {cores}"
        if threads > cores:
            yield Finding(
                "note",
                f"{text}; more threads than cores wait for each other",
                f"OMP_NUM_THREADS={cores}",
            )
        else:
            yield Finding("ok" if threads == cores else "note", text)
    maps = Path("/proc/self/maps")
    runtimes = openmp_runtimes(maps.read_text("utf-8", "replace")) if maps.exists() else []
    if len(runtimes) > 1:
        text = (
            f"{len(runtimes)} OpenMP runtimes in one process, each with threads of its own: "
            f"{', '.join(runtimes)}"
        )
        yield Finding("note", text, "install torch and numpy from one source (pip or conda)")
    folder = Path(sysconfig.get_path("purelib"))
    try:
        installed = hook.is_installed(folder)
        text = (
            "every program of this environment runs with fastgen"
            if installed
            else "programs need `import fastgen`"
        )
        yield Finding("ok", f"{hook.NAME} is {'' if installed else 'not '}in {folder}: {text}")
    except CommandError as error:
        yield Finding("note", str(error))
    cache = settings().cache_dir
    place = next(path for path in (cache, *cache.parents) if path.exists())
    if place.is_dir() and os.access(place, os.W_OK):
        yield Finding("ok", f"{cache} can be written")
    else:
        text = f"{cache} cannot be written: results are not kept between processes"
        yield Finding("note", text, "set FASTGEN_CACHE_DIR to another folder")


def openmp_runtimes(maps: str) -> list[str]:
    """Return the files of OpenMP runtimes in a process's memory map.

    Args:
        maps: contents of /proc/PID/maps.
    """
    names = ("libgomp", "libiomp5", "libomp.", "libomp-")
    files = {
        line.split(maxsplit=5)[-1]
        for line in maps.splitlines()
        if line.count(" ") >= 5 and "/" in line
    }
    return sorted(file for file in files if file.rpartition("/")[2].startswith(names))


def _torch() -> ModuleType | None:
    try:
        return importlib.import_module("torch")
    except Exception:  # `versions` reports a missing or broken torch
        return None


def _triton(torch: ModuleType) -> Finding:
    found = metadata.version("triton") if find_spec("triton") else None
    if found is not None:
        return _against("Triton", found, _required("triton"))
    advice = f'pip install "triton{_required("triton")}"'
    if settings().ops == "triton":
        return Finding(
            "trouble",
            "Triton is not installed, but FASTGEN_OPS=triton requests its kernels",
            advice,
        )
    if torch.cuda.is_available():
        return Finding("note", "Triton is not installed: operations on a GPU run in torch", advice)
    return Finding("ok", "Triton is not installed; it is not needed on a CPU")


def _required(name: str) -> str:
    """Return the range of versions that fastgen's metadata require, extras included."""
    requirements = map(Requirement, metadata.requires("fastgen-nlp") or ())
    return next((str(r.specifier) for r in requirements if r.name == name and r.specifier), "")


def _against(name: str, found: str, supported: str, more: str = "", advice: str = "") -> Finding:
    text = ", ".join(filter(None, (f"{name} {found}", more)))
    if SpecifierSet(supported).contains(found, prereleases=True):
        return Finding("ok", text)
    advice = advice or f'pip install "{name.lower()}{supported}"'
    return Finding("trouble", f"{text}: {supported} is supported", advice)
