"""Big-little calls that would never draft: the large model decodes alone.

Counts and output have the same form as in calls that draft.
"""

import copy
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from fastgen.decoding.speculative.bild import Counts
from fastgen.patches.transformers.bild import bild
from fastgen.patches.transformers.generate.loop_call import Call
from fastgen.patches.transformers.generate.report import CallReport
from fastgen.patches.transformers.generate.stopping_criteria import stop_of


def rests(call: Call, request: bild.DraftingRequest) -> bool:
    """Return whether the large model should decode alone.

    That is the case if no round of the call would draft and the output is the same.

    Raises:
        ValueError: Big-little decoding does not support the call.
    """
    timing = bild.timing_for(call, request.options)
    same_output = not (
        call.config.do_sample
        or request.options.paper_compat
        or call.scored
        or call.wanted is not None
    )
    if timing is None or not same_output or timing.total == 0.0 or timing.may_draft():
        return False
    bild.check(call, request)
    return True


def resting(call: Call) -> Call:
    """Return the call with tokens as its only output, which skips the other fields of a dict."""
    config = copy.copy(call.config)
    config.return_dict_in_generate = False
    return replace(call, config=config)


def of_large_alone(
    call: Call,
    request: bild.DraftingRequest,
    as_dict: bool,
    sequences: Tensor,
    report: CallReport,
    seconds: float,
) -> Any:
    """Record the cost of a call that the large model decoded alone, and return its output.

    Args:
        call: The call.
        request: Its request for big-little decoding.
        as_dict: Whether `generate` returns a dict.
        sequences: Token ids (B, L) int64.
        report: Report of the call.
        seconds: Duration of the call.
    """
    request.decoded, timing = True, bild.timing_for(call, request.options)
    assert timing is not None  # `rests` returned True
    for rows, step_seconds in report.steps:
        timing.note(False, rows, rows, step_seconds)
    generated: list[list[int]] = cast(Any, sequences[:, call.input_ids.shape[1] :]).tolist()
    eos = stop_of(call.stopping_criteria).eos
    ends: set[int] = set() if eos is None else set(cast(Any, eos).tolist())
    lengths = [
        next((n for n, token in enumerate(text, 1) if token in ends), len(text))
        for text in generated
    ]
    timing.note_call(False, sum(lengths), seconds)
    counts = bild.by_name([Counts(tokens=length, large_calls=length) for length in lengths])
    return bild.returned(call, as_dict, sequences, counts)
