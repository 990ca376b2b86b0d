"""Comparison with a third system, timed in turn with the toolkit unpatched and with fastgen.

All outputs are compared in every round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from benchmarks.cases import Case
from benchmarks.session import Hits, Session
from fastgen.cli.bench import measure
from fastgen.cli.bench.agreement import Agreement
from fastgen.cli.bench.measure import agrees, both


def one_batch(
    name: str, peer: Callable[..., Any], model: Any, inputs: dict[str, Tensor],
    options: dict[str, Any], case: Case, session: Session, warmup: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Compare one `generate` call of three systems.

    Outputs of fastgen and of the peer must equal the toolkit's apart from near ties. In half
    precision each is judged by its own rounding errors.

    Args:
        name: name of the peer.
        peer: runs the peer, with the arguments of `generate`; returns what `generate` would.
        model: the transformers model.
        inputs: tensor arguments of `generate`.
        options: the other arguments of `generate`.
        case: the benchmark case.
        session: device and number of rounds.
        warmup: untimed calls of each system.
    """
    agreements = {
        "fastgen": Agreement(model, inputs, options),
        name: Agreement(model, inputs, options, peer),
    }
    ties = dict.fromkeys(agreements, 0)
    differences: dict[str, str] = {}

    def check(outputs: Sequence[Tensor]) -> str | None:
        for (system, agreement), found in zip(agreements.items(), outputs[1:], strict=True):
            verdict = agreement(outputs[0], found)
            ties[system] = max(ties[system], verdict.near_ties)
            if not verdict.equal:
                differences[system] = f"{system}: {verdict.note}"
            if not verdict.agrees:
                return differences[system]
        return None

    result = compared(
        lambda: model.generate(**inputs, **options), name, lambda: peer(**inputs, **options),
        check, case, session, warmup,
    )  # fmt: skip
    if result["equal"] and differences:
        result |= {"equal": False, "within_noise": True, "note": "; ".join(differences.values())}
    return result | {
        "near_ties": ties if agrees(result) else sum(ties.values()),
        "tokens": case.batch * case.new_tokens,
    }


def compared(
    call: Callable[[], Any], name: str, peer: Callable[[], Any],
    check: Callable[[Sequence[Any]], str | None], case: Case, session: Session, warmup: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Time a call unpatched, the same call patched, and the peer.

    Args:
        call: the call.
        name: name of the peer.
        peer: runs the peer.
        check: gets the outputs of one round, in the order above. Returns None, or what differs.
        case: the benchmark case.
        session: device and number of rounds.
        warmup: untimed calls of each.
    """
    hits = Hits()
    times, difference = measure.interleave(
        (*both(call), peer),
        session.rounds or case.rounds,
        check,
        warmup,
        synchronize=session.synchronize,
    )
    if difference is not None:
        return {"equal": False, "note": difference} | hits.since()
    columns = dict(zip(("stock", "fastgen", name), zip(*times, strict=True), strict=True))
    over = {}
    for system in ("stock", name):
        ratio, low, high = measure.paired_ratio(columns[system], columns["fastgen"])
        over[system] = {"ratio": ratio, "low": low, "high": high}
    return {
        "equal": True,
        **hits.since(),
        "systems": {system: sorted(column)[len(column) // 2] for system, column in columns.items()},
        "over": over,
        "rounds": [list(row) for row in times],
    }
