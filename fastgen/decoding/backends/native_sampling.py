"""`native_multistep` backend of greedy search and sampling."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastgen.decoding.backends import native_draws, native_multistep
from fastgen.decoding.batching.batch_compaction import fewest_leaving
from fastgen.decoding.search.sampling import Sampling, finished_rows
from fastgen.ops.dispatch import in_memory
from fastgen.ops.native import search as c


class NativeSampling(native_multistep.NativeMultistep[Sampling]):
    """Backend of `Sampling` that runs many steps per C call."""

    def __init__(self, search: Sampling, model: native_multistep.MultistepModel) -> None:
        super().__init__(search, model)
        _, warpers = native_draws.split(search.transforms)
        self.draws = native_draws.Draws(warpers) if search.sample else None

    @staticmethod
    def covers(search: Any) -> bool:
        """Return whether C can select the tokens of a search whose steps no callback observes."""
        if not isinstance(search, Sampling):
            return False
        transforms, warpers = native_draws.split(search.transforms)
        return (
            (native_draws.supported(warpers) if search.sample else not warpers)
            and not (search.trace.enabled or search.trace.chosen is not None)
            and search.wanted is None
            and search.on_step is None
            and search.on_tokens is None
            and search.ids.is_cpu
            and (search.pad is None or int(search.pad) >= 0)
            and native_multistep.supported(search.stop, transforms)
        )

    @staticmethod
    def _steps_of(search: Sampling) -> native_multistep.Steps:
        transforms, _ = native_draws.split(search.transforms)
        return native_multistep.Steps(search.stop, transforms)

    def _run(self) -> Tensor | bool | None:
        search, steps, model = self.search, self.steps, self.model
        if search.user is not None and not search.user.is_alone():
            return None  # another thread draws, and would wait for all steps of a C call
        text, (rows, length) = search.text, search.ids.shape
        uniform = min(self.most, steps.uniform_steps(text))
        prepared = model.begin_steps(uniform) if uniform else None
        if prepared is None:
            return None
        beams = len(prepared.own)
        sentences = rows // beams
        if not steps.covers(sentences) or (
            beams > 1 and not native_multistep.covers_sight(prepared, sentences, beams)
        ):
            return None
        if not (
            in_memory(search.ids, dtype=torch.int64) and in_memory(search.running, dtype=torch.bool)
        ):
            return None
        ids = search.ids.new_empty(rows, length + prepared.steps)
        ids[:, :length] = search.ids
        running, room = search.running.contiguous().clone(), ids.new_empty(rows)
        slot_mask = native_multistep.slot_mask(prepared) if beams > 1 else None
        parents = torch.arange(beams, device="cpu", dtype=torch.int64).repeat(sentences)
        leave = fewest_leaving(rows, search.captured) if search.may_drop else 0
        texts, held = steps.texts(text, ids.view(sentences, beams, -1), rows, prepared, leave)
        pad = -1 if search.pad is None else int(search.pad)

        def search_rows(threads: int, draws: c.Draws | None = None) -> int:
            return c.search_rows(
                prepared.by, threads, prepared.decoder, texts, draws, slot_mask, running.data_ptr(),
                parents.data_ptr(), room.data_ptr(), pad,
            )  # fmt: skip

        def draw_rows(draws: native_draws.Draws, threads: int) -> int:
            return draws.run(prepared, texts, lambda given: search_rows(threads, given))

        outcome = native_multistep.run(
            model,
            prepared,
            texts,
            search_rows if self.draws is None else partial(draw_rows, self.draws),
            lambda: slot_mask is not None and slot_mask.open > 0,
        )
        del held
        steps.note(length, outcome.made)
        search.extend(ids[:, length : length + outcome.made])
        search.running = running
        if outcome.status == c.UNDECIDED:
            return prepared.logits
        if outcome.alone:
            return None
        if outcome.status == c.LEAVING:
            search.compact(model, finished_rows(search.alive(running)))
        return outcome.status != c.OVER
