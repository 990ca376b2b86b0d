"""Yan et al. 2021 (FastSeq), tables 1 to 3."""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import fairseq_command, ops
from benchmarks.cases import EXAMPLE, FAIRSEQ_SHAPES, SHAPES, Case, FairseqShape, Shape
from benchmarks.paper.table import DIFFERS, NotHere, Order, Result, Table, times
from benchmarks.runners import run_fairseq, run_generate
from fastgen.cli.bench.measure import paired_ratio

_HARDWARE = "V100 16 GB"
_BLOCKED = {"no_repeat_ngram_size": 3}

_REDUCED: dict[str, dict[str, Any]] = {
    "BartConfig": {
        "d_model": 512, "encoder_layers": 4, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048,
        "encoder_attention_heads": 8, "decoder_attention_heads": 8,
    },
    "T5Config": {"d_model": 512, "d_ff": 2048, "num_layers": 4, "num_heads": 8},
    "GPT2Config": {"n_layer": 4, "n_embd": 512, "n_head": 8},
}  # fmt: skip


@dataclass(frozen=True)
class _Plain:
    """A model of a transformers family with its own random initialisation.

    Attributes:
        family: `model_type` of the family.
        values: arguments of its config class.
        tiny: arguments that differ in the tiny version.
    """

    family: str
    values: dict[str, Any]
    tiny: dict[str, Any]

    def tiny_version(self) -> _Plain:
        return replace(self, values=self.values | self.tiny)

    def build(self, dtype: Any, device: str) -> Any:
        import torch
        from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM

        import fastgen.unilm  # noqa: F401  (registers its family)

        torch.manual_seed(0)
        model: Any = AutoModelForSeq2SeqLM.from_config(CONFIG_MAPPING[self.family](**self.values))
        return model.to(device=device, dtype=dtype).eval()


def _layers(layers: int, width: int, heads: int) -> dict[str, Any]:
    """Return the sizes of ProphetNet's encoder and decoder."""
    sides = {f"{side}_ffn_dim": 4 * width for side in ("encoder", "decoder")}
    for side in ("encoder", "decoder"):
        sides |= {f"num_{side}_layers": layers, f"num_{side}_attention_heads": heads}
    return {"hidden_size": width, **sides}


def _bert_layers(layers: int, width: int, heads: int) -> dict[str, Any]:
    sizes = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }
    return {"hidden_size": width, **sizes}


_PROPHETNET = _Plain(
    "prophetnet",
    {**_layers(12, 1024, 16), "init_std": 0.05},
    {**_layers(1, 32, 4), "vocab_size": 61},
)
_UNILM = _Plain(
    "unilm",
    {**_bert_layers(12, 768, 12), "initializer_range": 0.05, "vocab_size": 28_996},
    {
        **_bert_layers(1, 32, 4), "vocab_size": 61, "mask_token_id": 5, "eos_token_id": 3,
        "decoder_start_token_id": 4,
    },
)  # fmt: skip


def _bart(decoder_layers: int) -> Shape:
    shape = SHAPES["bart_large"]
    return replace(shape, values=shape.values | {"decoder_layers": decoder_layers})


# Model; the paper's samples per second without and with FastSeq, and their ratio as printed; the
# shape; tokens of the source, and of the output; further arguments of `generate`.
_MODELS: tuple[tuple[str, float, float, str, Any, int, int, dict[str, Any]], ...] = (
    ("BART 12L-12L-1024", 2.4, 18.4, "7.7x", _bart(12), 1022, 64, _BLOCKED),
    ("DistilBART 12L-6L-1024", 3.4, 18.5, "5.4x", _bart(6), 1022, 64, _BLOCKED),
    ("ProphetNet 12L-12L-1024", 2.8, 10.7, "3.8x", _PROPHETNET, 512, 64, _BLOCKED),
    ("T5 12L-12L-768", 8.7, 31.3, "4.3x (sic)", SHAPES["t5_base"], 64, 64, {}),
    ("Transformer 6L-6L-1024 (fairseq)", 96.0, 417.0, "4.3x", FAIRSEQ_SHAPES["big"], 32, 32, {}),
    ("GPT2 0L-12L-768", 3.0, 16.7, "5.5x", SHAPES["gpt2"], 900, 64, _BLOCKED),
    ("UniLM 12L-0L-768", 1.7, 16.4, "9.6x", _UNILM, 420, 64, _BLOCKED),
)


_FAIRSEQ, _NO_FAIRSEQ = importlib.util.find_spec("fairseq") is not None, "fairseq is not installed"


def table1(order: Order) -> Result:
    """Measure one batch of each model; both sides run the same batch."""
    rows: list[tuple[str, ...]] = []
    raw: dict[str, Any] = {}
    for label, before, after, printed, shape, source, new, options in _MODELS:
        is_fairseq, paper = isinstance(shape, FairseqShape), (f"{before:g} -> {after:g}", printed)
        if is_fairseq and not _FAIRSEQ:
            rows.append((label, *paper, "", "", _NO_FAIRSEQ))
            continue
        if order.size == "reduced":
            source, new, shape = min(source, 256), 24, _reduced(shape)
        case = Case(
            label,
            "",
            "",
            shape,
            batch=order.of(32, 4, 2),
            source=source,
            beams=4,
            new_tokens=new,
            options=options,
        )
        if order.size == "tiny":
            case = case.tiny()
        run = run_fairseq if is_fairseq else run_generate
        result = raw[label] = run(case, order.session)
        ours: tuple[str, ...] = ("", "", DIFFERS)
        if result["equal"]:
            speeds = (
                f"{case.batch / result[side]:.2f}"
                for side in ("baseline_seconds", "candidate_seconds")
            )
            ours = (*speeds, times(result["ratio"], result["low"], result["high"]))
        rows.append((label, *paper, *ours))
    heads = (
        "model",
        "paper, samples/s",
        "paper",
        "toolkit, samples/s",
        "fastgen, samples/s",
        "here",
    )
    sizes = order.of(
        "the paper's shapes, 32 sentences",
        "4 layers of 512 (DistilBART's decoder 2; Transformer "
        "as it is), 4 sentences of at most 256 tokens, 24 new tokens",
        "tiny",
    )
    return Result(
        heads,
        rows,
        f"4 beams, random weights, {sizes}",
        all(r["equal"] for r in raw.values()),
        raw=raw,
    )


def _reduced(shape: Any) -> Any:
    if isinstance(shape, FairseqShape):
        return shape
    if isinstance(shape, _Plain):
        sizes = (_layers if shape.family == "prophetnet" else _bert_layers)(4, 512, 8)
        return replace(shape, values=shape.values | sizes)
    values = shape.values | _REDUCED[shape.config]
    if "decoder_layers" in values:
        values["decoder_layers"] //= 3
    return replace(shape, values=values)


# Each line adds one feature: label, the paper's speed, and environment variables that turn off the
# features of later lines.
_LADDER: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("no cache", "1.8 (0.7x)", fairseq_command.STOCK),
    ("fairseq", "2.4 (1.0x)", fairseq_command.STOCK),
    (
        "+ asynchronous pipeline",
        "3.6 (1.5x)",
        {"FASTGEN_SKIP": "fairseq.generate,fairseq.attention"},
    ),
    (
        "+ n-gram blocking, shared cache",
        "8.1 (3.3x)",
        {"FASTGEN_STEP": "module", "FASTGEN_LINEAR": "off"},
    ),
    ("+ linear layers by oneDNN", "", {"FASTGEN_STEP": "module"}),
    ("+ steps from the weights", "", {}),
    ("+ larger batch", "18.4 (7.7x)", {}),
)
_NO_CACHE, _LARGER = _LADDER[0][0], _LADDER[-1][0]


def table2(order: Order) -> Result:
    """Measure `fairseq-generate` on real sentences with a small trained model.

    Each run is a process of its own, timed from its start to its end.
    """
    if not _FAIRSEQ:
        raise NotHere(_NO_FAIRSEQ)
    batch = order.of(32, 16, 4)
    case = Case(
        "",
        "",
        "",
        batch=batch,
        beams=4,
        new_tokens=order.of(100, 100, 8),
        options={"--no-repeat-ngram-size": 3},
        sentences=order.of(2000, 200, 12),
    )
    outputs: dict[str, list[str]] = {label: [] for label, _, _ in _LADDER}
    seconds: dict[str, list[float]] = {label: [] for label, _, _ in _LADDER}
    with tempfile.TemporaryDirectory(prefix="fastgen-paper-") as scratch:
        folder = Path(scratch)
        fairseq_command.prepare(
            folder, order.session.corpus or EXAMPLE, case.sentences, order.of(500, 500, 5)
        )
        for turn in range(order.session.rounds or 3):
            for label, _, variables in _LADDER[:: 1 if turn % 2 == 0 else -1]:
                sized = replace(case, batch=4 * batch) if label == _LARGER else case
                words = fairseq_command.arguments(folder, sized, order.session.device)
                name = (
                    str(Path(__file__).with_name("no_cache.py"))
                    if label == _NO_CACHE
                    else "fairseq-generate"
                )
                began = time.perf_counter()
                outputs[label].append(fairseq_command.run(name, *words, **variables)[0])
                seconds[label].append(time.perf_counter() - began)
    expected = outputs["fairseq"][0]
    equal = {
        label: all(fairseq_command.same(expected, one).equal for one in each)
        for label, each in outputs.items()
    }
    rows: list[tuple[str, ...]] = []
    for label, paper, _ in _LADDER:
        ours: tuple[str, ...] = ("", DIFFERS)
        if equal[label]:
            speed = case.sentences / statistics.median(seconds[label])
            ours = (f"{speed:.1f}", times(*paired_ratio(seconds["fairseq"], seconds[label])))
        rows.append((label, paper, *ours))
    shape = (
        f"3 + 3 layers of 128, trained for a minute; {case.sentences} sentences, batches of {batch}"
        f" (last line {4 * batch}), 4 beams, n-gram 3; whole processes"
    )
    heads = ("", "paper, samples/s", "here, samples/s", "here")
    return Result(heads, rows, shape, all(equal.values()), raw={"seconds": seconds, "equal": equal})


def table3(order: Order) -> Result:
    """Measure the n-gram blocking of one step.

    Compares a loop in Python, transformers' own processor, and fastgen's operation.
    """
    rig = ops.Rig(order.session.device, order.session.dtype)
    size = order.of((128, 1024), (128, 1024), (16, 512))
    measured = {
        row.baseline: ops.measure(row, rig, order.session.rounds or 3, 0.01, 1.0)
        for row in ops.rows()
        if row.op == "ngram_block" and row.shape == f"{size[0]}x{size[1]}"
    }
    loop, processor = measured["Python loop"], measured["transformers"]
    equal = loop["equal"] and processor["equal"]
    rows: list[tuple[str, ...]] = []
    if equal:
        spent = (("loop in Python (fairseq; CPU kernel)", "4477 ms; 585 ms", loop["baseline_us"]),
                 ("transformers' current processor", "", processor["baseline_us"]),
                 ("one operation (GPU kernel)", "7.8 ms", loop["candidate_us"]))  # fmt: skip
        rows = [
            (label, paper, f"{us / 1e3:.3f} ms", f"{loop['baseline_us'] / us:.0f}x")
            for label, paper, us in spent
        ]
    shape = f"one step of {size[0]} texts of {size[1]} tokens, 50,264 words, n = 3"
    return Result(
        ("", "paper, whole run", "here, one step", "speed-up"),
        rows,
        shape,
        equal,
        raw=measured,
    )


TABLES = (
    Table(
        "fastseq_table1",
        "FastSeq, table 1",
        "speed by model architecture",
        _HARDWARE,
        table1,
    ),
    Table(
        "fastseq_table2",
        "FastSeq, table 2",
        "speed as features are enabled one after another",
        _HARDWARE,
        table2,
    ),
    Table("fastseq_table3", "FastSeq, table 3", "n-gram blocking alone", _HARDWARE, table3),
)
