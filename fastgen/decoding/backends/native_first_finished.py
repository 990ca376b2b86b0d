"""`native_multistep` backend of beam search with the finishing rules of fairseq."""

from typing import Any, cast

import torch
from torch import Tensor

from fastgen.decoding.backends import native_multistep
from fastgen.decoding.batching.batch_compaction import fewest_leaving
from fastgen.decoding.kv_cache import room
from fastgen.decoding.search.first_finished import FirstFinished
from fastgen.decoding.search.prediction import StepOutput
from fastgen.decoding.search.stopping import Stop
from fastgen.models.runtime.native.multistep_job import Prepared
from fastgen.ops.dispatch import in_memory
from fastgen.ops.native import search as c
from fastgen.ops.selection.kbest import MOST_IN_C


class NativeFirstFinished(native_multistep.NativeMultistep[FirstFinished]):
    """Backend of `FirstFinished` that runs many steps per C call."""

    @staticmethod
    def covers(search: Any) -> bool:
        """Return whether C can select the tokens of a search."""
        return (
            isinstance(search, FirstFinished)
            and search.selector.plain
            and search.device.type == "cpu"
            and 2 * search.beams < MOST_IN_C
            and native_multistep.supported(_stop(search), search.selector.transforms)
        )

    @staticmethod
    def _steps_of(search: FirstFinished) -> native_multistep.Steps:
        return native_multistep.Steps(_stop(search), search.selector.transforms)

    def _run(self) -> StepOutput | bool | None:
        search, steps, model = self.search, self.steps, self.model
        if search.selector.phase(search.step) is None or search.scores.dtype != torch.float32:
            return None
        b, m, step, attention = search.batch_size, search.beams, search.step, search.attention
        uniform = min(steps.uniform_steps(search.text), search.longest - step, room.COMPACT_EVERY)
        if uniform <= 0 or bool(search.ignored.any()):
            return None
        if attention is not None:
            attention.ensure_capacity(step + uniform - 1)
        prepared = model.begin_steps(
            uniform, None if attention is None else attention.rows[step : step + uniform]
        )
        if (
            prepared is None
            or 2 * m >= prepared.logits.shape[1]
            or not _covers(search, steps, prepared)
        ):
            return None
        width = step + prepared.steps + 1
        over = torch.tensor(search.over, dtype=torch.bool, device="cpu")
        counts = torch.tensor(
            [len(search.finished[number]) for number in search.running],
            dtype=torch.int64,
            device="cpu",
        )
        finished = torch.empty(b * m, 3, dtype=torch.int64, device="cpu")
        finished_tokens = torch.zeros(b * m, width, dtype=torch.int64, device="cpu")
        finished_scores = torch.empty(b * m, width, dtype=torch.float32, device="cpu")
        origins = None if attention is None else torch.zeros_like(finished_tokens)
        scores = search.scores.view(b, m, -1)
        job = c.FirstFinished(
            scores=scores.data_ptr(), scores_b=scores.stride(0), scores_m=scores.stride(1),
            over=over.data_ptr(), counts=counts.data_ptr(), places=finished.data_ptr(),
            finished_tokens=finished_tokens.data_ptr(),
            finished_scores=finished_scores.data_ptr(), width=width,
            slot_mask=native_multistep.slot_mask(prepared),
        )  # fmt: skip
        if attention is not None and origins is not None:
            job.origins, job.finished_origins = attention.origins.data_ptr(), origins.data_ptr()
            job.origins_b, job.origins_m = attention.origins.stride()[:2]
        ids = search.tokens.view(b, m, -1)
        texts, held = steps.texts(
            search.text, ids, b * m, prepared, fewest_leaving(b, search.captured)
        )
        outcome = native_multistep.run(
            model, prepared, texts,
            lambda threads: c.search_first_finished(
                prepared.by, threads, prepared.decoder, texts, job
            ),
            lambda: job.slot_mask.open > 0,
        )  # fmt: skip
        del held
        search.step += outcome.made
        _store(search, finished[: job.found], finished_tokens, finished_scores, origins)
        search.over = cast(Any, over).tolist()
        if outcome.status == c.UNDECIDED:
            return model.predicted(prepared.logits)
        if outcome.alone:
            return None
        if outcome.status == c.LEAVING and (staying := search.staying()) is not None:
            search.keep(model, staying)
        return outcome.status != c.OVER


def _covers(search: FirstFinished, steps: native_multistep.Steps, prepared: Prepared) -> bool:
    """Return whether the tables of a search have the dtypes, shapes and strides that C expects."""
    b, m, attention = search.batch_size, search.beams, search.attention
    return (
        native_multistep.covers_sight(prepared, b, m)
        and steps.covers(b)
        and in_memory(search.scores, dtype=torch.float32)
        and in_memory(search.tokens, dtype=torch.int64)
        and search.scores.is_contiguous()
        and search.tokens.is_contiguous()
        and len(search.scores) == len(search.tokens) == b * m
        and len(search.over) == len(search.running) == b
        and (
            attention is None
            or (
                in_memory(attention.origins, dtype=torch.int64)
                and attention.origins.shape[:2] == (b, m)
                and attention.origins.stride(2) == 1
            )
        )
    )


def _stop(search: FirstFinished) -> Stop:
    """Return a criterion that ends texts by the end token alone.

    The length limit is out of reach of C, because Python runs the step at which all texts end.
    """
    return Stop(
        eos=torch.tensor([search.end], dtype=torch.int64, device="cpu"), longest=search.longest + 3
    )


def _store(
    search: FirstFinished, finished: Tensor, tokens: Tensor, scores: Tensor, origins: Tensor | None
) -> None:
    """Store the N hypotheses that C has finished.

    Args:
        search: the search.
        finished: (N, 3) int64: sentence, beam and step of each, in ascending order of steps.
        tokens: (N or more, width) int64, end token included.
        scores: (N or more, width) fp32, running scores.
        origins: (N or more, width) int64, the beam that a text was in at each step, zero-padded;
            None without attention.
    """
    count, attention = len(finished), None
    if count == 0:
        return
    places: list[int] = cast(Any, finished[:, 0]).tolist()
    lengths: list[int] = cast(Any, finished[:, 2] + 1).tolist()
    if search.attention is not None and origins is not None:
        attention = search.attention.of(finished[:, 0], origins[:count, : max(lengths)])
    sentences = [search.running[place] for place in places]
    search.store(sentences, lengths, tokens[:count], scores[:count], attention)
