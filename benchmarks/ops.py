"""Measure each operation of fastgen/ops against its counterpart, at the shapes of a decode step.

    python -m benchmarks.ops --list
    python -m benchmarks.ops --op kbest norm
    python -m benchmarks.ops --device cuda

The counterpart is the code that runs without fastgen. On a CUDA device a call is captured in a CUDA
graph, so that the device is timed and not Python. The bytes that the operation must move are
compared with the bandwidth of a plain copy. One JSON file, ops.json, goes to
benchmarks/results/<hardware>/. The exit status is 1 if any output differed.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.harness import folder_of, option, parser_of, write_whole
from fastgen.cli.bench.measure import Verdict, compare, environment, synchronize
from fastgen.ops.counts import calls

Call = Callable[[], Any]
Pair = tuple[Call, Call] | tuple[Call, Call, Callable[[Any, Any], tuple[Any, Any]]]
"""The baseline and the candidate.

A third function turns their outputs into a form in which they are comparable.
"""
REPEATED = 20
"""Number of calls in one CUDA graph."""


@dataclass(frozen=True)
class Row:
    """One operation at one shape.

    Attributes:
        op: name of the operation.
        shape: its shape, in words.
        baseline: name of the code that runs without fastgen.
        make: returns the baseline and the candidate.
        bytes: bytes that the operation must read and write; 0 if that is no useful measure.
        target: ratio to reach, by kind of device (cuda, cpu).
        only: kind of device that the row is for; None for any.
    """

    op: str
    shape: str
    baseline: str
    make: Callable[[Rig], Pair]
    bytes: Callable[[Rig], int]
    target: dict[str, float]
    only: str | None = None

    @property
    def name(self) -> str:
        return f"{self.op}/{self.shape}/{self.baseline}"


@dataclass
class Rig:
    """Factory of random tensors.

    Attributes:
        device: device of the tensors.
        dtype: dtype of the floating-point tensors.
    """

    device: str
    dtype: torch.dtype

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def integers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, device=self.device)

    @property
    def width(self) -> int:
        return self.dtype.itemsize


def rows() -> Iterator[Row]:
    """Yield every row of the table."""
    for b, m, v in (
        (32, 4, 50_264),
        (1, 4, 50_264),
        (32, 4, 32_128),
        (32, 1, 50_264),
        (14, 9, 50_264),
        (32, 4, 5_000),
    ):
        yield Row(
            "kbest", f"{b}x{m}x{v}", "log_softmax + topk",
            lambda rig, b=b, m=m, v=v: _kbest(rig, b, m, v, 2 * m),
            lambda rig, b=b, m=m, v=v: b * m * v * rig.width, {"cuda": 5.0, "cpu": 1.5},
        )  # fmt: skip
        yield Row(
            "kbest", f"{b}x{m}x{v}", "the same, in place",
            lambda rig, b=b, m=m, v=v: _kbest(rig, b, m, v, 2 * m, in_place=True),
            lambda rig, b=b, m=m, v=v: b * m * v * rig.width, {}, only="cpu",
        )  # fmt: skip
        yield Row(
            "kbest", f"{b}x{m}x{v}", "by peeling",
            lambda rig, b=b, m=m, v=v: _strategies(rig, b, m, v, 2 * m),
            lambda rig, b=b, m=m, v=v: b * m * v * rig.width, {}, only="cuda",
        )  # fmt: skip
    for r, v in ((128, 50_264), (32, 50_264), (1, 50_264), (32, 8_000), (1, 6_000)):
        yield Row(
            "argmax", f"{r}x{v}", "torch.argmax", lambda rig, r=r, v=v: _argmax(rig, r, v),
            lambda rig, r=r, v=v: r * v * rig.width, {},
        )  # fmt: skip
    for r, length in ((128, 1024), (16, 512), (128, 64)):
        for baseline in ("Python loop", "transformers"):
            yield Row(
                "ngram_block", f"{r}x{length}", baseline,
                lambda rig, r=r, length=length, baseline=baseline: (
                    _ngrams(rig, r, length, baseline)
                ),
                lambda rig, r=r, length=length: 8 * r * length,
                {"cuda": 75.0, "cpu": 10.0} if baseline == "Python loop" else {},
            )  # fmt: skip
    for b, m, s, t, h, d in (
        (32, 4, 1024, 64, 16, 64),
        (4, 4, 512, 32, 16, 64),
        (32, 4, 32, 32, 8, 64),
        (8, 4, 256, 32, 12, 64),
    ):
        yield Row(
            "beam_attention", f"{b}x{m}x({s}+{t})x{h}x{d}", "SDPA on K/V per beam",
            lambda rig, b=b, m=m, s=s, t=t, h=h, d=d: _attention(rig, b, m, s, t, h, d),
            lambda rig, b=b, m=m, s=s, t=t, h=h, d=d: 2 * b * h * (s + m * t) * d * rig.width,
            {"cuda": 3.0},
        )  # fmt: skip
    for r, d in ((128, 1024), (2048, 768), (16_384, 1024), (8, 4096)):
        for rms in (False, True):
            yield Row(
                "norm", f"{r}x{d} {'RMSNorm' if rms else 'LayerNorm'}", "add, then the module",
                lambda rig, r=r, d=d, rms=rms: _norm(rig, r, d, rms),
                lambda rig, r=r, d=d: 4 * r * d * rig.width, {},
            )  # fmt: skip
    for r, d in ((128, 1024), (4, 1024)):
        yield Row(
            "embedding", f"{r}x{d}", "scale, add, LayerNorm",
            lambda rig, r=r, d=d: _embedding(rig, r, d),
            lambda rig, r=r, d=d: 3 * r * d * rig.width, {},
        )  # fmt: skip
    for r, d in ((128, 4096), (2048, 3072)):
        yield Row(
            "activation", f"{r}x{d} gelu", "add, gelu",
            lambda rig, r=r, d=d: _activation(rig, r, d, gated=False),
            lambda rig, r=r, d=d: 2 * r * d * rig.width, {},
        )  # fmt: skip
        yield Row(
            "activation", f"{r}x{d} silu, gated", "silu, times gate",
            lambda rig, r=r, d=d: _activation(rig, r, d, gated=True),
            lambda rig, r=r, d=d: 3 * r * d * rig.width, {},
        )  # fmt: skip
    yield Row(
        "sample", "32x50264 top-k 50, top-p 0.9", "transformers' warpers, multinomial",
        lambda rig: _sample(rig, 32, 50_264), lambda rig: 32 * 50_264 * rig.width, {},
    )  # fmt: skip
    for r, left in ((32, 50), (32, 0), (4, 0)):
        yield Row(
            "sample", f"{r}x50264 top-p 0.9{' of top-k 50' if left else ''}", "transformers' top-p",
            lambda rig, r=r, left=left: _nucleus(rig, r, 50_264, left),
            lambda rig, r=r: 2 * r * 50_264 * rig.width, {}, only="cpu",
        )  # fmt: skip
    for b, m, t, h, d in ((32, 4, 64, 16, 64), (4, 4, 32, 16, 64)):
        yield Row(
            "cache", f"reorder {b}x{m}x{t}x{h}x{d}", "index_select of K/V",
            lambda rig, b=b, m=m, t=t, h=h, d=d: _reorder(rig, b, m, t, h, d), lambda _: 0, {},
        )  # fmt: skip
        yield Row(
            "tables", f"{b}x{m}, {t} of {2 * t} tokens", "transformers' gathers",
            lambda rig, b=b, m=m, t=t: _tables(rig, b, m, t), lambda _: 0, {},
        )  # fmt: skip
    for b, m, h, kv, d in ((32, 4, 32, 8, 128), (1, 4, 32, 8, 128)):
        yield Row(
            "rotation", f"{b}x{m}x{h}+{kv}x{d}", "torch's operators",
            lambda rig, b=b, m=m, h=h, kv=kv, d=d: _rotation(rig, b, m, h, kv, d),
            lambda rig, b=b, m=m, h=h, kv=kv, d=d: 2 * b * m * (h + 2 * kv) * d * rig.width, {},
            only="cuda",
        )  # fmt: skip
    for b, m in ((32, 4), (1, 4), (32, 9)):
        yield Row(
            "choice", f"{b}x{m}", "transformers' rules in torch",
            lambda rig, b=b, m=m: _choice(rig, b, m), lambda _: 0, {}, only="cuda",
        )  # fmt: skip


def _kbest(rig: Rig, b: int, m: int, v: int, k: int, in_place: bool = False) -> tuple[Call, Call]:
    """Return k-best selection by log_softmax and topk, and by the operation.

    On a CPU the operation writes log-probabilities to memory allocated beforehand, as fastgen's
    decode loops do.

    Args:
        in_place: also let the baseline do so, which no toolkit does. Otherwise first touching newly
            allocated memory takes most of its time.
    """
    from fastgen.ops.selection.kbest import kbest

    logits, scores = rig.randn(b, m, v) * 3, torch.randn(b, m, device=rig.device)
    theirs, ours = (torch.empty(b, m, v) if rig.device == "cpu" else None for _ in range(2))

    def separate() -> Any:
        log_probs = torch.log_softmax(logits.view(b * m, v).float(), -1).view(b, m, v)
        return torch.topk((log_probs + scores[:, :, None]).view(b, m * v), k)

    def without_fresh_memory() -> Any:
        torch.log_softmax(logits.float(), -1, out=theirs)
        return torch.topk(theirs.add_(scores[:, :, None]).view(b, m * v), k)

    return without_fresh_memory if in_place else separate, lambda: kbest(
        logits, scores, k, scratch=ours
    )[:2]


def _argmax(rig: Rig, r: int, v: int) -> tuple[Call, Call]:
    from fastgen.ops.selection.kbest import argmax

    logits = rig.randn(r, v) * 3
    return lambda: torch.argmax(logits, -1), lambda: argmax(logits)


def _strategies(rig: Rig, b: int, m: int, v: int, k: int) -> tuple[Call, Call]:
    from fastgen.ops.selection import kbest_kernels

    logits, scores = rig.randn(b, m, v) * 3, torch.randn(b, m, device=rig.device)
    return (
        lambda: kbest_kernels.run(logits, scores, k, group=0)[:2],
        lambda: kbest_kernels.run(logits, scores, k, group=32)[:2],
    )


def _ngrams(rig: Rig, r: int, length: int, baseline: str) -> tuple[Call, Call]:
    from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor

    from fastgen.ops.selection.ngram_block import ngram_block_, ngram_block_reference

    scores, ids = rig.randn(r, 50_264), rig.integers(300, r, length)
    ours = scores.clone()
    if baseline == "transformers":
        processor = NoRepeatNGramLogitsProcessor(3)
        return lambda: processor(ids, scores), lambda: ngram_block_(ours, ids, 3)
    return lambda: ngram_block_reference(scores, ids, 3), lambda: ngram_block_(ours, ids, 3)


def _attention(rig: Rig, b: int, m: int, s: int, t: int, h: int, d: int) -> tuple[Call, Call]:
    from fastgen.ops.beam_attention import beam_attention

    query, keys, values = (
        rig.randn(b, m, h, d),
        rig.randn(b, h, s + m * t, d),
        rig.randn(b, h, s + m * t, d),
    )
    ancestors = rig.integers(m, b, m, t)
    step = torch.arange(t, device=rig.device) * m + s
    slots = torch.cat([torch.arange(s, device=rig.device).expand(b, m, s), ancestors + step], 2)
    mask = torch.full((b, m, s + m * t), -torch.inf, device=rig.device, dtype=rig.dtype).scatter_(
        2, slots, 0.0
    )[:, None]
    sentence = torch.arange(b, device=rig.device)[:, None, None]
    # A KV cache per beam holds the same keys and values, copied for each beam.
    own_keys, own_values = (
        kv.transpose(1, 2)[sentence, slots].flatten(0, 1).transpose(1, 2).contiguous()
        for kv in (keys, values)
    )
    rows = query.view(b * m, 1, h, d).transpose(1, 2)
    return (
        lambda: (
            F.scaled_dot_product_attention(rows, own_keys, own_values)
            .transpose(1, 2)
            .reshape(b, m, h, d)
        ),
        lambda: beam_attention(query, keys, values, mask, d**-0.5),
    )


def _norm(rig: Rig, r: int, d: int, rms: bool) -> tuple[Call, Call]:
    """Return residual addition and the module that models use, and the fused operation."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    from fastgen.ops.norm import norm

    x, residual = rig.randn(r, d), rig.randn(r, d)
    module: Any = LlamaRMSNorm(d) if rms else torch.nn.LayerNorm(d)
    for parameter in module.parameters():
        parameter.data = rig.randn(d)
    weight, bias, eps = module.weight, getattr(module, "bias", None), 1e-6 if rms else 1e-5

    def stock() -> Any:
        total = x + residual
        return module(total), total

    return stock, lambda: norm(x, weight, bias, eps, residual, rms=rms)


def _embedding(rig: Rig, r: int, d: int) -> tuple[Call, Call]:
    from fastgen.ops.embedding import Positions, normed_embedding
    from fastgen.ops.norm import NormParameters

    ids, tokens, table = rig.integers(50_264, r), rig.randn(50_264, d), rig.randn(1026, d)
    weight, bias, scale = rig.randn(d), rig.randn(d), d**0.5
    of = NormParameters(weight, bias, 1e-5)

    def stock() -> Any:
        total = F.embedding(ids, tokens) * scale + table[9]
        return F.layer_norm(total, (d,), weight, bias, 1e-5), total

    return stock, lambda: normed_embedding(ids, tokens, scale, Positions(table, 2, 7), of)


def _activation(rig: Rig, r: int, d: int, gated: bool) -> tuple[Call, Call]:
    from fastgen.ops.activation import fused_activation

    x, gate, bias = rig.randn(r, d), rig.randn(r, d), rig.randn(d)
    if gated:
        return lambda: F.silu(x) * gate, lambda: fused_activation(x, "silu", gate=gate)
    return lambda: F.gelu(x + bias), lambda: fused_activation(x, "gelu", bias)


def _sample(rig: Rig, r: int, v: int) -> Pair:
    """Return sampling by transformers and by fastgen.

    Each draws its own random numbers. Comparable is whether the tokens are among the kept ones.
    """
    from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

    from fastgen.ops.selection.sample import sample

    logits = rig.randn(r, v) * 3

    def warped(top_p: float) -> Tensor:
        return TopPLogitsWarper(top_p)(None, TopKLogitsWarper(50)(None, logits))

    def stock() -> Any:
        return torch.multinomial(warped(0.9).softmax(-1), 1)[:, 0]

    # Rounding of the sum of probabilities may keep one token more.
    kept = warped(0.91) > -torch.inf

    def are_kept(*tokens: Tensor) -> Any:
        return tuple(kept.gather(1, each[:, None]) for each in tokens)

    return stock, lambda: sample(logits, top_k=50, top_p=0.9), are_kept


def _nucleus(rig: Rig, r: int, v: int, left: int) -> tuple[Call, Call]:
    """Return top-p filtering by transformers and by fastgen.

    The logits are as peaked as those of a trained model.

    Args:
        left: keep only this many of the highest logits; 0 keeps all.
    """
    from transformers.generation.logits_process import TopPLogitsWarper

    from fastgen.decoding.logits.text import Text
    from fastgen.decoding.logits.top_p import TopP

    logits = rig.randn(r, v) * 5
    if left:
        logits = logits.masked_fill(logits < logits.topk(left).values[:, -1:], -torch.inf)
    warper, text = TopPLogitsWarper(0.9), Text(rig.integers(v, r, 1), 1)
    transform = TopP(0.9, 1, warper)
    return lambda: warper(text.ids, logits), lambda: transform(logits, text)


def _parents(rig: Rig, b: int, m: int) -> Tensor:
    """Return parents (B, M) whose repeated application changes nothing after the first time.

    An update in place then has the same result however often it runs.
    """
    own = torch.arange(m, device=rig.device)
    return torch.where(own % 2 == 0, own, rig.integers((m + 1) // 2, b, m) * 2)


def _reorder(rig: Rig, b: int, m: int, t: int, h: int, d: int) -> Pair:
    """Return the reordering of keys and values of beams, and that of the table of visible slots.

    Comparable are the keys and values that each beam sees.
    """
    from fastgen.ops.cache import reorder_rows_

    keys, values = rig.randn(b * m, h, t, d), rig.randn(b * m, h, t, d)
    own = torch.eye(m, device=rig.device, dtype=torch.bool).repeat(1, t)
    table = torch.full((b, m, t * m), -torch.inf, device=rig.device).masked_fill_(own, 0.0)
    parents = _parents(rig, b, m)
    index = (parents + torch.arange(b, device=rig.device)[:, None] * m).flatten()

    def seen(reordered: Any, _: Any) -> tuple[Any, Any]:
        beam = table.view(b, m, t, m).argmax(-1)
        sentence = torch.arange(b, device=beam.device)[:, None, None]
        step = torch.arange(t, device=beam.device)
        shared = (kv.view(b, m, h, t, d).transpose(2, 3) for kv in (keys, values))
        return reordered, tuple(
            kv[sentence, beam, step].transpose(2, 3).flatten(0, 1) for kv in shared
        )

    return (
        lambda: (keys.index_select(0, index), values.index_select(0, index)),
        lambda: reorder_rows_(table, parents),
        seen,
    )


def _choice(rig: Rig, b: int, m: int) -> tuple[Call, Call]:
    """Return the selection of beams from a step's candidates, by rules in torch and in place.

    In-place updates of the state do not change the selected parents and tokens, however often it
    runs.
    """
    from fastgen.decoding.search.beam_search import BeamSearch
    from fastgen.decoding.search.finishing_rules import TransformersRule
    from fastgen.decoding.search.stopping import Stop
    from fastgen.ops.selection.choice import Candidates, State, Step, choose_

    rule = TransformersRule(m, 64, 1, 1, 1.0, early_stopping=False)
    prompt = torch.zeros(b, 1, dtype=torch.int64, device=rig.device)
    search, count = BeamSearch(prompt, rule, Stop(), [], 0), torch.full((1,), 5, device=rig.device)
    values = torch.randn(b, 2 * m, device=rig.device).sort(descending=True).values
    place, hits, end = torch.arange(2 * m, device=rig.device), values < -1.5, 2 * m
    beam, token = (place % m).repeat(b, 1), torch.where(hits, end, place)
    candidates = Candidates(values, beam, token, hits)
    ends = torch.tensor([end], device=rig.device)
    indices = beam * (end + 1) + token
    state = State(
        *(each.clone() for each in (search.scores, search.finished.scores, search.finished.done)),
        search.improvable.clone(),
        torch.zeros(1, dtype=torch.bool, device=rig.device),
    )

    def stock() -> tuple[Tensor, Tensor]:
        chosen = search.by_rules(candidates, count)
        return chosen.parents, chosen.tokens

    def ours() -> tuple[Tensor, Tensor]:
        rules = rule.for_kernels(state, search.sentences, count)
        assert rules is not None
        step = Step(ends, False, search.sentences, state, rules, count)
        chosen = choose_(values, indices, end + 1, step)
        return chosen.parents, chosen.tokens

    return stock, ours


def _rotation(rig: Rig, b: int, m: int, h: int, kv: int, d: int) -> tuple[Call, Call]:
    """Return rotary embedding of the newest queries and keys, and the write to KV slots."""
    from fastgen.ops.cache import write_slots_
    from fastgen.ops.rotation import Rotation, rotate_into_slots_, rotated

    query, key, value = rig.randn(b * m, h + 2 * kv, d).split((h, kv, kv), 1)
    angle = rig.randn(1, 1, d)
    turn, keys, values, start = (
        Rotation(angle.cos(), angle.sin()),
        *(rig.randn(b, kv, 256, d) for _ in "kv"),
        128,
    )

    def separate() -> Any:
        turned, newest = rotated(query, turn), rotated(key, turn)
        write_slots_(keys, values, newest[:, :, None], value[:, :, None], start)
        return turned

    return separate, lambda: rotate_into_slots_(query, key, value, turn, keys, values, start)


def _tables(rig: Rig, b: int, m: int, t: int) -> Pair:
    """Return the update of the tables of tokens and of beam ancestry, which are half full.

    transformers gathers the tables of 2M candidates and then selects M of them. fastgen updates its
    tables in place; comparable are their contents.
    """
    from transformers import GenerationMixin

    from fastgen.ops.tables import Table, extend_rows_

    gather = GenerationMixin._gather_beams
    ids, rows = rig.integers(50_000, b, m, 2 * t), rig.integers(m, b, m, 2 * t).to(torch.int32)
    for table in (ids, rows):
        table[:, :, t:] = 0
    beams, candidates = rig.integers(m, b, 2 * m), rig.integers(50_000, b, 2 * m)
    beams[:, :m] = _parents(rig, b, m)
    order = torch.arange(m, device=ids.device).expand(b, m)
    parents, tokens = beams.gather(1, order), candidates.gather(1, order)
    growing = [Table(ids.clone(), tokens[:, :, None]), Table(rows.clone(), parents[:, :, None])]

    def gathers() -> tuple[Any, Any]:
        new_rows, new_ids = gather(rows, beams), gather(ids, beams)
        new_ids[:, :, t], new_rows[:, :, t] = candidates, beams.to(torch.int32)
        return gather(new_ids, order), gather(new_rows, order)

    def contents(gathered: Any, _: None) -> tuple[Any, Any]:
        return gathered, tuple(table.rows for table in growing)

    return gathers, lambda: extend_rows_(growing, parents, t), contents


def same(op: str, dtype: torch.dtype) -> Callable[[Any, Any], Verdict]:
    """Return the comparison of an operation's outputs with its baseline's."""
    tolerance = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    near_ties = 0.05 if op in ("kbest", "argmax") else 0.0

    def agree(a: Any, b: Any) -> Verdict:
        pairs = zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]
        for one, other in pairs:
            if not one.is_floating_point():
                if float((one != other).float().mean()) > near_ties:
                    return Verdict(False, note="other indices")
            elif not torch.allclose(one.float(), other.float(), atol=tolerance, rtol=tolerance):
                return Verdict(
                    False, note=f"{float((one - other).abs().nan_to_num(0).max()):.2e} apart"
                )
        return Verdict(True)

    return agree


def copies(needed: int, device: str) -> int:
    """Return how many sets of inputs a row alternates between.

    On a GPU together they are about four times the size of its L2 cache, so that no input stays
    cached.

    Args:
        needed: bytes of one set.
        device: device of the inputs.
    """
    if not device.startswith("cuda"):
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(REPEATED, -(-4 * cache // max(1, needed))))


def repeated(calls: Sequence[Call], device: str, seconds: float) -> tuple[Call, int]:
    """Return a function that repeats a call, and the number of repetitions.

    On a CPU the repetitions take about `seconds`. On CUDA they are captured in one CUDA graph; a
    call that cannot be captured runs once. The function returns what the first of the calls does.

    Args:
        calls: the same call with different inputs, which take turns; a single call on a CPU.
        device: device of the inputs.
        seconds: duration to aim for, on a CPU.
    """
    call = calls[0]
    result, *_ = [call() for call in calls]
    if device == "cpu":
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        count = max(1, min(1_000, round(seconds / max(min(times), 1e-7))))

        def many() -> Any:
            for _ in range(count - 1):
                call()
            return call()

        return many, count
    count = REPEATED
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for i in reversed(range(count)):
                result = calls[i % len(calls)]()
    except RuntimeError:  # the call synchronizes with the host: time it without a graph
        torch.cuda.synchronize()
        return call, 1

    def replay() -> Any:
        graph.replay()
        return result

    return replay, count


def copy_bandwidth(device: str) -> float:
    """Return the bytes per second that a plain copy of 1 GiB (CPU: 256 MiB) reads and writes."""
    source = torch.zeros(2**28 if device.startswith("cuda") else 2**26, device=device)
    target, best = torch.empty_like(source), math.inf
    for _ in range(8):
        synchronize(device)
        begin = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * source.nbytes / best


def measure(row: Row, rig: Rig, rounds: int, seconds: float, bandwidth: float) -> dict[str, Any]:
    """Time one row; the result holds no times if the outputs differ."""
    torch.manual_seed(0)
    needed = row.bytes(rig)
    pairs = [row.make(rig) for _ in range(copies(needed, rig.device))]
    agree = same(row.op, rig.dtype)

    def check(a: Any, b: Any) -> Verdict:
        for comparable in pairs[0][2:]:
            a, b = comparable(a, b)
        return agree(a, b)

    verdict = check(pairs[0][0](), pairs[0][1]())
    if not verdict.equal:
        return {"equal": False, "note": verdict.note}
    (one, times), (other, more) = (
        repeated([pair[side] for pair in pairs], rig.device, seconds) for side in (0, 1)
    )
    outcome = compare(one, other, rounds, check, synchronize=lambda: synchronize(rig.device))
    if not outcome.equal:
        return {"equal": False, "note": outcome.note}
    before, after = outcome.baseline_seconds / times, outcome.candidate_seconds / more
    scale = more / times
    return {
        "equal": True,
        "baseline_us": before * 1e6,
        "candidate_us": after * 1e6,
        "ratio": outcome.ratio * scale,
        "low": outcome.low * scale,
        "high": outcome.high * scale,
        "bytes": needed,
        "gb_per_s": needed / after / 1e9,
        "share_of_copy": needed / after / bandwidth,
        "target": row.target.get(rig.device.partition(":")[0]),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the rows that the arguments name; return the exit status."""
    table = list(rows())
    parser = parser_of("benchmarks.ops", __doc__)
    parser.add_argument(
        "--op",
        nargs="+",
        choices=sorted({row.op for row in table}),
        metavar="NAME",
        help="default: all",
    )
    parser.add_argument("--list", action="store_true", help="print the rows, and end")
    option(parser, "device")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=["float32", "float16", "bfloat16"],
        help="default: float32",
    )
    option(parser, "threads")
    option(parser, "rounds", default=11, help="default: 11")
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.01,
        help="how long one sample lasts on a CPU (default: 0.01)",
    )
    option(parser, "out")
    args = parser.parse_args(argv)
    kind = args.device.partition(":")[0]
    chosen = [
        row for row in table if (not args.op or row.op in args.op) and row.only in (None, kind)
    ]
    if args.list:
        print("\n".join(row.name for row in chosen))
        return 0
    torch.set_grad_enabled(False)
    if args.threads:
        torch.set_num_threads(args.threads)
    rig = Rig(args.device, getattr(torch, args.dtype))
    bandwidth = copy_bandwidth(args.device)
    print(
        f"copy: {bandwidth / 1e9:.0f} GB/s\n"
        f"{'operation':<62}{'without':>11}{'fastgen':>11}{'ratio':>8}{'GB/s':>7}{'of copy':>8}"
    )
    results: dict[str, Any] = {}
    place = environment()
    name = f"ops{'' if args.dtype == 'float32' else f'_{args.dtype}'}.json"
    for row in chosen:
        found = results[row.name] = measure(row, rig, args.rounds, args.seconds, bandwidth)
        data = {
            "kind": "ops",
            "environment": place,
            "arguments": {name: value for name, value in vars(args).items() if name != "out"},
            "copy_gb_per_s": bandwidth / 1e9,
            "paths": {f"{op} {path}": count for (op, path), count in sorted(calls.items())},
            "result": results,
        }
        write_whole(folder_of(args) / name, data)
        if not found["equal"]:
            print(f"{row.name:<62}outputs differ, no speed given: {found['note']}", flush=True)
            continue
        missed = (
            f"  BELOW {found['target']:g}x"
            if found["target"] and found["ratio"] < found["target"]
            else ""
        )
        print(
            f"{row.name:<62}{found['baseline_us']:>8.1f} us{found['candidate_us']:>8.1f} us"
            f"{found['ratio']:>7.2f}x"
            f"{found['gb_per_s']:>7.0f}{found['share_of_copy']:>8.0%}{missed}",
            flush=True,
        )
    return 0 if all(found["equal"] for found in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
