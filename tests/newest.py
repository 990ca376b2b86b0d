"""Check a transformers release in its own folder before its tests run: `make newest`.

Prints its version to stdout and everything else to stderr. The exit status is 1 if the environment
does not meet the requirements of the release.
"""

import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from fastgen.patches.transformers import TOOLKIT


def unmet(release: metadata.Distribution, path: Sequence[str]) -> Iterator[tuple[Requirement, str]]:
    """Yield each requirement of a release that the packages on `path` do not meet.

    Yields:
        The requirement, and the version found or "none".
    """
    for requirement in map(Requirement, release.requires or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        package = next(iter(metadata.distributions(name=requirement.name, path=list(path))), None)
        if package is None or not requirement.specifier.contains(package.version, prereleases=True):
            yield requirement, "none" if package is None else package.version


def main(folder: Path) -> int:
    """Report the version of the release in `folder`, how it compares with the pinned one, and gaps.

    Returns:
        The exit status: 1 if the environment does not meet the requirements of the release, else 0.
    """
    release = next(iter(metadata.distributions(name="transformers", path=[str(folder)])))
    version, pinned = release.version, TOOLKIT.tested
    if version == pinned:
        relation = "already the pinned release, so this run covers nothing newer"
    elif Version(version) > Version(pinned):
        relation = f"newer than the pinned {pinned}, so fastgen's canary runs on it"
    else:
        relation = f"older than the pinned {pinned}"
    print(f"transformers {version} is {relation}.", file=sys.stderr)
    print(version)
    lacking = list(unmet(release, [str(folder), *sys.path]))
    if not lacking:
        return 0
    print(
        f"This environment does not meet the requirements of transformers {version}:",
        file=sys.stderr,
    )
    for requirement, found in lacking:
        print(f"  {requirement.name}{requirement.specifier}, found {found}", file=sys.stderr)
    packages = " ".join(f"{requirement.name}{requirement.specifier}" for requirement, _ in lacking)
    print(
        "Install them next to this transformers, outside the environment, with\n"
        f'  make newest TRANSFORMERS={version} WITH="{packages}"',
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
