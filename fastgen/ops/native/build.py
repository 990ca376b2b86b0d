"""Compile the C sources of this folder, one library per set of instructions.

Installing fastgen runs this module. It needs only the standard library, so it can run before
anything else is installed. `python fastgen/ops/native/build.py` does by hand what installing does.
If the build fails, the reason is written next to the libraries; `fastgen status` and `fastgen
doctor` show it.

`python fastgen/ops/native/build.py --sanitize FOLDER` compiles the sources into another folder with
AddressSanitizer and UndefinedBehaviorSanitizer. They end the process at the first read or write
outside a tensor's memory. fastgen does not load these libraries. `tests/native_fuzz.py` does, in a
process with the sanitizers' library preloaded.
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

HERE = Path(__file__).parent
SOURCES = tuple(sorted(path.name for path in HERE.glob("*.[ch]")))
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=fast", "-shared", "-fPIC", "-Wall", "-Wextra")
VARIANTS = {
    "avx512": ("-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma", "-DWIDTH=16"),
    "avx2": ("-mavx2", "-mfma", "-DWIDTH=8"),
}
SANITIZERS = (
    "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer",
    "-g", "-O1",
)  # fmt: skip
REASON = "not-built.txt"


def fingerprint() -> int:
    """Return a number that changes with the sources and flags; each library contains its own."""
    flags = repr((FLAGS, VARIANTS)).encode()
    return zlib.crc32(b"".join((HERE / name).read_bytes() for name in SOURCES) + flags)


def build(folder: Path = HERE / "lib", more: Sequence[str] = ()) -> str | None:
    """Compile all variants into `folder`.

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
                for name in VARIANTS:
                    os.replace(Path(temporary, f"{name}.so"), folder / f"{name}.so")
                (folder / REASON).unlink(missing_ok=True)
                return None
            Path(temporary, REASON).write_text(reason + "\n", encoding="utf-8")
            os.replace(Path(temporary, REASON), folder / REASON)
        for name in VARIANTS:
            (folder / f"{name}.so").unlink(missing_ok=True)
        return reason
    except OSError as error:
        return str(error)


def _compiled(folder: Path, more: Sequence[str]) -> str | None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return (
            "there are operations in C for Linux on x86-64 alone, not for "
            f"{sys.platform} on {platform.machine()}"
        )
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
    for name, flags in VARIANTS.items():
        sources = [str(HERE / source) for source in SOURCES if source.endswith(".c")]
        defined = f"-DFINGERPRINT={fingerprint()}u"
        command = [
            *compiler,
            *FLAGS,
            *flags,
            *more,
            defined,
            *sources,
            "-o",
            str(folder / f"{name}.so"),
            "-lm",
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            return f"{compiler[0]} could not be run: {error}"
        if done.returncode:
            message = next(
                (line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()
            )
            return f"{compiler[0]} ended with {done.returncode}: {message}"
    return None


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
