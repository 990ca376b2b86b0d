"""Code that declares what it reads of an encoder's output (`encoder.EncoderConsumer`)."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

from torch import nn
from transformers import TokenClassificationPipeline

from fastgen.models.build.introspection import NotFused, is_toolkits
from fastgen.models.routing.instance import untouched
from fastgen.models.runtime.encoder import Padding
from fastgen.patches.engine import engine
from fastgen.patches.transformers.encoders.encoder import consuming, folder_of

TAGGER = "transformers.tagger"

_READERS = {
    "bert": "BertPooler",
    "camembert": "CamembertClassificationHead",
    "electra": "ElectraClassificationHead",
    "roberta": "RobertaClassificationHead",
    "xlm_roberta": "XLMRobertaClassificationHead",
}
"""By family, the class whose forward selects the first position. Else the model selects it."""


def classify(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Replace the forward of a sentence classifier, which reads only the first positions."""
    if self.training:
        return original(self, *args, **kwargs)
    family = folder_of(cast(Any, type(self)))
    name = f"transformers.classifier.{family}"
    with consuming(partial(_first, self, original, family, name), name):
        return original(self, *args, **kwargs)


def _first(
    model: Any, forward: Callable[..., Any], family: str, name: str, encoder: nn.Module
) -> Padding:
    try:
        if not is_toolkits(forward):
            raise NotFused(f"a replaced forward of a {type(model).__name__}")
        own = _read_first(model, family)
    except NotFused as reason:
        engine.fallback(name, str(reason))
        return "run"
    return "first" if own is encoder else "run"


def tag(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Replace the forward of the token-classification pipeline, which ignores padding."""
    with consuming(partial(_tokens, self), TAGGER):
        return original(self, *args, **kwargs)


def _tokens(pipeline: Any, encoder: nn.Module) -> Padding:
    own = ("postprocess", "gather_pre_entities")
    model = pipeline.model
    try:
        kind = cast(Any, type(pipeline))
        if any(
            getattr(kind, name) is not getattr(TokenClassificationPipeline, name) for name in own
        ):
            raise NotFused(f"a {kind.__name__} may look at padding")
        if not type(model).__name__.endswith("ForTokenClassification"):
            raise NotFused(f"a {type(model).__name__} may look at padding")
        base = getattr(model, model.base_model_prefix)
        if encoder not in base.children():
            raise NotFused("an encoder that is not the model's")
        _check_own([model, base, encoder, model.classifier])
    except NotFused as reason:
        engine.fallback(TAGGER, str(reason))
        return "run"
    return "none"


def _read_first(model: Any, family: str) -> nn.Module:
    """Return the encoder of a classifier after checking that all its parts are transformers' own.

    Raises:
        NotFused: Other code may read the encoder's output.
    """
    base = getattr(model, model.base_model_prefix)
    encoder = getattr(base, "transformer" if family == "distilbert" else "encoder")
    modules = [base, encoder]
    if family in _READERS:
        pooler = getattr(base, "pooler", None)
        reader = model.classifier if pooler is None else pooler
        if type(reader).__name__ != _READERS[family]:
            raise NotFused(f"a {type(reader).__name__} reads the encoder's output")
        modules.append(reader)
    _check_own(modules)
    return encoder


def _check_own(modules: Iterable[nn.Module]) -> None:
    """Raise NotFused if a module does not run its toolkit's forward, or has hooks."""
    for module in modules:
        if not untouched(module) or not is_toolkits(type(module).forward):
            raise NotFused(f"a {type(module).__name__} that is not as it was made")
    everywhere = cast(Any, nn.modules.module)
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        raise NotFused("a hook on all modules")
