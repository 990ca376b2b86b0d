"""Check loops over batches whose texts are generated together: everything is as without fastgen."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader, Dataset

import fastgen
from fastgen.models.layers import read_rows
from fastgen.models.routing.routes import routed
from fastgen.patches.generation_call import requesting
from fastgen.patches.transformers.loops import evaluation_loss
from fastgen.patches.transformers.loops.read_ahead import ReadAhead, may_read_ahead
from fastgen.patches.transformers.loops.upcoming_calls import UpcomingCalls
from tests.support import zoo

EVALUATION, PIPELINE = "transformers.evaluation_loop", "transformers.pipeline_batches"
ENDS: dict[str, Any] = {"eos_token_id": [2, *range(20, 40)]}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": ENDS | {"max_new_tokens": 9},
    "no end": {"eos_token_id": -1, "max_new_tokens": 5},
    "beams": ENDS | {"max_new_tokens": 9, "num_beams": 3, "length_penalty": 0.4},
    "several, padded": ENDS
    | {"max_new_tokens": 9, "num_beams": 3, "num_return_sequences": 2, "pad_token_id": 5},
    "penalties": ENDS | {"max_new_tokens": 9, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
}


def _row(name: str) -> Any:
    return next(row for row in fastgen.status().rows if row.name == name)


def _texts(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 14, (count,), generator=generator).tolist()
    return [torch.randint(40, zoo.VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def _tokenizer() -> Any:
    words = Tokenizer(
        models.WordLevel(
            {"<pad>": 0, "</s>": 2} | {f"w{i}": i for i in range(3, zoo.VOCABULARY)} | {"w1": 1},
            unk_token="w1",
        )
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", padding_side="left"
    )


def _words(texts: list[list[int]]) -> list[str]:
    return [" ".join(f"w{token}" for token in text) for text in texts]


class _Lines(Dataset[Any]):
    """A dataset that notes which rows are read, and that may have a bad row."""

    def __init__(self, lines: list[Any], bad: int | None = None) -> None:
        self.lines, self.bad, self.read = lines, bad, list[int]()

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, number: int) -> Any:
        self.read.append(number)
        if number == self.bad:
            raise OSError(f"row {number} cannot be read")
        return self.lines[number]


def _batches(model: Any, texts: list[list[int]], size: int) -> list[dict[str, torch.Tensor]]:
    batches: list[dict[str, torch.Tensor]] = []
    for begin in range(0, len(texts), size):
        part = texts[begin : begin + size]
        width = max(map(len, part))
        fill = [[0] * (width - len(text)) for text in part]
        on_right = model.config.is_encoder_decoder
        rows = [t + f if on_right else f + t for t, f in zip(part, fill, strict=True)]
        ids = torch.tensor(rows)
        batches.append({"input_ids": ids, "attention_mask": (ids != 0).long()})
    return batches


def _loop(
    model: Any,
    batches: list[Any],
    options: dict[str, Any],
    between: Callable[[int, Any], object] = lambda number, batch: None,
) -> list[torch.Tensor]:
    """Generate for each batch, read ahead by fastgen."""
    calls = UpcomingCalls(EVALUATION, model)
    loader = DataLoader(_Lines(batches), batch_size=None)
    found: list[torch.Tensor] = []
    for number, batch in enumerate(ReadAhead(loader, calls, is_lazy=False)):
        between(number, batch)
        with requesting(model, upcoming=calls):
            found.append(model.generate(**batch, **options))
    return found


def _plain(
    model: Any,
    batches: list[Any],
    options: dict[str, Any],
    between: Callable[[int, Any], object] = lambda number, batch: None,
) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    with fastgen.disabled():
        for number, batch in enumerate(batches):
            between(number, batch)
            found.append(model.generate(**batch, **options))
    return found


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, options) for family in ("bart", "llama") for options in OPTIONS),
        *(
            (family, options)
            for family in sorted(zoo.FAMILIES.keys() - {"bart", "llama"})
            for options in ("greedy", "several, padded")
        ),
    ],
)
def test_outputs_are_those_of_each_batch(family: str, options: str) -> None:
    model = zoo.build(family)
    batches, given = _batches(model, _texts(26), 4), OPTIONS[options]
    before = _row(EVALUATION)
    found = _loop(model, batches, given)
    for output, expected in zip(found, _plain(model, batches, given), strict=True):
        assert output.tolist() == expected.tolist()
        assert output.dtype == expected.dtype
    after = _row(EVALUATION)
    # An n-gram of a prompt may end in its padding.
    padding_shows = options == "penalties" and not model.config.is_encoder_decoder
    runs = family not in ("gemma2", "blenderbot") and not padding_shows
    assert after.hits == before.hits + runs, after.left_off


def test_families_that_run_one_by_one() -> None:
    for family, reason in (
        ("gemma2", "with eager attention, padding of prompts may change a text"),
        ("blenderbot", "an option takes padding for text"),  # in its own generation config
    ):
        model = zoo.build(family)
        _loop(model, _batches(model, _texts(12), 4), OPTIONS["greedy"])
        assert f"batches are generated one by one: {reason}" in _row(EVALUATION).left_off


def test_fewer_calls_of_the_loop_are_made() -> None:
    model = zoo.build("bart")
    before = _row("transformers.sample").hits
    _loop(model, _batches(model, _texts(40), 4), OPTIONS["greedy"])
    assert _row("transformers.sample").hits - before < 9  # of ten batches


def _hook(model: Any) -> None:
    model.get_encoder().register_forward_hook(lambda *_: None)


APART: dict[str, tuple[dict[str, Any], Callable[[Any], object], str]] = {
    "sampling": ({"do_sample": True}, lambda model: None, "sampling draws for the whole batch"),
    "a time limit": ({"max_time": 100.0}, lambda model: None, "max_time is given"),
    "a criterion": (
        {"stopping_criteria": tf.StoppingCriteriaList()}, lambda model: None,
        "stopping_criteria is given",
    ),
    "source n-grams": (
        {"encoder_no_repeat_ngram_size": 2}, lambda model: None, "an option takes padding for text",
    ),
    "training mode": ({}, lambda model: model.train(), "the model is in training mode"),
    "a hook": ({}, _hook, "a hook on a BartEncoder may look at the whole batch"),
    "an option that is unset": (
        {"eos_token_id": None}, lambda model: None, "eos_token_id=None",
    ),
    "half precision": (
        {}, lambda model: model.bfloat16(),
        "in half precision and in int8, rounding depends on the batch",
    ),
}  # fmt: skip


@pytest.mark.parametrize("cause", APART)
def test_batches_run_one_by_one(cause: str) -> None:
    options, change, reason = APART[cause]
    model = zoo.build("bart", torch.float32)
    change(model)
    before = _row(EVALUATION)
    batches = _batches(model, _texts(12), 4)
    given = OPTIONS["greedy"] | options

    def seed(number: int, batch: Any) -> None:
        torch.manual_seed(number)

    found = _loop(model, batches, given, seed)
    after = _row(EVALUATION)
    assert after.hits == before.hits
    text = f"batches are generated one by one: {reason}"
    assert after.left_off[text] == before.left_off.get(text, 0) + 1
    expected: list[torch.Tensor] = []
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        expected.append(model.generate(**batch, **given))
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]


CHANGES: dict[str, Callable[[Any, int, Any], object]] = {
    "weights": lambda model, number, batch: model.lm_head.weight.mul_(-1),
    "a setting": lambda model, number, batch: setattr(
        model.generation_config, "suppress_tokens", [50 + number]
    ),
    "the batch": lambda model, number, batch: batch["input_ids"].fill_(41 + number),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_batches_is_noticed(change: str) -> None:
    model = zoo.build("bart")
    batches, state = _batches(model, _texts(24), 4), copy.deepcopy(model.state_dict())
    settings = copy.deepcopy(model.generation_config)

    @torch.no_grad()
    def between(number: int, batch: Any) -> None:
        if number >= 3:
            CHANGES[change](model, number, batch)

    found = _loop(model, copy.deepcopy(batches), OPTIONS["greedy"], between)
    model.load_state_dict(state)
    model.generation_config = settings
    expected = _plain(model, batches, OPTIONS["greedy"], between)
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]


def test_options_of_each_batch() -> None:
    model = zoo.build("bart")
    batches = _batches(model, _texts(24), 4)
    calls = UpcomingCalls(EVALUATION, model)
    loader = DataLoader(_Lines(batches), batch_size=None)
    for number, batch in enumerate(ReadAhead(loader, calls, is_lazy=False)):
        options = ENDS | {"max_new_tokens": 5 if number < 3 else 8}
        with requesting(model, upcoming=calls):
            found = [model.generate(**batch, **options) for _ in range(2)]
        expected = _plain(model, [batch], options)[0].tolist()
        assert [each.tolist() for each in found] == [expected] * 2


# The data loader


def _events(
    loader: Any, calls: UpcomingCalls | None = None, is_lazy: bool = True
) -> Iterator[object]:
    """Yield what an iteration gives, also after exceptions."""
    batches = iter(loader if calls is None else ReadAhead(loader, calls, is_lazy))
    for _ in range(12):
        try:
            yield next(batches).tolist()
        except (OSError, StopIteration) as error:
            yield type(error), str(error)


@pytest.mark.parametrize("bad", [None, 0, 5, 9, 17])
def test_exceptions_come_at_their_batch(bad: int | None) -> None:
    lines = list(range(18))
    calls = UpcomingCalls(EVALUATION, None)
    restart = calls.restart

    def started() -> None:
        restart()
        calls.recur = True

    calls.restart = started  # type: ignore[method-assign]
    found = list(_events(DataLoader(_Lines(lines, bad), batch_size=2), calls))
    assert found == list(_events(DataLoader(_Lines(lines, bad), batch_size=2)))


def test_without_generate_nothing_is_read_ahead() -> None:
    lines = _Lines(list(range(18)))
    batches = iter(
        ReadAhead(DataLoader(lines, batch_size=2), UpcomingCalls(EVALUATION, None), False)
    )
    for read in (2, 4, 6):
        next(batches)
        assert len(lines.read) == read


def test_streams_are_not_read_ahead() -> None:
    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(9))

        def __len__(self) -> int:
            return 9

    assert not may_read_ahead(DataLoader(Stream(), batch_size=2))
    assert not may_read_ahead(iter([1]))
    assert may_read_ahead(DataLoader(_Lines([1]), batch_size=2))


# Seq2SeqTrainer


class _Watch(tf.TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        loader = kwargs["eval_dataloader"]
        self.seen.append((type(loader).__name__, len(loader), loader.end_of_dataloader))


def _trainer(
    model: Any, folder: Any, metrics: Callable[..., Any], **options: Any
) -> tuple[Any, _Watch]:
    arguments = tf.Seq2SeqTrainingArguments(
        output_dir=str(folder), per_device_eval_batch_size=4, report_to=[], use_cpu=True,
        predict_with_generate=True, generation_max_length=11, generation_num_beams=3,
        disable_tqdm=True, include_for_metrics=["inputs", "loss"], **options,
    )  # fmt: skip
    watch = _Watch()
    tokenizer = _tokenizer()
    tokenizer.padding_side = "right"
    trainer = tf.Seq2SeqTrainer(
        model=model, args=arguments, compute_metrics=metrics, callbacks=[watch],
        data_collator=tf.DataCollatorForSeq2Seq(tokenizer, model=model),
    )  # fmt: skip
    return trainer, watch


def _samples(count: int) -> list[dict[str, list[int]]]:
    return [{"input_ids": text, "labels": [*text[:3], 2]} for text in _texts(count)]


def _of(result: Any) -> dict[str, Any]:
    metrics = {k: v for k, v in result.metrics.items() if "time" not in k and "second" not in k}
    return metrics | {
        "predictions": result.predictions.tolist(),
        "labels": result.label_ids.tolist(),
    }


@pytest.mark.parametrize("by_batch", [False, True])
def test_trainer(tmp_path: Any, by_batch: bool) -> None:
    seen: list[Any] = []

    def metrics(given: Any, compute_result: bool = True) -> dict[str, float]:
        arrays = (given.predictions, given.label_ids, given.losses)
        inputs = given.inputs["input_ids"] if by_batch else given.inputs
        seen.append([compute_result, *(np.asarray(each).tolist() for each in (*arrays, inputs))])
        return {"sum": float(np.asarray(given.predictions).sum())}

    trainer, watch = _trainer(
        zoo.build("bart", torch.float64), tmp_path, metrics, batch_eval_metrics=by_batch
    )
    samples, before = _samples(30), _row(EVALUATION).hits
    if by_batch:
        found: Any = trainer.evaluate(samples)
    else:
        found = _of(trainer.predict(samples))
    assert _row(EVALUATION).hits == before + 1
    first, seen[:] = seen[:], []
    steps, watch.seen[:] = watch.seen[:], []
    with fastgen.disabled():
        expected: Any = trainer.evaluate(samples) if by_batch else _of(trainer.predict(samples))
    if by_batch:
        expected = {k: v for k, v in expected.items() if "time" not in k and "second" not in k}
        found = {k: v for k, v in found.items() if k in expected}
    assert found == expected
    assert first == seen
    assert steps == watch.seen
    assert len(steps) == 8
    assert type(trainer.callback_handler.eval_dataloader).__name__ == steps[0][0]


def _ragged(count: int) -> list[dict[str, list[int]]]:
    """Return samples whose labels differ in length; some positions have none."""
    texts, labels = _texts(count), _texts(count, 1)
    labels[3] = [-100, 45]
    labels[9] = [45, -100]
    return [{"input_ids": a, "labels": b} for a, b in zip(texts, labels, strict=True)]


LOSS = "transformers.evaluation_loss"


@pytest.mark.parametrize(
    ("family", "smoothing"),
    [("bart", 0.0), ("bart", 0.1), *((f, 0.0) for f in ("t5", "mbart", "m2m_100", "led"))],
)
def test_loss_of_an_evaluation(
    family: str, smoothing: float, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_rows, "LEAST_WORK", 0)
    monkeypatch.setattr(read_rows, "LEAST_SHARE", 0)
    computed: list[tuple[int, int]] = []
    own = read_rows._Rows.placed

    def counted(self: Any, y: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        computed.append((len(y), shape.numel()))
        return own(self, y, shape)

    monkeypatch.setattr(read_rows._Rows, "placed", counted)
    model = zoo.build(family, torch.float32)
    trainer, _ = _trainer(model, tmp_path, lambda given: {}, label_smoothing_factor=smoothing)
    samples, before = _ragged(30), _row(LOSS).hits
    found = _of(trainer.predict(samples))
    with fastgen.disabled():
        expected = _of(trainer.predict(samples))
    assert found.pop("test_loss") == pytest.approx(expected.pop("test_loss"), rel=1e-5)
    assert found == expected
    assert _row(LOSS).hits == before + 8
    assert all(rows < places for rows, places in computed)
    assert bool(computed) == (family != "led")  # its encoder has no spec
    assert not any("forward" in vars(module) for module in model.modules())


def test_loss_of_a_source_of_padding_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its padding is read, as attention with nothing to attend to reads all positions."""
    monkeypatch.setattr(read_rows, "LEAST_WORK", 0)
    monkeypatch.setattr(read_rows, "LEAST_SHARE", 0)
    model, ids = zoo.build("bart", torch.float32), torch.randint(40, 60, (3, 6))
    model.set_attn_implementation("eager")
    mask = torch.ones_like(ids)
    mask[1], mask[2, 4:] = 0, 0
    labels = torch.randint(40, 60, (3, 5))
    labels[:, 4] = labels[0, 2:] = -100
    given = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    with torch.no_grad(), routed(model):
        found = evaluation_loss._LossForward(model)(**given)
        with fastgen.disabled():
            expected = model(**given)
    torch.testing.assert_close(found.loss, expected.loss)


def test_trainer_fails_where_it_would(tmp_path: Any) -> None:
    samples = _samples(30)
    samples[21]["input_ids"] = [40, zoo.VOCABULARY + 5]
    trainer, watch = _trainer(zoo.build("bart"), tmp_path, lambda given: {})
    with pytest.raises(IndexError):
        trainer.predict(samples)
    assert len(watch.seen) == 5
    assert not isinstance(trainer.callback_handler.eval_dataloader, ReadAhead)


@pytest.mark.parametrize("reader", ["a step of its own", "a hook", "a loss of its own"])
def test_logits_that_others_read_are_whole(reader: str, tmp_path: Any) -> None:
    seen: list[Any] = []

    def note(module: Any, args: Any, output: Any) -> None:
        if output.logits.shape[1] > 1:
            seen.append(output.logits.clone())

    class Trainer(tf.Seq2SeqTrainer):
        def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            generated = model.generate(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"],
                max_new_tokens=5, **ENDS,
            )  # fmt: skip
            with torch.no_grad(), self.compute_loss_context_manager():
                note(None, None, output := model(**inputs))
            return output.loss, generated, inputs["labels"]

    def loss(logits: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return logits.square().mean()

    model = zoo.build("bart", torch.float32)
    trainer, _ = _trainer(model, tmp_path, lambda given: {})
    if reader == "a hook":
        model.register_forward_hook(note)
    elif reader == "a loss of its own":
        model.loss_function = loss
    else:
        trainer.__class__ = Trainer
    samples = _ragged(30)
    found = _of(trainer.predict(samples))
    ours, seen[:] = seen[:], []
    with fastgen.disabled():
        expected = _of(trainer.predict(samples))
    assert found.pop("test_loss") == pytest.approx(expected.pop("test_loss"), rel=1e-5)
    assert found == expected
    for one, other in zip(ours, seen, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


# Pipelines


@pytest.mark.parametrize("is_lazy", [False, True])
@pytest.mark.parametrize("beams", [1, 3])
def test_pipeline(beams: int, is_lazy: bool) -> None:
    model = zoo.build("llama")
    pipe = tf.pipeline("text-generation", model=model, tokenizer=_tokenizer(), device="cpu")
    lines: Any = _words(_texts(37))
    given: Any = _Lines(lines) if is_lazy else lines
    for options in ({"return_tensors": True}, {"return_full_text": False}):
        call = ENDS | options | {"num_beams": beams, "max_new_tokens": 7, "do_sample": False}
        before = _row(PIPELINE).hits
        found = list(pipe(given, batch_size=4, **call))
        assert _row(PIPELINE).hits > before
        with fastgen.disabled():
            assert list(pipe(given, batch_size=4, **call)) == found


def test_a_consumer_that_stops_early() -> None:
    pipe = tf.pipeline(
        "text-generation", model=zoo.build("llama"), tokenizer=_tokenizer(), device="cpu"
    )
    lines = _Lines(_words(_texts(400)))
    results = iter(pipe(lines, batch_size=2, max_new_tokens=3, do_sample=False, **ENDS))
    assert len(results) == 200
    for taken in range(1, 120):
        next(results)
        assert len(lines.read) <= min(3 * taken + 6, taken + 2 * 17)


def test_pipeline_of_a_generator_reads_no_further() -> None:
    pipe = tf.pipeline(
        "text-generation", model=zoo.build("llama"), tokenizer=_tokenizer(), device="cpu"
    )
    read: list[int] = []

    def lines() -> Iterator[str]:
        for number, line in enumerate(_words(_texts(30))):
            read.append(number)
            yield line

    for taken, _ in enumerate(
        pipe(lines(), batch_size=2, max_new_tokens=3, do_sample=False, **ENDS), start=1
    ):
        assert len(read) <= taken + 2


def test_pipelines_run_batch_by_batch_if_refill_is_off(
    setting: Callable[[str, str], None],
) -> None:
    setting("FASTGEN_REFILL", "off")
    pipe = tf.pipeline(
        "text-generation", model=zoo.build("llama"), tokenizer=_tokenizer(), device="cpu"
    )
    lines, before = _Lines(_words(_texts(12))), _row(PIPELINE).hits
    results = iter(pipe(lines, batch_size=2, max_new_tokens=3, do_sample=False, **ENDS))
    for taken in range(1, 12):
        next(results)
        assert len(lines.read) <= taken + 2
    assert _row(PIPELINE).hits == before
