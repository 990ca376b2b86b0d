"""Replacements of loops of transformers that call `generate` for each batch of a dataset."""

import functools
from collections.abc import Callable, Sized
from typing import Any

from torch.utils.data import DataLoader
from transformers.pipelines.pt_utils import PipelineIterator

from fastgen.context import isolated
from fastgen.patches.generation_call import requesting
from fastgen.patches.transformers.loops.read_ahead import ReadAhead, may_read_ahead
from fastgen.patches.transformers.loops.upcoming_calls import UpcomingCalls

EVALUATION, PIPELINE = "transformers.evaluation_loop", "transformers.pipeline_batches"


def evaluation_loop(
    original: Callable[..., Any], /, self: Any, dataloader: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replace `Trainer.evaluation_loop`; batches whose texts are generated are read ahead."""
    apart = self.args.world_size > 1 or self.is_deepspeed_enabled or self.is_fsdp_enabled
    if apart or not may_read_ahead(dataloader):
        return original(self, dataloader, *args, **kwargs)
    handler = self.callback_handler

    def restore() -> None:
        """Let callbacks find the data loader itself."""
        if handler.eval_dataloader is ahead:
            handler.eval_dataloader = dataloader

    calls = UpcomingCalls(EVALUATION, self.model)
    ahead = ReadAhead(dataloader, calls, is_lazy=False, begun=restore)

    try:
        with requesting(self.model, upcoming=calls):
            return original(self, ahead, *args, **kwargs)
    finally:
        restore()


def get_iterator(
    original: Callable[..., Any],
    /,
    self: Any,
    inputs: Any,
    num_workers: int,
    batch_size: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replace `Pipeline.get_iterator`; batches whose texts are generated are read ahead."""
    results = original(self, inputs, num_workers, batch_size, *args, **kwargs)
    outputs: Any = getattr(results, "loader", None)
    is_known = type(results) is PipelineIterator and type(outputs) is PipelineIterator
    if batch_size > 1 and isinstance(inputs, Sized) and is_known:  # not a ChunkPipeline
        loader: object = outputs.loader
        infer, model = outputs.infer, self.model
        if type(loader) is DataLoader and hasattr(model, "generate"):
            calls = UpcomingCalls(PIPELINE, model)
            is_lazy = not isinstance(inputs, list)  # a list of results is returned at once
            outputs.loader = ReadAhead(loader, calls, is_lazy)
            outputs.infer = functools.partial(isolated, _with, model, calls, infer)
    return results


def _with(
    model: Any, calls: UpcomingCalls, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    with requesting(model, upcoming=calls):
        return function(*args, **kwargs)
