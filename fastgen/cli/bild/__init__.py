"""Prepare a pair of models for big-little decoding: align the small one and choose the thresholds.

Examples:
    fastgen bild align LARGE SMALL --input FILE --output FOLDER
    fastgen bild tune LARGE SMALL --input FILE --reference FILE --output CONFIG.json
"""

import argparse

from fastgen.cli.bild import align, tune

HELP = "align the small model of a big-little pair and tune its thresholds"

_COMMANDS = {"align": align, "tune": tune}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands and their arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="tool", required=True, metavar="TOOL")
    for name, module in _COMMANDS.items():
        module.arguments(commands.add_parser(name, help=module.HELP, description=module.__doc__))


def run(args: argparse.Namespace) -> int:
    """Run a subcommand; return the exit status."""
    return _COMMANDS[args.tool].run(args)
