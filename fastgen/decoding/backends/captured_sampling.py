"""`captured_selection` backend of greedy search and sampling.

The host sees one step late that all rows have ended. It then drops the column of that step.
"""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fastgen.decoding.backends.captured_selection import CapturedSelection
from fastgen.decoding.batching.batch_compaction import leaving_now
from fastgen.decoding.logits.pipeline import apply_transforms, phases
from fastgen.decoding.logits.text import Text
from fastgen.decoding.search.beam_search import RowStepper
from fastgen.decoding.search.sampling import Sampling, finished_rows
from fastgen.models.cuda_graphs import graph
from fastgen.models.cuda_graphs.graph_buffers import rounded


class CapturedSampling(CapturedSelection[Sampling]):
    """Backend of `Sampling` whose token selection runs as a CUDA graph."""

    search_type = Sampling

    def __init__(self, search: Sampling, model: RowStepper) -> None:
        device = search.ids.device
        super().__init__(search, model, graph.generator(device) if search.sample else None)
        self._end = torch.empty(1, dtype=torch.int64, device=device)  # length of the text
        # Tokens of the rows in the batch, (R, N) with room for `longest`; None once selection is
        # not captured.
        self._table: Tensor | None = self._with_room()

    def select(self, output: Tensor) -> bool:
        """Select the next token of every row; return False when all have ended.

        With a capture the end is seen one call late.
        """
        search = self.search
        # A user's stopping criterion may allow texts longer than `longest`.
        if search.ids.shape[1] < search.longest and self.can_capture(output):
            with contextlib.suppress(graph.NotCaptured):
                return self._select(output)
        if self._table is not None:
            self._close()
            alive = self.read_pending()
            if alive is not None and not alive[0].any():
                return False
        return super().select(output)

    def reads(self) -> Sequence[tuple[Any, Sequence[str]]]:
        """Return what `_select_tokens` reads."""
        search = self.search
        return (
            (search, ("pad", "running", "sample", "transforms")),
            (search.stop, ("eos",)),
            (self, ("_end", "_table")),
        )

    def _select(self, logits: Tensor) -> bool:
        search, table, length = self.search, self._table, self.search.ids.shape[1]
        assert table is not None
        text = Text(table, search.prompt_length, length, self._end)
        last = search.stop.ends_all(length + 1)
        self._end.fill_(length)
        flags: Tensor = self.run(
            functools.partial(self._select_tokens, logits, text, last),
            logits,
            table,
            last,
            phases(search.transforms, length),
        )
        table = cast(Tensor, self._table)  # it may have moved
        previous = self.exchange(flags)
        alive = [True] if previous is None else search.alive(previous[0])
        if not any(alive):  # all rows had already ended before this step
            self.undo_draws()
            self._close()
            return False
        search.ids = table[:, : length + 1]
        if last:
            if search.sample:
                self.read_pending()  # raises if the distribution was invalid
            self._close()
            return False
        if search.may_drop and leaving_now(finished_rows(alive), len(alive), search.captured):
            # Read the flags of this step now, because the compacted batch cannot use them later.
            alive = search.alive(cast(Tensor, self.read_pending())[0])
            if not any(alive):
                self._close()
                return False
            self._collect(table.clone())
            search.compact(
                self.model, leaving_now(finished_rows(alive), len(alive), search.captured)
            )
            self._table = self._with_room()
        return True

    def _select_tokens(self, logits: Tensor, text: Text, last: bool) -> Tensor:
        """Select the next tokens and write them to the table. This function is captured.

        Returns:
            `with_invalid` of the rows that are still running, (1, R) bool.
        """
        search = self.search
        scores = (
            apply_transforms(logits.to(torch.float32, copy=True), text, search.transforms)
            if search.transforms
            else logits
        )
        tokens = search.selected(scores, self.draw)
        if search.pad is not None:
            tokens = torch.where(search.running, tokens, search.pad)
        text.ids.index_copy_(1, self._end, tokens[:, None])
        running = search.running.logical_and_(~search.stop.hits(tokens, last))
        return self.with_invalid(running[None])

    def _with_room(self) -> Tensor:
        """Move the tokens of the batch to a table with room for the longest text.

        Its width is rounded up, so that a graph serves prompts of similar lengths.
        """
        search = self.search
        rows, length = search.ids.shape
        table = search.ids.new_zeros(rows, rounded(search.longest))
        if search.pad is not None:
            table.copy_(search.pad)
        table[:, :length] = search.ids
        search.ids = table[:, :length]
        return table

    def _collect(self, table: Tensor) -> None:
        """Write the rows of the batch to `outcome`, which has room for the longest text."""
        if self.search.rows is None:
            self.search.outcome = table
        else:
            self.search.outcome[self.search.rows] = table

    def _close(self) -> None:
        search, length = self.search, self.search.ids.shape[1]
        self.leave()
        assert self._table is not None
        search.ids = self._table[:, :length]
        self._collect(self._table)
        search.outcome = search.outcome[:, :length]
        self._table = None
