"""What `fastgen demo` runs: plain transformers code, on real text and at a large model's shape."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import BartConfig, BartForConditionalGeneration, MarianMTModel, PreTrainedTokenizerFast

import fastgen
from fastgen.cli.errors import CommandError

NEAR_TIE = 1e-4
"""Outputs whose `Workload.margin` is smaller count as the same: fp32 rounding decides which of them is found."""

Batch = dict[str, torch.Tensor]


@dataclass
class Workload:
    """A model, its batches, and the arguments of `generate`.

    Attributes:
        name, detail: what it is, for the reader.
        source_order: the place in the input of each sentence, in the order of the batches.
    """

    name: str
    detail: str
    model: Any
    batches: list[Batch]
    generate: dict[str, Any]
    source_order: list[int] = field(default_factory=list)

    @property
    def sentences(self) -> int:
        return sum(len(batch["input_ids"]) for batch in self.batches)

    def run(self, after_batch: Callable[[], object]) -> list[list[int]]:
        """Generate for every batch; return the token ids of each sentence without padding at the end."""
        rows: list[list[int]] = []
        for batch in self.batches:
            rows += self.model.generate(**batch, **self.generate).tolist()
            after_batch()
        end = self.model.generation_config.eos_token_id
        return [_cropped(row, end) for row in rows]

    @torch.no_grad()
    def margin(self, sentence: int, expected: list[int], found: list[int]) -> float:
        """How far apart the model itself, run unpatched, scores two different outputs of one sentence.

        The smaller of two differences: of the sums of log-probabilities up to and with the first token that differs,
        which is what beam search compared when the two parted, and of the final scores (sum divided by length).
        """
        at = sentence
        for batch in self.batches:
            if at < len(batch["input_ids"]):
                break
            at -= len(batch["input_ids"])
        else:
            raise ValueError(f"sentence {sentence} of {self.sentences}")
        source = {name: tensor[at : at + 1] for name, tensor in batch.items()}
        forced_end = self.model.generation_config.forced_eos_token_id
        sums: list[torch.Tensor] = []
        with fastgen.disabled():
            for row in (expected, found):
                ids = torch.tensor([row])
                logits = self.model(**source, decoder_input_ids=ids[:, :-1]).logits.float()
                scores = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).flatten()
                if row[-1] == forced_end and len(scores) == self.generate["max_new_tokens"]:
                    scores[-1] = 0.0  # at the last step transformers leaves this token only, for free
                sums.append(scores.cumsum(0))
        first = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), None)
        final = abs(float(sums[0][-1] / len(sums[0]) - sums[1][-1] / len(sums[1])))
        # One may be the beginning of the other; the start token, which has no score, is never the first that differs.
        return final if first is None else min(final, abs(float(sums[0][first - 1] - sums[1][first - 1])))


def _cropped(row: list[int], end: int) -> list[int]:
    """Cut what follows the first end token; the start token may be the end token too."""
    return row[: row.index(end, 1) + 1] if end in row[1:] else row


@dataclass
class Text:
    """The sentences that were translated, in the order of the file, and the means to read the output."""

    sources: list[str]
    references: list[str]
    tokenizer: PreTrainedTokenizerFast

    def decode(self, workload: Workload, rows: list[list[int]]) -> list[str]:
        """Return the translations in the order of the file."""
        texts = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        ordered = dict(zip(workload.source_order, texts, strict=True))
        return [ordered[i].strip() for i in range(len(texts))]


def translation(folder: Path, sentences: int) -> tuple[Workload, Text]:
    """The trained English-Spanish model on the first lines of the test text, sorted by length, in batches of 32.

    Raises:
        CommandError: `folder` does not hold the example.
    """
    model_folder = folder / "model"
    for path in (folder / "test.en", folder / "test.es", model_folder / "config.json", model_folder / "tokenizer.json"):
        if not path.is_file():
            raise CommandError(
                f"{path} is missing. The demo needs the folder examples/en-es of fastgen's source repository, which an "
                "installed package does not hold: name it with --examples DIR"
            )
    sources, references = (
        (folder / f"test.{language}").read_text("utf-8").splitlines()[:sentences] for language in ("en", "es")
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_folder)
    model = MarianMTModel.from_pretrained(model_folder).float().eval()
    order = sorted(range(len(sources)), key=lambda i: len(tokenizer(sources[i])["input_ids"]))
    batches = [
        dict(tokenizer([sources[i] for i in order[at : at + 32]], return_tensors="pt", padding=True, truncation=True))
        for at in range(0, len(order), 32)
    ]
    for batch in batches:
        batch.pop("token_type_ids", None)
    size = f"{model.num_parameters() / 1e6:.1f}M parameters"
    workload = Workload(
        name="English to Spanish, Python documentation",
        detail=f"trained Marian model, {size}; {len(sources)} sentences, batches of 32, 4 beams",
        model=model,
        batches=batches,
        generate={"num_beams": 4, "max_new_tokens": 160},
        source_order=order,
    )
    return workload, Text(sources, references, tokenizer)


def bart(tokens: int, small: bool) -> Workload:
    """A model of BART-large's shape with random weights, 4 sources of 512 tokens; `small` is a toy of the same kind."""
    shape: dict[str, Any] = (
        {
            "encoder_layers": 2,
            "decoder_layers": 2,
            "d_model": 64,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "vocab_size": 500,
        }
        if small
        else {}
    )
    config = BartConfig(**shape)
    torch.manual_seed(1)
    model = BartForConditionalGeneration(config).eval()
    length = 64 if small else 512
    ids = torch.randint(4, config.vocab_size, (4, length))
    size = f"{model.num_parameters() / 1e6:.1f}M parameters"
    return Workload(
        name="A toy BART, random weights" if small else "BART-large's shape, random weights",
        detail=f"{size}; 4 sources of {length} tokens, 4 beams, no repeated 3-gram, {tokens} new tokens",
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
    """The most bytes that the key-value cache held at once; None until something was seen."""

    bytes: int | None = None

    def see(self, count: int) -> None:
        self.bytes = max(self.bytes or 0, count)


@contextmanager
def watched_cache(model: torch.nn.Module, peak: KVPeak) -> Iterator[None]:
    """Within it, every step of the unpatched `model` reports the bytes of the cache it returns to `peak`."""

    def look(_module: torch.nn.Module, _args: object, output: Any) -> None:
        if (cache := getattr(output, "past_key_values", None)) is not None:
            peak.see(cache_bytes(cache))

    handle = model.register_forward_hook(look)
    try:
        yield
    finally:
        handle.remove()


def cache_bytes(cache: Any) -> int:
    """Return the bytes of the keys and values in a transformers cache, of both halves for an encoder-decoder."""
    halves = (
        (cache.self_attention_cache, cache.cross_attention_cache)
        if hasattr(cache, "cross_attention_cache")
        else (cache,)
    )
    tensors = [tensor for half in halves for layer in half.layers for tensor in (layer.keys, layer.values)]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
