"""Translation of transformers' stopping criteria, and the lengths and tokens that end texts."""

import copy
import math
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor
from transformers.generation import stopping_criteria as sc

from fastgen.decoding.search.stopping import Stop
from fastgen.models.routing.instance import toolkit_class
from fastgen.patches.transformers import compat


def fill_of(loop: Literal["beam", "sample"], config: Any) -> int:
    """Return the token that fills sequences after their end."""
    eos, pad = compat.eos_tokens(config), compat.pad_token(config)
    if loop == "sample":
        return -1 if pad is None else int(pad)
    # As in transformers, a padding id of 0 counts as none.
    return -1 if eos is None else int(pad or eos[0])


def stop_of(criteria: Sequence[Any]) -> Stop:
    """Translate the stopping criteria."""
    eos: list[Tensor] = []
    at_length: list[Callable[[int], bool]] = []
    others: list[Callable[[Tensor, object], Tensor]] = []
    lengths: list[float] = []
    for criterion in criteria:
        kind = toolkit_class(criterion)
        if kind is sc.EosTokenCriteria:
            eos.append(criterion.eos_token_id)
        elif kind is sc.MaxLengthCriteria:
            at_length.append(_reaches(criterion))
            lengths.append(criterion.max_length)
        elif kind is sc.MaxTimeCriteria:
            at_length.append(_expires(criterion))
        else:
            others.append(criterion)
    longest = math.ceil(min(min(lengths), _NO_END)) if len(lengths) == len(at_length) > 0 else None
    return Stop(torch.cat(eos) if eos else None, at_length, others, longest)


_COUNTS = ("num_beams", "num_beam_groups", "num_return_sequences", "top_k")

_NO_END = 2**62
"""Maximum length of texts whose length is not limited."""


def normalized_config(loop: Literal["beam", "sample"], config: Any, criteria: Sequence[Any]) -> Any:
    """Return a generation config with Python integers as counts and the length at which texts end.

    With sampling, `MaxLengthCriteria` determine that length, rounded up; the config's `max_length`
    counts only if there are none.

    Raises:
        TypeError: `max_length` of a beam search is not an integer, as in transformers.
    """
    if loop == "beam":
        longest = operator.index(config.max_length)
    else:
        lengths = [
            criterion.max_length
            for criterion in criteria
            if isinstance(criterion, sc.MaxLengthCriteria)
        ]
        longest = math.ceil(min([*(lengths or [config.max_length]), _NO_END]))
    counts = {name: getattr(config, name, None) for name in _COUNTS}
    plain = {
        name: operator.index(cast(Any, count))
        for name, count in counts.items()
        if hasattr(count, "__index__")
    }
    plain["max_length"] = longest
    others = {
        name: count for name, count in plain.items() if type(getattr(config, name)) is not int
    }
    if not others and longest == config.max_length:
        return config
    config = copy.copy(config)
    for name, value in plain.items():
        setattr(config, name, value)
    return config


def unknown_criterion(criteria: Sequence[Any]) -> str | None:
    """Return the class name of a criterion that is not known to be row-wise, or None.

    The known ones depend on a row's newest token, the length and the time only.
    """
    kinds = (sc.EosTokenCriteria, sc.MaxLengthCriteria, sc.MaxTimeCriteria)
    return next((type(c).__name__ for c in criteria if toolkit_class(c) not in kinds), None)


def _reaches(criterion: Any) -> Callable[[int], bool]:
    # Call the criterion with a dummy row: it also warns of lengths that the model was not made for.
    probe = torch.zeros(1, 1, dtype=torch.int64, device="cpu")
    return lambda length: bool(criterion(probe.expand(1, length), None))


def _expires(criterion: Any) -> Callable[[int], bool]:
    return lambda _: time.time() - criterion.initial_timestamp > criterion.max_time
