"""`fastgen bench` at toy size: its table, its files, its errors, and no speed on a mismatch."""

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, MarianMTModel

from fastgen import config
from fastgen.cli import main
from fastgen.cli.bench import benchmark_cell
from fastgen.patches.engine import engine
from tests.cli.test_bild_tools import LINES, llama, marian, tokenizer_of

NEW = 6
pytestmark = pytest.mark.filterwarnings("ignore:.*max_length.*")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model of each kind, and a text."""
    place = tmp_path_factory.mktemp("bench")
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 259,
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 64,
    }
    unproven = GPT2LMHeadModel(
        GPT2Config(**shape, initializer_range=0.5, pad_token_id=0, eos_token_id=1)
    )
    for name, model in {
        "marian": marian(16, 0),
        "llama": llama(16, 0),
        "unproven": unproven,
    }.items():
        model.save_pretrained(place / name)
        tokenizer_of().save_pretrained(place / name)
    (place / "text").write_text("\n".join(LINES) + "\n", "utf-8")
    return place


def bench(model: Path, *more: object) -> int:
    given = (
        "bench",
        model,
        "--threads",
        1,
        "--device",
        "cpu",
        "--max-new-tokens",
        NEW,
        "--rounds",
        2,
        *more,
    )
    return main([str(word) for word in given])


def cells_of(output: Path) -> dict[tuple[int, int], dict[str, Any]]:
    found = json.loads((output / "bench.json").read_text("utf-8"))
    assert found["environment"]["torch"] == torch.__version__
    assert found["arguments"]["max_new_tokens"] == NEW
    return {(one["beams"], one["batch"]): one for one in found["cells"]}


@pytest.mark.parametrize("kind", ["marian", "llama"])
def test_each_cell_is_compared_and_timed(
    folder: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = ("--num-beams", 1, 3, "--batch-size", 1, 2, "--lines", 4)
    assert bench(folder / kind, *grid, "--dtype", "float64", "--output", tmp_path / "new") == 0
    cells = cells_of(tmp_path / "new")
    assert list(cells) == [(1, 1), (1, 2), (3, 1), (3, 2)]
    for (beams, batch), one in cells.items():
        outcome = one["outcome"]
        assert outcome["equal"]
        assert outcome["near_ties"] == 0
        assert len(outcome["rounds"]) == 2
        assert 0 < outcome["low"] <= outcome["ratio"] <= outcome["high"]
        assert one["tokens"] == 4 * NEW, "from random tokens no output ends early"
        loop = "transformers.beam_search" if beams > 1 else "transformers.sample"
        assert one["hits"][loop] == 3 * 4 / batch, "a first round and two more, patched alone"
        assert one["fallbacks"] == {}
    shown = capsys.readouterr().out
    assert shown.count("the same (rounds: 2)") == 4
    assert (tmp_path / "new" / "bench.svg").read_text("utf-8").count("x, ") >= 4


def test_text_of_a_file(folder: Path, tmp_path: Path) -> None:
    """Blank lines are no sources, and outputs stop at their end token."""
    given = ("--input", folder / "text", "--num-beams", 2, "--batch-size", 6, "--output", tmp_path)
    assert bench(folder / "marian", *given) == 0
    (one,) = cells_of(tmp_path).values()
    assert 0 < one["tokens"] < 6 * NEW + 1
    assert one["outcome"]["equal"]


def test_no_speed_where_outputs_differ(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = MarianMTModel.generate

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        ids = right(self, *args, **kwargs)
        if not engine.is_disabled() and kwargs["num_beams"] == 2:
            ids[0, -1] = (ids[0, -1] + 7) % 259
        return ids

    monkeypatch.setattr(MarianMTModel, "generate", wrong)
    grid = ("--num-beams", 1, 2, "--batch-size", 3)
    assert bench(folder / "marian", *grid, "--dtype", "float64", "--output", tmp_path) == 1
    cells = cells_of(tmp_path)
    assert cells[1, 3]["outcome"]["equal"]
    assert cells[2, 3]["outcome"]["ratio"] is None
    assert cells[2, 3]["outcome"]["rounds"] == []
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "DIFFERS" in line]
    assert line.split()[:6] == ["2", "3", "-", "-", "-", "-"]
    assert "1 of 3 sequences differ" in line
    assert "1 beam, batch 3" in (tmp_path / "bench.svg").read_text("utf-8")
    assert "2 beams, batch 3" not in (tmp_path / "bench.svg").read_text("utf-8")


def test_what_fastgen_declines_has_its_reason(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    setting: Callable[[str, str], None],
) -> None:
    from fastgen.models.specs.registry import SPECS

    monkeypatch.delitem(SPECS, "gpt2")
    setting("FASTGEN_UNKNOWN", "off")
    assert bench(folder / "unproven", "--num-beams", 2, "--batch-size", 2) == 0
    shown = capsys.readouterr().out
    assert "fastgen's loops did not run" in shown
    assert "declined 3 calls: transformers.beam_search, model type 'gpt2' is not supported" in shown
    assert "the same (rounds: 2)" in shown


def test_a_model_that_fails_is_one_cell(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = LlamaForCausalLM.forward

    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(kwargs["input_ids"]) == 2:
            raise RuntimeError("no memory for two\nat all")
        return right(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", fails)
    assert bench(folder / "llama", "--num-beams", 1, "--batch-size", 2, 1) == 1
    shown = capsys.readouterr().out
    assert "not measured: RuntimeError: no memory for two\n" in shown
    assert shown.count("the same (rounds: 2)") == 1


def test_it_ends_in_time(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Run fewer rounds when time is short, and no more cells once it is up."""
    right = LlamaForCausalLM.generate
    monkeypatch.setattr(
        LlamaForCausalLM,
        "generate",
        lambda self, **kwargs: time.sleep(0.2) or right(self, **kwargs),
    )
    given = (
        "--num-beams",
        1,
        "--batch-size",
        1,
        2,
        3,
        "--lines",
        3,
        "--rounds",
        50,
        "--minutes",
        1.5 / 60,
    )
    assert bench(folder / "llama", *given, "--output", tmp_path) == 0
    cells = list(cells_of(tmp_path).values())
    assert len(cells[0]["outcome"]["rounds"]) == 1
    assert cells[2]["outcome"] is None
    assert "3  not measured: the 0.025 minutes are over" in capsys.readouterr().out


def test_nothing_measured_is_no_success(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark_cell, "compare", lambda *args, **kwargs: 1 / 0)
    assert bench(folder / "llama", "--num-beams", 1, "--batch-size", 1) == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--output", "/nowhere/at/all"), "there is no folder /nowhere/at"),
        (("--lines", 3, "--batch-size", 4), "3 sources do not fill a batch of 4"),
        (("--input", "/nowhere/text"), "/nowhere/text cannot be read"),
        (("--device", "nothing"), "--device nothing: "),
    ],
)
def test_what_is_wrong_is_said(
    folder: Path, more: tuple[object, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(folder / "llama", *more) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(tmp_path) == 2
    assert "config.json is missing" in capsys.readouterr().err


def test_switched_off(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTGEN", "0")
    config.reload()
    try:
        assert bench(folder / "llama") == 2
    finally:
        monkeypatch.undo()
        config.reload()
    assert "FASTGEN=0 disables" in capsys.readouterr().err


@pytest.fixture
def _own_precision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the precision that a command sets for its process."""
    monkeypatch.setenv("FASTGEN_PRECISION", "model")
    config.reload()
    yield
    monkeypatch.undo()
    config.reload()


@pytest.mark.usefixtures("_own_precision")
def test_int8(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Outputs may differ; the table says how many are equal, and scores both."""
    (tmp_path / "references").write_text("\n".join(LINES) + "\n", "utf-8")
    given = "--input", folder / "text", "--num-beams", 1, "--batch-size", 2
    precise = "--precision", "int8", "--reference", tmp_path / "references"
    assert bench(folder / "marian", *given, *precise, "--output", tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert re.search(r"int8: \d of 2 texts are the same", printed)
    for name in ("BLEU", "chrF"):
        assert re.search(rf"{name}: [\d.]+ in the model's precision, [\d.]+ in int8", printed)
    cell = json.loads((tmp_path / "out" / "bench.json").read_text("utf-8"))["cells"][0]
    assert set(cell["quality"]) == {"BLEU", "chrF"}
    assert config.settings().precision == "int8"


@pytest.mark.usefixtures("_own_precision")
def test_int8_without_references(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The texts in the model's precision are the references then."""
    assert bench(folder / "llama", "--precision", "int8", "--num-beams", 1) == 0
    assert "chrF: 100.00 in the model's precision" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--reference", "REFERENCES"), "--reference needs --input and --precision int8"),
        (
            ("--reference", "REFERENCES", "--input", "TEXT", "--precision", "int8"),
            "1 lines for",
        ),
    ],
)
@pytest.mark.usefixtures("_own_precision")
def test_references_that_do_not_fit(
    folder: Path,
    tmp_path: Path,
    options: tuple[str, ...],
    problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "references").write_text("one\n", "utf-8")
    places = {"REFERENCES": tmp_path / "references", "TEXT": folder / "text"}
    assert bench(folder / "marian", *(places.get(each, each) for each in options)) != 0
    assert problem in capsys.readouterr().err
