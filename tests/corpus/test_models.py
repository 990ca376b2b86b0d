"""Models given to commands by folder or hub id, and checks that their weights are complete."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastgen.cli import main
from fastgen.corpus import models
from fastgen.corpus.run.identity import digest
from fastgen.errors import CommandError
from tests.cli.test_generate_options import marian, tokenizer_of
from tests.support.processes import python

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LAST = "model.decoder.layers.0.fc2.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models") / "model"
    marian(0).save_pretrained(place)
    tokenizer_of().save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def text(folder: Path) -> Path:
    file = folder.with_name("in.txt")
    file.write_text("One.\nTwo of them\n")
    return file


# Hub ids


@pytest.fixture(scope="module")
def cache(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a hub cache with one model, me/marian."""
    home = tmp_path_factory.mktemp("home")
    model = home / "hub" / "models--me--marian"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    shutil.copytree(folder, model / "snapshots" / COMMIT)
    return home


def offline(cache: Path, *runs: list[object]) -> list[tuple[int, str, str]]:
    """Run commands in one process without the hub; return the status and output of each."""
    code = (
        "import contextlib, io, json\nfrom fastgen.cli import main\nfound = []\n"
        "for words in json.loads("
        f"{json.dumps(json.dumps([[str(word) for word in words] for words in runs]))}):\n"
        "    out, err = io.StringIO(), io.StringIO()\n"
        "    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):\n"
        "        status = main(words)\n"
        "    found.append((status, out.getvalue(), err.getvalue()))\n"
        "print(json.dumps(found))\n"
    )
    names = {"HF_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    done = python(["-c", code], environment={**os.environ, **names})
    assert done.returncode == 0, done.stderr
    return [tuple(one) for one in json.loads(done.stdout)]


def test_a_cached_id_is_its_folder_in_every_command(
    cache: Path, folder: Path, text: Path, tmp_path: Path
) -> None:
    out, by_folder = tmp_path / "out.txt", tmp_path / "by_folder.txt"
    generate: list[object] = ["--input", text, "--max-new-tokens", 4, "--assistant-model"]
    found = offline(
        cache,
        ["generate", "me/marian", *generate, "me/marian", "--output", out],
        ["generate", folder, *generate, folder, "--output", by_folder],
        ["explain", "me/marian", "--max-new-tokens", 4],
        [
            "bench",
            "me/marian",
            "--rounds",
            2,
            "--batch-size",
            1,
            "--num-beams",
            1,
            "--max-new-tokens",
            4,
        ],
    )
    assert [status for status, _, _ in found] == [0, 0, 0, 0], found
    assert out.read_text() == by_folder.read_text()
    assert "from the weights" in found[2][1]
    assert found[3][1].startswith("me/marian: marian")


def test_an_unknown_id_is_one_line_of_the_librarys_own(
    cache: Path, text: Path, tmp_path: Path
) -> None:
    unknown, pair = "me/nothing", ["--input", text, "--output", tmp_path / "new"]
    for status, out, err in offline(
        cache,
        ["generate", unknown, "--input", text, "--max-new-tokens", 4],
        [
            "generate",
            "me/marian",
            "--input",
            text,
            "--max-new-tokens",
            4,
            "--assistant-model",
            unknown,
        ],
        ["explain", unknown],
        ["bench", unknown],
        ["bild", "align", "me/marian", unknown, *pair],
        ["bild", "tune", unknown, "me/marian", *pair, "--reference", text],
    ):
        assert status == 2
        assert out == ""
        (line,) = err.splitlines()
        assert (
            f"{unknown}: there is no such folder; "
            "as a model's id on the hub: We couldn't connect to" in line
        )


@pytest.mark.slow
def test_a_run_by_an_id_goes_on(cache: Path, text: Path, tmp_path: Path) -> None:
    """A run resumes even if unrelated files were added to the snapshot."""
    words = [
        "generate",
        "me/marian",
        "--input",
        text,
        "--output",
        tmp_path / "out.txt",
        "--block",
        1,
    ]
    code = (
        "from pathlib import Path\n"
        "from fastgen.corpus.run import job\n"
        "from fastgen.cli import main\n"
        "deliver = job._deliver\n"
        "def interrupted(*_):\n    raise KeyboardInterrupt\n"
        "job._deliver = interrupted\n"
        f"words = {[str(word) for word in words]} + ['--max-new-tokens', '4']\n"
        "first = main(words)\n"
        f"Path({str(cache)!r}, 'hub/models--me--marian/snapshots/{COMMIT}/more.json')"
        ".write_text('{}')\n"
        "job._deliver = deliver\n"
        "print(first, main(words))\n"
    )
    done = python(
        ["-c", code], environment={**os.environ, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    )
    assert done.stdout.strip() == "130 0", done.stderr
    assert "all from an earlier run" in done.stderr
    assert len((tmp_path / "out.txt").read_text().splitlines()) == 2


def test_other_folders_called_snapshots_are_told_by_what_they_hold(
    folder: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(folder, tmp_path / "snapshots" / "best")
    assert digest(copy) == digest(folder)
    (copy / "more.json").write_text("{}")
    assert digest(copy) != digest(folder)


# Complete and finite weights


def changed(folder: Path, tmp_path: Path, change: Any) -> Path:
    """Return a copy of a model with changed weights."""
    copy = shutil.copytree(folder, tmp_path / "changed")
    weights = load_file(copy / "model.safetensors")
    change(weights)
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    return copy


def test_a_model_without_some_weights_is_refused_by_every_command(
    folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def without(weights: dict[str, Any]) -> None:
        for name in [
            name for name in weights if name.startswith("model.decoder.layers.0.self_attn.")
        ]:
            del weights[name]

    copy = changed(folder, tmp_path, without)
    for words in (
        ["generate", copy, "--input", text, "--max-new-tokens", 4],
        ["explain", copy],
        ["bench", copy],
    ):
        assert main([str(word) for word in words]) == 2
        shown = capsys.readouterr()
        names = ", ".join(
            f"model.decoder.layers.0.self_attn.k_proj.{name}" for name in ("bias", "weight")
        )
        expected = (
            f"its files lack 8 weights: {names}, "
            "model.decoder.layers.0.self_attn.out_proj.bias and 5 more"
        )
        assert expected in shown.err
        assert shown.out == ""


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_not_finite_is_named(folder: Path, tmp_path: Path, value: float) -> None:
    def spoil(weights: dict[str, Any]) -> None:
        weights[LAST][1, 2] = value

    copy = changed(folder, tmp_path, spoil)
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(
            CommandError, match=f"in {dtype}, NaN or infinite numbers are in 1 weight: {LAST}$"
        ):
            models.load_model(copy, "cpu", dtype)


def test_what_a_type_cannot_hold_is_found_and_a_large_sum_is_not(
    folder: Path, tmp_path: Path
) -> None:
    def enlarge(weights: dict[str, Any]) -> None:
        weights[LAST].fill_(6e4)  # their sum is infinite in fp16
        weights[LAST.replace("fc2", "fc1")][0, 0] = 1e5

    copy = changed(folder, tmp_path, enlarge)
    models.load_model(copy, "cpu", "float32")
    with pytest.raises(
        CommandError, match=f"in float16, .* 1 weight: {LAST.replace('fc2', 'fc1')}$"
    ):
        models.load_model(copy, "cpu", "float16")
