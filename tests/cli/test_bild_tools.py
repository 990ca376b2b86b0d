"""The tools of big-little decoding at toy size: `fastgen bild align`, `tune`, and the benchmark."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
)

import fastgen
from benchmarks import bild as benchmark
from benchmarks import plot
from fastgen import config
from fastgen.cli import main
from fastgen.cli.bild import align, outputs, pair, sweep, tune
from fastgen.cli.bild.finetune import collate, examples
from fastgen.cli.generate import quality
from fastgen.corpus.models import load_tokenizer
from fastgen.corpus.run.identity import digest
from fastgen.errors import CommandError

LINES = [
    "a dog runs",
    "two men sit on a bench",
    "",
    "the cat",
    "a girl in a red coat",
    "one",
    "snow falls on a town",
]
SOURCES = [line for line in LINES if line]
NEW = 8


def tokenizer_of(words: str = "</s>") -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes that adds no end token."""
    pieces = ["<pad>", words, "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token=words,
        unk_token="<unk>",
        padding_side="left",
    )


def marian(width: int, seed: int) -> MarianMTModel:
    torch.manual_seed(seed)
    shape = MarianConfig(
        vocab_size=259, d_model=width, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16,
        decoder_ffn_dim=16, max_position_embeddings=64, init_std=0.5, pad_token_id=0,
        bos_token_id=0, eos_token_id=1, decoder_start_token_id=0, forced_eos_token_id=None,
        dropout=0.0,
    )  # fmt: skip
    return MarianMTModel(shape).eval()


def llama(width: int, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = LlamaConfig(
        vocab_size=259, hidden_size=width, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, initializer_range=0.5, pad_token_id=0, bos_token_id=0,
        eos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(shape).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a large and a small model of each kind, and the texts."""
    place = tmp_path_factory.mktemp("pair")
    for kind, build in (("marian", marian), ("llama", llama)):
        for name, width, seed in (("large", 16, 0), ("small", 8, 1)):
            model: Any = build(width, seed)
            model.generation_config.max_length = 60
            if name == "small":
                model.half()
            model.save_pretrained(place / f"{kind}-{name}")
            tokenizer_of().save_pretrained(place / f"{kind}-{name}")
    (place / "text").write_text("\n".join(LINES) + "\n", "utf-8")
    (place / "reference").write_text("\n".join(LINES).upper() + "\n", "utf-8")
    return place


def words(folder: Path, tool: str, output: Path, *more: object, kind: str = "marian") -> list[str]:
    given = [
        "bild",
        tool,
        folder / f"{kind}-large",
        folder / f"{kind}-small",
        "--input",
        folder / "text",
    ]
    given += ["--output", output, "--max-new-tokens", NEW, "--threads", 1, "--device", "cpu", *more]
    return [str(word) for word in given]


def run_align(folder: Path, output: Path, *more: object, kind: str = "marian") -> int:
    return main(words(folder, "align", output, "--append-eos", "--max-steps", 2, *more, kind=kind))


def run_tune(folder: Path, output: Path, *more: object, kind: str = "marian") -> int:
    sweep_of = (
        "--fallback",
        0.01,
        0.9,
        "--rollback",
        3,
        "--rounds",
        2,
        "--reference",
        folder / "reference",
    )
    return main(words(folder, "tune", output, "--append-eos", *sweep_of, *more, kind=kind))


def encoded() -> list[list[int]]:
    return [[*tokenizer_of()(line)["input_ids"], 1] for line in SOURCES]


def loss_of(model: Any, data: list[dict[str, list[int]]]) -> float:
    with torch.no_grad():
        return float(model.float()(**collate(data, 0)).loss)


# Alignment


@pytest.mark.parametrize("kind", ["marian", "llama"])
def test_the_small_model_learns_what_the_large_one_writes(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    options = ("--max-steps", 40, "--learning-rate", 0.01)
    assert run_align(folder, tmp_path / "aligned", *options, kind=kind) == 0
    large, small, aligned = (
        pair.load_model(path, "cpu", "float32")
        for path in (folder / f"{kind}-large", folder / f"{kind}-small", tmp_path / "aligned")
    )
    header, *written = map(
        json.loads, (tmp_path / "aligned.outputs.jsonl").read_text().splitlines()
    )
    assert header["lines"] == len(SOURCES) == len(written), "blank lines are left out"
    for source, tokens in zip(encoded(), written, strict=True):
        with fastgen.disabled():
            stock = large.generate(torch.tensor([source]), max_new_tokens=NEW, do_sample=False)
        assert tokens == stock[0].tolist()

    data = examples(encoded(), written, kind == "marian")
    assert loss_of(aligned, data) < 0.7 * loss_of(small, data)
    stored = json.loads((tmp_path / "aligned" / "config.json").read_text())
    assert stored["dtype"] == "float16", "as the small model was stored"
    assert aligned.generation_config.max_length == 60
    assert load_tokenizer(tmp_path / "aligned").get_vocab() == tokenizer_of().get_vocab()
    record = json.loads((tmp_path / "aligned" / align.RECORD).read_text())
    assert record["outputs"] == header
    assert record["log"][-1]["step"] == 40
    assert not list(tmp_path.glob("*.part"))


def test_what_is_learnt() -> None:
    sources, written = [[5, 6, 1], [7, 1]], [[0, 8, 9, 1], [0, 8, 1]]
    batch = collate(examples(sources, written, True), pad=0)
    assert batch["input_ids"].tolist() == [[5, 6, 1], [7, 1, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["decoder_input_ids"].tolist() == [[0, 8, 9], [0, 8, 0]]
    assert batch["labels"].tolist() == [[8, 9, 1], [8, 1, -100]]

    prompts, texts = [[5, 6], [7]], [[5, 6, 8, 1], [7, 9]]
    batch = collate(examples(prompts, texts, False), pad=3)
    assert batch["input_ids"].tolist() == [[5, 6, 8, 1], [7, 9, 3, 3]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 8, 1], [-100, 9, -100, -100]]


def test_label_smoothing_and_seed_change_what_is_learnt(folder: Path, tmp_path: Path) -> None:
    weights = {}
    for name, more in {"plain": (), "again": (), "smooth": ("--label-smoothing", 0.5)}.items():
        assert run_align(folder, tmp_path / name, *more) == 0
        weights[name] = pair.load_model(tmp_path / name, "cpu", "float32").lm_head.weight
    assert torch.equal(weights["plain"], weights["again"])
    assert not torch.equal(weights["plain"], weights["smooth"])


HEADER = {"large": "1", "lines": 5, "max_new_tokens": 8}


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """A run that was killed during a write resumes after what was written."""
    file = tmp_path / "o.jsonl"
    code = (
        "import os, signal, sys, pathlib\n"
        "from fastgen.cli.bild import outputs\n"
        "def make(done):\n"
        "    yield from ([done, i] for i in range(3))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        f"outputs.finished(pathlib.Path({str(file)!r}), {HEADER!r}, make, restart=False)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, env=os.environ | {"FASTGEN": "0"}
    )
    assert done.returncode == -signal.SIGKILL
    assert not file.exists()
    part = tmp_path / "o.jsonl.part"
    with part.open("ab") as stream:
        stream.write(b"[4" + b",4" * 50)  # an incomplete line
    asked = []

    def make(at: int) -> Iterator[list[int]]:
        asked.append(at)
        yield from ([at, i] for i in range(2))

    expected = [[0, 0], [0, 1], [0, 2], [3, 0], [3, 1]]
    assert outputs.finished(file, HEADER, make, restart=False) == expected
    assert asked == [3]
    assert not part.exists()
    assert file.read_text().splitlines()[-1] == "[3,1]", "the line that was being written is gone"
    assert outputs.finished(file, HEADER, make, restart=False) == expected
    assert asked == [3], "a whole file is read"
    assert (
        outputs.finished(file, HEADER, lambda at: ([at] for _ in range(5)), restart=True)
        == [[0]] * 5
    )


def test_a_run_that_failed_goes_on_with_the_same_result(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_align(folder, tmp_path / "whole") == 0
    generated = align._generated

    def failing(large: Any, sources: Any, done: int, args: Any) -> Iterator[list[int]]:
        for count, tokens in enumerate(generated(large, sources, done, args)):
            if count == 4:
                raise KeyboardInterrupt
            yield tokens

    monkeypatch.setattr(align, "_generated", failing)
    assert run_align(folder, tmp_path / "broken") == 130
    assert not (tmp_path / "broken").exists()
    monkeypatch.undo()
    assert run_align(folder, tmp_path / "broken", "--max-new-tokens", NEW + 1) == 2
    assert f"max_new_tokens was {NEW} and is {NEW + 1}" in capsys.readouterr().err
    assert run_align(folder, tmp_path / "broken") == 0
    assert "continues after line 4 of 6" in capsys.readouterr().out
    whole, broken = (
        (tmp_path / f"{name}.outputs.jsonl").read_text() for name in ("whole", "broken")
    )
    assert whole == broken


def test_what_has_changed_is_said(tmp_path: Path) -> None:
    file = tmp_path / "o.jsonl"
    outputs.finished(file, HEADER, lambda at: ([at] for _ in range(5)), restart=False)
    changed = HEADER | {"large": "2", "new": True}
    with pytest.raises(
        CommandError, match=r"large was 1 and is 2; new was not there and is True\. --restart"
    ):
        outputs.finished(file, changed, lambda at: (), restart=False)
    file.write_bytes(b"\n".join(file.read_bytes().split(b"\n")[:-2]) + b"\n")
    with pytest.raises(CommandError, match="holds 4 outputs of 5"):
        outputs.finished(file, HEADER, lambda at: (), restart=False)
    file.write_text("no outputs\n")
    with pytest.raises(CommandError, match="does not hold outputs"):
        outputs.finished(file, HEADER, lambda at: (), restart=False)


def test_changed_weights_and_texts_are_noticed(folder: Path, tmp_path: Path) -> None:
    model, text = tmp_path / "model", tmp_path / "text"
    marian(16, 0).save_pretrained(model)
    text.write_text("a")
    before = digest(model), digest(text)
    (model / "README.md").write_text("of no weight")
    assert digest(model) == before[0]
    marian(16, 5).save_pretrained(model)
    text.write_text("b")
    assert digest(model) != before[0]
    assert digest(text) != before[1]


# User errors


def test_what_is_wrong_is_said_before_anything_is_done(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def says(message: str, *more: object) -> None:
        assert run_align(folder, tmp_path / "new", *more) == 2
        assert message in capsys.readouterr().err
        assert not list(tmp_path.glob("new*"))

    says("there is no folder ", "--output", tmp_path / "nowhere" / "new")
    says("exists: name a new folder", "--output", folder)
    says("cannot be read: No such file", "--input", tmp_path / "nothing")
    (tmp_path / "empty").write_text("\n \n")
    says("empty is empty", "--input", tmp_path / "empty")
    (tmp_path / "latin").write_bytes(b"one\ntwo\nGr\xfc\xdfe\n")
    says("latin, line 3: not UTF-8 (invalid start byte at byte 2)", "--input", tmp_path / "latin")
    if not torch.cuda.is_available():
        says("--device cuda:", "--device", "cuda")

    for name in ("large", "small"):
        given = words(folder, "align", tmp_path / "new")
        given[2 + (name == "small")] = str(tmp_path / "missing")
        assert main(given) == 2
        assert "missing: there is no such folder" in capsys.readouterr().err
    (tmp_path / "hollow").mkdir()
    given[3] = str(tmp_path / "hollow")
    assert main(given) == 2
    assert "config.json is missing" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run_align(folder, tmp_path / "new", "--epochs", 0)
    assert "must be above 0, not 0" in capsys.readouterr().err


def test_other_tokenizers_and_a_missing_package_are_said(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    marian(8, 1).save_pretrained(tmp_path / "other")
    tokenizer_of("<end>").save_pretrained(tmp_path / "other")
    for tool, more in (("align", []), ("tune", ["--reference", str(folder / "reference")])):
        given = words(folder, tool, tmp_path / "new", *more)
        given[3] = str(tmp_path / "other")
        assert main(given) == 2
        assert "'</s>' is 1 to the large one and None to the small one" in capsys.readouterr().err
    monkeypatch.setattr(
        "fastgen.corpus.models.find_spec", lambda name: None if name == "accelerate" else name
    )
    assert run_align(folder, tmp_path / "new") == 2
    assert 'needs accelerate: pip install "accelerate>=1.1"' in capsys.readouterr().err
    assert not list(tmp_path.glob("new*"))


def test_lines_and_end_tokens(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbfone\r\ntwo\xe2\x80\xa8still two\n\nfour")
    assert pair.read_lines(tmp_path / "text") == ["one", "two\u2028still two", "", "four"]
    tokenizer = tokenizer_of()
    assert pair.encode(tokenizer, ["ab"], False, None)[0] == tokenizer("ab")["input_ids"]
    assert pair.encode(tokenizer, ["ab", "abcdef"], True, 3) == [
        [*tokenizer("ab")["input_ids"], 1],
        [*tokenizer("ab")["input_ids"], 1],
    ]
    with pytest.raises(CommandError, match="ends 'a</s>' with '</s>' already"):
        pair.encode(tokenizer, ["a</s>"], True, None)
    with pytest.raises(CommandError, match="'' has no tokens"):
        pair.encode(tokenizer, ["a", ""], False, None)


# Tuning


def point(rollback: float | None, quality: float, ratio: float, low: float) -> dict[str, Any]:
    return {
        "fallback": 0.5,
        "rollback": rollback,
        "max_draft": 10,
        "quality": quality,
        "ratio": ratio,
        "low": low,
    }


@pytest.mark.parametrize(
    ("max_loss", "chosen"),
    [(0.0, 1.3), (0.5, 1.5), (1.0, 1.8), (5.0, 2.5)],
    ids=["none", "half", "one", "five"],
)
def test_the_fastest_point_within_the_loss_is_chosen(max_loss: float, chosen: float) -> None:
    points = [
        point(None, 30.0, 1.2, 1.1), point(1.0, 30.2, 1.3, 1.2), point(2.0, 29.6, 1.5, 1.4),
        point(3.0, 29.0, 1.8, 1.6), point(5.0, 26.0, 2.5, 2.4), point(6.0, 30.0, 2.6, 0.9),
    ]  # fmt: skip
    found = tune.choose(points, 30.0, max_loss)
    assert found is not None
    assert found["ratio"] == chosen


def test_nothing_is_chosen_that_is_not_faster() -> None:
    assert (
        tune.choose([point(None, 30.0, 1.1, 0.99), point(2.0, 31.0, 0.7, 0.6)], 30.0, 1.0) is None
    )
    assert tune.choose([point(2.0, 28.0, 1.7, 1.6)], 30.0, 1.0) is None


@pytest.mark.parametrize(("kind", "size"), [("marian", 1), ("marian", 4), ("llama", 4)])
def test_a_sweep_ends_in_a_config_that_generate_honours(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    size: int,
) -> None:
    monkeypatch.setattr(sweep, "paired_ratio", lambda baseline, seconds: (2.0, 1.5, 2.5))
    options = ("--batch-size", size, "--max-loss", 0, "--max-draft", 4, "--metric", "chrf")
    assert run_tune(folder, tmp_path / "c.json", *options, kind=kind) == 0
    data = json.loads((tmp_path / "c.sweep.json").read_text())
    assert [(p["fallback"], p["rollback"]) for p in data["points"]] == [
        (0.01, 3),
        (0.01, None),
        (0.9, 3),
        (0.9, None),
    ]
    assert data["lines"] == len(SOURCES)
    for measured in data["points"]:
        assert len(measured["seconds"]) == len(data["large"]["seconds"]) == 2
        assert min(measured["seconds"]) > 0
        if measured["rollback"] is None:
            assert measured["quality"] == data["large"]["quality"]
    drafted = [measured["counts"]["drafted"] for measured in data["points"]]
    assert drafted[1] > drafted[3], "a low threshold drafts more"
    chosen = data["chosen"]
    assert chosen == next(p for p in data["points"] if p["quality"] >= data["large"]["quality"])
    assert "lossless" in capsys.readouterr().out
    assert (tmp_path / "c.sweep.svg").read_text().count("<svg") == 1

    tuned = GenerationConfig.from_pretrained(tmp_path, config_file_name="c.json")
    assert tuned.fallback_threshold == chosen["fallback"]
    assert tuned.max_draft == 4
    large, small = (
        pair.load_model(folder / f"{kind}-{name}", "cpu", "float32") for name in ("large", "small")
    )
    inputs = sweep.batches_of(encoded(), 6, large)[0].inputs
    call = {
        "assistant_model": small,
        "max_new_tokens": NEW,
        "return_dict_in_generate": True,
        "adaptive_draft": False,
    }
    found = large.generate(**inputs, generation_config=tuned, **call)
    given = sweep.Point(chosen["fallback"], chosen["rollback"], 4).options
    expected = large.generate(**inputs, **call, **given)
    assert torch.equal(found.sequences, expected.sequences)
    assert {name: c.tolist() for name, c in found.bild.items()} == {
        n: c.tolist() for n, c in expected.bild.items()
    }


def test_where_nothing_is_faster_no_config_is_written(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sweep, "paired_ratio", lambda baseline, seconds: (0.9, 0.8, 1.0))
    assert run_tune(folder, tmp_path / "tuned") == 1
    assert "nothing is faster than the large model alone without a loss" in capsys.readouterr().out
    assert [file.name for file in (tmp_path / "tuned").iterdir()] == [
        "generation_config.sweep.json"
    ]


def test_a_tuned_config_can_be_tuned_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings that an earlier tuning left in the large model's config are not measured."""
    model = marian(16, 0)
    model.generation_config.num_beams = 4
    vars(model.generation_config).update(
        lossless=True,
        fallback_threshold=1.0,
        speculative_beams=1,
        length_penalty=2.0,
        _from_model_config=False,
    )
    model.save_pretrained(tmp_path / "large")
    tokenizer_of().save_pretrained(tmp_path / "large")
    monkeypatch.setattr(sweep, "paired_ratio", lambda baseline, seconds: (2.0, 1.5, 2.5))
    given = words(
        folder,
        "tune",
        tmp_path / "large",
        "--reference",
        folder / "reference",
        "--fallback",
        "0.01",
    )
    given[2] = str(tmp_path / "large")
    assert main([*given, "--rollback", "99", "--max-loss", "100", "--rounds", "1"]) == 0
    free, lossless = json.loads((tmp_path / "large" / "generation_config.sweep.json").read_text())[
        "points"
    ]
    assert free["counts"]["rollbacks"] == 0
    assert lossless["counts"]["rollbacks"] > 0
    tuned = GenerationConfig.from_pretrained(tmp_path / "large")
    assert tuned.rollback_threshold == 99
    assert tuned.num_beams == 1
    assert getattr(tuned, "lossless", None) is None
    large, small = MarianMTModel.from_pretrained(tmp_path / "large").eval(), marian(8, 1)
    call = {"assistant_model": small, "max_new_tokens": NEW, "return_dict_in_generate": True}
    assert large.generate(torch.tensor([[5, 6, 1]]), **call).bild["tokens"].item() == NEW


def test_texts_come_back_in_the_order_of_the_file(folder: Path) -> None:
    for kind, side in (("marian", -1), ("llama", 0)):
        large = pair.load_model(folder / f"{kind}-large", "cpu", "float32")
        sources = encoded()
        batches = sweep.batches_of(sources, 4, large)
        assert sorted(place for batch in batches for place in batch.places) == list(range(6))
        assert (batches[0].inputs["attention_mask"][0, side] == 0).item()
        copy = {"copy": lambda batch: torch.cat([batch.inputs["input_ids"]] * 2, 1)}
        found = sweep.measure(copy, batches, 1)["copy"]
        once = sweep.texts_of(found, batches, tokenizer_of(), encoder_decoder=False)
        assert once == SOURCES


def test_tune_refuses_texts_that_do_not_match(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short").write_text("a\nb\n")
    assert run_tune(folder, tmp_path / "c.json", "--reference", tmp_path / "short") == 2
    assert "has 7 lines" in capsys.readouterr().err
    assert run_tune(folder, tmp_path / "short") == 2
    assert "is a file, not a folder or CONFIG.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("FASTGEN", "0", "FASTGEN=0 disables"),
        ("FASTGEN_STEP", "module", "needs decode steps from the weights"),
    ],
)
def test_what_cannot_be_measured_is_said(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], variable: str, value: str, message: str,
) -> None:  # fmt: skip
    monkeypatch.setenv(variable, value)
    config.reload()
    try:
        assert run_tune(folder, tmp_path / "c.json") == 2
    finally:
        monkeypatch.undo()
        config.reload()
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_generation_config_that_cannot_be_written_is_said(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error comes before any training."""
    marian(8, 1).save_pretrained(tmp_path / "small")
    tokenizer_of().save_pretrained(tmp_path / "small")
    (tmp_path / "small" / "generation_config.json").write_text(
        '{"do_sample": false, "temperature": 0.5}'
    )
    given = words(folder, "align", tmp_path / "new")
    given[3] = str(tmp_path / "small")
    assert main(given) == 2
    assert "its generation config cannot be rewritten" in capsys.readouterr().err


def test_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bleu", "chrf"):
        metric = quality.METRICS[name]()
        same, other = ["a b c d e"], ["a b c x y"]
        assert metric.score(same, same) == pytest.approx(100)
        assert metric.score(other, same) < 90
        assert metric.signature.startswith("nrefs:1")
    monkeypatch.setattr("fastgen.corpus.models.find_spec", lambda name: None)
    with pytest.raises(
        CommandError, match=r'needs rouge_score: pip install "rouge-score>=0\.1\.2"'
    ):
        quality.METRICS["rougeL"]()


def test_rouge() -> None:
    pytest.importorskip("rouge_score")
    metric = quality.METRICS["rougeL"]()
    assert metric.score(["a b", "a b"], ["a b", "c d"]) == pytest.approx(50)


# Benchmark


@pytest.mark.slow
def test_the_benchmark_of_a_pair(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [
        folder / "marian-large",
        folder / "marian-small",
        "--aligned",
        tmp_path / "aligned",
        "--append-eos",
    ]
    given += [
        "--align-options",
        "--max-steps 2",
        "--reference",
        folder / "train",
        "--scale",
        "tiny",
        "--threads",
        1,
    ]
    (folder / "train").write_text("\n".join(SOURCES), "utf-8")
    given += ["--input", folder / "train", "--fallback", 0.01, "--out", tmp_path / "results"]
    with pytest.raises(SystemExit, match="no --train to make it from"):
        benchmark.main([str(word) for word in given])
    assert benchmark.main([str(word) for word in (*given, "--train", folder / "train")]) == 0
    data = json.loads((tmp_path / "results" / "bild.json").read_text())
    cells, cost = data["result"]["cells"], data["result"]["cost"]
    lossless = [c for c in cells.values() if c["point"] and c["point"]["rollback"] is None]
    assert len(lossless) == 2 * 2 * (2 + len(benchmark.FIXED_DRAFTS))
    assert all(cell["equal"] and cell["p_value"] == 1.0 for cell in lossless)
    assert {cell["batch"] for name, cell in cells.items() if "assisted" in name} == {1}
    assert {"1", "2"} < set(cost["large_pass"])
    for cell in cells.values():
        assert ("ideal" in cell) == (cell["batch"] == 1 and cell["point"] is not None)
        assert cell["ideal"] > 0 if "ideal" in cell else True
    assert "of ideal" in capsys.readouterr().out
    assert (
        plot.main(["--results", str(tmp_path / "results"), "--out", str(tmp_path / "plots")]) == 0
    )
    assert (tmp_path / "plots" / "results-bild.svg").is_file()


def test_the_ideal_speed_of_counted_passes() -> None:
    cost = {
        "large_step": 10.0,
        "large_pass": {1: 10.0, 2: 11.0, 4: 13.0},
        "small_pass": 2.0,
        "encoder": {"large": 5.0, "small": 1.0},
    }
    counts = {"tokens": 20, "drafted": 16, "large_calls": 8, "small_calls": 18}
    assert benchmark.ideal(counts, 2, cost) == pytest.approx(
        (2 * 5 + 20 * 10) / (2 * 6 + 18 * 2 + 8 * 12)
    )
    assert (
        benchmark.ideal(counts | {"drafted": 0, "small_calls": 0, "large_calls": 20}, 0, cost)
        == 1.0
    )


def test_a_folder_of_a_decoder_can_be_read(folder: Path) -> None:
    model = pair.load_model(folder / "llama-small", "cpu", "float32")
    assert isinstance(model, type(AutoModelForCausalLM.from_pretrained(folder / "llama-small")))
    with pytest.raises(CommandError, match="the model cannot be loaded"):
        pair.load_model(folder, "cpu", "float32")
