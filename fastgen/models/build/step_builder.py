"""Build a decode step from a live model's modules and its spec (`models.specs`)."""

import functools
from collections.abc import Sequence

from torch import Tensor, nn

from fastgen.models.build.equivalence_check import OUTPUTS_DIFFER, recorded_verdict
from fastgen.models.build.introspection import NotFused, at, name_of, reading
from fastgen.models.build.stack_reader import StackReader
from fastgen.models.layers.linear import Product
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.runtime.masked_step import MaskedLMHead, MaskedStep
from fastgen.models.runtime.native.step import native_step
from fastgen.models.specs.model_spec import Head, ModelSpec


def step_of(
    model: nn.Module, spec: ModelSpec, longest: int, windows: Sequence[int | None] = ()
) -> DecoderStep:
    """Build the decode step of a model in evaluation mode.

    Args:
        model: The model.
        spec: Its spec.
        longest: Maximum number of tokens of a text.
        windows: As `StackReader` takes them.

    Raises:
        NotFused: The model differs from its spec.
    """
    with reading("decoder"):
        return _DecoderReader(model, spec.decoder, longest, windows).step(spec)


class _DecoderReader(StackReader):
    """Reads a decoder and the head after it."""

    calls = True

    def step(self, spec: ModelSpec) -> DecoderStep:
        sublayers, first = self.sublayers()
        self.check_layers()
        embedding, head, masked = spec.decoder.embedding, spec.head, spec.mask_token
        assert embedding is not None
        make = (
            DecoderStep
            if masked is None
            else functools.partial(MaskedStep, mask=masked(self.model))
        )
        step = make(
            module=self.stack,
            embedding=self.embedding(embedding),
            sublayers=sublayers,
            first=first,
            head=self.head(head),
            bias=_bias(self.model, head.bias),
            scale=head.scale(self.model),
            softcap=head.softcap(self.model),
            fingerprint=tuple(self.fingerprint),
            run_layers=native_step(sublayers, first is not None) if masked is None else None,
            called=tuple(map(name_of, self.called)),
        )
        transform = () if head.transform is None else (head.transform.projection,)
        self.check_rest(head.projection, *transform)
        if step.called and (masked is not None or embedding.streams is not None):
            raise NotFused(f"a {step.called[0]} in place of a linear layer")
        if recorded_verdict(step) is False:
            raise NotFused(OUTPUTS_DIFFER)
        return step

    def head(self, spec: Head) -> Product:
        out = self.product(at(self.model, spec.projection))
        if spec.transform is None:
            return out
        # This module also registers the head's bias.
        self.read.add(at(self.model, spec.projection.rpartition(".")[0]))
        return MaskedLMHead(
            self.product(at(self.model, spec.transform.projection)),
            self.activation(at(self.model, spec.transform.activation)),
            self.norm(at(self.model, spec.transform.norm)),
            out,
        )


def _bias(model: nn.Module, name: str | None) -> Tensor | None:
    bias = None if name is None else model._buffers.get(name)
    return None if bias is None or not bool(bias.any()) else bias.flatten()
