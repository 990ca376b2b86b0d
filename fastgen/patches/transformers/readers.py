"""What is read of an encoder's output by those around it, who say so (`encoder.reading`)."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from fastgen.models.encoder import Padding
from fastgen.models.instance import untouched
from fastgen.models.reader import NotFused, is_toolkits
from fastgen.patches import _engine
from fastgen.patches.transformers.encoder import family_of_code, read_as

_READERS = {
    "bert": "BertPooler",
    "camembert": "CamembertClassificationHead",
    "electra": "ElectraClassificationHead",
    "roberta": "RobertaClassificationHead",
    "xlm_roberta": "XLMRobertaClassificationHead",
}
"""Whose forward takes the first position out of all; none where the model's own does."""


def classify(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The forward of a sentence classifier, of whose encoder it reads each sentence's first position alone."""
    if self.training:
        return original(self, *args, **kwargs)
    with read_as(partial(_first, self, family_of_code(original))):
        return original(self, *args, **kwargs)


def _first(model: Any, family: str, encoder: nn.Module) -> Padding:
    name = f"transformers.classifier.{family}"
    try:
        own = _read_first(model, family)
    except NotFused as reason:
        _engine.fallback(name, str(reason))
        return "run"
    if own is not encoder:
        return "run"
    _engine.hit(name)
    return "first"


def _read_first(model: Any, family: str) -> nn.Module:
    """The encoder of a classifier whose parts are transformers' own.

    Raises:
        NotFused: somebody else may read what the encoder puts out.
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
    for module in modules:
        if not untouched(module) or not is_toolkits(type(module).forward):
            raise NotFused(f"a {type(module).__name__} that is not as it was made")
    if nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks:
        raise NotFused("a hook on all modules")
    return encoder
