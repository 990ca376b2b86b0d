"""The scripts of examples/, run as a user runs them: same output, and fastgen did run."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import fastgen
from tests.support.processes import python

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples"
# Run a script, or the cells of a notebook, and write the resulting `status`.
RUN = """
import json, runpy, sys
script, report = sys.argv[1:]
sys.argv = [script]
if script.endswith(".ipynb"):
    here = {"__name__": "__main__"}
    for cell in json.load(open(script, encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), here)
else:
    runpy.run_path(script, run_name="__main__")
import fastgen
json.dump(fastgen.status().to_dict(), open(report, "w"))
"""


# Without the compatibility fixes, fairseq cannot be imported.
FAIRSEQ_ALONE = ("FASTGEN", "compat")


@dataclass(frozen=True)
class Example:
    """The expected behaviour of a script.

    Attributes:
        needs: modules besides transformers.
        lines: number of translations, or other texts, that it prints first.
        like: the script that prints the same texts and is run unpatched.
        unpatched: the variable, with its value, that disables fastgen in it.
        more: start of the line that follows, or empty if there is none.
        patch: the patch whose calls are counted.
        hits: number of calls that fastgen serves.
        left_off: number of calls with disabled features, by reason.
        settings: variables that shorten the run.
    """

    needs: tuple[str, ...] = ()
    lines: int = 16
    like: str = "translate.py"
    unpatched: tuple[str, str] = ("FASTGEN", "0")
    more: str = ""
    patch: str = "transformers.beam_search"
    hits: int = 2
    left_off: dict[str, int] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)


EXAMPLES = {
    "translate.py": Example(),
    "quickstart.ipynb": Example(more="the same tokens: True", hits=1),
    "seq2seq_trainer.py": Example(needs=("accelerate", "sacrebleu"), more="BLEU 5"),
    "datasets_map.py": Example(needs=("datasets",)),
    "pipeline.py": Example(),
    "chat.py": Example(lines=4, like="chat.py", patch="transformers.sample"),
    "text_generation.py": Example(like="text_generation.py", patch="transformers.sample"),
    "peft_lora.py": Example(needs=("peft",), like="peft_lora.py"),
    "text_vae.py": Example(
        like="text_vae.py", more="the same tokens: True", hits=4, settings={"STEPS": "60"}
    ),
    "fairseq_translate.py": Example(
        needs=("fairseq",),
        like="fairseq_translate.py",
        unpatched=FAIRSEQ_ALONE,
        patch="fairseq.generate",
    ),
}
HELPERS = {"tiny_model.py"}
"""Modules that the scripts import."""


class Ran(NamedTuple):
    """What a script prints before fastgen's tables, and its `status`."""

    lines: list[str]
    status: dict[str, Any]


def _run(name: str, folder: Path, variables: dict[str, str]) -> Ran:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("FASTGEN")}
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    report = folder / "status.json"
    done = python(
        ["-c", RUN, str(FOLDER / name), str(report)],
        cwd=FOLDER,
        environment=kept | {"PYTHONPATH": path, "FASTGEN_CACHE_DIR": str(folder)} | variables,
    )
    assert done.returncode == 0, done.stderr
    return Ran(done.stdout.partition("\nfastgen ")[0].splitlines(), json.loads(report.read_text()))


@pytest.fixture(scope="module")
def unpatched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Example], Ran]:
    """Return a function that runs, once and without fastgen, the script that an example is like."""
    runs: dict[str, Ran] = {}

    def run(example: Example) -> Ran:
        if example.like not in runs:
            runs[example.like] = _run(
                example.like,
                tmp_path_factory.mktemp("stock"),
                example.settings | dict([example.unpatched]),
            )
        return runs[example.like]

    return run


def _sum(status: dict[str, Any], what: str) -> dict[str, int]:
    # Its counts depend on the amount of padding.
    rows = [row for row in status["rows"] if row["name"] != "transformers.source"]
    return {reason: count for row in rows for reason, count in row[what].items()}


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.slow
def test_example(name: str, tmp_path: Path, unpatched: Callable[[Example], Ran]) -> None:
    example = EXAMPLES[name]
    for module in example.needs:
        if find_spec(module) is None:
            pytest.skip(f"{name} needs {module}")
    ours, stock = _run(name, tmp_path, example.settings), unpatched(example)
    assert len(set(stock.lines)) >= example.lines / 2
    assert ours.lines[: example.lines] == stock.lines[: example.lines]
    assert len(ours.lines) >= example.lines
    assert [line.startswith(example.more) for line in ours.lines[example.lines :]] == [True] * bool(
        example.more
    )

    hits = {row["name"]: row["hits"] for row in ours.status["rows"]}
    assert hits[example.patch] == example.hits
    assert _sum(ours.status, "fallbacks") == {}
    assert _sum(ours.status, "left_off") == example.left_off
    assert not any(row["hits"] for row in stock.status["rows"] if row["name"] == example.patch)


def test_the_notebook_holds_its_outputs() -> None:
    """The notebook shows the output of every cell, and nothing about the machine that ran it."""
    text = (FOLDER / "quickstart.ipynb").read_text("utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    printed = list[str]()
    for cell in cells:
        assert all(output["name"] == "stdout" for output in cell["outputs"])
        printed.append("".join(line for output in cell["outputs"] for line in output["text"]))
        assert bool(printed[-1]) == any("print(" in line for line in cell["source"])
    assert len(printed[1].splitlines()) == EXAMPLES["quickstart.ipynb"].lines
    assert printed[2] == "the same tokens: True\n"
    assert f"fastgen {fastgen.__version__}, enabled" in printed[3]
    assert re.search(r"(?<![\w.])/(?!/)\w+/", "".join(printed)) is None


def test_the_list_has_every_example() -> None:
    scripts = {file.name for file in FOLDER.iterdir() if file.suffix in (".py", ".ipynb")}
    text = (FOLDER / "README.md").read_text("utf-8")
    assert scripts == set(EXAMPLES) | HELPERS
    assert all(f"({name})" in text for name in scripts)
