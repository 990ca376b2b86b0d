"""A target language or first token for each text: in corpora, Ray stages and server requests."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import fastgen
from fastgen.cli import main
from fastgen.corpus.texts import Options, Output, Problem, TextGenerator
from fastgen.errors import CommandError

CODES = ["eng_Latn", "fra_Latn", "deu_Latn", "spa_Latn"]
LINES = ["one of them", "a second, longer line of text", "three", "and four", "five in all"]
TARGETS = ["fra_Latn", "deu_Latn", "fra_Latn", "spa_Latn", "deu_Latn"]
GENERATION: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 8, "no_repeat_ngram_size": 2}
BEAMS = [
    "--num-beams",
    "3",
    "--max-new-tokens",
    "8",
    "--no-repeat-ngram-size",
    "2",
    "--dtype",
    "float64",
]


def _save(folder: Path, tokenizer: Any, config: Any, kind: Any) -> Path:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": len(tokenizer), "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
        "init_std": 0.5, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
        "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 128,
        "pad_token_id": tokenizer.pad_token_id, "bos_token_id": 0,
        "eos_token_id": tokenizer.eos_token_id, "decoder_start_token_id": tokenizer.eos_token_id,
        "forced_eos_token_id": None,
    }  # fmt: skip
    kind(config(**sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def nllb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a toy with an NLLB tokenizer: four languages, and a piece `fr` that is not one."""
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz,.", "fr"]
    tokenizer = tf.NllbTokenizer(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=[("f", "r")],
        extra_special_tokens=CODES,
    )
    folder = tmp_path_factory.mktemp("nllb")
    return _save(folder, tokenizer, tf.M2M100Config, tf.M2M100ForConditionalGeneration)


@pytest.fixture(scope="module")
def mbart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _save(
        tmp_path_factory.mktemp("mbart"),
        tf.MBartTokenizer(),
        tf.MBartConfig,
        tf.MBartForConditionalGeneration,
    )


@pytest.fixture(scope="module")
def alone(nllb: Path) -> list[str]:
    """Return what unpatched transformers generates for each line alone, in its language."""
    tokenizer = tf.AutoTokenizer.from_pretrained(nllb)
    model = tf.M2M100ForConditionalGeneration.from_pretrained(nllb, dtype=torch.float64)
    found = list[str]()
    for line, target in zip(LINES, TARGETS, strict=True):
        first = tokenizer.convert_tokens_to_ids(target)
        with fastgen.disabled():
            ids = model.generate(
                **tokenizer([line], return_tensors="pt"), **GENERATION, forced_bos_token_id=first
            )
        found.append(tokenizer.batch_decode(ids, skip_special_tokens=True)[0].strip())
    return found


def _table(folder: Path, targets: list[Any], lines: list[str] = LINES) -> Path:
    file = folder / "in.jsonl"
    rows = [{"lang": target, "line": line} for target, line in zip(targets, lines, strict=True)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def _command(model: Path, file: Path, *words: str) -> list[str]:
    output = file.with_name("out.jsonl")
    return [
        "generate",
        str(model),
        "--input",
        str(file),
        "--output",
        str(output),
        "--column",
        "line",
        *BEAMS,
        *words,
    ]


def _rows(folder: Path, column: str = "output") -> list[Any]:
    return [json.loads(line)[column] for line in (folder / "out.jsonl").open()]


@pytest.mark.parametrize("option", ["--target-lang-column", "--forced-bos-column"])
def test_each_record_in_its_language(
    nllb: Path, alone: list[str], tmp_path: Path, option: str
) -> None:
    """Each block mixes languages and is one batch."""
    before = {row.name: row.hits for row in fastgen.status().rows}
    assert main(_command(nllb, _table(tmp_path, TARGETS), option, "lang", "--block", "3")) == 0
    assert _rows(tmp_path) == alone
    searches = (
        fastgen.status()["transformers.beam_search"].hits - before["transformers.beam_search"]
    )
    assert searches == 2


def test_a_small_model_drafts_for_each_language(nllb: Path, tmp_path: Path) -> None:
    words = ["--num-beams", "1", "--target-lang-column", "lang"]
    assert main(_command(nllb, _table(tmp_path, TARGETS), *words)) == 0
    plain = _rows(tmp_path)
    assert (
        main(
            _command(
                nllb,
                _table(tmp_path, TARGETS),
                *words,
                "--assistant-model",
                str(nllb),
                "--overwrite",
            )
        )
        == 0
    )
    assert _rows(tmp_path) == plain


def test_an_unknown_language_is_a_problem_of_its_record(
    nllb: Path, alone: list[str], tmp_path: Path
) -> None:
    """A piece of a word is a token, but not a language."""
    targets = [*TARGETS[:1], "fr", None, "", TARGETS[4]]
    words = _command(nllb, _table(tmp_path, targets), "--target-lang-column", "lang")
    assert main(words) == 2
    assert main([*words, "--on-error", "empty", "--restart"]) == 0
    assert _rows(tmp_path) == [alone[0], None, None, None, alone[4]]
    assert _rows(tmp_path, "problem") == [
        None, f"'fr' is no language of {nllb}", "'lang' is empty or missing",
        f"'' is no language of {nllb}", None,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--target-lang-column", "language"], "has no column 'language'; there are lang, line"),
        (
            ["--target-lang-column", "lang", "--target-lang", "fra_Latn"],
            "--target-lang-column and --target-lang:",
        ),
        (
            ["--forced-bos-column", "lang", "--target-lang-column", "lang"],
            "column and --forced-bos-column:",
        ),
        (
            ["--forced-bos-column", "lang", "--forced-bos-token-id", "5"],
            "column and --forced-bos-token-id:",
        ),
        (["--forced-bos-column", "lang", "--input-format", "text"], "lines of text have no column"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(
    nllb: Path, tmp_path: Path, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("fastgen.corpus.models.load_model", None)
    command = _command(nllb, _table(tmp_path, TARGETS), *words)
    if "text" in words:
        command = [word for word in command if word not in ("--column", "line")]
    assert main(command) == 2
    assert said in capsys.readouterr().err


def test_the_column_is_the_run_s_own(
    nllb: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = _command(nllb, _table(tmp_path, [*TARGETS[:4], "xx"]), "--block", "2")
    assert main([*words, "--target-lang-column", "lang"]) == 2
    assert "record 5: 'xx' is no language" in capsys.readouterr().err
    assert main([*words, "--forced-bos-column", "lang"]) == 2
    assert "options.targets was language and is token" in capsys.readouterr().err
    assert main([*words, "--target-lang-column", "1"]) == 2
    assert "source.target_column was lang and is 1" in capsys.readouterr().err


def test_the_first_mbart_has_one_for_all(
    mbart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = _table(tmp_path, ["de_DE"] * 5)
    assert main(_command(mbart, file, "--target-lang-column", "lang")) == 2
    assert (
        "the language in the place of the start token, of which there is one for all"
        in capsys.readouterr().err
    )
    assert main(_command(mbart, file, "--target-lang", "xx_YY")) == 2
    assert "--target-lang 'xx_YY' is no language of" in capsys.readouterr().err
    generator = TextGenerator(Options(mbart, {"max_new_tokens": 3}, target_lang="de_DE"))
    assert generator.generation[
        "decoder_start_token_id"
    ] == generator.tokenizer.convert_tokens_to_ids("de_DE")


def test_a_stage_of_ray(nllb: Path, alone: list[str]) -> None:
    pytest.importorskip("ray", reason="needs fastgen[ray]")
    import pyarrow as pa

    from fastgen.ray import Generator

    arguments: dict[str, Any] = {"generation": GENERATION, "dtype": "float64"}
    stage = Generator(nllb, column="line", target_column="lang", targets="language", **arguments)
    made = stage(pa.table({"line": LINES, "lang": ["fra_Latn", None, *TARGETS[2:]]}))
    assert made["output"].to_pylist() == [alone[0], "", *alone[2:]]
    assert made["problem"].to_pylist()[1] == f"'' is no language of {nllb}"
    with pytest.raises(ValueError, match="there is no column 'lang', but 'line'"):
        stage(pa.table({"line": LINES}))
    with pytest.raises(
        ValueError, match="target_column=None and targets='token': they go together"
    ):
        Generator(nllb, targets="token")
    with pytest.raises(CommandError, match="targets='lang' must be 'language' or 'token'"):
        Generator(nllb, target_column="lang", targets="lang")


def test_requests_of_several_languages_are_one_batch(
    nllb: Path, mbart: Path, alone: list[str]
) -> None:
    pytest.importorskip("ray.serve", reason="needs fastgen[ray]")
    from fastgen.ray.server.api import Answer, Api
    from fastgen.ray.settings import Settings

    def asked(api: Api, line: str, **options: Any) -> Any:
        return api("POST", "/generate", json.dumps({"text": line, "options": options}).encode())

    api = Api(Settings(model=nllb, generation=GENERATION, dtype="float64", source_lang="eng_Latn"))
    only = TextGenerator(Options(nllb, GENERATION, dtype="float64"))(LINES[:1])
    kinds = ["target_lang", "forced_bos_token", "target_lang", "target_lang", "forced_bos_token"]

    async def all_of_them() -> list[Answer]:
        named = [
            asked(api, line, **{kind: t})
            for line, kind, t in zip(LINES, kinds, TARGETS, strict=True)
        ]
        return await asyncio.gather(*named, asked(api, LINES[0]))

    *answers, plain = asyncio.run(all_of_them())
    assert [answer.content["output"] for answer in answers] == alone
    assert isinstance(only[0], Output)
    assert plain.content["output"] == only[0].texts[0]  # its first token is the model's choice
    assert api.batcher.batches == 2
    for options, said in (
        ({"target_lang": "fr"}, "'fr' is no language of"),
        ({"forced_bos_token": "François"}, "'François' is no token of"),
        (
            {"target_lang": "fra_Latn", "forced_bos_token": "fr"},
            "either target_lang or forced_bos_token",
        ),
    ):
        refused = asyncio.run(asked(api, "one", **options))
        assert refused.status == 400
        assert said in refused.content["error"]
    of_mbart = Api(Settings(model=mbart, generation={"max_new_tokens": 2}))
    assert (
        "in the place of the start token"
        in asyncio.run(asked(of_mbart, "one", target_lang="de_DE")).content["error"]
    )


def test_languages_of_tokenizers(nllb: Path) -> None:
    """NLLB's languages are special tokens; other tokenizers have tables of them."""
    generator = TextGenerator(Options(nllb, {"max_new_tokens": 3}, targets="language"))
    found = generator.encode(["a", "b", " "], ["deu_Latn", "xx", "deu_Latn"])
    assert getattr(found[0], "first", None) == generator.tokenizer.convert_tokens_to_ids("deu_Latn")
    assert found[1:] == [Problem(f"'xx' is no language of {nllb}"), Problem("there is no text")]
    with pytest.raises(CommandError, match="--source-lang 'fr' is no language of"):
        TextGenerator(Options(nllb, {}, source_lang="fr"))
    generator.tokenizer.lang_code_to_token = {"xx": "deu_Latn"}
    assert generator.names.language("xx") == generator.names.language("deu_Latn")
