"""`native_multistep` backend of beam search with the finishing rules of transformers."""

from typing import Any, cast

import torch
from torch import Tensor

from fastgen.decoding.backends import native_multistep
from fastgen.decoding.batching.batch_compaction import fewest_leaving
from fastgen.decoding.search.beam_search import BeamSearch
from fastgen.models.runtime.native.multistep_job import Prepared
from fastgen.ops.dispatch import in_memory
from fastgen.ops.native import search as c
from fastgen.ops.selection.kbest import MOST_IN_C


class NativeBeamSearch(native_multistep.NativeMultistep[BeamSearch]):
    """Backend of `BeamSearch` that runs many steps per C call."""

    @staticmethod
    def covers(search: Any) -> bool:
        """Return whether C can select the tokens of a search whose steps no callback observes."""
        return (
            isinstance(search, BeamSearch)
            and not (search.sample or search.exact or search.trace.enabled)
            and search.wanted is None
            and search.on_step is None
            and search.ids.is_cpu
            and search.rule.beams > 1
            and search.rule.candidates < MOST_IN_C
            and search.rule.ranks_apart
            and native_multistep.supported(search.stop, search.transforms)
        )

    @staticmethod
    def _steps_of(search: BeamSearch) -> native_multistep.Steps:
        return native_multistep.Steps(search.stop, search.transforms)

    def _run(self) -> Tensor | bool | None:
        search, steps, model = self.search, self.steps, self.model
        text, rule = search.text, search.rule
        # A user's stopping criterion may let texts outgrow the tables. Single steps raise then.
        uniform = min(steps.uniform_steps(text), search.ids.shape[2] - search.length)
        prepared = model.begin_steps(uniform) if uniform > 0 else None
        if (
            prepared is None
            or rule.candidates >= prepared.logits.shape[1]
            or not _covers(search, steps, prepared)
        ):
            return None
        (b, m), finished = search.scores.shape, search.finished
        search.scores, search.improvable = (
            search.scores.contiguous(),
            search.improvable.contiguous(),
        )
        finished.scores, finished.done = finished.scores.contiguous(), finished.done.contiguous()
        sentences = search.sentences.contiguous()
        flags = torch.empty(4, b, dtype=torch.bool, device="cpu")
        leave = fewest_leaving(b, search.captured) if search.may_drop else 0
        texts, held = steps.texts(text, search.ids, b * m, prepared, leave)
        beams = c.Beams(
            origins=search.beams.data_ptr(),
            origins_b=search.beams.stride(0), origins_m=search.beams.stride(1),
            finished_ids=finished.ids.data_ptr(), finished_ids_b=finished.ids.stride(0),
            finished_ids_m=finished.ids.stride(1), finished_origins=finished.beams.data_ptr(),
            finished_origins_b=finished.beams.stride(0),
            finished_origins_m=finished.beams.stride(1),
            scores=search.scores.data_ptr(), finished_scores=finished.scores.data_ptr(),
            finished_done=finished.done.data_ptr(), improvable=search.improvable.data_ptr(),
            flags=flags.data_ptr(), sentences=sentences.data_ptr(),
            slot_mask=native_multistep.slot_mask(prepared), candidates=rule.candidates,
            stops_early=rule.early_stopping is True, far=rule.far or 0, mask_value=rule.mask_value,
            penalty=rule.length_penalty,
        )  # fmt: skip
        outcome = native_multistep.run(
            model, prepared, texts,
            lambda threads: c.search_beams(prepared.by, threads, prepared.decoder, texts, beams),
            lambda: beams.slot_mask.open > 0,
        )  # fmt: skip
        del held
        steps.note(search.length, outcome.made)
        search.length += outcome.made
        if outcome.status == c.UNDECIDED:
            return prepared.logits
        if outcome.alone:
            return None
        if outcome.status == c.LEAVING:
            _, improvable, done, _ = cast("list[list[bool]]", cast(Any, flags).tolist())
            search.compact(model, search.leaving(improvable, done))
        return outcome.status != c.OVER


def _covers(search: BeamSearch, steps: native_multistep.Steps, prepared: Prepared) -> bool:
    """Return whether the tables of a search have the dtypes, shapes and strides that C expects."""
    b, m = search.scores.shape
    own = search.finished
    return (
        native_multistep.covers_sight(prepared, b, m)
        and steps.covers(b)
        and in_memory(search.scores, own.scores, dtype=torch.float32)
        and in_memory(own.done, search.improvable, dtype=torch.bool)
        and in_memory(search.ids, own.ids, search.sentences, dtype=torch.int64)
        and in_memory(search.beams, own.beams, dtype=torch.int32)
        and own.scores.shape == own.done.shape == (b, m)
        and len(search.improvable) == len(search.sentences) == b
        and all(
            table.shape[:2] == (b, m) and table.stride(2) == 1
            for table in (search.ids, search.beams)
        )
        and own.ids.shape == search.ids.shape
        and own.beams.shape == search.beams.shape
        and own.ids.stride(2) == own.beams.stride(2) == 1
    )
