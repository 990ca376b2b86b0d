"""Corpus files, read and written: formats, compression, unusual characters, and error messages."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
import threading
from collections.abc import Sequence
from datetime import date
from operator import length_hint
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("zstandard", reason="needs fastgen[corpus]")
from fastgen.corpus.formats import compression, formats, writers
from fastgen.corpus.formats.readers import Files
from fastgen.corpus.formats.records import Record
from fastgen.corpus.formats.writers import File
from fastgen.corpus.texts import Output, Problem
from fastgen.errors import CommandError

ODD = [
    "plain",
    " spaces ",
    "",
    "a\tb",
    'quo"te',
    '"',
    "'",
    "a,b",
    "\u2028",
    "\x85 \x0b \x0c",
    "\x00",
    "\r",
    "a\rb",
    "😀 e\u0301 \u200b",
    "\ufeff",
    "null",
    "1",
    "\\n",
]
BREAKS = ["two\nlines", "\n", "\r\n", "a\r\nb"]
texts_of = st.lists(
    st.one_of(st.sampled_from(ODD), st.text(st.characters(codec="utf-8"), max_size=8)),
    min_size=1,
    max_size=12,
)
anything = st.lists(
    st.one_of(st.sampled_from(ODD + BREAKS), st.text(st.characters(codec="utf-8"), max_size=8)),
    min_size=1,
    max_size=12,
)


def read(*files: Path, **options: Any) -> list[Record]:
    return list(Files(tuple(map(str, files)), **options).records())


def output(*texts: str, scores: list[float] | None = None) -> Output:
    return Output(list(texts), 1, scores)


def write(
    sink: File,
    file: Path,
    outputs: Sequence[Any],
    records: Sequence[Record] | None = None,
    size: int = 2,
) -> Path:
    """Write the outputs in blocks, as a job does."""
    records = (
        [Record(i, f"source {i}") for i in range(1, len(outputs) + 1)]
        if records is None
        else records
    )
    body = file.with_name("body")
    blocks = [
        sink.block(records[i : i + size], outputs[i : i + size])
        for i in range(0, len(records), size)
    ]
    body.write_bytes(b"".join(blocks))
    sink.finish(body, file)
    assert not body.exists()
    return file


# Reading


def test_only_newlines_end_a_line(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes("\ufeffone\r\ntwo\rhalves\u2028\x85\x0c\n\n\ufefflast\r".encode())
    assert [(r.number, r.text) for r in read(file)] == [
        (1, "one"), (2, "two\rhalves\u2028\x85\x0c"), (3, ""), (4, "\ufefflast\r"),
    ]  # fmt: skip


def test_bytes_that_are_not_utf8_are_a_problem_of_their_line(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"one\n\xff two\nthree\n\xc3")
    assert [(r.text, r.problem and r.problem.reason) for r in read(file)] == [
        ("one", None), ("", "not UTF-8: invalid start byte at byte 0"), ("three", None),
        ("", "not UTF-8: unexpected end of data at byte 0"),
    ]  # fmt: skip
    for quotes in (True, False):
        (tmp_path / "a.tsv").write_bytes(b"id\ttext\n1\ta\xff\n2\tb\n")
        bad, good = read(tmp_path / "a.tsv", column="text", quotes=quotes)
        assert bad.problem == Problem("not UTF-8")
        assert bad.fields == {"id": "1", "text": "a\ufffd"}
        assert (good.text, good.number) == ("b", 2)


@given(texts_of)
@settings(max_examples=60, deadline=None)
def test_lines(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    lines = [text.replace("\n", "") for text in texts]
    lines = [line.removesuffix("\r") for line in lines]
    lines[0] = lines[0].removeprefix("\ufeff")
    file = tmp_path_factory.mktemp("lines") / "text"
    for end in ("\n", "\r\n"):
        file.write_bytes("".join(line + end for line in lines).encode())
        assert [r.text for r in read(file)] == lines


@given(anything)
@settings(max_examples=60, deadline=None)
def test_tables_and_objects(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    folder = tmp_path_factory.mktemp("tables")
    for kind, delimiter in formats.DELIMITERS.items():
        with (folder / f"a.{kind}").open("w", encoding="utf-8", newline="") as stream:
            writer = csv.writer(stream, delimiter=delimiter, quoting=csv.QUOTE_ALL)
            writer.writerows(
                [["id", "the text"], *([str(i), text] for i, text in enumerate(texts))]
            )
        found = read(folder / f"a.{kind}", column="the text")
        assert [(r.text, r.fields) for r in found] == [
            (text, {"id": str(i), "the text": text}) for i, text in enumerate(texts)
        ]
    rows = [{"id": i, "text": text, "more": [text]} for i, text in enumerate(texts)]
    (folder / "a.jsonl").write_bytes(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    )
    assert [r.fields for r in read(folder / "a.jsonl", column="text")] == rows
    pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet", row_group_size=3)
    assert [(r.text, r.fields) for r in read(folder / "a.parquet", column="text")] == [
        (row["text"], row) for row in rows
    ]


def test_a_dataset_on_disk(tmp_path: Path) -> None:
    rows = [{"id": i, "text": text} for i, text in enumerate(ODD)]
    datasets: Any = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_list(rows)
    whole.save_to_disk(str(tmp_path / "whole"))
    assert [r.fields for r in read(tmp_path / "whole", column="text")] == rows
    datasets.DatasetDict({"train": whole, "test": whole}).save_to_disk(str(tmp_path / "parts"))
    assert [r.text for r in read(tmp_path / "parts" / "test", column="text", limit=2)] == ODD[:2]
    with pytest.raises(
        CommandError, match=r"has several parts, train, test: name one, as .*parts/PART"
    ):
        read(tmp_path / "parts", column="text")
    with pytest.raises(CommandError, match="no column 'body'; there are id, text"):
        Files((str(tmp_path / "whole"),), column="body").check()
    (tmp_path / "other").mkdir()
    with pytest.raises(CommandError, match="other cannot be read as a dataset"):
        read(tmp_path / "other", column="text")


def test_files_one_after_the_other(tmp_path: Path) -> None:
    for name, text in (("a.txt", "1\n2"), ("b.txt", "3\n")):
        (tmp_path / name).write_text(text)
    files = tmp_path / "a.txt", tmp_path / "b.txt"
    assert [(r.number, r.text) for r in read(*files)] == [(1, "1"), (2, "2"), (3, "3")]
    assert [r.text for r in read(*files, limit=2)] == ["1", "2"]


@pytest.mark.parametrize("name", ["text", "a.jsonl", "a.parquet", "a.csv"])
def test_a_length_is_told_where_it_is_cheap(tmp_path: Path, name: str) -> None:
    from operator import length_hint

    file = tmp_path / name
    column = None if name == "text" else "text"
    pq.write_table(pa.table({"text": ["a"] * 5}), file)
    if name != "a.parquet":
        file.write_text(
            {"text": "a\n" * 5, "a.jsonl": '{"text": "a"}\n' * 5, "a.csv": "text\n" + "a\n" * 5}[
                name
            ]
        )
    source = Files((str(file),), column=column)
    assert length_hint(source, -1) == (-1 if name == "a.csv" else 5)
    assert length_hint(Files((str(file),), column=column, limit=3), -1) == (
        -1 if name == "a.csv" else 3
    )


def test_nothing_is_read_before_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Endless(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            nonlocal taken
            taken += len(buffer)
            buffer[:] = (b"word\n" * len(buffer))[: len(buffer)]
            return len(buffer)

    taken = 0
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Endless())))
    source = Files(("-",), limit=100)
    assert len(list(source.records())) == 100
    assert taken < 1 << 17
    assert source.once
    assert source.identity()["files"] == [{"name": "-"}]


def test_columns(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("task\ttext\nsum: \tlong\nsum: \t\n\t\nx\n")
    records = read(tmp_path / "a.tsv", column="text", prefix_column="task")
    assert [(r.prefix, r.text, r.problem) for r in records] == [
        ("sum: ", "long", None), ("sum: ", "", Problem("there is no text")), ("", "", None),
        ("", "", Problem("1 columns of 2")),
    ]  # fmt: skip
    by_number = read(tmp_path / "a.tsv", column="2")
    assert by_number[0].fields == {"1": "task", "2": "text"}
    assert read(tmp_path / "a.tsv", column="2", header=True)[0].text == "long"
    (tmp_path / "one.csv").write_text("text\na\n\nb\n")
    assert [r.text for r in read(tmp_path / "one.csv", column="text")] == ["a", "", "b"]


def test_quotes_that_are_letters(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('1\t"never closed\n2\tb\n')
    assert [r.text for r in read(tmp_path / "a.tsv", column="2", quotes=False)] == [
        '"never closed',
        "b",
    ]
    with pytest.raises(CommandError, match=r"a.tsv, line 2: unexpected end of data; --no-quotes"):
        read(tmp_path / "a.tsv", column="2")
    for wrong in (
        lambda: Files(("a.csv",), column="1", quotes=False),
        lambda: File("csv", quotes=False),
    ):
        with pytest.raises(CommandError, match="--no-quotes: a comma"):
            wrong()


def test_what_is_no_text_is_a_problem(tmp_path: Path) -> None:
    lines = [
        '{"text": "a"}',
        '{"text": null}',
        "",
        '{"text": 3}',
        '{"other": "b"}',
        "[1]",
        "{",
        '{"text": "\\ud800"}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    found = [
        (r.number, r.problem and r.problem.reason)
        for r in read(tmp_path / "a.jsonl", column="text")
    ]
    assert found[:5] == [
        (1, None), (2, "'text' is empty or missing"), (3, "'text' is of type int, not text"),
        (4, "'text' is empty or missing"), (5, "not a JSON object: a list, not an object"),
    ]  # fmt: skip
    assert found[5][1].startswith("not a JSON object: Expecting property name")
    assert found[6][1] == "'text' is no text: surrogates not allowed at 0"


@pytest.mark.parametrize(
    ("name", "content", "options", "said"),
    [
        (
            "a.tsv",
            b"id\tbody\n1\tx\n",
            {"column": "text"},
            "a.tsv has no column 'text'; there are id, body",
        ),
        ("a.csv", b"id,body\n1,x\n", {"column": "3"}, "a.csv has no column '3'; there are 1, 2"),
        ("a.csv", b"id,id\n1,x\n", {"column": "id"}, "two columns of one name: id, id"),
        (
            "a.jsonl",
            b'{"id": 1, "body": "x"}\n',
            {"column": "text"},
            "no column 'text'; there are id, body",
        ),
        ("a.csv", b"id,body\n1,x\n", {}, "--column is needed: .*a.csv has id, body"),
        ("a.txt", b"x\n", {"column": "text"}, "--column text: lines of text have no columns"),
        ("a.txt", b"", {}, "a.txt is empty"),
        ("a.csv", b"id,body\n", {"column": "id"}, "a.csv is empty"),
        ("a.parquet", b"PAR", {"column": "id"}, "a.parquet cannot be read as Parquet"),
        ("a.txt.gz", b"no gzip", {}, r"a.txt.gz cannot be read: Not a gzipped file"),
        (
            "a.txt.gz",
            compression.packed(b"x\n" * 5000, ".gz")[:-9],
            {},
            "a.txt.gz is torn or damaged",
        ),
        ("a.txt.zst", b"no zstandard", {}, "a.txt.zst cannot be read: zstd"),
        (
            "a.txt.zst",
            compression.packed(b"x\n" * 5000, ".zst")[:-3],
            {},
            "a.txt.zst is torn or damaged",
        ),
        (
            "a.txt.xz",
            compression.packed(b"x\n" * 5000, ".xz")[:-3],
            {},
            "a.txt.xz is torn or damaged",
        ),
        (
            "a.txt.bz2",
            compression.packed(b"x\n" * 5000, ".bz2")[:-3],
            {},
            "a.txt.bz2 is torn or damaged",
        ),
    ],
)
def test_bad_files(
    tmp_path: Path, name: str, content: bytes, options: dict[str, Any], said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CommandError, match=said):
        read(tmp_path / name, **options)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"nothing.txt cannot be read: No such file"):
        Files((str(tmp_path / "nothing.txt"),)).check()
    with pytest.raises(CommandError, match=r"files of csv and text; --input-format"):
        Files(("a.csv", "b.txt"), column="1")
    with pytest.raises(CommandError, match="- -: there is one standard input"):
        Files(("-", "-"))
    with pytest.raises(CommandError, match="parquet is not read from standard input"):
        Files(("-",), "parquet", "text")


def test_identity_tells_what_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.tsv"
    file.write_text("a\tb\n")
    one = Files((str(file),), column="1").identity()
    assert one["files"][0]["size"] == 4
    assert len(one["files"][0]["sha256"]) == 64
    assert json.loads(json.dumps(one)) == one == Files((str(file),), column="1").identity()
    file.write_text("a\tc\n")
    others = [
        Files((str(file),), column="1"),
        Files((str(file),), column="2"),
        Files((str(file),), column="1", limit=1),
    ]
    assert all(other.identity() != one for other in others)


# Compression


@pytest.mark.parametrize("ending", ["", *compression.ENDINGS])
def test_blocks_in_a_row_are_one_file(tmp_path: Path, ending: str) -> None:
    sink = File("text", ending)
    file = write(sink, tmp_path / f"out.txt{ending}", [output(text) for text in "abcde"])
    assert [r.text for r in read(file)] == list("abcde")
    block = [Record(1, "a")], [output("b")]
    assert sink.block(*block) == sink.block(*block)
    empty = write(File("jsonl", ending), tmp_path / f"empty.jsonl{ending}", [None, None])
    with pytest.raises(CommandError, match="is empty"):  # rather than torn
        read(empty, column="output")


def test_formats_by_name() -> None:
    for name, kind, packing in (
        ("a.tsv.gz", "tsv", ".gz"),
        ("a.b.jsonl", "jsonl", ""),
        ("a.zst", "text", ".zst"),
        ("a.de", "text", ""),
        ("a.CSV", "csv", ""),
    ):
        ending, found = compression.split(Path(name))
        assert (formats.of_ending(ending), found) == (kind, packing)
    with pytest.raises(CommandError, match=r"Parquet is compressed by itself; leave .gz off"):
        File("parquet", ".gz")


# Writing


@given(anything)
@settings(max_examples=60, deadline=None)
def test_no_output_becomes_two_records(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("out")
    outputs = [output(text) for text in texts]
    joined = [
        " ".join(text.replace("\r\n", "\n").replace("\r", "\n").split("\n")) for text in texts
    ]
    lines = write(File("text"), folder / "out.txt", outputs)
    first, *rest = joined
    assert [r.text for r in read(lines)] == [first.removeprefix("\ufeff"), *rest]
    for kind in ("tsv", "csv", "jsonl", "parquet"):
        sink = File(kind)
        file = write(sink, folder / f"out.{kind}", outputs)
        assert [r.text for r in read(file, column="output")] == texts
        assert list(sink.best(file)) == list(enumerate(texts, 1))
    bare = write(File("tsv", quotes=False), folder / "bare.tsv", outputs)
    assert [r.text for r in read(bare, column="output", quotes=False)] == [
        text.replace("\t", " ") for text in joined
    ]


def test_what_is_left_out_shifts_nothing(tmp_path: Path) -> None:
    outputs = [output("a"), None, Problem("why"), output("b")]
    assert write(File("text"), tmp_path / "t", outputs).read_text() == "a\n\n\nb\n"
    rows = [
        json.loads(line)
        for line in write(File("jsonl", problems=True), tmp_path / "j", outputs).open()
    ]
    assert rows == [
        {"number": 1, "text": "source 1", "output": "a", "problem": None},
        {"number": 3, "text": "source 3", "output": None, "problem": "why"},
        {"number": 4, "text": "source 4", "output": "b", "problem": None},
    ]
    assert write(File("csv", problems=True), tmp_path / "c", outputs).read_text() == (
        "number,text,output,problem\n1,source 1,a,\n3,source 3,,why\n4,source 4,b,\n"
    )
    late = [None, None, output("c")]
    assert (
        write(File("csv"), tmp_path / "d", late).read_text() == "number,text,output\n3,source 3,c\n"
    )


def test_several_outputs_and_scores(tmp_path: Path) -> None:
    outputs = [
        output("a\tb", "c", scores=[-0.5, -1e-17]),
        output("d", "e", scores=[-1.0, -2.0]),
        Problem("why"),
    ]
    both = {"several": True, "scores": True}
    sinks = {kind: File(kind, **both) for kind in writers.NAMES}
    files = {kind: write(sink, tmp_path / f"out.{kind}", outputs) for kind, sink in sinks.items()}
    assert (
        files["text"].read_text()
        == "1\t1\t-0.5\ta b\n1\t2\t-1e-17\tc\n2\t1\t-1.0\td\n2\t2\t-2.0\te\n3\t1\t\t\n"
    )
    assert files["tsv"].read_text().splitlines()[:3] == [
        "number\ttext\trank\tscore\toutput", '1\tsource 1\t1\t-0.5\t"a\tb"',
        "1\tsource 1\t2\t-1e-17\tc",
    ]  # fmt: skip
    expected = {
        "number": 1,
        "text": "source 1",
        "output": "a\tb",
        "outputs": ["a\tb", "c"],
        "score": -0.5,
        "scores": [-0.5, -1e-17],
    }
    assert json.loads(files["jsonl"].read_text().splitlines()[0]) == expected
    assert pq.read_table(files["parquet"]).to_pylist()[0] == expected
    for kind, sink in sinks.items():
        first = "a b" if kind == "text" else "a\tb"
        assert list(sink.best(files[kind])) == [(1, first), (2, "d"), (3, "")]
    assert (
        write(File("text", several=True), tmp_path / "n", [output("a", "b")]).read_text()
        == "1\t1\t\ta\n1\t2\t\tb\n"
    )


def test_fields_are_kept(tmp_path: Path) -> None:
    fields = {"id": 7, "tags": ["x", "y"], "none": None, "text": "t"}
    records = [Record(1, "t", fields=fields)]
    (row,) = map(
        json.loads,
        write(File("jsonl", columns=tuple(fields)), tmp_path / "j", [output("o")], records).open(),
    )
    assert row == {"number": 1, **fields, "output": "o"}
    table = write(
        File("csv", columns=tuple(fields)), tmp_path / "c", [output("o")], records
    ).read_text()
    assert table == 'number,id,tags,none,text,output\n1,7,"[""x"", ""y""]",,t,o\n'
    with pytest.raises(
        CommandError, match="has a column 'output' already, which the output adds; --field-prefix"
    ):
        File("jsonl", columns=("output",))
    renamed = File("jsonl", columns=("output",), prefix="new_")
    line = renamed.block([Record(1, "t", fields={"output": "mine"})], [output("o")])
    assert json.loads(line) == {"new_number": 1, "output": "mine", "new_output": "o"}
    file = write(
        renamed, tmp_path / "r", [output("o")], [Record(1, "t", fields={"output": "mine"})]
    )
    assert list(renamed.best(file)) == [(1, "o")]


def test_values_that_json_has_no_word_for(tmp_path: Path) -> None:
    import datetime
    import decimal

    fields = {
        "day": datetime.date(2020, 1, 2),
        "cost": decimal.Decimal("1.50"),
        "raw": b"\xff",
        "half": "\ud800",
    }
    data = File("jsonl").block([Record(1, "t", fields=fields)], [output("o")])
    assert json.loads(data) == {
        "number": 1,
        "day": "2020-01-02",
        "cost": "1.50",
        "raw": "/w==",
        "half": "\ud800",
        "output": "o",
    }


def test_numbers_that_json_has_no_word_for(tmp_path: Path) -> None:
    fields = {"x": math.nan, "deep": [{"y": math.inf}, 1.5]}
    data = File("jsonl").block([Record(1, "t", fields=fields)], [output("o")])
    assert json.loads(data, parse_constant=pytest.fail) == {
        "number": 1,
        "x": None,
        "deep": [{"y": None}, 1.5],
        "output": "o",
    }
    file = write(
        File("parquet"), tmp_path / "p", [output("o")], [Record(1, "t", fields={"x": math.inf})]
    )
    assert pq.read_table(file)["x"].to_pylist() == [math.inf]


def test_parquet_of_half_a_pair_of_surrogates(tmp_path: Path) -> None:
    fields = {"half": "a\ud83d", "deep": {"b\ud83d": ["c\ud83d", "\U0001f600"]}}
    row = pq.read_table(
        write(File("parquet"), tmp_path / "p", [output("o")], [Record(1, "t", fields=fields)])
    )
    assert row.to_pylist() == [
        {
            "number": 1,
            "half": "a\ufffd",
            "deep": {"b\ufffd": ["c\ufffd", "\U0001f600"]},
            "output": "o",
        }
    ]


def test_parquet_has_a_type_for_every_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each column has one type, whatever its values and their distribution over row groups."""
    monkeypatch.setattr("fastgen.corpus.formats.parquet._ROWS", 2)
    values: dict[str, list[Any]] = {
        "ints": [1, 2, 3, None, 2**60 + 1], "floats": [1, 2, 0.5, None, 2**60 + 1],
        "mixed": [1, "a", None, [1], {}], "late": [None, None, None, None, "x"],
        "huge": [2**70, 1, 2, 3, 4], "empty": [{}, {}, {}, {}, {}],
        "list": [[], [1], None, [2], []],
        "object": [{"a": 1}, {"a": None}, {"b": "c"}, None, {"a": 2}], "nothing": [None] * 5,
    }  # fmt: skip
    records = [
        Record(i + 1, "t", fields={name: column[i] for name, column in values.items()})
        for i in range(5)
    ]
    table = pq.read_table(write(File("parquet"), tmp_path / "p", [output("o")] * 5, records))
    found = table.to_pydict()
    assert found["ints"] == values["ints"]
    assert found["floats"] == [1.0, 2.0, 0.5, None, float(2**60 + 1)]
    assert found["mixed"] == ["1", "a", None, "[1]", "{}"]
    assert found["late"] == values["late"]
    assert found["huge"] == [str(2**70), "1", "2", "3", "4"]
    assert found["empty"] == ["{}"] * 5
    assert found["list"] == values["list"]
    assert found["object"][0] == {"a": 1, "b": None}
    assert found["nothing"] == [None] * 5
    assert found["output"] == ["o"] * 5
    assert not list(tmp_path.glob("p.*"))


def test_a_sink_says_what_its_bytes_depend_on() -> None:
    sinks = [
        File("text"),
        File("text", ".gz"),
        File("jsonl"),
        File("jsonl", prefix="x"),
        File("text", several=True),
    ]
    told = [json.dumps(sink.identity()) for sink in sinks]
    assert len(set(told)) == len(told)


# Errors in unusual places


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    lines = [f"line {i}" for i in range(30_000)]

    def feed() -> None:
        with (tmp_path / "pipe").open("w") as stream:
            stream.writelines(f"{line}\n" for line in lines)

    source = Files((str(tmp_path / "pipe"),))
    assert source.once
    assert source.check() is None
    assert length_hint(source, -1) == -1
    writer = threading.Thread(target=feed)
    writer.start()
    assert [record.text for record in source.records()] == lines
    writer.join()


def test_tables_of_other_columns_are_no_one_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,id\na,1\n")
    (tmp_path / "b.csv").write_text("text,other\nb,2\n")
    names = (str(tmp_path / "a.csv"), str(tmp_path / "b.csv"))
    with pytest.raises(
        CommandError, match=r"b.csv has the columns text, other, and .*a.csv text, id"
    ):
        Files(names, column="text").check()


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl"])
def test_columns_of_the_input_that_are_named_like_ours(tmp_path: Path, kind: str) -> None:
    records = [Record(i, "x", fields={"rank": "7", "text": "x"}) for i in (1, 2)]
    sink = File(kind, columns=("rank", "text"))
    file = write(sink, tmp_path / f"a.{kind}", [output("one"), output("two")], records)
    assert list(sink.best(file)) == [(1, "one"), (2, "two")]


def test_a_field_named_number_does_not_number_a_record(tmp_path: Path) -> None:
    sink = File("jsonl")
    records = [
        Record(1, "x", fields={"text": "x"}),
        Record(2, "x", fields={"text": "x", "number": 77}),
    ]
    assert list(
        sink.best(write(sink, tmp_path / "a.jsonl", [output("one"), output("two")], records))
    ) == [
        (1, "one"),
        (2, "two"),
    ]


def test_dates_in_a_table_are_text(tmp_path: Path) -> None:
    sink = File("csv", columns=("day", "text"))
    record = Record(1, "x", fields={"day": date(2020, 1, 1), "text": "x"})
    assert (
        "1,2020-01-01,x,one"
        in write(sink, tmp_path / "a.csv", [output("one")], [record]).read_text()
    )


def test_parquet_is_made_beside_nobody(tmp_path: Path) -> None:
    (tmp_path / "news.parquet").write_bytes(b"somebody's")
    write(File("parquet"), tmp_path / "news", [output("one")])
    assert (tmp_path / "news.parquet").read_bytes() == b"somebody's"
    assert pq.read_table(tmp_path / "news").num_rows == 1
