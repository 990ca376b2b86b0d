"""Check multilingual models of fairseq.

A language token starts the source and the target; each language pair has a model.
"""

from pathlib import Path

import pytest
import torch

import fastgen

pytest.importorskip("fairseq")
from tests.support import fairseq_zoo as zoo
from tests.support.fairseq_commands import GENERATE, STOCK, assert_alike, preprocess, run, train

LANGUAGE = 9
"""A token of the vocabulary that stands for a language."""


@pytest.mark.parametrize("pair", [None, "es-en"])
@pytest.mark.parametrize("begin", ["bos", "prefix", "both"])
@pytest.mark.parametrize("beams", [1, 4])
def test_language_token(pair: str | None, begin: str, beams: int) -> None:
    """For a model of several pairs fairseq uses the first pair; a pair's model also works alone."""
    model = zoo.build("multilingual")
    asked = model if pair is None else model.models[pair]
    options = {"beam_size": beams, "max_len_b": 12, "min_len": 3}
    if begin != "prefix":
        options["bos_token"] = LANGUAGE
    if begin != "bos":
        options["prefix_tokens"] = torch.full((5, 1), LANGUAGE)
    before, declined = zoo.hits(), zoo.fallbacks()
    found = zoo.assert_same([asked], zoo.batch(5, 8), options)
    assert zoo.hits() == before + 1
    assert zoo.fallbacks() == declined
    assert begin == "bos" or all(hypotheses[0]["tokens"][0] == LANGUAGE for hypotheses in found)
    with fastgen.disabled():
        other, _ = zoo.call([model.models["en-es" if pair else "es-en"]], zoo.batch(5, 8), options)
    assert [h[0]["tokens"].tolist() for h in other] != [h[0]["tokens"].tolist() for h in found]


PAIRS = ("--lang-pairs", "en-es,es-en", "--encoder-langtok", "tgt", "--decoder-langtok")
# Per task: options for training and generation, and options of its model.
TASKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "multilingual_translation": (
        PAIRS,
        (
            "--arch", "multilingual_transformer", "--share-encoders",
            "--share-decoder-input-output-embed",
        ),
    ),
    "translation_multi_simple_epoch": (
        (*PAIRS, "--langs", "en,es"), ("--arch", "transformer", "--share-all-embeddings"),
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=TASKS)
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, tuple[str, ...]]:
    """Return a task, and the arguments that name it, its data and its model."""
    folder: Path = tmp_path_factory.mktemp("multilingual")
    data, (options, model) = preprocess(folder), TASKS[request.param]
    train(data, folder, 60, "--task", request.param, *options, *model)
    return request.param, (
        data,
        "--path",
        str(folder / "checkpoint_last.pt"),
        "--task",
        request.param,
        *options,
    )


DIRECTIONS = {"there": ("-s", "en", "-t", "es"), "back": ("-s", "es", "-t", "en")}


@pytest.mark.slow
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_generate(trained: tuple[str, tuple[str, ...]], direction: str) -> None:
    """Generate in both directions.

    One task can also pass the language token in place of the first token.
    """
    task, named = trained
    command = (
        "fairseq-generate", *named, *DIRECTIONS[direction], *GENERATE, "--beam", "3",
        "--batch-size", "8", "--min-len", "4", "--no-repeat-ngram-size", "3",
        "--gen-subset", "valid",
        *(
            ("--lang-tok-replacing-bos-eos",)
            if (task, direction) == ("translation_multi_simple_epoch", "back")
            else ()
        ),
    )  # fmt: skip
    ours, stock = run(*command, FASTGEN_STRICT="1"), run(*command, **STOCK)
    assert_alike(ours.stdout, stock.stdout)
    assert sum(line.startswith("H-") for line in ours.stdout.splitlines()) == 40


@pytest.mark.slow
def test_interactive(trained: tuple[str, tuple[str, ...]]) -> None:
    _, named = trained
    text = "This is a house.\nHe said that it was good.\nWhere are they?\n"
    command = (
        "fairseq-interactive", *named, *DIRECTIONS["there"], "--cpu", "--max-len-b", "20",
        "--beam", "3", "--buffer-size", "2", "--batch-size", "2", "--min-len", "4",
    )  # fmt: skip
    ours, stock = run(*command, text=text, FASTGEN_STRICT="1"), run(*command, text=text, **STOCK)
    assert_alike(ours.stdout, stock.stdout)
    assert sum(line.startswith("S-") for line in ours.stdout.splitlines()) == 3
