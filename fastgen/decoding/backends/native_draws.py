"""Draws of tokens in C, with the random numbers of torch's default generator."""

from collections.abc import Callable, Sequence

import torch

from fastgen.decoding.logits.transform import LogitsTransform, Warper
from fastgen.decoding.search.multinomial import default_generator
from fastgen.models.runtime.native.multistep_job import Prepared
from fastgen.ops.native import noise
from fastgen.ops.native import search as c

_KINDS = "temperature", "top-k", "top-p", "min-p"
"""Warpers in the order in which C applies them."""

MOST_NOISE = 2**23
"""Maximum number of random numbers that torch draws ahead."""


def split(
    transforms: Sequence[LogitsTransform],
) -> tuple[Sequence[LogitsTransform], list[Warper]]:
    """Return the transforms without the warpers at their end, and those warpers."""
    warpers = list[Warper]()
    for each in reversed(transforms):
        if each.warper is None:
            break
        warpers.insert(0, each.warper)
    return transforms[: len(transforms) - len(warpers)], warpers


def supported(warpers: Sequence[Warper]) -> bool:
    """Return whether C applies these warpers in this order."""
    places = [_KINDS.index(each.kind) for each in warpers]
    return places == sorted(set(places))


class Draws:
    """How a search draws its tokens in C.

    The tokens, and the state in which the default generator is left, are those of
    `torch.multinomial`. C makes the random numbers itself where it makes those of torch; otherwise
    torch draws them for some steps ahead.

    Args:
        warpers: Filters of the scores, for which `supported` holds.
    """

    def __init__(self, warpers: Sequence[Warper]) -> None:
        self._values = {each.kind: each.value for each in warpers}
        self._in_c: bool | None = None  # whether C makes the random numbers
        self._ahead = 2  # steps for which torch draws them otherwise

    def run(self, prepared: Prepared, texts: c.Texts, search: Callable[[c.Draws], int]) -> int:
        """Run a search in C; leave the generator as after the last step that it has made.

        Args:
            prepared: The decode steps.
            texts: The texts of the search. Their number of steps may be reduced.
            search: Runs the search and returns why it stopped.
        """
        draws = c.Draws(
            temperature=self._values.get("temperature", 1.0),
            top_k=int(self._values.get("top-k", 0)),
            top_p=self._values.get("top-p", 1.0),
            min_p=self._values.get("min-p", 0.0),
        )
        if self._in_c is None:
            self._in_c = noise.is_torchs(prepared.by)
        with default_generator().lock:
            if not self._in_c:
                return self._with_noise(draws, prepared, texts, search)
            state = torch.get_rng_state()
            draws.generator = state.data_ptr()
            status = search(draws)
            torch.set_rng_state(state)
            return status

    def _with_noise(
        self, draws: c.Draws, prepared: Prepared, texts: c.Texts, search: Callable[[c.Draws], int]
    ) -> int:
        """Run a search in C with random numbers that torch draws ahead."""
        logits = prepared.logits
        steps = texts.steps = min(texts.steps, self._ahead, max(1, MOST_NOISE // logits.numel()))
        drawn = torch.empty(steps, *logits.shape, dtype=torch.float32, device="cpu")
        states = [torch.get_rng_state()]
        for each in drawn:
            each.exponential_()
            states.append(torch.get_rng_state())
        draws.noise = drawn.data_ptr()
        status = search(draws)
        made: int = texts.made
        torch.set_rng_state(states[made])
        self._ahead = 2 * steps if made == steps else made + 1
        return status
