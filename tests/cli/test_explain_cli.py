"""`fastgen explain` prints the findings of `fastgen.explain`, and exits with what would run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import fastgen
from fastgen.cli import main
from tests.support import zoo

NEW = ("--max-new-tokens", 4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return folders of models without tokenizers: `marian`, `llama`, and unsupported `mamba`."""
    root = tmp_path_factory.mktemp("models")
    shape: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "state_size": 4,
    }
    mamba = tf.MambaForCausalLM(tf.MambaConfig(**shape, intermediate_size=16))
    for name, model in {
        "marian": zoo.build("marian"),
        "llama": zoo.build("llama"),
        "mamba": mamba,
    }.items():
        model.save_pretrained(root / name)
    return root


def explain(model: Path, *words: object) -> int:
    """Run the command and return its exit status, also where argparse exits."""
    try:
        return main([str(word) for word in ("explain", model, "--device", "cpu", *words)])
    except SystemExit as stopped:
        return int(stopped.code or 0)


@pytest.mark.parametrize(
    ("model", "words", "loop"),
    [
        (
            "marian",
            ("--num-beams", 4, "--batch-size", 2),
            "fastgen's beam search, 2 sentences x 4 rows",
        ),
        ("llama", ("--do-sample", "--n-best", 3), "fastgen's sampling, 1 sentences x 3 rows"),
        ("llama", (), "fastgen's greedy search, 1 sentences x 1 rows"),
    ],
)
def test_the_loop_and_the_decode_steps_are_named(
    folders: Path,
    model: str,
    words: tuple[object, ...],
    loop: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert explain(folders / model, *words, *NEW) == 0
    shown = capsys.readouterr().out
    assert loop in shown
    assert "decode steps        from the weights\n" in shown
    assert "keys and values" in shown


@pytest.mark.parametrize("name", ["marian", "llama", "mamba"])
def test_json_is_the_explanation(
    folders: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "--batch-size",
        3,
        "--source-tokens",
        7,
        "--num_beams",
        2,
        "--dtype",
        "float64",
        "--json",
    )
    status = explain(folders / name, *words, *NEW)
    found = json.loads(capsys.readouterr().out)
    kind = tf.MarianMTModel if name == "marian" else tf.AutoModelForCausalLM
    model: Any = kind.from_pretrained(folders / name, dtype=torch.float64).eval()
    inputs = {
        "input_ids": torch.full((3, 7), 5),
        "attention_mask": torch.ones(3, 7, dtype=torch.int64),
    }
    expected = fastgen.explain(model, **inputs, num_beams=2, max_new_tokens=4)
    assert found == json.loads(json.dumps(expected.to_dict()))
    assert status == (0 if expected.plan is not None else 1)


def test_a_declined_family_has_status_1_and_its_reason(
    folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain(folders / "mamba", *NEW) == 1
    assert (
        "transformers' own: MambaForCausalLM keeps other state than keys and values"
        in capsys.readouterr().out
    )


def test_declined_calls_have_status_1_and_their_reason(
    folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain(folders / "llama", "--assistant-early-exit", 1, *NEW) == 1
    assert "transformers' own: _assisted_decoding is not patched" in capsys.readouterr().out
    with fastgen.disabled():
        assert explain(folders / "llama", *NEW) == 1
    assert "transformers' own: inside fastgen.disabled()" in capsys.readouterr().out


def test_options_of_the_model_and_of_a_file_hold(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flags override the file, and the file overrides the model's own generation config."""
    model = zoo.build("llama")
    model.generation_config.num_beams, model.generation_config.max_new_tokens = 2, 4
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "three.json").write_text('{"num_beams": 3}')
    file = ("--generation-config", tmp_path / "three.json")
    for words, beams in (((), 2), (file, 3), ((*file, "--num-beams", 4), 4)):
        assert explain(tmp_path / "model", *words, "--json") == 0
        assert json.loads(capsys.readouterr().out)["plan"]["beams"] == beams


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--num-beamz", 4), "there is no option --num-beamz; there is --num-beams"),
        (("--num-beams", "x"), "--num-beams x: must be int"),
        (("--num-beams", 0), "--num-beams 0: must be at least 1, not 0"),
        (("--n-best", -1), "--num-return-sequences -1: must be at least 1, not -1"),
        (("--batch-size", 0), "argument --batch-size: must be at least 1, not 0"),
        (("--source-tokens", "x"), "argument --source-tokens: must be a whole number, not 'x'"),
        (("--dtype", "int8"), "argument --dtype: invalid choice: 'int8'"),
        (("--device", "nothing"), "--device nothing: "),
        (
            ("--output_scores",),
            "--output-scores is not an option here: pass it to fastgen.explain(model, ...)",
        ),
        (
            ("--assistant-model", "small"),
            "--assistant-model is not an option here: pass it to fastgen.explain(model, ...)",
        ),
        (
            ("--max-length", 8),
            "generate would raise ValueError: Input length of input_ids is 32, but `max_length`",
        ),
        (
            ("--num-beams", 4, "--num-beam-groups", 3, *NEW),
            "num_beams=4 cannot be divided by num_beam_groups=3",
        ),
    ],
)
def test_what_the_user_has_to_correct(
    folders: Path, words: tuple[object, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain(folders / "llama", *words) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.out == ""


def test_a_file_with_an_argument_for_python_alone(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "scores.json"
    file.write_text('{"output_scores": true}')
    assert explain(folders / "llama", "--generation-config", file) == 2
    message = (
        f"--generation-config {file}: output_scores is not an option here: "
        "pass it to fastgen.explain(model, ...)"
    )
    assert message in capsys.readouterr().err


def test_a_folder_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(tmp_path) == 2
    assert f"{tmp_path} holds no model: config.json is missing" in capsys.readouterr().err
