"""The `fastgen` command.

Each subcommand is a module with HELP (one line), `arguments(parser)` and `run(args)`, which returns the exit status.
The modules import what is heavy (torch, toolkits) inside `run`, so that `fastgen --help` answers at once.
"""

import argparse
import sys
from collections.abc import Sequence

from fastgen._version import __version__
from fastgen.cli import bench, bild, demo, doctor, hook, run, status
from fastgen.errors import CommandError

COMMANDS = {
    "status": status,
    "doctor": doctor,
    "demo": demo,
    "run": run,
    "bench": bench,
    "bild": bild,
    "install-hook": hook.install,
    "remove-hook": hook.remove,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `argv` (default: the process's own arguments); return the exit status, 2 for what the user must mend."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except CommandError as error:
        print(f"fastgen {args.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fastgen", description="Faster generation with the same output.")
    parser.add_argument("--version", action="version", version=f"fastgen {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        module.arguments(command)
        command.set_defaults(run=module.run)
    return parser
