"""Workloads of `fastgen demo`: plain transformers code on real text and on a large random model."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MarianMTModel,
    PreTrainedTokenizerFast,
)

from fastgen.cli.bild.sweep import batches_of
from fastgen.errors import CommandError
from fastgen.patches.transformers.compat import CACHE

Batch = dict[str, torch.Tensor]


@dataclass
class Workload:
    """A model, its batches, and the arguments of `generate`.

    Attributes:
        name: title to print.
        detail: description to print.
        model: the model.
        batches: tensor arguments of `generate`, one dict per batch.
        generate: the other arguments of `generate`.
        source_order: the position in the input of each sentence, in the order of the batches.
    """

    name: str
    detail: str
    model: Any
    batches: list[Batch]
    generate: dict[str, Any]
    source_order: list[int] = field(default_factory=list)

    @property
    def sentences(self) -> int:
        """Number of sentences in all batches."""
        return sum(len(batch["input_ids"]) for batch in self.batches)

    def run(self, after_batch: Callable[[], object]) -> list[torch.Tensor]:
        """Return the generated token ids of each batch; call `after_batch` after each."""
        outputs: list[torch.Tensor] = []
        for batch in self.batches:
            outputs.append(self.model.generate(**batch, **self.generate))
            after_batch()
        return outputs


@dataclass
class Text:
    """The sentences to translate, their references, and the tokenizer that decodes the output.

    Both lists are in the order of the file.
    """

    sources: list[str]
    references: list[str]
    tokenizer: PreTrainedTokenizerFast

    def decode(self, workload: Workload, outputs: Sequence[torch.Tensor]) -> list[str]:
        """Return the translations in the order of the file."""
        texts = [
            text
            for ids in outputs
            for text in self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        ]
        ordered = dict(zip(workload.source_order, texts, strict=True))
        return [ordered[i].strip() for i in range(len(texts))]


def translation(folder: Path, sentences: int) -> tuple[Workload, Text]:
    """Return the trained English-Spanish model with the first lines of the test text.

    The sentences are sorted by length, in batches of 32.

    Args:
        folder: the example: model/, test.en and test.es.
        sentences: number of lines to take.

    Raises:
        CommandError: `folder` does not hold the example.
    """
    model_folder = folder / "model"
    for path in (
        folder / "test.en",
        folder / "test.es",
        model_folder / "config.json",
        model_folder / "tokenizer.json",
    ):
        if not path.is_file():
            raise CommandError(
                f"{path} is missing. The demo needs the folder examples/en-es of fastgen's "
                "source repository, which an installed package does not hold: "
                "name it with --examples DIR"
            )
    sources, references = (
        (folder / f"test.{language}").read_text("utf-8").splitlines()[:sentences]
        for language in ("en", "es")
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_folder)
    model = MarianMTModel.from_pretrained(model_folder).float().eval()
    batches = batches_of(
        [tokenizer(source, truncation=True)["input_ids"] for source in sources], 32, model
    )
    size = f"{model.num_parameters() / 1e6:.1f}M parameters"
    workload = Workload(
        name="English to Spanish, Python documentation",
        detail=f"trained Marian model, {size}; {len(sources)} sentences, batches of 32, 4 beams",
        model=model,
        batches=[batch.inputs for batch in batches],
        generate={"num_beams": 4, "max_new_tokens": 160},
        source_order=[place for batch in batches for place in batch.places],
    )
    return workload, Text(sources, references, tokenizer)


def bart(tokens: int, small: bool) -> Workload:
    """Return a model of BART-large's shape with random weights, and 4 sources of 512 tokens.

    Args:
        tokens: new tokens of each output.
        small: whether to shrink the model to a toy, with sources of 64 tokens.
    """
    sizes = {"layers": 2, "ffn_dim": 128, "attention_heads": 4}
    toy: dict[str, Any] = {
        f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sizes.items()
    }
    config = BartConfig(**toy, d_model=64, vocab_size=500) if small else BartConfig()
    torch.manual_seed(1)
    model = BartForConditionalGeneration(config).eval()
    length = 64 if small else 512
    ids = torch.randint(4, config.vocab_size, (4, length), dtype=torch.int64, device="cpu")
    size = f"{model.num_parameters() / 1e6:.1f}M parameters"
    return Workload(
        name="A toy BART, random weights" if small else "BART-large's shape, random weights",
        detail=f"{size}; 4 sources of {length} tokens, 4 beams, no repeated 3-gram, "
        f"{tokens} new tokens",
        model=model,
        batches=[{"input_ids": ids, "attention_mask": torch.ones_like(ids)}],
        generate={
            "num_beams": 4,
            "no_repeat_ngram_size": 3,
            "max_new_tokens": tokens,
            "min_new_tokens": tokens,
        },
    )


@dataclass
class KVPeak:
    """The most bytes that the KV cache held at once; None until something was seen."""

    bytes: int | None = None

    def see(self, count: int) -> None:
        """Record a size in bytes."""
        self.bytes = max(self.bytes or 0, count)


@contextmanager
def watched_cache(model: torch.nn.Module, peak: KVPeak) -> Iterator[None]:
    """Report the size of the KV cache to `peak` after each forward pass of `model`, unpatched."""

    def look(_module: torch.nn.Module, _args: object, output: Any) -> None:
        if (cache := getattr(output, CACHE, None)) is not None:
            peak.see(cache_bytes(cache))

    handle = model.register_forward_hook(look)
    try:
        yield
    finally:
        handle.remove()


def cache_bytes(cache: Any) -> int:
    """Return the bytes of the keys and values in a transformers cache.

    An encoder-decoder's cache counts with both its self-attention and its cross-attention part.
    """
    halves = (
        (cache.self_attention_cache, cache.cross_attention_cache)
        if hasattr(cache, "cross_attention_cache")
        else (cache,)
    )
    tensors = [
        tensor for half in halves for layer in half.layers for tensor in (layer.keys, layer.values)
    ]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
