"""`native_multistep` backend of greedy search."""

from typing import Any

import torch
from torch import Tensor

from fastgen.decoding.backends import native_multistep
from fastgen.decoding.batching.batch_compaction import fewest_leaving
from fastgen.decoding.search.sampling import Sampling, finished_rows
from fastgen.ops.dispatch import in_memory
from fastgen.ops.native import search as c


class NativeSampling(native_multistep.NativeMultistep[Sampling]):
    """Backend of greedy `Sampling` that runs many steps per C call."""

    @staticmethod
    def covers(search: Any) -> bool:
        """Return whether C can select the tokens of a search whose steps no callback observes."""
        return (
            isinstance(search, Sampling)
            and not (search.sample or search.trace.wanted or search.trace.chosen is not None)
            and search.wanted is None
            and search.on_step is None
            and search.on_tokens is None
            and search.ids.is_cpu
            and (search.pad is None or int(search.pad) >= 0)
            and native_multistep.able(search.stop, search.transforms, updates_scores=True)
        )

    @staticmethod
    def _steps_of(search: Sampling) -> native_multistep.Steps:
        return native_multistep.Steps(search.stop, search.transforms)

    def _run(self) -> Tensor | bool | None:
        search, steps, model = self.search, self.steps, self.model
        text, (rows, length) = search.text, search.ids.shape
        alike = steps.alike(text)
        prepared = model.begin_steps(alike) if alike else None
        # C runs one row per sentence.
        if prepared is None or len(prepared.own) > 1 or not steps.covers(rows):
            return None
        if not (
            in_memory(search.ids, dtype=torch.int64) and in_memory(search.running, dtype=torch.bool)
        ):
            return None
        ids = search.ids.new_empty(rows, length + prepared.steps)
        ids[:, :length] = search.ids
        running, room = search.running.contiguous().clone(), ids.new_empty(rows)
        leave = fewest_leaving(rows, search.captured) if search.may_drop else 0
        texts, held = steps.texts(text, ids, rows, prepared, leave)
        pad = -1 if search.pad is None else int(search.pad)
        outcome = native_multistep.run(
            model, prepared, texts,
            lambda threads: c.search_greedily(
                prepared.by, threads, prepared.decoder, texts, running.data_ptr(), room.data_ptr(),
                pad,
            ),
            lambda: False,
        )  # fmt: skip
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
