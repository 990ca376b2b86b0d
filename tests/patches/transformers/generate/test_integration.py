"""Check fastgen together with what users combine with `generate`.

Cover other libraries, dtypes, threads, copies and exceptions, one test each. Tokens equal those of
unpatched transformers, fastgen's code ran, and no state is left behind.
"""

import copy
import io
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

import fastgen
from fastgen import config
from fastgen.models import state
from fastgen.models.layers import packed_weights
from fastgen.models.routing import routes
from fastgen.ops import native
from fastgen.patches.engine import engine
from fastgen.patches.engine.registry import registry
from fastgen.patches.generation_call import GenerationCall, current
from tests.support import zoo
from tests.support.parity import assert_same, fallbacks, hits, left_off
from tests.support.processes import python

ROOT = Path(__file__).parents[4]
BEAMS: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 10}
NGRAMS: dict[str, Any] = BEAMS | {"no_repeat_ngram_size": 2}
needs_c = pytest.mark.skipif(native.library() is None, reason="there are no operations in C here")


def _inputs(model: Any, sentences: int = 3, length: int = 9) -> dict[str, Tensor]:
    return zoo.batch(model, sentences, length)


def _generate(model: Any, **kwargs: Any) -> Tensor:
    """Generate through fastgen, which must serve the call, and return the tokens."""
    served, before = hits(), fallbacks()
    torch.manual_seed(0)
    found = model.generate(**kwargs)
    assert hits() == served + 1
    assert fallbacks() == before
    return found


def _stock(model: Any, **kwargs: Any) -> Tensor:
    torch.manual_seed(0)
    with fastgen.disabled():
        return model.generate(**kwargs)


def _check(model: Any, **kwargs: Any) -> Tensor:
    """Assert equal tokens with and without fastgen; return them."""
    found = _generate(model, **kwargs)
    assert torch.equal(found, _stock(model, **kwargs))
    return found


def _check_at_rest(*models: nn.Module) -> None:
    """Assert that a call left no state, neither in a model nor in fastgen."""
    for model in models:
        assert [
            name for name, module in model.named_modules() if "forward" in module.__dict__
        ] == []
    assert current.get() == GenerationCall()
    assert engine.current_plan() is None
    assert not list(state.iter_cached_states(routes.Route))
    assert not registry.running


def _large(seed: int = 0) -> Any:
    """Return a float32 model whose linear layers are worth packing."""
    torch.manual_seed(seed)
    return tf.LlamaForCausalLM(
        tf.LlamaConfig(
            vocab_size=zoo.VOCABULARY, hidden_size=320, intermediate_size=1024, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128,
            initializer_range=0.2, pad_token_id=zoo.PAD, bos_token_id=1, eos_token_id=zoo.EOS,
        )
    ).eval()  # fmt: skip


# Dtypes


@pytest.mark.parametrize("family", ["bart", "llama"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_exact_dtypes(family: str, dtype: torch.dtype) -> None:
    model = zoo.build(family, dtype)
    for options in (
        BEAMS,
        {"max_new_tokens": 10},
        {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 10},
    ):
        _check(model, **_inputs(model), **options)


@pytest.mark.parametrize("family", ["bart", "t5", "llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("beams", [1, 3])
def test_half_dtypes(family: str, dtype: torch.dtype, beams: int) -> None:
    """Compare tokens in half precision, where near ties may flip.

    With 8 or 11 significant bits, tokens may first differ where stock's own scores are within
    rounding errors. The margin is counted in rounding errors of the largest logit. With several
    beams a step compares running scores, so the scores of whole hypotheses are compared.
    """
    model = zoo.build(family, dtype)
    kwargs = _inputs(model, 6) | {"max_new_tokens": 12, "num_beams": beams}
    kwargs |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    ours, stock = _generate(model, **kwargs), _stock(model, **kwargs)
    largest = max(step.nan_to_num(0, 0, 0).abs().max().item() for step in stock.logits)
    rounding = torch.finfo(dtype).eps * largest
    shared = min(ours.sequences.shape[1], stock.sequences.shape[1])
    for row in range(6):
        differs = (ours.sequences[row, :shared] != stock.sequences[row, :shared]).nonzero()
        if len(differs) == 0:
            continue
        if beams > 1:
            assert (
                abs(ours.sequences_scores[row] - stock.sequences_scores[row]).item() <= 4 * rounding
            )
            continue
        first = int(differs[0])
        scores = stock.scores[first - (stock.sequences.shape[1] - len(stock.scores))][row]
        margin = scores[stock.sequences[row, first]] - scores[ours.sequences[row, first]]
        assert margin.item() <= 4 * rounding, (
            f"row {row}, token {first}: margin {margin.item()}, rounding {rounding}"
        )


def test_dtype_changes_between_calls() -> None:
    """Call the model after `.half()`, after `.to()` and after the way back."""
    model = _large()
    inputs = _inputs(model)
    first = _check(model, **inputs, **BEAMS)
    _check(model.double(), **inputs, **BEAMS)
    _generate(model.to(torch.bfloat16), **inputs, **BEAMS)
    _generate(model.half(), **inputs, **BEAMS)
    _check(model.to(torch.float32), **inputs, **BEAMS)
    model.load_state_dict(_large().state_dict())
    assert torch.equal(_check(model, **inputs, **BEAMS), first)
    _check_at_rest(model)


# Libraries around a model


def test_accelerate_dispatch() -> None:
    from accelerate import dispatch_model

    for family in ("bart", "gpt2"):
        model = dispatch_model(zoo.build(family), device_map={"": "cpu"}, force_hooks=True)
        assert model.hf_device_map == {"": "cpu"}
        assert any(hasattr(module, "_hf_hook") for module in model.modules())
        _check(model, **_inputs(model), **NGRAMS)


def test_accelerate_hooks() -> None:
    """Hooks on every module, which replace its `forward`, stay in place."""
    from accelerate.hooks import (
        AlignDevicesHook,
        ModelHook,
        SequentialHook,
        add_hook_to_module,
        remove_hook_from_module,
    )

    class Counts(ModelHook):
        calls = 0

        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            Counts.calls += 1
            return args, kwargs

    model = _large()
    for module in model.modules():
        add_hook_to_module(module, SequentialHook(AlignDevicesHook("cpu"), Counts()))
    hooked = {name: module.__dict__["forward"] for name, module in model.named_modules()}
    _check(model, **_inputs(model), **BEAMS)
    assert Counts.calls > 0
    assert {name: module.__dict__["forward"] for name, module in model.named_modules()} == hooked
    # This leaves each module's own `forward` in its instance dictionary.
    remove_hook_from_module(model, recurse=True)
    own = {name: module.__dict__["forward"] for name, module in model.named_modules()}
    _check(model, **_inputs(model), **BEAMS)
    assert {name: module.__dict__["forward"] for name, module in model.named_modules()} == own
    _check_at_rest()


def test_a_users_hook_by_accelerate() -> None:
    """A user's hook sees the rows that stock passes, as it may add a vector to each of them."""
    from accelerate.hooks import ModelHook, SequentialHook, add_hook_to_module

    class AddsByRow(ModelHook):
        def __init__(self) -> None:
            self.rows: list[int] = []

        def post_forward(self, module: nn.Module, output: Any) -> Any:
            self.rows.append(len(output))
            return output + torch.arange(len(output), dtype=output.dtype)[:, None, None] / 7

    model = _large()
    hook = AddsByRow()
    add_hook_to_module(model.model.layers[0].mlp.down_proj, SequentialHook(ModelHook(), hook))
    _check(model, **_inputs(model), **BEAMS)
    expected, hook.rows[:] = hook.rows[: len(hook.rows) // 2], hook.rows[len(hook.rows) // 2 :]
    assert hook.rows == expected


def _lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    wrapped = get_peft_model(
        model,
        LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False),
    )
    return wrapped.eval()


@pytest.mark.parametrize("family", ["bart", "llama"])
def test_peft(family: str) -> None:
    from peft import LoraConfig, get_peft_model

    model = zoo.build(family)
    inputs = _inputs(model)
    base = _check(model, **inputs, **BEAMS)
    torch.manual_seed(3)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = get_peft_model(model, lora).double().eval()
    adapted = _check(wrapped, **inputs, **BEAMS)
    assert not torch.equal(adapted, base)
    with wrapped.disable_adapter():
        assert torch.equal(_check(wrapped, **inputs, **BEAMS), base)
    merged = wrapped.merge_and_unload()
    assert torch.equal(_check(merged, **inputs, **BEAMS), adapted)
    _check_at_rest(merged)


@needs_c
def test_peft_with_packed_weights() -> None:
    """Adapters merged into packed weights take effect: tokens use the weights of the call."""
    wrapped = _lora(_large())
    inputs = _inputs(wrapped)
    adapted = _check(wrapped, **inputs, **BEAMS)
    assert packed_weights.packed_bytes() > 0
    wrapped.merge_adapter()  # in place; reverted below
    assert torch.equal(_check(wrapped, **inputs, **BEAMS), adapted)
    wrapped.unmerge_adapter()
    assert torch.equal(_check(wrapped, **inputs, **BEAMS), adapted)
    merged = wrapped.merge_and_unload()
    assert torch.equal(_check(merged, **inputs, **BEAMS), adapted)
    _check_at_rest(merged)


@needs_c
@pytest.mark.parametrize("change", ["all", "one layer", "one row"])
def test_weights_written_through_data(change: str) -> None:
    """`weight.data += delta` changes no version counter; a packed copy must not be stale."""
    model = _large()
    inputs = _inputs(model)
    before = _check(model, **inputs, **BEAMS)
    assert packed_weights.packed_bytes() > 0
    generator = torch.Generator().manual_seed(5)
    for name, module in model.named_modules():
        if type(module) is not nn.Linear:
            continue
        delta = torch.randn(module.weight.shape, generator=generator) * 0.2
        if change == "all" or (change == "one layer" and name.endswith("0.mlp.up_proj")):
            module.weight.data += delta
        elif change == "one row" and name.endswith("mlp.up_proj"):
            module.weight.data[-1] += 40.0
    assert not torch.equal(_stock(model, **inputs, **BEAMS), before)
    _check(model, **inputs, **BEAMS)


@needs_c
def test_training_between_calls() -> None:
    model = _large()
    inputs = _inputs(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.02)
    tokens = [_check(model, **inputs, **BEAMS)]
    for _ in range(3):
        model.train()
        loss = model(**inputs, labels=inputs["input_ids"]).loss
        loss.backward()
        assert all(
            p.grad is not None and bool(p.grad.abs().sum() > 0)
            for p in model.model.layers.parameters()
        )
        optimiser.step()
        optimiser.zero_grad()
        model.eval()
        tokens.append(_check(model, **inputs, **BEAMS))
    assert not torch.equal(tokens[0], tokens[-1])
    _check_at_rest(model)


def _tokenizer() -> Any:
    """Return a tokenizer of the words w4, w5, ... whose ids are their numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = {0: "<pad>", 1: "<unk>", 2: "</s>", 3: "<s>"}
    words = Tokenizer(
        models.WordLevel(
            {special.get(i, f"w{i}"): i for i in range(zoo.VOCABULARY)}, unk_token="<unk>"
        )
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="</s>",
        padding_side="left",
    )


@pytest.mark.parametrize("beams", [1, 3])
def test_text_generation_pipeline(beams: int) -> None:
    model = zoo.build("gpt2")
    pipe = tf.pipeline("text-generation", model=model, tokenizer=_tokenizer(), device="cpu")
    texts = ["w4 w9 w17", "w5 w50 w51 w7 w12", "w90"]
    options = {"num_beams": beams, "max_new_tokens": 8, "batch_size": 3, "do_sample": False}
    served, before = hits(), fallbacks()
    found = pipe(texts, **options)
    assert hits() > served
    assert fallbacks() == before
    with fastgen.disabled():
        assert pipe(texts, **options) == found
    assert found[0][0]["generated_text"].startswith("w4 w9 w17w")
    _check_at_rest(model)


def test_encoder_decoder_pipeline() -> None:
    """Transformers 5 removed text2text-generation; remaining encoder-decoder pipelines work."""
    from transformers.pipelines import SUPPORTED_TASKS

    tasks = [
        task
        for task in ("text2text-generation", "summarization", "translation")
        if task in SUPPORTED_TASKS
    ]
    if not tasks:
        pytest.skip(
            f"transformers {tf.__version__} has no pipeline that generates "
            "from an encoder-decoder's text"
        )
    model = zoo.build("bart")
    pipe = tf.pipeline(tasks[0], model=model, tokenizer=_tokenizer(), device="cpu")
    found = pipe(["w4 w9", "w5 w50 w51"], num_beams=3, max_new_tokens=8)
    with fastgen.disabled():
        assert pipe(["w4 w9", "w5 w50 w51"], num_beams=3, max_new_tokens=8) == found


def test_seq2seq_trainer(tmp_path: Path) -> None:
    """Cover training, evaluation by generated text, and further training."""
    samples = [
        {
            "input_ids": [4 + (7 * i + j) % 90 for j in range(3 + i % 4)],
            "labels": [4 + (5 * i) % 90, 6, 2],
        }
        for i in range(8)
    ]
    model = zoo.build("bart", torch.float32)
    arguments = tf.Seq2SeqTrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, per_device_eval_batch_size=4,
        max_steps=4, eval_steps=2, eval_strategy="steps", save_strategy="no", report_to=[],
        predict_with_generate=True, generation_max_length=9, generation_num_beams=3, use_cpu=True,
        disable_tqdm=True, learning_rate=1e-3,
    )  # fmt: skip
    predictions: list[Any] = []
    trainer = tf.Seq2SeqTrainer(
        model=model, args=arguments, train_dataset=samples, eval_dataset=samples,
        data_collator=tf.DataCollatorForSeq2Seq(_tokenizer(), model=model),
        compute_metrics=lambda p: (
            predictions.append(p.predictions.tolist()) or {"n": len(p.predictions)}
        ),
    )  # fmt: skip
    served, before, without = hits(), fallbacks(), left_off()
    trainer.train()
    assert hits() == served + 4  # two evaluations of two batches
    assert fallbacks() == before
    assert left_off() == without
    found = trainer.predict(samples).predictions.tolist()
    with fastgen.disabled():
        assert trainer.predict(samples).predictions.tolist() == found
    assert len(predictions) == 4
    _check_at_rest(model)


# Threads, copies, processes


def _together(*calls: Callable[[], Any]) -> list[Any]:
    """Run the calls in threads that start at the same time."""
    gate = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        gate.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(run, call) for call in calls]]


def _thread_cases() -> Iterator[tuple[str, Any, Any]]:
    large = _large()
    yield "one model", large, large
    yield "two models", large, _large(1)
    yield "two families", zoo.build("bart"), zoo.build("gpt2")


@pytest.mark.parametrize("case", range(3), ids=["one model", "two models", "two families"])
def test_threads(case: int) -> None:
    _, first, second = list(_thread_cases())[case]
    inputs, others = _inputs(first), _inputs(second, 2, 6)
    wanted = _stock(first, **inputs, **BEAMS), _stock(second, **others, max_new_tokens=15)
    served, before = hits(), fallbacks()
    for _ in range(6):
        found = _together(
            lambda: first.generate(**inputs, **BEAMS),
            lambda: second.generate(**others, max_new_tokens=15),
        )
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[1], wanted[1])
    assert hits() == served + 12
    assert fallbacks() == before
    _check_at_rest(first, second)


@pytest.mark.parametrize("same", [True, False])
def test_threads_one_of_them_disabled(same: bool) -> None:
    first = _large()
    second = first if same else _large(1)
    inputs = _inputs(first)
    wanted = _stock(first, **inputs, **BEAMS), _stock(second, **inputs, **BEAMS)

    def disabled() -> Tensor:
        with fastgen.disabled():
            return second.generate(**inputs, **BEAMS)

    served, before = hits(), fallbacks()
    for _ in range(6):
        found = _together(lambda: first.generate(**inputs, **BEAMS), disabled)
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[1], wanted[1])
    assert hits() == served + 6
    assert fallbacks() == before
    _check_at_rest(first, second)


@pytest.mark.parametrize("family", ["bart", "llama", "large"])
@pytest.mark.slow
def test_copies(family: str) -> None:
    """Deepcopy, pickle and torch.save after a call give an independent model that generates."""
    model = _large() if family == "large" else zoo.build(family)
    inputs = _inputs(model)
    wanted = _check(model, **inputs, **BEAMS)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    twins = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ]
    for twin in twins:
        assert torch.equal(_check(twin, **inputs, **BEAMS), wanted)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.mul_(1.5)
        assert torch.equal(_check(model, **inputs, **BEAMS), wanted)
    _check_at_rest(model, *twins)


class _Copies(StoppingCriteria):
    """Copies the model while it generates, as a callback that keeps the best model may."""

    def __init__(self, model: Any, how: Callable[[Any], Any]) -> None:
        self.model, self.how = model, how
        self.twin: Any = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if self.twin is None:
            self.twin = self.how(self.model)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copy_during_a_call(how: Callable[[Any], Any]) -> None:
    model = _large()
    inputs = _inputs(model)
    copies = _Copies(model, how)
    _generate(model, **inputs, **BEAMS, stopping_criteria=StoppingCriteriaList([copies]))
    twin = copies.twin
    _check_at_rest(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    assert torch.equal(_generate(twin, **inputs, **BEAMS), _stock(twin, **inputs, **BEAMS))


def _python(script: str, **environment: str) -> str:
    """Run a script in a subprocess; return its standard output."""
    done = python(["-c", script], environment=os.environ | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_model_loaded_before_fastgen() -> None:
    printed = _python(
        """
import sys
import torch, transformers as tf
torch.manual_seed(0)
model = tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=96, n_embd=16, n_layer=2, n_head=2, initializer_range=0.8,
                                         bos_token_id=1, eos_token_id=2, pad_token_id=0)).double().eval()
ids = torch.randint(4, 96, (3, 7))
generate = model.generate  # bound before, as scripts and frameworks keep it
stock = [model.generate(ids, num_beams=beams, max_new_tokens=9) for beams in (1, 3)]
assert "fastgen" not in sys.modules
import fastgen
found = [model.generate(ids, num_beams=beams, max_new_tokens=9) for beams in (1, 3)]
assert all(torch.equal(a, b) for a, b in zip(stock, found))
print({row.name: row.hits for row in fastgen.status().rows})
assert torch.equal(generate(ids, num_beams=3, max_new_tokens=9), stock[1])
print({row.name: row.hits for row in fastgen.status().rows}["transformers.beam_search"])
"""  # noqa: E501
    )
    first, second = printed.splitlines()[-2:]
    assert "'transformers.beam_search': 1" in first
    assert "'transformers.sample': 1" in first
    assert second == "2"


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
def test_strict(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A declined call raises under FASTGEN_STRICT=1, and leaves nothing behind."""
    model, declined = zoo.build("gpt2"), zoo.build("gpt2")
    declined.hf_device_map = {"transformer": 0, "lm_head": 1}
    inputs = _inputs(model)
    monkeypatch.setenv("FASTGEN_STRICT", "1")
    config.reload()
    try:
        with pytest.raises(engine.FallbackError, match="the model lies on several devices"):
            declined.generate(**inputs, **options, max_new_tokens=4)
        _check(model, **inputs, **BEAMS)
        _check(model, **inputs, **options, use_cache=False, max_new_tokens=4)
        _stock(declined, **inputs, **options, max_new_tokens=4)
    finally:
        monkeypatch.undo()
        config.reload()
    _check_at_rest(model, declined)
    assert_same(declined, inputs | options | {"max_new_tokens": 4})


def test_strict_in_a_process() -> None:
    printed = _python(
        """
import fastgen, torch, transformers as tf
model = tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=96, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2,
                                         pad_token_id=0))
model.eval()
ids = torch.randint(4, 96, (2, 5))
model.generate(ids, max_new_tokens=3)
try:
    model.generate(ids, max_new_tokens=3, num_beams=2, low_memory=True)
except Exception as error:
    print(type(error).__name__, error)
""",  # noqa: E501
        FASTGEN_STRICT="1",
    )
    assert "FallbackError" in printed
    assert "low_memory=True" in printed


# Exceptions


class Boom(Exception):
    pass


class _Fails:
    """Raises at its n-th call."""

    def __init__(self, error: type[BaseException] = Boom, at: int = 1) -> None:
        self.error, self.at, self.calls = error, at, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls >= self.at:
            raise self.error("on purpose")
        return args[1] if len(args) > 1 else None


class _FailingProcessor(LogitsProcessor):
    def __init__(self, fails: _Fails) -> None:
        self.fails = fails

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.fails()
        return scores


class _FailingCriterion(StoppingCriteria):
    def __init__(self, fails: _Fails) -> None:
        self.fails = fails

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.fails()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class _FailingStreamer(BaseStreamer):
    def __init__(self, fails: _Fails, end: bool = False) -> None:
        self.fails, self.at_end = fails, end

    def put(self, value: Tensor) -> None:
        if not self.at_end:
            self.fails()

    def end(self) -> None:
        if self.at_end:
            self.fails()


def _hooked(
    part: Callable[[Any], nn.Module], error: type[BaseException], at: int
) -> Callable[[Any], tuple[Any, Any]]:
    """Let a part of the model raise at its n-th forward."""

    def prepare(model: Any) -> tuple[dict[str, Any], Callable[[], None]]:
        fails = _Fails(error, at)
        handle = part(model).register_forward_pre_hook(lambda *_: fails())
        return {}, handle.remove

    return prepare


def _given(
    name: str, make: Callable[[_Fails], Any], at: int, error: type[BaseException] = Boom
) -> Callable[[Any], Any]:
    return lambda model: ({name: make(_Fails(error, at))}, lambda: None)


def _decoder_layer(model: Any) -> nn.Module:
    return (
        model.get_decoder().layers[-1]
        if model.config.is_encoder_decoder
        else model.transformer.h[-1]
    )


def _head(model: Any) -> nn.Module:
    return model.lm_head


def _encoder(model: Any) -> nn.Module:
    return model.get_encoder()


_PROCESSOR = lambda fails: LogitsProcessorList([_FailingProcessor(fails)])  # noqa: E731
_CRITERION = lambda fails: StoppingCriteriaList([_FailingCriterion(fails)])  # noqa: E731
STAGES: dict[str, tuple[str, type[BaseException], Callable[[Any], Any]]] = {
    "encoder": ("bart", Boom, _hooked(_encoder, Boom, 1)),
    "prefill": ("gpt2", Boom, _hooked(_decoder_layer, Boom, 1)),
    "prefill of a decoder": ("bart", Boom, _hooked(_decoder_layer, Boom, 1)),
    "first step": ("gpt2", Boom, _hooked(_decoder_layer, Boom, 2)),
    "later step": ("gpt2", Boom, _hooked(_decoder_layer, Boom, 5)),
    "step of a decoder": ("bart", Boom, _hooked(_decoder_layer, Boom, 4)),
    "head": ("bart", Boom, _hooked(_head, Boom, 3)),
    "out of memory": (
        "gpt2", torch.OutOfMemoryError, _hooked(_decoder_layer, torch.OutOfMemoryError, 3)
    ),
    "interrupt in the encoder": (
        "bart", KeyboardInterrupt, _hooked(_encoder, KeyboardInterrupt, 1)
    ),
    "interrupt in a step": (
        "gpt2", KeyboardInterrupt, _hooked(_decoder_layer, KeyboardInterrupt, 3)
    ),
    "interrupt in a step of a decoder": (
        "bart", KeyboardInterrupt, _hooked(_decoder_layer, KeyboardInterrupt, 3)
    ),
    "processor at once": ("gpt2", Boom, _given("logits_processor", _PROCESSOR, 1)),
    "processor later": ("bart", Boom, _given("logits_processor", _PROCESSOR, 4)),
    "prefix function": ("bart", Boom, _given("prefix_allowed_tokens_fn", lambda fails: fails, 1)),
    "criterion at once": ("bart", Boom, _given("stopping_criteria", _CRITERION, 1)),
    "criterion later": ("gpt2", Boom, _given("stopping_criteria", _CRITERION, 3)),
    "interrupt in a criterion": (
        "gpt2", KeyboardInterrupt, _given("stopping_criteria", _CRITERION, 3, KeyboardInterrupt),
    ),
    "streamer of the prompt": ("gpt2", Boom, _given("streamer", _FailingStreamer, 1)),
    "streamer of a token": ("gpt2", Boom, _given("streamer", _FailingStreamer, 2)),
    "streamer at the end": (
        "gpt2", Boom, _given("streamer", lambda fails: _FailingStreamer(fails, end=True), 1)
    ),
}  # fmt: skip


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.slow
def test_exceptions(stage: str, beams: int) -> None:
    """An exception in any stage reaches the caller, and no partial state remains."""
    family, error, prepare = STAGES[stage]
    model = zoo.build(family, torch.float32)
    inputs = _inputs(model, 1 if "streamer" in stage else 3)
    options = {"num_beams": beams, "max_new_tokens": 9, "min_new_tokens": 9}
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    wanted = _check(model, **inputs, **options)
    served, before = hits(), fallbacks()

    extra, undo = prepare(model)
    with pytest.raises(error, match="on purpose"):
        model.generate(**inputs, **options, **extra)
    undo()

    _check_at_rest(model)
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes
    assert hits() == served
    assert fallbacks() == before
    fastgen.disable()
    try:
        assert {
            row.state for row in fastgen.status().rows if row.name.startswith("transformers.")
        } == {"off"}
        assert torch.equal(model.generate(**inputs, **options), wanted)
        assert hits() == served
    finally:
        fastgen.enable()
    states = {row.state for row in fastgen.status().rows if row.name.startswith("transformers.")}
    assert "applied" in states
    assert states <= {"applied", "pending"}, "pending are those of modules that nobody has imported"
    assert torch.equal(_check(model, **inputs, **options), wanted)
    assert fallbacks() == before
    _check_at_rest(model)


@needs_c
def test_exceptions_with_packed_weights() -> None:
    """The same with routed linear layers."""
    model = _large()
    inputs = _inputs(model)
    wanted = _check(model, **inputs, **BEAMS)
    for error in (Boom, KeyboardInterrupt):
        for at in (1, 2, 5):
            _, undo = _hooked(lambda m: m.model.layers[1].mlp, error, at)(model)
            with pytest.raises(error):
                model.generate(**inputs, **BEAMS)
            undo()
            _check_at_rest(model)
            assert torch.equal(_check(model, **inputs, **BEAMS), wanted)


def test_exception_in_one_of_two_threads() -> None:
    """The other call of the same model runs to its end."""
    model = _large()
    inputs = _inputs(model)
    wanted = _stock(model, **inputs, **BEAMS)

    def failing() -> BaseException | None:
        processors = LogitsProcessorList([_FailingProcessor(_Fails(at=3))])
        try:
            model.generate(**inputs, **BEAMS, logits_processor=processors)
        except Boom as error:
            return error
        return None

    for _ in range(5):
        error, found = _together(failing, lambda: model.generate(**inputs, **BEAMS))
        assert isinstance(error, Boom)
        assert torch.equal(found, wanted)
    _check_at_rest(model)


def test_generate_within_generate() -> None:
    """A processor generates, with the same model and with another one."""
    inner = zoo.build("gpt2", seed=1)

    class Asks(LogitsProcessor):
        def __init__(self, model: Any) -> None:
            self.model = model

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            answer = self.model.generate(torch.full((2, 3), 7), num_beams=2, max_new_tokens=2)
            scores[:, answer[0, -1]] = -torch.inf
            return scores

        def __deepcopy__(self, memo: dict[int, Any]) -> "Asks":
            return self

    outer = zoo.build("gpt2")
    for model in (inner, outer):
        kwargs = _inputs(outer) | BEAMS | {"logits_processor": LogitsProcessorList([Asks(model)])}
        assert assert_same(outer, kwargs).error is None
    _check_at_rest(inner, outer)


def test_disable_within_a_call() -> None:
    """`disable` refuses while a call runs, and the call goes on."""
    model = zoo.build("gpt2")

    class Disables(LogitsProcessor):
        refused = 0

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            with pytest.raises(RuntimeError, match="running"):
                fastgen.disable()
            Disables.refused += 1
            return scores

    inputs = _inputs(model)
    found = _generate(model, **inputs, **BEAMS, logits_processor=LogitsProcessorList([Disables()]))
    assert Disables.refused
    assert torch.equal(found, _stock(model, **inputs, **BEAMS))
    _check_at_rest(model)


class _Notes(LogitsProcessor):
    """A processor with a side effect: it counts its calls.

    In the first step it allows only the tokens 7 and 8.
    """

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 1:
            scores = torch.full_like(scores, -torch.inf)
            scores[:, 7], scores[:, 8] = 0, -1
        return scores


@pytest.mark.parametrize(
    "options", [{"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}], ids=str
)
def test_nan_in_a_step(options: dict[str, Any]) -> None:
    """A decode step gives NaN, like an overflow; the call runs once, in either code."""
    model = zoo.build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.nan
    kwargs = _inputs(model, 2, 3) | options | {"max_new_tokens": 4}
    seen: list[tuple[int, Any]] = []
    for run in (lambda **k: model.generate(**k), lambda **k: _stock(model, **k)):
        notes = _Notes()
        torch.manual_seed(0)
        try:
            value = run(**kwargs, logits_processor=LogitsProcessorList([notes])).tolist()
        except RuntimeError as error:  # multinomial refuses NaN
            value = type(error)
        seen.append((notes.calls, value))
    assert seen[0][0] == seen[1][0]
    # With beams, a NaN spreads to the other beams of its sentence; see docs/supported.md.
    if "num_beams" not in options:
        assert seen[0][1] == seen[1][1]
