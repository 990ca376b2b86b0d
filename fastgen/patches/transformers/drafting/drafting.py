"""How the tokens of a call are drafted: by prompt lookup, by the model itself, or both."""

from typing import Any

from torch import Tensor

from fastgen import config
from fastgen.decoding.backends.drafted_sampling import Drafting
from fastgen.decoding.speculative.adaptive_drafting import DraftTiming
from fastgen.decoding.speculative.draft_length import DraftLength
from fastgen.decoding.speculative.drafts import Longest
from fastgen.decoding.speculative.self_draft import SelfDraft
from fastgen.models.build.int8_step import (
    int8_bytes,
    int8_shortage,
    int8_step,
    why_not_int8,
)
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.runtime.head_bounds import OUTGROWN, weight_bytes
from fastgen.models.state import CachedState, state_of
from fastgen.ops import processor
from fastgen.patches.transformers.drafting import prompt_lookup
from fastgen.patches.transformers.generate.loop_call import Call

MOST_TEXTS = 4
"""Most texts of a call for which the model drafts by itself.

With more, steps compute instead of reading weights. Texts advance by the shortest accepted draft of
all: with four, drafts that `on` forces ran at 1.1 to 1.4 times (fp32) and 0.96 to 1.2 times (bf16)
the speed of plain greedy search; with one, at 1.5 to 2.0 and 1.25 to 1.3 times
(`benchmarks.self_draft` on Zen 4 with two threads).
"""

LONGEST = 32
"""Most tokens of a draft of the model itself."""

PACKING_RATE = 1e9
"""Bytes of weights that are rounded and packed per second."""

PACKING_SHARE = 0.02
"""Share of the time of a model's calls without beams that packing its weights may take."""


class SelfDrafts(CachedState):
    """Costs and acceptance of a model's own drafts.

    Attributes:
        by_texts: Those of calls by the number of texts, as a power of two, and whether they sample.
    """

    def __init__(self) -> None:
        self.by_texts: dict[tuple[int, bool], tuple[DraftTiming, DraftLength]] = {}

    def of(self, texts: int, samples: bool) -> tuple[DraftTiming, DraftLength]:
        """Return those of calls with about this number of texts."""
        known = self.by_texts.get(key := (texts.bit_length(), samples))
        if known is None:
            timing = DraftTiming()
            timing.note_start(0.0, 1)  # the drafts have no prompt of their own
            known = self.by_texts[key] = timing, DraftLength(LONGEST)
        return known

    @property
    def total(self) -> float:
        """Seconds of all rounds so far."""
        # A call in another thread may add some meanwhile.
        return sum(timing.total for timing, _ in list(self.by_texts.values()))


def drafting_of(call: Call, step: DecoderStep | None, source: Tensor | None) -> Drafting | None:
    """Return how the tokens of a call are drafted; None if they are not.

    Args:
        call: A call of greedy search or sampling.
        step: Its fused decode step; None if there is none.
        source: (B, S) int64, the tokens that the call gives to an encoder; or None.
    """
    drafting = prompt_lookup.drafting_of(call, source)
    is_asked = config.settings().self_draft == "on"
    if step is None or why_not_self(call, step):
        return drafting
    known = state_of(call.model).of(SelfDrafts)
    timing, length = known.of(len(call.input_ids), bool(call.config.do_sample))
    packing = int8_bytes(step) * step.dtype.itemsize / PACKING_RATE
    if not is_asked and PACKING_SHARE * known.total < packing:
        return Drafting(None, length, timing)
    rounded = int8_step(step)
    if rounded is None:
        return drafting
    own = SelfDraft(rounded)
    if drafting is not None and drafting.draft is not None:
        drafting.draft = Longest([drafting.draft, own])
        return drafting
    return Drafting(own, length, None if is_asked else timing)


def why_not_self(call: Any, step: DecoderStep) -> str:
    """Return why the model does not draft by itself in a call; empty if it may."""
    settings, texts = config.settings(), len(call.input_ids)
    if settings.self_draft == "off":
        return "FASTGEN_SELF_DRAFT=off"
    if settings.precision != "model":
        return f"FASTGEN_PRECISION={settings.precision}"
    if call.config.num_return_sequences != 1:
        return "one sequence per text alone"
    if settings.self_draft == "auto" and prompt_lookup.is_requested(call.config):
        return "prompt lookup drafts"
    if texts > MOST_TEXTS:
        return f"{texts} texts, more than {MOST_TEXTS}"
    if step.run_layers is None:
        return "decode steps are not written in C"
    outgrown = weight_bytes(step) >= OUTGROWN * processor.last_level_cache()
    if settings.self_draft == "auto" and not outgrown:
        return "the weights fit into the processor's cache, or nearly so"
    return why_not_int8(step) or int8_shortage(step)
