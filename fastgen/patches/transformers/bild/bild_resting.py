"""Big-little calls that would not draft: the large model's own, with the counts and the output of the others."""

import copy
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from fastgen.decoding.speculative.bild import Counts
from fastgen.patches.transformers.bild import bild
from fastgen.patches.transformers.generate.logits_processors import stop_of
from fastgen.patches.transformers.generate.loop_call import Call
from fastgen.patches.transformers.generate.report import CallReport


def rests(call: Call, asked: bild.DraftingRequest) -> bool:
    """Whether a call is better the large model's own, as no round of it would draft, and its output is the same."""
    pace = bild.pace_for(call, asked.options)
    alike = not (
        call.config.do_sample
        or asked.options.paper_compat
        or call.scored
        or call.wanted is not None
    )
    if pace is None or not alike or pace.total == 0.0 or pace.may_draft():
        return False
    bild.check(call, asked)
    return True


def resting(call: Call) -> Call:
    """A call that rests returns tokens; what else a dict would have, as keys and values, is not made."""
    config = copy.copy(call.config)
    config.return_dict_in_generate = False
    return replace(call, config=config)


def of_large_alone(
    call: Call,
    asked: bild.DraftingRequest,
    as_dict: bool,
    sequences: Tensor,
    report: CallReport,
    seconds: float,
) -> Any:
    """What `generate` returns of a call that rested, as a dict or as tokens; what it took is noted."""
    asked.decoded, pace = True, bild.pace_for(call, asked.options)
    assert pace is not None  # or it has not rested
    for rows, of_step in report.steps:
        pace.note(False, rows, rows, of_step)
    written: list[list[int]] = cast(Any, sequences[:, call.input_ids.shape[1] :]).tolist()
    eos = stop_of(call.stopping_criteria).eos
    ends: set[int] = set() if eos is None else set(cast(Any, eos).tolist())
    lengths = [
        next((n for n, token in enumerate(text, 1) if token in ends), len(text)) for text in written
    ]
    pace.note_call(False, sum(lengths), seconds)
    counts = bild.by_name([Counts(tokens=length, large_calls=length) for length in lengths])
    return bild.returned(call, as_dict, sequences, counts)
