"""Check that calls interrupted at random instants leave nothing behind.

    python -m tests.interrupts -n 10000

An interrupt is a signal whose handler raises, such as Ctrl-C, or an exception that another thread
sets (`PyThreadState_SetAsyncExc`), as servers do to end a request. It may strike at any Python
instruction. FASTGEN_OPS selects the backend.
"""

import argparse
import contextvars
import ctypes
import importlib.util
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from torch import nn

import fastgen
from fastgen.context import PREFIX
from fastgen.models import state
from fastgen.models.cuda_graphs import graph, graph_buffers
from fastgen.models.routing import routes
from fastgen.models.state import iter_cached_states
from fastgen.patches.engine.registry import registry
from fastgen.patches.engine.running import Scope, count_running
from fastgen.patches.generation_call import GenerationCall

SIZES: dict[str, Any] = {"vocab_size": 211, "pad_token_id": 0, "eos_token_id": 2}
_SEQ2SEQ: dict[str, Any] = SIZES | {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "init_std": 0.3, "decoder_attention_heads": 4, "encoder_ffn_dim": 112, "decoder_ffn_dim": 112,
    "decoder_start_token_id": 3,
}  # fmt: skip
_CAUSAL: dict[str, Any] = SIZES | {
    "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3, "bos_token_id": 1,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], Any]] = {
    "bart": lambda: tf.BartForConditionalGeneration(
        tf.BartConfig(**_SEQ2SEQ, forced_eos_token_id=None)
    ),
    "marian": lambda: tf.MarianMTModel(tf.MarianConfig(**_SEQ2SEQ, forced_eos_token_id=None)),
    "t5": lambda: tf.T5ForConditionalGeneration(
        tf.T5Config(
            **SIZES,
            d_model=64,
            d_kv=16,
            d_ff=112,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
            initializer_factor=3.0,
        )
    ),
    "gpt2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(
            **SIZES, n_embd=64, n_layer=2, n_head=4, initializer_range=0.3, bos_token_id=1
        )
    ),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_CAUSAL)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_CAUSAL, head_dim=16)),
}
METHODS: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 6},
    "beams": {"max_new_tokens": 6, "num_beams": 3},
    "sampling": {"max_new_tokens": 6, "do_sample": True, "num_return_sequences": 2},
    "stream": {"max_new_tokens": 6, "num_beams": 2},
}


class Interrupt(BaseException):
    """The exception that an interrupt raises."""


def build(family: str) -> Any:
    torch.manual_seed(0)
    return FAMILIES[family]().eval()


def call_of(model: Any, method: str) -> Callable[[], list[list[int]]]:
    ids = torch.arange(4, 40).view(3, 12) % 200 + 4
    mask = torch.ones_like(ids)
    mask[0, :3] = 0

    def call() -> list[list[int]]:
        if method == "stream":  # batches of two sentences and of one, which runs beside the first
            found = fastgen.generate_stream(model, list(ids), max_tokens=24, **METHODS[method])
            return [row for rows in found for row in rows.tolist()]
        if method == "sampling":
            torch.manual_seed(1)
        return model.generate(ids, attention_mask=mask, **METHODS[method]).tolist()

    return call


def by_signal(call: Callable[[], Any], after: float) -> bool:
    """Run a call that a signal interrupts after `after` seconds; return whether it did."""

    def strike(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, strike)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, after)
            call()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupt:
            return True
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def by_thread(call: Callable[[], Any], after: float) -> bool:
    """Run a call that another thread interrupts after `after` seconds, by setting an exception."""
    target, over = threading.get_ident(), threading.Event()

    def strike() -> None:
        if not over.wait(after):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(target), ctypes.py_object(Interrupt)
            )

    thread = threading.Thread(target=strike)
    struck = False
    try:
        try:
            thread.start()
            call()
        except Interrupt:
            struck = True
        over.set()
        thread.join()
        for _ in range(100):  # an interrupt that comes too late for the call is raised here
            time.sleep(0)
    except Interrupt:
        over.set()
        thread.join()
    return struck


def fairseq_call(beams: int) -> tuple[Any, Callable[[], list[list[int]]]]:
    """Return a fairseq model, and a function that generates with it."""
    from tests.support import fairseq_zoo as zoo

    model, sample = zoo.build("transformer", torch.float32), zoo.batch(3, 8)

    def call() -> list[list[int]]:
        found, _ = zoo.call([model], sample, {"beam_size": beams, "max_len_b": 6})
        return [hypothesis["tokens"].tolist() for hypotheses in found for hypothesis in hypotheses]

    return model, call


HOW = {"signal": by_signal, "thread": by_thread}


def left_behind(*models: nn.Module) -> list[str]:
    """Return descriptions of state that finished calls left behind; empty if they left none."""
    found = [
        f"a forward of {name or 'the model'}"
        for m in models
        for name, part in m.named_modules()
        if "forward" in vars(part)
    ]
    found += [
        f"a route of {len(route.before)} layers" for _, route in iter_cached_states(routes.Route)
    ]
    if count_running():
        found.append("a running plan")
    for variable, value in contextvars.copy_context().items():
        if variable.name.startswith(PREFIX) and value not in (None, GenerationCall(), Scope()):
            found.append(f"{variable.name} is {value!r}")
    locks = {
        "engine": registry.lock,
        "routes": routes._lock,
        "states": state._states.lock,
        "seats": graph_buffers._lock,
    }
    for name, lock in (locks | {"graph": graph._lock}).items():
        if not _free_for_others(lock):
            found.append(f"the lock of {name}")
    return found


def _free_for_others(lock: Any) -> bool:
    free: list[bool] = []

    def take() -> None:
        free.append(lock.acquire(timeout=20))
        if free[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return free[0]


def run(
    call: Callable[[], Any], models: list[Any], count: int, how: str, seed: int
) -> tuple[int, list[str]]:
    """Interrupt a call `count` times; return how many interrupts struck and what they left."""
    rng = random.Random(seed)
    for _ in range(3):
        call()
    began = time.perf_counter()
    call()
    longest = 1.05 * (time.perf_counter() - began)
    struck = 0
    for number in range(count):
        struck += HOW[how](call, rng.uniform(1e-5, longest))
        if found := left_behind(*models):
            return struck, [f"interrupt {number}: {each}" for each in found]
    fastgen.disable()
    fastgen.enable()
    return struck, []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "-n", type=int, default=10_000, help="interrupts over all families, methods and ways"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tf.logging.set_verbosity_error()
    made: list[tuple[str, Any, Callable[[], Any]]] = []
    for family in FAMILIES:
        model = build(family)
        made += [(f"{family}, {method}", model, call_of(model, method)) for method in METHODS]
    if importlib.util.find_spec("fairseq"):
        made += [(f"fairseq, {beams} beams", *fairseq_call(beams)) for beams in (1, 3)]
    cases = [(*each, how) for each in made for how in HOW]
    total, wrong = 0, 0
    for name, model, call, how in cases:
        with fastgen.disabled():
            stock = call()
        struck, found = run(call, [model], -(-options.n // len(cases)), how, options.seed)
        if call() != stock:
            found.append("another output")
        total, wrong = total + struck, wrong + bool(found)
        print(
            f"{name:18} by {how:7} {struck:6} struck: {'; '.join(found) or 'nothing left'}",
            flush=True,
        )
    print(f"{total} interrupts struck; {wrong} cases left something behind")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
