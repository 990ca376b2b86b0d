"""Layers of PEFT around those of a model: which of its parts run, and as what.

A merged or disabled LoRA layer is the layer inside it, and so is a module that PEFT saves beside an
adapter. An active LoRA layer is a linear layer with low-rank products. Everything else that PEFT
puts in a layer's place runs as a module.
"""

from typing import Any, NamedTuple

from torch import nn


class LoraPart(NamedTuple):
    """An active adapter of a LoRA layer: up(down(x)) * scaling."""

    down: nn.Module
    up: nn.Module
    scaling: float


def without_peft(module: Any) -> Any:
    """Return the layer that runs in place of one of PEFT; the layer itself if its forward runs."""
    while (inner := _inner(module)) is not None:
        module = inner
    return module


def _inner(module: Any) -> Any:
    if _is(module, "peft.utils.other", "ModulesToSaveWrapper"):
        active = module.active_adapters
        if module.disable_adapters or not active:
            return module.original_module
        if len(active) > 1 or active[0] not in module.modules_to_save:
            return None
        return module.modules_to_save[active[0]]
    if not _is_lora(module):
        return None
    if module.disable_adapters:
        return None if module.merged else module.base_layer  # its forward would unmerge
    held = module.lora_embedding_A if isinstance(module.base_layer, nn.Embedding) else module.lora_A
    is_active = not module.merged and any(name in held for name in module.active_adapters)
    return None if is_active else module.base_layer


def lora_parts(module: Any) -> list[LoraPart] | None:
    """Return the active adapters of a LoRA layer; None for other layers, or other forms of it."""
    if not _is_lora(module) or module.disable_adapters or module.merged:
        return None
    names = [name for name in module.active_adapters if name in module.lora_A]
    variants, plain = getattr(module, "lora_variant", names), (nn.Dropout, nn.Identity)
    if any(name in variants or type(module.lora_dropout[name]) not in plain for name in names):
        return None
    parts = [
        LoraPart(module.lora_A[name], module.lora_B[name], float(module.scaling[name]))
        for name in names
    ]
    layers = [layer for part in parts for layer in (part.down, part.up)]
    dtype = getattr(getattr(module.base_layer, "weight", None), "dtype", None)
    is_linear = all(type(layer) is nn.Linear and layer.weight.dtype == dtype for layer in layers)
    return parts if is_linear else None


def embedding_in(module: Any) -> Any:
    """Return the embedding inside an active LoRA layer; None for another layer."""
    base = module.base_layer if _is_lora(module) else None
    return base if isinstance(base, nn.Embedding) else None


def inserts_tokens(model: nn.Module) -> bool:
    """Return whether PEFT may insert embeddings before the tokens of any forward of `generate`.

    Prompt tuning and its kind replace `prepare_inputs_for_generation` during a call. Prefix tuning
    fills the KV cache instead.
    """
    peft = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    config = getattr(peft, "active_peft_config", None)
    kind = str(getattr(config, "peft_type", ""))
    return bool(getattr(config, "is_prompt_learning", False)) and "PREFIX" not in kind


def is_of_peft(module: nn.Module) -> bool:
    """Return whether a module's class, and its forward, are those of PEFT."""
    kind = type(module)
    return _of_peft(kind.__module__) and _of_peft(_home(kind.forward))


def _is_lora(module: Any) -> bool:
    return _is(module, "peft.tuners.lora.layer", "Linear", "Embedding")


def _is(module: Any, place: str, *names: str) -> bool:
    kind = type(module)
    return kind.__module__ == place and kind.__name__ in names and _of_peft(_home(kind.forward))


def _home(function: Any) -> str:
    return getattr(function, "__globals__", {}).get("__name__", "")


def _of_peft(module_name: str) -> bool:
    return module_name.partition(".")[0] == "peft"
