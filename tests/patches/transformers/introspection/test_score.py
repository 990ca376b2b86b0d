"""Check scoring of texts: log-probabilities equal those of full logits, never stored at once."""

import math
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastgen
from fastgen.ops.selection import token_scores as ops
from fastgen.ops.selection.token_scores import token_scores, token_scores_reference
from tests.support import zoo


class _Largest(TorchDispatchMode):
    """Records the size of the largest floating-point tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.elements = max(self.elements, tensor.numel())
        return result


class Bytes:
    """A byte tokenizer that prepends a token to sources and appends one to targets."""

    def __call__(
        self, text: str | None = None, text_target: str | None = None
    ) -> dict[str, list[int]]:
        ids = [4 + byte % 90 for byte in (text or text_target or "").encode()]
        return {"input_ids": [2, *ids] if text_target is None else [*ids, 3]}


@pytest.mark.parametrize("family", ["gpt2", "bart"])
def test_strings_and_a_tokenizer(family: str) -> None:
    model, texts, tokenizer = zoo.build(family), ["one text", "another"], Bytes()
    sources = ["a source", "two"] if family == "bart" else None
    argument = "text_target" if sources else "text"
    ids = [tokenizer(**{argument: text})["input_ids"] for text in texts]
    source_ids = None if sources is None else [tokenizer(text)["input_ids"] for text in sources]
    expected = fastgen.score(model, ids, source_ids)
    for found, wanted in zip(
        fastgen.score(model, texts, sources, tokenizer=tokenizer), expected, strict=True
    ):
        assert torch.equal(found.log_probs.nan_to_num(), wanted.log_probs.nan_to_num())


def test_strings_without_a_tokenizer_say_what_to_pass() -> None:
    model, bart = zoo.build("gpt2"), zoo.build("bart")
    with pytest.raises(
        TypeError, match=r"^texts\[1\] is a string, 'b'; pass tokenizer=..., or token ids such as"
    ):
        fastgen.score(model, [[5, 6], "b"])
    with pytest.raises(TypeError, match=r"^sources\[0\] is a string, 'a'; pass tokenizer="):
        fastgen.score(bart, [[5, 6]], ["a"])
    with pytest.raises(TypeError, match=r"^texts is a string, 'text'; it must be a list of texts"):
        fastgen.score(model, "text", tokenizer=Bytes())


def test_scores_where_fastgen_is_off() -> None:
    model = zoo.build("gpt2")
    texts = [zoo.batch(model, 1, 7, "none")["input_ids"][0]]
    (expected,) = fastgen.score(model, texts)
    with fastgen.disabled():
        (found,) = fastgen.score(model, texts)
    torch.testing.assert_close(found.log_probs, expected.log_probs, equal_nan=True)
    fastgen.disable()
    try:
        (found,) = fastgen.score(model, texts)
    finally:
        fastgen.enable()
    torch.testing.assert_close(found.log_probs, expected.log_probs, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (5, 97), (70, 32_128)])
def test_token_scores(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(*shape, generator=generator).to(dtype)
    logits[-1] = -torch.inf
    logits[-1, -1] = 0
    tokens = torch.randint(0, shape[1], shape[:1], generator=generator)
    found, wanted = token_scores(logits, tokens), token_scores_reference(logits, tokens)
    assert torch.equal(found, wanted)
    assert found.dtype == (dtype if dtype == torch.float64 else torch.float32)
    with _Largest() as largest:
        token_scores(logits, tokens)
    assert largest.elements * found.element_size() <= max(
        ops.CHUNK, shape[1] * found.element_size()
    )


def test_token_scores_of_other_shapes() -> None:
    with pytest.raises(ValueError, match=r"tokens \(3,\) do not fit logits \(2, 5\)"):
        token_scores(torch.zeros(2, 5), torch.zeros(3, dtype=torch.int64))


# Scores of texts


def _texts(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, zoo.VOCABULARY, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize("family", zoo.DECODERS)
def test_scores_of_decoders(family: str) -> None:
    model = zoo.build(family)
    texts = _texts(7, 1, 12, 3)
    for text, found in zip(texts, fastgen.score(model, texts, max_tokens=20), strict=True):
        with torch.no_grad(), fastgen.disabled():
            logits = model(text[None]).logits[0].double()
        wanted = logits.log_softmax(-1)[:-1].gather(1, text[1:, None])[:, 0]
        assert math.isnan(found.log_probs[0])
        torch.testing.assert_close(found.log_probs[1:], wanted, atol=1e-9, rtol=1e-9)
        assert (found.tokens, found.total) == (
            len(text) - 1,
            pytest.approx(float(wanted.sum()), abs=1e-9),
        )


@pytest.mark.parametrize("family", sorted(zoo.ENCODER_DECODERS.keys() - {"unilm"}))
def test_scores_of_encoder_decoders(family: str) -> None:
    model = zoo.build(family)
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_()
    texts, sources = _texts(5, 9, 2), _texts(8, 3, 6)
    if not _is_causal(model, sources[0]):
        pytest.skip(f"a decoder of {family} sees what comes, in transformers {tf.__version__}")
    for text, source, found in zip(
        texts, sources, fastgen.score(model, texts, sources), strict=True
    ):
        with torch.no_grad(), fastgen.disabled():
            logits = model(input_ids=source[None], labels=text[None]).logits[0].double()
        wanted = logits.log_softmax(-1).gather(1, text[:, None])[:, 0]
        torch.testing.assert_close(found.log_probs, wanted, atol=1e-9, rtol=1e-9)


def _is_causal(model: Any, source: Tensor) -> bool:
    with torch.no_grad(), fastgen.disabled():
        first, other = (
            model(input_ids=source[None], decoder_input_ids=torch.tensor([[3, 8, last]])).logits[
                0, 0
            ]
            for last in (9, 10)
        )
    return torch.equal(first, other)


def test_windows_of_a_long_text() -> None:
    """Each window counts the tokens that earlier ones did not, as in transformers' guide."""
    model, (text,) = zoo.build("gpt2"), _texts(50)
    (found,) = fastgen.score(model, [text], max_length=16, stride=5)
    end = 0
    for start in range(0, 50, 5):
        before, end = end, min(start + 16, 50)
        window, labels = text[start:end], text[start:end].clone()
        labels[: before - start] = -100
        with torch.no_grad(), fastgen.disabled():
            mean = float(model(window[None], labels=labels[None]).loss)
        new = found.log_probs[max(before, 1) : end]
        assert float(-new.mean()) == pytest.approx(mean, rel=1e-6)
        if end == 50:
            break
    assert found.tokens == 49


def test_no_logits_of_all_tokens_are_there() -> None:
    torch.manual_seed(0)
    config = tf.GPT2Config(vocab_size=5_000, n_embd=32, n_layer=1, n_head=2, n_positions=512)
    model, texts = tf.GPT2LMHeadModel(config).eval(), _texts(400, 300)
    with _Largest() as largest:
        fastgen.score(model, texts)
    assert largest.elements <= 5_000 * 64, "the logits of 64 tokens, or the head itself"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stride": 0}, "stride=0"),
        ({"stride": 8, "max_length": 8}, "stride=8"),
        ({"max_length": 1}, "max_length=1"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"sources": [[1]]}, "no encoder"),
        ({"texts": [[]]}, r"shape \(0,\)"),
    ],
)
def test_options_that_there_cannot_be(options: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"texts": [[4, 5]]} | options
    with pytest.raises(ValueError, match=said):
        fastgen.score(zoo.build("gpt2"), **given)


def test_models_that_cannot_score() -> None:
    with pytest.raises(ValueError, match="needs sources"):
        fastgen.score(zoo.build("bart"), [[4, 5]])
    with pytest.raises(ValueError, match="training"):
        fastgen.score(zoo.build("gpt2").train(), [[4, 5]])
    other = zoo.build("gpt2")
    other.config.model_type = "unheard-of"
    with pytest.raises(ValueError, match="unheard-of"):
        fastgen.score(other, [[4, 5]])
    other = zoo.build("gpt2")
    other.lm_head.register_forward_hook(lambda module, args, y: y * 2 if y.dim() == 3 else y)
    with pytest.raises(ValueError, match="otherwise"):
        fastgen.score(other, [[4, 5]])


def test_a_stride_beyond_a_model_s_positions() -> None:
    model = zoo.build("gpt2")
    with pytest.raises(ValueError, match="stride=256: from 1 to below 256"):
        fastgen.score(model, _texts(300), stride=256)
