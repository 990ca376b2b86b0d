"""The `fastgen` command, run as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import MarianConfig, MarianMTModel, PreTrainedTokenizerFast

import fastgen
from fastgen.cli import main
from fastgen.cli.bench.workloads import Workload
from fastgen.cli.environment import status
from fastgen.config import VARIABLES
from fastgen.patches.fairseq import TOOLKIT as FAIRSEQ
from tests.support.processes import python

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder like examples/en-es whose model is an untrained toy."""
    folder = tmp_path_factory.mktemp("en-es")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate(["<pad>", "</s>", "<unk>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=256,
    ).save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = MarianConfig(
        vocab_size=len(vocabulary), d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16,
        decoder_ffn_dim=16, max_position_embeddings=256, init_std=0.5, pad_token_id=0,
        bos_token_id=0, eos_token_id=1, decoder_start_token_id=0, forced_eos_token_id=None,
    )  # fmt: skip
    MarianMTModel(config).half().save_pretrained(folder / "model")
    (folder / "test.en").write_text("One.\nThe second line.\n" * 5, "utf-8")
    (folder / "test.es").write_text("Uno.\nLa segunda línea.\n" * 5, "utf-8")
    return folder


def fastgen_command(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return python(["-m", "fastgen", *words], environment=os.environ | variables)


def test_status_imports_the_toolkits_and_lists_every_variable():
    done = fastgen_command("status", "--all", FASTGEN_SKIP="transformers.sample")
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line}
    assert lines["transformers.beam_search"][0] == "applied"
    assert lines["transformers.sample"][0] == "skipped"
    assert lines["FASTGEN_SKIP"][0] == "transformers.sample"
    assert all(variable.name in lines for variable in VARIABLES)


def test_status_is_a_summary():
    done = fastgen_command("status", FASTGEN_SKIP="transformers.sample")
    assert done.returncode == 0, done.stderr
    assert "  not running, transformers.sample: FASTGEN_SKIP" in done.stdout
    assert "transformers.beam_search" not in done.stdout
    variables = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("FASTGEN")}
    assert variables == {"FASTGEN_SKIP", "FASTGEN_CACHE_DIR"} | {"FASTGEN_OPS"} & set(os.environ), (
        "those that are set"
    )


def test_status_as_json():
    done = fastgen_command("status", "--json", FASTGEN="0")
    found = json.loads(done.stdout)
    assert found["enabled"] is False
    assert {row["state"] for row in found["rows"]} == {"off"}
    # Without fastgen's patches, fairseq cannot be imported on current Python versions.
    assert not [module for module in found["import_problems"] if not module.startswith("fairseq")]
    assert {v["name"]: v["value"] for v in found["variables"]}["FASTGEN"] == "0"


def test_a_broken_toolkit_is_reported(tmp_path: Path):
    (tmp_path / "transformers.py").write_text("raise RuntimeError('half installed')")
    done = fastgen_command("status", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 0, done.stderr
    assert "half installed" in done.stdout


def test_what_a_toolkit_needs_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def without_hydra(module: str) -> None:
        if module.startswith("fairseq"):
            raise ModuleNotFoundError("No module named 'hydra'", name="hydra")

    monkeypatch.setattr(status, "import_module", without_hydra)
    monkeypatch.setattr(status, "find_spec", lambda module: module)
    assert main(["status"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "hydra" in line]
    assert len(said) == 1
    assert "fairseq.checkpoint_utils, " in said[0]
    assert said[0].endswith(
        f"cannot be imported: ModuleNotFoundError: No module named 'hydra'; {FAIRSEQ.install_hint}"
    )


def test_help_imports_no_torch():
    code = (
        "import sys, fastgen.cli as c\n"
        "try: c.main(['--help'])\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"
    assert "demo" in done.stdout


def test_demo_shows_speed_only_for_equal_output(
    example: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    figures = tmp_path / "figures.json"
    assert main(["demo", "--quick", "--examples", str(example), "--json", str(figures)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("same output           yes") == 2
    assert shown.count("faster by") == 2
    assert "reference  Uno." in shown
    assert "MarianMTModel  " in shown
    assert "beam search" in shown

    found = json.loads(figures.read_text("utf-8"))
    assert found["environment"]["torch"] == torch.__version__
    for part in found["parts"]:
        assert part["outcome"]["equal"]
        assert part["outcome"]["ratio"] > 0
        assert part["hits"]["transformers.beam_search"] == 2
        assert part["fallbacks"] == {}
        kv = part["kv_cache_bytes"]
        assert kv["fastgen"] < kv["transformers"]
        assert kv["transformers"] == kv["transformers_computed"]
    assert found["parts"][0]["bleu_signature"].startswith("nrefs:1")
    assert len(found["parts"][0]["translations"]) == 8

    run = Workload.run

    def one_token_changed_where_patched(self, after_batch):
        outputs = run(self, after_batch)
        if not fastgen.patches.engine.engine.is_disabled():
            outputs[0][0, 1] += 1
        return outputs

    monkeypatch.setattr(Workload, "run", one_token_changed_where_patched)
    assert main(["demo", "--quick", "--examples", str(example), "--json", str(figures)]) == 1
    shown = capsys.readouterr().out
    assert shown.count("same output           NO: batch 0: 1 of") == 2
    assert "faster" not in shown
    assert "sentences/s" not in shown
    assert json.loads(figures.read_text("utf-8"))["parts"][0]["outcome"]["ratio"] is None


def test_demo_says_that_fastgen_did_not_run(example: Path):
    done = fastgen_command(
        "demo", "--quick", "--examples", str(example), FASTGEN_SKIP="transformers"
    )
    assert done.returncode == 1
    assert "fastgen did not run" in done.stdout
    assert "faster by" not in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--examples", "/nowhere"], "--examples DIR"),
        (["--json", "/nowhere/figures.json"], "there is no folder /nowhere"),
    ],
)
def test_demo_explains_what_is_missing(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["demo", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [[], ["nothing"], ["demo", "--sentences", "0"], ["demo", "--rounds", "x"]]
)
def test_wrong_usage_exits_with_2(words: list[str]):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
