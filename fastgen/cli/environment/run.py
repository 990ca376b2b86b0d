"""Run a console script, a Python file or a module with fastgen active, as after `import fastgen`.

    fastgen run fairseq-generate DATA --path model.pt --beam 5
    fastgen run translate.py --input text.en
    fastgen run -m package.module

The exit status is the program's. With FASTGEN=compat, fairseq's commands run fairseq's own code,
for comparison.

fastgen-generate and fastgen-interactive are short for `fastgen run fairseq-generate` and
`fastgen run fairseq-interactive`.
"""

import argparse
import functools
import itertools
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

import fastgen
from fastgen.errors import CommandError, SetupError
from fastgen.patches import check
from fastgen.patches.fairseq import TOOLKIT as FAIRSEQ

_ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_OUTSIDE = (__name__, "runpy", "importlib.util")
"""Modules whose frames lie between Python's start and the program's own frames."""

HELP = "run a console script (fairseq-generate), Python file or module with fastgen"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "-m", dest="module", action="store_true", help="TARGET is a module, as in `python -m`"
    )
    parser.add_argument(
        "target", metavar="TARGET", help="name of a console script, a .py file, or with -m a module"
    )
    parser.add_argument(
        "args",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="arguments of the program",
    )


def run(args: argparse.Namespace) -> int:
    """Run the program and return its exit status."""
    return run_target(args.target, args.args, module=args.module)


def run_target(target: str, args: list[str], module: bool = False) -> int:
    """Run a program in this process.

    Args:
        target: a console script's name, a .py file, or a module.
        args: the program's arguments.
        module: whether `target` is a module, as with `python -m`.

    Returns:
        The exit status.

    Raises:
        CommandError: there is no such program, it cannot be read, or a part of fairseq is not
            installed.
    """
    if module and not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    script = _script_in(target) if module else _script(target)
    of_fairseq = (
        target.partition(".")[0] in ("fairseq", "fairseq_cli")
        if module
        else target.startswith("fairseq-")
    )
    advice = f": {FAIRSEQ.install_hint}" if of_fairseq else ""
    if script is None and not module:
        _check_file(target, advice)
    sys.argv, sys.excepthook = [target, *args], functools.partial(_show, sys.excepthook)
    if script is not None:
        try:
            function = script.load()
        except ModuleNotFoundError as error:
            if not advice:
                raise
            raise CommandError(f"{target} cannot be imported: {error}{advice}") from error
        return _status(function())
    if module:
        _check_module(target, advice)
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(target).resolve().parent))
        runpy.run_path(str(Path(target).absolute()), run_name="__main__")
    return 0


def _script(name: str) -> EntryPoint | None:
    return next(iter(entry_points(group="console_scripts", name=name)), None)


def _check_file(path: str, advice: str) -> None:
    """Raise CommandError if there is no readable file at `path`."""
    if not Path(path).is_file():
        raise CommandError(
            f"there is no console script named {path!r} here, and no such file{advice}"
        )
    try:
        Path(path).open("rb").close()
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from error


def _check_module(name: str, advice: str) -> None:
    """Raise CommandError if there is no such module to run.

    Exceptions that its packages raise on import propagate.
    """
    try:
        spec = None if name.startswith(".") else find_spec(name)
        if (
            spec is not None
            and spec.submodule_search_locations is not None
            and find_spec(f"{name}.__main__") is None
        ):
            raise CommandError(
                f"{name} is a package without a module __main__, so it cannot be run"
            )
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    if spec is None:
        root = name.partition(".")[0]
        hint = advice if root and find_spec(root) is None else ""
        raise CommandError(f"there is no module named {name!r} here{hint}")


def _show(
    shown_by: _ExceptHook,
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
) -> None:
    """Show an uncaught exception of the program without fastgen's frames, as plain Python does."""
    names = [traceback.tb_frame.f_globals.get("__name__") for traceback in _each(traceback)]
    if __name__ in names:
        outer = names.index(__name__)
        inner = next(
            (position for position in range(outer, len(names)) if names[position] not in _OUTSIDE),
            len(names),
        )
        traceback = next(itertools.islice(_each(traceback), inner, None), None)
    shown_by(kind, error.with_traceback(traceback), traceback)


def _each(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _script_in(module: str) -> EntryPoint | None:
    """Return the console script of a patched module, else None.

    Code that runs as `__main__` is a second copy of the module, which is not patched.
    """
    if not any(row.target.startswith(f"{module}:") for row in fastgen.status().rows):
        return None
    return next(
        (script for script in entry_points(group="console_scripts") if script.module == module),
        None,
    )


def _status(result: object) -> int:
    """Return the exit status for the return value of a console script, as its wrapper does."""
    if result is None or isinstance(result, int):
        return result or 0
    print(result, file=sys.stderr)
    return 1


def generate() -> int:
    """Run `fastgen-generate`."""
    return _short("fairseq-generate")


def interactive() -> int:
    """Run `fastgen-interactive`."""
    return _short("fairseq-interactive")


def _short(script: str) -> int:
    name = Path(sys.argv[0]).name
    try:
        check()
        return run_target(script, sys.argv[1:])
    except (CommandError, SetupError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
