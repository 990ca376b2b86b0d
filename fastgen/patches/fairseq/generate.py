"""fairseq's `SequenceGenerator._generate` on the engine of `decoding`."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from fairseq.search import BeamSearch
from torch import Tensor

from fastgen.decoding.first_finished import FirstFinished, Hypothesis
from fastgen.decoding.plan import Plan, Unsupported
from fastgen.models import graph, linear, memory
from fastgen.models.routes import routed
from fastgen.patches import _engine
from fastgen.patches.fairseq import bild
from fastgen.patches.fairseq.decide import decide
from fastgen.patches.fairseq.encoder import encode
from fastgen.patches.fairseq.lengths import longest_of, source_lengths
from fastgen.patches.fairseq.search import Beam, Toolkits
from fastgen.patches.fairseq.stepper import Member, Stepper

_engine.on_release(linear.release)
_engine.on_release(memory.release)
_engine.on_release(graph.release)


def generate(
    original: Callable[..., Any],
    self: Any,
    sample: Any,
    prefix_tokens: Tensor | None = None,
    constraints: Tensor | None = None,
    bos_token: int | None = None,
) -> Any:
    """`SequenceGenerator._generate`: decide, then decode here or leave the call to fairseq; the reason is counted."""
    if (asked := bild.asked()) is not None:
        return bild.generate(asked, self, sample, prefix_tokens, constraints, bos_token)
    try:
        plan = decide(self, sample, constraints)
    except Unsupported as unsupported:
        _engine.fallback("fairseq.generate", unsupported.reason)
        self.model.set_decoder_beam_size(self.beam_size)  # another generator of the model may have set its own
        return original(self, sample, prefix_tokens, constraints, bos_token)
    models = [*self.model.models, *([] if self.lm_model is None else [self.lm_model])]
    with _engine.running(plan), ExitStack() as stack:
        for model in models:
            stack.enter_context(routed(model))
        lengths = source_lengths(original, self, sample["net_input"])
        finished, left_off = _decode(self, plan, sample, lengths, prefix_tokens, constraints, bos_token)
    _engine.hit("fairseq.generate", left_off)
    return finished


def _decode(
    generator: Any,
    plan: Plan,
    sample: Any,
    lengths: Tensor,
    prefix_tokens: Tensor | None,
    constraints: Tensor | None,
    bos_token: int | None,
) -> tuple[list[list[dict[str, Tensor]]], tuple[str, ...]]:
    net_input = sample["net_input"]
    source: Tensor = net_input["src_tokens"]
    longest = longest_of(generator, source, lengths)
    b, m, device = plan.sentences, plan.beams, source.device
    steps = longest + 1
    stepper = Stepper(
        [
            Member(model, output, b, m, steps)
            for model, output in zip(generator.model.models, encode(generator.model, net_input), strict=True)
        ],
        b, m, steps, device, generator.temperature,
        None if generator.lm_model is None else Member(generator.lm_model, None, b, m, steps),
        generator.lm_weight,
    )  # fmt: skip
    generator.search.init_constraints(constraints, m)
    plain = type(generator.search) is BeamSearch
    search = FirstFinished(
        sentences=b,
        beams=m,
        start=generator.eos if bos_token is None else bos_token,
        end=generator.eos,
        pad=generator.pad,
        longest=longest,
        search=Beam(generator, prefix_tokens, longest, device)
        if plain
        else Toolkits(generator, prefix_tokens, longest, sample.get("id"), lengths),
        device=device,
        normalize=generator.normalize_scores,
        length_penalty=generator.len_penalty,
        no_longer_than=lengths if generator.match_source_len else None,
        stop_at_longest=generator.search.stop_on_max_len,
        captured=graph.wanted(source),
    )
    first = _prefilled(search, stepper, prefix_tokens)
    found = [[_as_fairseq(hypothesis) for hypothesis in hypotheses] for hypotheses in search.run(stepper, first)]
    return found, (*plan.left_off, *stepper.left_off)


def _prefilled(search: FirstFinished, stepper: Stepper, prefix: Tensor | None) -> Tensor | None:
    """Run what all texts begin with at once, where that is all there is to it; return what is chosen from next.

    A language model's prompt goes through fairseq as a prefix, a token at a time and for every beam.
    """
    chooser = search.search
    if prefix is None or type(chooser) is not Beam or not stepper.prefills:
        return None
    tokens = torch.cat([search.tokens[:: search.beams, :1], prefix], 1)
    shared = chooser.forced(tokens, search.longest)
    if shared == 0:
        return None
    prefix = prefix[:, :shared]
    first, token_scores = stepper.prefill(tokens[:, : shared + 1])
    search.begin_behind(prefix, token_scores - prefix.eq(chooser.generator.unk) * chooser.generator.unk_penalty)
    return first


def _as_fairseq(hypothesis: Hypothesis) -> dict[str, Tensor]:
    return {
        "tokens": hypothesis.tokens,
        "score": hypothesis.score,
        "attention": torch.empty(0) if hypothesis.attention is None else hypothesis.attention,
        "alignment": torch.empty(0),
        "positional_scores": hypothesis.token_scores,
    }
