"""Compare the operations in C with torch on odd shapes: `python -m tests.native_fuzz FOLDER`.

The process loads the libraries that `fastgen/ops/native/build.py --sanitize FOLDER` has put into a
folder, with the sanitizers' runtime preloaded (`environment`). The sanitizers end the process at
the first read or write outside of a tensor's memory. A result that differs from torch's raises.
Round i of a seed is drawn from these two numbers alone.

With ``--pytest FILE ...`` the libraries run those tests instead. With ``--wrong`` they run calls
that are wrong on purpose, which the sanitizers have to detect.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from fastgen import config
from fastgen.models.layers import packed_weights as weights
from fastgen.ops import int8, logit_bounds, native
from fastgen.ops.beam_attention import beam_attention, beam_attention_reference
from fastgen.ops.cache import move_sentences_
from fastgen.ops.counts import calls
from fastgen.ops.embedding import embedding, embedding_reference
from fastgen.ops.logit_bounds import error_bounds
from fastgen.ops.native import build, noise
from fastgen.ops.native import products as native_products
from fastgen.ops.selection import token_mask
from fastgen.ops.selection.kbest import LogitsUpdates, kbest, kbest_reference
from fastgen.ops.selection.log_softmax import log_softmax, log_softmax_reference
from fastgen.ops.selection.ngram_block import ngram_block_reference, ngram_mask_
from fastgen.ops.tables import (
    Table,
    extend_rows_,
    extend_rows_reference,
    finish_rows_,
    finish_rows_reference,
)
from tests.support.beam_choices import assert_alike, choice
from tests.support.parity import assert_same

SIZES = (1, 2, 3, 5, 7, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 200, 257)


def variants() -> list[str]:
    """Return the instruction sets for which this processor can run a library."""
    has = torch.cpu.get_capabilities()
    needed = {
        "avx2": has.get("avx2"),
        "avx512": has.get("avx512_f"),
        "avx512_bf16": has.get("avx512_bf16"),
    }
    return [name for name in sorted(build.variants()) if needed.get(name, True)]


def why_not() -> str | None:
    """Return why libraries with sanitizers cannot be built here, or None if they can."""
    if sys.platform != "linux" or not variants():
        return "there are no operations in C for this processor"
    if shutil.which("gcc") is None:
        return "gcc is not installed"
    missing = [
        name for name in ("libasan.so", "libubsan.so") if not Path(_library(name)).is_absolute()
    ]
    return f"gcc has no {' and no '.join(missing)}" if missing else None


def _library(name: str) -> str:
    done = subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def environment() -> dict[str, str]:
    """Return the environment of a process that loads libraries with sanitizers.

    libstdc++ is preloaded too, as AddressSanitizer looks for its `__cxa_throw` at process start.
    """
    preloaded = " ".join(_library(name) for name in ("libasan.so", "libstdc++.so"))
    return os.environ | {
        "LD_PRELOAD": preloaded,
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "FASTGEN_OPS": "native",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


class Draw:
    """The random numbers of one round."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def size(self, most: int = SIZES[-1]) -> int:
        return self.random.choice([size for size in SIZES if size <= most])

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def integers(self, *shape: int, below: int) -> Tensor:
        return torch.randint(below, shape, generator=self.generator)

    def strided(self, *shape: int) -> Tensor:
        """Return a tensor, often with gaps between rows; its last row ends where memory does."""
        if len(shape) < 2 or self.random.random() < 0.5:
            return self.normal(*shape)
        gap = self.random.randint(1, 5)
        wide = self.normal(*shape[:-1], shape[-1] + gap)
        return wide.flatten()[gap:].as_strided(shape, wide.stride())


def _close(found: Tensor, wanted: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance, equal_nan=True)


def _attention(draw: Draw) -> None:
    choose = draw.random.choice
    dims, groups, heads = choose(native.HEAD_DIMS), choose((1, 2, 4)), choose((1, 2, 3))
    m = choose([size for size in SIZES if size * groups <= native.ROWS])
    b, n = draw.size(9), draw.size()
    query = draw.normal(b, m, heads * groups, dims)
    keys, values = (draw.strided(b, n, heads, dims).transpose(1, 2) for _ in range(2))
    mask = None
    if (kind := choose(("none", "sentence", "beam", "head"))) != "none":
        shape = {"sentence": (b, 1, 1, n), "beam": (b, 1, m, n), "head": (1, heads * groups, m, n)}[
            kind
        ]
        mask = draw.strided(*shape)
        mask.masked_fill_(draw.normal(*shape) > 0, -torch.inf)
        mask[..., 0] = 0.5
    given = query, keys, values, mask, 0.3
    sinks = choose((None, draw.normal(heads * groups)))
    _close(beam_attention(*given, sinks=sinks), beam_attention_reference(*given, sinks=sinks))


def _log_softmax(draw: Draw) -> None:
    logits = draw.strided(draw.size(20), draw.size() * draw.random.choice((1, 9)))
    _close(log_softmax(logits), log_softmax_reference(logits))


def _kbest(draw: Draw) -> None:
    b, m, v = draw.size(5), draw.size(17), draw.size()
    k = draw.random.randint(1, max(1, min(64, v - 1)))
    logits, scores = draw.strided(b, m, v) * 3, draw.normal(b, m)
    updates = LogitsUpdates()
    if draw.random.random() < 0.5:
        banned = token_mask.packed(draw.normal(b * m, v) > 0.5)
        updates = LogitsUpdates(banned=banned)
    found, wanted = kbest(logits, scores, k, updates), kbest_reference(logits, scores, k, updates)
    _close(found.values, wanted.values)
    finite = wanted.values > -torch.inf
    if bool((wanted.values[:, 1:] < wanted.values[:, :-1] - 1e-4).all()):
        assert torch.equal(found.indices[finite], wanted.indices[finite])


def _product(draw: Draw) -> None:
    by = native.library()
    assert by is not None
    rows, outputs, inputs = draw.size(), draw.size(), draw.size() * draw.random.choice((1, 5))
    dtype = draw.random.choice(list(native.DTYPES))
    x, weight = draw.strided(rows, inputs).to(dtype), draw.normal(outputs, inputs).to(dtype)
    bias, residual = draw.normal(outputs).to(dtype), draw.normal(rows, outputs).to(dtype)
    out = torch.full((rows, outputs), torch.nan, dtype=dtype)
    found = native_products.product(
        by, x, native_products.packed(by, weight), bias, "relu", residual, out
    )
    wanted = torch.relu(x.double() @ weight.double().T + bias).to(dtype) + residual
    _close(found, wanted, max(1e-3, 2 * torch.finfo(dtype).eps))


def _int8_product(draw: Draw) -> None:
    rows, outputs, inputs = draw.size(), draw.size(), draw.size() * draw.random.choice((1, 5))
    x, weight = draw.strided(rows, inputs), int8.rounded(draw.normal(outputs, inputs))
    by = native.library()
    assert by is not None
    by = by._replace(can_dot=by.can_dot and draw.random.random() < 0.5)
    packed, bias, residual = (
        native_products.packed_bytes(by, *weight), draw.normal(outputs), draw.normal(rows, outputs),
    )  # fmt: skip
    out = torch.full((rows, outputs), torch.nan)
    found = native_products.product(by, x, packed, bias, "relu", residual, out)
    _close(found, int8.int8_linear_reference(x, weight, bias, "relu", residual))


def _choice(draw: Draw) -> None:
    beams, penalty = draw.random.choice((1, 2, 3, 5, 16)), draw.random.choice((1.0, 0.0, -1.5, 2.0))
    early = draw.random.choice((True, False, "never"))
    search, candidates, length = choice(draw.random.randrange(10**6), beams, penalty, early)
    assert_alike(search._choose(candidates, length), search.by_rules(candidates, length))


def _tables(draw: Draw) -> None:
    b, m, steps, prefix = (
        draw.size(5),
        draw.size(33),
        draw.random.randrange(9),
        draw.random.randrange(4),
    )
    columns = prefix + steps + 1
    kinds = torch.int64, torch.int32, torch.float32, torch.uint8
    rows = [draw.integers(b, m, columns, below=99).to(kind) for kind in kinds]
    running = [
        Table(each, draw.integers(b, m, 1, below=99).to(each.dtype), prefix) for each in rows
    ]
    parents, k = draw.integers(b, m, below=m), draw.size(65)
    wanted = [extend_rows_reference(table, parents, steps) for table in running]
    extend_rows_(running, parents, steps)
    assert all(torch.equal(table.rows, each) for table, each in zip(running, wanted, strict=True))
    ending = [
        table._replace(newest=draw.integers(b, k, 1, below=99).to(table.rows.dtype))
        for table in running
    ]
    finished = [torch.zeros_like(each) for each in rows]
    order, beams = draw.integers(b, m, below=m + k), draw.integers(b, k, below=m)
    wanted = [
        finish_rows_reference(f, t, order, beams, steps)
        for f, t in zip(finished, ending, strict=True)
    ]
    finish_rows_(finished, ending, order, beams, steps)
    assert all(map(torch.equal, finished, wanted))


def _sentences(draw: Draw) -> None:
    b = 2 * draw.size(9)
    dtype = draw.random.choice((torch.float32, torch.int64, torch.bfloat16))
    buffer = draw.normal(b, draw.size(5), draw.size(33), draw.size(65)).to(dtype)
    order = torch.randperm(b, generator=draw.generator)
    to, origin = order[: b // 2], order[b // 2 :]
    wanted = buffer.clone()
    wanted[to] = wanted[origin]
    move_sentences_(buffer, to, origin)
    assert torch.equal(buffer, wanted)


def _sets(draw: Draw) -> None:
    rows, v = draw.size(9), draw.size()
    mask = token_mask.packed(draw.normal(rows, v) > 1)
    tokens = draw.integers(draw.random.choice((1, rows)), draw.size(33), below=v + 40) - 20
    wanted = token_mask.add_tokens_reference(mask, tokens, v)
    assert torch.equal(token_mask.add_tokens_(mask, tokens, v), wanted)
    texts, n = draw.size(3), draw.random.randint(1, 5)
    ids = draw.integers(texts * draw.size(5), draw.size(33), below=4)
    source = draw.integers(texts, draw.size(33), below=4) if draw.random.random() < 0.5 else None
    banned = ngram_block_reference(torch.zeros(len(ids), v), ids, n, source).isinf()
    found = ngram_mask_(token_mask.empty_mask(len(ids), v, ids.device), ids, n, v, source)
    assert torch.equal(token_mask.unpacked(found, v), banned)


def _noise(draw: Draw) -> None:
    by, generator = native.library(), draw.generator
    assert by is not None
    state = generator.get_state()
    out = torch.full((draw.size(),), torch.nan)
    by.exponential_noise(by.run, 1, out.data_ptr(), state.data_ptr(), len(out))
    wanted = torch.empty_like(out).exponential_(generator=generator)
    if noise.is_torchs(by):
        _close(out, wanted)
        assert torch.equal(state, generator.get_state())


def _bounds(draw: Draw) -> None:
    by = native.library()
    assert by is not None
    v, c, dtype = draw.size(), draw.size(), draw.random.choice(logit_bounds.DTYPES)
    weight, x = draw.normal(v, c).to(dtype), draw.normal(draw.size(7), c).to(dtype)
    bias = draw.random.choice([None, draw.normal(v).to(dtype)])
    copy, bounds = native_products.packed_bytes(by, *int8.rounded(weight)), error_bounds(weight)
    assert bounds is not None
    counts = torch.zeros(3, dtype=torch.int64)
    record = logit_bounds.record_of(by, weight, copy, bounds, bias, counts)
    assert record is not None
    banned = token_mask.empty_mask(len(x), v, x.device)
    banned[:, 0] = draw.random.choice([0, 1, 5])
    found = logit_bounds.find_highest(by, x.float(), record, dtype, banned)
    logits = native_products.product(
        by, x, native_products.packed(by, weight), bias, None, None, x.new_empty(len(x), v)
    )
    assert counts.tolist() == [1, 1, int(found is None)]
    if found is None:  # few tokens, or almost all are candidates
        return
    logits[:, [i for i in range(min(v, 3)) if int(banned[0, 0]) >> i & 1]] = -torch.inf
    assert found.tolist() == (logits == logits.amax(1, keepdim=True)).int().argmax(1).tolist()


def _embedding(draw: Draw) -> None:
    v, c = draw.size(), draw.size()
    ids, tokens = draw.integers(draw.size(), below=v), draw.strided(v, c)
    row, other = draw.normal(c), draw.normal(c)
    rows, others = draw.strided(len(ids), c), draw.strided(len(ids), c)
    padding = int(ids[0])
    for given in ((), (row,), (row, (padding, other)), (rows,), (rows, (padding, others))):
        _close(embedding(ids, tokens, 1.5, *given), embedding_reference(ids, tokens, 1.5, *given))


OPERATIONS: tuple[Callable[[Draw], None], ...] = (
    _attention, _log_softmax, _kbest, _product, _choice, _tables, _sentences, _sets, _embedding,
    _noise, _int8_product, _bounds,
)  # fmt: skip


IN_C = (
    "beam_attention", "cache", "choice", "decoder_step", "embedding", "encoder", "kbest", "linear",
    "log_softmax", "ngram_block", "search", "tables", "token_mask",
)  # fmt: skip
"""Operations that have to run in C at least once, by the names under which calls are counted."""


def _model(draw: Draw, dims: int, heads: int, vocabulary: int) -> Any:
    """Return a model of one layer whose weights are large enough to avoid near ties."""
    width, wide = dims * heads, draw.random.choice((24, 65, 130))
    tokens: dict[str, Any] = {
        "vocab_size": vocabulary,
        "pad_token_id": 3,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(draw.random.randrange(10**6))
    match draw.random.choice(("gpt2", "llama", "qwen2_moe", "deepseek", "t5", "bart")):
        case "gpt2":
            sizes = {
                "n_embd": width,
                "n_layer": 1,
                "n_head": heads,
                "n_inner": wide,
                "initializer_range": 0.4,
            }
            return tf.GPT2LMHeadModel(tf.GPT2Config(**tokens, **sizes))
        case "llama":
            return tf.LlamaForCausalLM(
                tf.LlamaConfig(
                    **tokens, hidden_size=width, intermediate_size=wide, num_hidden_layers=1,
                    head_dim=dims, num_attention_heads=heads, num_key_value_heads=1,
                    initializer_range=0.4,
                )
            )  # fmt: skip
        case "qwen2_moe":
            chosen = draw.random.choice((1, 2, 5))
            return tf.Qwen2MoeForCausalLM(
                tf.Qwen2MoeConfig(
                    **tokens, hidden_size=width, num_hidden_layers=1, num_attention_heads=heads,
                    num_key_value_heads=1, moe_intermediate_size=draw.random.choice((64, 128)),
                    shared_expert_intermediate_size=wide, num_experts_per_tok=chosen,
                    num_experts=chosen * draw.random.choice((1, 7)), initializer_range=0.4,
                )
            )  # fmt: skip
        case "deepseek":
            return tf.DeepseekV3ForCausalLM(
                tf.DeepseekV3Config(
                    **tokens, hidden_size=width, intermediate_size=wide, num_hidden_layers=1,
                    num_attention_heads=heads, num_key_value_heads=heads, first_k_dense_replace=1,
                    q_lora_rank=draw.random.choice((None, 5, 32)), kv_lora_rank=64,
                    qk_rope_head_dim=draw.random.choice((16, 112)),
                    qk_nope_head_dim=draw.random.choice((1, 16, 33)), v_head_dim=64,
                    initializer_range=0.4,
                )
            )  # fmt: skip
        case "t5":
            return tf.T5ForConditionalGeneration(
                tf.T5Config(
                    **tokens, d_model=width, d_kv=dims, d_ff=wide, num_layers=1, num_heads=heads,
                    initializer_factor=3.0, decoder_start_token_id=3,
                )
            )  # fmt: skip
        case _:
            return tf.BartForConditionalGeneration(
                tf.BartConfig(
                    **tokens, d_model=width, encoder_layers=1, decoder_layers=1,
                    encoder_attention_heads=heads, decoder_attention_heads=heads,
                    encoder_ffn_dim=wide, decoder_ffn_dim=wide, init_std=0.5,
                    decoder_start_token_id=3, forced_eos_token_id=None, max_position_embeddings=64,
                )
            )  # fmt: skip


def _adapt(model: Any, rank: int) -> None:
    """Put LoRA layers with two adapters in the place of linear ones, where PEFT is installed."""
    with suppress(ImportError):
        import peft

        layers = ["c_attn", "c_proj", "c_fc", "q_proj", "v_proj", "fc1", "up_proj", "down_proj"]
        layers += ["q", "v", "o", "wi"]
        options: dict[str, Any] = {"target_modules": layers, "init_lora_weights": False}
        for name, of in (("one", rank), ("two", rank + 1)):
            peft.inject_adapter_in_model(peft.LoraConfig(r=of, **options), model, name)
        for layer in model.modules():
            if isinstance(layer, peft.tuners.lora.LoraLayer):
                layer.set_adapter(["one", "two"])


def search(draw: Draw) -> None:
    """Compare whole searches of a tiny model.

    They include single and multistep decoding, batch compaction and padding masks.
    """
    choose = draw.random.choice
    dims, heads, vocabulary = choose(native.HEAD_DIMS), choose((1, 2)), choose((67, 97, 211, 1031))
    model = _model(draw, dims, heads, vocabulary)
    # PEFT converts names of layers for mixtures of DeepSeek.
    if adapted := model.config.model_type != "deepseek_v3" and choose((False, True)):
        _adapt(model, choose((1, 3, 8, 17)))
    model.eval()
    sentences, length = choose((1, 2, 3, 7)), choose((1, 2, 5, 17))
    ids = draw.integers(sentences, length, below=vocabulary - 4) + 4
    mask = torch.ones_like(ids)
    if length > 2 and sentences > 1:
        left = not model.config.is_encoder_decoder
        padding = slice(0, length // 2) if left else slice(length - length // 2, length)
        mask[1, padding], ids[1, padding] = 0, 3
    kwargs: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": mask,
        "max_new_tokens": choose((5, 20, 37)),
    }
    method: dict[str, Any] = choose(
        (
            {},
            {
                "num_beams": choose((2, 5, 16)),
                "no_repeat_ngram_size": choose((0, 2, 3)),
                "early_stopping": True,
            },
            {
                "num_beams": choose((3, 4)),
                "eos_token_id": [2, 5, 7, 9, 11],
                "suppress_tokens": [4, 8],
            },
            {"num_beams": 128 // heads, "max_new_tokens": 4},
            {
                "repetition_penalty": choose((0.8, 1.4)),
                "sequence_bias": [[[t], 30.0 - t] for t in range(5, vocabulary, 9)],
                "no_repeat_ngram_size": choose((0, 2)),
            },
            {
                "do_sample": True,
                "temperature": choose((0.5, 1.0, 2.0)),
                "top_k": choose((0, 1, 5, 33, 64, 5000)),
                "top_p": choose((0.01, 0.5, 0.9, 1.0)),
                "min_p": choose((None, 0.05, 1.0)),
                "num_return_sequences": choose((1, 1, 3)),
                "suppress_tokens": [4, 8],
            },
        )
    )
    if 3 * method.get("num_beams", 1) >= vocabulary:
        method = {}
    for _ in range(2):
        assert_same(model, kwargs | method, tolerance=1e-2)
    drafts = {"prompt_lookup_num_tokens": choose((1, 7))}
    # Not all adapted layers run in C, without which a batch gets no drafts.
    if not (adapted or method.keys() & {"num_beams", "do_sample"}):
        greedy = model.generate(**kwargs | method)
        assert torch.equal(model.generate(**kwargs | method | drafts), greedy)
    model = model.to(choose(native.HALVES))
    for _ in range(2):
        found = model.generate(**kwargs | method)
        assert len(found) == sentences * method.get("num_return_sequences", 1)


def fuzz(variant: str, rounds: int, seed: int) -> None:
    """Run each operation `rounds` times, and a tenth as many searches, with a variant's library."""
    by = native.load(variant)
    native.found = lambda: native.Found(variant, by)
    native.FEW_SCORES = native.FEW_HEADS = 0
    weights.Packed.uses_to_pack = 1
    own = native.threads_for
    for number in range(rounds):
        draw = Draw(seed * 10**6 + number)
        threads = draw.random.choice((1, 1, 3))
        native.threads_for = lambda work, threads=threads: threads
        todo = [*OPERATIONS, *([search] if number % 10 == 0 else [])]
        for operation in todo:
            try:
                operation(draw)
            except Exception as error:
                error.add_note(f"{variant}, seed {seed}, round {number}: {operation.__name__}")
                raise
        weights.release()
    native.threads_for = own
    if left_out := sorted(name for name in IN_C if not calls[name, "native"]):
        raise AssertionError(
            f"{variant}: {', '.join(left_out)} did not run in C in {rounds} rounds"
        )
    print(f"{variant}: {rounds} rounds")


def wrong(variant: str, kind: str) -> None:
    """Call C wrongly: with one row too many, or at an address that is misaligned for fp32."""
    by = native.load(variant)
    logits = torch.zeros(3, 65)
    out = torch.zeros(3, 65)
    at, rows = (out.data_ptr(), 4) if kind == "rows" else (out.data_ptr() + 1, 2)
    by.log_softmax(by.run, 1, at, logits.data_ptr(), rows, 65, 65)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Run the operations in C with sanitizers on odd shapes."
    )
    parser.add_argument(
        "folder", type=Path, help="of the libraries, as `build.py --sanitize` has made them"
    )
    parser.add_argument("-n", "--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--wrong", choices=("rows", "address"))
    parser.add_argument("--pytest", nargs=argparse.REMAINDER, metavar="ARGUMENT")
    arguments = parser.parse_args()
    native.LIBRARIES = arguments.folder
    config.reload()
    if arguments.pytest:
        return int(pytest.main(["-n", "0", "-q", "-p", "no:cacheprovider", *_of(arguments.pytest)]))
    if arguments.wrong:
        wrong(variants()[-1], arguments.wrong)
        return 0
    torch.set_num_threads(1)
    for variant in variants():
        fuzz(variant, arguments.rounds, arguments.seed)
    return 0


def _of(arguments: Sequence[str]) -> list[str]:
    return [argument for argument in arguments if argument != "--"]


if __name__ == "__main__":
    sys.exit(main())
