"""What whole steps of a search in C are given, as `search.h` declares it, and the calls.

Addresses are those of tensors that whoever fills these structures holds.
"""

import ctypes
from typing import ClassVar

from fastgen.ops.native import Library
from fastgen.ops.native.step import DOUBLE, INTEGER, POINTER, Norm, Weight, of

GOES_ON, OVER, LEAVING, UNDECIDED, NO_ROW, NO_MEMORY = range(6)


class Decoder(ctypes.Structure):
    """A decoder from token ids to logits."""

    _fields_: ClassVar = [
        *of(POINTER, "step seen tokens positions position"),
        *of(INTEGER, "vocabulary token_row position_row padding padding_row"), ("scale", DOUBLE),
        *of(Norm, "embedded first"), *of(INTEGER, "norm_tokens work"), ("head", Weight), ("head_scale", DOUBLE),
        ("logits", POINTER), ("threads", INTEGER), ("began", POINTER),
    ]  # fmt: skip


class NGrams(ctypes.Structure):
    """N-grams that may not come again."""

    _fields_: ClassVar = [
        *of(INTEGER, "n shortest"), ("source", POINTER), *of(INTEGER, "source_b source_length"),
    ]  # fmt: skip


class Texts(ctypes.Structure):
    """The texts of a search, and what may not come next."""

    _fields_: ClassVar = [
        ("ids", POINTER), *of(INTEGER, "ids_b ids_m length prompt ends_at"), *of(POINTER, "ends ngrams"),
        *of(INTEGER, "end_count ngram_count"), *of(POINTER, "banned sets"), *of(INTEGER, "leave steps made run"),
    ]  # fmt: skip


class Sight(ctypes.Structure):
    """What beams see of the slots of the text."""

    _fields_: ClassVar = [
        *of(POINTER, "mask own"),
        *of(INTEGER, "mask_b mask_m prefix filled room open"),
    ]


class Beams(ctypes.Structure):
    """Beam search by the rules of `decoding.search.finishing_rules.TransformersRule`."""

    _fields_: ClassVar = [
        *of(POINTER, "origins finished_ids finished_origins"),
        *of(INTEGER, "origins_b origins_m finished_ids_b finished_ids_m finished_origins_b finished_origins_m"),
        *of(POINTER, "scores finished_scores finished_done improvable flags sentences"), ("sight", Sight),
        *of(INTEGER, "candidates stops_early far"), *of(DOUBLE, "never penalty"),
    ]  # fmt: skip


class FirstFinished(ctypes.Structure):
    """Beam search by the rules of `decoding.search.first_finished`."""

    _fields_: ClassVar = [
        *of(POINTER, "scores origins"), *of(INTEGER, "scores_b scores_m origins_b origins_m"),
        *of(POINTER, "over counts places finished_tokens finished_origins finished_scores"),
        *of(INTEGER, "width found"), ("sight", Sight),
    ]  # fmt: skip


SIZE = sum(map(ctypes.sizeof, (Decoder, NGrams, Texts, Sight, Beams, FirstFinished)))
"""What `search_size` of a library returns, if it has the same structures."""


def search_beams(by: Library, threads: int, decoder: Decoder, texts: Texts, beams: Beams) -> int:
    """Make steps of a beam search; return why there are no more."""
    given = (ctypes.byref(each) for each in (decoder, texts, beams))
    return by.search_beams(by.run, threads, by.wait, *given)


def search_first_finished(
    by: Library, threads: int, decoder: Decoder, texts: Texts, job: FirstFinished
) -> int:
    """Make steps of a beam search that ends a sentence with its M-th hypothesis; return why there are no more."""
    given = (ctypes.byref(each) for each in (decoder, texts, job))
    return by.search_first_finished(by.run, threads, by.wait, *given)


def search_greedily(
    by: Library, threads: int, decoder: Decoder, texts: Texts, running: int, room: int, pad: int
) -> int:
    """Make steps of a greedy search; return why there are no more.

    Args:
        running: address of (R,) bool, texts that have not ended. room: of (R,) int64 that is written to.
        pad: what ended ones go on with; a negative number for their own tokens.
    """
    return by.search_greedily(
        by.run, threads, by.wait, ctypes.byref(decoder), ctypes.byref(texts), running, room, pad
    )
