"""fairseq's command lines and hub, from a corpus over a trained checkpoint to translations."""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastgen
from fastgen import config
from fastgen.decoding import cohorts

pytest.importorskip("fairseq")
import fairseq.options
from fairseq import checkpoint_utils
from fairseq.models.transformer import TransformerModel
from fairseq_cli import generate

from tests.fairseq_commands import GENERATE, STOCK, preprocess, printed, run, train


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus, preprocessed in data/, and a transformer trained on it, model/checkpoint_last.pt."""
    folder = tmp_path_factory.mktemp("fairseq")
    train(preprocess(folder), folder / "model", 150, "--arch", "transformer", "--share-all-embeddings")
    return folder


@pytest.mark.parametrize(
    "options",
    [
        ("--beam", "4", "--batch-size", "8", "--no-repeat-ngram-size", "3"),
        ("--beam", "1", "--max-tokens", "300", "--remove-bpe", "--scoring", "sacrebleu"),
        ("--beam", "3", "--batch-size", "50", "--nbest", "2", "--prefix-size", "2", "--lenpen", "0.6", "--unkpen", "1"),
        ("--score-reference", "--batch-size", "20"),
    ],
    ids=["beams", "greedy", "prefix", "reference"],
)
def test_generate(corpus: Path, options: tuple[str, ...]) -> None:
    command = ("fairseq-generate", str(corpus / "data"), "--path", str(corpus / "model/checkpoint_last.pt"))
    ours = run(*command, *GENERATE, *options, FASTGEN_STRICT="1")
    stock = run(*command, *GENERATE, *options, **STOCK)
    assert printed(ours.stdout) == printed(stock.stdout)


@pytest.mark.parametrize("where", ["typed", "file"])
def test_interactive(corpus: Path, tmp_path: Path, where: str) -> None:
    text = "".join((corpus / "test.en").open(encoding="utf-8").readlines()[:7])
    file = tmp_path / "source"
    file.write_text(text, "utf-8")
    command = (
        "fairseq-interactive", str(corpus / "data"), "--path", str(corpus / "model/checkpoint_last.pt"), "--beam", "4",
        "--buffer-size", "3", "--batch-size", "2", "--cpu", "--max-len-b", "30",
        *(["--input", str(file)] if where == "file" else []),
    )  # fmt: skip
    ours, stock = run(*command, text=text, FASTGEN_STRICT="1"), run(*command, text=text, **STOCK)
    assert printed(ours.stdout) == printed(stock.stdout)
    assert sum(line.startswith("S-") for line in printed(ours.stdout)) == 7


def test_hub(corpus: Path) -> None:
    hub: Any = TransformerModel.from_pretrained(str(corpus / "model"), "checkpoint_last.pt", str(corpus / "data"))
    sentences = (corpus / "test.en").read_text("utf-8").splitlines()[:5]
    options = {"beam": 4, "no_repeat_ngram_size": 3, "max_len_b": 30}
    before = {row.name: row.hits for row in fastgen.status().rows}
    ours = hub.translate(sentences, **options)
    assert {row.name: row.hits for row in fastgen.status().rows}["fairseq.generate"] > before["fairseq.generate"]
    with fastgen.disabled():
        assert hub.translate(sentences, **options) == ours


class Surprise:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, file: str = "") -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


class Harmless:
    pass


def test_a_checkpoint_runs_nothing(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    torch.save({"model": {}, "args": argparse.Namespace(), "extra": Surprise(str(tmp_path / "ran"))}, file)
    with pytest.raises(ValueError if os.name == "nt" else Exception, match=r"model\.pt holds a (posix|nt)\.system"):
        checkpoint_utils.load_checkpoint_to_cpu(str(file))
    assert not (tmp_path / "ran").exists()


def test_numbers_of_numpy_load(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    numbers = {"best": np.float64(3.5), "count": np.int64(7)}
    torch.save({"model": {}, "args": argparse.Namespace(arch="transformer"), "extra": numbers}, file)
    assert isinstance(torch_load(file), dict)


def test_a_class_can_be_allowed_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, name = tmp_path / "model.pt", f"{Harmless.__module__}.Harmless"
    torch.save({"model": {}, "args": argparse.Namespace(arch="transformer"), "extra": Harmless()}, file)
    with pytest.raises(Exception, match=f"FASTGEN_FAIRSEQ_ALLOW={re.escape(name)}"):
        torch_load(file)
    monkeypatch.setenv("FASTGEN_FAIRSEQ_ALLOW", name)
    config.reload()
    assert isinstance(torch_load(file), dict)
    monkeypatch.setenv("FASTGEN_FAIRSEQ_ALLOW", "no.such.Thing")
    config.reload()
    with pytest.raises(ValueError, match=r"no\.such\.Thing"):
        torch_load(file)
    monkeypatch.undo()
    config.reload()


def torch_load(file: Path) -> Any:
    """The part of fairseq's loading that fails on other versions, before it looks for a model's settings."""
    try:
        return checkpoint_utils.load_checkpoint_to_cpu(str(file))
    except (AttributeError, KeyError):  # the upgrade of a state that is no model's
        return {}


def test_the_fused_encoder_layer_gets_its_mask(corpus: Path) -> None:
    """A loaded post-norm model takes PyTorch's fused layer, with the same result as layer by layer."""
    hub: Any = TransformerModel.from_pretrained(str(corpus / "model"), "checkpoint_last.pt", str(corpus / "data"))
    encoder = hub.models[0].encoder.eval()
    tokens = torch.randint(4, 40, (3, 9))
    tokens[1, :4] = 1  # padded on the left
    if not hasattr(encoder.layers[0], "load_to_BT"):
        pytest.skip("this version of fairseq has no fused layers")
    assert encoder.layers[0].load_to_BT
    with torch.no_grad():
        fused = encoder(tokens)["encoder_out"][0]
        for layer in encoder.layers:
            layer.ever_training = True
        separate = encoder(tokens)["encoder_out"][0]
    seen = tokens.ne(1).T
    torch.testing.assert_close(fused[seen], separate[seen], atol=1e-5, rtol=1e-5)


def test_results_path(corpus: Path, tmp_path: Path) -> None:
    """The file has what standard output has, and its name only at the end."""
    command = (
        "fairseq-generate", str(corpus / "data"), "--path", str(corpus / "model/checkpoint_last.pt"), *GENERATE,
        "--beam", "3", "--batch-size", "9",
    )  # fmt: skip
    outputs = [run(*command, "--postprocess-workers", n, FASTGEN_STRICT="1").stdout for n in ("0", "1", "2")]
    stock = run(*command, "--results-path", str(tmp_path / "stock"), FASTGEN_SKIP="fairseq.generate_command")
    run(*command, "--results-path", str(tmp_path / "ours"))
    assert [file.name for file in (tmp_path / "ours").iterdir()] == ["generate-test.txt"]
    wanted = _exact((tmp_path / "stock/generate-test.txt").read_text("utf-8"))
    assert _exact((tmp_path / "ours/generate-test.txt").read_text("utf-8")) == wanted
    assert [_exact(text) for text in outputs] == [wanted] * 3
    assert stock.returncode == 0


@pytest.mark.parametrize(
    "options",
    [
        ("--beam", "4", "--batch-size", "6", "--nbest", "2", "--remove-bpe", "--scoring", "sacrebleu"),
        ("--beam", "3", "--batch-size", "6", "--print-alignment", "--no-repeat-ngram-size", "3"),
        ("--beam", "2", "--batch-size", "6", "--min-len", "4", "--lenpen", "0.6", "--postprocess-workers", "0"),
    ],
    ids=["beams", "alignment", "ensemble"],
)
def test_batches_that_refill_print_the_same(
    corpus: Path,
    tmp_path: Path,
    options: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In this process, where batches start as soon as a few sentences have left; an ensemble of one model twice."""
    together, step = list[int](), cohorts.step

    def noted(running: Any) -> Any:
        together.append(len(running))
        return step(running)

    monkeypatch.setattr(cohorts, "step", noted)
    monkeypatch.setattr(cohorts, "FREED", 0.1)
    monkeypatch.setattr(cohorts, "OCCUPIED", 2.0)
    checkpoint = str(corpus / "model/checkpoint_last.pt")
    paths = f"{checkpoint}:{checkpoint}" if "--min-len" in options else checkpoint
    arguments = (str(corpus / "data"), "--path", paths, *GENERATE, *options)
    parser = fairseq.options.get_generation_parser()
    given = fairseq.options.parse_args_and_arch(parser, [*arguments, "--results-path", str(tmp_path)])
    with caplog.at_level("INFO"):
        generate.main(given)
    assert max(together) > 1
    ours = (tmp_path / "generate-test.txt").read_text("utf-8")
    stock = run("fairseq-generate", *arguments, **STOCK).stdout
    assert printed(ours) == printed(stock)
    assert _alignments(ours) == _alignments(stock)
    count = re.compile(r"Translated \d+ sentences \(\d+ tokens\)")
    assert count.findall(caplog.text) == count.findall(stock)


def _alignments(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("A-")]


def _exact(output: str) -> list[str]:
    return [line for line in output.splitlines() if re.match(r"[STHDPC]-\d+\t|Generate ", line)]


def test_decode_hypothesis(corpus: Path) -> None:
    command = (
        "fairseq-generate", str(corpus / "data"), "--path", str(corpus / "model/checkpoint_last.pt"), *GENERATE,
        "--beam", "1",
    )  # fmt: skip
    with_them = _exact(run(*command, "--decode-hypothesis").stdout)
    without = _exact(run(*command, "--no-decode-hypothesis").stdout)
    assert without == [line for line in with_them if not line.startswith("D-")]
    assert len(without) < len(with_them)


def test_a_number_of_workers_below_zero(corpus: Path) -> None:
    command = ("fairseq-generate", str(corpus / "data"), "--path", "model.pt", "--postprocess-workers", "-1")
    assert "must be at least 0, got -1" in run(*command, status=2).stderr


def test_a_run_that_fails_leaves_no_whole_file(tmp_path: Path) -> None:
    from fastgen.patches.fairseq.generate_command import _output

    cfg = argparse.Namespace(
        common_eval=argparse.Namespace(results_path=str(tmp_path)), dataset=argparse.Namespace(gen_subset="test")
    )
    (tmp_path / "generate-test.txt").write_text("of an earlier run")

    def fails() -> None:
        with _output(cfg) as output:
            output.write("H-0\n")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fails()
    assert (tmp_path / "generate-test.txt").read_text() == "of an earlier run"


@pytest.mark.parametrize(("where", "why"), [("pipe", "Broken pipe"), ("/dev/full", "No space left on device")])
def test_output_that_fails_is_said_and_no_success(corpus: Path, where: str, why: str) -> None:
    command = [
        sys.executable, "-m", "fastgen", "run", "fairseq-generate", str(corpus / "data"), "--path",
        str(corpus / "model/checkpoint_last.pt"), *GENERATE, "--beam", "1", "--batch-size", "2",
    ]  # fmt: skip
    if where == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
    elif not Path(where).exists():
        pytest.skip(f"no {where} on this system")
    else:
        writer = os.open(where, os.O_WRONLY)
    found = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=os.environ, check=False)
    os.close(writer)
    assert found.returncode != 0
    assert f"the output is not whole: {why}" in found.stderr
    assert "Exception ignored" not in found.stderr
