"""Every kernel compiles for the devices that it is for, and fits them, as far as that shows without one."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SHARED = 99 * 1024
"""Bytes of shared memory that a program may have on the smallest of these devices (compute capability 8.6, 8.9)."""

MORE = 48
"""Registers of a thread for reading on the device what is seen, and writing the newest keys and values."""

SPILLED, FEW = 600, 32
"""Bytes that a thread may spill, and one of attention; k-best's merge of 9 beams, a program a sentence, has 548."""

pytest.importorskip("triton", reason="kernels are Triton's")


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.compiled", "8.6:float32", "9.0:bfloat16"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_every_kernel_is_compiled(compiled: list[dict[str, Any]]) -> None:
    sources = "".join(file.read_text("utf-8") for file in (ROOT / "fastgen/ops").rglob("*.py"))
    launched = set(re.findall(r"launch\(\s*(_\w+)", sources))
    assert {each["kernel"] for each in compiled} == launched
    assert [each for each in compiled if each["error"] is not None] == []


@pytest.mark.slow
def test_no_kernel_needs_more_than_there_is(compiled: list[dict[str, Any]]) -> None:
    assert [each for each in compiled if each["shared"] > SHARED] == []
    assert [each for each in compiled if each["spills"] > SPILLED] == []
    attention = [each for each in compiled if each["kernel"] == "_attention_kernel"]
    assert attention
    assert [each for each in attention if each["spills"] > FEW] == []


@pytest.mark.slow
def test_captured_attention_loads_ahead_as_the_other_does(compiled: list[dict[str, Any]]) -> None:
    """What captured steps run: the end of what is seen is read on the device, and loads are as wide and as early."""
    found: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for each in compiled:
        if each["kernel"] == "_attention_kernel" and each["constants"]["MASKED"] == "True":
            constants = {**each["constants"]}
            kind = constants.pop("COUNTED") + (" and writes" if constants.pop("NEW") != "0" else "")
            others = [f"{k}={v}" for k, v in sorted(constants.items())]
            found.setdefault((each["capability"], *others), {})[kind] = each
    for kind, barriers in (("True", 0), ("True and writes", 1)):
        pairs = [(by["False"], by[kind]) for by in found.values() if {"False", kind} <= by.keys()]
        assert len(pairs) >= 8
        for plain, counted in pairs:
            assert counted["copies"] <= plain["copies"], (plain, counted)
            assert counted["barriers"] <= plain["barriers"] + barriers, (plain, counted)
            assert counted["registers"] <= plain["registers"] + MORE, (plain, counted)
