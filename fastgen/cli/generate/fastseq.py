"""What FastSeq's command for transformers models calls otherwise, and the tasks that a model's config names.

Source: Yan et al. 2021 (FastSeq), its `fastseq-generate-for-transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastgen.errors import CommandError

_THREADS = "reading, tokenizing and writing run beside the model by themselves"
DROPPED = {
    "bs": "batches are of like lengths and sized in tokens, --batch-tokens",
    "input-path": "--input", "save-path": "--output", "model-name": "the model's folder is the first argument",
    "without-fastseq-opt": "FASTGEN=0 in the environment runs transformers' own code",
    "preprocess-workers": _THREADS, "postprocess-workers": _THREADS,
    "return-tensors": "tensors are torch's", "padding": "a batch is padded to its longest source",
    "dola-layers": "transformers has taken it out of generate", "constraints": "--force-words-ids",
}  # fmt: skip
"""Options that are none here, and what stands in their place."""


@dataclass(frozen=True)
class Task:
    """What a model's config says of a task: text before each source, and arguments of `generate`."""

    prefix: str = ""
    generation: dict[str, Any] = field(default_factory=dict[str, Any])


def task(folder: Path, config: Mapping[str, Any], name: str | None, known: Set[str]) -> Task:
    """The task of a name, from `task_specific_params`; an empty one where none is named.

    Args:
        known: arguments of `generate`; other parameters are for the training, and are left.
    Raises:
        CommandError: the config has no such task; the message says which it has.
    """
    if name is None:
        return Task()
    tasks = config.get("task_specific_params") or {}
    if name not in tasks:
        raise CommandError(
            f"--task {name}: the config of {folder} has {', '.join(tasks) or 'no tasks'}"
        )
    said = tasks[name]
    return Task(
        said.get("prefix") or "", {key: value for key, value in said.items() if key in known}
    )
