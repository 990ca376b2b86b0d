"""Big-little decoding in fairseq's `SequenceGenerator`, with one beam (`fastgen.bild`).

The large model is the generator's own. The generator's options apply to the predictions of both
models, in fairseq's order.
"""

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, cast

import torch
from fairseq.search import BeamSearch
from fairseq.sequence_generator import (
    EnsembleModel,
    SequenceGenerator,
    SequenceGeneratorWithAlignment,
)
from torch import Tensor, nn

from fastgen.context import changed
from fastgen.decoding.plan import Plan, Unsupported
from fastgen.decoding.search.stopping import Stop
from fastgen.decoding.speculative import bild_options
from fastgen.decoding.speculative.adaptive_drafting import DraftTiming, timing_of
from fastgen.decoding.speculative.bild import Bild, Counts
from fastgen.decoding.speculative.bild_options import Options
from fastgen.decoding.speculative.policies import Likeliest, Noting
from fastgen.models.routing.routes import routed
from fastgen.models.runtime.early_exit import check_exit, early_exit
from fastgen.models.runtime.ragged_step import Span
from fastgen.patches.engine import engine
from fastgen.patches.fairseq.generator import decide
from fastgen.patches.fairseq.generator.encoder import encode
from fastgen.patches.fairseq.generator.fused_decoder import FusedDecoder
from fastgen.patches.fairseq.generator.lengths import longest_of
from fastgen.patches.fairseq.generator.report import note_served
from fastgen.patches.fairseq.generator.search import Beam, without_nan
from fastgen.patches.fairseq.generator.shared_stepper import Member, SharedStepper
from fastgen.patches.generation_call import current


@dataclass
class BildSession:
    """The options of a `bild` context, and its counters.

    Attributes:
        options: The options of big-little decoding.
        counts: Sums over all texts: tokens, drafted, large_calls, small_calls, fallbacks, rollbacks
            (`fastgen.decoding.speculative.bild.Counts`).
    """

    options: Options
    counts: Counter[str] = field(default_factory=Counter[str])

    def __str__(self) -> str:
        summary = ", ".join(
            f"{self.counts[name]:,} {name.replace('_', ' ')}"
            for name in Counts.__dataclass_fields__
        )
        return f"Big-little decoding: {summary}"


def requested() -> BildSession | None:
    """Return the `BildSession` of this context, or None."""
    return current.get().bild


def bild(
    small: Any, early_exit: int | None, values: Mapping[str, Any]
) -> AbstractContextManager[BildSession]:
    """See `fastgen.bild`.

    Args:
        small: The small model, or None.
        early_exit: Number of the large model's layers that draft, or None.
        values: Options that were set, by `bild_options.NAMES`.
    """
    return drafting(
        bild_options.options(_model_of(small), early_exit, values, {}, ("small", "early_exit"))
    )


@contextmanager
def drafting(options: Options) -> Generator[BildSession]:
    """Return a context within which generators run big-little decoding.

    Raises:
        ValueError: The patch `fairseq.generate` is not active, so that fairseq's own generator
            would run.
    """
    if engine.is_disabled() or not engine.is_applied("fairseq.generate"):
        raise ValueError(
            "big-little decoding runs in the place of SequenceGenerator, but fairseq.generate is "
            "not in it"
        )
    if isinstance(options.small, nn.Module):
        options.small.eval()  # generators do the same with their own models
    session = BildSession(options)
    with changed(current, bild=session):
        yield session


def _model_of(small: Any) -> Any:
    """Return the model of a model, of a list of one, or of a hub interface."""
    models = getattr(small, "models", small)
    if not isinstance(models, list | tuple | nn.ModuleList):
        return small
    if len(models) != 1:
        raise ValueError(f"the small model is an ensemble of {len(models)}, and must be one model")
    return models[0]


def check(generator: Any, options: Options) -> None:
    """Check that a generator can decode with these options.

    Raises:
        ValueError: It cannot; the message says why.
    """
    try:
        decide.check(generator, SequenceGenerator)
    except Unsupported as unsupported:
        raise ValueError(f"big-little decoding: {unsupported.reason}") from None
    if generator.beam_size != 1:
        raise ValueError(bild_options.one_text("beam", generator.beam_size))
    search, models = type(generator.search), generator.model.models
    in_the_way = {
        "an ensemble of models": len(models) != 1,
        "a language model beside": generator.lm_model is not None,
        "match_source_len": generator.match_source_len,
        f"the search {search.__name__}": search is not BeamSearch,
        "alignments": isinstance(generator, SequenceGeneratorWithAlignment),
    }
    for what, is_there in in_the_way.items():
        if is_there:
            raise _impossible(what)
    pair = (
        {"large": models[0]}
        if options.layers is not None
        else {"large": models[0], "small": options.small}
    )
    for size, model in pair.items():
        try:
            decide.check_model(model)
        except Unsupported as unsupported:
            raise ValueError(
                f"big-little decoding, of the {size} model: {unsupported.reason}"
            ) from None
    if options.layers is not None:
        check_exit(options.layers, len(models[0].decoder.layers))
    else:
        _check_dictionaries(models[0], options.small)


def _impossible(what: str) -> ValueError:
    return ValueError(
        "big-little decoding writes one model's likeliest tokens, which is not possible with "
        f"{what}"
    )


def _check_dictionaries(large: Any, small: Any) -> None:
    """Raise ValueError if the models do not have the same source and target symbols."""
    for side, part in (("source", "encoder"), ("target", "decoder")):
        large_dictionary, small_dictionary = (
            getattr(getattr(model, part, None), "dictionary", None) for model in (large, small)
        )
        pairs = zip_longest(
            *(
                [] if words is None else words.symbols
                for words in (large_dictionary, small_dictionary)
            )
        )
        for number, (one, other) in enumerate(pairs):
            if one != other:
                raise ValueError(
                    "big-little decoding needs two models of one dictionary: symbol "
                    f"{number} of the {side} is {one!r} to the large one and {other!r} to the "
                    "small one"
                )


def generate(
    session: BildSession,
    generator: Any,
    sample: Any,
    prefix_tokens: Tensor | None,
    constraints: Tensor | None,
    bos_token: int | None,
) -> list[list[dict[str, Tensor]]]:
    """Return the result of `SequenceGenerator._generate`, decoded with both models.

    Raises:
        ValueError: The call uses an unsupported feature; the message names it.
    """
    options = session.options
    plan = _planned(session, generator, sample, prefix_tokens, constraints)
    small = nullcontext() if options.small is None else routed(options.small)
    with engine.running(plan), routed(generator.model.models[0]), small:
        hypotheses, counts, left_off = _decode(
            generator, plan, sample["net_input"], options, bos_token
        )
    _count(session, counts)
    note_served(generator, plan, (*plan.left_off, *left_off), ())
    return hypotheses


def rests(
    session: BildSession,
    generator: Any,
    sample: Any,
    prefix_tokens: Tensor | None,
    constraints: Tensor | None,
) -> bool:
    """Return whether the large model should run a call alone because no round would draft.

    Raises:
        ValueError: See `generate`.
    """
    if not _adaptive(session.options):
        return False
    plan = _planned(session, generator, sample, prefix_tokens, constraints)
    timing = _timing(generator, session.options, plan.sentences)
    return timing is not None and timing.total > 0.0 and not timing.may_draft()


def of_large_alone(
    session: BildSession,
    generator: Any,
    found: list[list[dict[str, Tensor]]],
    steps: Sequence[tuple[int, float]],
    seconds: float,
) -> list[list[dict[str, Tensor]]]:
    """Record the timings of a call that the large model ran alone, and return its result.

    Args:
        session: The options and counters of the context.
        generator: fairseq's generator.
        found: The hypotheses of each sentence.
        steps: Rows and seconds of each step.
        seconds: Duration of the whole call, encoder included.

    Returns:
        The hypotheses, without attention, as `generate` returns them.
    """
    timing = _timing(generator, session.options, len(found))
    assert timing is not None  # implied by `rests`
    for rows, step_seconds in steps[1:]:  # without the prompt, as in rounds
        timing.note(False, rows, rows, step_seconds)
    lengths = [len(hypothesis["tokens"]) for (hypothesis,) in found]
    timing.note_call(False, sum(lengths), seconds)
    _count(session, [Counts(tokens=length, large_calls=length) for length in lengths])
    return [
        [hypothesis | {"attention": torch.empty(0, dtype=torch.float32, device="cpu")}]
        for (hypothesis,) in found
    ]


def _planned(
    session: BildSession,
    generator: Any,
    sample: Any,
    prefix_tokens: Tensor | None,
    constraints: Tensor | None,
) -> Plan:
    """Return the plan of a call; ValueError if the call uses an unsupported feature."""
    check(generator, session.options)
    for what, value in {"a prefix": prefix_tokens, "constraints": constraints}.items():
        if value is not None:
            raise _impossible(what)
    try:
        plan = replace(decide.decide(generator, sample, constraints), method="big-little decoding")
    except Unsupported as unsupported:
        raise ValueError(f"big-little decoding: {unsupported.reason}") from None
    if session.options.small is not None:
        source = sample["net_input"]["src_tokens"]
        _check_positions(session.options.small, source.shape[1], longest_of(generator, source))
    return plan


def _timing(generator: Any, options: Options, sentences: int) -> DraftTiming | None:
    """Return the measured costs that decide about drafting; None if every round drafts."""
    if not _adaptive(options):
        return None
    return timing_of(generator.model.models[0], options.small, options.layers, sentences)


def _adaptive(options: Options) -> bool:
    return options.lossless if options.adaptive is None else options.adaptive


def _count(session: BildSession, counts: Sequence[Counts]) -> None:
    total = {
        name: sum(getattr(each, name) for each in counts) for name in Counts.__dataclass_fields__
    }
    session.counts.update(total)
    engine.note_drafting(total)


def _decode(
    generator: Any,
    plan: Plan,
    net_input: dict[str, Tensor],
    options: Options,
    bos_token: int | None,
) -> tuple[list[list[dict[str, Tensor]]], list[Counts], tuple[str, ...]]:
    """Return the hypotheses, the counts of each sentence, and the disabled features."""
    source, end = net_input["src_tokens"], generator.eos
    longest = longest_of(generator, source)
    start = source.new_full((plan.sentences, 1), end if bos_token is None else bos_token)
    large = _FusedModel(generator.model, net_input, start, longest, generator.temperature)
    if options.layers is None:
        small = _FusedModel(
            EnsembleModel([options.small]), net_input, start, longest, generator.temperature
        )
    else:
        small = _FirstLayers(large, options.layers)
    policy = Noting(Likeliest(0.0 if options.lossless else options.rollback))
    bild_loop = Bild(
        large=large,
        small=small,
        prompt=start,
        stop=Stop(
            torch.tensor([end], dtype=torch.int64, device="cpu"),
            [lambda length: length >= longest + 2],
        ),
        transforms=Beam(generator, None, longest, source.device).transforms,
        policy=policy,
        pad=generator.pad,
        fallback=options.fallback,
        max_draft=options.max_draft,
        shared=options.layers is not None,
        timing=_timing(generator, options, plan.sentences),
    )
    written: list[list[int]] = cast(Any, bild_loop.run()[:, 1:]).tolist()
    texts = [
        tokens[: counts.tokens] for tokens, counts in zip(written, bild_loop.counts, strict=True)
    ]
    scores = policy.scores_of(texts)
    hypotheses = [
        [_hypothesis(generator, *each, source.device)] for each in zip(texts, scores, strict=True)
    ]
    return (
        hypotheses,
        bild_loop.counts,
        large.left_off + (small.left_off if isinstance(small, _FusedModel) else ()),
    )


def _check_positions(small: Any, source: int, longest: int) -> None:
    encoder = getattr(small, "encoder", None)
    for what, wanted, held in (
        ("sources", source, source if encoder is None else encoder.max_positions()),
        ("hypotheses", longest + 1, small.max_decoder_positions()),
    ):
        if wanted > held:
            raise ValueError(
                f"big-little decoding of {what} of {wanted} tokens: the small model reads {held} "
                "at most"
            )


def _hypothesis(
    generator: Any, tokens: list[int], scores: list[float], device: torch.device
) -> dict[str, Tensor]:
    """Build fairseq's hypothesis of a text.

    Token scores are differences of cumulative sums in fp32, as in fairseq.
    """
    assert tokens[-1] == generator.eos, f"{len(tokens)} tokens without an end"
    sums = torch.tensor(scores, dtype=torch.float32, device="cpu")
    for i in range(1, len(scores)):
        sums[i] += sums[i - 1]
    score = (
        sums[-1] / len(tokens) ** generator.len_penalty if generator.normalize_scores else sums[-1]
    )
    return {
        "tokens": torch.tensor(tokens, device=device, dtype=torch.int64),
        "score": score.to(device),
        "attention": torch.empty(0, dtype=torch.float32, device="cpu"),
        "alignment": torch.empty(0, dtype=torch.float32, device="cpu"),
        "positional_scores": torch.cat([sums[:1], sums[1:] - sums[:-1]]).to(device),
    }


class _FusedModel:
    """A model that runs fused decode steps of all its layers (`decoding.speculative.bild.Model`).

    Args:
        ensemble: fairseq's `EnsembleModel` of one model.
        net_input: Model inputs of the sample.
        start: (B, 1) int64, the first token of each text.
        longest: Maximum tokens of a hypothesis, without its end.
        temperature: Divides the logits.
    """

    def __init__(
        self,
        ensemble: Any,
        net_input: dict[str, Tensor],
        start: Tensor,
        longest: int,
        temperature: float,
    ) -> None:
        self.ensemble, self.net_input, self.steps = ensemble, net_input, longest + 1
        self.start, self.temperature = start, temperature
        self.left_off: tuple[str, ...] = ()

    def prefill(self) -> Tensor:
        """Encode the sources and run the first step. Not called for a model that never drafts."""
        (model,), sentences = self.ensemble.models, len(self.start)
        (encoded,), self.left_off = encode(self.ensemble, self.net_input)
        self.member = Member(model, encoded, sentences, 1, self.steps)
        self.stepper = SharedStepper([self.member], sentences, 1, self.steps, self.start.device)
        prediction, _ = self.stepper.step(self.start)
        self.member.fuse()
        if self.member.fused is not None and not self.member.fused.ready:
            # For the equivalence check. Later steps overwrite this token in the KV cache.
            self.stepper.step(self.start.repeat(1, 2))
        if self.member.fused is None or prediction.logits is None:
            raise ValueError(
                "big-little decoding needs decode steps from the weights, which run any tokens of "
                f"any text; of {type(self.member.model).__name__}, {self.member.left_off}"
            )
        return self.log_probs(prediction.logits)

    @property
    def fused(self) -> FusedDecoder:
        assert self.member.fused is not None
        return self.member.fused

    def log_probs(self, logits: Tensor) -> Tensor:
        """Return fairseq's log-probabilities of logits (N, V), which stay unchanged."""
        logits = logits if self.temperature == 1.0 else logits / self.temperature
        found = torch.log_softmax(logits, -1, dtype=torch.float32)
        without_nan(found)
        return found

    def extend(self, spans: Sequence[Span]) -> Tensor:
        return self.log_probs(self.fused.extend(spans))

    def keep(self, rows: Tensor) -> None:
        self.stepper.keep(rows, in_order=False)


class _FirstLayers:
    """A model's first layers, over the model's own KV cache (`decoding.speculative.bild.Model`)."""

    def __init__(self, whole: _FusedModel, layers: int) -> None:
        self.whole, self.layers = whole, layers

    def prefill(self) -> None:
        """Build the early-exit step; the first span of each text runs its start token again."""
        self.step = early_exit(self.whole.fused.step, self.layers)

    def extend(self, spans: Sequence[Span]) -> Tensor:
        return self.whole.log_probs(self.whole.fused.extend(spans, self.step))

    def keep(self, rows: Tensor) -> None:
        """Do nothing: the whole model, which owns the KV cache, has kept the rows."""
