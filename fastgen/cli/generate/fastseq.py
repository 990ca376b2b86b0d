"""Options of FastSeq's command for transformers models, and the tasks in a model's config.

Source: Yan et al. 2021 (FastSeq), its `fastseq-generate-for-transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastgen.errors import CommandError

_THREADS = "reading, tokenizing and writing always run in the background"
DROPPED = {
    "bs": "batches are sorted by length and sized in tokens: --batch-tokens",
    "input-path": "--input", "save-path": "--output",
    "model-name": "the model's folder is the first argument",
    "without-fastseq-opt": "FASTGEN=0 in the environment runs transformers' own code",
    "preprocess-workers": _THREADS, "postprocess-workers": _THREADS,
    "return-tensors": "tensors are always torch's",
    "padding": "a batch is padded to its longest source",
    "dola-layers": "transformers has removed it from generate",
    "constraints": "--force-words-ids",
}  # fmt: skip
"""FastSeq's and `generate`'s options that this command does not have, with the hint to print."""


@dataclass(frozen=True)
class Task:
    """A task in a model's config.

    Attributes:
        prefix: text before each source.
        generation: arguments of `generate`.
    """

    prefix: str = ""
    generation: dict[str, Any] = field(default_factory=dict[str, Any])


def task(folder: Path, config: Mapping[str, Any], name: str | None, known: Set[str]) -> Task:
    """Return a task from `task_specific_params`, or an empty one if `name` is None.

    Args:
        folder: of the model, for messages.
        config: the model's config.
        name: name of the task.
        known: arguments of `generate`. Other parameters of the task are for training and are
            ignored.

    Raises:
        CommandError: the config has no such task; the message lists the ones that it has.
    """
    if name is None:
        return Task()
    tasks = config.get("task_specific_params") or {}
    if name not in tasks:
        raise CommandError(
            f"--task {name}: the config of {folder} has {', '.join(tasks) or 'no tasks'}"
        )
    parameters = tasks[name]
    return Task(
        parameters.get("prefix") or "",
        {key: value for key, value in parameters.items() if key in known},
    )
