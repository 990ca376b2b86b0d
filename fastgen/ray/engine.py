"""`fastgen generate --engine ray`: files in, a folder of files out, generated on a Ray cluster.

This process reads and numbers the rows and passes them to Ray Data, whose actors generate. The
outputs come back in the order of the input. This process checks that every row is there exactly
once, and writes them; so a block that is generated again after a machine was lost is still written
once. Only the actors request processors from Ray: another stage that did would wait forever if the
actors hold them all.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fastgen
from fastgen.corpus import models
from fastgen.corpus.texts import NO_TEXT, Options
from fastgen.errors import CommandError
from fastgen.ray.cluster import Connection, connect
from fastgen.ray.folder import Folder
from fastgen.ray.generator import COLUMNS, Generator, OnError, check_columns, check_on_error
from fastgen.ray.tables import Tables

if TYPE_CHECKING:
    import pyarrow as pa

_REPORT = "_fastgen_report"  # column with counts of `status()`, set in one row of each block
_EXAMPLES = 10


@dataclass
class Summary:
    """Summary of a run; `_summary.json` in its folder holds the same.

    Attributes:
        input: path or URI of the input.
        output: path or URI of the output folder.
        options: the options that were used; folders are absolute.
        rows: rows of the input, including those that `on_error="skip"` left out.
        problems: rows without an output.
        blank: blank lines, whose outputs are blank too.
        tokens: generated tokens.
        seconds: duration of the run.
        parts: names of the output files.
        examples: row number and problem of the first few problems.
        at_limit: outputs that reached their length limit, by the source of that limit.
        hits: calls that ran fastgen's code on all machines, by patch.
        fallbacks: calls that ran the toolkit's own code on all machines, by patch and reason.
        fastgen: version of fastgen.
    """

    input: str
    output: str
    options: dict[str, Any]
    rows: int = 0
    problems: int = 0
    blank: int = 0
    tokens: int = 0
    seconds: float = 0.0
    parts: list[str] = field(default_factory=list)
    examples: list[tuple[int, str]] = field(default_factory=list)
    at_limit: dict[str, int] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)
    fastgen: str = fastgen.__version__


def run(
    options: Options,
    *,
    input: str,  # noqa: A002
    output: str,
    address: str | None = None,
    column: str = "text",
    target_column: str | None = None,
    on_error: OnError = "fail",
    input_format: str | None = None,
    output_format: str | None = None,
    workers: tuple[int, int] = (1, 1),
    cpus: float = 1.0,
    gpus: float = 0.0,
    rows: int = 256,
    rows_per_file: int = 50_000,
) -> Summary:
    """Generate from every text of some files.

    Args:
        options: the model, whose folder every machine of the cluster must see at the same path, and
            the options of generation.
        input: a file, or a folder of files of one format, read in the order of their names: a path,
            or a URI of a filesystem that pyarrow knows. Parquet, JSON lines, CSV, or lines of text.
            All rows are kept in Ray's object store, which spills to disk what does not fit in
            memory.
        output: a folder that does not exist or is empty; see `Folder`. Its rows are those of the
            input in their order, with the columns ``number`` (int64, the row's number in the input,
            from 1) and those of `Generator`.
        address: of the cluster, as `ray.init` takes it. None: that of RAY_ADDRESS, or a new cluster
            on this machine alone, which ends with the run. If Ray is initialized in this process
            already, that cluster is used.
        column: column of the texts; lines of text have "text" alone.
        target_column: column of the names of each output's first token; see `Generator`.
        on_error: what to do with a text that cannot be generated; see `Generator`.
        input_format: "parquet", "jsonl", "csv" or "txt"; None: by the names of the files.
        output_format: likewise; None: the format of the input.
        workers: least and most number of actors, each with a model.
        cpus: processors of each actor.
        gpus: GPUs of each actor; may be a fraction.
        rows: texts that an actor gets at a time, and that are generated again if a machine is lost.
        rows_per_file: rows of an output file; a file ends with the batch that reaches this number.

    Raises:
        CommandError: an error that the user has to correct. Nothing is left at `output` then.
        ValueError: a size is not positive, or `on_error` is unknown.
    """
    models.need("ray", "pyarrow")
    check_on_error(on_error)
    least, most = workers
    for name, value in (("workers", least), ("rows", rows), ("rows_per_file", rows_per_file)):
        if value < 1:
            raise ValueError(f"{name} = {value} must be at least 1")
    if most < least:
        raise ValueError(f"workers = {workers}: the most are fewer than the least")
    options = _with_folders(options)
    tables = Tables(input, input_format)
    begin = time.perf_counter()
    summary = Summary(input, output, _recorded(options))
    with (
        _discarded_on_error(Folder(output, output_format or tables.kind)) as folder,
        _cluster(address) as cluster,
    ):
        from ray.data import ActorPoolStrategy, from_arrow_refs

        cluster.check(least, cpus, gpus)
        needed = [column] if target_column is None else [column, target_column]
        blocks = _blocks(tables, folder, needed, rows, options)
        if blocks:  # Ray cannot make a dataset of no blocks
            columns = {"column": column, "target_column": target_column}
            dataset = from_arrow_refs(blocks).map_batches(
                _Reporting, fn_constructor_kwargs={**_arguments(options), **columns},
                batch_size=rows, batch_format="pyarrow",
                compute=ActorPoolStrategy(min_size=least, max_size=most), num_cpus=cpus,
                num_gpus=gpus or None,
            )  # fmt: skip
            pending: list[pa.Table] = []
            for table in dataset.iter_batches(batch_size=rows, batch_format="pyarrow"):
                pending.append(
                    _counted(table, summary, on_error, tables.kind == "txt", folder.kind == "txt")
                )
                if sum(map(len, pending)) >= rows_per_file:
                    folder.write(_joined(pending))
                    pending = []
            if pending:
                folder.write(_joined(pending))
        summary.parts, summary.seconds = folder.parts, time.perf_counter() - begin
        folder.finish(asdict(summary))
    return summary


def _with_folders(options: Options) -> Options:
    """Return the options with models named as processes on other machines find them."""
    named = {name: model for name in ("model", "assistant") if (model := getattr(options, name))}
    return replace(options, **{name: models.shared_name(model) for name, model in named.items()})


def _recorded(options: Options) -> dict[str, Any]:
    """Return the options as JSON-ready data."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in _arguments(options).items()
    }


def _blocks(
    tables: Tables, folder: Folder, needed: list[str], rows: int, options: Options
) -> list[Any]:
    """Put the input into Ray's object store, with row numbers and one schema for all blocks.

    Raises:
        CommandError: the input cannot be read, a column has no common type, or the output format
            cannot hold the columns.
    """
    import pyarrow as pa
    import ray

    blocks, schemas, first = list[Any](), list[pa.Schema](), 1
    for table in tables.read(rows):
        # The fields of JSON lines are known only once all rows are read.
        _check_columns(
            tables.place, [*table.column_names, *(needed if tables.kind == "jsonl" else [])], needed
        )
        table = table.add_column(
            0, "number", pa.array(range(first, first + len(table)), pa.int64())
        )
        first += len(table)
        schemas.append(table.schema)
        blocks.append(ray.put(table))
    if not blocks:
        return []
    try:
        schema = pa.unify_schemas(schemas, promote_options="permissive")
        folder.check(
            schema, options.scores, (options.generation.get("num_return_sequences") or 1) > 1
        )
        for place, own in enumerate(schemas):
            if own != schema:
                parts = [schema.empty_table(), ray.get(blocks[place])]
                blocks[place] = ray.put(pa.concat_tables(parts, promote_options="permissive"))
    except pa.ArrowException as error:
        raise CommandError(f"{tables.place}: {models.first_line(error)}") from error
    _check_columns(tables.place, schema.names[1:], needed)
    return blocks


def _check_columns(place: str, names: list[str], needed: list[str]) -> None:
    try:
        check_columns(names, needed, ("number", *COLUMNS))
    except ValueError as error:
        raise CommandError(f"{place}: {error}") from error


class _Reporting(Generator):
    """Generator that reports, in one row of each batch, what fastgen's patches counted meanwhile.

    Random draws for a batch depend on the seed and its first row's number, not on the actor or on
    earlier batches.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.before: Counter[tuple[str, str]] = Counter()

    def __call__(self, batch: pa.Table) -> pa.Table:
        import pyarrow as pa
        import torch

        torch.manual_seed(self.generator.options.seed + batch["number"][0].as_py())
        outputs, now = super().__call__(batch), _counts()
        now["at_limit", self.generator.limit.origin] = self.at_limit
        report = [[what, which, count] for (what, which), count in (now - self.before).items()]
        self.before = now
        rows = [json.dumps(report), *[None] * (len(outputs) - 1)][: len(outputs)]
        return outputs.append_column(_REPORT, pa.array(rows, pa.string()))


def _counts() -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    for row in fastgen.status().to_dict()["rows"]:
        counts["hits", row["name"]] = row["hits"]
        for why, count in row["fallbacks"].items():
            counts["fallbacks", f"{row['name']}: {why}"] = count
    return counts


def _counted(
    table: pa.Table, summary: Summary, on_error: OnError, of_lines: bool, to_lines: bool
) -> pa.Table:
    """Check a block's rows, add them to the summary, and apply `on_error`.

    Args:
        table: the block.
        summary: extended.
        on_error: see `Generator`.
        of_lines: whether the rows come from lines of text, which may be blank.
        to_lines: whether they are written as lines of text, none of which may be missing.

    Returns:
        The rows to write.

    Raises:
        CommandError: a row has a problem, and on_error="fail".
        RuntimeError: the rows are not the next ones.
    """
    import pyarrow as pa

    numbers = table["number"].to_pylist()
    first = summary.rows + 1
    if numbers != list(range(first, first + len(numbers))):
        raise RuntimeError(
            f"rows {first} to {first + len(numbers) - 1} were to come, not {numbers}"
        )
    problems: list[str | None] = table["problem"].to_pylist()
    if of_lines and NO_TEXT in problems:
        summary.blank += problems.count(NO_TEXT)
        problems = [None if problem == NO_TEXT else problem for problem in problems]
        place = table.column_names.index("problem")
        table = table.set_column(place, "problem", pa.array(problems, pa.string()))
    for number, problem in zip(numbers, problems, strict=True):
        if problem is None:
            continue
        if on_error == "fail":
            raise CommandError(f"row {number}: {problem}")
        summary.problems += 1
        if len(summary.examples) < _EXAMPLES:
            summary.examples.append((number, problem))
    for report in filter(None, table[_REPORT].to_pylist()):
        for what, which, count in json.loads(report):
            counts: dict[str, int] = getattr(summary, what)
            counts[which] = counts.get(which, 0) + count
    summary.rows += len(numbers)
    summary.tokens += sum(table["tokens"].to_pylist())
    if on_error == "skip" and not to_lines:
        table = table.filter(pa.array([problem is None for problem in problems]))
    return table.drop_columns([_REPORT])


def _joined(tables: list[pa.Table]) -> pa.Table:
    import pyarrow as pa

    return pa.concat_tables(tables, promote_options="default")


def _arguments(options: Options) -> dict[str, Any]:
    return {each.name: getattr(options, each.name) for each in fields(options)}


@contextmanager
def _cluster(address: str | None) -> Iterator[Connection]:
    """Connect to Ray, with datasets in order; disconnect at the end if the connection is ours."""
    connection = connect(address)
    from ray.data import DataContext

    context = DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    try:
        with DataContext.current(context):
            yield connection
    finally:
        connection.close()


@contextmanager
def _discarded_on_error(folder: Folder) -> Iterator[Folder]:
    """Remove the scratch folder if the block fails; re-raise Ray's errors as CommandError."""
    from ray.exceptions import RayError

    try:
        yield folder
    except BaseException as error:
        folder.discard()
        if not isinstance(error, RayError):
            raise
        raise CommandError(_reason(error)) from error


def _reason(error: BaseException) -> str:
    """Return the last line of Ray's error message: the error itself, without frames."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
