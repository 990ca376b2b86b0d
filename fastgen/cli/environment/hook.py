"""Switch fastgen on, or off, for every program of this Python environment, without a change to any of them.

A file of one line, fastgen.pth, is put into the environment's site-packages. Python reads it at its start, and fastgen
is imported as soon as a program imports fairseq or transformers. `fastgen remove-hook` takes the file away again;
FASTGEN=0 switches fastgen off for one run, and FASTGEN=compat all of it but what fairseq fails without. Where fastgen
cannot start, a program runs without it, and a line on stderr says why.
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
    """Whether the file is in a folder.

    Raises:
        CommandError: the folder is not there, or what lies at the file's place is not fastgen's.
    """
    return _file(site_packages).exists()


def _install(args: argparse.Namespace) -> int:
    """Put the file into place, at once and whole."""
    file, scratch = _file(args.site_packages), args.site_packages / f"{NAME}.{os.getpid()}"
    try:
        scratch.write_text(LINE, encoding="utf-8")
        scratch.replace(file)
    except OSError as error:
        raise CommandError(f"{file} cannot be written: {error}") from error
    print(
        f"{file} is in place: fairseq and transformers are accelerated in every program of this environment"
    )
    return 0


def _remove(args: argparse.Namespace) -> int:
    file = _file(args.site_packages)
    if not file.exists():
        print(f"{file} is not there: nothing to remove")
        return 0
    try:
        file.unlink()
    except OSError as error:
        raise CommandError(f"{file} cannot be removed: {error}") from error
    print(f"{file} is gone")
    return 0


def _file(site_packages: Path) -> Path:
    """The file's path in a folder.

    Raises:
        CommandError: its folder is not there, or what lies at its place is not fastgen's.
    """
    if not site_packages.is_dir():
        raise CommandError(f"--site-packages {site_packages} is not a folder")
    file = site_packages / NAME
    if file.exists() and file.read_text(encoding="utf-8", errors="replace") != LINE:
        raise CommandError(f"{file} holds something else: left as it is")
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
