"""Check fairseq's command lines and hub, from a corpus through training to translations."""

import argparse
import functools
import logging
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

pytest.importorskip("fairseq")
from fairseq import checkpoint_utils
from fairseq import options as fairseq_options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.tasks import setup_task
from fairseq_cli import eval_lm, generate, interactive

from fastgen.cli.environment.run import run_target
from fastgen.patches.fairseq.bild.bild_command import Pair
from fastgen.patches.fairseq.commands.options import command_line
from fastgen.patches.fairseq.mend import UntrustedCheckpointError
from tests.support.fairseq_commands import (
    GENERATE,
    STOCK,
    assert_alike,
    known_to_fairseq,
    preprocess,
    run,
    train,
)
from tests.support.together import start_soon


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small corpus and a trained transformer.

    The preprocessed corpus lies in `data/`, the checkpoint in `model/checkpoint_last.pt`.
    """
    folder = tmp_path_factory.mktemp("fairseq")
    train(
        preprocess(folder), folder / "model", 200, "--arch", "transformer", "--share-all-embeddings"
    )
    return folder


@pytest.fixture(scope="session")
def small(corpus: Path) -> Path:
    """Return the checkpoint of a model trained for fewer updates on the same corpus."""
    options = ("--arch", "transformer", "--share-all-embeddings", "--seed", "7")
    train(str(corpus / "data"), corpus / "small", 60, *options)
    return corpus / "small/checkpoint_last.pt"


@pytest.mark.parametrize(
    "options",
    [
        ("--beam", "4", "--batch-size", "8", "--no-repeat-ngram-size", "3"),
        ("--beam", "1", "--max-tokens", "300", "--remove-bpe", "--scoring", "sacrebleu"),
        (
            "--beam",
            "3",
            "--batch-size",
            "50",
            "--nbest",
            "2",
            "--prefix-size",
            "2",
            "--lenpen",
            "0.6",
            "--unkpen",
            "1",
        ),
        ("--score-reference", "--batch-size", "20"),
    ],
    ids=["beams", "greedy", "prefix", "reference"],
)
def test_generate(corpus: Path, options: tuple[str, ...]) -> None:
    command = (
        "fairseq-generate",
        str(corpus / "data"),
        "--path",
        str(corpus / "model/checkpoint_last.pt"),
    )
    ours = run(*command, *GENERATE, *options, FASTGEN_STRICT="1")
    stock = run(*command, *GENERATE, *options, **STOCK, FASTGEN_REPORT="1")
    assert_alike(ours.stdout, stock.stdout)
    assert "disabled but for what mends toolkits" in stock.stderr
    assert re.search(r"^fairseq .*: 7 patches run, 6 are off$", stock.stderr, re.M)
    assert "no calls of generate so far" in stock.stderr


LOSSLESS = (
    "--bild-lossless",
    "--no-bild-adaptive-draft",
    "--bild-fallback",
    "0.01",
    "--bild-max-draft",
    "4",
)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", ["small model", "early exit"])
def test_generate_by_two_models(corpus: Path, small: Path, drafts: str) -> None:
    """The output is that of the large model, except for the line that reports drafting."""
    command = (
        "fairseq-generate", str(corpus / "data"),
        "--path", str(corpus / "model/checkpoint_last.pt"), *GENERATE, "--beam", "1",
        "--batch-size", "9", "--no-repeat-ngram-size", "3", "--lenpen", "0.6",
    )  # fmt: skip
    options = (
        ("--bild-small", str(small)) if drafts == "small model" else ("--bild-early-exit", "1")
    )
    ours = run(*command, *options, *LOSSLESS, FASTGEN_STRICT="1")
    stock = run(*command, **STOCK)
    assert_alike(ours.stdout, stock.stdout)
    said = re.search(
        r"Big-little decoding: ([\d,]+) tokens, ([\d,]+) drafted, .* fallbacks, [\d,]+ rollbacks",
        ours.stdout + ours.stderr,
    )
    assert said is not None
    assert "0" not in said.groups()
    assert "Big-little" not in stock.stdout + stock.stderr


@pytest.mark.slow
def test_interactive_by_two_models(corpus: Path, small: Path) -> None:
    text = "".join((corpus / "test.en").open(encoding="utf-8").readlines()[:4])
    command = (
        "fairseq-interactive", str(corpus / "data"),
        "--path", str(corpus / "model/checkpoint_last.pt"), "--beam", "1", "--buffer-size", "4",
        "--batch-size", "2", "--cpu", "--max-len-b", "30",
    )  # fmt: skip
    ours = run(*command, "--bild-small", str(small), *LOSSLESS, text=text, FASTGEN_STRICT="1")
    assert_alike(ours.stdout, run(*command, text=text, **STOCK).stdout)
    assert "Big-little decoding: " in ours.stdout + ours.stderr


def _cfg(corpus: Path, *options: str) -> Any:
    """Return the settings of a command line."""
    command = (
        str(corpus / "data"),
        "--path",
        str(corpus / "model/checkpoint_last.pt"),
        "--cpu",
        *options,
    )
    parser = fairseq_options.get_generation_parser()
    parser.add_argument("--arch", default="transformer")  # the command does the same
    return convert_namespace_to_omegaconf(
        fairseq_options.parse_args_and_arch(parser, list(command))
    )


WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "beams": (
        ("--bild-small", "x", "--beam", "5"),
        "one text per input: --beam is 5, and must be 1",
    ),
    "a fallback": (
        ("--bild-small", "x", "--bild-fallback", "1.5"),
        "--bild-fallback is 1.5; it must be from 0 to 1",
    ),
    "a rollback": (
        ("--bild-small", "x", "--bild-rollback", "-1"),
        "--bild-rollback is -1.0; it must be 0 or more",
    ),
    "a draft": (
        ("--bild-small", "x", "--bild-max-draft", "0"),
        "--bild-max-draft is 0; it must be 1 or more",
    ),
    "nobody": (
        ("--bild-fallback", "0.5"),
        "--bild-fallback: big-little decoding needs a small model, either --bild-sm",
    ),
    "two": (("--bild-small", "x", "--bild-early-exit", "1"), "and got both"),
    "lossless": (
        ("--bild-small", "x", "--bild-lossless", "--bild-rollback", "2"),
        (
            "--bild-lossless=True keeps no token but the large model's own; "
            "--bild-rollback=2.0 would keep others"
        ),
    ),
    "the clock": (
        ("--bild-small", "x", "--bild-adaptive-draft"),
        (
            "--bild-adaptive-draft=True goes by the clock, and would change the output: "
            "it needs --bild-lossless=True"
        ),
    ),
    "an ensemble": (
        ("--bild-small", "x", "--path", "a.pt:b.pt"),
        "of one large model, and --path names 2",
    ),
    "sampling": (("--bild-small", "x", "--sampling"), "not possible with --sampling (it is True)"),
    "a prefix": (
        ("--bild-small", "x", "--prefix-size", "2"),
        "not possible with --prefix-size (it is 2)",
    ),
    "a language model": (
        ("--bild-small", "x", "--lm-path", "lm.pt"),
        "not possible with --lm-path (it is lm.pt)",
    ),
    "alignments": (
        ("--bild-small", "x", "--print-alignment", "hard"),
        "not possible with --print-alignment",
    ),
    "groups": (
        ("--bild-small", "x", "--diverse-beam-groups", "2"),
        "not possible with --diverse-beam-groups",
    ),
    "references": (
        ("--bild-small", "x", "--score-reference"),
        "not possible with --score-reference",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_two_models_cannot_do_is_said_first(corpus: Path, name: str) -> None:
    options, message = WRONG[name]
    cfg = _cfg(corpus, "--beam", "1", *options)
    with pytest.raises(SystemExit, match=f"^fairseq-generate: .*{re.escape(message)}"):
        generate.main(cfg)


@pytest.mark.parametrize("what", ["nothing", "no checkpoint"])
def test_a_small_model_that_cannot_be_read(corpus: Path, tmp_path: Path, what: str) -> None:
    file = tmp_path / "small.pt"
    if what == "no checkpoint":
        file.write_text("text")
    pair = Pair(_cfg(corpus, "--beam", "1", "--bild-small", str(file)), "fairseq-generate")
    with pytest.raises(SystemExit, match=rf"--bild-small {re.escape(str(file))} cannot be read: "):
        pair.load(None, logging.getLogger("test"))


def test_a_small_model_of_another_dictionary(corpus: Path, small: Path, tmp_path: Path) -> None:
    """The checkpoint names its own dictionaries, and fastgen reads those."""
    for language in ("en", "es"):
        lines = (corpus / f"data/dict.{language}.txt").read_text("utf-8").splitlines()
        lines[0], lines[1] = lines[1], lines[0]
        (tmp_path / f"dict.{language}.txt").write_text("\n".join(lines) + "\n", "utf-8")
    state = torch.load(small, weights_only=False)
    state["cfg"]["task"]["data"] = str(tmp_path)
    torch.save(state, tmp_path / "small.pt")
    found = run(
        "fairseq-generate", str(corpus / "data"),
        "--path", str(corpus / "model/checkpoint_last.pt"), *GENERATE, "--beam", "1",
        "--bild-small", str(tmp_path / "small.pt"), status=1,
    )  # fmt: skip
    assert (
        "big-little decoding needs two models of one dictionary: symbol 4 of the source is"
        in found.stderr
    )


def test_a_small_model_whose_dictionary_is_gone(
    corpus: Path, small: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = torch.load(small, weights_only=False)
    state["cfg"]["task"]["data"] = str(tmp_path / "gone")
    file = tmp_path / "small.pt"
    torch.save(state, file)
    cfg = _cfg(corpus, "--beam", "1", "--bild-small", str(file))
    pair = Pair(cfg, "fairseq-generate")
    pair.load(setup_task(cfg.task), logging.getLogger("test"))
    assert f"{file}: its dictionary is not at {tmp_path / 'gone'} any more" in caplog.text
    assert pair.options is not None
    assert pair.small == [pair.options.small]


def test_hub_with_two_models(corpus: Path, small: Path) -> None:
    hubs: list[Any] = [
        TransformerModel.from_pretrained(str(file.parent), file.name, str(corpus / "data"))
        for file in (corpus / "model/checkpoint_last.pt", small)
    ]
    sentences = (corpus / "test.en").read_text("utf-8").splitlines()[:5]
    options = {"beam": 1, "max_len_b": 30}
    with fastgen.disabled():
        stock = hubs[0].translate(sentences, **options)
    with fastgen.bild(
        hubs[1], lossless=True, adaptive_draft=False, fallback_threshold=0.05
    ) as drafting:
        assert hubs[0].translate(sentences, **options) == stock
    assert drafting.counts["drafted"]


@pytest.mark.parametrize("module", [generate, interactive])
def test_a_module_runs_as_its_command(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fastgen run -m fairseq_cli.generate` runs the patched function with the added options."""
    ran: list[Any] = []
    monkeypatch.setattr(module, "main", ran.append)
    monkeypatch.setattr(sys, "argv", ["fastgen"])
    run_target(
        module.__name__, ["DATA", "--path", "x.pt", "--cpu", "--generate-workers", "2"], module=True
    )
    assert len(ran) == 1
    assert command_line.generate_workers == 2


@pytest.mark.parametrize("where", ["typed", "file"])
def test_interactive(corpus: Path, tmp_path: Path, where: str) -> None:
    text = "".join((corpus / "test.en").open(encoding="utf-8").readlines()[:7])
    file = tmp_path / "source"
    file.write_text(text, "utf-8")
    command = (
        "fairseq-interactive", str(corpus / "data"),
        "--path", str(corpus / "model/checkpoint_last.pt"), "--beam", "4", "--buffer-size", "3",
        "--batch-size", "2", "--cpu", "--max-len-b", "30",
        *(["--input", str(file)] if where == "file" else []),
    )  # fmt: skip
    ours, stock = run(*command, text=text, FASTGEN_STRICT="1"), run(*command, text=text, **STOCK)
    assert_alike(ours.stdout, stock.stdout)
    assert sum(line.startswith("S-") for line in ours.stdout.splitlines()) == 7


def test_hub(corpus: Path) -> None:
    hub: Any = TransformerModel.from_pretrained(
        str(corpus / "model"), "checkpoint_last.pt", str(corpus / "data")
    )
    sentences = (corpus / "test.en").read_text("utf-8").splitlines()[:5]
    options = {"beam": 4, "no_repeat_ngram_size": 3, "max_len_b": 30}
    before = {row.name: row.hits for row in fastgen.status().rows}
    ours = hub.translate(sentences, **options)
    assert {row.name: row.hits for row in fastgen.status().rows}["fairseq.generate"] > before[
        "fairseq.generate"
    ]
    with fastgen.disabled():
        assert hub.translate(sentences, **options) == ours


@pytest.mark.slow
def test_a_language_model_by_itself(corpus: Path, tmp_path: Path) -> None:
    """Training, the hub and `fairseq-interactive` read line by line; `fairseq-eval-lm` agrees."""
    data, model = tmp_path / "data", tmp_path / "model"
    data.mkdir()
    for file in (corpus / "data").glob("*.es.*"):
        (data / file.name.replace(".en-es.es", "")).write_bytes(file.read_bytes())
    (data / "dict.txt").write_bytes((corpus / "data/dict.es.txt").read_bytes())
    run(
        "fairseq-train", str(data), "--task", "language_modeling", "--sample-break-mode", "eos",
        "--arch", "transformer_lm", "--optimizer", "adam", "--lr", "0.005", "--max-tokens", "1500",
        "--max-update", "5", "--disable-validation", "--save-dir", str(model),
        "--cpu", "--num-workers", "0", "--no-progress-bar", "--decoder-embed-dim", "32",
        "--decoder-ffn-embed-dim", "64", "--decoder-attention-heads", "2", "--decoder-layers", "2",
        "--tokens-per-sample", "64", "--no-epoch-checkpoints",
    )  # fmt: skip
    lines = (corpus / "test.es").read_text("utf-8").splitlines()[:3]
    hub: Any = TransformerLanguageModel.from_pretrained(
        str(model), "checkpoint_last.pt", str(data)
    ).eval()
    ours = hub.sample(lines, beam=3, max_len_b=60)
    assert [len(hub.score(line)["positional_scores"]) + 1 for line in lines] == [
        len(hub.encode(line)) for line in lines
    ]
    with fastgen.disabled():
        assert hub.sample(lines, beam=3, max_len_b=60) == ours
    command = (
        "fairseq-interactive", str(data), "--task", "language_modeling",
        "--path", str(model / "checkpoint_last.pt"), "--beam", "3", "--max-len-b", "60", "--cpu",
    )  # fmt: skip
    typed = run(*command, text="\n".join(lines) + "\n", FASTGEN_STRICT="1").stdout
    assert re.findall(r"^D-\d+\t\S+\t(.*)$", typed, re.M) == ours
    evaluated = (
        str(data),
        "--path",
        str(model / "checkpoint_last.pt"),
        "--gen-subset",
        "test",
        "--cpu",
    )
    parser = fairseq_options.get_eval_lm_parser()
    cfg = convert_namespace_to_omegaconf(
        fairseq_options.parse_args_and_arch(parser, list(evaluated))
    )
    loss = eval_lm.main(cfg)["loss"]
    with fastgen.disabled():
        assert eval_lm.main(cfg)["loss"] == pytest.approx(loss, rel=1e-5)


class Surprise:
    """An object that creates a file when it is unpickled."""

    def __init__(self, file: str = "") -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


class Harmless:
    class Inner:
        class Deep:
            pass


def test_a_checkpoint_runs_nothing(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    torch.save(
        {"model": {}, "args": argparse.Namespace(), "extra": Surprise(str(tmp_path / "ran"))}, file
    )
    with pytest.raises(
        Exception, match=r"model\.pt holds a (posix|nt)\.system.* and cannot be allowed"
    ):
        checkpoint_utils.load_checkpoint_to_cpu(str(file))
    assert not (tmp_path / "ran").exists()


def holding(folder: Path, extra: Any, **how: Any) -> Path:
    """Write a checkpoint with an object beside the model; return its path."""
    file = folder / "model.pt"
    torch.save(
        {"model": {}, "args": argparse.Namespace(arch="transformer"), "extra": extra}, file, **how
    )
    return file


def test_numbers_of_numpy_load(tmp_path: Path) -> None:
    kinds = (
        "bool float16 float32 float64 int8 int16 int32 int64 "
        "uint8 uint16 uint32 uint64 longlong ulonglong"
    )
    assert isinstance(
        torch_load(holding(tmp_path, [np.dtype(kind).type(1) for kind in kinds.split()])), dict
    )


@pytest.mark.parametrize(
    ("extra", "names"),
    [
        (frozenset({1}), ["builtins.frozenset"]),
        (Harmless.Inner(), [f"{__name__}.Harmless", f"{__name__}.Harmless.Inner"]),
        (
            Harmless.Inner.Deep(),
            [f"{__name__}.Harmless{inner}" for inner in ("", ".Inner", ".Inner.Deep")],
        ),
        (np.str_("text"), ["numpy.dtypes.StrDType"]),
    ],
    ids=["of Python itself", "within a class", "deeper", "made without its name"],
)
def test_advice_that_is_followed_helps(
    tmp_path: Path, extra: Any, names: list[str], setting: Any
) -> None:
    """Repeated advice works too.

    It names only what is safe to allow, and nothing that could run code of the file's choosing.
    """
    file = holding(tmp_path, extra)
    for count in range(len(names)):
        advice = re.escape(f"FASTGEN_FAIRSEQ_ALLOW={','.join(names[: count + 1])}")
        with pytest.raises(UntrustedCheckpointError, match=f"{advice}$"):
            torch_load(file)
        setting("FASTGEN_FAIRSEQ_ALLOW", ",".join(names[: count + 1]))
    assert isinstance(torch_load(file), dict)


def test_a_name_without_a_module_is_of_python_itself(tmp_path: Path, setting: Any) -> None:
    setting("FASTGEN_FAIRSEQ_ALLOW", "frozenset")
    assert isinstance(torch_load(holding(tmp_path, frozenset({1}))), dict)


class Reaches:
    """An object that reads a member of something other than a class."""

    def __reduce__(self) -> Any:
        return getattr, (argparse.Namespace(Inner=1), "Inner")


def test_members_are_those_of_classes(tmp_path: Path) -> None:
    with pytest.raises(UntrustedCheckpointError, match=r"holds a builtins\.getattr"):
        torch_load(holding(tmp_path, Reaches()))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol 4")
def test_a_checkpoint_that_cannot_be_read_safely(tmp_path: Path) -> None:
    """The message says what helps, and omits PyTorch's advice to load unsafely."""
    file = holding(tmp_path, 1, pickle_protocol=4)
    said = (
        rf"^{re.escape(str(file))} cannot be loaded safely: "
        r"Unsupported operand 149\. If .*, save it again in [^\n]*$"
    )
    with pytest.raises(UntrustedCheckpointError, match=said):
        torch_load(file)
    torch.save(torch.load(file, weights_only=False), file)
    assert isinstance(torch_load(file), dict)


def test_a_class_can_be_allowed_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, name = holding(tmp_path, Harmless()), f"{Harmless.__module__}.Harmless"
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
    """Load a checkpoint by fairseq; return {} if it has no model to upgrade.

    This covers the part that fails with other versions, before fairseq reads model settings.
    """
    try:
        return checkpoint_utils.load_checkpoint_to_cpu(str(file))
    except (AttributeError, KeyError):  # the upgrade of a state without a model fails
        return {}


def test_the_fused_encoder_layer_gets_its_mask(corpus: Path) -> None:
    """A loaded post-norm model takes PyTorch's fused layer, with the result of unfused layers."""
    hub: Any = TransformerModel.from_pretrained(
        str(corpus / "model"), "checkpoint_last.pt", str(corpus / "data")
    )
    encoder = hub.models[0].encoder.eval()
    tokens = torch.randint(4, 40, (3, 9))
    tokens[1, :4] = 1  # left padding
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


@pytest.mark.slow
def test_results_path(corpus: Path, tmp_path: Path) -> None:
    """The file holds the standard output, and gets its final name at the end only."""
    command = (
        "fairseq-generate", str(corpus / "data"),
        "--path", str(corpus / "model/checkpoint_last.pt"), *GENERATE, "--beam", "3",
        "--batch-size", "9",
    )  # fmt: skip
    outputs = [
        run(*command, "--postprocess-workers", n, FASTGEN_STRICT="1").stdout
        for n in ("0", "1", "2")
    ]
    stock = run(
        *command, "--results-path", str(tmp_path / "stock"), FASTGEN_SKIP="fairseq.generate_command"
    )
    run(*command, "--results-path", str(tmp_path / "ours"))
    assert [file.name for file in (tmp_path / "ours").iterdir()] == ["generate-test.txt"]
    wanted = _exact((tmp_path / "stock/generate-test.txt").read_text("utf-8"))
    assert _exact((tmp_path / "ours/generate-test.txt").read_text("utf-8")) == wanted
    assert [_exact(text) for text in outputs] == [wanted] * 3
    assert stock.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        (
            "--beam",
            "4",
            "--batch-size",
            "6",
            "--nbest",
            "2",
            "--remove-bpe",
            "--scoring",
            "sacrebleu",
        ),
        ("--beam", "3", "--batch-size", "6", "--print-alignment", "--no-repeat-ngram-size", "3"),
        (
            "--beam",
            "2",
            "--batch-size",
            "6",
            "--min-len",
            "4",
            "--lenpen",
            "0.6",
            "--postprocess-workers",
            "0",
        ),
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
    """Run in this process, where batches start once a few sentences have left.

    With `--min-len` the model is an ensemble of one checkpoint twice.
    """
    together = start_soon(monkeypatch, 0.1)
    checkpoint = str(corpus / "model/checkpoint_last.pt")
    paths = f"{checkpoint}:{checkpoint}" if "--min-len" in options else checkpoint
    arguments = (str(corpus / "data"), "--path", paths, *GENERATE, *options)
    parser = fairseq_options.get_generation_parser()
    given = fairseq_options.parse_args_and_arch(
        parser, [*arguments, "--results-path", str(tmp_path)]
    )
    with caplog.at_level("INFO"):
        generate.main(given)
    assert max(together) > 1
    ours = (tmp_path / "generate-test.txt").read_text("utf-8")
    stock = run("fairseq-generate", *known_to_fairseq(arguments), **STOCK)
    assert_alike(ours, stock.stdout)
    assert _alignments(ours) == _alignments(stock.stdout)
    count = re.compile(r"Translated [\d,]+ sentences \([\d,]+ tokens\)")
    assert len(count.findall(caplog.text)) == 1
    assert count.findall(caplog.text) == count.findall(stock.stdout + stock.stderr)


def _alignments(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("A-")]


def _exact(output: str) -> list[str]:
    return [line for line in output.splitlines() if re.match(r"[STHDPC]-\d+\t|Generate ", line)]


@pytest.mark.slow
def test_decode_hypothesis(corpus: Path) -> None:
    command = (
        "fairseq-generate", str(corpus / "data"),
        "--path", str(corpus / "model/checkpoint_last.pt"), *GENERATE, "--beam", "1",
    )  # fmt: skip
    with_them = _exact(run(*command, "--decode-hypothesis").stdout)
    without = _exact(run(*command, "--no-decode-hypothesis").stdout)
    assert without == [line for line in with_them if not line.startswith("D-")]
    assert len(without) < len(with_them)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--postprocess-workers", "-1", "must be at least 0, not -1"),
        ("--beam", "0", "must be at least 1, not 0"),
    ],
)
def test_a_number_that_is_too_small(corpus: Path, option: str, value: str, said: str) -> None:
    command = ("fairseq-generate", str(corpus / "data"), "--path", "model.pt", option, value)
    assert f"argument {option}: {said}" in run(*command, status=2).stderr


def test_a_run_that_fails_leaves_no_whole_file(tmp_path: Path) -> None:
    from fastgen.patches.fairseq.commands.generate_command import _output

    cfg = argparse.Namespace(
        common_eval=argparse.Namespace(results_path=str(tmp_path)),
        dataset=argparse.Namespace(gen_subset="test"),
    )
    (tmp_path / "generate-test.txt").write_text("of an earlier run")

    def fails() -> None:
        with _output(cfg) as output:
            output.write("H-0\n")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fails()
    assert (tmp_path / "generate-test.txt").read_text() == "of an earlier run"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["generate", "interactive"])
def test_without_standard_output(corpus: Path, command: str) -> None:
    """If it was closed before Python started, nothing is printed and the command succeeds."""
    found = subprocess.run(
        [
            sys.executable, "-m", "fastgen", "run", f"fairseq-{command}", str(corpus / "data"),
            "--path", str(corpus / "model/checkpoint_last.pt"), *GENERATE, "--beam", "1",
        ],
        input="a house\n", stderr=subprocess.PIPE, text=True, check=False,
        preexec_fn=functools.partial(os.close, 1),
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-2000:]


@pytest.mark.parametrize(
    ("name", "where", "why"),
    [
        ("generate", "pipe", "Broken pipe"),
        ("generate", "/dev/full", "No space left on device"),
        ("interactive", "pipe", "Broken pipe"),
    ],
)
@pytest.mark.slow
def test_output_that_fails_is_said_and_no_success(
    corpus: Path, name: str, where: str, why: str
) -> None:
    command = [
        sys.executable, "-m", "fastgen", "run", f"fairseq-{name}", str(corpus / "data"), "--path",
        str(corpus / "model/checkpoint_last.pt"), *GENERATE, "--beam", "1",
        *(["--batch-size", "2"] if name == "generate" else []),
    ]  # fmt: skip
    if where == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
    elif not Path(where).exists():
        pytest.skip(f"no {where} on this system")
    else:
        writer = os.open(where, os.O_WRONLY)
    found = subprocess.run(
        command, input="a house\n", stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert found.returncode != 0
    assert f"fairseq-{name}: the output is not whole: {why}" in found.stderr
    assert "Exception ignored" not in found.stderr
