"""`fastgen generate --engine ray`: files in, generated on all machines of a Ray cluster, a folder of files out.

This process reads and numbers the rows and hands them to Ray Data, whose actors generate. Their outputs come back in
the order of the input, are checked to be every row once, and are written here: a block that is generated a second
time, because a machine was lost, is still written once. No stage but the actors asks Ray for processors: one that
did would wait for ever where the actors have them all.
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

_REPORT = "_fastgen_report"  # a column of what `status()` counted, in one row of each block
_EXAMPLES = 10


@dataclass
class Summary:
    """What a run did; `_summary.json` in its folder holds the same.

    Attributes:
        options: as they were used; folders are absolute.
        rows: of the input; those that `on_error="skip"` left out are counted.
        problems: rows without an output. blank: blank lines, whose outputs are such too.
        at_limit: outputs that ended because they may not be longer, by where that limit comes from.
        examples: number and problem of the first few.
        tokens: that were generated.
        hits, fallbacks: calls that ran fastgen's code, by patch, and the toolkit's own, by reason, on all machines.
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
    input: str,
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
        options: the model, whose folder every machine of the cluster must see at the same path, and what it is given.
        input: a file, or a folder of files of one format, in the order of their names: a path, or a URI of a filesystem
            that pyarrow knows. Parquet, JSON lines, CSV, or lines of text. All rows lie in Ray's object store, which
            keeps on disk what its memory cannot hold.
        output: a folder that is not there or empty; see `Folder`. Its rows are those of the input in their order, with
            the columns ``number`` (int64, the row's number in the input, from 1) and those of `Generator`.
        address: of the cluster, as `ray.init` takes it; None: that of RAY_ADDRESS, or a new one of this machine alone,
            which ends with the run. Where Ray is initialized in this process already, that one is used.
        column: of the texts; lines of text have "text" alone.
        target_column: of the names of what each output begins with; see `Generator`.
        on_error: what becomes of a text that cannot be generated; see `Generator`.
        input_format, output_format: "parquet", "jsonl", "csv" or "txt"; None: as the file is named, and as the input.
        workers: actors, each with a model: at least and at most so many.
        cpus, gpus: that each actor takes of its machine; parts of a GPU are possible.
        rows: texts that an actor is given at a time, and that are generated anew where a machine is lost.
        rows_per_file: of the output.

    Raises:
        CommandError: what the user has to put right. Nothing is left at `output` then.
        ValueError: sizes that are not positive, or no such `on_error`.
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
        if blocks:  # of none Ray makes no dataset
            columns = {"column": column, "target_column": target_column}
            made = from_arrow_refs(blocks).map_batches(
                _Reporting, fn_constructor_kwargs={**_arguments(options), **columns}, batch_size=rows,
                batch_format="pyarrow", compute=ActorPoolStrategy(min_size=least, max_size=most), num_cpus=cpus,
                num_gpus=gpus or None,
            )  # fmt: skip
            held: list[pa.Table] = []
            for table in made.iter_batches(batch_size=rows, batch_format="pyarrow"):
                held.append(
                    _counted(table, summary, on_error, tables.kind == "txt", folder.kind == "txt")
                )
                if sum(map(len, held)) >= rows_per_file:
                    folder.write(_joined(held))
                    held = []
            if held:
                folder.write(_joined(held))
        summary.parts, summary.seconds = folder.parts, time.perf_counter() - begin
        folder.finish(asdict(summary))
    return summary


def _with_folders(options: Options) -> Options:
    """The options with models as other processes find them."""
    named = {name: model for name in ("model", "assistant") if (model := getattr(options, name))}
    return replace(options, **{name: models.shared_name(model) for name, model in named.items()})


def _recorded(options: Options) -> dict[str, Any]:
    """The options as JSON has them."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in _arguments(options).items()
    }


def _blocks(
    tables: Tables, folder: Folder, needed: list[str], rows: int, options: Options
) -> list[Any]:
    """The input in Ray's object store, with a column of numbers; the types of its columns are the same everywhere.

    Raises:
        CommandError: it cannot be read, its columns have not one type each, or the output cannot hold them.
    """
    import pyarrow as pa
    import ray

    blocks, schemas, first = list[Any](), list[pa.Schema](), 1
    for table in tables.read(rows):
        # What fields JSON lines have is known when all are read.
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
    """Generates, and says in one row of each batch what fastgen's patches counted meanwhile.

    What is drawn for a batch depends on the seed and its first row's number, not on the actor or what it did before.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.before: Counter[tuple[str, str]] = Counter()

    def __call__(self, batch: pa.Table) -> pa.Table:
        import pyarrow as pa
        import torch

        torch.manual_seed(self.generator.options.seed + batch["number"][0].as_py())
        made, now = super().__call__(batch), _counts()
        now["at_limit", self.generator.limit.said] = self.at_limit
        report = [[what, which, count] for (what, which), count in (now - self.before).items()]
        self.before = now
        rows = [json.dumps(report), *[None] * (len(made) - 1)][: len(made)]
        return made.append_column(_REPORT, pa.array(rows, pa.string()))


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
    """The rows of a block, as `on_error` says; the summary counts them.

    of_lines: they come from lines of text, which may be blank. to_lines: they become such, and none may be missing.

    Raises:
        CommandError: a row has a problem, and on_error="fail".
        RuntimeError: they are not the rows that come next.
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
    """Ray, with its datasets in order; one that was not running in this process ends with the block."""
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
    """Remove the scratch folder where the block fails; what Ray raises becomes a CommandError."""
    from ray.exceptions import RayError

    try:
        yield folder
    except BaseException as error:
        folder.discard()
        if not isinstance(error, RayError):
            raise
        raise CommandError(_reason(error)) from error


def _reason(error: BaseException) -> str:
    """What went wrong on a machine, without Ray's frames."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
