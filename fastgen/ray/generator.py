"""Stage of a Ray dataset: a column of texts in, their outputs in columns beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from fastgen.corpus.texts import Options, Output, Problem, TextGenerator
from fastgen.errors import CommandError

OnError = Literal["fail", "skip", "empty"]
COLUMNS = ("output", "outputs", "tokens", "problem", "scores")


class Generator:
    """Model in an actor of ``ray.data.Dataset.map_batches``.

        dataset.map_batches(
            Generator, fn_constructor_kwargs={"model": "FOLDER", "generation": {"num_beams": 4}},
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=8), num_gpus=0.5,
            batch_size=256,
        )

    A batch is a dict of numpy arrays, a pyarrow table or a pandas frame. The result is of the same
    kind and has the same rows in the same order, with the columns ``output`` (the best text),
    ``outputs`` (all texts, the best first), ``tokens`` (int64, number of generated tokens),
    ``problem`` (why there is no output, else null) and, with the option `scores`, ``scores`` of all
    texts.

    Args:
        model: folder of the model and its tokenizer, as the actor's machine sees it, or their id on
            the hub.
        column: column of the texts. A null is an empty text.
        target_column: column of the names of each output's first token; the option `targets` says
            what kind of names.
        on_error: what to do with a text that cannot be generated: "fail" raises, "skip" leaves its
            row out, "empty" leaves its output empty.
        options: as in `fastgen.corpus.texts.Options`.

    Raises:
        CommandError: there is no such model, or it cannot be read. With on_error="fail", a text has
            a problem.
        ValueError: on_error is unknown, there is no such column, a column of the batch has the name
            of a column of the output, or only one of target_column and `targets` is set.
        TypeError: there is no such option, or the column holds no texts.
    """

    def __init__(
        self, model: str | Path, *, column: str = "text", target_column: str | None = None,
        on_error: OnError = "empty", **options: Any,
    ) -> None:  # fmt: skip
        check_on_error(on_error)
        targets = options.get("targets")
        if (target_column is None) != (targets is None):
            raise ValueError(
                f"target_column={target_column!r} and targets={targets!r}: they go together"
            )
        self.columns = (column,) if target_column is None else (column, target_column)
        self.on_error = on_error
        self.at_limit = 0  # outputs that reached their length limit
        self.generator = TextGenerator(Options(Path(model), **options))

    def __call__(self, batch: Any) -> Any:
        """Return the batch with the columns of its outputs."""
        names = [str(name) for name in (batch.column_names if _is_table(batch) else batch)]
        check_columns(names, self.columns)
        outputs = self.generator(*(self._texts(name, batch[name]) for name in self.columns))
        self.at_limit += sum(isinstance(one, Output) and one.at_limit for one in outputs)
        problems = [one for one in outputs if isinstance(one, Problem)]
        if problems and self.on_error == "fail":
            raise CommandError(
                f"{len(problems)} of {len(outputs)} texts have no output, "
                f"the first: {problems[0].reason}"
            )
        if problems and self.on_error == "skip":
            kept = np.array([not isinstance(one, Problem) for one in outputs])
            batch, outputs = (
                _rows(batch, kept),
                [one for one in outputs if not isinstance(one, Problem)],
            )
        return _with(batch, outputs, self.generator.options.scores)

    def _texts(self, column: str, values: Any) -> list[str]:
        texts: list[Any] = values.to_pylist() if hasattr(values, "to_pylist") else list(values)
        for text in texts:
            # pandas' nulls are not equal to themselves.
            if text is not None and not isinstance(text, str) and text == text:
                raise TypeError(
                    f"column {column!r} holds {text!r}, a {type(text).__name__}, not text"
                )
        return [text if isinstance(text, str) else "" for text in texts]


def check_on_error(on_error: str) -> None:
    """Raise ValueError if `on_error` is unknown."""
    if on_error not in get_args(OnError):
        raise ValueError(
            f"on_error={on_error!r} must be one of {', '.join(map(repr, get_args(OnError)))}"
        )


def check_columns(
    names: Sequence[str], needed: Sequence[str], taken: Sequence[str] = COLUMNS
) -> None:
    """Raise ValueError if a batch lacks a column or has one that would be overwritten.

    Args:
        names: columns of the batch.
        needed: columns that it must have.
        taken: columns that are added.
    """
    for column in needed:
        if column not in names:
            raise ValueError(
                f"there is no column {column!r}, but {', '.join(map(repr, names)) or 'none'}"
            )
    if clashing := [name for name in taken if name in names]:
        raise ValueError(f"a column is named {clashing[0]!r}, as one of the output's is: rename it")


def _is_table(batch: Any) -> bool:
    return hasattr(batch, "append_column")


def _rows(batch: Any, kept: Any) -> Any:
    """Return some rows of a batch.

    Args:
        batch: N rows.
        kept: (N,) bool.
    """
    if isinstance(batch, Mapping):
        return {name: values[kept] for name, values in batch.items()}
    return batch.filter(kept) if _is_table(batch) else batch[kept]


def _with(batch: Any, found: Sequence[Output | Problem], scores: bool) -> Any:
    """Return the batch with the columns of its outputs."""
    good = [one if isinstance(one, Output) else Output([], 0) for one in found]
    columns: dict[str, list[Any]] = {
        "output": [one.texts[0] if one.texts else "" for one in good],
        "outputs": [one.texts for one in good],
        "tokens": [one.tokens for one in good],
        "problem": [one.reason if isinstance(one, Problem) else None for one in found],
    }
    if scores:
        columns["scores"] = [one.scores or [] for one in good]
    if not _is_table(batch):
        arrays = {name: _array(values) for name, values in columns.items()}
        return {**batch, **arrays} if isinstance(batch, Mapping) else batch.assign(**arrays)
    import pyarrow as pa

    # Without explicit types, a batch with no problems, or no outputs, would get other types.
    types = {
        "output": pa.string(), "outputs": pa.list_(pa.string()), "tokens": pa.int64(),
        "problem": pa.string(), "scores": pa.list_(pa.float64()),
    }  # fmt: skip
    for name, values in columns.items():
        batch = batch.append_column(name, pa.array(values, types[name]))
    return batch


def _array(values: list[Any]) -> Any:
    """Return a one-dimensional array, whatever the values are; integers stay int64."""
    if values and all(isinstance(value, int) for value in values):
        return np.array(values, dtype=np.int64)
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array
