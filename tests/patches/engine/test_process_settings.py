"""Check process-wide settings that change between calls.

Cover default dtype and device, determinism, inference mode and autocast.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

import fastgen
from tests.support import zoo
from tests.support.parity import assert_same, fallbacks
from tests.support.surroundings import setting as process_setting

ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 8},
    "beams": {"max_new_tokens": 8, "num_beams": 3, "no_repeat_ngram_size": 2},
    "samples": {"max_new_tokens": 8, "do_sample": True, "num_return_sequences": 2, "top_k": 9},
}


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "float64": lambda: process_setting(torch.set_default_dtype, torch.float64, torch.float32),
    "bfloat16": lambda: process_setting(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "meta": lambda: torch.device("meta"),
    "cpu": lambda: torch.device("cpu"),
    "deterministic": lambda: process_setting(torch.use_deterministic_algorithms, True, False),
    "inference": torch.inference_mode,
    "gradients": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "threads": lambda: process_setting(torch.set_num_threads, 2, 1),
    "precision": lambda: process_setting(torch.set_float32_matmul_precision, "medium", "highest"),
}

ROUNDED = ("autocast", "precision")
"""Settings under which products may round to bfloat16, so tokens may depend on the batch size."""


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("family", ["bart", "llama", "gpt2", "t5"])
@pytest.mark.parametrize("ops", ["auto", "reference"])
def test_changed_between_calls(
    family: str, asked: str, ops: str, setting: Callable[[str, str], None]
) -> None:
    """Each setting meets the state left by calls under other settings.

    That state is packed weights, buffers and equivalence checks.
    """
    setting("FASTGEN_OPS", ops)
    for dtype in (torch.float32, torch.float64):
        model = zoo.build(family, dtype)
        kwargs = zoo.batch(model, 3, 7) | ASKED[asked]
        for seed, name in enumerate([*SETTINGS, *reversed(SETTINGS)]):
            with SETTINGS[name]():
                if name in ROUNDED:
                    model.generate(**kwargs)
                else:
                    assert_same(model, kwargs, seed, tolerance=0.1 if name == "bfloat16" else 1e-4)


def test_another_default_device_is_left_to_transformers() -> None:
    model = zoo.build("bart")
    kwargs = zoo.batch(model, 3, 7) | ASKED["beams"]
    before = fallbacks()
    with torch.device("meta"), pytest.raises(NotImplementedError):
        model.generate(**kwargs)
    assert (fallbacks() - before)["the default device is meta, and the model is on cpu"] == 1
    assert_same(model, kwargs)


def test_a_model_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = zoo.build("bart", torch.float32)
    kwargs = zoo.batch(model, 3, 7) | ASKED["beams"]
    for _ in range(4):
        assert_same(model, kwargs, tolerance=1e-4)


def test_training_behind_calls() -> None:
    """State kept from calls in inference mode does not prevent gradients."""
    model = zoo.build("bart", torch.float32)
    kwargs = zoo.batch(model, 3, 7)
    with torch.inference_mode():
        for _ in range(4):
            model.generate(**kwargs, max_new_tokens=5)
    model.train()
    model(**kwargs, labels=kwargs["input_ids"]).loss.backward()
    assert all(p.grad is not None for p in model.model.decoder.layers.parameters())
    model.eval()
    assert_same(model, kwargs | ASKED["beams"], tolerance=1e-4)
    assert fastgen.status().enabled
