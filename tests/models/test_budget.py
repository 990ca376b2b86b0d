"""Memory held between calls: its limit, its report, and its release together with the model."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import fastgen
from fastgen.models import state
from fastgen.models.layers import packed_weights
from fastgen.models.memory import budget, scratch
from fastgen.models.memory.budget import SystemMemory, shortage
from fastgen.ops import linear as ops
from fastgen.ops import native
from fastgen.patches.transformers.generate.report import last_call
from tests.support import zoo

GIB, MIB = 2**30, 2**20
needs_c = pytest.mark.skipif(native.library() is None, reason="there are no operations in C here")
_system_memory = budget.system_memory  # the original, before a fixture replaces it


@pytest.mark.parametrize(
    ("needed", "held", "limit", "system", "expected"),
    [
        (100 * MIB, 0, None, None, None),
        (100 * MIB, 9 * GIB, None, SystemMemory(4 * GIB, 700 * MIB), None),
        (
            200 * MIB,
            0,
            None,
            SystemMemory(4 * GIB, 700 * MIB),
            "memory is short: 700 MiB available, 712 MiB needed",
        ),
        (0, 0, None, SystemMemory(4 * GIB, 512 * MIB), None),
        (
            100 * MIB,
            0,
            None,
            SystemMemory(16 * GIB, 2147 * MIB),
            "memory is short: 2147 MiB available, 2148 MiB needed",
        ),
        (100 * MIB, 0, None, SystemMemory(16 * GIB, 2148 * MIB), None),
        (100 * MIB, 400 * MIB, 500 * MIB, SystemMemory(GIB, 0), None),
        (
            101 * MIB,
            400 * MIB,
            500 * MIB,
            SystemMemory(GIB, GIB),
            "FASTGEN_MEMORY allows 500 MiB in all: 400 MiB held, 101 MiB more needed",
        ),
    ],
    ids=[
        "unknown",
        "enough",
        "short",
        "reserve",
        "share short",
        "share",
        "within limit",
        "beyond limit",
    ],
)
def test_shortage(
    needed: int, held: int, limit: int | None, system: SystemMemory | None, expected: str | None
) -> None:
    assert shortage(needed, held, limit, system) == expected


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_memory_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 100, "SC_AVPHYS_PAGES": 10}
    monkeypatch.setattr(budget.os, "sysconf", pages.__getitem__, raising=False)
    _write(
        tmp_path,
        {
            "proc/meminfo": (
                "MemTotal: 90 kB\nMemFree: 1 kB\nMemAvailable: 8 kB\nHugePages_Total: 0\n"
            ),
        },
    )
    assert _system_memory(tmp_path) == SystemMemory(90 * 1024, 8 * 1024)
    assert _system_memory(tmp_path / "proc") == SystemMemory(409_600, 40_960), (
        "where there is no meminfo"
    )

    def unknown(name: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(budget.os, "sysconf", unknown)
    assert _system_memory(tmp_path / "proc") is None
    monkeypatch.delattr(budget.os, "sysconf")
    assert _system_memory(tmp_path / "proc") is None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": "5"}, (9216, 8192)),
        (
            {"sys/fs/cgroup/memory.max": "5000\n", "sys/fs/cgroup/memory.current": "1000\n"},
            (5000, 4000),
        ),
        (
            {"sys/fs/cgroup/memory.max": "5000", "sys/fs/cgroup/memory.current": "4500",
             "sys/fs/cgroup/memory.stat": "anon 1\ninactive_file 300\n"},
            (5000, 800),
        ),
        ({"sys/fs/cgroup/memory.max": "5000", "sys/fs/cgroup/memory.current": "6000"}, (5000, 0)),
        (
            {"proc/self/cgroup": "0::/outer/inner\n",
             "sys/fs/cgroup/outer/memory.max": "3000", "sys/fs/cgroup/outer/memory.current": "1000",
             "sys/fs/cgroup/outer/inner/memory.max": "4000",
             "sys/fs/cgroup/outer/inner/memory.current": "900"},
            (3000, 2000),
        ),
        (
            {"proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/y\n0::/z\n",
             "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
             "sys/fs/cgroup/memory/memory.usage_in_bytes": "7000",
             "sys/fs/cgroup/memory/y/memory.limit_in_bytes": "3000",
             "sys/fs/cgroup/memory/y/memory.usage_in_bytes": "2500",
             "sys/fs/cgroup/memory/y/memory.stat": "inactive_file 9\ntotal_inactive_file 100\n"},
            (3000, 600),
        ),
        (
            {"proc/self/cgroup": "4:memory:/a/path/of/the/machine\n",
             "sys/fs/cgroup/memory/memory.limit_in_bytes": "3000",
             "sys/fs/cgroup/memory/memory.usage_in_bytes": "2000"},
            (3000, 1000),
        ),
    ],
    ids=[
        "v2 without limit", "v2", "v2 with file pages", "v2 exceeded", "v2 nested", "v1 nested",
        "v1 in a container",
    ],
)  # fmt: skip
def test_limits_of_control_groups(
    files: dict[str, str], expected: tuple[int, int], tmp_path: Path
) -> None:
    _write(tmp_path, {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 8 kB\n"} | files)
    assert _system_memory(tmp_path) == SystemMemory(*expected)


def test_memory_of_this_machine() -> None:
    found = _system_memory()
    assert found is None or MIB < found.available <= found.total < 1 << 60


@pytest.fixture
def model() -> Iterator[Any]:
    """Yield a model whose weights are worth packing in every layout and fill their panels."""
    fastgen.release()  # models of other tests may still hold something
    torch.manual_seed(0)
    config = tf.GPT2Config(
        vocab_size=512,
        n_embd=256,
        n_layer=1,
        n_head=4,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    yield tf.GPT2LMHeadModel(config).eval()
    packed_weights.release()


def _generate(model: Any) -> Any:
    kwargs = zoo.batch(model, 4, 6, "none") | {
        "max_new_tokens": 6,
        "min_new_tokens": 6,
        "num_beams": 2,
    }
    return [model.generate(**kwargs).tolist() for _ in range(packed_weights.Packed.uses_to_pack)]


def _weights(model: Any) -> dict[str, int]:
    """Return the bytes of each weight of a linear layer; the head shares the embedding's weight."""
    sizes = {
        name: p.nbytes
        for name, p in model.named_parameters()
        if name.endswith("weight") and p.dim() == 2
    }
    return {name: size for name, size in sizes.items() if "wpe" not in name}


@needs_c
def test_what_is_held(model: Any) -> None:
    _generate(model)
    status = fastgen.status()
    held = status.memory
    assert (
        held["packed weights"] == packed_weights.packed_bytes() == sum(_weights(model).values())
    ), "one copy of each"
    assert held["buffers"] > 0
    of_model = status.memory_by_model["GPT2LMHeadModel"]
    assert of_model["packed weights"] == held["packed weights"]
    assert 0 < of_model["buffers"] <= held["buffers"]  # models of other tests may hold some
    assert (
        f"\n  GPT2LMHeadModel: packed weights {held['packed weights'] / MIB:.4g} MiB, buffers"
        in str(status)
    )
    assert status.memory == status.to_dict()["memory"]
    assert "GPT2LMHeadModel: packed weights" in str(fastgen.status(verbose=True))
    fastgen.release()
    released = fastgen.status()
    assert not any(released.memory.values())
    assert released.memory_by_model == {}
    assert "memory held" not in str(released)
    _generate(model)
    assert fastgen.status().memory["packed weights"] == held["packed weights"], (
        "the next calls pack again"
    )


def test_nothing_is_held_for_a_model_that_is_gone() -> None:
    fastgen.release()
    for family in ("bart", "llama"):
        mortal = zoo.build(family, torch.float32)
        _generate(mortal)
        assert sum(fastgen.status().memory.values()) > 0
        del mortal
        gc.collect()
        assert not any(fastgen.status().memory.values()), family


@needs_c
def test_without_memory_for_all(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are packed while memory lasts.

    The others run as torch's products, and are reported.
    """
    with fastgen.disabled():
        expected = _generate(model)
    # Enough for one of the three largest weights, of 1 MiB each, and some others.
    free = [513 * MIB + MIB // 2]

    def pack(weight: Any, *rest: Any) -> Any:
        free[0] -= weight.nbytes
        return _pack(weight, *rest)

    _pack = ops.pack
    monkeypatch.setattr(ops, "pack", pack)
    monkeypatch.setattr(budget, "system_memory", lambda: SystemMemory(GIB, free[0]))
    explained = fastgen.explain(model, **zoo.batch(model, 4, 6, "none"), max_new_tokens=6).linears
    assert explained.packed_bytes == sum(_weights(model).values())
    assert explained.shortage == "memory is short: 514 MiB available, 516 MiB needed"
    assert str(explained).endswith(f"; not all are packed: {explained.shortage}")
    assert _generate(model) == expected
    status = fastgen.status()
    assert 0 < status.memory["packed weights"] <= 3 * MIB // 2
    left = (sum(_weights(model).values()) - status.memory["packed weights"]) / MIB
    assert status.not_packed.startswith(f"{left:.0f} MiB of weights: memory is short: ")
    assert f"not packed, {status.not_packed}" in str(status)
    if native.library() is not None:
        assert last_call().plan.not_in_c.startswith("not all weights are packed: memory is short: ")
    fastgen.release()
    assert not fastgen.status().not_packed


@needs_c
@pytest.mark.parametrize("limit", ["0", "1MiB"])
def test_a_limit(model: Any, limit: str, setting: Callable[[str, str], None]) -> None:
    with fastgen.disabled():
        expected = _generate(model)
    setting("FASTGEN_LINEAR", "packed")
    setting("FASTGEN_MEMORY", limit)
    assert _generate(model) == expected
    status = fastgen.status()
    assert sum(status.memory.values()) <= (MIB if limit != "0" else 0)
    if limit == "0":
        assert not any(status.memory.values())
        assert not status.not_packed, "nothing was to be packed"
        assert not fastgen.explain(model, **zoo.batch(model, 4, 6, "none")).linears.packed
    else:
        assert status.memory["packed weights"] > 0
        assert "weights: FASTGEN_MEMORY allows 1 MiB in all" in status.not_packed
    if native.library() is not None:
        assert last_call().plan.not_in_c.startswith(
            "FASTGEN_MEMORY=0"
            if limit == "0"
            else "not all weights are packed: FASTGEN_MEMORY allows"
        )


def test_buffers_within_a_limit(setting: Callable[[str, str], None]) -> None:
    state.release(scratch.ScratchPool)
    packed_weights.release()
    owner, like = torch.nn.Linear(1, 1), torch.zeros(1)
    of = scratch.scratch_pool_of(owner)
    setting("FASTGEN_MEMORY", "64KiB")
    kept, fresh = of.take(like, 8 * 1024), of.take(like, 16 * 1024)
    assert kept.numel() * 4 <= fastgen.status().memory["buffers"] <= 64 * 1024
    assert fresh.shape == (16 * 1024,)
