"""`fairseq-interactive` as a pipeline: what it prints, and when, is what fairseq prints.

The text of a batch is made in the background while the next one of its buffer is translated; from a file, the next
buffer is read and encoded meanwhile too.
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
from fastgen.patches.fairseq.commands.lines import Sentence, Speaker, Spoken, spoken
from fastgen.patches.fairseq.commands.options import given
from fastgen.patches.fairseq.commands.setup import Run, check_sampling, standard_output, without


def interactive(original: Callable[..., Any], cfg: Any) -> None:
    """`fairseq_cli.interactive.main`: the lines of a buffer are printed as soon as all of it is translated."""
    if isinstance(cfg, Namespace):
        cfg = convert_namespace_to_omegaconf(cfg)
    pair = Pair(cfg, "fairseq-interactive")
    with engine.running("fairseq-interactive"), standard_output("fairseq-interactive"):
        left_off = _interactive(cfg, pair)
    engine.hit("fairseq.interactive_command", left_off)


def _interactive(cfg: Any, pair: Pair) -> list[str]:
    """Translate what is typed; return what was left off."""
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
    speaker = run.speaker(generator, run.task.source_dictionary, interactive=True)
    if cfg.generation.constraints:
        logger.warning("NOTE: Constrained decoding currently assumes a shared subword vocabulary.")
    if cfg.interactive.buffer_size > 1:
        logger.info("Sentence buffer size: %s", cfg.interactive.buffer_size)
    logger.info("NOTE: hypothesis and token scores are output in base 2")
    logger.info("Type the input sentence and press return:")
    start = 0
    said: list[tuple[int, str]] = []  # what is said of each sentence of a buffer

    def translate(batches: Iterable[Any]) -> Iterator[_Translated]:
        """In this process or one of its workers."""
        for batch in batches:
            began_batch = time.time()
            found = _translate(run, generator, batch)
            spoken_of = [spoken(hypotheses[: speaker.nbest]) for hypotheses in found]
            yield _Translated(batch, spoken_of, time.time() - began_batch)

    with (
        pair.drafting(generator) as drafting,
        _by_workers(run, generator, translate) as (translated, left_off),
        InOrder(
            lambda sentences: _said(speaker, sentences), said.extend, given.postprocess_workers
        ) as background,
    ):
        for count, batches in _buffers(run):
            waiting = time.time()
            for each in translated(batches):
                translating += time.time() - waiting
                background.hand_in(_typed(each, speaker, start, cfg.generation.constraints))
                waiting = time.time()
            background.finish()
            print("".join(text for _, text in sorted(said)), end="", flush=True)
            said.clear()
            start += count
    if drafting is not None:
        logger.info(drafting)
    logger.info(
        f"Total time: {time.time() - began:.3f} seconds; translation time: {translating:.3f}"
    )
    return left_off


class _Translated(NamedTuple):
    """A batch, the hypotheses of each of its sentences as numbers, and the time that they took."""

    batch: Any
    found: list[list[Spoken]]
    seconds: float


@contextmanager
def _by_workers(
    run: Run, generator: Any, translate: Callable[[Iterable[Any]], Iterator[_Translated]]
) -> Iterator[tuple[Callable[[list[Any]], Iterator[_Translated]], list[str]]]:
    """What translates the batches of a buffer, by as many processes as are asked for or faster; and what is left off.

    Raises:
        SystemExit: several processes are asked for, and not possible.
    """
    most = run.cfg.interactive.buffer_size // (
        run.cfg.dataset.batch_size or 1
    )  # whole batches of a buffer
    number = workers.chosen(
        "fairseq-interactive", given.generate_workers, most, run.task, generator, run.models
    )  # fmt: skip
    if isinstance(number, str) or number == 1:
        yield translate, [] if number == 1 else [f"one process translates: {number}"]
        return
    least = number * (workers.BATCHES if given.generate_workers is None else 1)
    with workers.Workers(translate, number) as several:
        yield (
            lambda batches: (
                translate(batches) if len(batches) < least else several.results(batches, more=True)
            ),
            [],
        )


def _buffers(run: Run) -> Iterator[tuple[int, list[Any]]]:
    """The lines of each buffer, how many and as batches; from a file a buffer ahead.

    What is typed, or comes through a pipe, is read when it is wanted: a thread that waits for a line could not be ended
    by Ctrl-C.
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


def _said(speaker: Speaker, sentences: list[Sentence]) -> list[tuple[int, str]]:
    return [(sentence.number, speaker.batch([sentence])[0]) for sentence in sentences]


def _translate(run: Run, generator: Any, batch: Any) -> list[Any]:
    tokens, lengths, constraints = (
        part.cuda() if run.cuda and isinstance(part, Tensor) else part
        for part in (batch.src_tokens, batch.src_lengths, batch.constraints)
    )
    sample = {"net_input": {"src_tokens": tokens, "src_lengths": lengths}}
    return run.task.inference_step(generator, run.models, sample, constraints=constraints)


def _typed(each: _Translated, speaker: Speaker, start: int, constrained: bool) -> list[Sentence]:
    """Typed sentences and their translations as plain numbers."""
    pad, batch = speaker.target_dictionary.pad(), each.batch
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
