"""Compatibility fixes that let fairseq 0.12.2 run on current versions.

That release was the last one; it was made for Python 3.10 and PyTorch 1.12. Each function is as
narrow as possible: it changes only calls that would fail in fairseq, and forwards all others to the
original.
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
    """`dataclasses._get_field`, for defaults that are dataclasses of fairseq or hydra.

    Python 3.11 treats an unhashable default as mutable and rejects it. The default's class gets a
    hash for the duration of the call.
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
        # As `dataclasses` sets it.
        kind.__hash__ = None  # pyright: ignore[reportAttributeAccessIssue]


# Classes that fairseq writes into checkpoints besides tensors and plain containers. They hold data
# and run no code.
_ALLOWED = (
    "argparse.Namespace",
    *(
        f"fairseq.{module}.{name}"
        for module in ("meters", "logging.meters")
        for name in ("AverageMeter", "MetersDict", "StopwatchMeter", "SumMeter", "TimeMeter")
    ),
)
# NumPy scalars, under their names in NumPy 1 and in NumPy 2.
_NUMPY: tuple[Any, ...] = (
    np.dtype,
    *(type(np.dtype(kind)) for kind in f"?efd{np.typecodes['AllInteger']}"),
    *(
        (np.float64().__reduce__()[0], f"numpy.{core}.multiarray.scalar")
        for core in ("core", "_core")
    ),
)


class UntrustedCheckpointError(pickle.UnpicklingError):
    """A checkpoint contains a class that is not known to be harmless."""


def load_checkpoint(original: _Original, path: Any, *args: Any, **kwargs: Any) -> Any:
    """`checkpoint_utils.load_checkpoint_to_cpu`, with an allow-list for PyTorch's safe loading.

    Raises:
        UntrustedCheckpointError: The checkpoint contains another class, or cannot be read safely.
            The message names the class, and says how to load a file that is trusted.
    """
    with torch.serialization.safe_globals([*_NUMPY, *_allowed()]):
        try:
            loaded = original(path, *args, **kwargs)
        except pickle.UnpicklingError as error:
            raise UntrustedCheckpointError(_advice(str(path), str(error))) from error
    engine.hit("fairseq.load")
    return loaded


def _allowed() -> Iterator[tuple[Any, str]]:
    """Yield each allowed object and its name in a pickle."""
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
        """Resolve an allowed nested class, for which pickle protocol 2 calls `getattr`."""
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
    """Return a name with its module, which PyTorch omits for Python's builtins."""
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
            f"{path} cannot be loaded safely: {reason.strip()}. If you trust the file, save it "
            "again in today's form: torch.save(torch.load(path, weights_only=False), new_path)"
        )
    name = _full(found[1] or found[2])
    refused = (
        f"{path} holds a {name}, which is not on the list of harmless classes, so that it was not "
        "loaded. "
    )
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
    """`TransformerEncoderLayerBase.forward`, for calls that pass a mask to PyTorch's fused layer.

    PyTorch's fused layer now requires the type of its mask as well, and raises without it.

    Args:
        x: (S, B, C), as in the original; only three-dimensional inputs take the fused path.
        encoder_padding_mask: Padding mask of the keys, or None.
        attn_mask: Mask of queries and keys, or None.
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
    kind = 1 if encoder_padding_mask is not None else 0  # 1: mask of keys; 0: of queries and keys
    fused_layer: Any = getattr(torch, "_transformer_encoder_layer_fwd")  # noqa: B009 - private
    return fused_layer(
        x, self.embed_dim, self.num_heads, self.in_proj_weight, self.in_proj_bias,
        self.out_proj_weight, self.out_proj_bias, self.activation_relu_or_gelu == 2, False,
        first.eps, first.weight, first.bias, last.weight, last.bias,
        self.fc1_weight, self.fc1_bias, self.fc2_weight, self.fc2_bias, mask, kind,
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
    """`NGramRepeatBlock.forward`, restricted to the tokens generated so far.

    Without its CUDA extension, which no release on PyPI contains, fairseq compares the last tokens
    of a table that is padded to the maximum length. It finds no repeated n-gram, and blocks
    nothing.
    """
    if not self.use_extension:
        tokens = tokens[:, : step + 1]
        engine.hit("fairseq.ngram_block")
    return original(self, tokens, lprobs, bsz, beam_size, step)


def set_decoder_beam_size(original: _Original, self: Any, beam_size: int) -> None:
    """`EnsembleModel.set_decoder_beam_size`, also for a beam size of 1.

    The original leaves the beam size of an earlier call in the models if the new one is 1.
    """
    self.decoder_beam_size = beam_size  # read by `forward_encoder`
    original(self, beam_size)
    if beam_size == 1:
        for model in self.models:
            if hasattr(model, "set_beam_size"):
                engine.hit("fairseq.beam_size")
                model.set_beam_size(1)


def forward_encoder(original: _Original, self: Any, net_input: Any) -> Any:
    """`EnsembleModel.forward_encoder`, after restoring the beam size of this generator.

    Each search starts with this call. A generator created later for the same models may have set
    its own beam size in them.
    """
    beam_size = getattr(self, "decoder_beam_size", None)
    if beam_size is not None and any(hasattr(model, "set_beam_size") for model in self.models):
        engine.hit("fairseq.beam_size_again")
        self.set_decoder_beam_size(beam_size)
    return original(self, net_input)


# `numpy.compat`, which NumPy has removed.
_GIVEN_UP = SimpleNamespace(long=int)


class _FormerNumpy:
    """numpy with `compat`.

    Attributes:
        missed: Whether `compat` has been accessed.
    """

    missed = False

    def __getattr__(self, name: str) -> Any:
        if name != "compat" or hasattr(np, name):
            return getattr(np, name)
        self.missed = True
        return _GIVEN_UP


def token_blocks(original: FunctionType, *args: Any, **kwargs: Any) -> Any:
    """`TokenBlockDataset._build_slice_indices` with an `np` that has `compat`.

    numpy and fairseq stay unchanged.
    """
    numpy = _FormerNumpy()
    names = {**original.__globals__, "np": numpy}
    own = FunctionType(
        original.__code__, names, original.__name__, original.__defaults__, original.__closure__
    )
    indices = own(*args, **kwargs)
    if numpy.missed:
        engine.hit("fairseq.token_blocks")
    return indices
