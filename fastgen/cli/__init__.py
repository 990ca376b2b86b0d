"""The `fastgen` command.

Each subcommand is a module with HELP (one line), `arguments(parser)` and `run(args)`, which returns
the exit status. The modules import heavy packages (torch, toolkits) inside `run`, so that
`fastgen --help` answers at once.
"""

import argparse
import sys
from collections.abc import Sequence

from fastgen._version import __version__
from fastgen.cli import bild, explain, serve, warmup
from fastgen.cli.bench import bench, demo
from fastgen.cli.environment import doctor, hook, run, status
from fastgen.cli.generate import generate
from fastgen.cli.parser import CommandParser
from fastgen.errors import CommandError, SetupError
from fastgen.patches import check

COMMANDS = {
    "status": status,
    "doctor": doctor,
    "demo": demo,
    "run": run,
    "generate": generate,
    "bench": bench,
    "explain": explain,
    "warmup": warmup,
    "serve": serve,
    "bild": bild,
    "install-hook": hook.install,
    "remove-hook": hook.remove,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: the arguments; default: those of this process.

    Returns:
        The exit status: 2 for errors that the user has to correct, 130 after an interrupt.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    command = next((word for word in words if word in COMMANDS), "")
    try:
        args = _parser(command).parse_args(words)
        if command != "doctor":  # doctor reports the problems itself
            check()
        return args.run(args)
    except SetupError as error:
        print(f"fastgen: {error}", file=sys.stderr)
        return 2
    except CommandError as error:
        print(f"fastgen {command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if command == "run":  # the program decides what an interrupt does
            raise
        print(f"fastgen {command}: interrupted", file=sys.stderr)
        return 130


def _parser(command: str) -> argparse.ArgumentParser:
    """Return the parser, with the options of `command` alone.

    Declaring the options of the other commands may import a toolkit; only their names are declared.
    """
    parser = argparse.ArgumentParser(
        prog="fastgen", description="Faster generation with the same output."
    )
    parser.add_argument("--version", action="version", version=f"fastgen {__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=CommandParser
    )
    for name, module in COMMANDS.items():
        parsed = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        if name == command:
            module.arguments(parsed)
        parsed.set_defaults(run=module.run)
    return parser
