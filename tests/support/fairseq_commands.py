"""Run fairseq's commands in their own processes, on a small corpus and tiny trained models."""

import os
import re
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess

from tests.support.processes import python

TEXTS = Path(__file__).parents[2] / "examples" / "en-es"
# fairseq's own code, with only the fixes for current versions of its dependencies.
STOCK = {"FASTGEN": "compat"}
GENERATE = ("--cpu", "--max-len-b", "30", "--num-workers", "0", "--no-progress-bar")
_SIZES = {"embed-dim": 32, "ffn-embed-dim": 64, "attention-heads": 2, "layers": 2}


def run(
    *command: str, status: int = 0, text: str = "", afresh: bool = False, **environment: str
) -> CompletedProcess[str]:
    """Run `fastgen run ...` in its own process.

    Args:
        command: words after `fastgen run`.
        status: expected exit status.
        text: standard input.
        afresh: whether to start a new interpreter instead of forking one, as other thread settings
            and data loaders need.
        environment: additional environment variables.
    """
    words, variables = ["-m", "fastgen", "run", *command], os.environ | environment
    if afresh:
        found = subprocess.run(
            [sys.executable, *words],
            input=text,
            capture_output=True,
            text=True,
            env=variables,
            check=False,
        )
    else:
        found = python(words, text, environment=variables)
    assert found.returncode == status, found.stdout[-2000:] + found.stderr[-4000:]
    return found


def known_to_fairseq(arguments: tuple[str, ...]) -> list[str]:
    """Return the arguments without `--postprocess-workers` and its value, which fastgen adds."""
    ours = {
        at
        for at, word in enumerate(arguments)
        if "--postprocess-workers" in arguments[max(at - 1, 0) : at + 1]
    }
    return [word for at, word in enumerate(arguments) if at not in ours]


def preprocess(folder: Path) -> str:
    """Make a small corpus (train.en and so on), preprocess it, and return the data folder.

    The dictionary is small, so that models train fast.
    """
    for language in ("en", "es"):
        lines = (TEXTS / f"test.{language}").read_text("utf-8").splitlines()
        for name, part in {
            "train": lines[:600],
            "valid": lines[600:640],
            "test": lines[640:690],
        }.items():
            (folder / f"{name}.{language}").write_text("\n".join(part) + "\n", "utf-8")
    prefixes = [
        word
        for part in ("train", "valid", "test")
        for word in (f"--{part}pref", str(folder / part))
    ]
    data = str(folder / "data")
    run(
        "fairseq-preprocess", "-s", "en", "-t", "es", *prefixes, "--destdir", data,
        "--joined-dictionary", "--nwordssrc", "1000", "--workers", "1",
    )  # fmt: skip
    return data


def train(data: str, model: Path, updates: int, *options: str) -> None:
    """Train a tiny model and save it as model/checkpoint_last.pt."""
    run(
        "fairseq-train", data, "--optimizer", "adam", "--lr", "0.005", "--criterion",
        "cross_entropy", "--max-tokens", "1500", "--max-update", str(updates), "--save-dir",
        str(model), "--cpu", "--no-progress-bar", "--dropout", "0", "--num-workers", "0",
        "--no-epoch-checkpoints", *options,
        *(
            part
            for side in ("encoder", "decoder")
            for n, v in _SIZES.items()
            for part in (f"--{side}-{n}", str(v))
        ),
    )  # fmt: skip


def assert_alike(output: str, other: str) -> None:
    """Assert that two commands print the same words, and the same numbers up to rounding."""
    words, numbers = [list[str](), list[str]()], [list[float](), list[float]()]
    for i, text in enumerate((output, other)):
        for line in text.splitlines():
            if re.match(r"[STHDPC]-\d+\t|Generate ", line):
                words[i].append(re.sub(r"-?\d+\.\d+", "#", line))
                numbers[i] += map(float, re.findall(r"-?\d+\.\d+", line))
    assert words[0]
    assert words[0] == words[1]
    assert all(abs(one - another) < 1e-3 for one, another in zip(*numbers, strict=True))
