"""Fine-tuning of a small model on a large one's outputs, with transformers' Trainer."""

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
_IGNORED = -100  # label that the loss ignores


@dataclass(frozen=True)
class Recipe:
    """Training hyperparameters.

    Attributes:
        epochs: passes over the data.
        max_steps: optimizer steps; takes precedence over `epochs` unless None.
        learning_rate: the learning rate at the start.
        batch_size: examples per optimizer step.
        label_smoothing: label smoothing factor.
        seed: random seed of the Trainer.
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
    """Return the training examples: every token that the large model generated is a label.

    Args:
        sources: token ids of each source.
        outputs: token ids as `generate` returns them: after a start token or, for a decoder-only
            model, after the prompt. Neither of these is a label.
        encoder_decoder: whether the model is an encoder-decoder.
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
    """Return a batch of examples, right-padded, with an attention mask."""
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
    """Train the model in place, in the dtype of its weights, and return the Trainer's log.

    Returns:
        Step, loss and learning rate at each logging step.
    """
    with tempfile.TemporaryDirectory() as folder:  # required by the Trainer, which leaves it empty
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
