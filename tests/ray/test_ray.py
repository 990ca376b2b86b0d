"""Ray Data: batches of every kind, and runs on a cluster of two machines, one of which dies."""

import gzip
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # before ray is imported
pytest.importorskip("ray.data", reason="needs fastgen[ray]")
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import ray.data
from ray.cluster_utils import Cluster

from fastgen.cli import main
from fastgen.corpus.texts import Options, Output, TextGenerator
from fastgen.errors import CommandError
from fastgen.ray import Generator, engine
from fastgen.ray.cluster import Connection
from fastgen.ray.folder import Folder
from fastgen.ray.tables import Tables

MODEL = Path(__file__).parents[2] / "examples/en-es/model"
GENERATION = {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 16}
TEXTS = [line[:60] for line in (MODEL.parent / "test.en").read_text("utf-8").splitlines()[:96]]
ARGUMENTS: dict[str, Any] = {"model": MODEL, "generation": GENERATION, "dtype": "float64"}


@pytest.fixture(scope="module")
def outputs() -> list[Output]:
    found = TextGenerator(Options(**ARGUMENTS))(TEXTS)
    return [one for one in found if isinstance(one, Output)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    size: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100_000_000}
    found = Cluster(initialize_head=True, head_node_args=size | {"include_dashboard": False})
    ray.init(address=found.address, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    found.add_node(**size)
    yield found
    ray.shutdown()
    found.shutdown()


@pytest.fixture(scope="module")
def generator() -> Generator:
    return Generator(**ARGUMENTS)


def _columns(batch: Any) -> dict[str, list[Any]]:
    if isinstance(batch, pa.Table):
        return batch.to_pydict()
    return {name: [None if value is np.nan else value for value in batch[name]] for name in batch}


def _wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


KINDS = {
    "numpy": lambda columns: {name: np.array(values) for name, values in columns.items()},
    "pyarrow": pa.table,
    "pandas": pd.DataFrame,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_every_kind(kind: str, generator: Generator, outputs: list[Output]) -> None:
    batch = KINDS[kind]({"id": [5, 6, 7], "text": TEXTS[:3]})
    made = generator(batch)
    assert type(made) is type(batch)
    found = _columns(made)
    assert list(found) == ["id", "text", "output", "outputs", "tokens", "problem"]
    assert found["id"] == [5, 6, 7]
    assert found["output"] == [one.texts[0] for one in outputs[:3]]
    assert [list(texts) for texts in found["outputs"]] == [one.texts for one in outputs[:3]]
    assert found["tokens"] == [one.tokens for one in outputs[:3]]
    assert found["problem"] == [None] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_on_error(
    kind: str, generator: Generator, outputs: list[Output], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = KINDS[kind]({"text": [TEXTS[0], "", TEXTS[2]]})
    assert _columns(generator(batch))["output"] == [outputs[0].texts[0], "", outputs[2].texts[0]]
    assert _columns(generator(batch))["problem"] == [None, "there is no text", None]
    monkeypatch.setattr(generator, "on_error", "skip")
    assert _columns(generator(batch))["output"] == [outputs[0].texts[0], outputs[2].texts[0]]
    monkeypatch.setattr(generator, "on_error", "fail")
    with pytest.raises(
        CommandError, match="1 of 3 texts have no output, the first: there is no text"
    ):
        generator(batch)


def test_a_batch_that_has_no_texts(generator: Generator) -> None:
    assert _columns(generator(pa.table({"text": pa.array([None], pa.string())})))["problem"] == [
        "there is no text"
    ]
    assert len(generator(pa.table({"text": pa.array([], pa.string())}))) == 0
    with pytest.raises(ValueError, match="no column 'text', but 'line'"):
        generator({"line": np.array(["a"])})
    with pytest.raises(ValueError, match="named 'tokens'"):
        generator(pa.table({"text": ["a"], "tokens": [1]}))
    with pytest.raises(TypeError, match="holds 3, a int"):
        generator(pa.table({"text": [3]}))
    with pytest.raises(ValueError, match="on_error='ignore'"):
        Generator(MODEL, on_error="ignore")  # type: ignore[arg-type]


@pytest.mark.slow
def test_map_batches(cluster: Cluster, outputs: list[Output]) -> None:
    rows = [{"id": i, "text": "" if i == 20 else text} for i, text in enumerate(TEXTS[:24])]
    made = ray.data.from_items(rows).map_batches(
        Generator,
        fn_constructor_kwargs={**ARGUMENTS, "on_error": "empty"},
        compute=ray.data.ActorPoolStrategy(size=1),
        num_cpus=0.5,
        batch_size=7,
    )
    found = sorted(made.take_all(), key=lambda row: row["id"])
    assert [row["id"] for row in found] == list(range(24))
    assert [row["output"] for row in found] == [
        "" if i == 20 else outputs[i].texts[0] for i in range(24)
    ]
    assert [i for i in range(24) if found[i]["problem"]] == [20]


def test_blank_lines_are_no_problems() -> None:
    report = json.dumps([["at_limit", "--max-new-tokens 3", 1]])
    columns: dict[str, Any] = {
        "number": [1, 2],
        "problem": ["there is no text", None],
        "tokens": [0, 3],
    }
    table, summary = (
        pa.table({**columns, "_fastgen_report": [report, None]}),
        engine.Summary("", "", {}),
    )
    found = engine._counted(table, summary, "fail", of_lines=True, to_lines=False)
    assert found["problem"].to_pylist() == [None, None]
    assert (summary.rows, summary.blank, summary.problems) == (2, 1, 0)
    assert summary.at_limit == {"--max-new-tokens 3": 1}
    with pytest.raises(CommandError, match="row 1: there is no text"):
        engine._counted(table, engine.Summary("", "", {}), "fail", of_lines=False, to_lines=False)


@pytest.mark.slow
def test_formats_and_problems(cluster: Cluster, tmp_path: Path) -> None:
    first = ["ĠLa", "ĠEl"] * 4
    table = pa.table(
        {"id": list(range(8)), "source": [*TEXTS[:3], None, *TEXTS[4:8]], "first": first}
    )
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
    run: dict[str, Any] = {"input": str(tmp_path / "in.parquet"), "column": "source", "cpus": 0.5}
    best = ARGUMENTS | {"generation": GENERATION | {"num_return_sequences": 1}}
    scored = Options(**best, scores=True, targets="token")
    alone = [one for one in TextGenerator(scored)(TEXTS[:8], first) if isinstance(one, Output)]
    with pytest.raises(CommandError, match="row 4: there is no text"):
        engine.run(Options(**ARGUMENTS), output=str(tmp_path / "out"), **run)
    # There is neither an output nor a part of one.
    assert [file.name for file in tmp_path.iterdir()] == ["in.parquet"]
    with pytest.raises(
        CommandError, match="there is no column 'token', but 'id', 'source', 'first'"
    ):
        engine.run(scored, output=str(tmp_path / "out"), target_column="token", **run)
    run |= {"target_column": "first"}
    summary = engine.run(
        scored, output=str(tmp_path / "out"), on_error="skip", output_format="csv", **run
    )
    assert (summary.rows, summary.problems, summary.examples) == (8, 1, [(4, "there is no text")])
    found = pyarrow.csv.read_csv(tmp_path / "out" / summary.parts[0]).to_pydict()
    assert found["id"] == [0, 1, 2, 4, 5, 6, 7]
    assert found["number"] == [1, 2, 3, 5, 6, 7, 8]
    assert found["output"] == [alone[i].texts[0] for i in (0, 1, 2, 4, 5, 6, 7)]
    assert [text[:2] for text in found["output"]] == [first[i][1:] for i in (0, 1, 2, 4, 5, 6, 7)]
    expected = [one.scores[0] for i, one in enumerate(alone) if i != 3 and one.scores]
    assert found["score"] == pytest.approx(expected, abs=1e-9)
    lines, scored_no_more = tmp_path / "lines", replace(scored, scores=False)
    engine.run(scored_no_more, output=str(lines), on_error="skip", output_format="txt", **run)
    written = next(lines.glob("*.txt")).read_text().split("\n")
    assert [bool(line) for line in written] == [
        True,
        True,
        True,
        False,
        True,
        True,
        True,
        True,
        False,
    ]
    several = replace(scored_no_more, generation=GENERATION)
    with pytest.raises(CommandError, match="--n-best: txt has no place for several outputs here"):
        engine.run(several, output=str(tmp_path / "more"), output_format="txt", **run)
    assert Tables(str(tmp_path / "out")).kind == "csv"  # a folder of outputs can be an input
    with pytest.raises(CommandError, match="holds files already"):
        engine.run(Options(**ARGUMENTS), output=str(tmp_path / "out"), **run)


@pytest.mark.slow
def test_the_command(cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.txt").write_text("".join(f"{text}\n" for text in TEXTS[:6]))
    words = [
        "generate",
        str(MODEL),
        "--input",
        str(tmp_path / "in.txt"),
        "--output",
        str(tmp_path / "out"),
    ]
    words += [
        "--engine",
        "ray",
        "--output-format",
        "jsonl",
        "--worker-cpus",
        "0.5",
        "--rows",
        "3",
        "--dtype",
        "float64",
    ]
    words += ["--num-beams", "2", "--n-best", "2", "--max-new-tokens", "16", "--scores"]
    assert main(words) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["rows"], said["problems"], said["fallbacks"]) == (6, 0, {})
    rows = [
        json.loads(line)
        for line in next((tmp_path / "out").glob("*.jsonl")).read_text().splitlines()
    ]
    alone = TextGenerator(Options(**ARGUMENTS, scores=True))(TEXTS[:6])
    assert [row["outputs"] for row in rows] == [
        one.texts for one in alone if isinstance(one, Output)
    ]
    for row, one in zip(rows, alone, strict=True):
        assert isinstance(one, Output)
        assert row["scores"] == pytest.approx(one.scores, abs=1e-9)


@pytest.mark.slow
def test_drafts_and_rows_that_differ(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model paths are relative; later rows add a type and a field; one text is missing."""
    rows = [
        {"score": 1},
        {"text": TEXTS[1], "score": 0.5},
        {"text": TEXTS[2], "more": {"a": ["b"]}},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(MODEL.parent)
    options = Options(
        Path("model"),
        {"max_new_tokens": 8, "lossless": True},
        assistant=Path("model"),
        dtype="float64",
    )
    run: dict[str, Any] = {
        "input": str(tmp_path / "in.jsonl"),
        "cpus": 0.5,
        "rows": 1,
        "rows_per_file": 1,
    }
    with pytest.raises(CommandError, match=r"column 'more' holds struct.*which CSV does not"):
        engine.run(options, output=str(tmp_path / "out"), output_format="csv", **run)
    summary = engine.run(
        options, output=str(tmp_path / "out"), output_format="parquet", on_error="empty", **run
    )
    assert summary.options["model"] == summary.options["assistant"] == str(MODEL)
    assert json.loads((tmp_path / "out/_summary.json").read_text())["options"] == summary.options
    parts = [pyarrow.parquet.read_table(tmp_path / "out" / part) for part in summary.parts]
    assert len({str(part.schema) for part in parts}) == 1
    found = [row for part in parts for row in part.to_pylist()]
    assert [row["problem"] for row in found] == ["there is no text", None, None]
    alone = TextGenerator(Options(MODEL, {"max_new_tokens": 8}, dtype="float64"))(TEXTS[1:3])
    assert [[row["output"]] for row in found[1:]] == [
        one.texts for one in alone if isinstance(one, Output)
    ]
    assert [(row["text"], row["score"], row["more"]) for row in found] == [
        (None, 1.0, None), (TEXTS[1], 0.5, None), (TEXTS[2], None, {"a": ["b"]}),
    ]  # fmt: skip


def test_what_is_drawn_depends_on_the_seed_and_the_row() -> None:
    def drawn(seed: int, number: int) -> list[str]:
        generation = {"do_sample": True, "num_beams": 1, "max_new_tokens": 16, "temperature": 3.0}
        actor = engine._Reporting(model=MODEL, generation=generation, seed=seed)
        return actor(pa.table({"number": [number, number + 1], "text": TEXTS[:2]}))[
            "output"
        ].to_pylist()

    first = drawn(1, 1)
    assert drawn(1, 1) == first
    assert drawn(2, 1) != first
    assert drawn(1, 5) != first


def test_resources_that_no_machine_has(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    Connection(ours=False, alone=True).check(2, 1.0, 0.0)
    with pytest.raises(
        CommandError, match="3 times 1 processors and 0 GPUs are asked for; this machine has 2 proc"
    ):
        Connection(ours=False, alone=True).check(3, 1.0, 0.0)
    Connection(ours=False, alone=False).check(3, 1.0, 0.0)
    assert capsys.readouterr().err == ""
    # The cluster has two machines with one processor each.
    Connection(ours=False, alone=False).check(1, 1.5, 0.0)
    assert "no machine of the cluster has 1.5 processors and 0 GPUs now" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--output", "out", "--processes", "2"], "--processes is not available with --engine ray"),
        (["--output", "out", "--limit", "9"], "--limit is not available with --engine ray"),
        ([], "--engine ray needs --output"),
        (
            ["--output", "out", "--workers", "1", "2", "3"],
            "--workers takes one number or two, not 1 2 3",
        ),
        (["--output", "out", "--output-format", "tsv"], "text, not tsv"),
        (["--output", "out", "--input", "-"], "takes one file or folder as --input, not -"),
    ],
)
def test_what_the_command_cannot_have(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = [] if "--input" in words else ["--input", "in.txt"]
    assert main(["generate", str(MODEL), "--engine", "ray", *source, *words]) == 2
    assert said in capsys.readouterr().err


def test_options_of_a_cluster_need_one(capsys: pytest.CaptureFixture[str]) -> None:
    given = (
        "--address auto",
        "--workers 2",
        "--worker-cpus 2",
        "--worker-gpus 1",
        "--rows 3",
        "--rows-per-file 9",
    )
    for words in given:
        assert main(["generate", str(MODEL), "--input", "in.txt", *words.split()]) == 2
        assert f"{words.split()[0]} requires --engine ray" in capsys.readouterr().err


@pytest.mark.slow
def test_a_lost_machine_loses_no_row_and_doubles_none(
    cluster: Cluster, outputs: list[Output], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    for part in range(2):  # rows of the second file are numbered after those of the first
        (tmp_path / f"in/{part}.txt").write_text(
            "".join(f"{text}\n" for text in TEXTS[part * 48 : part * 48 + 48])
        )
    (node,) = (node for node in cluster.list_all_nodes() if not node.head)
    lost: list[list[str]] = []
    counted = engine._counted

    def models() -> list[str]:
        """Return the node of each live model."""
        actors = ray._private.state.actors().values()
        alive = [
            one
            for one in actors
            if "_Reporting" in one["ActorClassName"] and one["State"] == "ALIVE"
        ]
        return [one["Address"]["NodeID"] for one in alive]

    def losing(*args: Any) -> Any:
        if not lost:
            # The model on the other node may answer first, long before.
            _wait(lambda: node.node_id in models())
            lost.append(models())
            cluster.remove_node(node, allow_graceful=False)
        return counted(*args)

    monkeypatch.setattr(engine, "_counted", losing)
    summary = engine.run(
        Options(**ARGUMENTS), input=str(tmp_path / "in"), output=str(tmp_path / "out"),
        output_format="jsonl", workers=(2, 2), cpus=1.0, rows=4, rows_per_file=40,
    )  # fmt: skip
    assert node.node_id in lost[0]  # a model on the node had blocks to process
    _wait(
        lambda: (
            [one["NodeID"] for one in ray.nodes() if one["Alive"]] == [cluster.head_node.node_id]
        )
    )
    rows = [
        json.loads(line)
        for part in summary.parts
        for line in (tmp_path / "out" / part).read_text().splitlines()
    ]
    assert [row["number"] for row in rows] == list(range(1, 97))
    assert [row["text"] for row in rows] == TEXTS
    assert [(row["output"], row["outputs"], row["tokens"]) for row in rows] == [
        (one.texts[0], one.texts, one.tokens) for one in outputs
    ]
    assert len(summary.parts) == 3
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "_SUCCESS", "_summary.json", *summary.parts,
    ]  # fmt: skip
    assert json.loads((tmp_path / "out/_summary.json").read_text())["tokens"] == sum(
        one.tokens for one in outputs
    )
    assert summary.hits["transformers.beam_search"] > 0
    assert summary.fallbacks == {}


@pytest.mark.parametrize(
    ("changed", "error", "shown"),
    [
        ({"workers": (2, 1)}, ValueError, r"workers = \(2, 1\)"),
        ({"rows": 0}, ValueError, "rows = 0"),
        ({"on_error": "ignore"}, ValueError, "on_error='ignore'"),
        ({"input": "nowhere.txt"}, CommandError, "no such file"),
        ({"input": "in"}, CommandError, "format is not told by names"),
        ({"input": "empty"}, CommandError, "format is not told by names"),
        ({"column": "line"}, CommandError, "in/a.txt: there is no column 'line', but 'text'"),
        ({"output_format": "xml"}, CommandError, "'xml' must be one of"),
        (
            {"options": Options(**ARGUMENTS, assistant=Path("in"))},
            CommandError,
            "in holds no model",
        ),
        ({"options": Options(**ARGUMENTS, scores=True)}, CommandError, "--scores: lines of text"),
        (
            {"input": "mixed.jsonl", "rows": 1},
            CommandError,
            "mixed.jsonl: .*id has incompatible types: int64 vs str",
        ),
    ],
)
def test_what_cannot_be_run(
    changed: dict[str, Any],
    error: type[Exception],
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    Path("empty").mkdir()
    for name in ("a.txt", "a.csv"):
        Path("in", name).write_text("text\na\n")
    Path("mixed.jsonl").write_text('{"text": "a", "id": 1}\n{"text": "b", "id": "2"}\n')
    arguments: dict[str, Any] = {
        "options": Options(**ARGUMENTS),
        "input": "in/a.txt",
        "output": "out",
    } | changed
    with pytest.raises(error, match=shown):
        engine.run(**arguments)
    assert not Path("out").exists()


def test_tables(tmp_path: Path) -> None:
    """Rows come in the order of file names, from every format."""
    # Only line feeds end lines.
    (tmp_path / "b.txt").write_bytes("\ufeffa\u2028b\r\n\n\x85c".encode())
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"d\ne\n"))
    (tmp_path / "_SUCCESS").touch()
    found = list(Tables(str(tmp_path)).read(2))
    assert [table["text"].to_pylist() for table in found] == [
        ["a\u2028b", ""],
        ["\x85c"],
        ["d", "e"],
    ]
    rows = [{"id": i, "text": f"one\ntwo {i}"} for i in range(5)]
    table = pa.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    pyarrow.csv.write_csv(table, tmp_path / "a.csv")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("a.parquet", "a.csv", "a.jsonl"):
        tables = list(Tables(f"file://{tmp_path}/{name}").read(2))
        ids = [{**row, "id": str(row["id"])} for row in rows] if name == "a.csv" else rows
        assert [row for table in tables for row in table.to_pylist()] == ids, name
        assert [len(table) for table in tables] == [2, 2, 1], name


def test_csv_is_strings_as_they_stand(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('text\n001\nNA\n\n"a\nb"\nnull\n')
    (table,) = Tables(str(tmp_path / "a.csv")).read(9)
    assert table["text"].to_pylist() == ["001", "NA", "", "a\nb", "null"]


def test_json_lines_with_fields_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{}\n\n{}\n{"b": 1}\n{"text": "t", "b": 0.5, "a": {}}\n')
    first, second = Tables(str(tmp_path / "a.jsonl")).read(2)
    assert (len(first), first.column_names) == (2, [])
    assert second.column_names == ["b", "text", "a"]
    assert second.to_pylist() == [
        {"b": 1.0, "text": None, "a": None},
        {"b": 0.5, "text": "t", "a": {}},
    ]


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (b"{", r"line 3: Expecting"),
        (b'"text"', "line 3: a str, not an object"),
        (b'{"id": "\xff"}', "line 3: 'utf-8' codec"),
        (b'{"id": "one"}', "lines 1 to 3: Could not convert 'one'"),
        (b'{"id": 1000000000000000000000}', "lines 1 to 3: Python int too large"),
        (b"[" * 100_000, "line 3: "),
    ],
)
def test_json_lines_that_cannot_be_read(second: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"id": 1}\n\n' + second)
    with pytest.raises(CommandError, match=rf"a\.jsonl: {said}"):
        list(Tables(str(tmp_path / "a.jsonl")).read(2))


def test_where_folders_cannot_be_renamed_the_mark_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastgen.ray.folder._MOVES_FOLDERS", ())
    folder = Folder(f"file://{tmp_path}/out", "jsonl")
    folder.write(pa.table({"output": ["a"], "outputs": [["a"]]}))
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["part-000000.jsonl"]
    folder.finish({"rows": 1})
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "part-000000.jsonl",
        "_summary.json",
        "_SUCCESS",
    }


def test_an_output_that_came_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    first, second = (Folder(str(tmp_path / "out"), "txt") for _ in range(2))
    for folder, text in ((first, "one\ntwo"), (second, "other")):
        folder.write(pa.table({"output": [text]}))
    first.finish({})
    with pytest.raises(
        CommandError, match=f"holds files already.*the finished output is {second.scratch}"
    ):
        second.finish({})
    second.discard()  # does not remove the finished output
    assert (Path(second.scratch) / "part-000000.txt").read_text() == "other\n"
    assert (tmp_path / "out/part-000000.txt").read_text() == "one two\n"
