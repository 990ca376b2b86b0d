"""The papers' tables at toy size: measured, plotted and shown, with no speed on a mismatch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import BertModel

from benchmarks import (
    fairseq_command,
    families,
    forwards,
    load,
    loops,
    many_requests,
    plot,
    tables,
)
from benchmarks.paper import __main__ as command
from benchmarks.paper import amun, fastseq
from fastgen.models.specs.registry import SPECS
from fastgen.patches.engine.engine import is_disabled

IN_ONE_PROCESS = [
    name for name in command.TABLES if not name.startswith(("bild", "fastseq_table2"))
]


def measured(
    folder: Path, *names: str, status: int = 0, more: tuple[str, ...] = ()
) -> dict[str, Any]:
    words = ["--table", *names, "--size", "tiny", "--rounds", "1", "--out", str(folder), *more]
    assert command.main(words) == status
    return {
        file.stem: json.loads(file.read_text("utf-8")) for file in (folder / "paper").glob("*.json")
    }


@pytest.mark.slow
def test_tables_are_made_drawn_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(tmp_path / "cpu", *IN_ONE_PROCESS)
    assert set(found) == set(IN_ONE_PROCESS)
    for name, data in found.items():
        result = data["result"]
        assert result["equal"], name
        assert all(len(row) == len(result["columns"]) for row in result["rows"]), name
        if (curve := result["curve"]) is not None:
            assert all(len(values) == len(curve["x"]) for values in curve["series"].values()), name
    shares = found["lightseq_figure4"]["result"]["raw"]
    assert all(
        abs(sum(share.values()) - 1) < 1e-9 and min(share.values()) > 0 for share in shares.values()
    )
    assert plot.main(["--results", str(tmp_path / "cpu"), "--out", str(tmp_path / "plots")]) == 0
    drawn = {file.stem.removeprefix("cpu-") for file in (tmp_path / "plots").iterdir()}
    assert drawn == {name for name, data in found.items() if data["result"]["curve"] is not None}
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    shown = tables.paper()
    assert all(data["title"] in shown for data in found.values())
    assert "| BART 12L-12L-1024 | 2.4 -> 18.4 | 7.7x |" in shown


def test_no_speed_where_outputs_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    true = amun.kbest

    def off_by_one(*args: Any, **kwargs: Any) -> Any:
        values, tokens, *others = true(*args, **kwargs)
        return values, tokens + 1, *others

    monkeypatch.setattr(amun, "kbest", off_by_one)
    found = measured(tmp_path / "cpu", "amun_table3", status=1)["amun_table3"]["result"]
    assert not found["equal"]
    assert found["rows"] == []
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert "The outputs differed: no speed is given." in tables.paper()


def test_features_are_switched_on_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line is a run with its own variables; no speed is shown if outputs differ."""
    ran: list[tuple[str, dict[str, str], str]] = []

    def run(name: str, *words: str, **variables: str) -> tuple[str, str]:
        ran.append((Path(name).stem, variables, words[words.index("--batch-size") + 1]))
        found = "-0.7\tworse" if variables.get("FASTGEN_LINEAR") == "off" else "-0.5\ttext"
        return f"H-0\t{found}\n", ""

    monkeypatch.setattr(fairseq_command, "prepare", lambda *_: None)
    monkeypatch.setattr(fairseq_command, "run", run)
    result = measured(tmp_path, "fastseq_table2", status=1)["fastseq_table2"]["result"]
    assert ran == [
        ("no_cache", {"FASTGEN": "compat"}, "4"),
        ("fairseq-generate", {"FASTGEN": "compat"}, "4"),
        ("fairseq-generate", {"FASTGEN_SKIP": "fairseq.generate,fairseq.attention"}, "4"),
        ("fairseq-generate", {"FASTGEN_STEP": "module", "FASTGEN_LINEAR": "off"}, "4"),
        ("fairseq-generate", {"FASTGEN_STEP": "module"}, "4"),
        ("fairseq-generate", {}, "4"),
        ("fairseq-generate", {}, "16"),
    ]  # fmt: skip
    rows = {row[0]: row for row in result["rows"]}
    assert rows["+ n-gram blocking, shared cache"][-2:] == ["", "outputs differ"]
    assert rows["fairseq"][-1] == "1.00x [1.00, 1.00]"
    assert len(rows) == len(fastseq._LADDER)


def cell(
    small: str | None, bleu: float, p_value: float, ratio: float, **more: Any
) -> dict[str, Any]:
    point = None if small is None else {"fallback": 0.6, "rollback": 2.0}
    counts = (
        {}
        if small is None
        else {"tokens": 100, "drafted": 60, "large_calls": 40, "small_calls": 90}
    )
    found = {
        "batch": 1,
        "small": small,
        "point": point,
        "bleu": bleu,
        "p_value": p_value,
        "ratio": ratio,
    }
    return found | {"low": ratio, "high": ratio, "counts": counts} | more


def test_a_pair_s_table_rests_on_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config_of: Callable[[Path, int], Path]
) -> None:
    names = ("bild_table1", "bild_figure8")
    assert measured(tmp_path, *names) == {}
    assert capsys.readouterr().out.count("not measured. needs bild.json") == 2
    cells = {
        "batch 1, large alone": cell(None, 40.0, 1.0, 1.0),
        "batch 1, aligned, lossy": cell("aligned", 39.5, 0.01, 1.9),
        "batch 1, aligned, as good": cell("aligned", 39.9, 0.4, 1.5),
        "batch 1, aligned, worse": cell("aligned", 38.0, 0.01, 3.0),
    }
    arguments = {"large": "l", "small": "s", "sentences": 4}
    (tmp_path / "bild.json").write_text(
        json.dumps({"arguments": arguments, "result": {"cells": cells}})
    )
    pair = ("--pair", str(config_of(tmp_path / "l", 8)), str(config_of(tmp_path / "s", 4)))
    found = measured(tmp_path, *names, more=pair)
    rows = {row[0]: row for row in found["bild_table1"]["result"]["rows"]}
    assert rows["BiLD, aligned, no loss"][3] == "1.50x [1.50, 1.50]"
    assert rows["BiLD, aligned, 1 point"][3] == "1.90x [1.90, 1.90]"
    assert rows["BiLD, unaligned, no loss"][3] == "none"
    # Weights used per token: 6 * 8^2 + 2 * 8 * 8 + 8 * 20 = 672 in the large model, and 6 * 4^2 + 2
    # * 4 * 4 + 80 = 208 in the small one.
    flops, moved = (672 * 100 + 208 * 90) / 67_200, (672 * 40 + 208 * 90) / 67_200
    shown = next(
        row for row in found["bild_figure8"]["result"]["rows"] if row[0] == "aligned, as good"
    )
    assert shown[1:4] == [f"{flops:.2f}", f"{moved:.2f}", f"{flops / moved:.2f}"]


@pytest.mark.slow
def test_every_family_has_a_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SPECS:
        assert families.build(name, tiny=True).config.model_type == name
    words = [
        "--family",
        "bloom",
        "unilm",
        "whisper",
        "--scale",
        "tiny",
        "--rounds",
        "1",
        "--out",
        str(tmp_path / "cpu"),
    ]
    assert families.main(words) == 0
    found = json.loads((tmp_path / "cpu/families.json").read_text("utf-8"))["result"]
    assert {name: list(calls) for name, calls in found.items()} == {
        key: list(families.CALLS) for key in words[1:4]
    }
    for calls in found.values():
        for call, one in calls.items():
            loop = "transformers.beam_search" if "beams" in call else "transformers.sample"
            assert one["hits"][loop] > 0
            assert one["fallbacks"] == {}
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.families_speed().count("| `whisper` |") == 1


@pytest.mark.slow
def test_forwards_have_a_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--model", "bert 2 x 64", "roberta 12 x 768", "--scale", "tiny", "--rounds", "1"]
    assert forwards.main([*words, "--out", str(tmp_path / "cpu")]) == 0
    found = json.loads((tmp_path / "cpu/forwards.json").read_text("utf-8"))["result"]
    assert list(found) == words[1:3]
    assert list(found["bert 2 x 64"]) == list(forwards.BATCHES)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.encoders_speed().count("| `bert 2 x 64` |") == 1


@pytest.mark.slow
def test_many_requests_have_a_speed(tmp_path: Path) -> None:
    sizes = ["--requests", "4", "--new-tokens", "8", "--scale", "tiny", "--rounds", "1"]
    assert many_requests.main([*sizes, "--out", str(tmp_path / "cpu")]) == 0
    result = json.loads((tmp_path / "cpu/many_requests.json").read_text("utf-8"))["result"]
    assert len(result["cells"]) == len(many_requests.MODELS) * len(many_requests.CALLS)
    assert list(result["cells"]["decoder-only, greedy"]["over"]) == ["padded", "stock"]
    for cell in result["cells"].values():
        assert cell["hits"]["transformers.generate_batch"] > 0


@pytest.mark.slow
def test_requests_that_arrive_at_random_are_answered(tmp_path: Path) -> None:
    sizes = ["--requests", "12", "--scale", "tiny", "--arms", "manager", "manager, mixed"]
    assert load.main([*sizes, "--out", str(tmp_path / "cpu")]) == 0
    result = json.loads((tmp_path / "cpu/load.json").read_text("utf-8"))["result"]
    assert len(result["cells"]) == 2 * (1 + len(load.LOADS))
    for name, cell in result["cells"].items():
        assert cell["equal"] + cell["near tie"] == (11 if "mixed" in name else 12)


@pytest.mark.slow
def test_loops_have_a_speed(tmp_path: Path) -> None:
    sizes = ["--scale", "tiny", "--batch", "4", "--rounds", "1"]
    assert loops.main([*sizes, "--out", str(tmp_path / "cpu")]) == 0
    cells = json.loads((tmp_path / "cpu/loops.json").read_text("utf-8"))["result"]["cells"]
    assert len(cells) == 3 * len(loops.CALLS)
    assert all(list(cell["over"]) == ["generate", "stock"] for cell in cells.values())


def test_no_speed_of_forwards_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = BertModel.forward

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        output: Any = right(self, *args, **kwargs)
        return output if is_disabled() else type(output)(output[0] + 0.01, output[1] + 0.01)

    monkeypatch.setattr(BertModel, "forward", wrong)
    words = [
        "--model",
        "bert 2 x 64",
        "--scale",
        "tiny",
        "--rounds",
        "1",
        "--out",
        str(tmp_path / "cpu"),
    ]
    assert forwards.main(words) == 1
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert "outputs differ" in tables.encoders_speed()


@pytest.fixture
def config_of() -> Callable[[Path, int], Path]:
    from transformers import MarianConfig

    def make(folder: Path, width: int) -> Path:
        config = MarianConfig(
            d_model=width, decoder_layers=1, decoder_ffn_dim=width, vocab_size=20, pad_token_id=19
        )
        config.save_pretrained(folder)
        return folder

    return make
