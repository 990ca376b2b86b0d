"""fairseq's `SequenceGenerator._generate` on fastgen's decode loop (`fastgen.decoding`)."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from fairseq.search import BeamSearch
from torch import Tensor

from fastgen.context import changed
from fastgen.decoding.backends.decode_backend import DecodeBackend
from fastgen.decoding.loop import backend_of, decode
from fastgen.decoding.plan import Plan, Unsupported
from fastgen.decoding.search.first_finished import FirstFinished, Hypothesis
from fastgen.decoding.search.prediction import Prediction
from fastgen.models.cuda_graphs import graph
from fastgen.models.routing.routes import all_routed
from fastgen.patches.engine import engine
from fastgen.patches.fairseq.bild import bild
from fastgen.patches.fairseq.generator.decide import decide
from fastgen.patches.fairseq.generator.encoder import encode
from fastgen.patches.fairseq.generator.lengths import longest_of, source_lengths
from fastgen.patches.fairseq.generator.report import PATCH, note_served, of_generator
from fastgen.patches.fairseq.generator.search import Beam, Toolkits
from fastgen.patches.fairseq.generator.shared_stepper import Member, SharedStepper
from fastgen.patches.fairseq.generator.split import Found, in_halves
from fastgen.patches.generation_call import GenerationCall, current


@dataclass
class SuspendedDecode:
    """A search that has started, and is suspended or finished.

    Attributes:
        generator: fairseq's generator.
        plan: What the call runs.
        backend: Runs its decode steps; it holds the search and the stepper.
        left_off: Disabled features, each with its fallback reason.
    """

    generator: Any
    plan: Plan
    backend: DecodeBackend[FirstFinished]
    left_off: tuple[str, ...]

    @property
    def model(self) -> SharedStepper:
        """The stepper of the decode steps."""
        return self.backend.model

    def finish(self) -> Found:
        """Return the result of `_generate`; the search must have finished."""
        result = [
            [_as_fairseq(hypothesis) for hypothesis in hypotheses]
            for hypotheses in self.backend.search.outcome()
        ]
        left_off = (
            *self.plan.left_off, *self.left_off, *self.model.left_off, *self.backend.left_off,
        )  # fmt: skip
        note_served(self.generator, self.plan, left_off, self.model.decoders)
        return result


def returning(generator: Any, sample: Any, result: Found) -> changed[GenerationCall]:
    """Return a context within which `_generate` returns `result` for this generator and sample."""
    return changed(current, model=generator, result=(sample, result))


def generate(
    original: Callable[..., Any],
    self: Any,
    sample: Any,
    prefix_tokens: Tensor | None = None,
    constraints: Tensor | None = None,
    bos_token: int | None = None,
) -> Any:
    """`SequenceGenerator._generate`: decode here, or count the fallback reason and call fairseq."""
    call = current.get()
    if call.result is not None and call.model is self and call.result[0] is sample:
        return call.result[1]
    drafting = bild.requested()
    if drafting is not None and not bild.rests(drafting, self, sample, prefix_tokens, constraints):
        return bild.generate(drafting, self, sample, prefix_tokens, constraints, bos_token)
    try:
        plan = decide(self, sample, constraints)
    except Unsupported as unsupported:
        engine.fallback(PATCH, unsupported.reason, of_generator(self))
        return original(self, sample, prefix_tokens, constraints, bos_token)

    def decoded(part: Any, prefix: Tensor | None) -> SuspendedDecode:
        part_plan = replace(plan, sentences=len(part["net_input"]["src_tokens"]))
        with engine.running(part_plan), routes(self):
            lengths = source_lengths(original, self, part["net_input"])
            begun, _ = begin(self, part_plan, part, lengths, prefix, constraints, bos_token)
        return begun

    if drafting is None:
        return in_halves(
            lambda part, prefix: decoded(part, prefix).finish(), self, sample, prefix_tokens
        )
    start = time.perf_counter()
    begun = decoded(sample, prefix_tokens)
    return bild.of_large_alone(
        drafting, self, begun.finish(), begun.model.times, time.perf_counter() - start
    )


def models_of(generator: Any) -> list[Any]:
    """Return all models of a generator, the language model last."""
    return [*generator.model.models, *([] if generator.lm_model is None else [generator.lm_model])]


def routes(generator: Any) -> ExitStack:
    """Return a context that routes the linear layers of a generator's models."""
    return all_routed(models_of(generator))


def begin(
    generator: Any,
    plan: Plan,
    sample: Any,
    lengths: Tensor,
    prefix_tokens: Tensor | None = None,
    constraints: Tensor | None = None,
    bos_token: int | None = None,
    pauses: bool = False,
) -> tuple[SuspendedDecode, bool]:
    """Encode a batch and search.

    Args:
        generator: fairseq's generator.
        plan: What the call runs.
        sample: The batch.
        lengths: (B,), the source lengths.
        prefix_tokens: (B, P) int64, or None.
        constraints: fairseq's packed constraints, or None.
        bos_token: First token of all hypotheses; None for the end token.
        pauses: Whether to suspend as soon as steps can run jointly with other batches.

    Returns:
        The search, and whether it has finished.
    """
    net_input = sample["net_input"]
    source: Tensor = net_input["src_tokens"]
    longest = longest_of(generator, source, lengths)
    b, m, device = plan.sentences, plan.beams, source.device
    steps = longest + 1
    encoded = encode(generator.model, net_input)
    stepper = SharedStepper(
        [
            Member(model, output, b, m, steps, generator.temperature)
            for model, output in zip(generator.model.models, encoded.outputs, strict=True)
        ],
        b, m, steps, device,
        None if generator.lm_model is None else Member(generator.lm_model, None, b, m, steps),
        generator.lm_weight,
    )  # fmt: skip
    generator.search.init_constraints(constraints, m)
    search = FirstFinished(
        sentences=b,
        beams=m,
        start=generator.eos if bos_token is None else bos_token,
        end=generator.eos,
        pad=generator.pad,
        longest=longest,
        selector=Beam(generator, prefix_tokens, longest, device)
        if type(generator.search) is BeamSearch
        else Toolkits(generator, prefix_tokens, longest, sample.get("id"), lengths),
        device=device,
        normalize=generator.normalize_scores,
        length_penalty=generator.len_penalty,
        no_longer_than=lengths if generator.match_source_len else None,
        stop_at_longest=generator.search.stop_on_max_len,
        captured=graph.enabled(source),
    )
    first = _prefilled(search, stepper, prefix_tokens)
    step_output = (
        stepper.step(search.text.ids[::m]) if first is None else (Prediction(lambda: first), None)
    )
    backend = backend_of(search, stepper)
    over = decode(backend, step_output, lambda: pauses and stepper.joinable)
    return SuspendedDecode(generator, plan, backend, encoded.left_off), over


def _prefilled(
    search: FirstFinished, stepper: SharedStepper, prefix: Tensor | None
) -> Tensor | None:
    """Prefill the prefix that all texts start with, if that gives the same result.

    fairseq runs a language model's prompt token by token, for every beam.

    Returns:
        The log-probabilities (B, V) of the next token; None if nothing was prefilled.
    """
    selector = search.selector
    if prefix is None or type(selector) is not Beam or not stepper.prefills:
        return None
    tokens = torch.cat([search.tokens[:: search.beams, :1], prefix], 1)
    shared = selector.forced(tokens, search.longest)
    if shared == 0:
        return None
    prefix = prefix[:, :shared]
    first, token_scores = stepper.prefill(tokens[:, : shared + 1])
    search.begin_after(
        prefix, token_scores - prefix.eq(selector.generator.unk) * selector.generator.unk_penalty
    )
    return first


def _as_fairseq(hypothesis: Hypothesis) -> dict[str, Tensor]:
    return {
        "tokens": hypothesis.tokens,
        "score": hypothesis.score,
        "attention": torch.empty(0, dtype=torch.float32, device="cpu")
        if hypothesis.attention is None
        else hypothesis.attention,
        "alignment": torch.empty(0, dtype=torch.float32, device="cpu"),
        "positional_scores": hypothesis.token_scores,
    }
