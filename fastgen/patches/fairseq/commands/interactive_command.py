"""`fairseq-interactive` as a pipeline, with fairseq's output at the same times as in fairseq.

The output text of a batch is built in the background while the next batch of its buffer is
translated. When reading from a file, the next buffer is read and encoded in the background too.
"""

import logging
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fairseq import utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.token_generation_constraints import unpack_constraints
from fairseq_cli.interactive import buffered_read, make_batches
from torch import Tensor

from fastgen.patches.engine import engine
from fastgen.patches.fairseq.bild.bild_command import Pair
from fastgen.patches.fairseq.commands import workers
from fastgen.patches.fairseq.commands.background import InOrder
from fastgen.patches.fairseq.commands.lines import (
    LineFormatter,
    PlainHypothesis,
    Sentence,
    plain_hypotheses,
)
from fastgen.patches.fairseq.commands.options import command_line
from fastgen.patches.fairseq.commands.setup import Run, check_sampling, standard_output, without


def interactive(original: Callable[..., Any], cfg: Any) -> None:
    """`fairseq_cli.interactive.main`; prints the lines of a buffer once all of it is translated."""
    if isinstance(cfg, Namespace):
        cfg = convert_namespace_to_omegaconf(cfg)
    pair = Pair(cfg, "fairseq-interactive")
    with engine.running("fairseq-interactive"), standard_output("fairseq-interactive"):
        left_off = _interactive(cfg, pair)
    engine.hit("fairseq.interactive_command", left_off)


def _interactive(cfg: Any, pair: Pair) -> list[str]:
    """Translate the input; return the disabled features, with their fallback reasons."""
    began, translating = time.time(), 0.0
    utils.import_user_module(cfg.common)
    logger = logging.getLogger("fairseq_cli.interactive")
    cfg.interactive.buffer_size = max(1, cfg.interactive.buffer_size)
    if cfg.dataset.max_tokens is None and cfg.dataset.batch_size is None:
        cfg.dataset.batch_size = 1
    check_sampling(cfg)
    assert not cfg.dataset.batch_size or cfg.dataset.batch_size <= cfg.interactive.buffer_size, (
        "--batch-size cannot be larger than --buffer-size"
    )
    run = Run(cfg, logger, pair)
    run.prepare(run.models)
    generator = run.task.build_generator(run.models, cfg.generation)
    formatter = run.formatter(generator, run.task.source_dictionary, interactive=True)
    if cfg.generation.constraints:
        logger.warning("NOTE: Constrained decoding currently assumes a shared subword vocabulary.")
    if cfg.interactive.buffer_size > 1:
        logger.info("Sentence buffer size: %s", cfg.interactive.buffer_size)
    logger.info("NOTE: hypothesis and token scores are output in base 2")
    logger.info("Type the input sentence and press return:")
    start = 0
    lines: list[tuple[int, str]] = []  # number and output text of each sentence of a buffer

    def translate(batches: Iterable[Any]) -> Iterator[_Translated]:
        """Translate batches, in this process or in a worker."""
        for batch in batches:
            began_batch = time.time()
            nbest_lists = _translate(run, generator, batch)
            found = [plain_hypotheses(nbest[: formatter.nbest]) for nbest in nbest_lists]
            yield _Translated(batch, found, time.time() - began_batch)

    with (
        pair.drafting(generator) as drafting,
        _by_workers(run, generator, translate) as (translated, left_off),
        InOrder(
            lambda sentences: _lines_of(formatter, sentences),
            lines.extend,
            command_line.postprocess_workers,
        ) as background,
    ):
        for count, batches in _buffers(run):
            waiting = time.time()
            for each in translated(batches):
                translating += time.time() - waiting
                background.hand_in(_typed(each, formatter, start, cfg.generation.constraints))
                waiting = time.time()
            background.finish()
            print("".join(text for _, text in sorted(lines)), end="", flush=True)
            lines.clear()
            start += count
    if drafting is not None:
        logger.info(drafting)
    logger.info(
        f"Total time: {time.time() - began:.3f} seconds; translation time: {translating:.3f}"
    )
    return left_off


class _Translated(NamedTuple):
    """A translated batch.

    Attributes:
        batch: fairseq's batch.
        found: The hypotheses of each sentence, as plain numbers.
        seconds: Translation time.
    """

    batch: Any
    found: list[list[PlainHypothesis]]
    seconds: float


@contextmanager
def _by_workers(
    run: Run, generator: Any, translate: Callable[[Iterable[Any]], Iterator[_Translated]]
) -> Iterator[tuple[Callable[[list[Any]], Iterator[_Translated]], list[str]]]:
    """Yield a function that translates the batches of a buffer, and the disabled features.

    It uses the requested number of processes, or the fastest one.

    Raises:
        SystemExit: Several processes are requested and not possible.
    """
    batch_count = run.cfg.interactive.buffer_size // (run.cfg.dataset.batch_size or 1)
    number = workers.chosen(
        "fairseq-interactive",
        command_line.generate_workers,
        batch_count,
        run.task,
        generator,
        run.models,
    )
    if isinstance(number, str) or number == 1:
        yield translate, [] if number == 1 else [f"one process translates: {number}"]
        return
    least = number * (workers.BATCHES if command_line.generate_workers is None else 1)
    with workers.Workers(translate, number) as pool:
        yield (
            lambda batches: (
                translate(batches) if len(batches) < least else pool.results(batches, more=True)
            ),
            [],
        )


def _buffers(run: Run) -> Iterator[tuple[int, list[Any]]]:
    """Yield the number of lines and the batches of each buffer; files are read a buffer ahead.

    Terminals and pipes are read on demand: Ctrl-C could not end a thread that waits for a line.
    """
    cfg = run.cfg
    buffers = (
        (len(lines), list(make_batches(lines, cfg, run.task, run.max_positions(), run.encode)))
        for lines in buffered_read(cfg.interactive.input, cfg.interactive.buffer_size)
    )
    if not Path(cfg.interactive.input).is_file():
        yield from buffers
        return
    with ThreadPoolExecutor(1, "fastgen-read") as reader:
        following = reader.submit(next, buffers, None)
        while (buffer := following.result()) is not None:
            following = reader.submit(next, buffers, None)
            yield buffer


def _lines_of(formatter: LineFormatter, sentences: list[Sentence]) -> list[tuple[int, str]]:
    return [(sentence.number, formatter.batch([sentence])[0]) for sentence in sentences]


def _translate(run: Run, generator: Any, batch: Any) -> list[Any]:
    tokens, lengths, constraints = (
        part.cuda() if run.cuda and isinstance(part, Tensor) else part
        for part in (batch.src_tokens, batch.src_lengths, batch.constraints)
    )
    sample = {"net_input": {"src_tokens": tokens, "src_lengths": lengths}}
    return run.task.inference_step(generator, run.models, sample, constraints=constraints)


def _typed(
    each: _Translated, formatter: LineFormatter, start: int, constrained: bool
) -> list[Sentence]:
    """Return sentences that were typed, and their translations, as plain numbers."""
    pad, batch = formatter.target_dictionary.pad(), each.batch
    sources: list[list[int]] = batch.src_tokens.tolist()
    return [
        Sentence(
            start + number,
            without(sources[i], pad),
            None,
            each.found[i],
            unpack_constraints(batch.constraints[i]) if constrained else [],
            each.seconds / len(each.found),
        )
        for i, number in enumerate(batch.ids.tolist())
    ]
