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

import fastgen  # noqa: F401  (patches what the program will import)
from fastgen.errors import CommandError

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
        CommandError: there is no such program.
    """
    script = None if module else _script(target)
    if script is None and not module and not Path(target).is_file():
        raise CommandError(f"there is no console script named {target!r} here, and no such file")
    sys.argv = [target, *args]
    if script is not None:
        return _status(script.load()())
    if module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(target).resolve().parent))  # where Python itself would look first
        runpy.run_path(target, run_name="__main__")
    return 0


def _script(name: str) -> EntryPoint | None:
    return next(iter(entry_points(group="console_scripts", name=name)), None)


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
    try:
        return run_target(script, sys.argv[1:])
    except CommandError:
        print(
            f"{Path(sys.argv[0]).name}: {script} is not installed: pip install --no-deps fairseq==0.12.2",
            file=sys.stderr,
        )
        return 2
