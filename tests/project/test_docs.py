"""The documentation matches the code: its tables, names, commands and examples."""

import importlib.util
import inspect
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.specifiers import SpecifierSet

import fastgen
from fastgen.cli import COMMANDS
from fastgen.config import VARIABLES
from tests.support.processes import python

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
FRONT = [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")
]
FRONT += sorted((ROOT / "examples").rglob("README.md"))


def hook(name: str) -> ModuleType:
    """Import a file of docs/hooks, which is not a package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "hooks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tables = hook("tables")


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "README.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_tables_are_those_of_the_records(page: Path) -> None:
    text = page.read_text("utf-8")
    assert tables.filled(text) == text, f"{page.name}: `make tables`"
    assert (
        text.count("<!-- table: ")
        == text.count("<!-- end of table -->")
        == len(tables.PLACE.findall(text))
    )


def test_the_example_of_a_logits_processor_is_the_code() -> None:
    section = re.search(
        r"^## Add a logits processor\n(.*?)^## ", FRONT[1].read_text("utf-8"), re.M | re.S
    )
    assert section is not None
    for step in re.split(r"^\d\. ", section[1], flags=re.M)[1:]:
        named = re.match(r"`([^`]+)`", step)
        assert named is not None
        code = (ROOT / named[1]).read_text("utf-8")
        blocks = re.findall(r"(?:^ {7}.*\n|\n(?= {7}))+", step, re.M)
        assert blocks, named[1]
        for block in blocks:
            lines = [line[7:] for line in block.splitlines()]
            assert re.sub(r"\s+", " ", "\n".join(lines)).strip() in re.sub(r"\s+", " ", code)


def test_the_changes_that_contributing_shows_are_in_the_code() -> None:
    """The lines that a diff with file names adds are lines of these files."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    changes = [
        (file, line[1:])
        for block in re.findall(r"```diff\n(.*?)```", text, re.DOTALL)
        for file, lines in re.findall(r"^\+\+\+ b/(.+)\n((?:(?!\+\+\+).*\n)*)", block, re.MULTILINE)
        for line in lines.splitlines()
        if line.startswith("+")
    ]
    assert len({file for file, _ in changes}) >= 3
    for file, line in changes:
        assert line in (ROOT / file).read_text("utf-8").splitlines(), file


def test_every_table_has_its_place() -> None:
    names = [
        name for page in PAGES for _, name, _, _ in tables.PLACE.findall(page.read_text("utf-8"))
    ]
    assert sorted(names) == sorted(tables.TABLES)


def test_a_table_that_is_out_of_date_is_made_anew() -> None:
    text = "before\n<!-- table: variables -->\n| old |\n<!-- end of table -->\nafter\n"
    new = tables.filled(text)
    assert (
        new == f"before\n<!-- table: variables -->\n\n{tables.variables()}\n\n"
        "<!-- end of table -->\nafter\n"
    )
    assert "| old |" not in new
    with pytest.raises(KeyError, match="nothing"):
        tables.filled("<!-- table: nothing -->\n<!-- end of table -->")


def test_every_variable_command_and_public_name_is_documented() -> None:
    switches, commands, api = (
        (DOCS / f"{name}.md").read_text("utf-8") for name in ("switches", "commands", "api")
    )
    for variable in VARIABLES:
        assert f"| `{variable.name}` |" in switches
    for command in COMMANDS:
        assert f"\n## `fastgen {command}`\n" in commands
    for name in fastgen.__all__:
        if not name.startswith("_"):
            assert f"\n::: fastgen.{name}\n" in api
            assert inspect.getdoc(getattr(fastgen, name))


def test_supported_versions_are_those_of_the_guards() -> None:
    rows = dict(re.findall(r"^\| (\w+) (\|.*)$", (DOCS / "supported.md").read_text("utf-8"), re.M))
    makefile = (ROOT / "Makefile").read_text("utf-8")
    oldest = re.search(r"^OLDEST := (.+)$", makefile, re.M)
    assert oldest is not None
    assert (
        f"| {oldest[1]} and {tables.transformers.TOOLKIT.tested}, at every run"
        in rows["transformers"]
    )
    assert SpecifierSet(tables.transformers.TOOLKIT.versions).contains(oldest[1])
    assert f" {tables.fairseq.TOOLKIT.tested} " in rows["fairseq"]
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
        "requires-python"
    ]
    assert f"| {requires.removeprefix('>=')} and newer |" in rows["Python"]


def recipe(target: str, *variables: str) -> str:
    """Return the commands that make would run for a target, if the environment is ready."""
    command = [
        "make",
        "--dry-run",
        "--no-print-directory",
        target,
        "ENV_READY=1",
        "PYTHON=python",
        *variables,
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_newest_release_is_tested_as_the_oldest_one(tmp_path: Path) -> None:
    environment = f"VENV={tmp_path}"
    newest = recipe("newest", environment)
    assert f"pip install --quiet --no-deps --target {tmp_path}/newest transformers\n" in newest
    assert f"-m tests.newest {tmp_path}/newest" in newest
    assert newest.count("pip install") == 1
    tested = set(re.findall(r"(?<= )(?:--ignore=)?tests/[\w./]+", newest))
    assert tested == set(
        re.findall(r"(?<= )(?:--ignore=)?tests/[\w./]+", recipe("test-all", environment))
    )
    assert "tests/patches/transformers" in tested
    named = recipe("newest", environment, "TRANSFORMERS=5.25.0", "WITH=a>=1,<2 b")
    assert f"--no-deps --target {tmp_path}/newest transformers==5.25.0\n" in named
    assert f"pip install --quiet --target {tmp_path}/newest 'a>=1,<2' 'b'\n" in named


def test_every_plot_and_figure_is_shown() -> None:
    shown = {
        name
        for page in PAGES
        for name in re.findall(r"!\[.+\]\((.+\.svg)\)", page.read_text("utf-8"))
    }
    assert shown == {str(file.relative_to(DOCS)) for file in DOCS.rglob("*.svg")}


@pytest.mark.parametrize("page", [*PAGES, *FRONT], ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text("utf-8")
    known = {variable.name for variable in VARIABLES} | {"FASTGEN_"}
    assert set(re.findall(r"\bFASTGEN_?[A-Z0-9_]*", text)) - known == set()
    assert set(re.findall(r"`fastgen ([a-z-]+)", text)) | set(
        re.findall(r"^    fastgen ([a-z-]+)", text, re.M)
    ) <= {*COMMANDS}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    assert set(re.findall(r"(?:`|^    )make ([a-z-]+)", text, re.M)) <= targets
    for path in re.findall(r"`((?:fastgen|tests|benchmarks|examples|docs)/[a-z_\d./-]+)`", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", ["docs/README.md", "docs/quickstart.md", "README.md"])
def test_examples_run(page: str) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text("utf-8"), re.M | re.S)
    code = "\n".join(blocks)
    done = python(["-c", code])
    assert done.returncode == 0, done.stderr
    assert re.search(r"^MarianMTModel +beam search +(1 +0|0 +1) +0$", done.stdout, re.M)
