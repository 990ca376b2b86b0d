"""Check models that combine two: pairs of encoder and decoder, and models that read images."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf

import fastgen
from fastgen.ops import native
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.generate.report import last_call
from fastgen.patches.transformers.planning import images
from tests.support import combined, zoo
from tests.support.parity import assert_same, fallbacks, left_off

CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beams sampled": {"num_beams": 3, "do_sample": True},
    "samples": {"do_sample": True, "num_return_sequences": 3},
}
ENDS = {"max_new_tokens": 12, "eos_token_id": [2, *range(5, 12)]}
ENCODES_ONCE = hasattr(tf.GenerationMixin, compat.ENCODE_IMAGES)
"""Whether this transformers encodes images before it repeats rows."""
SCORES: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True}


def _check(model: Any, kwargs: dict[str, Any], tolerance: float = 1e-9) -> None:
    """Assert that a call is fused, with equal output."""
    before, apart = fallbacks(), left_off()
    assert assert_same(model, kwargs, tolerance=tolerance).error is None
    call = last_call()
    assert call is not None
    assert fallbacks() == before
    if not (ENCODES_ONCE or model.config.is_encoder_decoder):
        return
    assert call.plan.fused, call.plan
    assert not [new for new in left_off() - apart if not new.startswith("finished sentences")]


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("name", combined.COMBINED)
def test_calls(name: str, options: dict[str, Any], padded: bool) -> None:
    model, inputs = combined.build(name), combined.inputs_of(name, 3, padded)
    for more in (SCORES, {}):
        _check(model, inputs | ENDS | options | more)


@pytest.mark.parametrize("step", ["auto", "module"])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_finished_sentences_leave(
    name: str, beams: int, step: str, setting: Callable[[str, str], None]
) -> None:
    """Sentences with images have positions of their own, and leave at different steps."""
    if not ENCODES_ONCE:
        pytest.skip("images in prompts keep sentences in the batch")
    setting("FASTGEN_STEP", step)
    model, inputs = combined.build(name), combined.inputs_of(name, 6, True)
    ends = {"eos_token_id": list(range(2, 30)), "max_new_tokens": 14}
    assert assert_same(model, inputs | ends | {"num_beams": beams}).error is None
    call = last_call()
    assert call is not None
    assert call.plan.drop
    assert call.plan.fused == (step == "auto")
    assert call.steps[-1][0] < call.steps[0][0]


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", combined.COMBINED)
def test_in_fp32(name: str, beams: int) -> None:
    """Several calls of a model, whose first one is checked and prepares the others."""
    model = combined.build(name, torch.float32)
    for sentences in (2, 3):
        inputs = combined.inputs_of(name, sentences, True, torch.float32)
        _check(model, inputs | {"num_beams": beams, "max_new_tokens": 9}, 1e-3)
    call = last_call()
    assert call is not None
    if native.library() is not None and call.plan.fused:
        assert not call.plan.not_in_c


@pytest.mark.parametrize("name", ["vit-trocr", "wav2vec2-bart", "bert-gpt2", "llava", "qwen2_vl"])
@pytest.mark.parametrize("beams", [1, 3])
def test_explained(name: str, beams: int) -> None:
    model = combined.build(name)
    if not (ENCODES_ONCE or model.config.is_encoder_decoder):
        pytest.skip("images in prompts keep steps from the weights")
    kwargs = combined.inputs_of(name, 3, True) | {"num_beams": beams, "max_new_tokens": 9}
    model.generate(**kwargs)
    call = last_call()
    assert call is not None
    assert fastgen.explain(model, **kwargs).plan == call.plan


@pytest.mark.parametrize("per_sentence", [(2, 1, 3), (1, 0, 2), (0, 0, 1)], ids=str)
@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_images_of_sentences(per_sentence: tuple[int, ...], options: dict[str, Any]) -> None:
    model, inputs = combined.build("llava"), _with(per_sentence)
    kwargs = inputs | {"pixel_values": combined.pictures(sum(per_sentence)).double()}
    _check(model, kwargs | ENDS | options | SCORES)


def _with(per_sentence: tuple[int, ...]) -> dict[str, Any]:
    """Return prompts that each hold the tokens of some images, of 4 tokens each."""
    inputs = combined.with_images(len(per_sentence), True, 12)
    for row, count in enumerate(per_sentence):
        places = (inputs["input_ids"][row] == combined.IMAGE).nonzero()[4 * count :, 0]
        inputs["input_ids"][row, places] = 50
    return inputs


@pytest.mark.parametrize("per_sentence", [(1, 1, 1), (1, 0, 2), (3, 0, 0), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_recordings_of_sentences(per_sentence: tuple[int, ...], options: dict[str, Any]) -> None:
    """transformers repeats recordings one by one, so that beams of a text read different ones."""
    model, inputs = combined.build("qwen2_audio"), _with(per_sentence)
    sounds = combined.recordings(sum(per_sentence))
    sounds["input_features"] = sounds["input_features"].double()
    assert assert_same(model, inputs | sounds | ENDS | options | SCORES).error is None
    call = last_call()
    assert call is not None
    one_row = not {"num_beams", "num_return_sequences"} & options.keys()
    assert call.plan.shared == call.plan.fused == (one_row or per_sentence == (1, 1, 1))


def test_the_first_copy_of_each_image() -> None:
    lengths = [4, 4, 4, 4, 2, 6, 2, 6]
    assert images._first_of_each(lengths, [4, 4, 8], 2) == [0, 2, 4, 5]
    assert images._first_of_each(lengths, [4, 4, 0, 8], 2) == [0, 2, 4, 5]
    assert images._first_of_each(lengths, [4, 4, 9], 2) is None
    assert images._first_of_each(lengths, [4, 4], 2) is None
    assert images._first_of_each([4, 4, 4, 2], [4, 4], 2) is None
    assert images._first_of_each([4], [8], 2) is None


@pytest.mark.parametrize("name", ["llava", "paligemma", "qwen2_vl"])
def test_prompts_without_images(name: str) -> None:
    model = combined.build(name)
    for options in CALLS.values():
        inputs = combined.with_images(3, True, 1)
        inputs["input_ids"][inputs["input_ids"] == combined.IMAGE] = 50
        _check(model, inputs | ENDS | options)


def test_prompts_that_begin_alike_with_other_images() -> None:
    """Images are no tokens: keys and values of the first prompt do not stand for the others."""
    model, inputs = combined.build("llava", torch.float32), combined.with_images(3, False, 40)
    inputs["input_ids"][:] = inputs["input_ids"][:1].clone()
    kwargs = inputs | {"pixel_values": combined.pictures(30), "max_new_tokens": 9}
    with fastgen.prefix_cache(bytes=1 << 24):
        for _ in range(2):
            _check(model, kwargs, 1e-3)
            kwargs["pixel_values"] = kwargs["pixel_values"].flip(0)


@pytest.mark.parametrize("name", ["vit-gpt2", "wav2vec2-gpt2", "llava"])
def test_score_names_the_families(name: str) -> None:
    model = combined.build(name)
    sources = [[5, 6]] if model.config.is_encoder_decoder else None
    with pytest.raises(ValueError, match="is none of"):
        list(fastgen.score(model, [[5, 6, 7]], sources=sources))


def test_a_decoder_without_a_spec_shares_keys_and_values() -> None:
    torch.manual_seed(0)
    config = tf.RobertaConfig(
        vocab_size=zoo.VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=130, initializer_range=0.5, pad_token_id=0,
        is_decoder=True, add_cross_attention=True,
    )  # fmt: skip
    model = combined.wav2vec2(tf.RobertaForCausalLM(config)).double().eval()
    inputs = combined.inputs_of("wav2vec2-gpt2", 3, True)
    for _ in range(2):
        for options in CALLS.values():
            assert assert_same(model, inputs | ENDS | options).error is None
            call = last_call()
            assert call is not None
            assert call.plan.shared


@pytest.mark.parametrize("name", ["bert-bert", "bert-gpt2", "llava", "qwen2_vl"])
def test_streams_of_texts(name: str) -> None:
    model = combined.build(name)
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(10, 90, (n,), generator=generator).tolist() for n in (5, 1, 9, 4, 7)]
    for options in ({}, {"num_beams": 3, "num_return_sequences": 2}):
        given = options | ENDS
        found = fastgen.generate_stream(model, texts, max_tokens=20, window=3, **given)
        alone = [model.generate(input_ids=torch.tensor([text]), **given) for text in texts]
        assert [each.tolist() for each in found] == [each.tolist() for each in alone]


def test_big_little_decoding_reads_no_images() -> None:
    model = combined.build("llava", torch.float32)
    inputs = combined.inputs_of("llava", 1, False, torch.float32)
    with pytest.raises(ValueError, match="images or videos are given"):
        model.generate(**inputs, assistant_model=model, lossless=True, max_new_tokens=4)
