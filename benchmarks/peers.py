"""Comparison with a third system, timed in turn with the toolkit unpatched and with fastgen.

All outputs are compared in every round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from benchmarks.cases import Case
from benchmarks.runners import Translation
from benchmarks.session import Hits, Session
from fastgen.cli.bench import measure
from fastgen.cli.bench.agreement import Agreement, Agreements
from fastgen.cli.bench.measure import agrees, both

ALIKE = 0.9  # share of the texts of a trained model that must be equal


def one_batch(
    name: str, peer: Callable[..., Any], model: Any, inputs: dict[str, Tensor],
    options: dict[str, Any], case: Case, session: Session, warmup: int = 1,
    seconds: Sequence[float] | None = None,
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
        seconds: as in `compared`.
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
        check, case, session, warmup, seconds,
    )  # fmt: skip
    if result["equal"] and differences:
        result |= {"equal": False, "within_noise": True, "note": "; ".join(differences.values())}
    return result | {
        "near_ties": ties if agrees(result) else sum(ties.values()),
        "tokens": case.batch * case.new_tokens,
    }


def texts(
    name: str, peer: Callable[[], list[Tensor]], task: Translation, case: Case, session: Session,
    seconds: Sequence[float] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Compare three systems on a trained model and its text, in batches of similar lengths.

    The peer's texts may differ: its search may end by another rule. The result holds how many are
    equal. If less than `ALIKE` of them are, it holds no speed.

    Args:
        name: name of the peer.
        peer: runs the peer; returns the token ids of every batch.
        task: the model and its text.
        case: the benchmark case.
        session: device and number of rounds.
        seconds: as in `compared`.
    """
    model, same = task.model, {name: 0}
    agreements = Agreements(model, task.batches, task.options)

    def check(outputs: Sequence[list[Tensor]]) -> str | None:
        stock, found, others = outputs
        verdict = agreements(stock, found)
        if not verdict.agrees:
            return f"fastgen: {verdict.note}"
        pairs = zip(_plain(stock, model), _plain(others, model), strict=True)
        same[name] = sum(one == other for one, other in pairs)
        if same[name] < ALIKE * task.sentences:
            return f"{name}: {same[name]} of {task.sentences} texts are the same"
        return None

    result = compared(
        lambda: [model.generate(**batch, **task.options) for batch in task.batches],
        name, peer, check, case, session, seconds=seconds,
    )  # fmt: skip
    return result | {"sentences": task.sentences, "same_texts": same}


def _plain(outputs: list[Tensor], model: Any) -> list[list[int]]:
    """Return the tokens of every sentence without start, end and padding tokens."""
    special = {
        model.config.pad_token_id,
        model.config.eos_token_id,
        model.config.decoder_start_token_id,
    }
    return [
        [token for token in row if token not in special] for ids in outputs for row in ids.tolist()
    ]


def compared(
    call: Callable[[], Any], name: str, peer: Callable[[], Any],
    check: Callable[[Sequence[Any]], str | None], case: Case, session: Session, warmup: int = 1,
    seconds: Sequence[float] | None = None,
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
        seconds: duration of every call of the peer, where it measures them itself; they count
            instead of what is measured here.
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
    if seconds is not None:
        own = seconds[-len(times) :]
        times = [(stock, fast, mine) for (stock, fast, _), mine in zip(times, own, strict=True)]
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
