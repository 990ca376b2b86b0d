"""Check encoders that run from their weights.

Outputs are equal, unread padding is skipped, and calls that would not gain are left alone.
"""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import fastgen
from fastgen.models.layers.linear import TorchLinear
from fastgen.models.runtime import encoder as encoders
from fastgen.models.runtime.encoder import pays
from fastgen.ops import processor
from fastgen.patches.transformers.encoders import encoder
from tests.support import zoo
from tests.support.parity import assert_same, same

LENGTHS = (3, 17, 9, 9, 1, 12)
TOKENS, PADDED = sum(LENGTHS), sum(length < 17 for length in LENGTHS)


MEASURED = {name: getattr(encoders, name) for name in ("READING", "CALL", "LOOK")}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat every call as worth accelerating, since the models of tests are too small."""
    for name, value in (("READING", -1), ("CALL", 0), ("LOOK", -1)):
        monkeypatch.setattr(encoders, name, value)


def _batch(padding: str = "right") -> dict[str, Tensor]:
    """Return six sentences, padded on one or both sides, or of equal length."""
    ids = torch.randint(4, zoo.VOCABULARY, (6, 17), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, length in enumerate(LENGTHS if padding != "none" else ()):
        before = {"right": 0, "left": 17 - length, "both": (17 - length) // 2}[padding]
        mask[row] = 0
        mask[row, before : before + length] = 1
    return {"input_ids": ids.masked_fill(mask == 0, zoo.PAD), "attention_mask": mask}


def _row(name: str) -> Any:
    return fastgen.status()[f"transformers.{name}"]


def _folder(family: str) -> str:
    return {"XLMRoberta": "xlm_roberta"}.get(family, family.lower())


def _both(model: Any, batch: dict[str, Any], tolerance: float = 1e-9) -> Any:
    with torch.no_grad():
        ours = model(**batch)
        with fastgen.disabled():
            stock = model(**batch)
    assert type(ours) is type(stock)
    same(ours, stock, tolerance=tolerance)
    return ours


@pytest.mark.parametrize("padding", ["none", "right", "left", "both"])
@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification", "ForTokenClassification"])
@pytest.mark.parametrize("family", zoo.ENCODERS)
def test_the_output_is_the_same_at_every_position(family: str, head: str, padding: str) -> None:
    before = [_row(f"{kind}.{_folder(family)}") for kind in ("encoder", "classifier")]
    _both(zoo.encoder(family, head), _batch(padding))
    _both(
        zoo.encoder(family, head, torch.float32, initializer_range=0.1),
        _batch(padding),
        tolerance=1e-5,
    )
    found, first = _row(f"encoder.{_folder(family)}"), _row(f"classifier.{_folder(family)}")
    hits = [row.hits - earlier.hits for row, earlier in zip((found, first), before, strict=True)]
    assert hits == [2, 2 * (head == "ForSequenceClassification")]
    assert [found.fallbacks, first.fallbacks] == [earlier.fallbacks for earlier in before]


class _Rows(TorchDispatchMode):
    """Counts the rows of all matrix products with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
            self.rows += args[func is torch.ops.aten.addmm.default].shape[0]
        return func(*args, **kwargs or {})


def _rows(model: Any, batch: dict[str, Any]) -> int:
    with torch.no_grad():
        model(**batch)  # the first call runs the equivalence check
        with _Rows() as counted:
            model(**batch)
    return counted.rows


def test_only_what_is_read_is_computed() -> None:
    """Count rows over two layers with six products each.

    No product computes padding. In the last layer four products compute first positions only.
    """
    sentences, heads = len(LENGTHS), 2 * len(LENGTHS)
    first = 6 * TOKENS + 2 * TOKENS + 4 * sentences + heads
    assert _rows(zoo.encoder("Bert", "ForSequenceClassification"), _batch()) == first
    # With left padding the first position is padding, which has queries but no keys.
    added = 4 * PADDED
    assert _rows(zoo.encoder("Bert", "ForSequenceClassification"), _batch("left")) == first + added
    # Equal padding inputs give equal outputs; otherwise a user may read all padding.
    heads = sentences + sentences * 17
    assert _rows(zoo.encoder("Roberta", "Model"), _batch()) == 12 * TOKENS + 8 * PADDED + sentences
    positions = sentences * 17
    assert _rows(zoo.encoder("Bert", "Model"), _batch()) == 8 * positions + 4 * TOKENS + sentences


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_lora(dtype: torch.dtype) -> None:
    """An active adapter adds its products; merged or disabled, it is not there."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    options = peft.LoraConfig(r=4, target_modules=["query", "dense"], init_lora_weights=False)
    bert = zoo.encoder("Bert", "ForTokenClassification", dtype, initializer_range=0.1)
    model = peft.get_peft_model(bert, options).to(dtype).eval()
    tolerance, before = (1e-9 if dtype == torch.float64 else 1e-4), _row("encoder.bert")
    _both(model, _batch(), tolerance)
    with model.disable_adapter():
        _both(model, _batch(), tolerance)
    model.merge_adapter()
    _both(model, _batch(), tolerance)
    found = _row("encoder.bert")
    assert found.hits == before.hits + 3
    assert found.fallbacks == before.fallbacks


class _Mean(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.mean(1)


class _Half(nn.Linear):
    def forward(self, *args: Any) -> Tensor:
        return super().forward(*args) / 2


def _hook(model: Any) -> None:
    model.bert.encoder.layer[1].output.register_forward_hook(lambda *_: None)


def _adapter(model: Any) -> None:
    query = model.bert.encoder.layer[0].attention.self.query
    query.__class__ = _Half


def _own_forward(model: Any) -> None:
    layer = model.bert.encoder.layer[1]
    layer.forward = lambda x, *_, **__: 2 * x


def _quantised(model: Any) -> None:
    torch.ao.quantization.quantize_dynamic(
        model.float(), {nn.Linear}, dtype=torch.qint8, inplace=True
    )


def _other_attention(model: Any) -> None:
    model.set_attn_implementation(zoo.OWN_ATTENTION)


def _half(model: Any) -> None:
    model.half()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_hook, "a hook on a BertOutput"),
        (_adapter, "a tests._Half in place of a linear layer"),
        (_own_forward, "a replaced forward of a BertLayer"),
        (_quantised, "a torch.Linear in place of a linear layer"),
        (_other_attention, f"attention implementation '{zoo.OWN_ATTENTION}'"),
        (_half, "weights in torch.float16"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_changed_model_runs_its_own_layers(change: Callable[[Any], None], reason: str) -> None:
    model = zoo.encoder("Bert", "ForTokenClassification")
    change(model)
    before = _row("encoder.bert").fallbacks.get(reason, 0)
    _both(model, _batch(), tolerance=0)
    assert _row("encoder.bert").fallbacks[reason] == before + 1, _row("encoder.bert").fallbacks


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"output_hidden_states": True}, "hidden states or attentions are returned"),
        ({"output_attentions": True}, "hidden states or attentions are returned"),
        (
            {"attention_mask": torch.ones(6, 1, 17, 17).tril().bool()},
            "an attention mask of its own",  # this one is causal
        ),
        ({"attention_mask": torch.zeros(6, 17)}, "a sentence of padding alone"),
    ],
)
def test_a_call_that_asks_for_more_runs_the_models_own_layers(
    more: dict[str, Any], reason: str
) -> None:
    model = zoo.encoder("Bert", "ForSequenceClassification", attn_implementation="eager")
    _both(model, _batch() | more)
    counted = (
        _row("encoder.bert").left_off if "returned" in reason else _row("encoder.bert").fallbacks
    )
    assert reason in counted
    same(_both(model, _batch()), _both(model, _batch()))


def test_gradients_and_training_are_left_alone() -> None:
    model = zoo.encoder("Bert", "ForSequenceClassification")
    hits = _row("encoder.bert").hits
    model(**_batch()).logits.sum().backward()
    assert "gradients are enabled" in _row("encoder.bert").left_off
    counted = sum(_row("encoder.bert").fallbacks.values())
    gradients = []
    for _ in range(2):
        model.train().zero_grad()
        torch.manual_seed(3)
        model(**_batch()).logits.sum().backward()
        gradients.append(
            [
                parameter.grad.clone()
                for parameter in model.parameters()
                if parameter.grad is not None
            ]
        )
        fastgen.disable()
    fastgen.enable()
    assert all(map(torch.equal, *gradients))
    assert (sum(_row("encoder.bert").fallbacks.values()), _row("encoder.bert").hits) == (
        counted,
        hits,
    )


@pytest.mark.parametrize("what", ["pooler", "hook", "subclass"])
def test_a_classifier_that_may_read_more_gets_all_positions(what: str) -> None:
    model, seen = zoo.encoder("Bert", "ForSequenceClassification"), list[torch.Size]()
    if what == "pooler":
        model.bert.pooler = _Mean()
    elif what == "hook":
        model.bert.pooler.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    else:
        model.bert.__class__ = type(
            "Own", (type(model.bert),), {"forward": lambda self, *a, **k: _super(self, a, k)}
        )
    _both(model, _batch())
    assert _row("classifier.bert").fallbacks
    if what == "hook":
        assert seen[0] == seen[1]


def _super(self: Any, args: Any, kwargs: Any) -> Any:
    return tf.BertModel.forward(self, *args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_weight_that_changes_between_calls(dtype: torch.dtype) -> None:
    model = zoo.encoder(
        "DistilBert",
        "ForTokenClassification",
        dtype,
        dim=320,
        hidden_dim=640,
        initializer_range=0.05,
    )
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    layer = model.distilbert.transformer.layer[1]
    before = [_both(model, _batch(), tolerance).logits for _ in range(3)][-1]
    layer.ffn.lin1.weight.data[7] += 1.0
    layer.sa_layer_norm.weight = nn.Parameter(layer.sa_layer_norm.weight * 2)
    assert not torch.allclose(_both(model, _batch(), tolerance).logits, before, atol=1e-3)


def test_small_calls_are_left_alone_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the measured costs, no call of a model of this size is worth accelerating."""
    for name, value in MEASURED.items():
        monkeypatch.setattr(encoders, name, value)
    hits, left = _row("encoder.bert").hits, dict(_row("encoder.bert").left_off)
    _both(zoo.encoder("Bert", "ForSequenceClassification"), _batch(), tolerance=0)
    assert _row("encoder.bert").hits == hits
    assert _row("encoder.bert").left_off != left
    base: dict[str, Any] = {"length": 128, "weights": 12 * 768**2, "layers": 12, "routed": True}
    assert pays([8, 128] * 16, padding="first", **base)
    assert pays([128] * 32, padding="run", **base)
    assert not pays([2], padding="run", **base | {"length": 2})
    assert not pays([127, 128], padding="none", **base | {"weights": 12 * 64**2, "routed": False})


# Pipelines and the trainer

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "small", "dog", "runs", "home", "late", ".")


@pytest.fixture
def tokenizer(tmp_path: pathlib.Path) -> Any:
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    toolkit: Any = tf
    return toolkit.BertTokenizerFast(str(tmp_path / "vocab.txt"), model_max_length=40)


TEXTS = [
    "a small dog runs home late .",
    "a dog",
    "dog runs home",
    "late .",
    "a small small small dog runs .",
]


@pytest.mark.parametrize("task", ["text-classification", "token-classification"])
def test_pipelines(task: str, tokenizer: Any) -> None:
    head = (
        "ForSequenceClassification" if task == "text-classification" else "ForTokenClassification"
    )
    patch = "classifier.bert" if task == "text-classification" else "tagger"
    toolkit: Any = tf
    run = toolkit.pipeline(
        task, model=zoo.encoder("Bert", head, torch.float32), tokenizer=tokenizer
    )
    hits = _row(patch).hits
    ours = run(TEXTS, batch_size=3)
    assert _row(patch).hits == hits + 2
    with fastgen.disabled():
        stock = run(TEXTS, batch_size=3)
    assert len(ours) == len(stock) == len(TEXTS)
    _close(ours, stock)


def _close(ours: Any, stock: Any) -> None:
    if isinstance(stock, list):
        assert len(ours) == len(stock)
        for mine, theirs in zip(ours, stock, strict=True):
            _close(mine, theirs)
        return
    assert ours == stock | {"score": pytest.approx(stock["score"], abs=1e-5)}


def test_the_trainer_predicts_the_same(tmp_path: pathlib.Path) -> None:
    model = zoo.encoder("Roberta", "ForTokenClassification", torch.float32)
    batch = _batch()
    data = [
        {name: value[row] for name, value in batch.items()}
        | {"labels": batch["input_ids"][row] % 5}
        for row in range(6)
    ]
    options = tf.TrainingArguments(
        str(tmp_path), per_device_eval_batch_size=3, report_to=[], use_cpu=True
    )
    trainer: Any = tf.Trainer(model=model, args=options)
    hits = _row("encoder.roberta").hits
    ours = trainer.predict(data)
    assert _row("encoder.roberta").hits == hits + 2
    with fastgen.disabled():
        stock = trainer.predict(data)
    torch.testing.assert_close(ours.predictions, stock.predictions, atol=1e-4, rtol=1e-5)
    assert ours.metrics["test_loss"] == pytest.approx(stock.metrics["test_loss"], abs=1e-5)


# Encoders of encoder-decoder models


@pytest.mark.parametrize("padding", ["right", "left"])
# the encoder of unilm only embeds its input
@pytest.mark.parametrize("family", sorted(zoo.ENCODER_DECODERS.keys() - {"unilm"}))
def test_generate_encodes_no_padding(family: str, padding: str) -> None:
    model = zoo.build(family)
    call: dict[str, Any] = zoo.batch(model, 4, 9, padding) | {"max_new_tokens": 5, "num_beams": 2}
    hits = _row("source").hits
    assert_same(model, call)
    assert _row("source").hits == hits + 1, _row("source").left_off
    assert _rows_of_source(model, call) == int(call["attention_mask"].sum())


def _rows_of_source(model: Any, call: dict[str, Any]) -> int:
    """Return the number of rows in the encoder's last product."""
    counted, apply = list[int](), TorchLinear.apply
    last = [module for module in model.get_encoder().modules() if isinstance(module, nn.Linear)][-1]

    def noting(product: TorchLinear, x: Tensor, *others: Any) -> Tensor:
        if product.module is last:
            counted.append(x.shape[0])
        return apply(product, x, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchLinear, "apply", noting)
        model.generate(**call)
    return counted[0]


def test_generate_encodes_padding_where_it_is_seen() -> None:
    """The returned cache holds keys and values of padding."""
    model = zoo.build("bart")
    hits = _row("source").hits
    call: dict[str, Any] = zoo.batch(model, 4, 9) | {
        "max_new_tokens": 5,
        "return_dict_in_generate": True,
    }
    assert_same(model, call)
    assert _row("source").hits == hits
    model = zoo.build("t5")
    call = zoo.batch(model, 4, 9) | {"max_new_tokens": 5}
    call["attention_mask"][-1, 4] = 0
    assert_same(model, call)
    assert _row("source").left_off["padding is encoded: padding between tokens"]
    assert_same(zoo.build("bart"), call)
    assert _row("source").hits == hits + 1


def test_an_encoder_of_bert_s_kind_beside_a_decoder() -> None:
    """The record covers the layers only, so `generate` of the pair runs the encoder unchanged."""
    options: dict[str, Any] = zoo._ENCODER | {"bos_token_id": 1, "eos_token_id": 2}
    decoder = tf.RobertaConfig(**options, is_decoder=True, add_cross_attention=True)
    torch.manual_seed(0)
    model = tf.EncoderDecoderModel(
        encoder=tf.RobertaModel(tf.RobertaConfig(**options)), decoder=tf.RobertaForCausalLM(decoder)
    ).eval()
    call = zoo.batch(model, 3, 9, "right") | {"num_beams": 2, "max_new_tokens": 4}
    call |= {"decoder_start_token_id": 1, "pad_token_id": 0}
    with fastgen.disabled():
        wanted = model.generate(**call)
    assert torch.equal(model.generate(**call), wanted)


def _wide(attention: str = "eager") -> Any:
    """Return an encoder wide enough to be accelerated."""
    sizes = {
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "attn_implementation": attention,
    }
    return zoo.encoder("Bert", dtype=torch.float32, **sizes)


def test_transforms_of_torch_func_and_forward_differentiation_see_the_models_own_layers() -> None:
    model, inputs = _wide(), torch.randn(2, 4, 16, 768)

    def encode(embeds: Tensor) -> Tensor:
        return model(inputs_embeds=embeds).last_hidden_state

    with torch.no_grad():
        found = torch.func.vmap(encode)(inputs)
        with fastgen.disabled():
            torch.testing.assert_close(found, torch.func.vmap(encode)(inputs))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(inputs[0], torch.ones_like(inputs[0]))
            assert forward_ad.unpack_dual(encode(dual)).tangent is not None


def test_a_mask_of_integers_is_added() -> None:
    mask = torch.zeros(8, 1, 1, 16, dtype=torch.int64)
    mask[:, :, :, 12:] = -10_000
    _both(_wide(), {"input_ids": torch.randint(3, 60, (8, 16)), "attention_mask": mask})


def test_a_forward_that_somebody_put_there_before_is_theirs() -> None:
    model = _wide()

    def forward(self: Any, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        return encoder.BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden_states * 2
        )

    with torch.no_grad():
        found = encoder.encode(forward, model.encoder, torch.ones(8, 64, 768))
    assert bool((found.last_hidden_state == 2).all())
    assert _row("encoder.bert").fallbacks["a forward that is not transformers'"] > 0


def test_what_products_save_depends_on_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    """With smaller savings per product, two layers without padding are not worth reading."""
    for name, value in MEASURED.items():
        monkeypatch.setattr(encoders, name, value)
    weights = encoders.weights_of(256)
    assert pays([32] * 16, 32, "run", weights, 2, True)
    monkeypatch.setattr(processor, "mkl_is_native", lambda: True)
    assert not pays([32] * 16, 32, "run", weights, 2, True)
    assert pays([16] * 16, 32, "none", weights, 2, True), "padding is left out everywhere"
