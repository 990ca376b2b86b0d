"""Big-little decoding on fairseq's command lines: the `--bild-*` options and the small model."""

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils, tasks, utils
from fairseq.dataclass.configs import GenerationConfig
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from fastgen.decoding.speculative import bild_options
from fastgen.decoding.speculative.bild_options import Options
from fastgen.patches.fairseq.bild import bild
from fastgen.patches.fairseq.commands.options import command_line

_IN_THE_WAY = (
    "lm_path", "sampling", "diverse_beam_groups", "diversity_rate", "constraints",
    "match_source_len", "prefix_size", "print_alignment", "score_reference", "print_step",
    "retain_iter_history", "retain_dropout",
)  # fmt: skip
"""Options of fairseq that exclude big-little decoding."""


class Pair:
    """The `--bild-*` options of a command line, and the small model once it is loaded.

    Args:
        cfg: fairseq's configuration.
        command: Name of the command, with which messages start.

    Attributes:
        options: The options; None if big-little decoding is not requested.
        small: The small model in a list; empty if there is none.

    Raises:
        SystemExit: The options are invalid; nothing has been loaded yet.
    """

    def __init__(self, cfg: Any, command: str) -> None:
        self.command, self.small = command, list[Any]()
        options = {
            name: value
            for name in bild_options.NAMES
            if (value := getattr(command_line, _field(name), None)) is not None
        }
        self.options: Options | None = None
        small, early_exit = command_line.bild_small, command_line.bild_early_exit
        if options or small is not None or early_exit is not None:
            try:
                smalls = "--bild-small", "--bild-early-exit"
                self.options = bild_options.options(
                    small,
                    early_exit,
                    options,
                    {},
                    smalls,
                    lambda name: _flag(_field(name)),
                )
                _check(cfg)
            except ValueError as error:
                raise self._exit(error) from error

    def load(self, task: Any, logger: logging.Logger) -> None:
        """Load the small model, if there is one.

        Args:
            task: The large model's task.
            logger: The command's logger.

        Raises:
            SystemExit: The checkpoint cannot be read.
        """
        small = command_line.bild_small
        if self.options is None or small is None:
            return
        logger.info(f"loading small model from {small}")
        try:
            model = _load(small, task, logger)
        except Exception as error:  # an arbitrary file may cause any exception
            raise self._exit(f"--bild-small {small} cannot be read: {error}") from error
        self.small, self.options = [model], replace(self.options, small=model)

    def drafting(self, generator: Any) -> AbstractContextManager[bild.BildSession | None]:
        """Return the context in which a generator runs big-little decoding, if requested.

        Raises:
            SystemExit: The generator cannot decode this way.
        """
        if self.options is None:
            return nullcontext()
        try:
            bild.check(generator, self.options)
        except ValueError as error:
            raise self._exit(error) from error
        return bild.drafting(self.options)

    def _exit(self, why: object) -> SystemExit:
        return SystemExit(f"{self.command}: {why}")


def _field(name: str) -> str:
    """Return the attribute of the command line's options for one of `bild_options.NAMES`."""
    return f"bild_{name.removesuffix('_threshold')}"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check(cfg: Any) -> None:
    """Raise ValueError if fairseq's own options exclude big-little decoding."""
    if cfg.generation.beam != 1:
        raise ValueError(bild_options.one_text("--beam", cfg.generation.beam))
    if len(paths := utils.split_paths(cfg.common_eval.path or "")) > 1:
        raise ValueError(
            f"big-little decoding is of one large model, and --path names {len(paths)}"
        )
    for name in _IN_THE_WAY:
        value, usual = (
            getattr(cfg.generation, name),
            GenerationConfig.__dataclass_fields__[name].default,
        )
        if value != usual:
            raise ValueError(
                f"big-little decoding is not possible with {_flag(name)} (it is {value})"
            )


def _load(path: str, task: Any, logger: logging.Logger) -> Any:
    """Load a model with the dictionaries that it was trained with.

    If they no longer exist, those of `task` are used, with a warning.
    """
    state: Any = checkpoint_utils.load_checkpoint_to_cpu(path)
    cfg = (
        state["cfg"]
        if state.get("cfg") is not None
        else convert_namespace_to_omegaconf(state["args"])
    )
    trained_on = getattr(cfg.task, "data", None)
    directories = [*utils.split_paths(trained_on or "")[:1], str(Path(path).parent)]
    directory = next((each for each in directories if any(Path(each).glob("dict.*.txt"))), None)
    if directory is None:
        logger.warning(
            f"{path}: its dictionary is not at {trained_on} any more, and taken to be the large "
            "model's"
        )
        models, *_ = checkpoint_utils.load_model_ensemble_and_task([path], task=task, state=state)
        return models[0]
    cfg.task.data = directory
    # fairseq would guess missing languages from text files.
    for name in ("source_lang", "target_lang"):
        if hasattr(cfg.task, name) and getattr(cfg.task, name) is None:
            setattr(cfg.task, name, getattr(task.cfg, name, None))
    models, *_ = checkpoint_utils.load_model_ensemble_and_task(
        [path], task=tasks.setup_task(cfg.task), state=state
    )
    return models[0]
