"""Show what fastgen runs in the installed toolkits, and which variables are set."""

import argparse
import json
import os
from importlib import import_module
from importlib.util import find_spec

import fastgen
from fastgen.config import VARIABLES
from fastgen.patches import fairseq, transformers

HELP = "show what is accelerated here and what is not"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--all",
        action="store_true",
        help="print every patch and every variable, not only the summary",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the status and the variables; return 0."""
    problems = import_targets()
    status = fastgen.status(verbose=args.all)
    variables = [
        {
            "name": variable.name,
            "value": variable.read(os.environ),
            "default": variable.default,
            "allowed": list(variable.allowed),
            "form": variable.form,
            "help": variable.help,
        }
        for variable in VARIABLES
    ]
    if args.json:
        print(
            json.dumps(
                {**status.to_dict(), "import_problems": problems, "variables": variables}, indent=2
            )
        )
        return 0
    print(status)
    for problem in dict.fromkeys(problems.values()):
        modules = ", ".join(module for module, found in problems.items() if found == problem)
        print(f"\n{modules} cannot be imported: {problem}")
    if not args.all:
        variables = [variable for variable in variables if variable["value"] != variable["default"]]
    if not variables:
        return 0
    width = max(len("value"), *(len(variable["value"]) for variable in variables))
    longest = max(len(variable["name"]) for variable in variables) + 2
    print(
        f"\n{'variable':<{longest}}{'value':<{width}}  "
        "what it does (allowed values; the default comes first)"
    )
    for variable in variables:
        allowed = "|".join(variable["allowed"]) or variable["form"]
        print(
            f"{variable['name']:<{longest}}{variable['value'] or '-':<{width}}  "
            f"{variable['help']} ({allowed})"
        )
    return 0


def import_targets() -> dict[str, str]:
    """Import the modules that hold patch targets, since only imported modules are patched.

    Modules of toolkits that are not installed are skipped.

    Returns:
        Import errors by module, since the report includes broken toolkits. If a toolkit lacks a
        package, the text includes the command that installs it.
    """
    problems: dict[str, str] = {}
    hints = {
        toolkit.name: toolkit.install_hint for toolkit in (transformers.TOOLKIT, fairseq.TOOLKIT)
    }
    targets = {
        row.target.partition(":")[0]: row.name.partition(".")[0] for row in fastgen.status().rows
    }
    for module, toolkit in targets.items():
        if find_spec(module.partition(".")[0]) is None:
            continue
        try:
            import_module(module)
        except Exception as error:
            hint = f"; {hints[toolkit]}" if isinstance(error, ModuleNotFoundError) else ""
            problems[module] = f"{type(error).__name__}: {error}{hint}"
    return problems
