"""Setup shared by `fairseq-generate` and `fairseq-interactive`."""

import ast
import errno
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import numpy as np
import torch
from fairseq import checkpoint_utils, tasks, utils
from fairseq_cli.generate import get_symbols_to_strip_from_output

from fastgen.patches.fairseq.bild.bild_command import Pair
from fastgen.patches.fairseq.commands.lines import LineFormatter
from fastgen.patches.fairseq.commands.options import command_line


class Run:
    """Setup of both commands: task, models, tokenization and detokenization.

    Args:
        cfg: fairseq's configuration.
        logger: The command's logger.
        pair: The options of big-little decoding.
    """

    def __init__(self, cfg: Any, logger: logging.Logger, pair: Pair) -> None:
        self.cfg, self.pair = cfg, pair
        logger.info(cfg)
        if cfg.common.seed is not None and not cfg.generation.no_seed_provided:
            np.random.seed(cfg.common.seed)
            utils.set_torch_seed(cfg.common.seed)
        self.cuda = torch.cuda.is_available() and not cfg.common.cpu
        self.task: Any = tasks.setup_task(cfg.task)
        logger.info(f"loading model(s) from {cfg.common_eval.path}")
        self.overrides = ast.literal_eval(cfg.common_eval.model_overrides)
        self.saved: Any
        self.models, self.saved = checkpoint_utils.load_model_ensemble(
            utils.split_paths(cfg.common_eval.path),
            arg_overrides=self.overrides,
            task=self.task,
            suffix=cfg.checkpoint.checkpoint_suffix,
            strict=cfg.checkpoint.checkpoint_shard_count == 1,
            num_shards=cfg.checkpoint.checkpoint_shard_count,
        )
        pair.load(self.task, logger)

    def prepare(self, models: list[Any]) -> None:
        """Apply half precision, device and fairseq's preparations, also to the small model."""
        for model in (*models, *self.pair.small):
            if self.cfg.common.fp16:
                model.half()
            if self.cuda and not self.cfg.distributed_training.pipeline_model_parallel:
                model.cuda()
            model.prepare_for_inference_(self.cfg)

    def max_positions(self) -> Any:
        models = (*self.models, *self.pair.small)
        return utils.resolve_max_positions(
            self.task.max_positions(), *[model.max_positions() for model in models]
        )

    def formatter(self, generator: Any, source_dictionary: Any, interactive: bool) -> LineFormatter:
        cfg = self.cfg
        self.tokenizer, self.bpe = (
            self.task.build_tokenizer(cfg.tokenizer),
            self.task.build_bpe(cfg.bpe),
        )
        alignment = cfg.generation.print_alignment
        return LineFormatter(
            source_dictionary=source_dictionary,
            target_dictionary=self.task.target_dictionary,
            ignored=get_symbols_to_strip_from_output(generator),
            decode=self.decode,
            post_process=cfg.common_eval.post_process,
            nbest=cfg.generation.nbest,
            quiet=cfg.common_eval.quiet and not interactive,
            decode_hypothesis=command_line.decode_hypothesis,
            align=utils.load_align_dict(cfg.generation.replace_unk),
            print_alignment="hard" if alignment and interactive else alignment,
            interactive=interactive,
        )

    def encode(self, text: str) -> str:
        if self.tokenizer is not None:
            text = self.tokenizer.encode(text)
        return text if self.bpe is None else self.bpe.encode(text)

    def decode(self, text: str) -> str:
        if self.bpe is not None:
            text = self.bpe.decode(text)
        return text if self.tokenizer is None else self.tokenizer.decode(text)


def check_sampling(cfg: Any) -> None:
    """Raise what fairseq's commands raise where sampling and `--nbest` do not fit."""
    assert not cfg.generation.sampling or cfg.generation.nbest == cfg.generation.beam, (
        "--sampling requires --nbest to be equal to --beam"
    )


@contextmanager
def standard_output(command: str) -> Iterator[TextIO | None]:
    """Yield standard output, or None if there is none; flush it when the context ends.

    Raises:
        SystemExit: Standard output was closed, or the disk is full; the message says so.
    """
    try:
        yield sys.stdout
        print(end="", flush=True)
    except OSError as error:
        # An error with a file name is that of another file.
        if error.errno not in (errno.EPIPE, errno.ENOSPC) or error.filename is not None:
            raise
        # Otherwise Python would report the error again when it closes standard output on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(f"{command}: the output is not whole: {error.strerror}") from error


def without(tokens: list[int], pad: int) -> list[int]:
    """Return the tokens without padding."""
    return [token for token in tokens if token != pad]
