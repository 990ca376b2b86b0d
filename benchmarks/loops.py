"""Measure evaluations and pipelines whose batches are read ahead, against batch by batch.

    python -m benchmarks.loops --threads 2

The trained model of examples/en-es translates its test text in batches of 8. *generate* is fastgen
with FASTGEN_REFILL=off: `generate` is accelerated, and batches run one by one. Texts are compared
in every round; losses of evaluations may differ in rounding.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset

import fastgen
from benchmarks.cases import EXAMPLE
from benchmarks.harness import begin, common, parser_of, positive, write_result
from benchmarks.session import in_turn
from fastgen import config

CALLS = {"greedy": 1, "4 beams": 4}
Outputs = tuple[list[Any], float]
"""Texts, and the loss or 0."""


class _Lines(Dataset[str]):
    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, number: int) -> str:
        return self.lines[number]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all loops and calls; return 1 if an output differed."""
    parser = common(parser_of("benchmarks.loops", __doc__), 5)
    parser.add_argument("--lines", type=positive, default=256, metavar="N", help="default: 256")
    parser.add_argument("--batch", type=positive, default=8, metavar="N", help="default: 8")
    args = parser.parse_args(argv)
    begin(args.threads)
    lines = 12 if args.scale == "tiny" else args.lines
    text, reference = (
        (EXAMPLE / f"test.{language}").read_text("utf-8").splitlines()[:lines]
        for language in ("en", "es")
    )
    cells: dict[str, Any] = {}
    for call, beams in CALLS.items():
        options = {"num_beams": beams, "max_new_tokens": 128}
        for name, run in _loops(text, reference, options, args.batch).items():
            cells[f"{name}, {call}"] = cell = _cell(run, args.rounds)
            ratios = cell.get("over", {}).items()
            speed = ", ".join(f"{one['ratio']:.2f}x of {arm}" for arm, one in ratios)
            print(f"{name}, {call}: {speed or cell['note']}", flush=True)
            write_result(args, "loops", {"cells": cells, "lines": lines})
    return 0 if all(cell["equal"] for cell in cells.values()) else 1


def _loops(
    text: list[str], reference: list[str], options: dict[str, Any], batch: int
) -> dict[str, Callable[[], Outputs]]:
    import transformers as tf

    folder = EXAMPLE / "model"
    tokenizer: Any = tf.AutoTokenizer.from_pretrained(folder)
    model: Any = tf.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype="float32").eval()

    class Translation(tf.Pipeline):
        """A pipeline of a model with a source."""

        def _sanitize_parameters(self, **given: Any) -> Any:
            return {}, given, {}

        def preprocess(self, input_: Any, **_: Any) -> Any:
            return tokenizer(input_, return_tensors="pt")

        def _forward(self, input_tensors: Any, **given: Any) -> Any:
            return {"ids": model.generate(**input_tensors, **given)}

        def postprocess(self, model_outputs: Any, **_: Any) -> Any:
            return model_outputs["ids"][0].tolist()

    pipe: Any = Translation(model, tokenizer, device=torch.device("cpu"), batch_size=batch)
    samples = [
        tokenizer(source, text_target=target)
        for source, target in zip(text, reference, strict=True)
    ]
    trainer = tf.Seq2SeqTrainer(
        model,
        tf.Seq2SeqTrainingArguments(
            tempfile.mkdtemp(), per_device_eval_batch_size=batch, predict_with_generate=True,
            report_to=[], use_cpu=True, disable_tqdm=True,
        ),
        data_collator=tf.DataCollatorForSeq2Seq(tokenizer, model=model),
    )  # fmt: skip

    def evaluate() -> Outputs:
        found: Any = trainer.predict(samples, **options)  # pyright: ignore[reportArgumentType]
        return found.predictions.tolist(), found.metrics.get("test_loss", 0.0)

    return {
        "evaluation": evaluate,
        "pipeline over a list": lambda: (pipe(text, **options), 0.0),
        "pipeline over a dataset": lambda: (list(pipe(_Lines(text), **options)), 0.0),
    }


def _cell(run: Callable[[], Outputs], rounds: int) -> dict[str, Any]:
    arms = {"fastgen": run, "generate": partial(_one_by_one, run), "stock": partial(_stock, run)}

    def check(outputs: Sequence[Outputs]) -> str | None:
        (texts, loss), *others = outputs
        for other, other_loss in others:
            if other != texts:
                return "other tokens"
            if abs(other_loss - loss) > 1e-5 * abs(loss):
                return f"losses {loss} and {other_loss}"
        return None

    return in_turn(arms, rounds, check)


def _one_by_one(run: Callable[[], Outputs]) -> Outputs:
    before = os.environ.get("FASTGEN_REFILL")
    os.environ["FASTGEN_REFILL"] = "off"
    config.reload()
    try:
        return run()
    finally:
        del os.environ["FASTGEN_REFILL"]
        if before is not None:
            os.environ["FASTGEN_REFILL"] = before
        config.reload()


def _stock(run: Callable[[], Outputs]) -> Outputs:
    with fastgen.disabled():
        return run()


if __name__ == "__main__":
    sys.exit(main())
