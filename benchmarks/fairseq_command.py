"""Measure `fairseq-generate` on a text: fairseq's own generator and printing against fastgen's.

A tiny model is trained for a minute first. Each run is a process of its own, timed from its start
to the last line. Both sides have the patches that let fairseq run on current Python, and the fixed
n-gram blocking. fastgen runs in strict mode, so it fails instead of falling back to fairseq.
"""

from __future__ import annotations

import re
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import EXAMPLE, Case
from benchmarks.fairseq_agreement import FairseqAgreement
from benchmarks.harness import finished
from benchmarks.session import Session
from fastgen.cli.bench.agreement import judged
from fastgen.cli.bench.measure import Verdict, compare
from fastgen.patches.transformers.introspection.noise import HALVES

STOCK = {"FASTGEN": "compat"}
STRICT = {"FASTGEN_STRICT": "1"}
_PRECISION = {torch.float32: (), torch.float16: ("--fp16",), torch.bfloat16: ("--bf16",)}
_SIZES = {"embed-dim": 128, "ffn-embed-dim": 256, "attention-heads": 4, "layers": 3}
_SPEED = re.compile(r"Translated ([\d,]+) sentences .* in ([\d.]+)s")


def run_command(case: Case, session: Session) -> dict[str, Any]:
    """Time whole runs of the command, which take turns.

    Raises:
        SystemExit: fairseq's command does not support the precision.
    """
    if session.dtype not in _PRECISION:
        raise SystemExit(f"{case.name}: fairseq-generate does not run in {session.dtype}")
    with tempfile.TemporaryDirectory(prefix="fastgen-fairseq-") as scratch:
        folder = Path(scratch)
        prepare(
            folder,
            session.corpus or EXAMPLE,
            40 if session.tiny else case.sentences,
            5 if session.tiny else 500,
        )
        words = [*arguments(folder, case, session.device), *_PRECISION[session.dtype]]
        inside: dict[str, list[float]] = {"stock": [], "fastgen": []}
        agreement = CommandAgreement(folder, words, session)

        def arm(name: str, environment: dict[str, str]) -> str:
            output, log = run("fairseq-generate", *words, **environment)
            speed = _SPEED.search(output + log)
            assert speed is not None
            inside[name].append(float(speed[2]))
            return output

        arms = partial(arm, "stock", STOCK), partial(arm, "fastgen", STRICT)
        outcome = compare(*arms, session.rounds or case.rounds, agreement)
    return outcome.to_dict() | {"seconds_of_translation": inside}


def arguments(folder: Path, case: Case, device: str) -> list[str]:
    """Return the arguments of `fairseq-generate` for a folder that `prepare` has filled."""
    return [
        str(folder / "data"), "--path", str(folder / "model/checkpoint_last.pt"), "--beam",
        str(case.beams), "--batch-size", str(case.batch), "--post-process", "sentencepiece",
        "--scoring", "sacrebleu", "--max-len-b", str(case.new_tokens), "--no-progress-bar",
        *(word for name, value in case.options.items() for word in (name, str(value))),
        *(["--cpu"] if device == "cpu" else []),
    ]  # fmt: skip


def same(stock: str, ours: str) -> Verdict:
    """Return whether the text of every line is the same."""
    numbers = differing(stock, ours)
    return Verdict(not numbers, note=f"translations of {numbers} differ" if numbers else "")


def differing(stock: str, ours: str) -> list[int]:
    """Return the indices of the sentences whose lines differ in text.

    If the outputs hold lines for different sentences, those count as well.
    """
    one, other = _lines(stock), _lines(ours)
    keys = [
        key
        for key in one.keys() | other.keys()
        if one.get(key, ("", ""))[1] != other.get(key, ("", ""))[1]
    ]
    return sorted({int(key.partition("-")[2]) for key in keys})


class CommandAgreement:
    """Comparison of what two runs of the command printed; texts may differ by near ties.

    Near ties are determined from tokens, which the command prints without `--post-process`, and
    from a replay of fairseq's own search on the sentences that differ. In half precision these
    sentences are generated once more, and the error of their log-probabilities decides
    (`benchmarks.fairseq_agreement`).

    Args:
        folder: folder that `prepare` has filled.
        words: arguments of the command.
        session: device and precision.
    """

    def __init__(self, folder: Path, words: list[str], session: Session) -> None:
        self.folder, self.words, self.session = folder, words, session
        self._known: dict[tuple[str, str], Verdict] = {}

    def __call__(self, stock: str, ours: str) -> Verdict:
        exact = same(stock, ours)
        if exact.equal or _lines(stock).keys() != _lines(ours).keys():
            return exact
        numbers = differing(stock, ours)
        key = tuple(
            "".join(_lines(output)[f"H-{n}"][1] for n in numbers) for output in (stock, ours)
        )
        if key not in self._known:
            self._known[key[0], key[1]] = self._judged(numbers)
        return self._known[key[0], key[1]]

    def _judged(self, numbers: list[int]) -> Verdict:
        what, agreement = f"{len(numbers)} translations", self._agreement(numbers)
        if self.session.dtype in HALVES:
            found = agreement.noise(
                agreement.generator.generate([agreement.model], agreement.sample)
            )
            return Verdict(False, note=f"{what} differ, {found}", within_noise=found.explains)
        at = self.words.index("--post-process")
        output, _ = run("fairseq-generate", *self.words[:at], *self.words[at + 2 :], **STRICT)
        dictionary = agreement.model.decoder.dictionary
        margins = {}
        for row, number in enumerate(agreement.sample["id"].tolist()):
            text = _lines(output)[f"H-{number}"][1]
            wanted = [*(dictionary.index(word) for word in text.split()), dictionary.eos()]
            margins[number] = agreement.margin(row, wanted)
        return judged(margins, self.session.dtype, what, "sentence")

    def _agreement(self, numbers: list[int]) -> FairseqAgreement:
        """Return the comparison of these sentences, with the command's model and options."""
        from fairseq import checkpoint_utils, options

        file, session = str(self.folder / "model/checkpoint_last.pt"), self.session
        models, _, task = checkpoint_utils.load_model_ensemble_and_task([file])
        model = models[0].to(device=session.device, dtype=session.dtype).eval()
        task.load_dataset("test")
        dataset = task.dataset("test")
        sample = dataset.collater([dataset[n] for n in numbers])
        sample["net_input"] = {
            name: x.to(session.device) for name, x in sample["net_input"].items()
        }
        args = options.parse_args_and_arch(options.get_generation_parser(), self.words)
        return FairseqAgreement(model, task.build_generator([model], args), sample)


def _lines(output: str) -> dict[str, tuple[float, str]]:
    """Return the score (0 if there is none) and the text of every S, T, H and D line."""
    fields = (line.split("\t") for line in output.splitlines() if re.match(r"[STHD]-\d+\t", line))
    return {parts[0]: (float(parts[1]) if len(parts) == 3 else 0.0, parts[-1]) for parts in fields}


def prepare(folder: Path, corpus: Path, sentences: int, updates: int) -> None:
    """Tokenize a corpus into subwords, preprocess it, and train a tiny model on it.

    The first `sentences` lines of the test and valid text are the ones to translate. Training uses
    the first 20,000 lines of the train text, or the lines to translate if there is none.

    Args:
        folder: receives the data and the model.
        corpus: folder with train, valid and test files, each `.en` and `.es`.
        sentences: the most sentences to translate.
        updates: optimizer steps of the training.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE / "model")
    for language in ("en", "es"):
        parts = {name: _read(corpus / f"{name}.{language}") for name in ("test", "valid", "train")}
        test = (parts["test"] + parts["valid"])[:sentences]
        for name, lines in {
            "train": parts["train"][:20_000] or test,
            "valid": test[:50],
            "test": test,
        }.items():
            pieces = (
                " ".join(tokenizer.tokenize(line)).replace("\u0120", "\u2581") for line in lines
            )
            (folder / f"{name}.{language}").write_text("\n".join(pieces) + "\n", "utf-8")
    prefixes = [
        word
        for part in ("train", "valid", "test")
        for word in (f"--{part}pref", str(folder / part))
    ]
    data = str(folder / "data")
    run(
        "fairseq-preprocess",
        "-s",
        "en",
        "-t",
        "es",
        *prefixes,
        "--destdir",
        data,
        "--joined-dictionary",
    )
    run(
        "fairseq-train", data, "--arch", "transformer", "--share-all-embeddings", "--optimizer",
        "adam", "--lr", "0.002", "--lr-scheduler", "inverse_sqrt", "--warmup-updates", "100",
        "--criterion", "cross_entropy", "--max-tokens", "2000", "--max-update", str(updates),
        "--save-dir", str(folder / "model"), "--cpu", "--no-progress-bar", "--num-workers", "0",
        "--no-epoch-checkpoints",
        *(part for side in ("encoder", "decoder") for n, v in _SIZES.items()
          for part in (f"--{side}-{n}", str(v))),
    )  # fmt: skip


def _read(file: Path) -> list[str]:
    return file.read_text("utf-8").splitlines() if file.is_file() else []


def run(*command: str, **environment: str) -> tuple[str, str]:
    """Return standard output and error of a fairseq command, or of a script that uses fairseq."""
    done = finished([sys.executable, "-m", "fastgen", "run", *command], environment)
    return done.stdout, done.stderr
