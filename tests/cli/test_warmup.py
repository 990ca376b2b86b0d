"""`fastgen warmup` makes every requested call, and reports what did not run."""

from pathlib import Path

import pytest
import transformers as tf

import fastgen
from fastgen.cli import main
from tests.support import zoo


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models") / "marian"
    zoo.build("marian").save_pretrained(place)
    return place


def warmup(model: Path, *words: object) -> int:
    return main([str(word) for word in ("warmup", model, "--device", "cpu", *words)])


def test_each_shape_is_generated_three_times(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = fastgen.status()["transformers.beam_search"].hits
    words = ("--batch-size", 1, 3, "--source-tokens", 5, 9, "--num-beams", 2, "--max-new-tokens", 4)
    assert warmup(folder, *words) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["sentences", "tokens", "call", "1", "call", "2", "call", "3"]
    assert [row.split()[:2] for row in rows] == [["1", "5"], ["1", "9"], ["3", "5"], ["3", "9"]]
    assert all(row.split()[3::2] == ["s", "s", "s"] for row in rows)
    assert fastgen.status()["transformers.beam_search"].hits == before + 12


def test_what_does_not_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tf.MambaConfig(
        vocab_size=96, hidden_size=16, num_hidden_layers=1, state_size=4, intermediate_size=16
    )
    tf.MambaForCausalLM(config).save_pretrained(tmp_path)
    words = ("--batch-size", 1, "--source-tokens", 5, "--num-beams", 2, "--max-new-tokens", 4)
    assert warmup(tmp_path, *words) == 1
    assert "declined 3 calls: transformers.beam_search" in capsys.readouterr().out


def test_what_generate_raises_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert warmup(folder, "--batch-size", 2, "--source-tokens", 5, "--num-return-sequences", 3) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("fastgen warmup: 2 sentences of 5 tokens: generate raises ValueError: ")
    assert shown.count("\n") == 1
