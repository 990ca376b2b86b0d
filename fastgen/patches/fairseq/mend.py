"""What lets fairseq 0.12.2, last released for Python 3.10 and PyTorch 1.12, run on today's versions.

Each function is as narrow as it can be: it does something where fairseq would fail, and calls the original otherwise.
"""

import dataclasses
import os
import pickle
import re
from collections.abc import Callable, Iterator
from pkgutil import resolve_name
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastgen.config import settings
from fastgen.errors import VariableError
from fastgen.patches.engine import engine

_Original = Callable[..., Any]


def get_field(original: _Original, cls: type, a_name: str, *args: Any, **kwargs: Any) -> Any:
    """`dataclasses._get_field`, where the default is a dataclass of fairseq's or hydra's.

    Such a default has no hash, and Python 3.11 takes what has none for mutable. For the time of the call it has one.
    """
    default = getattr(cls, a_name, None)
    if isinstance(default, dataclasses.Field):
        default = default.default
    kind = type(default)
    own = kind.__module__.partition(".")[0] in ("fairseq", "hydra") or cls.__module__.startswith(
        "fairseq."
    )
    if not (own and dataclasses.is_dataclass(kind) and vars(kind).get("__hash__", 0) is None):
        return original(cls, a_name, *args, **kwargs)
    engine.hit("fairseq.dataclasses")
    kind.__hash__ = object.__hash__
    try:
        return original(cls, a_name, *args, **kwargs)
    finally:
        kind.__hash__ = None  # pyright: ignore[reportAttributeAccessIssue] what dataclasses puts there


# What fairseq writes into checkpoints beside tensors and plain containers: data, with nothing that runs.
_ALLOWED = (
    "argparse.Namespace",
    *(
        f"fairseq.{module}.{name}"
        for module in ("meters", "logging.meters")
        for name in ("AverageMeter", "MetersDict", "StopwatchMeter", "SumMeter", "TimeMeter")
    ),
)
# Numbers that came from numpy, under the name that a version before 2 wrote, and of today's.
_NUMPY: tuple[Any, ...] = (
    np.dtype,
    *(type(np.dtype(kind)) for kind in f"?efd{np.typecodes['AllInteger']}"),
    *(
        (np.float64().__reduce__()[0], f"numpy.{core}.multiarray.scalar")
        for core in ("core", "_core")
    ),
)


class UntrustedCheckpointError(pickle.UnpicklingError):
    """A checkpoint holds a class that is not known to be harmless."""


def load_checkpoint(original: _Original, path: Any, *args: Any, **kwargs: Any) -> Any:
    """`checkpoint_utils.load_checkpoint_to_cpu`, with the classes named that PyTorch's safe loading may make.

    Raises:
        UntrustedCheckpointError: the checkpoint holds another class, or cannot be read safely; the message says which,
            and what helps where the file is trusted.
    """
    with torch.serialization.safe_globals([*_NUMPY, *_allowed()]):
        try:
            loaded = original(path, *args, **kwargs)
        except pickle.UnpicklingError as error:
            raise UntrustedCheckpointError(_advice(str(path), str(error))) from error
    engine.hit("fairseq.load")
    return loaded


def _allowed() -> Iterator[tuple[Any, str]]:
    """What may be made, and its name in a pickle."""
    own = tuple(_full(name) for name in settings().fairseq_allow)
    classes: dict[str, Any] = {}
    for name in (*_ALLOWED, *own):
        try:
            classes[name] = resolve_name(name)
        except (ImportError, AttributeError, ValueError) as error:
            if name in own:
                value = os.environ.get("FASTGEN_FAIRSEQ_ALLOW", "")
                problem, remedy = (
                    f"there is no {name!r} ({error})",
                    "name classes as module.Class, or unset it",
                )
                raise VariableError("FASTGEN_FAIRSEQ_ALLOW", value, problem, remedy) from error

    def member(owner: Any, name: str) -> Any:
        """What a pickle of protocol 2 calls for a class within a class: `getattr` for those that are allowed."""
        full = (
            f"{owner.__module__}.{owner.__qualname__}.{name}"
            if isinstance(owner, type)
            else "builtins.getattr"
        )
        if full not in classes:
            raise pickle.UnpicklingError(f"GLOBAL {full} is not allowed")
        return classes[full]

    yield from ((kind, name) for name, kind in ({"builtins.getattr": member} | classes).items())


def _full(name: str) -> str:
    """A name with its module, which PyTorch leaves out for those of Python itself."""
    return name if "." in name else f"builtins.{name}"


def _advice(path: str, error: str) -> str:
    if (
        found := re.search(
            r"GLOBAL (\S+)|Can only (?:build|create) .* but got <class '(\S+)'>", error
        )
    ) is None:
        reason = (
            error.partition("WeightsUnpickler error:")[2].partition("Check the documentation")[0]
            or error
        )
        return (
            f"{path} cannot be loaded safely: {reason.strip()}. If you trust the file, save it again in today's "
            "form: torch.save(torch.load(path, weights_only=False), new_path)"
        )
    name = _full(found[1] or found[2])
    refused = f"{path} holds a {name}, which is not on the list of harmless classes, so that it was not loaded. "
    if "is blocked" in error:
        return f"{refused}It can run anything, and cannot be allowed"
    allowed = os.environ.get("FASTGEN_FAIRSEQ_ALLOW", "")
    value = ",".join(filter(None, (allowed, name)))
    return f"{refused}If you trust the file, allow this class by FASTGEN_FAIRSEQ_ALLOW={value}"


def encoder_layer(
    original: _Original,
    self: Any,
    x: Tensor,
    encoder_padding_mask: Tensor | None,
    attn_mask: Tensor | None = None,
) -> Any:
    """`TransformerEncoderLayerBase.forward` where it would hand a mask to PyTorch's fused layer.

    The fused layer has come to want the kind of its mask too, and raises without it.
    """
    mask = attn_mask if encoder_padding_mask is None else encoder_padding_mask
    fused = (
        getattr(self, "BT_version", False)
        and self.load_to_BT
        and x.dim() == 3
        and not (
            self.return_fc or self.training or self.ever_training or self.cfg_checkpoint_activations
        )
        and self.can_use_fastpath
    )
    if mask is None or not fused:
        return original(self, x, encoder_padding_mask, attn_mask)
    engine.hit("fairseq.encoder_layer")
    first, last = self.self_attn_layer_norm, self.final_layer_norm
    kind = 1 if encoder_padding_mask is not None else 0  # of keys, or of queries and keys
    fused_layer: Any = getattr(torch, "_transformer_encoder_layer_fwd")
    return fused_layer(
        x, self.embed_dim, self.num_heads, self.in_proj_weight, self.in_proj_bias, self.out_proj_weight,
        self.out_proj_bias, self.activation_relu_or_gelu == 2, False, first.eps, first.weight, first.bias, last.weight,
        last.bias, self.fc1_weight, self.fc1_bias, self.fc2_weight, self.fc2_bias, mask, kind,
    )  # fmt: skip


def ngram_block(
    original: _Original,
    self: Any,
    tokens: Tensor,
    lprobs: Tensor,
    bsz: int,
    beam_size: int,
    step: int,
) -> Tensor:
    """`NGramRepeatBlock.forward` on the tokens there are.

    Without its CUDA extension, which no release on PyPI holds, fairseq compares the last tokens of a table that is
    filled with padding up to the longest text allowed, finds nothing, and blocks nothing.
    """
    if not self.use_extension:
        tokens = tokens[:, : step + 1]
        engine.hit("fairseq.ngram_block")
    return original(self, tokens, lprobs, bsz, beam_size, step)


def set_decoder_beam_size(original: _Original, self: Any, beam_size: int) -> None:
    """`EnsembleModel.set_decoder_beam_size`, which leaves a number of an earlier call where the new one is 1."""
    self.decoder_beam_size = beam_size  # for what follows
    original(self, beam_size)
    if beam_size == 1:
        for model in self.models:
            if hasattr(model, "set_beam_size"):
                engine.hit("fairseq.beam_size")
                model.set_beam_size(1)


def forward_encoder(original: _Original, self: Any, net_input: Any) -> Any:
    """`EnsembleModel.forward_encoder`, with which a search begins.

    The models may have the beam size of another generator that has been made since.
    """
    beam_size = getattr(self, "decoder_beam_size", None)
    if beam_size is not None and any(hasattr(model, "set_beam_size") for model in self.models):
        engine.hit("fairseq.beam_size_again")
        self.set_decoder_beam_size(beam_size)
    return original(self, net_input)


# What numpy has given up, and what it was.
_GIVEN_UP = SimpleNamespace(long=int)


class _FormerNumpy:
    """numpy with `compat`; missed: whether that has been used."""

    missed = False

    def __getattr__(self, name: str) -> Any:
        if name != "compat" or hasattr(np, name):
            return getattr(np, name)
        self.missed = True
        return _GIVEN_UP


def token_blocks(original: FunctionType, *args: Any, **kwargs: Any) -> Any:
    """`TokenBlockDataset._build_slice_indices` with an `np` of its own: neither numpy nor fairseq is changed."""
    numpy = _FormerNumpy()
    names = {**original.__globals__, "np": numpy}
    own = FunctionType(
        original.__code__, names, original.__name__, original.__defaults__, original.__closure__
    )
    made = own(*args, **kwargs)
    if numpy.missed:
        engine.hit("fairseq.token_blocks")
    return made
