"""Messages about missing packages name the distributions to install, as in pyproject.toml."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from fastgen.errors import REQUIREMENTS, needs
from fastgen.patches import fairseq

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
FOREIGN = re.compile(r"pip install [^\n]*\bfastgen\b(?!-nlp)|\bfastgen\[[a-z]")
"""Text that makes pip fetch another project, which is called fastgen on the package index."""


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["accelerate"], 'needs accelerate: pip install "accelerate>=1.1"'),
        (["matplotlib.pyplot"], "needs matplotlib.pyplot: pip install matplotlib"),
        (["rouge_score"], 'needs rouge_score: pip install "rouge-score>=0.1.2"'),
        (["ray", "starlette"], 'needs ray, starlette: pip install "ray[data,serve]>=2.60"'),
        (["numpy", "pyarrow"], 'needs numpy, pyarrow: pip install numpy "pyarrow>=18"'),
        (["a_module_of_somebody"], "needs a_module_of_somebody"),
    ],
)
def test_a_message_names_the_distributions(modules: list[str], message: str) -> None:
    assert needs(*modules) == message


def test_requirements_are_those_of_the_project() -> None:
    texts = [*PROJECT["dependencies"], *(text for extra in EXTRAS.values() for text in extra)]
    declared = {text.partition(";")[0] for text in texts}
    assert set(REQUIREMENTS.values()) <= declared


def test_fairseq_is_installed_with_what_it_needs() -> None:
    first, second = (shlex.split(command) for command in fairseq.TOOLKIT.install_hint.split(" && "))
    assert first == ["pip", "install", *EXTRAS["fairseq"]]
    assert second[:3] == ["pip", "install", "--no-deps"]
    assert Requirement(second[3]).name == "fairseq"


def test_nothing_installs_another_project_of_this_name() -> None:
    files = [
        ROOT / "README.md",
        *(file for part in ("fastgen", "docs") for file in (ROOT / part).rglob("*")),
    ]
    texts = {
        file: file.read_text("utf-8") for file in files if file.suffix in (".py", ".md", ".c", ".h")
    }
    assert len(texts) > 200
    assert [
        (file.name, found[0]) for file, text in texts.items() if (found := FOREIGN.search(text))
    ] == []


@pytest.mark.parametrize(
    "text", ["pip install fastgen", "pip install -U 'fastgen[bild]'", '"fastgen[ray]" is an extra']
)
def test_a_planted_text_is_found(text: str) -> None:
    assert FOREIGN.search(text)
