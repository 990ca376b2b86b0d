"""CTranslate2 as a peer: the same weights converted, fp32, timed in turn with transformers unpatched and with fastgen.

CTranslate2 is needed by this benchmark only: `pip install ctranslate2==4.8.5`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case
from fastgen.cli import measure
from fastgen.cli.agreement import Agreement

VERSION = "4.8.5"
# Arguments of transformers' generate that CTranslate2 has under this name; the rest must not change the output.
SAME_NAME = ("no_repeat_ngram_size", "length_penalty", "repetition_penalty")
WITHOUT_MEANING_THERE = ("num_beams", "do_sample", "min_new_tokens", "max_new_tokens", "bad_words_ids")
# What its BART converter reads from the config but current transformers no longer has.
MISSING_CONFIG = {"BartConfig": {"normalize_before": False, "normalize_embedding": True}}


def load() -> Any:
    """Return the ctranslate2 module.

    Raises:
        SystemExit: it is not installed.
    """
    try:
        import ctranslate2
    except ImportError as error:
        raise SystemExit(f"--peer ctranslate2 needs the package: pip install ctranslate2=={VERSION}") from error
    return ctranslate2


def run(case: Case, session: Any) -> dict[str, Any]:
    """Time stock, fastgen and CTranslate2 on the same inputs, in turn; all outputs are compared in every round."""
    from benchmarks.runners import Hits, both

    ctranslate2 = load()
    if case.kind != "generate" or case.shape is None:
        raise SystemExit(f"--peer ctranslate2 has no way to run the case {case.name!r}")
    model = case.shape.build(session.dtype, session.device)
    inputs, options = case.inputs(model), case.generate_options
    stock, patched = both(lambda: model.generate(**inputs, **options))
    with tempfile.TemporaryDirectory() as folder:
        peer = Peer(convert(ctranslate2, model, Path(folder)), model, inputs, options, session.device)
        agreement, hits, ties = Agreement(model, inputs, options), Hits(), {"fastgen": 0, "ctranslate2": 0}

        def check(outputs: Sequence[Tensor]) -> str | None:
            for name, found in zip(ties, outputs[1:], strict=True):
                verdict = agreement(outputs[0], found)
                ties[name] = max(ties[name], verdict.near_ties)
                if not verdict.equal:
                    return f"{name}: {verdict.note}"
            return None

        times, difference = measure.interleave(
            (stock, patched, peer), session.rounds or case.rounds, check, synchronize=session.synchronize
        )
    version = {"ctranslate2": ctranslate2.__version__, "near_ties": ties}
    if difference is not None:
        return {"equal": False, "note": difference, "near_ties": sum(ties.values())} | version | hits.since()
    names = ("stock", "fastgen", "ctranslate2")
    columns = dict(zip(names, zip(*times, strict=True), strict=True))
    over = {}
    for name in ("stock", "ctranslate2"):
        ratio, low, high = measure.paired_ratio(columns[name], columns["fastgen"])
        over[name] = {"ratio": ratio, "low": low, "high": high}
    return {
        "equal": True,
        **version,
        **hits.since(),
        "tokens": case.batch * case.new_tokens,
        "systems": {name: sorted(column)[len(column) // 2] for name, column in columns.items()},
        "over": over,
        "rounds": [list(row) for row in times],
    }


def convert(ctranslate2: Any, model: Any, folder: Path) -> Path:
    """Write `model` as a CTranslate2 model under `folder` and return where; weights stay fp32."""
    checkpoint, converted = folder / "transformers", folder / "ctranslate2"
    model.save_pretrained(checkpoint)
    _tokenizer(model.config).save_pretrained(checkpoint)
    with _attributes(type(model.config), MISSING_CONFIG.get(type(model.config).__name__, {})):
        ctranslate2.converters.TransformersConverter(str(checkpoint)).convert(str(converted), quantization="float32")
    return converted


class Peer:
    """A converted model as a function of no arguments that returns token ids laid out like transformers'."""

    def __init__(
        self, folder: Path, model: Any, inputs: dict[str, Tensor], options: dict[str, Any], device: str
    ) -> None:
        ctranslate2 = load()
        unknown = set(options) - {*SAME_NAME, *WITHOUT_MEANING_THERE}
        if unknown:
            raise ValueError(f"no CTranslate2 counterpart for the generate arguments {sorted(unknown)}")
        self.prompts = [[_token(i) for i in row] for row in inputs["input_ids"].tolist()]
        self.seq2seq = model.config.is_encoder_decoder
        self.device = model.device
        if self.seq2seq:
            self.start = [[model.config.decoder_start_token_id]] * len(self.prompts)
        else:
            self.start = inputs["input_ids"].tolist()
        steps = options["max_new_tokens"]
        shared = {"beam_size": options["num_beams"]} | {name: options[name] for name in SAME_NAME if name in options}
        kind = ctranslate2.Translator if self.seq2seq else ctranslate2.Generator
        threads = torch.get_num_threads() or os.cpu_count()
        self.engine = kind(str(folder), device=device.split(":", 1)[0], compute_type="float32", intra_threads=threads)
        if self.seq2seq:
            self.arguments = shared | {"max_decoding_length": steps, "min_decoding_length": options["min_new_tokens"]}
        else:
            self.arguments = shared | {
                "max_length": steps, "min_length": options["min_new_tokens"], "include_prompt_in_result": False,
            }  # fmt: skip

    def __call__(self) -> Tensor:
        if self.seq2seq:
            results = self.engine.translate_batch(self.prompts, **self.arguments)
            best = [[int(token[1:]) for token in result.hypotheses[0]] for result in results]
        else:
            results = self.engine.generate_batch(self.prompts, **self.arguments)
            best = [result.sequences_ids[0] for result in results]
        return torch.tensor([[*start, *ids] for start, ids in zip(self.start, best, strict=True)], device=self.device)


def _token(index: int) -> str:
    return f"t{index}"


def _tokenizer(config: Any) -> Any:
    """Return a tokenizer whose token of id 7 is `t7`; the converter takes vocabulary and special tokens from it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {_token(i): i for i in range(config.vocab_size)}
    special = {f"{name}_token": getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad")}
    named = {name: _token(i) for name, i in special.items() if i is not None}
    if config.model_type == "marian":  # the converter drops the last row of the weights and, by this name, its token
        vocabulary["<pad>"] = vocabulary.pop(_token(config.pad_token_id))
        named["pad_token"] = "<pad>"
    unknown = next(token for token, i in vocabulary.items() if i not in special.values())
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unknown, **named)


@contextmanager
def _attributes(kind: type, values: dict[str, Any]) -> Iterator[None]:
    """Within it, the class has these attributes."""
    for name, value in values.items():
        setattr(kind, name, value)
    try:
        yield
    finally:
        for name in values:
            delattr(kind, name)
