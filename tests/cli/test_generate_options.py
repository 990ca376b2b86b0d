"""`fastgen generate`: its options, what it passes to `generate`, and early errors."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers import models as tokenizer_models

import fastgen
from fastgen import config
from fastgen.cli import main
from fastgen.cli.generate import generate
from fastgen.cli.generate import generation_options as generation
from fastgen.corpus.run.job import Job
from fastgen.corpus.texts import Options, Output, Source, TextGenerator
from fastgen.decoding.plan import Unsupported

LINES = ["One.", "The second line", "and a third, longer one", "4", "the fifth of them all"]
NEW = ["--max-new-tokens", "8"]


asked: list[Job] = []


@pytest.fixture(autouse=True)
def _noted_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked.clear()
    run = generate.run_job
    monkeypatch.setattr(generate, "run_job", lambda job: (asked.append(job), run(job))[1])


def tokenizer_of(limit: int = 256) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate(["<pad>", "</s>", "<unk>", *alphabet])}
    tokenizer = Tokenizer(tokenizer_models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=limit,
    )


def marian(seed: int, layers: int = 1) -> Any:
    torch.manual_seed(seed)
    config = tf.MarianConfig(
        vocab_size=len(tokenizer_of()), d_model=16, encoder_layers=1, decoder_layers=layers,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16,
        decoder_ffn_dim=16, max_position_embeddings=256, init_std=0.5, pad_token_id=0,
        bos_token_id=0, eos_token_id=1, decoder_start_token_id=0, forced_eos_token_id=None,
        task_specific_params={"sum": {"prefix": "sum: ", "num_beams": 2, "max_new_tokens": 5,
        "dropout": 0.1}},
    )  # fmt: skip
    return tf.MarianMTModel(config)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return toys with one tokenizer: encoder-decoders `model` and `small`, and `decoder`."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(2)
    decoder = tf.GPT2LMHeadModel(
        tf.GPT2Config(
            vocab_size=len(tokenizer_of()), n_embd=16, n_layer=1, n_head=2, n_positions=256,
            initializer_range=0.5, bos_token_id=1, eos_token_id=1,
        )
    )  # fmt: skip
    for name, model in (("model", marian(0)), ("small", marian(1)), ("decoder", decoder)):
        model.save_pretrained(root / name)
        tokenizer_of().save_pretrained(root / name)
    return root


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "in.txt"
    file.write_text("".join(f"{line}\n" for line in LINES))
    return file


def command(model: Path, text: Path, output: Path | None, *words: object) -> list[str]:
    given = ["--output", output] if output is not None else []
    return ["generate", *map(str, (model, "--input", text, *given, "--dtype", "float64", *words))]


def by_transformers(folder: Path, lines: list[str], **options: Any) -> list[list[str]]:
    """Return what unpatched transformers generates for each line by itself."""
    kind = tf.GPT2LMHeadModel if folder.name == "decoder" else tf.MarianMTModel
    model, tokenizer = (
        kind.from_pretrained(folder, dtype=torch.float64),
        tf.AutoTokenizer.from_pretrained(folder),
    )
    done: list[list[str]] = []
    for line in lines:
        ids = tokenizer([line], return_tensors="pt")["input_ids"]
        with fastgen.disabled():
            found = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
        prompt = ids.shape[1] if folder.name == "decoder" else 1
        done.append(
            [
                one.strip()
                for one in tokenizer.batch_decode(found[:, prompt:], skip_special_tokens=True)
            ]
        )
    return done


# Outputs


def one_line(text: str) -> str:
    return text.replace("\r\n", " ").replace("\n", " ").replace("\r", " ")


@pytest.mark.parametrize("name", ["model", "decoder"])
def test_outputs_are_those_of_transformers(
    folders: Path, text: Path, tmp_path: Path, name: str
) -> None:
    options = {
        "num_beams": 3,
        "no_repeat_ngram_size": 2,
        "length_penalty": 0.5,
        "early_stopping": True,
    }
    flags = [
        "--num-beams",
        3,
        "--no_repeat_ngram_size",
        2,
        "--length-penalty=0.5",
        "--early_stopping",
    ]
    assert main(command(folders / name, text, tmp_path / "out.txt", *NEW, *flags)) == 0
    expected = by_transformers(folders / name, LINES, max_new_tokens=8, **options)
    assert (tmp_path / "out.txt").read_bytes().decode() == "".join(
        one_line(one[0]) + "\n" for one in expected
    )


def test_several_with_scores(folders: Path, text: Path, tmp_path: Path) -> None:
    words = [*NEW, "--num-beams", 3, "--n-best", 2, "--scores"]
    assert main(command(folders / "model", text, tmp_path / "out.jsonl", *words)) == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").open()]
    assert [row["outputs"] for row in rows] == by_transformers(
        folders / "model", LINES, max_new_tokens=8, num_beams=3, num_return_sequences=2
    )
    model = tf.MarianMTModel.from_pretrained(folders / "model", dtype=torch.float64)
    for row in rows:
        ids = tokenizer_of()([row["text"]], return_tensors="pt")["input_ids"]
        with fastgen.disabled():
            found = model.generate(
                input_ids=ids, max_new_tokens=8, num_beams=3, num_return_sequences=2,
                return_dict_in_generate=True, output_scores=True,
            )  # fmt: skip
        assert row["scores"] == pytest.approx(found.sequences_scores.tolist(), abs=1e-9)
        assert (row["output"], row["score"]) == (row["outputs"][0], row["scores"][0])


def test_stdout_and_limit(
    folders: Path, text: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main(command(folders / "model", text, None, *NEW, "--n_obs", 2, "--quiet")) == 0
    expected = by_transformers(folders / "model", LINES[:2], max_new_tokens=8)
    assert capfdbinary.readouterr().out.decode() == "".join(
        one_line(one[0]) + "\n" for one in expected
    )


def test_what_stands_before_a_text(folders: Path, tmp_path: Path) -> None:
    table = tmp_path / "in.tsv"
    table.write_text("task\ttext\nA: \tone\nB: \ttwo\n")
    words = [*NEW, "--column", "text", "--prefix-column", "task", "--prefix", "> "]
    assert main(command(folders / "model", table, tmp_path / "out.jsonl", *words)) == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").open()]
    expected = by_transformers(folders / "model", ["> A: one", "> B: two"], max_new_tokens=8)
    assert rows == [
        {"number": i, "task": task, "text": said, "output": one[0]}
        for i, task, said, one in ((1, "A: ", "one", expected[0]), (2, "B: ", "two", expected[1]))
    ]


def test_a_task_of_the_model(
    folders: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            command(
                folders / "model",
                text,
                tmp_path / "out.txt",
                "--task",
                "sum",
                "--max-new-tokens",
                6,
            )
        )
        == 0
    )
    assert (asked[0].options.prefix, asked[0].options.generation) == (
        "sum: ",
        {"num_beams": 2, "max_new_tokens": 6},
    )
    assert main(command(folders / "model", text, tmp_path / "other.txt", "--task", "qa", *NEW)) == 2
    assert "--task qa: the config of" in capsys.readouterr().err


def test_draws_depend_on_the_seed(folders: Path, text: Path) -> None:
    """The generator uses torch's random state as its caller sets it, as a job seeds each block."""
    options = Options(
        folders / "model", {"max_new_tokens": 8, "do_sample": True}, scores=True, seed=3
    )
    generator = TextGenerator(options)
    # The first call computes its first token in the modules, which round differently.
    generator(LINES)
    torch.manual_seed(options.seed)
    one = generator(LINES)
    torch.manual_seed(options.seed)
    assert generator(LINES) == one
    assert all(isinstance(each, Output) and each.scores and each.scores[0] < 0 for each in one)


def test_int8(
    folders: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The precision is one of the options that outputs depend on."""
    monkeypatch.setenv("FASTGEN_PRECISION", "model")
    config.reload()
    try:
        rounded = command(
            folders / "model", text, tmp_path / "out.txt", *NEW, "--precision", "int8"
        )
        assert main(rounded) == 0
        assert asked[0].options.precision == config.settings().precision == "int8"
        assert main(command(folders / "model", text, tmp_path / "exact.txt", *NEW)) == 0
        assert asked[1].options.precision == "int8", "as the variable says now"
        assert main([*rounded[:-1], "model", "--overwrite"]) == 0
        assert config.settings().precision == "model"
    finally:
        monkeypatch.undo()
        config.reload()


@pytest.mark.parametrize("words", [[], ["--lossless"], ["--rollback-threshold", "0"]])
def test_a_small_model_drafts(folders: Path, text: Path, tmp_path: Path, words: list[str]) -> None:
    drafted = [*NEW, "--assistant-model", folders / "small", *words]
    assert main(command(folders / "model", text, tmp_path / "out.txt", *drafted)) == 0
    assert main(command(folders / "model", text, tmp_path / "alone.txt", *NEW)) == 0
    assert (tmp_path / "out.txt").read_text() == (tmp_path / "alone.txt").read_text()
    generation = dict(asked[0].options.generation)
    assert generation.pop("max_new_tokens") == 8
    assert generation == (
        {"rollback_threshold": 0.0} if "--rollback-threshold" in words else {"lossless": True}
    )
    assert asked[0].options.assistant == folders / "small"


def test_lower_layers_draft(text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    marian(0, layers=2).save_pretrained(tmp_path / "model")
    tokenizer_of().save_pretrained(tmp_path / "model")
    assert main(command(tmp_path / "model", text, tmp_path / "alone.txt", *NEW)) == 0
    assert (
        main(
            command(
                tmp_path / "model", text, tmp_path / "out.txt", *NEW, "--assistant-early-exit", "1"
            )
        )
        == 0
    )
    assert (tmp_path / "out.txt").read_text() == (tmp_path / "alone.txt").read_text()
    assert asked[-1].options.generation == {
        "max_new_tokens": 8,
        "assistant_early_exit": 1,
        "lossless": True,
    }
    assert "one by one" not in caplog.text


def test_another_on_error_goes_on_with_lines_of_text(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Resuming also works after a blank line, which no --on-error option handles."""
    (tmp_path / "in.txt").write_bytes(b"a\n\n\xff\nc\n")
    words = command(
        folders / "model", tmp_path / "in.txt", tmp_path / "out.txt", *NEW, "--block", "2"
    )
    assert main(words) == 2
    assert (
        "record 3: not UTF-8: invalid start byte at byte 0. The blocks before"
        in capsys.readouterr().err
    )
    assert main([*words, "--on-error", "empty"]) == 0
    assert [bool(line) for line in (tmp_path / "out.txt").read_text().split("\n")] == [
        True,
        False,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("on_error", ["fail", "skip", "empty"])
def test_a_blank_line_is_a_blank_line_of_the_output(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], on_error: str
) -> None:
    (tmp_path / "in.txt").write_text("One.\n\n \t\nTwo\n")
    words = [*NEW, "--on-error", on_error, "--summary", tmp_path / "summary.json"]
    one, two = (
        texts[0] for texts in by_transformers(folders / "model", ["One.", "Two"], max_new_tokens=8)
    )
    assert main(command(folders / "model", tmp_path / "in.txt", tmp_path / "out.txt", *words)) == 0
    assert (tmp_path / "out.txt").read_text() == f"{one_line(one)}\n\n\n{one_line(two)}\n"
    assert "2 of 4 records are blank lines, and so are their outputs" in capsys.readouterr().err
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["blank"], summary["problems"]) == (2, [])
    assert (
        main(command(folders / "model", tmp_path / "in.txt", tmp_path / "out.jsonl", *words)) == 0
    )
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").open()]
    assert [row["output"] for row in rows] == [one, "", "", two]
    assert not any(row.get("problem") for row in rows)


def test_a_blank_field_of_a_table_is_a_problem(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n{"text": " "}\n')
    words = command(
        folders / "model", tmp_path / "in.jsonl", tmp_path / "out.txt", *NEW, "--column", "text"
    )
    assert main(words) == 2
    assert "record 2: there is no text" in capsys.readouterr().err


# Output limits


def limits_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any]]:
    """Record the source width and the `max_new_tokens` of each call."""
    noted: list[tuple[int, Any]] = []
    generate = tf.MarianMTModel.generate

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        noted.append(
            (
                kwargs["input_ids"].shape[1] if "input_ids" in kwargs else 0,
                kwargs.get("max_new_tokens"),
            )
        )
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(tf.MarianMTModel, "generate", noting)
    return noted


def endless(folder: Path, place: Path, **stored: Any) -> Path:
    """Save a model that never ends an output by itself, with a generation config."""
    model = marian(0)
    model.generation_config.update(**stored)
    model.final_logits_bias[0, 1] = -1e4  # the bias of its end token
    model.save_pretrained(place)
    tokenizer_of().save_pretrained(place)
    return place


def test_without_a_limit_it_goes_by_the_source(
    folders: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limit is 200 tokens plus 2 per token of the longest source, within the positions."""
    model = endless(folders, tmp_path / "model")
    (tmp_path / "in.txt").write_text("seven..\n" + "x" * 60 + "\n")
    noted = limits_of(monkeypatch)
    words = [*("--summary", tmp_path / "summary.json"), "--batch-tokens", 64]
    assert main(command(model, tmp_path / "in.txt", tmp_path / "out.txt", *words)) == 0
    assert noted[-2:] == [(61, 255), (8, 216)]
    said = (
        "2 of 2 outputs hit the limit (200 tokens and 2 for each of a batch's longest source; "
        "--max-new-tokens N sets"
    )
    assert said in capsys.readouterr().err
    assert json.loads((tmp_path / "summary.json").read_text())["at_limit"] == 2
    assert main(command(model, tmp_path / "in.txt", tmp_path / "two.txt", *NEW)) == 0
    assert "2 of 2 outputs hit the limit (--max-new-tokens 8)\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stored", "words", "tokens", "said"),
    [
        (
            {"max_length": 9},
            [],
            8,
            "max_length=9 of the model's generation config; --max-new-tokens N sets another",
        ),
        (
            {"max_new_tokens": 7},
            [],
            7,
            "max_new_tokens=7 of the model's generation config; --max-new",
        ),
        ({"max_length": 9, "forced_eos_token_id": 1}, [], 7, "max_length=9 of the model's"),
        ({"max_length": 9}, ["--max-length", 6], 5, "--max-length 6"),
    ],
)
def test_a_limit_that_somebody_has_set_holds(
    folders: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    stored: dict[str, Any], words: list[object], tokens: int, said: str,
) -> None:  # fmt: skip
    model = endless(folders, tmp_path / "model", **stored)
    summary = tmp_path / "summary.json"
    assert main(command(model, text, tmp_path / "out.txt", *words, "--summary", summary)) == 0
    assert f"{len(LINES)} of {len(LINES)} outputs hit the limit ({said}" in capsys.readouterr().err
    assert json.loads(summary.read_text())["tokens"] <= tokens * len(LINES)


def test_a_limit_of_20_is_one_that_nobody_has_set(
    folders: Path, text: Path, tmp_path: Path
) -> None:
    model = endless(folders, tmp_path / "model", max_length=20)
    assert TextGenerator(Options(model)).limit.of(10) == 220


def test_outputs_that_end_by_themselves_hit_no_limit(folders: Path) -> None:
    generator = TextGenerator(
        Options(folders / "model", {"max_new_tokens": 4, "forced_bos_token_id": 1})
    )
    assert [one.at_limit for one in generator(["a"]) if isinstance(one, Output)] == [False]


def test_what_a_tokenizer_puts_behind_a_text_is_not_cut_off(folders: Path) -> None:
    generator = TextGenerator(
        Options(folders / "model", {"max_new_tokens": 4}, truncate=True, max_source_tokens=6)
    )
    end, language, unknown = generator.tokenizer.eos_token_id, 7, generator.tokenizer.unk_token_id
    generator._special |= {language}
    found = [
        generator._source("x", ids, 6)
        for ids in ([*range(8, 20), end, language], [*range(8, 20), unknown])
    ]
    assert [one.ids for one in found if isinstance(one, Source)] == [
        [8, 9, 10, 11, end, language],
        [*range(8, 14)],
    ]


def test_a_small_model_of_another_tokenizer(
    folders: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marian(1).save_pretrained(tmp_path / "other")
    other = tokenizer_of()
    other.add_tokens(["new"])
    other.save_pretrained(tmp_path / "other")
    assert (
        main(command(folders / "model", text, None, *NEW, "--assistant-model", tmp_path / "other"))
        == 2
    )
    assert (
        "needs two models of one tokenizer: 'new' is None to the large one"
        in capsys.readouterr().err
    )


def test_long_texts(folders: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "in.txt").write_text("short\n" + "x" * 300 + "\n")
    words = command(
        folders / "model", tmp_path / "in.txt", tmp_path / "out.jsonl", *NEW, "--on-error", "empty"
    )
    with caplog.at_level(logging.WARNING):
        assert main(words) == 0
    assert [json.loads(line)["problem"] for line in (tmp_path / "out.jsonl").open()] == [
        None,
        "301 tokens, 256 at most",
    ]
    assert {record.name for record in caplog.records} == {"fastgen"}, (
        "transformers says nothing of its own"
    )
    assert main([*words, "--overwrite", "--truncate", "--max-tokenizer-length", "40"]) == 0
    expected = by_transformers(folders / "model", ["short", "x" * 39], max_new_tokens=8)
    assert [[json.loads(line)["output"]] for line in (tmp_path / "out.jsonl").open()] == expected


def test_special_tokens_and_the_first_one(folders: Path, text: Path, tmp_path: Path) -> None:
    words = [
        *NEW,
        "--forced-bos-token",
        "Z",
        "--include-special-tokens",
        "--eos-token-id",
        "1",
        "60",
    ]
    assert main(command(folders / "model", text, tmp_path / "out.txt", *words)) == 0
    assert all(line.startswith("Z") for line in (tmp_path / "out.txt").read_text().splitlines())
    assert asked[0].options.special_tokens
    assert asked[0].options.generation["eos_token_id"] == [1, 60]


def test_languages_of_a_tokenizer_that_knows_none(
    folders: Path, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.tsv").write_text("lang\ttext\nde\ta\n")
    column = ["--column", "text", "--target-lang-column", "lang"]
    for file, words in (
        (text, ["--target-lang", "de"]),
        (text, ["--source-lang", "de"]),
        (tmp_path / "in.tsv", column),
    ):
        assert main(command(folders / "model", file, tmp_path / "out", *NEW, *words)) == 2
        assert "knows no languages" in capsys.readouterr().err


def test_warnings_that_say_nothing_are_not_said(
    folders: Path, text: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        generator = TextGenerator(Options(folders / "decoder", {"max_new_tokens": 4}))
        assert all(isinstance(one, Output) for one in generator(LINES))
    assert not caplog.records


# Metrics


def test_metrics_are_those_of_the_libraries(
    folders: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    references = tmp_path / "ref.txt"
    references.write_text("".join(f"{line}\n" for line in reversed(LINES)))
    words = [
        "--reference_path", references, "--metric", "bleu", "chrf", "rouge1", "rougeL",
        "--score_path", tmp_path / "scores.json",
    ]  # fmt: skip
    for name in ("out.txt", "out.jsonl", "out.csv", "out.parquet"):
        assert main(command(folders / "model", text, tmp_path / name, *NEW, *words)) == 0
        found = json.loads((tmp_path / "scores.json").read_text())
        texts = [one[0] for one in by_transformers(folders / "model", LINES, max_new_tokens=8)]
        texts = [one_line(one) for one in texts] if name == "out.txt" else texts
        expected = list(reversed(LINES))
        assert found["bleu"] == BLEU().corpus_score(texts, [expected]).score
        assert found["chrf"] == CHRF().corpus_score(texts, [expected]).score
        scorer = RougeScorer(["rouge1", "rougeL"], use_stemmer=True)
        each = [scorer.score(r, t) for r, t in zip(expected, texts, strict=True)]
        for metric in ("rouge1", "rougeL"):
            assert found[metric] == pytest.approx(20 * sum(one[metric].fmeasure for one in each))
        assert f"bleu {found['bleu']:.2f} (nrefs:1" in capsys.readouterr().out
    (tmp_path / "ref.txt").write_text("one\n")
    assert (
        main(
            command(folders / "model", text, tmp_path / "new.txt", *NEW, "--reference", references)
        )
        == 2
    )
    assert "has 1 references for 5 records" in capsys.readouterr().err


def test_references_of_a_column(
    folders: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "refs.txt").write_text("".join(f"{line}, yes\n" for line in LINES))
    (tmp_path / "refs.csv").write_text(
        "id,ref\n" + "".join(f'{i},"{line}, yes"\n' for i, line in enumerate(LINES))
    )
    (tmp_path / "refs.data").write_bytes((tmp_path / "refs.csv").read_bytes())
    scores: list[str] = []
    for words in (
        ["refs.txt"],
        ["refs.csv", "--reference-column", "ref"],
        ["refs.data", "--reference-format", "csv", "--reference-column", "ref"],
    ):
        reference = [
            "--reference",
            tmp_path / str(words[0]),
            *words[1:],
            "--metric",
            "chrf",
            "--overwrite",
        ]
        assert main(command(folders / "model", text, tmp_path / "out.txt", *NEW, *reference)) == 0
        scores.append(capsys.readouterr().out)
    assert scores[0].startswith("chrf ")
    assert len(set(scores)) == 1
    for words, said in (
        ([], "--reference-column is needed: "),
        (["--reference-column", "no"], "has no column 'no'; there are id, ref"),
        (
            ["--reference-column", "ref", "--reference-format", "text"],
            "--reference-column ref: lines of text have no",
        ),
    ):
        reference = ["--reference", tmp_path / "refs.csv", *words]
        assert main(command(folders / "model", text, tmp_path / "new.txt", *NEW, *reference)) == 2
        assert said in capsys.readouterr().err


def test_too_few_references_for_standard_input_keep_the_output(
    folders: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "in.txt").write_text("One.\nTwo\n")
    (tmp_path / "refs.txt").write_text("One.\n")
    with (tmp_path / "in.txt").open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        words = [*NEW, "--reference", tmp_path / "refs.txt"]
        assert main(command(folders / "model", Path("-"), tmp_path / "out.txt", *words)) == 1
    said = capsys.readouterr()
    assert "has 1 references for 2 records of the input; " in said.err
    assert said.out == ""
    assert len((tmp_path / "out.txt").read_text().splitlines()) == 2


# Options


def parsed(folders: Path, *words: str) -> dict[str, Any]:
    from fastgen.cli import _parser

    args = _parser("generate").parse_args(
        ["generate", str(folders / "model"), "--input", "x", *words]
    )
    return generation.requested(args)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--num-beams 4", {"num_beams": 4}),
        ("--num_beams=4", {"num_beams": 4}),
        ("--temperature 1", {"temperature": 1}),
        ("--do-sample --no-use-cache", {"do_sample": True, "use_cache": False}),
        ("--early-stopping never", {"early_stopping": "never"}),
        ("--early-stopping --num-beams 2", {"early_stopping": True, "num_beams": 2}),
        ("--no-early-stopping", {"early_stopping": False}),
        ("--eos-token-id 2", {"eos_token_id": 2}),
        ("--eos-token-id 2 3", {"eos_token_id": [2, 3]}),
        ("--suppress-tokens 5", {"suppress_tokens": [5]}),
        ("--suppress-tokens [5,6]", {"suppress_tokens": [5, 6]}),
        ("--bad-words-ids [[1,2],[3]]", {"bad_words_ids": [[1, 2], [3]]}),
        ("--bad-words-ids [1,2] [3]", {"bad_words_ids": [[1, 2], [3]]}),
        (
            "--exponential-decay-length-penalty 10 1.2",
            {"exponential_decay_length_penalty": [10, 1.2]},
        ),
        ("--sequence-bias [[[1,2],0.5]]", {"sequence_bias": [[[1, 2], 0.5]]}),
        ("--cache-implementation static", {"cache_implementation": "static"}),
        ("--max-gen-length 9 --min_gen_length 2", {"max_length": 9, "min_length": 2}),
        ("--n-best 3", {"num_return_sequences": 3}),
        (
            "--num-beam-groups 2 --diversity-penalty 0.5",
            {"num_beam_groups": 2, "diversity_penalty": 0.5},
        ),
        ("--force-words-ids [[5,6],[[7],[8]]]", {"force_words_ids": [[5, 6], [[7], [8]]]}),
        ("--penalty-alpha 0.6 --top-k 4", {"penalty_alpha": 0.6, "top_k": 4}),
    ],
)
def test_flags(folders: Path, words: str, expected: dict[str, Any]) -> None:
    assert parsed(folders, *words.split(" ")) == expected


def test_every_setting_of_transformers_is_a_flag_or_says_why_not() -> None:
    known = {name for name in vars(tf.GenerationConfig()) if not name.startswith("_")} - {
        "transformers_version"
    }
    flags = set(generation.settings())
    assert {"num_beams", "do_sample", "bad_words_ids", "watermarking_config"} < flags < known
    from fastgen.cli.generate.fastseq import DROPPED

    undocumented = {
        name
        for name in known - flags - set(generation.ELSEWHERE)
        if name.replace("_", "-") not in DROPPED
    }
    assert undocumented <= {"low_memory", "prefill_chunk_size", "continuous_batching_config"}


def test_a_generation_config(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: Path
) -> None:
    tf.GenerationConfig(num_beams=3, length_penalty=0.5, eos_token_id=[1, 2]).save_pretrained(
        tmp_path
    )
    file = str(tmp_path / "generation_config.json")
    expected = {"num_beams": 2, "length_penalty": 0.5, "eos_token_id": [1, 2]}
    assert parsed(folders, "--generation-config", file, "--num-beams", "2") == expected
    (tmp_path / "bad.json").write_text('{"num_beamz": 3}')
    assert (
        main(
            command(
                folders / "model",
                text,
                tmp_path / "o",
                "--generation-config",
                tmp_path / "bad.json",
            )
        )
        == 2
    )
    assert (
        "num_beamz is not an option here: transformers has no such option"
        in capsys.readouterr().err
    )


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*_: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("fastgen.corpus.models.load_model", loaded)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--num-beamz", "4"], "there is no option --num-beamz; there is --num-beams"),
        (["--bs", "8"], "--bs is not an option here: batches are sorted by length"),
        (["--stop-strings", "x"], "--stop-strings is not an option here: such an end"),
        (["--dola-layers", "low"], "transformers has removed it"),
        (
            ["--num-beams", "4", "--num-beam-groups", "3"],
            "num_beams=4 cannot be divided by num_beam_groups=3",
        ),
        (["more"], "'more' is not expected there"),
        (["--num-beams", "x"], "--num-beams x: must be int"),
        (["--num-beams", "0"], "--num-beams 0: must be at least 1, not 0"),
        (["--do-sample=3"], "ignored explicit argument"),
        (["--temperature", "hot"], "--temperature hot: must be float"),
        (["--eos-token-id", "x"], "--eos-token-id x: must be int or list"),
        (["--generation-config", "nothing.json"], "nothing.json cannot be read"),
        (["--n-best", "3"], "num_return_sequences"),
        (["--limit", "0"], "argument --limit/--n-obs: must be at least 1, not 0"),
        (["--batch-tokens", "x"], "argument --batch-tokens: must be a whole number, not 'x'"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0: must be at least 1, not 0"),
        (["--top-p", "1.5"], "--top-p 1.5: must be at least 0 and at most 1, not 1.5"),
        (["--do-sample", "--temperature", "0"], "--temperature 0: must be above 0, not 0"),
        (["--worker-cpus", "nan"], "argument --worker-cpus: must be above 0, not nan"),
        (["--column", "x"], "lines of text have no columns"),
        (["--input-format", "csv"], "--column is needed"),
        (
            ["--output-format", "parquet"],
            "--output-format parquet cannot be written to standard output",
        ),
        (["--metric", "bleu"], "--metric needs --reference"),
        (["--reference", "x"], "--reference: outputs on standard output"),
        (["--assistant-model", "nothing"], "nothing: there is no such folder"),
        (
            ["--fallback-threshold", "0.5"],
            "needs a small model, either --assistant-model or --assistant-early-exit",
        ),
        (
            ["--assistant-early-exit", "1", "--fallback-threshold", "2"],
            "--fallback-threshold is 2.0; it must be",
        ),
        (
            ["--assistant-early-exit", "1", "--lossless", "--scores"],
            "--scores: drafted texts have no scores",
        ),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(
    folders: Path, text: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert _status(lambda: main(command(folders / "model", text, None, *words))) == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("no_model")
def test_outputs_that_cannot_be(
    folders: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").write_text("kept")
    (tmp_path / "in.jsonl").write_text('{"text": "a", "output": "b"}\n')
    jsonl = tmp_path / "in.jsonl"
    for given, output, more, said in (
        (text, tmp_path / "there", [], "there exists already; --overwrite"),
        (text, text, ["--overwrite"], "is also an input"),
        (text, tmp_path / "no" / "o", [], "there is no folder"),
        (text, tmp_path, [], "is a folder"),
        (jsonl, tmp_path / "o.csv", ["--column", "text"], "objects of JSONL have no fixed columns"),
        (jsonl, tmp_path / "o.jsonl", ["--column", "text"], "has a column 'output' already"),
        (tmp_path / "nothing", tmp_path / "o", [], "nothing cannot be read: No such file"),
    ):
        assert main(command(folders / "model", given, output, *NEW, *more)) == 2
        assert said in capsys.readouterr().err
    assert main(command(folders / "decoder", text, tmp_path / "o", "--max-length", 8)) == 2
    assert "--max-new-tokens is required" in capsys.readouterr().err
    assert main(command(tmp_path, text, tmp_path / "o", *NEW)) == 2
    assert "holds no model" in capsys.readouterr().err
    assert (tmp_path / "there").read_text() == "kept"


def test_what_was_done_is_said(
    folders: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(folders / "model", text, tmp_path / "a.txt", *NEW)) == 0
    said = capsys.readouterr().err
    assert f"{len(LINES)} records, " in said
    assert "not accelerated" not in said
    assert main(command(folders / "model", text, tmp_path / "b.txt", *NEW, "--quiet")) == 0
    assert "records" not in capsys.readouterr().err
    with fastgen.disabled():
        assert main(command(folders / "model", text, tmp_path / "c.txt", *NEW)) == 0
    assert (tmp_path / "a.txt").read_bytes() == (tmp_path / "c.txt").read_bytes()


def test_what_was_not_accelerated_is_said(
    folders: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: Any) -> Any:
        raise Unsupported("no reason")

    monkeypatch.setattr("fastgen.patches.transformers.generate.generate.decide", refused)
    assert main(command(folders / "model", text, tmp_path / "a.txt", *NEW, "--num-beams", 2)) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "not accelerated, calls of transformers.beam_search: 1 (no reason)"


def test_what_a_model_cannot_have_is_said_once(
    folders: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(folders / "decoder", text, None, *NEW, "--min-length", 3)) == 2
    assert "min_length = 3 would count a prompt's padding" in capsys.readouterr().err


def test_a_torn_model_is_said(
    folders: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for torn, said in (
        ("model.safetensors", "the model cannot be loaded"),
        ("tokenizer.json", "its tokenizer cannot"),
    ):
        shutil.copytree(folders / "model", tmp_path / torn)
        file = tmp_path / torn / torn
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        assert main(command(tmp_path / torn, text, None, *NEW)) == 2
        assert said in capsys.readouterr().err


def test_too_many_references_are_said_first(
    folders: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fastgen.corpus.models.load_model", None)
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps({"text": line}) + "\n\n" for line in LINES)
    )
    (tmp_path / "references").write_text("one\n" * (len(LINES) + 1))
    words = ["--reference", tmp_path / "references"]
    for file, column in ((text, []), (tmp_path / "in.jsonl", ["--column", "text"])):
        assert (
            main(command(folders / "model", file, tmp_path / "out.txt", *NEW, *words, *column)) == 2
        )
        assert (
            f"has {len(LINES) + 1} references for {len(LINES)} records" in capsys.readouterr().err
        )
    words = ["--summary", tmp_path / "nowhere" / "summary.json"]
    assert main(command(folders / "model", text, tmp_path / "out.txt", *NEW, *words)) == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "OutOfMemoryError: CUDA out of memory"),
        (MemoryError("no room"), "MemoryError: no room"),
        (torch.AcceleratorError("device-side assert"), "AcceleratorError: device-side assert"),
    ],
)
def test_a_failing_machine_is_no_problem_of_a_text(
    folders: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], error: Exception, said: str,
) -> None:  # fmt: skip
    def failing(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(TextGenerator, "_sequences", failing)
    assert (
        main(command(folders / "model", text, tmp_path / "out.txt", *NEW, "--on-error", "empty"))
        == 2
    )
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out.txt").exists()


def test_the_other_commands_take_no_toolkit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--help"])
    assert done.value.code == 0
    assert "generate for every text of a file" in capsys.readouterr().out


def _status(run: Callable[[], int]) -> int:
    try:
        return run()
    except SystemExit as done:
        return int(done.code or 0)
