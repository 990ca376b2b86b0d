"""CTranslate2 as a peer, with the same weights converted in fp32.

It is timed in turn with transformers unpatched and with fastgen. CTranslate2 is needed by this
benchmark only: `pip install ctranslate2==4.8.5`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.cases import Case
from benchmarks.runners import translation

VERSION = "4.8.5"
# Arguments of transformers' `generate` that CTranslate2 has under the same name, and others that
# it has under another name or does not need.
SAME_NAME = ("no_repeat_ngram_size", "length_penalty", "repetition_penalty")
WITHOUT_MEANING_THERE = (
    "num_beams",
    "do_sample",
    "min_new_tokens",
    "max_new_tokens",
    "bad_words_ids",
)
# Config attributes that its BART converter reads and that current transformers no longer has.
MISSING_CONFIG = {"BartConfig": {"normalize_before": False, "normalize_embedding": True}}


def load() -> Any:
    """Return the ctranslate2 module.

    Raises:
        SystemExit: it is not installed.
    """
    try:
        import ctranslate2
    except ImportError as error:
        raise SystemExit(
            f"--peer ctranslate2 needs the package: pip install ctranslate2=={VERSION}"
        ) from error
    return ctranslate2


def suits(case: Case) -> bool:
    """Return whether the case is one batch that CTranslate2 can run."""
    return case.kind == "generate"


def run(case: Case, session: Any) -> dict[str, Any]:
    """Time transformers, fastgen and CTranslate2 on the same inputs, in turn.

    All outputs are compared in every round.

    Raises:
        SystemExit: the package is missing, or the case or the precision is not supported.
    """
    load()
    if session.dtype != torch.float32:
        raise SystemExit(f"--peer ctranslate2 computes in float32, not in {session.dtype}")
    if case.kind == "text":
        return _text(case, session)
    if not suits(case) or case.shape is None:
        raise SystemExit(f"--peer ctranslate2 has no way to run the case {case.name!r}")
    model = case.shape.build(session.dtype, session.device)
    inputs, options = case.inputs(model), case.generate_options
    with tempfile.TemporaryDirectory() as folder:
        peer = Peer(convert(model, Path(folder)), model, inputs, options, session.device)
        result = peers.one_batch(
            "ctranslate2", lambda **_: peer(), model, inputs, options, case, session
        )
    return result | {"ctranslate2": load().__version__}


def _text(case: Case, session: Any) -> dict[str, Any]:
    """Compare a trained model on a text."""
    task = translation(case, session)
    with tempfile.TemporaryDirectory() as folder:
        place = convert(task.model, Path(folder), own_start=True)
        systems = [
            Peer(place, task.model, batch, task.options, session.device) for batch in task.batches
        ]
        result = peers.texts(
            "ctranslate2", lambda: [peer() for peer in systems], task, case, session
        )
    return result | {"ctranslate2": load().__version__}


def convert(model: Any, folder: Path, own_start: bool = False) -> Path:
    """Write `model` as a CTranslate2 model under `folder` and return its path; weights stay fp32.

    Args:
        model: a transformers model.
        folder: folder to write to.
        own_start: how the decoder of a Marian model starts. If True, with the embedding of its
            padding token, as in transformers; that token may be anywhere in the vocabulary. If
            False, with zeros, as in the published models, where the padding token is the last one.
    """
    loaders = load().converters.transformers
    checkpoint, converted = folder / "transformers", folder / "ctranslate2"
    model.save_pretrained(checkpoint)
    _tokenizer(model.config, padding_last=not own_start).save_pretrained(checkpoint)
    as_bart = {
        name: getattr(loaders.BartLoader, name)
        for name in ("set_config", "set_decoder", "get_vocabulary")
    }
    as_bart["_remove_pad_weights"] = lambda *_: None
    with (
        _attributes(type(model.config), MISSING_CONFIG.get(type(model.config).__name__, {})),
        _attributes(loaders.MarianMTLoader, as_bart if own_start else {}),
    ):
        loaders.TransformersConverter(str(checkpoint)).convert(
            str(converted), quantization="float32"
        )
    return converted


class Peer:
    """A converted model as a function without arguments.

    It returns token ids in the layout of transformers' `generate`.

    Args:
        folder: the converted model.
        model: the transformers model.
        inputs: tensor arguments of `generate`.
        options: the other arguments of `generate`.
        device: device to run on.
    Raises:
        ValueError: an option has no counterpart in CTranslate2.
    """

    def __init__(
        self,
        folder: Path,
        model: Any,
        inputs: dict[str, Tensor],
        options: dict[str, Any],
        device: str,
    ) -> None:
        ctranslate2 = load()
        unknown = set(options) - {*SAME_NAME, *WITHOUT_MEANING_THERE}
        if unknown:
            raise ValueError(
                f"no CTranslate2 counterpart for the generate arguments {sorted(unknown)}"
            )
        rows = zip(inputs["input_ids"].tolist(), inputs["attention_mask"].tolist(), strict=True)
        self.prompts = [[_token(i) for i, seen in zip(*row, strict=True) if seen] for row in rows]
        self.seq2seq = model.config.is_encoder_decoder
        self.device, self.pad = model.device, model.config.pad_token_id
        if self.seq2seq:
            self.start = [[model.config.decoder_start_token_id]] * len(self.prompts)
        else:
            self.start = inputs["input_ids"].tolist()
        steps = options["max_new_tokens"]
        shared = {"beam_size": options["num_beams"]} | {
            name: options[name] for name in SAME_NAME if name in options
        }
        kind = ctranslate2.Translator if self.seq2seq else ctranslate2.Generator
        threads = torch.get_num_threads() or os.cpu_count()
        self.engine = kind(
            str(folder),
            device=device.split(":", 1)[0],
            compute_type="float32",
            intra_threads=threads,
        )
        if self.seq2seq:
            self.arguments = shared | {
                "max_decoding_length": steps,
                "min_decoding_length": options.get("min_new_tokens", 1),
            }
        else:
            self.arguments = shared | {
                "max_length": steps, "min_length": options["min_new_tokens"],
                "include_prompt_in_result": False,
            }  # fmt: skip

    def __call__(self) -> Tensor:
        if self.seq2seq:
            results = self.engine.translate_batch(self.prompts, **self.arguments)
            best = [[int(token[1:]) for token in result.hypotheses[0]] for result in results]
        else:
            results = self.engine.generate_batch(self.prompts, **self.arguments)
            best = [result.sequences_ids[0] for result in results]
        longest = max(map(len, best))
        rows = [
            [*start, *ids, *[self.pad] * (longest - len(ids))]
            for start, ids in zip(self.start, best, strict=True)
        ]
        return torch.tensor(rows, device=self.device)


def _token(index: int) -> str:
    return f"t{index}"


def _tokenizer(config: Any, padding_last: bool) -> Any:
    """Return a tokenizer in which id 7 is the token `t7`.

    CTranslate2's converter takes the vocabulary and the special tokens from it.
    """
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {_token(i): i for i in range(config.vocab_size)}
    special = {
        f"{name}_token": getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad")
    }
    named = {name: _token(i) for name, i in special.items() if i is not None}
    if config.model_type == "marian" and padding_last:
        # The converter drops the last row of the weights, and the token with this name.
        vocabulary["<pad>"] = vocabulary.pop(_token(config.pad_token_id))
        named["pad_token"] = "<pad>"
    unknown = next(token for token, i in vocabulary.items() if i not in special.values())
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unknown, **named)


@contextmanager
def _attributes(kind: type, values: dict[str, Any]) -> Iterator[None]:
    """Set attributes of a class within the context."""
    own = {name: vars(kind)[name] for name in values if name in vars(kind)}
    for name, value in values.items():
        setattr(kind, name, value)
    try:
        yield
    finally:
        for name in values:
            delattr(kind, name)
        for name, value in own.items():
            setattr(kind, name, value)
