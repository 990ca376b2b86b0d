"""Big-little decoding where fairseq's `SequenceGenerator` runs with one beam: `with fastgen.bild(small): ...`.

The large model is the generator's own. Its options are applied to what both models predict, in fairseq's order.
"""

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
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

from fastgen.decoding.plan import Plan, Unsupported
from fastgen.decoding.search.stopping import Stop
from fastgen.decoding.speculative import bild_options
from fastgen.decoding.speculative.adaptive_drafting import Pace, pace_of
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
from fastgen.patches.fairseq.generator.shared_stepper import Member, Stepper


@dataclass
class Drafting:
    """What is asked for in a context, and what has been done there.

    Attributes:
        counts: summed over all texts: tokens, drafted, large_calls, small_calls, fallbacks, rollbacks
            (`fastgen.decoding.speculative.bild.Counts`).
    """

    options: Options
    counts: Counter[str] = field(default_factory=Counter[str])

    def __str__(self) -> str:
        said = ", ".join(
            f"{self.counts[name]:,} {name.replace('_', ' ')}"
            for name in Counts.__dataclass_fields__
        )
        return f"Big-little decoding: {said}"


_drafting: ContextVar[Drafting | None] = ContextVar("fastgen_fairseq_bild", default=None)


def asked() -> Drafting | None:
    """What is asked for in this context."""
    return _drafting.get()


def bild(
    small: Any, early_exit: int | None, asked: Mapping[str, Any]
) -> AbstractContextManager[Drafting]:
    """See `fastgen.bild`; asked: by `bild_options.NAMES`."""
    return drafting(
        bild_options.options(_model_of(small), early_exit, asked, {}, ("small", "early_exit"))
    )


@contextmanager
def drafting(options: Options) -> Generator[Drafting]:
    """Within it, generators decode as the options say.

    Raises:
        ValueError: fairseq's own generator would run.
    """
    if engine.is_disabled() or not engine.is_applied("fairseq.generate"):
        raise ValueError(
            "big-little decoding runs in the place of SequenceGenerator, but fairseq.generate is not in it"
        )
    if isinstance(options.small, nn.Module):
        options.small.eval()  # as generators do with their own models
    here = Drafting(options)
    token = _drafting.set(here)
    try:
        yield here
    finally:
        _drafting.reset(token)


def _model_of(small: Any) -> Any:
    """A model, where a model, one in a list, or a hub interface of one is given."""
    models = getattr(small, "models", small)
    if not isinstance(models, list | tuple | nn.ModuleList):
        return small
    if len(models) != 1:
        raise ValueError(f"the small model is an ensemble of {len(models)}, and must be one model")
    return models[0]


def check(generator: Any, options: Options) -> None:
    """Raise ValueError where a generator cannot decode with these options; the message says why."""
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
        f"big-little decoding writes one model's likeliest tokens, which is not possible with {what}"
    )


def _check_dictionaries(large: Any, small: Any) -> None:
    """Raise ValueError where two models do not read and write the same symbols."""
    for side, part in (("source", "encoder"), ("target", "decoder")):
        ours, theirs = (
            getattr(getattr(model, part, None), "dictionary", None) for model in (large, small)
        )
        pairs = zip_longest(*([] if words is None else words.symbols for words in (ours, theirs)))
        for number, (one, other) in enumerate(pairs):
            if one != other:
                raise ValueError(
                    f"big-little decoding needs two models of one dictionary: symbol {number} of the {side} is "
                    f"{one!r} to the large one and {other!r} to the small one"
                )


def generate(
    here: Drafting,
    generator: Any,
    sample: Any,
    prefix_tokens: Tensor | None,
    constraints: Tensor | None,
    bos_token: int | None,
) -> list[list[dict[str, Tensor]]]:
    """What `SequenceGenerator._generate` returns, by both models.

    Raises:
        ValueError: the call has what cannot be had here; the message says what.
    """
    options = here.options
    plan = _planned(here, generator, sample, prefix_tokens, constraints)
    small = nullcontext() if options.small is None else routed(options.small)
    with engine.running(plan), routed(generator.model.models[0]), small:
        found, counts, left_off = _decode(generator, plan, sample["net_input"], options, bos_token)
    _count(here, counts)
    note_served(generator, plan, (*plan.left_off, *left_off), ())
    return found


def rests(
    here: Drafting,
    generator: Any,
    sample: Any,
    prefix_tokens: Tensor | None,
    constraints: Tensor | None,
) -> bool:
    """Whether a call is better the large model's own, as no round of it would draft.

    Raises:
        ValueError: as `generate`.
    """
    if not _adaptive(here.options):
        return False
    plan = _planned(here, generator, sample, prefix_tokens, constraints)
    pace = _pace(generator, here.options, plan.sentences)
    return pace is not None and pace.total > 0.0 and not pace.may_draft()


def of_large_alone(
    here: Drafting,
    generator: Any,
    found: list[list[dict[str, Tensor]]],
    steps: Sequence[tuple[int, float]],
    seconds: float,
) -> list[list[dict[str, Tensor]]]:
    """What `generate` returns of a call that rested; what it took is noted.

    steps: rows and seconds of each. seconds: of the whole call, its encoder included.
    """
    pace = _pace(generator, here.options, len(found))
    assert pace is not None  # or it has not rested
    for rows, of_step in steps[1:]:  # beside the prompt, as in rounds
        pace.note(False, rows, rows, of_step)
    lengths = [len(hypothesis["tokens"]) for (hypothesis,) in found]
    pace.note_call(False, sum(lengths), seconds)
    _count(here, [Counts(tokens=length, large_calls=length) for length in lengths])
    return [
        [hypothesis | {"attention": torch.empty(0, dtype=torch.float32, device="cpu")}]
        for (hypothesis,) in found
    ]


def _planned(
    here: Drafting,
    generator: Any,
    sample: Any,
    prefix_tokens: Tensor | None,
    constraints: Tensor | None,
) -> Plan:
    """How a call runs; ValueError where it has what cannot be had here."""
    check(generator, here.options)
    for what, given in {"a prefix": prefix_tokens, "constraints": constraints}.items():
        if given is not None:
            raise _impossible(what)
    try:
        plan = replace(decide.decide(generator, sample, constraints), method="big-little decoding")
    except Unsupported as unsupported:
        raise ValueError(f"big-little decoding: {unsupported.reason}") from None
    if here.options.small is not None:
        source = sample["net_input"]["src_tokens"]
        _check_positions(here.options.small, source.shape[1], longest_of(generator, source))
    return plan


def _pace(generator: Any, options: Options, sentences: int) -> Pace | None:
    """The costs by which a call drafts; None where it always does."""
    if not _adaptive(options):
        return None
    return pace_of(generator.model.models[0], options.small, options.layers, sentences)


def _adaptive(options: Options) -> bool:
    return options.lossless if options.adaptive is None else options.adaptive


def _count(here: Drafting, counts: Sequence[Counts]) -> None:
    total = {
        name: sum(getattr(each, name) for each in counts) for name in Counts.__dataclass_fields__
    }
    here.counts.update(total)
    engine.decoded_together(total)


def _decode(
    generator: Any,
    plan: Plan,
    net_input: dict[str, Tensor],
    options: Options,
    bos_token: int | None,
) -> tuple[list[list[dict[str, Tensor]]], list[Counts], tuple[str, ...]]:
    """The hypotheses, counts of each sentence, and what was left off."""
    source, end = net_input["src_tokens"], generator.eos
    longest = longest_of(generator, source)
    start = source.new_full((plan.sentences, 1), end if bos_token is None else bos_token)
    large = _Whole(generator.model, net_input, start, longest, generator.temperature)
    if options.layers is None:
        small = _Whole(
            EnsembleModel([options.small]), net_input, start, longest, generator.temperature
        )
    else:
        small = _FirstLayers(large, options.layers)
    policy = Noting(Likeliest(0.0 if options.lossless else options.rollback))
    together = Bild(
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
        pace=_pace(generator, options, plan.sentences),
    )
    written: list[list[int]] = cast(Any, together.run()[:, 1:]).tolist()
    texts = [
        tokens[: counts.tokens] for tokens, counts in zip(written, together.counts, strict=True)
    ]
    scores = policy.scores_of(texts)
    found = [
        [_hypothesis(generator, *each, source.device)] for each in zip(texts, scores, strict=True)
    ]
    return (
        found,
        together.counts,
        large.left_off + (small.left_off if isinstance(small, _Whole) else ()),
    )


def _check_positions(small: Any, source: int, longest: int) -> None:
    encoder = getattr(small, "encoder", None)
    for what, wanted, held in (
        ("sources", source, source if encoder is None else encoder.max_positions()),
        ("hypotheses", longest + 1, small.max_decoder_positions()),
    ):
        if wanted > held:
            raise ValueError(
                f"big-little decoding of {what} of {wanted} tokens: the small model reads {held} at most"
            )


def _hypothesis(
    generator: Any, tokens: list[int], scores: list[float], device: torch.device
) -> dict[str, Tensor]:
    """What fairseq makes of a text: scores of tokens are differences of sums in fp32."""
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


class _Whole:
    """A model that makes all its layers' steps from the weights (`decoding.speculative.bild.Model`).

    Args:
        ensemble: fairseq's, of one model.
        start: (B, 1) int64.
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
        """Encode the sources, which a model that never drafts does not, and begin all texts."""
        (model,), sentences = self.ensemble.models, len(self.start)
        (encoded,), self.left_off = encode(self.ensemble, self.net_input)
        self.member = Member(model, encoded, sentences, 1, self.steps)
        self.stepper = Stepper([self.member], sentences, 1, self.steps, self.start.device)
        prediction, _ = self.stepper.step(self.start)
        self.member.fuse()
        if self.member.fused is not None and not self.member.fused.ready:
            self.stepper.step(
                self.start.repeat(1, 2)
            )  # made both ways for once; what comes is written over it
        if self.member.fused is None or prediction.logits is None:
            raise ValueError(
                "big-little decoding needs decode steps from the weights, which run any tokens of any text; of "
                f"{type(self.member.model).__name__}, {self.member.left_off}"
            )
        return self.log_probs(prediction.logits)

    @property
    def fused(self) -> FusedDecoder:
        assert self.member.fused is not None
        return self.member.fused

    def log_probs(self, logits: Tensor) -> Tensor:
        """As fairseq makes them of logits (N, V), which are not changed."""
        logits = logits if self.temperature == 1.0 else logits / self.temperature
        found = torch.log_softmax(logits, -1, dtype=torch.float32)
        without_nan(found)
        return found

    def extend(self, spans: Sequence[Span]) -> Tensor:
        return self.log_probs(self.fused.extend(spans))

    def keep(self, rows: Tensor) -> None:
        self.stepper.keep(rows, in_order=False)


class _FirstLayers:
    """The first layers of a model, over its own keys and values (`decoding.speculative.bild.Model`)."""

    def __init__(self, whole: _Whole, layers: int) -> None:
        self.whole, self.layers = whole, layers

    def prefill(self) -> None:
        """The start of each text is run once more, to the layer of the exit."""
        self.step = early_exit(self.whole.fused.step, self.layers)

    def extend(self, spans: Sequence[Span]) -> Tensor:
        return self.whole.log_probs(self.whole.fused.extend(spans, self.step))

    def keep(self, rows: Tensor) -> None:
        """They are the whole model's, which has kept them."""
