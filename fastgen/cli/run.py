"""Run a console script, a Python file or a module with fastgen active, as if `import fastgen` stood at its top.

    fastgen run fairseq-generate DATA --path model.pt --beam 5
    fastgen run translate.py --input text.en
    fastgen run -m package.module

fastgen-generate and fastgen-interactive are short for `fastgen run fairseq-generate` and
`fastgen run fairseq-interactive`.
"""

import argparse
import runpy
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import fastgen
from fastgen.errors import CommandError
from fastgen.patches.fairseq import TOOLKIT as FAIRSEQ

HELP = "run a console script (fairseq-generate), a Python file or a module, accelerated"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("-m", dest="module", action="store_true", help="TARGET is a module, as in `python -m`")
    parser.add_argument("target", metavar="TARGET", help="a console script's name, a .py file, or with -m a module")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="what the program gets as its arguments")


def run(args: argparse.Namespace) -> int:
    """Run the program; its exit status is this command's."""
    return run_target(args.target, args.args, module=args.module)


def run_target(target: str, args: list[str], module: bool = False) -> int:
    """Run a program in this process.

    Raises:
        CommandError: there is no such program, or a part of fairseq's is not installed.
    """
    script = _script_in(target) if module else _script(target)
    advice = f": {FAIRSEQ.install_hint}" if target.startswith("fairseq-") else ""
    if script is None and not module and not Path(target).is_file():
        raise CommandError(f"there is no console script named {target!r} here, and no such file{advice}")
    sys.argv = [target, *args]
    if script is not None:
        try:
            function = script.load()
        except ModuleNotFoundError as error:
            if not advice:
                raise
            raise CommandError(f"{target} cannot be imported: {error}{advice}") from error
        return _status(function())
    if module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(target).resolve().parent))  # where Python itself would look first
        runpy.run_path(target, run_name="__main__")
    return 0


def _script(name: str) -> EntryPoint | None:
    return next(iter(entry_points(group="console_scripts", name=name)), None)


def _script_in(module: str) -> EntryPoint | None:
    """The console script of a module that is patched: what runs as `__main__` is a second one, and is not."""
    if not any(row.target.startswith(f"{module}:") for row in fastgen.status().rows):
        return None
    return next((script for script in entry_points(group="console_scripts") if script.module == module), None)


def _status(result: object) -> int:
    """The exit status for what a console script's function returned, as its wrapper has it."""
    if result is None or isinstance(result, int):
        return result or 0
    print(result, file=sys.stderr)
    return 1


def generate() -> int:
    """`fastgen-generate`."""
    return _short("fairseq-generate")


def interactive() -> int:
    """`fastgen-interactive`."""
    return _short("fairseq-interactive")


def _short(script: str) -> int:
    name = Path(sys.argv[0]).name
    try:
        return run_target(script, sys.argv[1:])
    except CommandError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
