"""`make gpu`: a stage that hangs, dies or runs out of memory affects no other stage's results."""

import importlib.util
import json
import os
import shlex
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, ops, run
from benchmarks.gpu import PARTS, Run, Stage

ROOT = Path(__file__).parents[2]
_WRITES = (
    "import json, sys; json.dump({{'kind': 'ops', 'result': {{'first': 1}}}}, "
    "open('{out}/%s.json', 'w'));"
)


def _stage(name: str, then: str = "", seconds: float = 60.0, **how: Any) -> Stage:
    return Stage(name, seconds, f"-c {shlex.quote(_WRITES % name + then)}", **how)


def _lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text("utf-8").splitlines()]


def _ran(
    out: Path, work: Path, *stages: Stage, deadline: float = 60.0
) -> tuple[bool, dict[str, dict[str, Any]]]:
    work.mkdir()
    found = Run(out, deadline)
    well = found.stages(stages, work)
    found.close()
    return well, {line["stage"]: line for line in _lines(out) if "status" in line}


def test_what_came_before_is_kept_and_what_comes_after_runs(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(gpu, "GRACE", 0.5)
    child = "import subprocess; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); "
    deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
    memory = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**28, 2**28)); bytearray(2**30)"
    )
    well, ends = _ran(
        tmp_path / "out", tmp_path / "work",
        _stage("before"),
        _stage("hangs", child + deaf, seconds=3),
        _stage("dies", "import os; os.kill(os.getpid(), 9)"),
        _stage("memory", memory),
        _stage("tool", tool="no-such-tool --fast"),
        _stage("module", needs="no_such_module"),
        _stage("after"),
    )  # fmt: skip
    assert not well
    status = {name: end["status"] for name, end in ends.items()}
    assert status == {
        "before": "ok", "hangs": "timed out", "dies": "failed", "memory": "failed",
        "tool": "left out", "module": "left out", "after": "ok",
    }  # fmt: skip
    assert ends["dies"]["exit"] == -9
    assert "no-such-tool is not installed" in ends["tool"]["note"]
    results = [
        (line["stage"], line["file"], line["key"], line["result"])
        for line in _lines(tmp_path / "out")
        if "key" in line
    ]
    assert results == [
        (name, f"{name}.json", "first", 1)
        for name in ("before", "hangs", "dies", "memory", "after")
    ]
    log = (tmp_path / "out/log.txt").read_text("utf-8")
    assert "MemoryError" in log
    (pid,) = (int(line) for line in log.splitlines() if line.isdigit())
    assert _is_gone(pid)
    with tarfile.open(tmp_path / "out/results.tar.gz") as archive:
        assert set(archive.getnames()) == {
            f"{name}.json" for name in ("before", "hangs", "dies", "memory", "after")
        }
    printed = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == list(status)


def _is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def test_a_result_is_written_as_soon_as_it_is_known(tmp_path):
    """The stage ends only once its first result has been appended."""
    lines = tmp_path / "out/results.jsonl"
    waits = (
        f"import pathlib, time\nwhile 'first' not in pathlib.Path('{lines}').read_text(): "
        "time.sleep(0.05)\n"
    )
    well, _ = _ran(tmp_path / "out", tmp_path / "work", _stage("waits", waits))
    assert well


def test_no_stage_begins_behind_the_deadline(tmp_path):
    well, ends = _ran(tmp_path / "out", tmp_path / "work", _stage("late"), deadline=0.5)
    assert not well
    assert ends["late"]["status"] == "not begun"


def test_the_deadline_cuts_a_stage(tmp_path):
    began = time.monotonic()
    _, ends = _ran(
        tmp_path / "out",
        tmp_path / "work",
        _stage("long", "import time; time.sleep(600)"),
        deadline=3.0,
    )
    assert ends["long"]["status"] == "timed out"
    assert time.monotonic() - began < 300


def test_an_interrupt_ends_the_stage(tmp_path, monkeypatch):
    found = Run(tmp_path / "out", 60.0)
    (tmp_path / "work").mkdir()

    def numbers() -> list[int]:
        return [
            int(line)
            for line in (tmp_path / "out/log.txt").read_text("utf-8").splitlines()
            if line.isdigit()
        ]

    def interrupted(*_: Any) -> None:
        if numbers():  # the process has started
            raise KeyboardInterrupt

    monkeypatch.setattr(found, "_take", interrupted)
    pid = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with pytest.raises(KeyboardInterrupt):
        found.stages([_stage("long", pid)], tmp_path / "work")
    assert all(map(_is_gone, numbers()))


def test_a_file_that_is_only_half_written_is_read_at_the_next_look(tmp_path):
    run, file = Run(tmp_path / "out", 60.0), tmp_path / "work/some.json"
    file.parent.mkdir()
    for text in ('{"kind": "ops", "resu', '{"kind": "ops", "result": {"first": 1}}'):
        file.write_text(text, "utf-8")
        run._take(_stage("some"), file.parent)
    assert [line["result"] for line in _lines(tmp_path / "out")] == [1]


def test_cells_supports_sublayers_once_each():
    data: dict[str, Any] = {
        "kind": "grid",
        "result": {"cells": {"a": {"equal": True}, "b": {"equal": False}}},
    }
    assert dict(gpu.results_of(data)) == data["result"]["cells"]
    assert dict(gpu.results_of({"kind": "generate", "result": {"equal": True}})) == {
        "": {"equal": True}
    }


@pytest.mark.parametrize("part", PARTS)
def test_ten_minutes(part):
    assert sum(stage.seconds for stage in PARTS[part]) <= 580


@pytest.mark.parametrize(
    "stage", [stage for part in PARTS.values() for stage in part], ids=lambda stage: stage.name
)
def test_what_a_stage_runs_is_there(stage, tmp_path, capsys):
    """The cases, operations and files of a stage exist."""
    _, _, module, *arguments = stage.arguments("cpu", "tiny", tmp_path)[
        len(shlex.split(stage.tool)) :
    ]
    if module == "pytest":
        files = [argument for argument in arguments if argument.startswith("tests/")]
        assert files
        assert all((ROOT / file).is_file() for file in files)
    elif module == "benchmarks":
        assert run.arguments().parse_args(arguments).device == "cpu"
    elif module == "benchmarks.ops":
        assert ops.main([*arguments, "--list"]) == 0
        assert capsys.readouterr().out
    else:
        assert importlib.util.find_spec(module) is not None


def test_an_unknown_stage(capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--part", "2", "--stage", "smoke"])
    assert "part 2 has no stage smoke; it has best_batch, compiled" in capsys.readouterr().err


@pytest.mark.slow
def test_the_first_part_at_tiny_size(tmp_path):
    """Run stages of every kind on a CPU: those that inspect steps, and whole calls."""
    stages = ["machine", "smoke", "calls", "graphs", "greedy"]
    arguments = ["--device", "cpu", "--scale", "tiny", "--deadline", "900", "--out", str(tmp_path)]
    status = gpu.main(["--part", "1", "--stage", *stages, *arguments])
    assert status == 0, (tmp_path / "log.txt").read_text("utf-8")
    lines = _lines(tmp_path)
    assert [line["stage"] for line in lines if "status" in line] == stages
    found = {line["key"]: line["result"] for line in lines if line.get("file") == "smoke.json"}
    assert set(found) == {
        f"{look}_batch{batch}" for look in ("call", "profile", "exact") for batch in (1, 3)
    }
    assert found["call_batch3"]["plan"]["fused"]
    assert found["exact_batch3"]["equal"]
    assert found["profile_batch1"]["launches_per_step"] > 0
    assert {line["file"] for line in lines if line["stage"] == "calls" and "file" in line} == {
        f"gpu_{name}_bfloat16.json" for name in ("bart_large", "bart_one", "step_time", "gpt2")
    }
    assert sorted(os.listdir(tmp_path)) == ["log.txt", "results.jsonl", "results.tar.gz"]
