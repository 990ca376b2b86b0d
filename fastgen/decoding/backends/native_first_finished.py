"""`native_multistep` backend of beam search with the finishing rules of fairseq."""

from typing import Any, cast

import torch
from torch import Tensor

from fastgen.decoding.backends import native_multistep
from fastgen.decoding.batching.batch_compaction import fewest_leaving
from fastgen.decoding.kv_cache import room
from fastgen.decoding.search.first_finished import FirstFinished, StepOutput
from fastgen.decoding.search.stopping import Stop
from fastgen.models.runtime.native_multistep_job import Prepared
from fastgen.ops.dispatch import in_memory
from fastgen.ops.native import search as c
from fastgen.ops.selection.kbest import MOST_IN_C


class NativeFirstFinished(native_multistep.NativeMultistep[FirstFinished]):
    """Backend of `FirstFinished` that runs many steps per C call."""

    @staticmethod
    def covers(search: Any) -> bool:
        """Return whether C can select the tokens of a search."""
        return (
            type(search) is FirstFinished
            and search.search.plain
            and search.device.type == "cpu"
            and 2 * search.beams < MOST_IN_C
            and native_multistep.able(_stop(search), search.search.transforms)
        )

    @staticmethod
    def _steps_of(search: FirstFinished) -> native_multistep.Steps:
        return native_multistep.Steps(_stop(search), search.search.transforms)

    def _run(self) -> StepOutput | bool | None:
        search, steps, model = self.search, self.steps, cast(Any, self.model)
        if search.search.phase(search.step) is None or search.scores.dtype != torch.float32:
            return None
        b, m, step, attention = search.present, search.beams, search.step, search.attention
        alike = min(steps.alike(search.text), search.longest - step, room.COMPACT_EVERY)
        if alike <= 0 or bool(search.ignored.any()):
            return None
        if attention is not None:
            attention.make_room(step + alike - 1)
        prepared = model.begin_steps(
            alike, None if attention is None else attention.rows[step : step + alike]
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
        places, tokens, reached = (
            torch.empty(b * m, 3, dtype=torch.int64, device="cpu"),
            *_tables(b * m, width),
        )
        origins = None if attention is None else torch.empty_like(tokens)
        scores = search.scores.view(b, m, -1)
        job = c.FirstFinished(
            scores=scores.data_ptr(), scores_b=scores.stride(0), scores_m=scores.stride(1),
            over=over.data_ptr(), counts=counts.data_ptr(), places=places.data_ptr(),
            finished_tokens=tokens.data_ptr(), finished_scores=reached.data_ptr(), width=width,
            sight=native_multistep.sight(prepared),
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
            lambda: job.sight.open > 0,
        )  # fmt: skip
        del held
        search.step += outcome.made
        _note(search, places[: job.found], tokens, reached, origins)
        search.over = cast(Any, over).tolist()
        if outcome.status == c.UNDECIDED:
            return model.predicted(prepared.logits)
        if outcome.alone:
            return None
        if outcome.status == c.LEAVING:
            search.let_leave(model)
        return outcome.status != c.OVER


def _covers(search: FirstFinished, steps: native_multistep.Steps, prepared: Prepared) -> bool:
    """Return whether the tables of a search have the dtypes, shapes and strides that C expects."""
    b, m, attention = search.present, search.beams, search.attention
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


def _tables(rows: int, width: int) -> tuple[Tensor, Tensor]:
    return torch.empty(rows, width, dtype=torch.int64, device="cpu"), torch.empty(
        rows, width, dtype=torch.float32, device="cpu"
    )


def _note(
    search: FirstFinished, places: Tensor, tokens: Tensor, reached: Tensor, origins: Tensor | None
) -> None:
    """Store the hypotheses that C has finished, one call per step.

    Args:
        search: the search.
        places: (N, 3) int64: sentence, beam and step of each, in ascending order of steps.
        tokens: (N, width) int64, end token included.
        reached: (N, width) fp32, running scores.
        origins: (N, width) int64, the beam that a text was in at each step; None without attention.
    """
    steps: list[int] = cast(Any, places[:, 2]).tolist()
    first = 0
    while first < len(steps):
        end = first + steps.count(steps[first])
        rows, length = slice(first, end), steps[first] + 1
        came_by = None if origins is None else origins[rows, :length]
        search.note_finished(
            places[rows, 0], tokens[rows, :length], reached[rows, :length], came_by
        )
        first = end
