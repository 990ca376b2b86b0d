"""Compile the C sources of this folder, one library per instruction set.

Installing fastgen runs this module. It needs only the standard library, so it can run before
anything else is installed. `python fastgen/ops/native/build.py` does by hand what installing does.
If the build fails, the reason is written next to the libraries; `fastgen status` and `fastgen
doctor` show it.

`python fastgen/ops/native/build.py --sanitize FOLDER` compiles the sources into another folder with
AddressSanitizer and UndefinedBehaviorSanitizer. They end the process at the first read or write
outside a tensor's memory. fastgen does not load these libraries. `tests/native_fuzz.py` does, in a
process with the sanitizers' library preloaded.

The compiler decides on the architecture: `CC=aarch64-linux-gnu-gcc` makes libraries for Arm.
"""

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
SOURCES = tuple(sorted(path.relative_to(HERE).as_posix() for path in HERE.rglob("*.[ch]")))
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=fast", "-shared", "-fPIC", "-Wall", "-Wextra")


class Variant(NamedTuple):
    """A library: the architecture and the compiler flags of its instruction set.

    Attributes:
        optional: whether another library takes its place where it does not compile, as the compiler
            or its assembler does not know the instructions.
    """

    architecture: str
    flags: tuple[str, ...] = ()
    optional: bool = False


_AVX512 = ("-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma", "-mf16c")
VARIANTS = {
    "avx512_bf16": Variant("x86_64", (*_AVX512, "-mavx512bf16"), optional=True),
    "avx512": Variant("x86_64", _AVX512),
    "avx2": Variant("x86_64", ("-mavx2", "-mfma", "-mf16c")),
    # GCC's scheduler would load more inputs at once than the registers beside the sums can hold.
    "neon": Variant("aarch64", ("-fno-schedule-insns",)),
}
"""All libraries; isa/ holds a header for each architecture."""

SYSTEMS = ("linux", "darwin")
SANITIZERS = (
    "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer",
    "-g", "-O1",
)  # fmt: skip
REASON = "not-built.txt"


def architecture(machine: str) -> str:
    """Return the usual name of an architecture: arm64 is aarch64, AMD64 is x86_64."""
    return {"arm64": "aarch64", "amd64": "x86_64"}.get(machine.lower(), machine.lower())


def variants(machine: str = platform.machine()) -> list[str]:
    """Return the names of the libraries for an architecture; by default, for this machine."""
    return [name for name, of in VARIANTS.items() if of.architecture == architecture(machine)]


def fingerprint() -> int:
    """Return a number that changes with the sources and flags; each library contains its own."""
    flags = repr((FLAGS, VARIANTS)).encode()
    return zlib.crc32(b"".join((HERE / name).read_bytes() for name in SOURCES) + flags)


def build(folder: Path = HERE / "lib", more: Sequence[str] = ()) -> str | None:
    """Compile all variants into `folder`, and remove libraries that were not made.

    Args:
        folder: where the libraries are written.
        more: additional compiler flags, after the others.

    Returns:
        None, or the reason of a failure; `folder` then contains no library.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Replace files atomically, for processes that build or load libraries concurrently.
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as temporary:
            reason = _compiled(Path(temporary), more)
            if reason is None:
                (folder / REASON).unlink(missing_ok=True)
            else:
                Path(temporary, REASON).write_text(reason + "\n", encoding="utf-8")
                os.replace(Path(temporary, REASON), folder / REASON)
            for library in (f"{name}.so" for name in VARIANTS):
                if reason is None and Path(temporary, library).is_file():
                    os.replace(Path(temporary, library), folder / library)
                else:
                    (folder / library).unlink(missing_ok=True)
        return reason
    except OSError as error:
        return str(error)


def _compiled(folder: Path, more: Sequence[str]) -> str | None:
    if sys.platform not in SYSTEMS:
        return f"there are no operations in C for {sys.platform}"
    try:
        compiler = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        return f"CC={os.environ['CC']!r}: {error}"
    compiler = compiler or list(filter(shutil.which, ("cc", "gcc", "clang")))[:1]
    if not compiler:
        return (
            "there was no C compiler (cc, gcc or clang; CC names another) when fastgen was "
            "installed"
        )
    try:
        machine = _run([*compiler, "-dumpmachine"]).partition("-")[0].strip()
        if not variants(machine):
            return f"there are no operations in C for {machine}"
        sources = [str(HERE / source) for source in SOURCES if source.endswith(".c")]
        for name in variants(machine):
            flags = (*FLAGS, *VARIANTS[name].flags, *more, f"-DFINGERPRINT={fingerprint()}u")
            try:
                _run([*compiler, *flags, *sources, "-o", str(folder / f"{name}.so"), "-lm"])
            except RuntimeError:
                if not VARIANTS[name].optional:
                    raise
    except RuntimeError as error:
        return str(error)
    return None


def _run(command: Sequence[str]) -> str:
    """Return what a compiler prints.

    Raises:
        RuntimeError: it could not be run, or failed.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise RuntimeError(f"{command[0]} could not be run: {error}") from error
    if done.returncode:
        message = next(
            (line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()
        )
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {message}")
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> str | None:
    """Build what the command line requests; return None, or the reason of a failure."""
    parser = argparse.ArgumentParser(description="Compile fastgen's operations in C.")
    help_ = (
        "compile them into this folder with AddressSanitizer and UndefinedBehaviorSanitizer, "
        "for tests alone"
    )
    parser.add_argument("--sanitize", type=Path, metavar="FOLDER", help=help_)
    folder = parser.parse_args(arguments).sanitize
    return build() if folder is None else build(folder, SANITIZERS)


if __name__ == "__main__":
    sys.exit(main())
