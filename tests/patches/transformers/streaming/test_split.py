"""Check batches that run out of memory in any stage: halving keeps the output or the error."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    LogitsProcessorList,
    MaxTimeCriteria,
    StoppingCriteriaList,
)
from transformers.generation.logits_process import TemperatureLogitsWarper
from transformers.models.bart.modeling_bart import BartEncoder
from transformers.models.llama.modeling_llama import LlamaModel

import fastgen
from fastgen.decoding.kv_cache.ancestry import Ancestry
from fastgen.decoding.kv_cache.layer_kv import LayerKV
from fastgen.decoding.search import beam_search as beams
from fastgen.decoding.search import sampling
from fastgen.models.layers import packed_weights
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.patches.transformers.compat import CACHE
from fastgen.patches.transformers.generate.shared_stepper import SharedStepper
from tests import interrupts
from tests.support import zoo
from tests.support.parity import left_off, same

SPLIT = "batch split: out of memory"


def _rows_of(*arguments: Any) -> int:
    """Return the number of rows of the first tensor among the arguments."""
    return next(
        part.shape[0] for part in arguments if isinstance(part, torch.Tensor) and part.dim()
    )


# Where memory runs out: owner and name of a function, and its number of rows (B or B * M) as a
# function of its arguments.
STAGES: dict[str, tuple[Any, str, Callable[..., int]]] = {
    "encoder": (
        BartEncoder,
        "forward",
        lambda _, *args, **kwargs: _rows_of(*args, *kwargs.values()),
    ),
    "decoder": (
        LlamaModel,
        "__call__",
        lambda _, *args, **kwargs: _rows_of(*args, *kwargs.values()),
    ),
    "prompt": (SharedStepper, "prefill", lambda stepper: stepper.plan.sentences),
    "step": (DecoderStep, "__call__", lambda _, ids, *args: _rows_of(ids)),
    "cache": (LayerKV, "append", lambda _, keys, values: _rows_of(keys)),
    "log-softmax": (beams.BeamSearch, "candidates", lambda _, logits, *others: _rows_of(logits)),
    "finish": (beams.BeamSearch, "finish", lambda _, order, *args: 3 * _rows_of(order)),
    "reorder": (Ancestry, "reorder", lambda _, parents: 3 * _rows_of(parents)),
    "choice": (sampling.Sampling, "_select", lambda _, logits, text: _rows_of(logits)),
}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"repetition_penalty": 1.3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
}
ROWS = {"greedy": 1, "beams": 3}
BOTH, AT_SENTENCES = ("bart", "llama"), {"encoder", "decoder", "prompt"}
CASES = [
    *(
        (stage, family, method, 1)
        for method in CALLS
        for stage, family in (("encoder", "bart"), ("decoder", "llama"))
    ),
    *(("prompt", family, method, 1) for family in BOTH for method in CALLS),
    *(
        (stage, f, method, n)
        for stage in ("step", "cache")
        for f in BOTH
        for method in CALLS
        for n in (1, 3)
    ),
    *((stage, f, "beams", n) for stage in ("log-softmax", "reorder") for f in BOTH for n in (1, 3)),
    *(("finish", family, "beams", 1) for family in BOTH),
    *(("choice", family, "greedy", n) for family in BOTH for n in (1, 3)),
]


def _run_out(monkeypatch: pytest.MonkeyPatch, stage: str, most: int, calls: int = 1) -> None:
    """Let memory run out where a stage has more than `most` rows, from its `calls`-th call on."""
    owner, name, rows_of = STAGES[stage]
    original, seen = getattr(owner, name), [0]

    def function(*args: Any, **kwargs: Any) -> Any:
        seen[0] += 1
        rows = rows_of(*args, **kwargs)
        if rows > most and seen[0] >= calls:
            raise torch.OutOfMemoryError(f"no memory for {rows} rows")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, function)


@pytest.mark.parametrize(("stage", "family", "method", "calls"), CASES)
def test_halves(
    stage: str,
    family: str,
    method: str,
    calls: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = zoo.build(family)
    kwargs = (
        zoo.batch(model, 5, 9, "natural")
        | CALLS[method]
        | {"max_new_tokens": 11, "eos_token_id": [2, 7, 9, 30]}
    )
    with fastgen.disabled():
        stock = model.generate(**kwargs)
    model.generate(**kwargs)  # its first fused step is compared
    before = left_off()[SPLIT]
    _run_out(monkeypatch, stage, 2 if stage in AT_SENTENCES else 2 * ROWS[method], calls)
    ours = model.generate(**kwargs)
    assert "not enough memory for a batch of 5 sentences" in caplog.text
    assert torch.equal(ours, stock)
    assert left_off()[SPLIT] > before
    monkeypatch.undo()
    assert torch.equal(model.generate(**kwargs), stock)
    assert fastgen.status()["transformers.generate"].state == "applied"


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True},
        {"return_dict_in_generate": True},
        {
            "logits_processor": LogitsProcessorList(
                [type("Own", (TemperatureLogitsWarper,), {})(0.5)]
            )
        },
        {"max_time": 100.0},
        {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(100.0)])},
        {"decoder_start_token_id": [3, 3, 3, 3, 3]},
        {CACHE: EncoderDecoderCache(DynamicCache(), DynamicCache())},
    ],
    ids=lambda options: next(iter(options)),
)
def test_not_where_somebody_could_tell(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.build("bart")
    _run_out(monkeypatch, "encoder", 2)
    with pytest.raises(torch.OutOfMemoryError, match="no memory for 5 rows"):
        model.generate(**zoo.batch(model, 5, 9), max_new_tokens=5, **options)


def test_one_sentence(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model = zoo.build("bart")
    _run_out(monkeypatch, "encoder", 0)
    with pytest.raises(torch.OutOfMemoryError, match="for 1 rows"):
        model.generate(**zoo.batch(model, 2, 9), max_new_tokens=5)
    assert "2 sentences" in caplog.text
    assert packed_weights.STOPPED in caplog.text


@pytest.mark.parametrize("beams", [1, 3])
def test_the_call_behind_a_failed_one_runs_on_torch(
    beams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes no packed copies of weights, and reports it, until `release`."""
    model = interrupts.build("bart")
    kwargs = zoo.batch(model, 2, 9) | {"num_beams": beams, "max_new_tokens": 6}
    with fastgen.disabled():
        stock = model.generate(**kwargs)
    for _ in range(4):
        model.generate(**kwargs)
    assert packed_weights.packed_bytes() > 0
    with monkeypatch.context() as patch:
        _run_out(patch, "encoder", 0)
        with pytest.raises(torch.OutOfMemoryError):
            model.generate(**kwargs)
    for _ in range(4):
        assert torch.equal(model.generate(**kwargs), stock)
    assert packed_weights.packed_bytes() == 0
    calls = fastgen.status().calls
    assert any(packed_weights.STOPPED in str(call) for call in calls), calls
    fastgen.release()
    for _ in range(4):
        assert torch.equal(model.generate(**kwargs), stock)
    assert packed_weights.packed_bytes() > 0


def test_other_errors_are_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("bart")

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("something else")

    monkeypatch.setattr(BartEncoder, "forward", fails)
    with pytest.raises(RuntimeError, match="something else"):
        model.generate(**zoo.batch(model, 5, 9), max_new_tokens=5)


def test_everything_given_by_sentence_is_split(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Encoder outputs, prompts and masks are split; tensors that are settings stay whole."""
    model = zoo.build("bart")
    inputs = zoo.batch(model, 4, 9, "natural")
    prompt = torch.randint(4, zoo.VOCABULARY, (4, 3))
    ends = torch.tensor([2, 7, 9, 30])  # as many as there are sentences
    with torch.no_grad():
        outputs = model.get_encoder()(**inputs)
    kwargs = {
        "encoder_outputs": outputs,
        "attention_mask": inputs["attention_mask"],
        "decoder_input_ids": prompt,
    }
    kwargs |= {"num_beams": 3, "max_new_tokens": 9, "eos_token_id": ends}
    same_output = model.generate(**copy.deepcopy(kwargs))
    _run_out(monkeypatch, "step", 6)
    ours = model.generate(**kwargs)
    assert "4 sentences" in caplog.text
    same(ours, same_output)
