"""Check what is installed and patched here, and that a tiny model generates the same output.

A *trouble* keeps fastgen from running, or from running as requested; the exit status is then 1. A
*note* costs speed, or is good to know. `fastgen status` lists the patches one by one.
"""

import argparse
import json
import os
from dataclasses import asdict

from fastgen import config
from fastgen._version import __version__
from fastgen.cli.environment import checks
from fastgen.cli.environment.checks import Check, Finding, examine
from fastgen.cli.environment.self_check import self_check
from fastgen.errors import VariableError
from fastgen.patches import check, start

HELP = "check this environment for problems and slow settings, and try a tiny model"


CHECKS: dict[str, Check] = {
    "versions": checks.versions,
    "devices": checks.devices,
    "self-check": self_check,  # before the patches, whose states it may change
    "patches": checks.patches,
    "variables": checks.variables,
    "surroundings": checks.surroundings,
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Print what all checks find.

    Returns:
        1 if a check found trouble, else 0.
    """
    wrong = _start()
    found = {subject: examine(look) for subject, look in CHECKS.items()}
    found["variables"][:0] = wrong
    troubles = sum(
        finding.level == "trouble" for findings in found.values() for finding in findings
    )
    if args.json:
        checks = {
            subject: [asdict(finding) for finding in findings]
            for subject, findings in found.items()
        }
        print(
            json.dumps({"version": __version__, "troubles": troubles, "checks": checks}, indent=2)
        )
    else:
        print(f"fastgen {__version__}: {_summary(troubles)}")
        for subject, findings in found.items():
            print(f"\n{subject}")
            print("\n".join(_lines(findings)))
    return 1 if troubles else 0


def _start() -> list[Finding]:
    """Start fastgen as if each variable with an invalid value were unset.

    Returns:
        A finding for each of these variables.

    Raises:
        MissingPackageError: a package that fastgen needs is not installed.
    """
    found: list[Finding] = []
    while True:
        try:
            if not found:
                check()
            else:
                config.reload()
                start()
            return found
        except VariableError as error:
            del os.environ[error.name]
            text = f"{error.found}; what follows is as if it were unset"
            found.append(Finding("trouble", text, error.remedy))


def _summary(troubles: int) -> str:
    return {0: "all is well", 1: "1 trouble"}.get(troubles, f"{troubles} troubles")


def _lines(findings: list[Finding]) -> list[str]:
    lines: list[str] = []
    for finding in findings:
        lines.append(f"  {finding.level:<9}{finding.text}")
        if finding.advice:
            lines.append(f"  {'':<9}-> {finding.advice}")
    return lines
