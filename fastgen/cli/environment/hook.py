"""Switch fastgen on or off for every program of this Python environment, without changing them.

`fastgen install-hook` writes a file of one line, fastgen.pth, into the environment's site-packages.
Python reads it when it starts, and fastgen is imported as soon as a program imports fairseq or
transformers. `fastgen remove-hook` deletes the file. FASTGEN=0 switches fastgen off for one run;
FASTGEN=compat switches off all but what fairseq fails without. If fastgen cannot start, the program
runs without it, and a line on stderr says why.
"""

import argparse
import os
import sysconfig
from pathlib import Path
from types import SimpleNamespace

from fastgen.errors import CommandError

LINE = 'import sys; exec("try:\\n import fastgen_hook\\nexcept ImportError:\\n pass")\n'
NAME = "fastgen.pth"


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--site-packages", type=Path, metavar="DIR", default=Path(sysconfig.get_path("purelib")),
        help="folder of the file (default: %(default)s)",
    )  # fmt: skip


def is_installed(site_packages: Path) -> bool:
    """Return whether the hook is in a folder.

    Raises:
        CommandError: the folder does not exist, or its fastgen.pth is not fastgen's.
    """
    return _file(site_packages).exists()


def _install(args: argparse.Namespace) -> int:
    """Write the file atomically."""
    file, scratch = _file(args.site_packages), args.site_packages / f"{NAME}.{os.getpid()}"
    try:
        scratch.write_text(LINE, encoding="utf-8")
        scratch.replace(file)
    except OSError as error:
        raise CommandError(f"{file} cannot be written: {error}") from error
    print(
        f"{file} is installed: fairseq and transformers are accelerated in every program "
        "of this environment"
    )
    return 0


def _remove(args: argparse.Namespace) -> int:
    file = _file(args.site_packages)
    if not file.exists():
        print(f"{file} does not exist: nothing to remove")
        return 0
    try:
        file.unlink()
    except OSError as error:
        raise CommandError(f"{file} cannot be removed: {error}") from error
    print(f"{file} is gone")
    return 0


def _file(site_packages: Path) -> Path:
    """Return the path of the hook in a folder.

    Raises:
        CommandError: the folder does not exist, or its fastgen.pth is not fastgen's.
    """
    if not site_packages.is_dir():
        raise CommandError(f"--site-packages {site_packages} is not a folder")
    file = site_packages / NAME
    if file.exists() and file.read_text(encoding="utf-8", errors="replace") != LINE:
        raise CommandError(f"{file} has other content: left unchanged")
    return file


install = SimpleNamespace(
    HELP="accelerate every program of this Python environment",
    __doc__=__doc__,
    arguments=_arguments,
    run=_install,
)
remove = SimpleNamespace(
    HELP="undo install-hook", __doc__=__doc__, arguments=_arguments, run=_remove
)
