"""The record of how transformers' families run, and some of them by the recipe that it is from."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from benchmarks import tables
from benchmarks.coverage import __main__ as command
from benchmarks.coverage import family, recipe, record
from fastgen.models.specs.registry import SPECS

RECORDED: dict[str, Any] = json.loads(record.FILE.read_text("utf-8"))["families"]


def test_no_family_is_wrong_and_enough_are_accelerated() -> None:
    assert not [name for name, found in RECORDED.items() if found["how"] == record.WRONG]
    assert record.accelerated(RECORDED) >= record.LEAST
    runs = [found for found in RECORDED.values() if found["how"] in record.KINDS[:4]]
    assert len(runs) >= 145


def test_families_with_a_spec_are_fused() -> None:
    of_text = sorted(set(SPECS) & set(RECORDED))
    assert {RECORDED[name]["how"] for name in of_text} == {record.FUSED}, of_text


@pytest.mark.parametrize("name", ["t5", "whisper", "arcee", "mixtral", "gpt_neox_japanese", "rwkv"])
def test_a_family_runs_as_recorded(name: str) -> None:
    assert family.tried(name)["how"] == RECORDED[name]["how"]


def test_a_family_with_another_output_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "_generated", lambda *_: next(outputs))
    tokens = torch.tensor([[4, 5, 6]])
    outputs: Iterator[Any] = iter([tokens, tokens + 1] * len(family.CALLS))
    monkeypatch.setattr(family, "_judged", lambda *given: _same(*given[-2:]))
    assert family.tried("llama")["how"] == record.WRONG


def _same(stock: torch.Tensor, found: torch.Tensor) -> Any:
    return family.Verdict(torch.equal(stock, found), note="other tokens")


def test_the_judge_finds_another_token() -> None:
    model = recipe.tiny("llama").double()
    text, options = family.TEXTS[0], {"num_beams": 3, "num_return_sequences": 2}
    tokens = torch.randint(4, 90, (6, 21), generator=torch.Generator().manual_seed(0))
    for row in (0, 1):  # the best hypothesis of a sentence, and the next one
        other = tokens.clone()
        other[row, -1] += 1
        given = model, text, False, options, tokens
        assert family._judged(*given, tokens.clone()).equal
        assert not family._judged(*given, other).equal


def test_a_family_that_cannot_be_built_is_recorded() -> None:
    assert family.tried("musicgen")["how"] == record.UNBUILT


@pytest.mark.slow
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    before = record.FILE.read_bytes()
    assert command.main(["--family", "llama", "arcee", "--jobs", "1"]) == 0
    assert "1 fused, 1 shared" in capsys.readouterr().out
    assert record.FILE.read_bytes() == before, "only a run of all families is recorded"


def test_an_update_keeps_the_other_families(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    file, fused = tmp_path / "coverage.json", {"how": record.FUSED, "why": {}}
    shared = {"how": record.SHARED, "why": {}}
    file.write_text(json.dumps({"families": {"arcee": fused, "llama": fused}}))
    monkeypatch.setattr(command, "FILE", file)
    monkeypatch.setattr(command, "LEAST", 2.0)
    monkeypatch.setattr(command, "apart", lambda *_: shared)
    assert command.main(["--family", "arcee", "--update", "--jobs", "1"]) == 0
    found = json.loads(file.read_text())["families"]
    assert found == {"arcee": shared, "llama": fused}


def test_speed_is_added_to_the_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Only accelerated families are timed, and a later run of all calls keeps their speed."""
    file, fused = tmp_path / "coverage.json", {"how": record.FUSED, "why": {}}
    alone, speed = {"how": record.ALONE, "why": {}}, {"equal": True, "ratio": 2.0}
    before = {"arcee": fused, "llama": fused | {"speed": {"ratio": 9.0}}, "rwkv": alone}
    file.write_text(json.dumps({"families": before}))
    monkeypatch.setattr(command, "FILE", file)
    monkeypatch.setattr(command, "LEAST", 1.0)
    monkeypatch.setattr(command.recipe, "types", lambda: list(before))
    ran = list[Any]()

    def apart(run: Any, name: str, limit: float) -> Any:
        ran.append((run, name))
        return speed if run is family.timed else dict(before[name])

    monkeypatch.setattr(command, "apart", apart)
    assert command.main(["--speed"]) == 0
    assert ran == [(family.timed, "arcee"), (family.timed, "llama")]
    timed = {"arcee": fused | {"speed": speed}, "llama": fused | {"speed": speed}, "rwkv": alone}
    assert json.loads(file.read_text())["families"] == timed
    before["llama"] = fused
    assert command.main([]) == 0
    assert json.loads(file.read_text())["families"] == timed
    before["llama"] = alone
    assert command.main([]) == 0
    assert json.loads(file.read_text())["families"] == timed | {"llama": alone}
    speed["equal"] = False
    assert command.main(["--speed", "--family", "arcee"]) == 1


def test_sizes_reach_nested_configs() -> None:
    config = recipe.config_of(CONFIG_MAPPING["gemma3"], recipe.Sizes(), {})
    assert config.text_config.hidden_size == config.vision_config.hidden_size == 32
    assert config.text_config.num_hidden_layers == 2


def test_a_speed_is_a_column(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    families: dict[str, Any] = {
        "a": {"how": "fused", "why": {}, "speed": {"equal": True, "ratio": 2.0}},
        "b": {"how": "in part", "why": {"x": ["greedy", "sampled"], "y": list(family.CALLS)}},
    }
    monkeypatch.setattr(record, "FILE", tmp_path / "coverage.json")
    record.FILE.write_text(json.dumps({"transformers": "5.24.0", "families": families}))
    lines = tables.coverage().splitlines()
    assert lines[0].startswith("transformers 5.24.0, 2 families: 1 fused, 0 shared, 1 in part,")
    assert lines[-2:] == [
        "| `a` | fused |  | 2.00 |",
        "| `b` | in part | x (greedy; sampled); y | – |",
    ]
    assert len(family.CALLS) == record.CALLS
