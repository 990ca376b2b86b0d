"""UniLM computes what a BERT computes over source, target and a mask, cached or in training.

Also covers the shared KV cache and the loading of checkpoints.
"""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from transformers.modeling_outputs import Seq2SeqLMOutput

import fastgen
from fastgen import config
from fastgen.patches.transformers.compat import CACHE
from fastgen.patches.transformers.generate.report import last_call
from fastgen.unilm import UniLMConfig, UniLMForConditionalGeneration, load
from tests.support import zoo
from tests.support.parity import assert_same

FIELDS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
METHODS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 4, "no_repeat_ngram_size": 2, "length_penalty": 0.6},
    "five": {
        "num_beams": 5,
        "num_return_sequences": 5,
        "early_stopping": True,
        "min_new_tokens": 4,
    },
    "samples": {"do_sample": True, "num_return_sequences": 3, "top_k": 20},
}
MASK = 1  # as in the zoo


def bert_of(model: Any) -> Any:
    """Return transformers' BERT with a model's weights."""
    values = {
        name: value
        for name, value in model.config.to_dict().items()
        if name in tf.BertConfig().to_dict()
    }
    values |= {"model_type": "bert", "is_encoder_decoder": False, "architectures": None}
    bert = (
        tf.BertForMaskedLM._from_config(tf.BertConfig(**values), attn_implementation="eager")
        .to(model.dtype)
        .eval()
    )
    missing, unexpected = bert.load_state_dict(model.state_dict(), strict=False)
    assert (missing, unexpected) == ([], [])
    return bert


def predicted(
    bert: Any, source: Tensor, targets: Tensor, source_type: int = 0, target_type: int = 1
) -> Tensor:
    """Return the logits (V,) of a mask after source (S,) and targets (T,), computed uncached."""
    ids = torch.cat([source, targets, torch.tensor([MASK])])
    first, length = len(source), len(ids)
    sees = torch.ones(length, length).tril().bool()
    sees[:, :first] = True
    hidden = torch.zeros(1, 1, length, length, dtype=bert.dtype).masked_fill(
        ~sees, torch.finfo(bert.dtype).min
    )
    types = torch.tensor([source_type] * first + [target_type] * (length - first))
    return bert(ids[None], hidden, types[None], torch.arange(length)[None]).logits[0, -1]


class Recomputed(UniLMForConditionalGeneration):
    """UniLM by its definition: a BERT reads the whole text for each new token."""

    bert_of_it: Any

    def forward(
        self, attention_mask: Any = None, decoder_input_ids: Any = None, **kwargs: Any
    ) -> Any:
        sources = self.sources.repeat_interleave(len(decoder_input_ids) // len(self.sources), 0)
        rows = zip(sources, attention_mask.bool(), decoder_input_ids, strict=True)
        logits = [predicted(self.bert_of_it, source[seen], ids[1:]) for source, seen, ids in rows]
        return Seq2SeqLMOutput(logits=torch.stack(logits)[:, None])


def recomputed(model: Any, inputs: dict[str, Any]) -> Any:
    found = Recomputed(model.config).to(model.dtype).eval()
    found.__dict__.update(bert_of_it=bert_of(model), sources=inputs["input_ids"])
    return found


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("method", ["greedy", "beams", "five"])
def test_cached_steps_are_those_of_a_bert_that_reads_all_anew(method: str, padding: str) -> None:
    model = zoo.build("unilm")
    inputs = zoo.batch(model, 3, 9, padding)
    kwargs = inputs | METHODS[method] | FIELDS | {"max_new_tokens": 9}
    with fastgen.disabled():
        truth = recomputed(model, inputs).generate(**kwargs, use_cache=False)
        stock = model.generate(**kwargs)
    ours = model.generate(**kwargs)
    call = last_call()
    assert call is not None
    assert call.plan.shared
    assert call.plan.fused
    for found in (stock, ours):
        assert torch.equal(found.sequences, truth.sequences)
        # transformers keeps them in fp32.
        for step, exact in zip(found.logits, truth.logits, strict=True):
            torch.testing.assert_close(step, exact, atol=1e-6, rtol=1e-6)
        if "num_beams" in kwargs:
            torch.testing.assert_close(
                found.sequences_scores, truth.sequences_scores, atol=1e-6, rtol=1e-6
            )


def test_logits_in_full_precision() -> None:
    """Training in one pass and cached passes over several tokens agree with a BERT to 1e-9."""
    model = zoo.build("unilm")
    inputs = zoo.batch(model, 3, 8, "right")
    labels = torch.randint(4, zoo.VOCABULARY, (3, 6))
    bert = bert_of(model)
    rows = list(zip(inputs["input_ids"], inputs["attention_mask"].bool(), labels, strict=True))
    with torch.no_grad():
        exact = torch.stack(
            [
                torch.stack([predicted(bert, source[seen], row[:t]) for t in range(6)])
                for source, seen, row in rows
            ]
        )
        trained = model(**inputs, labels=labels)
        torch.testing.assert_close(trained.logits, exact, atol=1e-9, rtol=1e-9)
        loss = torch.nn.functional.cross_entropy(exact.flatten(0, 1), labels.flatten())
        torch.testing.assert_close(trained.loss, loss, atol=1e-9, rtol=1e-9)
        ids = model.prepare_decoder_input_ids_from_labels(labels)
        past, found = None, list[Tensor]()
        for part in ids.split([3, 1, 2], 1):
            outputs = model(**inputs, decoder_input_ids=part, **{CACHE: past}, use_cache=True)
            past = outputs[CACHE]
            found.append(outputs.logits)
        torch.testing.assert_close(torch.cat(found, 1), exact, atol=1e-9, rtol=1e-9)
    # Ignored labels, with which a collator pads a batch, do not affect the other labels.
    short = labels.clone()
    short[1, 3:] = -100
    found_short = model(**inputs, labels=short).logits
    torch.testing.assert_close(found_short[1, :3], exact[1, :3], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("step", ["auto", "module"])
@pytest.mark.parametrize("method", METHODS)
def test_steps_from_the_weights_and_through_the_modules(
    method: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both use the shared KV cache, through compaction, growth and finished sentences."""
    if step == "module":
        monkeypatch.setenv("FASTGEN_STEP", step)
        config.reload()
    try:
        model = zoo.build("unilm", seed=1)
        prompt = torch.tensor([[zoo.START, 5, 6]] * 4)
        for more in (
            {},
            {"decoder_input_ids": prompt},
            FIELDS,
            {"eos_token_id": [2, 7, 9, 30, 31, 32]},
        ):
            kwargs = (
                zoo.batch(model, 4, 9, "left") | METHODS[method] | {"max_new_tokens": 40} | more
            )
            assert assert_same(model, kwargs).error is None
            call = last_call()
            assert call is not None
            assert call.plan.shared
            assert call.plan.fused == (step == "auto")
            assert call.kv_bytes <= call.stock_kv_bytes
    finally:
        monkeypatch.undo()
        config.reload()


def test_what_cannot_be_had_is_said() -> None:
    model = zoo.build("unilm", torch.float32)
    inputs = zoo.batch(model, 2, 9)
    with pytest.raises(ValueError, match="each step runs 2 tokens of a text"):
        model.generate(
            **inputs,
            assistant_early_exit=1,
            lossless=True,
            fallback_threshold=0.2,
            max_new_tokens=4,
        )
    with pytest.raises(ValueError, match="have 130 positions, and max_position_embeddings is 128"):
        model(**zoo.batch(model, 1, 100, "none"), labels=torch.full((1, 30), 5))
    with pytest.raises(
        ValueError, match="holds source and target, for which a StaticCache has no room"
    ):
        model.generate(**inputs, cache_implementation="static", max_new_tokens=4)
    with pytest.raises(ValueError, match="output_hidden_states=True: a UniLM returns neither"):
        model.generate(
            **inputs, output_hidden_states=True, return_dict_in_generate=True, max_new_tokens=4
        )
    past = model(**inputs, decoder_input_ids=torch.tensor([[zoo.START]] * 2), use_cache=True)[CACHE]
    with pytest.raises(ValueError, match="begins with an empty cache, and the one given holds 9"):
        model.generate(**inputs, **{CACHE: past})
    with pytest.raises(
        ValueError, match=r"attention_mask is \(2, 4\), and the source has 9 tokens"
    ):
        model(
            inputs["input_ids"],
            encoder_outputs=model.get_encoder()(inputs["input_ids"]),
            labels=torch.tensor([[5]] * 2),
            attention_mask=torch.ones(2, 4),
        )
    with pytest.raises(ValueError, match="decoder_input_ids or labels, and both are None"):
        model(**inputs)
    with pytest.raises(ValueError, match="input_ids or encoder_outputs, and both are None"):
        model(labels=torch.tensor([[5]]))


def _published(
    folder: Path, model: Any, rename: Callable[[str], str] = str, **values: Any
) -> tuple[Path, Path]:
    """Write weights as s2s-ft publishes them: one torch file, and a config without a model type."""
    state = {
        rename(name): value for name, value in model.state_dict().items() if "decoder." not in name
    }
    state |= {
        "cls.predictions.decoder_weight": model.get_input_embeddings().weight.detach(),
        "bert.pooler.dense.weight": torch.zeros(16, 16), "bert.pooler.dense.bias": torch.zeros(16),
        "cls.seq_relationship.weight": torch.zeros(2, 16),
        "cls.seq_relationship.bias": torch.zeros(2),
    }  # fmt: skip
    names = (
        "attention_probs_dropout_prob", "hidden_act", "hidden_dropout_prob", "hidden_size",
        "initializer_range", "intermediate_size", "max_position_embeddings", "num_attention_heads",
        "num_hidden_layers", "type_vocab_size", "vocab_size", "layer_norm_eps", "source_type_id",
        "target_type_id",
    )  # fmt: skip
    weights, settings = folder / "unilm1.2.bin", folder / "unilm1.2-config.json"
    torch.save(state, weights)
    settings.write_text(json.dumps({name: getattr(model.config, name) for name in names} | values))
    return weights, settings


SPECIAL = {"mask_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}  # as in the zoo


@pytest.mark.parametrize("old", [False, True], ids=["", "norms as in TensorFlow"])
def test_published_checkpoints(tmp_path: Path, old: bool) -> None:
    model = zoo.build("unilm", torch.float32)
    rename = (
        (
            lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            )
        )
        if old
        else str
    )
    weights, settings = _published(tmp_path, model, rename)
    found = load(weights, settings, **SPECIAL)
    assert not found.training
    inputs = zoo.batch(model, 3, 9) | {"num_beams": 3, "max_new_tokens": 8}
    assert torch.equal(found.generate(**inputs), model.generate(**inputs))
    found.save_pretrained(tmp_path / "saved")
    for again in (
        load(tmp_path / "saved"),
        UniLMForConditionalGeneration.from_pretrained(tmp_path / "saved").eval(),
        tf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved").eval(),
    ):
        assert type(again) is UniLMForConditionalGeneration
        assert torch.equal(again.generate(**inputs), model.generate(**inputs))


def test_other_numbers_of_positions(tmp_path: Path) -> None:
    """Longer position tables repeat the weights, as in s2s-ft.

    The length comes from an argument, or from a published config.
    """
    model = zoo.build("unilm", torch.float32)
    table = model.bert.embeddings.position_embeddings.weight
    weights, settings = _published(tmp_path, model, max_position_embeddings=200)
    model.save_pretrained(tmp_path / "saved")
    for found, count in (
        (load(weights, settings, **SPECIAL), 200),
        (load(weights, settings, 140, **SPECIAL), 140),
        (load(tmp_path / "saved", max_position_embeddings=64), 64),
    ):
        assert found.config.max_position_embeddings == count
        assert torch.equal(
            found.bert.embeddings.position_embeddings.weight, table[torch.arange(count) % 128]
        )
    inputs = zoo.batch(found, 1, 50, "none") | {"max_new_tokens": 14}
    assert torch.equal(found.generate(**inputs), model.generate(**inputs))


@pytest.mark.parametrize("kind", [tf.BertForMaskedLM, tf.BertModel, tf.BertForPreTraining])
def test_a_plain_bert(tmp_path: Path, kind: Any) -> None:
    torch.manual_seed(0)
    settings = tf.BertConfig(
        vocab_size=110, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=32, initializer_range=0.5,
    )  # fmt: skip
    bert = kind(settings).eval()
    bert.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"without a tokenizer.* mask_token_id, eos_token_id must be given"
    ):
        load(tmp_path, decoder_start_token_id=101)
    tokens = {"mask_token_id": 103, "decoder_start_token_id": 101, "eos_token_id": 102}
    for model in (
        load(tmp_path, **tokens),
        UniLMForConditionalGeneration.from_pretrained(tmp_path).eval(),
    ):
        own, theirs = model.bert.state_dict(), getattr(bert, "bert", bert).state_dict()
        assert all(
            torch.equal(own[name], value) for name, value in theirs.items() if "pooler" not in name
        )
        assert model.config.is_encoder_decoder
        source, labels = torch.randint(4, 100, (1, 7)), torch.randint(4, 100, (1, 3))
        assert model.generate(source, max_new_tokens=5)[0, 0] == 101
        if kind is tf.BertForMaskedLM:  # it has all the weights
            sees = torch.ones(1, 1, 8, 8)
            sees[..., :7, 7] = 0
            hidden = (1 - sees) * torch.finfo(torch.float32).min
            ids, types = (
                torch.cat([source, torch.tensor([[103]])], 1),
                torch.tensor([[0] * 7 + [1]]),
            )
            exact = bert(ids, hidden, types).logits[:, -1]
            torch.testing.assert_close(
                model(source, labels=labels).logits[:, 0], exact, atol=1e-5, rtol=1e-5
            )


def test_types_of_tokens_are_the_configs() -> None:
    """UniLM 1 has type 4 for the source and 5 for the target."""
    values = zoo.build("unilm").config.to_dict() | {
        "type_vocab_size": 6,
        "source_type_id": 4,
        "target_type_id": 5,
    }
    model = UniLMForConditionalGeneration(UniLMConfig(**values)).double().eval()
    source, labels = torch.randint(4, 90, (1, 6)), torch.randint(4, 90, (1, 2))
    exact = predicted(bert_of(model), source[0], labels[0, :1], 4, 5)
    torch.testing.assert_close(
        model(source, labels=labels).logits[0, 1], exact, atol=1e-9, rtol=1e-9
    )
    assert (
        assert_same(
            model, {"input_ids": source, "num_beams": 3, "max_new_tokens": 8} | FIELDS
        ).error
        is None
    )
    call = last_call()
    assert call is not None
    assert call.plan.fused


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"rel_pos_bins": 32},
            r"relative position buckets \(unilm2\) is not supported: rel_pos_bins=32",
        ),
        ({"seg_emb": True}, "segment embeddings inside attention is not supported: seg_emb=True"),
        ({"num_qkv": 2}, "several projections per layer is not supported: num_qkv=2"),
        ({"type_vocab_size": 0}, "source_type_id=0, where there are 0"),
        ({"target_type_id": 2}, "target_type_id=2, where there are 2"),
        ({"mask_token_id": 500}, "mask_token_id=500, where there are 96"),
        ({"num_attention_heads": 3}, "hidden_size=16 is no multiple of 3 heads"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    weights, settings = _published(tmp_path, zoo.build("unilm", torch.float32), **SPECIAL | values)
    with pytest.raises(ValueError, match=message):
        load(weights, settings)


class _Code:
    """An object that runs code when it is unpickled without weights_only."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("code of a checkpoint ran",)


def test_files_that_are_refused(tmp_path: Path) -> None:
    model = zoo.build("unilm", torch.float32)
    weights, settings = _published(tmp_path, model)
    with pytest.raises(
        ValueError, match=r"config is None: it must name the JSON file .*unilm1\.2\.bin"
    ):
        load(weights)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.bin", settings, **SPECIAL)
    torch.save({"weight": torch.zeros(2)}, tmp_path / "other.bin")
    with pytest.raises(
        ValueError, match=r"other\.bin holds no weights of a UniLM: there is no bert\.embeddings"
    ):
        load(tmp_path / "other.bin", settings, **SPECIAL)
    state = torch.load(weights, weights_only=True)
    torch.save(
        {name: value for name, value in state.items() if "layer.1." not in name},
        tmp_path / "half.bin",
    )
    with pytest.raises(
        ValueError,
        match=r"half\.bin lacks 16 weights of a UniLM, bert\.encoder\.layer\.1\.attention",
    ):
        load(tmp_path / "half.bin", settings, **SPECIAL)
    torch.save(state | {"code": _Code()}, tmp_path / "code.bin")
    with pytest.raises(pickle.UnpicklingError):
        load(tmp_path / "code.bin", settings, **SPECIAL)


def test_it_learns_to_reverse() -> None:
    """Fine-tuning on texts and their reverse: the loss falls, and most new texts are reversed.

    Copying the source would reverse almost none of them.
    """
    torch.manual_seed(0)
    settings = UniLMConfig(
        vocab_size=14, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, **SPECIAL,
    )  # fmt: skip
    model = UniLMForConditionalGeneration(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)

    def batch(count: int) -> tuple[Tensor, Tensor]:
        texts = torch.randint(4, 14, (count, 4))
        ends = torch.full((count, 1), 2)
        return torch.cat([texts, ends], 1), torch.cat([texts.flip(1), ends], 1)

    losses: list[float] = []
    steps = 160
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 4e-3 * min(1.0, (step + 1) / 30) * (1 - step / steps)
        source, labels = batch(64)
        loss = model(source, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.3 * sum(losses[:10])
    model.eval()
    source, labels = batch(64)
    written = model.generate(source, num_beams=3, max_new_tokens=5)[:, 1:]
    exact = float((written == labels[:, : written.shape[1]]).all(1).float().mean())
    copied = float((source == labels).all(1).float().mean())
    assert exact > max(0.5, copied), (exact, copied, losses[-1])
