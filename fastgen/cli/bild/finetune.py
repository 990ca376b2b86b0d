"""Fine-tuning a small model on a large one's outputs, by transformers' Trainer."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer, TrainingArguments

Example = dict[str, list[int]]
_IGNORED = -100  # a label that the loss leaves out


@dataclass(frozen=True)
class Recipe:
    """How to train.

    max_steps: of the optimizer, in place of `epochs`.
    """

    epochs: float
    max_steps: int | None
    learning_rate: float
    batch_size: int
    label_smoothing: float
    seed: int


def examples(
    sources: Sequence[list[int]], outputs: Sequence[list[int]], encoder_decoder: bool
) -> list[Example]:
    """What the small model learns from: every token that the large one wrote, given those before it.

    Args:
        outputs: as `generate` returns them: with a start token, or for a decoder-only model with the prompt, which is
            no label.
    """
    if encoder_decoder:
        return [
            {"input_ids": source, "decoder_input_ids": output[:-1], "labels": output[1:]}
            for source, output in zip(sources, outputs, strict=True)
        ]
    return [
        {"input_ids": output, "labels": [_IGNORED] * len(source) + output[len(source) :]}
        for source, output in zip(sources, outputs, strict=True)
    ]


def collate(batch: Sequence[Example], pad: int) -> dict[str, Tensor]:
    """A batch of examples, padded behind."""
    fill = {"input_ids": pad, "decoder_input_ids": pad, "labels": _IGNORED}
    tensors = {
        name: [torch.tensor(example[name], dtype=torch.int64, device="cpu") for example in batch]
        for name in batch[0]
    }
    padded = {
        name: pad_sequence(rows, batch_first=True, padding_value=fill[name])
        for name, rows in tensors.items()
    }
    mask = pad_sequence([torch.ones_like(row) for row in tensors["input_ids"]], batch_first=True)
    return padded | {"attention_mask": mask}


def finetune(
    model: Any, data: list[Example], pad: int, recipe: Recipe, on_cpu: bool
) -> list[dict[str, float]]:
    """Train the model, in fp32 and in place; return the Trainer's log: step, loss, learning rate."""
    with tempfile.TemporaryDirectory() as folder:  # the Trainer wants one, and writes nothing
        settings = TrainingArguments(
            output_dir=folder,
            num_train_epochs=recipe.epochs,
            max_steps=recipe.max_steps or -1,
            learning_rate=recipe.learning_rate,
            per_device_train_batch_size=recipe.batch_size,
            label_smoothing_factor=recipe.label_smoothing,
            seed=recipe.seed,
            train_sampling_strategy="group_by_length",
            save_strategy="no",
            logging_steps=50,
            report_to="none",
            use_cpu=on_cpu,
        )
        trainer = Trainer(
            model,
            settings,
            data_collator=lambda batch: collate(batch, pad),
            train_dataset=cast(Any, data),
        )
        trainer.train()
    model.eval()
    return trainer.state.log_history
