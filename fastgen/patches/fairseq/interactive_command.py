"""`fairseq-interactive`: what it prints is what fairseq prints, made in one piece for each buffer of lines."""

import logging
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from fairseq import utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.token_generation_constraints import unpack_constraints
from fairseq_cli.interactive import buffered_read, make_batches
from torch import Tensor

from fastgen.patches import _engine
from fastgen.patches.fairseq.lines import Sentence, Speaker, spoken
from fastgen.patches.fairseq.setup import Run, check_sampling, without


def interactive(original: Callable[..., Any], cfg: Any) -> None:
    """`fairseq_cli.interactive.main`: the lines of a buffer are printed as soon as all of it is translated."""
    if isinstance(cfg, Namespace):
        cfg = convert_namespace_to_omegaconf(cfg)
    with _engine.running("fairseq-interactive"):
        _interactive(cfg)
    _engine.hit("fairseq.interactive_command")


def _interactive(cfg: Any) -> None:
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
    run = Run(cfg, logger)
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
    for lines in buffered_read(cfg.interactive.input, cfg.interactive.buffer_size):
        sentences: list[Sentence] = []
        for batch in make_batches(lines, cfg, run.task, run.max_positions(), run.encode):
            began_batch = time.time()
            found = _translate(run, generator, batch)
            seconds = time.time() - began_batch
            translating += seconds
            sentences += _typed(batch, found, speaker, start, seconds / len(found), cfg.generation.constraints)
        text, _ = speaker.batch(sorted(sentences, key=lambda sentence: sentence.number))
        sys.stdout.write(text)
        sys.stdout.flush()
        start += len(lines)
    logger.info(f"Total time: {time.time() - began:.3f} seconds; translation time: {translating:.3f}")


def _translate(run: Run, generator: Any, batch: Any) -> list[Any]:
    tokens, lengths, constraints = (
        part.cuda() if run.cuda and isinstance(part, Tensor) else part
        for part in (batch.src_tokens, batch.src_lengths, batch.constraints)
    )
    sample = {"net_input": {"src_tokens": tokens, "src_lengths": lengths}}
    return run.task.inference_step(generator, run.models, sample, constraints=constraints)


def _typed(
    batch: Any, found: list[Any], speaker: Speaker, start: int, seconds: float, constrained: bool
) -> list[Sentence]:
    """Typed sentences and their translations as plain numbers."""
    pad = speaker.target_dictionary.pad()
    sources: list[list[int]] = batch.src_tokens.tolist()
    return [
        Sentence(
            start + number,
            without(sources[i], pad),
            None,
            spoken(found[i][: speaker.nbest]),
            unpack_constraints(batch.constraints[i]) if constrained else [],
            seconds,
        )
        for i, number in enumerate(batch.ids.tolist())
    ]
