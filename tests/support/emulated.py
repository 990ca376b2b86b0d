"""Run the operations in C for Arm on an x86-64 machine: cross-compiled, under QEMU.

`load` returns a `native.Library` whose functions run in another process, under QEMU's user-mode
emulation, on the memory of this process (`emulated.c`). The tests of the operations run on it
unchanged.
"""

import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from fastgen.ops import native
from fastgen.ops.native import build

VARIANT = "neon"
COMPILER = "aarch64-linux-gnu-gcc"
EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")
PACKAGES = "gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static"
FOLDER = Path(__file__).parents[2] / "build" / "emulated"
PAGE, MARGIN, TRIES = 4096, 2**30, 8
_CALL = struct.Struct("<32s32q4f")


def why_not() -> str | None:
    """Return why Arm cannot be emulated here, or None if it can."""
    if sys.platform != "linux" or "avx2" not in build.variants():
        return "Arm is emulated on Linux on x86-64 alone"
    missing = [names[0] for names in ((COMPILER,), EMULATORS) if not any(map(shutil.which, names))]
    return f"{' and '.join(missing)} missing: install {PACKAGES}" if missing else None


@cache
def load() -> native.Library:
    """Return the library for Arm, compiled if its sources have changed.

    Raises:
        RuntimeError: the library or the program that runs it cannot be compiled.
    """
    program = FOLDER / "emulated"
    FOLDER.mkdir(parents=True, exist_ok=True)
    source, new = Path(__file__).with_suffix(".c"), FOLDER / f"emulated-{os.getpid()}"
    flags = "-O1", "-no-pie", "-Wall", "-Wextra", "-Werror", "-ldl", "-Wl,--no-as-needed", "-lgomp"
    subprocess.run([COMPILER, str(source), "-o", str(new), *flags], check=True)
    new.replace(program)
    emulator = _Emulator(program, FOLDER / f"{VARIANT}.so")
    with (FOLDER / "lock").open("w") as lock:  # one of several test processes compiles
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not emulator.path.is_file() or not _is_current(emulator):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("CC", COMPILER)
                if (reason := build.build(FOLDER)) is not None:
                    raise RuntimeError(reason)
            emulator.stop()
    return native.Library(
        **{name: partial(emulator.call, name) for name in native.SIGNATURES},
        panel=emulator.call("panel"),
        can_dot=bool(emulator.call("can_dot")),
        run=emulator.address("GOMP_parallel"),
    )


def _is_current(emulator: "_Emulator") -> bool:
    try:
        return emulator.call("made_from") & 0xFFFFFFFF == build.fingerprint()
    except RuntimeError:  # a library of older sources may not even load
        return False


class _Emulator:
    """A process under QEMU that serves calls of a library's functions."""

    def __init__(self, program: Path, path: Path) -> None:
        self.program, self.path = program, path
        self.process: subprocess.Popen[bytes] | None = None

    def call(self, name: str, *arguments: Any) -> int:
        """Call a function with integers, addresses and floats; return its result, an int."""
        kinds = ctypes.c_void_p, ctypes.c_uint, *native.SIGNATURES.get(name, ())
        typed = [*zip(kinds, arguments, strict=False)]
        floats = [x for kind, x in typed if kind is ctypes.c_float]
        integers = [_integer(x) for kind, x in typed if kind is not ctypes.c_float]
        return ctypes.c_int(self._ask(name, [0, *integers], floats)).value

    def address(self, name: str) -> int:
        """Return the address that a function has in the process."""
        return self._ask(name, [-1], [])

    def stop(self) -> None:
        """End the process; the next call starts another."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _ask(self, name: str, integers: list[int], floats: list[float]) -> int:
        process = self.process = self.process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        padded = [*integers, *[0] * (32 - len(integers))], [*floats, *[0.0] * (4 - len(floats))]
        process.stdin.write(_CALL.pack(name.encode(), *padded[0], *padded[1]))
        process.stdin.flush()
        while (kind := process.stdout.read(1)) == b"P":
            first, most = struct.unpack("<2q", process.stdout.read(16))
            content = _pages(first, most)
            process.stdin.write(struct.pack("<q", len(content) // PAGE) + content)
            process.stdin.flush()
        if kind != b"R":
            code, self.process = process.wait(), None
            raise RuntimeError(f"{name} ended the emulated process with {code}")
        (result,) = struct.unpack("<q", process.stdout.read(8))
        while (run := struct.unpack("<2q", process.stdout.read(16)))[1]:
            ctypes.memmove(run[0], process.stdout.read(run[1]), run[1])
        return result

    def _start(self) -> subprocess.Popen[bytes]:
        """Start a process whose own memory lies where this one has none."""
        emulator = next(filter(None, map(shutil.which, EMULATORS)))
        done = subprocess.run(
            [COMPILER, "-print-file-name=libc.so.6"], capture_output=True, text=True, check=True
        )
        root = Path(done.stdout.strip()).resolve().parents[1]
        command = [emulator, "-B", "0", "-L", str(root), str(self.program), str(self.path)]
        environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
        for _ in range(TRIES):
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
            )
            self.process = process
            self.address("malloc")  # once it answers, its memory is mapped
            if not _overlap(process.pid):
                return process
            self.stop()
        raise RuntimeError("addresses of the emulated process overlap with those of this process")


def _integer(argument: Any) -> int:
    if argument is None or isinstance(argument, int):
        return int(argument or 0)
    return ctypes.cast(argument, ctypes.c_void_p).value or 0


def _pages(first: int, most: int) -> bytes:
    """Return the content of up to `most` pages from an address on, as far as they are mapped."""
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        return os.pread(memory, most * PAGE, first)
    except OSError:
        return b""
    finally:
        os.close(memory)


def _overlap(pid: int) -> bool:
    """Return whether memory of the process lies in or near memory of this one."""
    own, others = _mapped(os.getpid()), _mapped(pid)
    return any(
        begin - MARGIN < other_end and other_begin < end + MARGIN
        for begin, end in own
        for other_begin, other_end in others
    )


def _mapped(pid: int) -> list[tuple[int, int]]:
    lines = Path(f"/proc/{pid}/maps").read_text("ascii").splitlines()
    ends = (line.partition(" ")[0].split("-") for line in lines if "[vsyscall]" not in line)
    return [(int(begin, 16), int(end, 16)) for begin, end in ends]
