"""Every kernel compiles for its target devices and fits them, as far as can be told without one."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SHARED = 99 * 1024
"""Shared memory per program on the smallest targets (compute capability 8.6 and 8.9), in bytes."""

MORE = 48
"""Extra registers per thread for reading the length on the device and writing the newest KV."""

SPILLED, FEW = 600, 32
"""Bytes that a thread may spill: in any kernel, and in attention.

k-best's merge of 9 beams, with one program per sentence, spills 548.
"""

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
    """Compare attention in captured steps, which reads the length on the device, with the other.

    Its loads have to be as wide and to start as early.
    """
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
            assert counted["copies"] == plain["copies"], (plain, counted)
            assert counted["barriers"] <= plain["barriers"] + barriers, (plain, counted)
            assert counted["registers"] <= plain["registers"] + MORE, (plain, counted)
