"""Look at a release of transformers in a folder of its own, before its tests run: `make newest`.

The version goes to standard output, what is to be known about it to standard error. The exit status is 1 where this
environment lacks what the release requires.
"""

import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from fastgen.patches.transformers import TOOLKIT


def unmet(release: metadata.Distribution, path: Sequence[str]) -> Iterator[tuple[Requirement, str]]:
    """Yield (requirement, version found) for what a release requires and does not find on a path."""
    for requirement in map(Requirement, release.requires or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        package = next(iter(metadata.distributions(name=requirement.name, path=list(path))), None)
        if package is None or not requirement.specifier.contains(package.version, prereleases=True):
            yield requirement, "none" if package is None else package.version


def main(folder: Path) -> int:
    """Print the version of the release in a folder, how it compares with the pinned one, and what it lacks."""
    release = next(iter(metadata.distributions(name="transformers", path=[str(folder)])))
    version, pinned = release.version, TOOLKIT.tested
    if version == pinned:
        relation = "the release that is pinned; nothing newer is tested here"
    elif Version(version) > Version(pinned):
        relation = f"newer than {pinned}, which is pinned: fastgen asks its canary before it runs"
    else:
        relation = f"older than {pinned}, which is pinned"
    print(f"transformers {version}: {relation}", file=sys.stderr)
    print(version)
    lacking = list(unmet(release, [str(folder), *sys.path]))
    if not lacking:
        return 0
    print(f"This environment does not meet the requirements of transformers {version}:", file=sys.stderr)
    for requirement, found in lacking:
        print(f"  {requirement.name}{requirement.specifier}, found {found}", file=sys.stderr)
    packages = " ".join(f"{requirement.name}{requirement.specifier}" for requirement, _ in lacking)
    print(
        "To install them beside this transformers, outside the environment:\n"
        f'  make newest TRANSFORMERS={version} WITH="{packages}"',
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
