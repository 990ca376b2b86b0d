"""Runners, one per kind of case; each takes a case and a Session and returns JSON-ready results."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

import fastgen
from benchmarks.cases import CASES, EXAMPLE, Case
from benchmarks.fairseq_agreement import FairseqAgreement
from benchmarks.fairseq_command import run_command
from benchmarks.harness import outcome_text
from benchmarks.kv import KVProbe, expected_bytes
from benchmarks.session import Hits, Session, compared, figures
from fastgen.cli.bench import measure
from fastgen.cli.bench.agreement import Agreement, Agreements
from fastgen.cli.bench.measure import Outcome, both
from fastgen.cli.bild.sweep import batches_of
from fastgen.patches.transformers.generate.report import last_call

# A cell of the grid ends when its interval is this narrow, or after this many seconds.
CELL_PRECISION, CELL_BUDGET = 0.01, 120.0
FEW_TOKENS = 4  # a sequence with fewer different tokens counts as degenerate


def run_generate(case: Case, session: Session) -> dict[str, Any]:
    """Measure one model on one batch: `generate` unpatched and patched."""
    assert case.shape is not None
    model = case.shape.build(session.dtype, session.device)
    return pair(case, model, session)


def pair(case: Case, model: Any, session: Session, **how: Any) -> dict[str, Any]:
    """Measure one `generate` call with and without fastgen.

    Returns:
        Speed; without `how` also peak memory, and how varied the output is.
    """
    inputs, options = case.inputs(model), case.generate_options
    if options["do_sample"]:
        _seed_calls(model)
    result = compared(
        model,
        inputs,
        options,
        case.batch * case.new_tokens,
        session,
        session.rounds or case.rounds,
        **how,
    )
    if measure.agrees(result) and not how:
        stock, patched = both(lambda: model.generate(**inputs, **options))
        result["peak_bytes"] = {
            "stock": measure.peak_memory(stock, session.device),
            "fastgen": measure.peak_memory(patched, session.device),
        }
        result["distinct_tokens"] = distinct_tokens(stock()[:, -case.new_tokens :])
    return result


def _seed_calls(model: Any) -> None:
    """Make every call of a model's `generate` draw the same random numbers."""
    kind = cast(Any, type(model))

    def generate(*args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(0)
        return kind.generate(model, *args, **kwargs)

    model.generate = generate


def run_best_batch(case: Case, session: Session) -> dict[str, Any]:
    """Measure seconds per sentence of each side at its best batch size.

    The sizes are those of the case that fit into memory. If a batch fits on both sides, their
    outputs are compared. A side that runs out of memory tries no larger batch.
    """
    assert case.shape is not None
    model = case.shape.build(session.dtype, session.device)
    # Seconds per sentence, by side and batch size.
    rounds: dict[str, dict[int, list[float]]] = {"stock": {}, "fastgen": {}}
    full: set[str] = set()
    ties, difference, hits = 0, "", Hits()
    for size in case.grid["batch"]:
        sized = replace(case, batch=size)
        inputs, options = sized.inputs(model), sized.generate_options
        outputs: list[Tensor] = []
        for name, call in zip(
            rounds, both(lambda i=inputs, o=options: model.generate(**i, **o)), strict=True
        ):
            if name in full:
                continue
            try:
                outputs.append(call())  # also the warm-up
                times, _ = measure.interleave(
                    (call,),
                    session.rounds or case.rounds,
                    lambda _: None,
                    warmup=0,
                    synchronize=session.synchronize,
                )
            except torch.OutOfMemoryError:
                full.add(name)
                session.say(f"{name}: {size} sentences do not fit")
                fastgen.release()
                continue
            rounds[name][size] = [seconds / size for (seconds,) in times]
            session.say(
                f"{name:<8}{size:>4} sentences: "
                f"{1 / statistics.median(rounds[name][size]):.1f} per second"
            )
        if not full:
            try:
                verdict = Agreement(model, inputs, options)(*outputs)
            except torch.OutOfMemoryError:  # without a comparison there are no times
                session.say(f"{size} sentences: no memory to compare the outputs in")
                for found in rounds.values():
                    del found[size]
                fastgen.release()
                continue
            ties += verdict.near_ties
            difference = difference if verdict.equal else f"batch of {size}: {verdict.note}"
            if not verdict.agrees:
                return Outcome(False, ties, note=difference).to_dict() | hits.since()
    if not all(rounds.values()):
        return Outcome(False, ties, note=f"no batch fits: {case.grid['batch']}").to_dict()
    best = {
        name: min(found, key=lambda size, found=found: statistics.median(found[size]))
        for name, found in rounds.items()
    }
    pairs = list(zip(*(rounds[name][size] for name, size in best.items()), strict=True))
    ratio = measure.paired_ratio(*zip(*pairs, strict=True))
    outcome = Outcome(
        not difference, ties, pairs, *ratio, difference, within_noise=bool(difference)
    )
    medians = {
        name: {size: statistics.median(one) for size, one in found.items()}
        for name, found in rounds.items()
    }
    return outcome.to_dict() | hits.since() | {"best_batch": best, "seconds_per_sentence": medians}


def run_fairseq(case: Case, session: Session) -> dict[str, Any]:
    """Measure one batch with fairseq's generator; both sides have the fixed n-gram blocking."""
    from fairseq.sequence_generator import SequenceGenerator

    assert case.shape is not None
    model: Any = case.shape.build(session.dtype, session.device)
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(4, len(model.dictionary), (case.batch, case.source), generator=generator)
    source[:, -1] = model.dictionary.eos()
    sample = {
        "net_input": {
            "src_tokens": source.to(session.device),
            "src_lengths": torch.full((case.batch,), case.source),
        }
    }
    made = SequenceGenerator(
        [model],
        model.dictionary,
        case.beams,
        max_len_b=case.new_tokens,
        min_len=case.new_tokens,
        **case.options,
    )
    hits, agreement = Hits(), FairseqAgreement(model, made, sample)
    outcome = measure.compare(
        *both(lambda: made.generate([model], sample)), session.rounds or case.rounds, agreement,
        synchronize=session.synchronize,
    )  # fmt: skip
    return figures(outcome, case.batch * case.new_tokens) | hits.since()


def distinct_tokens(generated: Tensor) -> dict[str, Any]:
    """Return how many different tokens the sentences hold.

    Random models may repeat one token, which would test little.
    """
    counts = [len(set(row)) for row in generated.tolist()]
    return {
        "median": statistics.median(counts),
        "fewest": min(counts),
        "degenerate": sum(c < FEW_TOKENS for c in counts),
    }


def run_grid(case: Case, session: Session) -> dict[str, Any]:
    """Measure a table over batch, beams and source; every cell is saved once it is measured."""
    cells: dict[str, Any] = {}
    built: dict[int, Any] = {}
    for key, shape, cell in case.cells():
        if key in session.done or not any(fnmatch(key, pattern) for pattern in session.cells):
            continue
        tiny = cell.tiny() if session.tiny else cell
        if id(shape) not in built:
            built.clear()  # one model at a time
            assert tiny.shape is not None
            built[id(shape)] = tiny.shape.build(session.dtype, session.device)
        model = built[id(shape)]
        cells[key] = pair(tiny, model, session, precision=CELL_PRECISION, budget=CELL_BUDGET)
        cells[key] |= {
            "batch": tiny.batch,
            "beams": tiny.beams,
            "source": tiny.source,
            "model": key.split("/", 1)[0],
        }
        cells[key]["new_tokens"] = tiny.new_tokens
        # The cells of one file may come from several runs.
        cells[key]["environment"] = measure.environment()
        session.say(f"{key:<40}{outcome_text(cells[key])}")
        session.save({"cells": cells})
    return {"cells": cells}


@dataclass
class Translation:
    """A trained model and the text that it translates.

    Attributes:
        model: the model.
        tokenizer: its tokenizer.
        batches: tensor arguments of `generate`, in batches of sentences of similar length.
        options: the other arguments of `generate`.
        sentences: number of sentences in all batches.
    """

    model: Any
    tokenizer: Any
    batches: list[dict[str, Tensor]]
    options: dict[str, Any]
    sentences: int


def translation(case: Case, session: Session) -> Translation:
    """Load the model and the text of the command line, or the example's.

    Raises:
        FileNotFoundError: one of them does not exist.
    """
    from transformers import AutoTokenizer, MarianMTModel

    folder, source = session.model or EXAMPLE / "model", session.text or EXAMPLE / "test.en"
    for path in (folder / "config.json", source):
        if not path.is_file():
            raise FileNotFoundError(f"needs {path}, which is not there")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = MarianMTModel.from_pretrained(folder, dtype=session.dtype).to(session.device).eval()
    lines = source.read_text("utf-8").splitlines()[
        : session.sentences or (6 if session.tiny else None)
    ]
    encoded_lines = [_ended(tokenizer(line, truncation=True)["input_ids"], model) for line in lines]
    size = 3 if session.tiny else case.batch
    options = {
        "num_beams": case.beams,
        "max_new_tokens": 20 if session.tiny else case.new_tokens,
        **case.options,
    }
    batches = [batch.inputs for batch in batches_of(encoded_lines, size, model)]
    return Translation(model, tokenizer, batches, options, len(lines))


def run_text(case: Case, session: Session) -> dict[str, Any]:
    """Measure the trained model on its test text.

    The result also holds the time of each decode step with the number of sentences in it.
    """
    task = translation(case, session)
    model, batches, options = task.model, task.batches, task.options

    steps: list[list[tuple[int, float]]] = []  # of the latest patched pass, by batch

    def translate() -> list[Tensor]:
        outputs, found, before = [], [], last_call()
        for batch in batches:
            outputs.append(model.generate(**batch, **options))
            if (report := last_call()) is not None and report is not before:
                found.append(report.steps)
                before = report
        if found:
            steps[:] = found
        return outputs

    hits, same = Hits(), Agreements(model, batches, options)
    outcome = measure.compare(
        *both(translate), session.rounds or case.rounds, same, synchronize=session.synchronize
    )
    generated = sum(int((ids[:, 1:] != model.config.pad_token_id).sum()) for ids in same.other)
    result = figures(outcome, generated) | hits.since() | {"sentences": task.sentences}
    if outcome.agrees:
        stock, ours = (
            [task.tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in outputs]
            for outputs in (same.stock, same.other)
        )
        result["identical_text"] = stock == ours
        result["steps"] = {"fastgen": steps, "stock": stock_steps(model, batches, options, session)}
    return result


def _ended(ids: list[int], model: Any) -> list[int]:
    """Return a source with its end token, which not every tokenizer adds."""
    end = model.config.eos_token_id
    return ids if ids and ids[-1] == end else [*ids, end]


def stock_steps(
    model: Any, batches: list[dict[str, Tensor]], options: dict[str, Any], session: Session
) -> list[list[tuple[int, float]]]:
    """Return (sentences, seconds) of each decode step of the unpatched toolkit, by batch."""
    steps = []
    with fastgen.disabled():
        for batch in batches:
            with step_clock(model, session) as stamps:
                model.generate(**batch, **options)
            sentences = len(batch["input_ids"])
            steps.append(
                [(sentences, after - before) for before, after in itertools.pairwise(stamps)]
            )
    return steps


@contextmanager
def step_clock(model: Any, session: Session) -> Iterator[list[float]]:
    """Record the start time of each forward pass of the unpatched model within the context."""
    stamps: list[float] = []

    def note(*_: Any) -> None:
        session.synchronize()
        stamps.append(time.perf_counter())

    handle = model.register_forward_pre_hook(note)
    try:
        yield stamps
    finally:
        handle.remove()


def run_memory(case: Case, session: Session) -> dict[str, Any]:
    """Measure the bytes of the KV cache, beside the formula's B*S + B*M*T entries per layer."""
    models = {}
    for name in case.models:
        inner = CASES[name].tiny() if session.tiny else CASES[name]
        assert inner.shape is not None
        model = inner.shape.build(session.dtype, session.device)
        inputs, options = inner.inputs(model), inner.generate_options
        models[name] = {
            "expected": expected_bytes(
                model, inner.batch, inner.source, inner.beams, inner.new_tokens
            )
        }
        for side, context in (("stock", fastgen.disabled), ("fastgen", nullcontext)):
            fastgen.release()
            probe, before, hits = KVProbe(model, inner.new_tokens), last_call(), Hits()
            with context():
                model.generate(**inputs, **options, logits_processor=[probe])
            models[name][side] = {"measured": probe.bytes, **hits.since()}
            if (report := last_call()) is not None and report is not before:
                models[name][side] |= {"reported": report.kv_bytes}
            session.say(f"{name:<14}{side:<10}{memory_text(models[name], side)}")
        del model
    return {"models": models}


def memory_text(model: dict[str, Any], side: str) -> str:
    """Return the bytes of keys and values of one side, in words.

    They are the bytes that it holds (with room to grow), reports as in use, and needs by the
    formula.
    """
    held = {
        "held": model[side]["measured"],
        "in use": model[side].get("reported"),
        "by the formula": model["expected"][side],
    }
    return ", ".join(f"{n / 2**20:9.2f} MiB {what}" for what, n in held.items() if n is not None)


RUNNERS = {
    "generate": run_generate,
    "best_batch": run_best_batch,
    "grid": run_grid,
    "text": run_text,
    "memory": run_memory,
    "fairseq": run_fairseq,
    "command": run_command,
}


def of_model(case: Case, folder: Path | None) -> Case:
    """Return the case with another model than its own.

    Raises:
        ValueError: the case has no model to exchange.
    """
    if folder is None:
        return case
    if case.kind != "text":
        raise ValueError(
            f"--model {folder} does not go with the case {case.name!r}, "
            "which has no model to exchange"
        )
    what = f"the trained model {folder.name}, on text sorted by length; time per step"
    return replace(case, name=f"{case.name}_{folder.name}", help=what)


def sized(case: Case, batch: int | None, tiny: bool) -> Case:
    """Return the case at the size of the command line.

    Grids and memory tables also shrink their models themselves.

    Raises:
        ValueError: the case has its own batch sizes.
    """
    if tiny and case.kind != "memory":
        case = case.tiny()
    if batch is None:
        return case
    if case.kind not in ("generate", "text", "fairseq"):
        raise ValueError(
            f"--batch {batch} does not go with the case {case.name!r}, "
            "which has its own batch sizes"
        )
    return replace(case, name=f"{case.name}_batch{batch}", batch=batch)
