"""transformers' fastest setting as a peer: a static KV cache and a forward under `torch.compile`.

On a GPU `generate` compiles by itself with `cache_implementation="static"`; on a CPU compilation
has to be requested. It happens in the untimed calls before the first round.
"""

from __future__ import annotations

from typing import Any

import torch

import fastgen
from benchmarks import peers
from benchmarks.cases import Case
from benchmarks.session import Session

# Untimed calls. The first one compiles; CUDA graphs are captured in the second at the earliest.
WARMUP = 3


def suits(case: Case) -> bool:
    """Return whether the case is a greedy search; transformers compiles no beam search."""
    return case.kind == "generate" and case.beams == 1


def run(case: Case, session: Session) -> dict[str, Any]:
    """Time the eager toolkit, fastgen and the compiled toolkit on the same inputs, in turn."""
    from transformers import CompileConfig

    if not suits(case) or case.shape is None:
        raise SystemExit(
            f"--peer compiled has no way to run the case {case.name!r}: "
            "transformers compiles greedy search"
        )
    model: Any = case.shape.build(session.dtype, session.device)
    inputs, options = case.inputs(model), case.generate_options
    how = CompileConfig()
    # Compile on a CPU too, as transformers' tests do.
    how._compile_all_devices = True  # type: ignore[assignment]

    def compiled(**arguments: Any) -> Any:
        with fastgen.disabled():
            return model.generate(**arguments, cache_implementation="static", compile_config=how)

    torch.compiler.reset()
    graphs = _compiled_graphs()
    result = peers.one_batch("compiled", compiled, model, inputs, options, case, session, WARMUP)
    if _compiled_graphs() == graphs:
        raise SystemExit(f"{case.name}: transformers has compiled nothing")
    return result


def _compiled_graphs() -> int:
    """Return how many graphs torch has compiled in this process."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]
