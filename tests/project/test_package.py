"""The source distribution and the wheels, with and without C: their contents, and that they run."""

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from configparser import ConfigParser
from email.parser import BytesParser
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

import pytest
from packaging.metadata import Metadata
from packaging.utils import parse_sdist_filename, parse_wheel_filename

import fastgen
from fastgen.ops.native import build

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
NAME, LIBRARIES = "fastgen-nlp", "fastgen/ops/native/lib/"
COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


class Source(NamedTuple):
    """A source distribution, and the folder where it is unpacked."""

    archive: Path
    folder: Path


def environment(path: Path | None = None, **more: str) -> dict[str, str]:
    """Return this process's environment, without variables that affect fastgen's build or import.

    Args:
        path: the only folder on PATH, or None to keep PATH.
        more: additional variables.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("CC", "FASTGEN", "HATCH"))
    }
    return {**kept, **({} if path is None else {"PATH": str(path)}), **more}


def hatchling(target: str, source: Path, out: Path, variables: dict[str, str]) -> Path:
    """Build a distribution as pip does, without network access, and return its file."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    done = subprocess.run(
        command, cwd=source, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    out, folder = tmp_path_factory.mktemp("sdist"), tmp_path_factory.mktemp("source")
    archive = hatchling("sdist", ROOT, out, environment())
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    for name in build.variants():  # as in a checkout in which libraries were compiled
        (unpacked / LIBRARIES).mkdir(exist_ok=True)
        (unpacked / LIBRARIES / f"{name}.so").write_text("not what this wheel is made from")
    return Source(archive, unpacked)


@pytest.fixture(scope="module")
def without_c(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel that is built without a compiler."""
    nothing = tmp_path_factory.mktemp("no-programs")
    return hatchling("wheel", source.folder, tmp_path_factory.mktemp("pure"), environment(nothing))


@pytest.fixture(scope="module")
def with_c(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel that is built with a compiler; `-O0` takes a quarter of the time."""
    if COMPILER is None or sys.platform != "linux" or not build.variants():
        pytest.skip("needs a C compiler, on Linux")
    compiler = tmp_path_factory.mktemp("compiler") / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec {COMPILER} "$@" -O0\n')
    compiler.chmod(0o755)
    return hatchling(
        "wheel", source.folder, tmp_path_factory.mktemp("platform"), environment(CC=str(compiler))
    )


def contents(wheel: Path) -> set[str]:
    with ZipFile(wheel) as opened:
        return set(opened.namelist())


def read(wheel: Path, name: str) -> bytes:
    with ZipFile(wheel) as opened:
        (path,) = (path for path in opened.namelist() if path.endswith(f".dist-info/{name}"))
        return opened.read(path)


def test_the_source_distribution_is_whole(source: Source) -> None:
    name, version = parse_sdist_filename(source.archive.name)
    assert (name, str(version)) == (NAME, fastgen.__version__)
    needed = (
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "hatch_build.py",
        "fastgen_hook.py",
        "fastgen/py.typed",
    )
    paths = {
        *needed,
        *(f"fastgen/ops/native/{file}" for file in build.SOURCES),
        "tests/installed.py",
    }
    assert {path for path in paths if not (source.folder / path).is_file()} == set()
    with tarfile.open(source.archive) as tar:
        assert not [
            path for path in tar.getnames() if path.endswith((".so", ".pyc")) or "/." in path[-6:]
        ]


def test_a_wheel_holds_the_package(without_c: Path) -> None:
    files = contents(without_c)
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "fastgen").rglob("*.py")}
    # The libraries' fingerprint is computed from the sources.
    sources = {f"fastgen/ops/native/{file}" for file in build.SOURCES}
    info = f"fastgen_nlp-{fastgen.__version__}.dist-info"
    written = {
        f"{info}/{name}"
        for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    }
    assert files - {LIBRARIES + build.REASON} == {
        *modules,
        *sources,
        *written,
        "fastgen/py.typed",
        "fastgen_hook.py",
    }


def test_a_wheel_without_c_is_for_every_platform(
    source: Source, without_c: Path, tmp_path: Path
) -> None:
    released = hatchling("wheel", source.folder, tmp_path, environment(HATCH_BUILD_NO_HOOKS="true"))
    for wheel in (without_c, released):
        assert wheel.name == f"fastgen_nlp-{fastgen.__version__}-py3-none-any.whl"
        assert BytesParser().parsebytes(read(wheel, "WHEEL"))["Root-Is-Purelib"] == "true"
    assert contents(without_c) - contents(released) == {LIBRARIES + build.REASON}
    with ZipFile(without_c) as opened:
        assert b"there was no C compiler" in opened.read(LIBRARIES + build.REASON)


@pytest.mark.slow
def test_a_wheel_with_c_is_for_this_platform_and_all_versions(source: Source, with_c: Path) -> None:
    name, _, _, tags = parse_wheel_filename(with_c.name)
    assert (name, [str(tag) for tag in tags]) == (NAME, [f"py3-none-linux_{platform.machine()}"])
    assert BytesParser().parsebytes(read(with_c, "WHEEL"))["Root-Is-Purelib"] == "false"
    found = {path for path in contents(with_c) if path.startswith(LIBRARIES)}
    assert found == {f"{LIBRARIES}{name}.so" for name in build.variants()}
    with ZipFile(with_c) as opened:
        assert all(opened.read(path).startswith(b"\x7fELF") for path in found)
    for path in found:  # the checkout's own libraries are unchanged
        assert (source.folder / path).read_text() == "not what this wheel is made from"


def test_libraries_are_for_instructions_that_are_asked_for() -> None:
    """Libraries also run on other processors than the one that compiled them."""
    for flag in (*build.FLAGS, *(flag for of in build.VARIANTS.values() for flag in of.flags)):
        assert not re.match(r"-m(arch|cpu|tune)\b", flag), flag


def test_metadata(without_c: Path) -> None:
    text = read(without_c, "METADATA")
    metadata = Metadata.from_email(text, validate=True)
    assert (metadata.name, str(metadata.version)) == (NAME, fastgen.__version__)
    assert (metadata.license_expression, metadata.license_files) == ("MIT", ["LICENSE"])
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.11"} <= set(
        metadata.classifiers or ()
    )
    assert set(metadata.provides_extra or ()) == set(PROJECT["optional-dependencies"])
    assert not [each for each in metadata.requires_dist or () if each.name.startswith("fastgen")]
    commands = ConfigParser()
    commands.read_string(read(without_c, "entry_points.txt").decode())
    assert dict(commands["console_scripts"]) == PROJECT["scripts"]


def test_the_description_links_to_nothing_that_is_not_there(without_c: Path) -> None:
    description = Metadata.from_email(read(without_c, "METADATA")).description
    assert description is not None
    assert description.startswith("# fastgen\n")
    assert "](https://" in description
    assert (
        re.findall(
            r"\]\((?!https://|#)[^)]*\)|(?:src|srcset|href)=\"(?!https://|#)[^\"]*", description
        )
        == []
    )


@pytest.mark.parametrize(("wheel", "expected"), [("with_c", "native"), ("without_c", "torch")])
@pytest.mark.slow
def test_an_installed_wheel_generates(
    wheel: str, expected: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    file, site, nothing = (
        request.getfixturevalue(wheel),
        tmp_path / "site",
        tmp_path / "no-programs",
    )
    nothing.mkdir()
    pip = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--target",
        str(site),
    ]
    run = ["-P", str(ROOT / "tests" / "installed.py"), expected]
    for arguments, more in (([*pip, str(file)], {}), (run, {"PYTHONPATH": str(site)})):
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment(nothing, **more),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    assert f"in {site / 'fastgen'}: same output" in done.stdout
    assert ("none: there was no C compiler" in done.stdout) == (expected == "torch")
