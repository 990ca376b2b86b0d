"""Compiles the C sources of this folder, a library for each set of instructions; run when fastgen is installed.

Nothing but the standard library is needed, so that it can run before there is anything else:
`python fastgen/ops/native/build.py` does by hand what installing does. Where it cannot be done, the reason is written
beside the libraries, and `fastgen status` and `fastgen doctor` show it.
"""

import os
import platform
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = tuple(sorted(path.name for path in HERE.glob("*.[ch]")))
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=fast", "-shared", "-fPIC", "-Wall", "-Wextra")
VARIANTS = {
    "avx512": ("-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma", "-DWIDTH=16"),
    "avx2": ("-mavx2", "-mfma", "-DWIDTH=8"),
}
REASON = "not-built.txt"


def fingerprint() -> int:
    """Return a number that changes with the sources, which each library knows of those that it was made from."""
    return zlib.crc32(b"".join((HERE / name).read_bytes() for name in SOURCES))


def build(folder: Path = HERE / "lib") -> str | None:
    """Compile all variants into `folder`; return None, or why not: then there is no library there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    reason = _compiled(folder)
    if reason is not None:
        for library in folder.glob("*.so"):
            library.unlink()
        (folder / REASON).write_text(reason + "\n", encoding="utf-8")
    return reason


def _compiled(folder: Path) -> str | None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"there are native kernels for Linux on x86-64 alone, not for {sys.platform} on {platform.machine()}"
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler is None:
        return "there was no C compiler (cc, gcc or clang; CC names another) when fastgen was installed"
    for name, flags in VARIANTS.items():
        sources = [str(HERE / source) for source in SOURCES if source.endswith(".c")]
        defined = f"-DFINGERPRINT={fingerprint()}u"
        command = [*compiler.split(), *FLAGS, *flags, defined, *sources, "-o", str(folder / f"{name}.so"), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            return f"{compiler} could not be run: {error}"
        if done.returncode:
            said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip())
            return f"{compiler} ended with {done.returncode}: {said}"
    return None


if __name__ == "__main__":
    sys.exit(build())
