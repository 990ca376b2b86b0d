"""ctypes structures and calls for multi-step decoding in C, as declared in `search.h`.

Addresses are those of tensors; the code that fills these structures keeps the tensors alive.
"""

import ctypes
from typing import ClassVar

from fastgen.ops.native import Library
from fastgen.ops.native.step import DOUBLE, INTEGER, POINTER, Norm, Weight, fields

GOES_ON, OVER, LEAVING, UNDECIDED, NO_ROW, NO_MEMORY = range(6)


class Decoder(ctypes.Structure):
    """A decoder from token ids to logits.

    Attributes:
        step: the `Step` of the decoder's layers; C fills its `x` and `stream`.
        seen: its `Seen` records, one call; the number of keys of the text grows.
        tokens: (V, C), rows `token_row` apart.
        positions: (P, C), rows `position_row` apart, or NULL.
        position: (R,) int64, the rows of `positions` for the next tokens.
        padding: the padding token, or -1.
        padding_row: the row of `positions` for padding tokens; -1 for the row before the current
            one.
        scale: the factor of token embeddings.
        embedded: the norm after the embedding: of tokens alone if `norm_tokens`, else of the sum
            with the position.
        first: the norm before the first sublayer.
        work: approximate multiplications per row in a product.
        head: the packed output projection.
        head_scale: the factor of its input.
        softcap: the soft cap of the logits; 0 for none.
        logits: (R, V) fp32, with values rounded to the step's dtype; (2 R, V) with `bounds`.
        bounds: `LogitBounds` of the head, or NULL.
        threads: the largest number of threads.
        began: (steps,) float64, when each step began, in seconds.
    """

    __slots__ = ()  # setting an unknown field raises
    _fields_: ClassVar = [
        *fields(POINTER, "step seen tokens positions position"),
        *fields(INTEGER, "vocabulary token_row position_row padding padding_row"),
        ("scale", DOUBLE),
        *fields(Norm, "embedded first"), *fields(INTEGER, "norm_tokens work"), ("head", Weight),
        *fields(DOUBLE, "head_scale softcap"), *fields(POINTER, "logits bounds"),
        ("threads", INTEGER), ("began", POINTER),
    ]  # fmt: skip


class LogitBounds(ctypes.Structure):
    """A copy of the head in int8, and bounds of the logits' errors (`ops.logit_bounds`).

    Attributes:
        bytes: the head in int8, with its own bias; its `panels` are NULL if there is no copy.
        errors: (V,) fp32, bounds of the norms of the rounding errors of the head's rows.
        weight: (V, C), the head as it is, rows `weight_row` apart.
        longest: bound of the norms of the head's rows.
        bias: bound of the magnitude of its bias.
        most: candidates of a row of x beyond which all logits are computed.
        counts: (3,) int64, steps that bounds may decide, those that were tried, and those of them
            that needed all logits; C adds to them.
    """

    __slots__ = ()  # setting an unknown field raises
    _fields_: ClassVar = [
        ("bytes", Weight), *fields(POINTER, "errors weight"), ("weight_row", INTEGER),
        *fields(DOUBLE, "longest bias"), ("most", INTEGER), ("counts", POINTER),
    ]  # fmt: skip


class NGrams(ctypes.Structure):
    """N-grams that must not be repeated.

    Attributes:
        n: the size of the n-grams.
        shortest: the length of a text from which on its n-grams are checked.
        source: (B or 1, S) int64, the text whose n-grams count; NULL for the generated text itself.
        source_b: stride of `source`; 0 if all sentences share one source.
        source_length: S.
    """

    __slots__ = ()  # setting an unknown field raises
    _fields_: ClassVar = [
        *fields(INTEGER, "n shortest"), ("source", POINTER),
        *fields(INTEGER, "source_b source_length"),
    ]  # fmt: skip


class Update(ctypes.Structure):
    """A change of a row's scores: a repetition penalty, or offsets of some tokens.

    Attributes:
        penalty: the penalty of the tokens of the row's text; 0 for offsets.
        starts: (R,) int64, at least 0, the first token of each text that is penalised.
        tokens: (count,) int64, distinct.
        offsets: (count,) fp32, added to the scores of `tokens`.
    """

    __slots__ = ()  # setting an unknown field raises
    _fields_: ClassVar = [
        ("penalty", DOUBLE), *fields(POINTER, "starts tokens offsets"), ("count", INTEGER),
    ]  # fmt: skip


class Texts(ctypes.Structure):
    """The texts of a search, and the tokens that are banned from them.

    Attributes:
        ids: (B, M, L) int64, with strides `ids_b` and `ids_m`.
        length: the current length of the texts.
        prompt: the length of the prompt.
        ends_at: the length at which all texts end.
        ends: (end_count,) int64, the tokens that end a text.
        ngrams: (ngram_count,) `NGrams`.
        updates: (update_count,) `Update`, applied in this order; not in beam search.
        banned: a token mask of one row, banned for all texts; or NULL.
        sets: (R, W) token masks, scratch memory if any token is banned.
        leave: the number of finished sentences at which C returns, so that they leave; 0 for never.
        steps: the largest number of steps.
        made: the number of steps made; set by C.
        run: the number of steps that the decoder ran; set by C.
    """

    __slots__ = ()  # setting an unknown field raises
    _fields_: ClassVar = [
        ("ids", POINTER), *fields(INTEGER, "ids_b ids_m length prompt ends_at"),
        *fields(POINTER, "ends ngrams updates"),
        *fields(INTEGER, "end_count ngram_count update_count"),
        *fields(POINTER, "banned sets"), *fields(INTEGER, "leave steps made run"),
    ]  # fmt: skip


class Draws(ctypes.Structure):
    """How tokens are drawn: filters of the scores, in this order, and the random numbers.

    Attributes:
        temperature: the divisor of the scores.
        top_p: the probability mass of the tokens that are kept; 1 for all.
        min_p: the least share of the highest probability that a token must have.
        top_k: the number of highest scores that are kept, before top-p; 0 for all.
        noise: (steps, R, V) fp32, exponential noise; NULL to make it from `generator`.
        generator: the state of a `torch.Generator` of the CPU; C advances it.
    """

    __slots__ = ()  # setting an unknown field raises
    _fields_: ClassVar = [
        *fields(DOUBLE, "temperature top_p min_p"), ("top_k", INTEGER),
        *fields(POINTER, "noise generator"),
    ]  # fmt: skip


class SlotMask(ctypes.Structure):
    """The additive mask that tells which KV slots of the text each beam sees.

    Attributes:
        mask: (B, M, N) fp32, with strides `mask_b` and `mask_m`.
        own: (M, M) fp32, the mask of the newest slots.
        prefix: the number of slots before those of generated tokens.
        filled: the number of filled slots after the prefix.
        room: the number of slots after the prefix.
        open: the number of slots already opened for the next tokens: 0 or M.
    """

    __slots__ = ()  # setting an unknown field raises
    _fields_: ClassVar = [
        *fields(POINTER, "mask own"),
        *fields(INTEGER, "mask_b mask_m prefix filled room open"),
    ]


class Beams(ctypes.Structure):
    """Beam search by the rules of `decoding.search.finishing_rules.TransformersRule`.

    Attributes:
        origins: (B, M, T) int32, the rows that tokens came from.
        finished_ids: the ids of the finished hypotheses, a table like `Texts.ids`.
        finished_origins: the origins of the finished hypotheses, a table like `origins`.
        scores: (B, M) fp32, the running scores.
        finished_scores: (B, M) fp32.
        finished_done: (B, M) bool, which slots hold a finished hypothesis.
        improvable: (B,) bool, whether a running beam can still become a better hypothesis.
        flags: (4, B) bool, as in `decoding.search.beam_search.Choice`.
        sentences: (B,) int64, the sentences' indices in the whole batch.
        slot_mask: the mask of the KV slots.
        candidates: K.
        stops_early: whether a sentence is finished once it has M hypotheses.
        far: the length by which running beams are judged; 0 for their current length.
        mask_value: added to scores that must not be chosen.
        penalty: the length penalty.
    """

    __slots__ = ()  # setting an unknown field raises
    _fields_: ClassVar = [
        *fields(POINTER, "origins finished_ids finished_origins"),
        *fields(INTEGER, "origins_b origins_m finished_ids_b finished_ids_m "
                     "finished_origins_b finished_origins_m"),
        *fields(POINTER, "scores finished_scores finished_done improvable flags sentences"),
        ("slot_mask", SlotMask), *fields(INTEGER, "candidates stops_early far"),
        *fields(DOUBLE, "mask_value penalty"),
    ]  # fmt: skip


class FirstFinished(ctypes.Structure):
    """Beam search by the rules of `decoding.search.first_finished`.

    Texts begin with one token, and one token ends them.

    Attributes:
        scores: (B, M, T) fp32, the running score after each step.
        origins: (B, M, T) int64, the beams that each text came from; or NULL.
        over: (B,) bool, sentences that have all their hypotheses.
        counts: (B,) int64, the number of their hypotheses.
        places: (N, 3) int64, sentence, beam and step of each finished hypothesis.
        finished_tokens: (N, width) int64.
        finished_origins: (N, width) int64, or NULL.
        finished_scores: (N, width) fp32.
        width: the row length of the finished tables.
        found: the number of finished hypotheses.
        slot_mask: the mask of the KV slots.
    """

    __slots__ = ()  # setting an unknown field raises
    _fields_: ClassVar = [
        *fields(POINTER, "scores origins"),
        *fields(INTEGER, "scores_b scores_m origins_b origins_m"),
        *fields(POINTER, "over counts places finished_tokens finished_origins finished_scores"),
        *fields(INTEGER, "width found"), ("slot_mask", SlotMask),
    ]  # fmt: skip


SIZE = sum(
    map(
        ctypes.sizeof,
        (LogitBounds, Decoder, NGrams, Update, Texts, Draws, SlotMask, Beams, FirstFinished),
    )
)
"""The value that `search_size` of a library returns if its structures match these."""


def search_beams(by: Library, threads: int, decoder: Decoder, texts: Texts, beams: Beams) -> int:
    """Run decode steps of a beam search in C.

    Returns:
        Why the steps stopped: GOES_ON (their number or time is used up), OVER (the search is over),
        LEAVING (enough sentences have finished), UNDECIDED (Python has to choose by the logits),
        NO_ROW (a token is not a row of the embedding) or NO_MEMORY.
    """
    records = (ctypes.byref(each) for each in (decoder, texts, beams))
    return by.search_beams(by.run, threads, *records)


def search_first_finished(
    by: Library, threads: int, decoder: Decoder, texts: Texts, job: FirstFinished
) -> int:
    """Run decode steps of a beam search that ends a sentence with its M-th hypothesis.

    Returns:
        Why the steps stopped, as `search_beams`.
    """
    records = (ctypes.byref(each) for each in (decoder, texts, job))
    return by.search_first_finished(by.run, threads, *records)


def search_rows(
    by: Library, threads: int, decoder: Decoder, texts: Texts, draws: Draws | None,
    slot_mask: SlotMask | None, running: int, parents: int, room: int, pad: int,
) -> int:  # fmt: skip
    """Run decode steps of a greedy search, or of sampling.

    Args:
        draws: how tokens are drawn; None for the most probable ones.
        slot_mask: the mask of the KV slots of each row; None if each sentence has one row.
        running: address of (R,) bool, the texts that have not ended.
        parents: address of (R,) int64, each row's index among the rows of its sentence.
        room: address of (R,) int64, scratch memory.
        pad: the token that ended texts continue with; negative for their own tokens.

    Returns:
        Why the steps stopped, as `search_beams`.
    """
    of_draws, of_sight = (None if x is None else ctypes.byref(x) for x in (draws, slot_mask))
    return by.search_rows(
        by.run, threads, ctypes.byref(decoder), ctypes.byref(texts), of_draws, of_sight,
        running, parents, room, pad,
    )  # fmt: skip
