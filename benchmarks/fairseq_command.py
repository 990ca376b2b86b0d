"""`fairseq-generate` on a text, from its start to the last line: fairseq's own generator and printing, and fastgen's.

A tiny model is trained for a minute first. Each run is a process; what lets fairseq run on today's Python, and its
mended n-gram blocking, are in place in both. fastgen's own is strict: it would fail rather than leave a batch to
fairseq.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.cases import EXAMPLE, Case
from fastgen.cli import measure
from fastgen.cli.measure import Verdict
from fastgen.decoding.margin import NEAR_TIE

if TYPE_CHECKING:
    from benchmarks.runners import Session

STOCK = {"FASTGEN_SKIP": "fairseq.generate,fairseq.attention,fairseq.generate_command"}
_SIZES = {"embed-dim": 128, "ffn-embed-dim": 256, "attention-heads": 4, "layers": 3}
_SPEED = re.compile(r"Translated ([\d,]+) sentences .* in ([\d.]+)s")


def run_command(case: Case, session: Session) -> dict[str, Any]:
    """Whole runs of the command, in turn."""
    with tempfile.TemporaryDirectory(prefix="fastgen-fairseq-") as scratch:
        folder = Path(scratch)
        prepare(folder, session.corpus or EXAMPLE, 40 if session.tiny else case.sentences, 5 if session.tiny else 500)
        words = [*arguments(folder, case, session.device), *(["--fp16"] if session.dtype == torch.float16 else [])]
        inside: dict[str, list[float]] = {"stock": [], "fastgen": []}

        def arm(name: str, environment: dict[str, str]) -> str:
            output, log = run("fairseq-generate", *words, **environment)
            found = _SPEED.search(output + log)
            assert found is not None
            inside[name].append(float(found[2]))
            return output

        outcome = measure.compare(
            lambda: arm("stock", STOCK),
            lambda: arm("fastgen", {"FASTGEN_STRICT": "1"}),
            session.rounds or case.rounds,
            lambda stock, ours: same(stock, ours, NEAR_TIE[session.dtype]),
        )
    return outcome.to_dict() | {"seconds_of_translation": inside}


def arguments(folder: Path, case: Case, device: str) -> list[str]:
    """What `fairseq-generate` is given, for what `prepare` has left in a folder."""
    return [
        str(folder / "data"), "--path", str(folder / "model/checkpoint_last.pt"), "--beam", str(case.beams),
        "--batch-size", str(case.batch), "--post-process", "sentencepiece", "--scoring", "sacrebleu", "--max-len-b",
        str(case.new_tokens), "--no-progress-bar",
        *(word for name, value in case.options.items() for word in (name, str(value))),
        *(["--cpu"] if device == "cpu" else []),
    ]  # fmt: skip


def same(stock: str, ours: str, tolerance: float = NEAR_TIE[torch.float32]) -> Verdict:
    """The same text of every line; where not, two translations whose scores are so close are a near tie."""
    one, other = _lines(stock), _lines(ours)
    if one.keys() != other.keys():
        return Verdict(False, note=f"{len(other)} lines instead of {len(one)}")
    apart = [key for key in one if one[key][1] != other[key][1]]
    numbers = {key.partition("-")[2] for key in apart if key[0] in "HD"}
    ties = sum(abs(one[f"H-{n}"][0] - other[f"H-{n}"][0]) < tolerance for n in numbers)
    return Verdict(ties == len(numbers), ties, f"translations of {sorted(numbers)} differ" if numbers else "")


def _lines(output: str) -> dict[str, tuple[float, str]]:
    """Score, or 0, and text of every S, T, H and D line."""
    found = (line.split("\t") for line in output.splitlines() if re.match(r"[STHD]-\d+\t", line))
    return {parts[0]: (float(parts[1]) if len(parts) == 3 else 0.0, parts[-1]) for parts in found}


def prepare(folder: Path, corpus: Path, sentences: int, updates: int) -> None:
    """Split the text into word pieces, preprocess it, and train on what is not translated, if there is more."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE / "model")
    for language in ("en", "es"):
        parts = {name: _read(corpus / f"{name}.{language}") for name in ("test", "valid", "train")}
        test = (parts["test"] + parts["valid"])[:sentences]
        for name, lines in {"train": parts["train"][:20_000] or test, "valid": test[:50], "test": test}.items():
            pieces = (" ".join(tokenizer.tokenize(line)).replace("\u0120", "\u2581") for line in lines)
            (folder / f"{name}.{language}").write_text("\n".join(pieces) + "\n", "utf-8")
    prefixes = [word for part in ("train", "valid", "test") for word in (f"--{part}pref", str(folder / part))]
    data = str(folder / "data")
    run("fairseq-preprocess", "-s", "en", "-t", "es", *prefixes, "--destdir", data, "--joined-dictionary")
    run(
        "fairseq-train", data, "--arch", "transformer", "--share-all-embeddings", "--optimizer", "adam", "--lr",
        "0.002", "--lr-scheduler", "inverse_sqrt", "--warmup-updates", "100", "--criterion", "cross_entropy",
        "--max-tokens", "2000", "--max-update", str(updates), "--save-dir", str(folder / "model"), "--cpu",
        "--no-progress-bar", "--num-workers", "0", "--no-epoch-checkpoints",
        *(part for side in ("encoder", "decoder") for n, v in _SIZES.items() for part in (f"--{side}-{n}", str(v))),
    )  # fmt: skip


def _read(file: Path) -> list[str]:
    return file.read_text("utf-8").splitlines() if file.is_file() else []


def run(*command: str, **environment: str) -> tuple[str, str]:
    """Standard output and standard error of a command of fairseq's, or of a script that uses it."""
    found = subprocess.run(
        [sys.executable, "-m", "fastgen", "run", *command],
        capture_output=True, text=True, env=os.environ | environment, check=False,
    )  # fmt: skip
    if found.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{found.stdout[-2000:]}{found.stderr[-4000:]}")
    return found.stdout, found.stderr
