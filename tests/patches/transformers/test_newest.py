"""Check how `python -m tests.newest` verifies a release of transformers in its own folder."""

from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version

from fastgen.patches.transformers import TOOLKIT
from tests import newest

PINNED = Version(TOOLKIT.tested)
NEWER = f"{PINNED.major}.{PINNED.minor + 1}.0"
TORCH = metadata.version("torch")


def lay(folder: Path, name: str, version: str, *requirements: str) -> None:
    """Write the metadata that pip writes for a package installed into a folder."""
    about = folder / f"{name}-{version}.dist-info"
    about.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {text}" for text in requirements]
    (about / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("version", "relation"),
    [
        (TOOLKIT.tested, "already the pinned release"),
        (NEWER, "canary runs"),
        ("5.17.0", "older than the pinned"),
    ],
)
def test_version_and_relation_to_the_pinned_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], version: str, relation: str
) -> None:
    lay(tmp_path, "transformers", version, "torch>=2.0", 'of-no-platform>=1; extra == "audio"')
    assert newest.main(tmp_path) == 0
    said = capsys.readouterr()
    assert said.out == f"{version}\n"
    assert said.err.startswith(f"transformers {version} is ")
    assert relation in said.err
    assert said.err.count("\n") == 1


def test_requirements_that_are_not_met(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lay(tmp_path, "transformers", NEWER, "torch>=99,<100", "nobody-has-this", "packaging>=20")
    assert newest.main(tmp_path) == 1
    said = capsys.readouterr().err
    assert f"  torch<100,>=99, found {TORCH}\n  nobody-has-this, found none\n" in said
    assert said.endswith(
        f'make newest TRANSFORMERS={NEWER} WITH="torch<100,>=99 nobody-has-this"\n'
    )
    assert "packaging" not in said


def test_what_lies_beside_the_release_counts(tmp_path: Path) -> None:
    lay(tmp_path, "transformers", NEWER, "torch>=99,<100")
    lay(tmp_path, "torch", "99.1")
    assert newest.main(tmp_path) == 0
