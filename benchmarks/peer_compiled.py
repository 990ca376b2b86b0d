"""transformers' own fastest setting as a peer: a static cache, and a forward that `torch.compile` has compiled.

`generate` compiles by itself on a GPU where `cache_implementation="static"` is asked for; on a CPU it has to be told.
Compiling happens in the untimed calls before the first round.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fastgen
from benchmarks import peers
from benchmarks.cases import Case
from benchmarks.session import Session

WARMUP = (
    3  # untimed calls: one compiles, and CUDA graphs are recorded in the second at the earliest
)


def suits(case: Case) -> bool:
    """Whether the case is a greedy search: transformers compiles no beam search."""
    return case.kind == "generate" and case.beams == 1


def run(case: Case, session: Session) -> dict[str, Any]:
    """Time the toolkit eager, fastgen and the toolkit compiled on the same inputs, in turn."""
    from transformers import CompileConfig

    if not suits(case) or case.shape is None:
        raise SystemExit(
            f"--peer compiled has no way to run the case {case.name!r}: transformers compiles greedy search"
        )
    model: Any = case.shape.build(session.dtype, session.device)
    inputs, options = case.inputs(model), case.generate_options
    how = CompileConfig()
    how._compile_all_devices = True  # type: ignore[assignment]  # on a CPU too; transformers' tests have it so

    def compiled() -> Tensor:
        with fastgen.disabled():
            return model.generate(
                **inputs, **options, cache_implementation="static", compile_config=how
            )

    torch.compiler.reset()
    before = _compiled_graphs()
    result = peers.one_batch("compiled", compiled, model, inputs, options, case, session, WARMUP)
    if _compiled_graphs() == before:
        raise SystemExit(f"{case.name}: transformers has compiled nothing")
    return result


def _compiled_graphs() -> int:
    """How many graphs torch has compiled in this process."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]
