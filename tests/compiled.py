"""Compile Triton kernels for devices that are not present, and report the resources each one uses.

    python -m tests.compiled 8.6:float32 9.0:bfloat16

For each compute capability, this runs the operations at the shapes of `benchmarks.ops`, and
attention at its largest, in the given dtype. Kernels are compiled and never launched. It prints a
JSON list with one object per compiled kernel:

    kernel: its name.
    capability: compute capability of the device.
    constants: constants it was compiled with.
    error: None, or the error message where it did not compile; the fields below are then missing.
    shared: bytes of shared memory per program.
    spills: bytes of registers spilled per thread.
    registers: registers per thread.
    barriers: instructions at which all threads wait.
    copies: asynchronous copies, which load ahead.

Run it in its own process, because it makes Triton believe that there is a device.
"""

import contextlib
import io
import itertools
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
os.environ["FASTGEN_OPS"] = "triton"
os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"  # makes Triton log register spills

import torch

torch.version.cuda = torch.version.cuda or "13.0"  # kernels are declared as for a device

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from benchmarks.ops import Rig, rows  # noqa: E402
from fastgen.ops import (  # noqa: E402
    beam_attention,
    cache,
    dispatch,
    embedding,
    norm,
    rotation,
    tables,
)
from fastgen.ops.selection import choice, ngram_block, token_mask  # noqa: E402
from fastgen.ops.selection.kbest import LogitsUpdates, SparseUpdate, best_of_log_probs, kbest  # noqa: E402


class Device:
    """What Triton asks about the device that it compiles for."""

    def __init__(self, capability: str) -> None:
        self.target = GPUTarget("cuda", int(capability.replace(".", "")), 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


def main(devices: list[str]) -> None:
    found: list[dict[str, Any]] = []
    compile_and_run = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        said = {
            "kernel": self.__name__,
            "capability": capability,
            "constants": {k: str(v) for k, v in constants.items()},
        }
        log = io.StringIO()
        try:
            with contextlib.redirect_stdout(log):
                kernel: Any = compile_and_run(self, *args, grid=grid, warmup=True, **constants)
        except Exception as error:
            found.append(said | {"error": str(error)})
            return
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            spills = re.findall(r"(\d+) bytes spill stores", log.getvalue())
            registers = re.findall(r"Used (\d+) registers", log.getvalue())
            assert min(len(spills), len(registers)) > 0, f"no use of registers in {log.getvalue()}"
            ptx = kernel.asm["ptx"]
            found.append(said | {
                "error": None,
                "shared": kernel.metadata.shared,
                "spills": sum(map(int, spills)),
                "registers": max(map(int, registers)),
                "barriers": ptx.count("bar.sync"),
                "copies": ptx.count("cp.async.cg") + ptx.count("cp.async.ca"),
            })  # fmt: skip

    JITFunction.run, dispatch.INTERPRETED, seen = run, True, set[str]()
    for device in devices:
        capability, dtype = device.split(":")
        driver.set_active(Device(capability))
        for call in _calls(getattr(torch, dtype)):
            # Raised where the results of a kernel that did not run are used.
            with contextlib.suppress(Exception):
                call()
    print(json.dumps(found))


def _calls(dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    """Yield operations at realistic shapes, and attention and k-best at their largest.

    Small operations that `benchmarks.ops` does not cover are included.
    """
    rig = Rig("cpu", dtype)
    for row in rows():
        if row.only != "cpu":
            yield row.make(rig)[1]
    for dims, (beams, groups) in itertools.product(
        (32, 64, 128, 256), ((4, 1), (4, 8), (8, 8), (16, 8))
    ):
        query = torch.zeros(1, beams, groups, dims, dtype=dtype)
        keys, mask = torch.zeros(1, 1, 1_104, dims, dtype=dtype), torch.zeros(1, 1, beams, 1_104)
        newest = beam_attention.Newest(*torch.zeros(2, beams, 1, dims, dtype=dtype))
        for seen, new in (
            (None, None),
            (torch.tensor([1_000]), None),
            (torch.tensor([1_000]), newest),
        ):
            yield partial(
                beam_attention.beam_attention, query, keys, keys, mask, 1.0, seen=seen, newest=new
            )
    for b, m, v, k in ((2, 4, 50_264, 8), (1, 16, 262_144, 64), (1, 1, 300, 1)):
        logits, scores = torch.zeros(b, m, v, dtype=dtype), torch.zeros(b, m)
        tokens, banned = (
            torch.zeros(b * m, 40).long(),
            torch.zeros(b * m, -(-v // 32), dtype=torch.int32),
        )
        changes = SparseUpdate(tokens, tokens.float(), tokens.float())
        updates = LogitsUpdates(changes, banned, torch.zeros(b * m).long())
        yield partial(
            kbest, logits, scores, k, updates, logits[0, 0], 0.5, normalisers=True, without_nan=True
        )
        yield partial(best_of_log_probs, logits.float(), scores, k)
        yield partial(token_mask.add_tokens_, banned, tokens, v)
        yield partial(ngram_block.ngram_mask, tokens, 3, v, length=tokens[0, :1])
    for at in (3, torch.tensor([3])):
        table, of = torch.zeros(99, 1024, dtype=dtype), norm.NormParameters(None, None, 1e-5)
        of = of._replace(weight=table[0], bias=table[0])
        places = embedding.Positions(table, 2, at, 1)
        yield partial(embedding.normed_embedding, torch.zeros(4).long(), table, 2.0, places, of)
    keys, new = torch.zeros(4, 16, 600, 64, dtype=dtype), torch.zeros(16, 16, 1, 64, dtype=dtype)
    for start in (5, torch.tensor([5])):
        yield partial(cache.write_slots_, keys, keys.clone(), new, new, start)
    heads, angle = torch.zeros(16, 16, 64, dtype=dtype), torch.zeros(16, 1, 64, dtype=dtype)
    for start, interleaved in ((5, False), (torch.tensor([5]), True)):
        turn = rotation.Rotation(angle, angle, interleaved)
        yield partial(
            rotation.rotate_into_slots_, heads, heads, heads, turn, keys, keys.clone(), start
        )
    yield partial(cache.move_sentences_, keys, torch.tensor([0]), torch.tensor([3]))
    for beams, steps in itertools.product((4, 16), (9, torch.tensor([9]))):
        parents, rows_of = torch.zeros(2, beams).long(), torch.zeros(2, beams, 512)
        table = tables.Table(rows_of.long(), parents[:, :, None])
        candidates = table._replace(newest=torch.zeros(2, 2 * beams, 1).long())
        finished, of_candidates = [table.rows.clone()], torch.zeros(2, 2 * beams).long()
        yield partial(cache.reorder_rows_, rows_of, parents)
        yield partial(tables.extend_rows_, [table, table], parents, steps)
        yield partial(tables.finish_rows_, finished, [candidates], parents, of_candidates, steps)
        ended = [tables.Finished(finished[0], candidates.newest)]
        yield partial(
            tables.finish_and_extend_, [table, table], parents, ended, parents, of_candidates, steps
        )

    for beams, (last, early) in itertools.product((1, 4, 16, 100), ((False, True), (True, False))):
        row, one = torch.zeros(2, beams), torch.zeros(1).long()
        values, indices = torch.zeros(2, 2 * beams), torch.zeros(2, 2 * beams).long()
        state = choice.State(row, row, row.bool(), row[:, 0].bool(), one.bool())
        rules = choice.Rules(-1.0e9, early, values[0], int(last))
        step = choice.Step(one, bool(last), indices[:, 0], state, rules, one)
        yield partial(choice.choose_, values, indices, 99, step)
        for v, banned in ((50_264, torch.zeros(2 * beams, 1_571, dtype=torch.int32)), (300, None)):
            logits, updates = torch.zeros(2, beams, v, dtype=dtype), LogitsUpdates(banned=banned)
            yield partial(choice.kbest_and_choose_, logits, 2 * beams, updates, step)
        slots = choice.Slots(row.bool(), indices[:, 0], row.long())
        yield partial(choice.choose_first_, values, indices, indices, slots, 2, one, last)


if __name__ == "__main__":
    # An empty cache: Triton reports nothing about kernels that it finds compiled.
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        main(sys.argv[1:])
