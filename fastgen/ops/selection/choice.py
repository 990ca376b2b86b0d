"""Selection of running and finished beams in a beam search step, in one launch.

In torch this takes up to fifty operations on a few hundred numbers, and each costs a device as much
as a large one. Here one program of a kernel handles a sentence: it ranks the candidates that
continue and the hypotheses that finish. For transformers' rules the last program to finish decides
for all sentences whether the search is over.

Sources: Wang et al. 2021 (LightSeq), section 2.1 (all operations between two matrix products in one
launch). The rules are those of `decoding.search.finishing_rules` and
`decoding.search.first_finished`, whose torch code is the reference.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.ops.dispatch import (
    constexpr,
    counters,
    jit,
    launch,
    power_of_two,
    tl,
    use_triton,
)
from fastgen.ops.selection import kbest, kbest_kernels
from fastgen.ops.selection.kbest import LogitsUpdates
from fastgen.ops.selection.kbest_kernels import index_of, key_of, merge, value_of

MOST = 1024
"""Largest number of candidates plus finished hypotheses of a sentence that a program ranks."""


class Candidates(NamedTuple):
    """The candidates of each sentence.

    Attributes:
        values: (B, K) fp32, descending.
        beam: (B, K) int64, the beam that each candidate extends.
        token: (B, K) int64.
        hits: (B, K) bool, whether the candidate ends.
    """

    values: Tensor
    beam: Tensor
    token: Tensor
    hits: Tensor


class State(NamedTuple):
    """The state of a search, updated in place.

    Attributes:
        scores: (B, M) fp32, the running scores.
        finished: (B, M) fp32, the scores of the finished hypotheses, descending.
        done: (B, M) bool, which slots hold a finished hypothesis.
        improvable: (B,) bool, whether a running beam can still become a better hypothesis.
        over: (1,) bool, whether the search is over; finished hypotheses do not change after that.
    """

    scores: Tensor
    finished: Tensor
    done: Tensor
    improvable: Tensor
    over: Tensor


class Rules(NamedTuple):
    """The numbers of the finishing rules.

    Attributes:
        mask_value: added to scores that must not be chosen.
        stops_early: whether a sentence is finished once it has M hypotheses.
        powers: (N,) fp32, each length to the power of the length penalty, as returned by
            `decoding.search.finishing_rules.length_powers`.
        far: the length by which running beams are judged; 0 for their current length.
    """

    mask_value: float
    stops_early: bool
    powers: Tensor
    far: int


class Step(NamedTuple):
    """What the choice of a step depends on besides its candidates.

    Attributes:
        ends: (E,) int64, the tokens that end a hypothesis; None for none.
        last: whether all candidates end, whatever their token.
        sentences: (B,) int64, the index of each sentence in the original batch.
        state: the state before the step.
        rules: the finishing rules.
        new_tokens: (1,) int64, the number of new tokens of a candidate.
    """

    ends: Tensor | None
    last: bool
    sentences: Tensor
    state: State
    rules: Rules
    new_tokens: Tensor


class Chosen(NamedTuple):
    """The result of `choose_`.

    Attributes:
        parents: (B, M) int64, the beams that the running beams continue.
        tokens: (B, M) int64, the next tokens of the running beams.
        rows: (B, M) int64, `parents` as rows of the original batch.
        order: (B, M) int64, the finished hypotheses: an index into M old ones, then K candidates.
        beam: (B, K) int64, the beam that each candidate extends.
        token: (B, K) int64, the token of each candidate.
        row: (B, K) int64, `beam` as rows of the original batch.
        flags: (4, B) bool, as in `decoding.search.beam_search.Choice`.
    """

    parents: Tensor
    tokens: Tensor
    rows: Tensor
    order: Tensor
    beam: Tensor
    token: Tensor
    row: Tensor
    flags: Tensor


def covered(scores: Tensor, candidates: int) -> bool:
    """Return whether the kernel covers running scores (B, M) and this number of candidates."""
    return scores.dtype == torch.float32 and scores.shape[1] + candidates <= MOST


def choose_(values: Tensor, indices: Tensor, vocabulary: int, step: Step) -> Chosen:
    """Choose the running beams and finished hypotheses of a step; updates its state in place.

    Of equal values the first candidate wins, and an old hypothesis wins over a candidate.

    Args:
        values: (B, K) fp32, of the candidates, descending.
        indices: (B, K) int64, beam * V + token, as `ops.selection.kbest` returns them.
        vocabulary: V.
        step: what else the choice depends on.
    """
    b, k = values.shape
    arguments, constants, chosen = _arguments(b, k, vocabulary, step)
    launch(
        _choose_kernel, (b,), values.contiguous(), indices.contiguous(), *arguments, **constants,
        CANDIDATES=power_of_two(k), num_warps=1 if step.state.scores.shape[1] + k <= 128 else 4,
    )  # fmt: skip
    return chosen


def kbest_and_choose_(logits: Tensor, k: int, updates: LogitsUpdates, step: Step) -> Chosen:
    """Return `choose_` of the k best continuations, in as many launches as these need.

    Args:
        logits: (B, M, V), as `kbest` takes them.
        k: the number of candidates.
        updates: as in `kbest`; the running scores are those of the state.
        step: as in `choose_`.
    """
    scores, vocabulary = step.state.scores, logits.shape[2]
    changes, banned, forced = updates
    changed = 0 if changes is None else changes.tokens.shape[1]
    supported = lambda: kbest.covered(logits, scores, k, changed)  # noqa: E731
    if not use_triton("kbest", supported, logits, scores, banned, forced):
        values, indices, _ = kbest.kbest(logits, scores, k, updates)
        return choose_(values, indices, vocabulary, step)
    merging = kbest_kernels.first_launch(logits, scores, k, None, 1.0, *updates)
    arguments, constants, chosen = _arguments(len(scores), k, vocabulary, step)
    constants["ALL_BEAMS"] = merging.constants["BEAMS"]
    launch(
        _kbest_and_choose_kernel, (len(scores),), merging.values, merging.indices, merging.pointers,
        merging.counts, merging.strides, arguments, **(merging.constants | constants),
    )  # fmt: skip
    return chosen


def _arguments(
    b: int, k: int, vocabulary: int, step: Step
) -> tuple[tuple[object, ...], dict[str, int], Chosen]:
    """Return what the kernel takes besides the candidates, its constants, and its results."""
    ends, last, sentences, state, rules, new_tokens = step
    m = state.scores.shape[1]
    running, candidates = sentences.new_empty(4, b, m), sentences.new_empty(3, b, k)
    parents, tokens, rows, order = running.unbind()
    beam, token, row = candidates.unbind()
    flags = state.done.new_empty(4, b)
    arguments = (
        sentences, sentences if ends is None else ends, state.scores, state.finished,
        _bytes(state.done), _bytes(state.improvable), _bytes(state.over), rules.powers, new_tokens,
        counters(sentences.device, 1), running, candidates, _bytes(flags), k, vocabulary,
        0 if ends is None else len(ends), int(last), rules.far, rules.mask_value,
    )  # fmt: skip
    constants = {
        "BEAMS": m, "ALL": power_of_two(m + k), "EARLY": rules.stops_early,
        "DIVIDED": sentences.device.type != "cuda",
    }  # fmt: skip
    return arguments, constants, Chosen(parents, tokens, rows, order, beam, token, row, flags)


class Slots(NamedTuple):
    """The finished hypotheses of a search by `decoding.search.first_finished`.

    Attributes:
        ignored: (B, M) bool, the candidates that do not take part in a step.
        counts: (B,) int64, the number of finished hypotheses.
        lengths: (B, M) int64, their lengths.
    """

    ignored: Tensor
    counts: Tensor
    lengths: Tensor


class FirstChosen(NamedTuple):
    """The result of `choose_first_`.

    Attributes:
        scores: (B, M) fp32, the scores of the running beams.
        tokens: (B, M) int64, their next tokens.
        beams: (B, M) int64, the beams that they continue.
        order: (B, M) int64, the finished rows: an index into M old ones, then K candidates.
        over: (B,) bool, which sentences are over.
    """

    scores: Tensor
    tokens: Tensor
    beams: Tensor
    order: Tensor
    over: Tensor


def first_covered(scores: Tensor, beams: int) -> bool:
    """Return whether the kernel covers candidates (B, K) of this number of beams."""
    return scores.dtype == torch.float32 and beams <= scores.shape[1] <= min(2 * beams, MOST)


def choose_first_(
    scores: Tensor,
    tokens: Tensor,
    beams: Tensor,
    slots: Slots,
    end: int,
    length: Tensor,
    last: bool,
) -> FirstChosen:
    """Choose beams and hypotheses where a sentence ends with its M-th hypothesis.

    Updates `slots` in place.

    Args:
        scores: (B, K) fp32, of the candidates, best first; M <= K <= 2 * M.
        tokens: (B, K) int64, of the candidates.
        beams: (B, K) int64, the beams that the candidates extend.
        slots: the finished hypotheses before the step.
        end: the end-of-sequence token.
        length: (1,) int64, the length of a hypothesis that ends in this step.
        last: whether the texts have reached their maximum length; a sentence with a candidate that
            ends is then over.
    """
    (b, k), m = scores.shape, slots.ignored.shape[1]
    running, chosen, over = (
        scores.new_empty(b, m),
        tokens.new_empty(3, b, m),
        slots.ignored.new_empty(b),
    )
    launch(
        _choose_first_kernel, (b,), scores.contiguous(), tokens.contiguous(), beams.contiguous(),
        _bytes(slots.ignored), slots.counts, slots.lengths, length, running, chosen, _bytes(over),
        k, end, BEAMS=m, SLOTS=power_of_two(m), CANDIDATES=power_of_two(k), LAST=last,
        num_warps=1 if k <= 32 else 4,
    )  # fmt: skip
    token, beam, order = chosen.unbind()
    return FirstChosen(running, token, beam, order, over)


def _bytes(flags: Tensor) -> Tensor:
    return flags.view(torch.uint8)


@jit("candidates", "vocabulary", "ends", "last", "far")
def _choose_kernel(
    values_ptr, indices_ptr, sentences_ptr, ends_ptr, scores_ptr, finished_ptr, done_ptr,
    improvable_ptr, over_ptr, powers_ptr, new_tokens_ptr, ended_ptr, running_ptr, candidates_ptr,
    flags_ptr, candidates, vocabulary, ends, last, far, mask_value, BEAMS: constexpr,
    CANDIDATES: constexpr, ALL: constexpr, EARLY: constexpr, DIVIDED: constexpr,
):  # fmt: skip
    """Rank the candidates and finished hypotheses of one sentence."""
    sentence, sentences = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    first_row = tl.load(sentences_ptr + sentence) * BEAMS
    new_tokens = tl.load(new_tokens_ptr)
    power = tl.load(powers_ptr + new_tokens)
    far_power = tl.load(powers_ptr + tl.where(far > 0, far, new_tokens))
    improvable = tl.load(improvable_ptr + sentence) != 0

    slot, first_candidate = tl.arange(0, ALL), sentence * candidates
    old, new = slot < BEAMS, (slot >= BEAMS) & (slot < BEAMS + candidates)
    finished = tl.load(finished_ptr + sentence * BEAMS + slot, mask=old, other=0.0)
    done = tl.load(done_ptr + sentence * BEAMS + slot, mask=old, other=0) != 0
    ending = tl.load(values_ptr + first_candidate + slot - BEAMS, mask=new, other=0.0)
    last_token = tl.load(indices_ptr + first_candidate + slot - BEAMS, mask=new, other=0)
    ended = _ends(last_token % vocabulary, ends_ptr, ends, last) & new & (slot < 2 * BEAMS)
    candidate = tl.arange(0, CANDIDATES)
    inside = candidate < candidates
    value = tl.load(values_ptr + first_candidate + candidate, mask=inside, other=0.0)
    index = tl.load(indices_ptr + first_candidate + candidate, mask=inside, other=0)
    beam, token = index // vocabulary, index % vocabulary
    hit = _ends(token, ends_ptr, ends, last) | (candidate >= candidates)
    column = sentences.to(tl.int64) * candidates  # from one row of `candidates_ptr` to the next
    candidates_ptr += first_candidate + candidate
    tl.store(candidates_ptr, beam, mask=inside)
    tl.store(candidates_ptr + column, token, mask=inside)
    tl.store(candidates_ptr + 2 * column, first_row + beam, mask=inside)
    tl.debug_barrier()  # finish all reads before other threads write the same addresses

    lowest = -0x7FFFFFFFFFFFFFFF
    key = tl.where(inside, key_of(tl.where(hit, value + mask_value, value), candidate), lowest)
    first = value_of(tl.max(key, 0))
    column = sentences.to(tl.int64) * BEAMS
    running_ptr += sentence * BEAMS
    for i in range(BEAMS):
        best = tl.max(key, 0)
        key = tl.where(key == best, lowest, key)
        chosen = tl.load(indices_ptr + first_candidate + index_of(best))
        tl.store(running_ptr + i, chosen // vocabulary)
        tl.store(running_ptr + column + i, chosen % vocabulary)
        tl.store(running_ptr + 2 * column + i, first_row + chosen // vocabulary)
        tl.store(scores_ptr + sentence * BEAMS + i, value_of(best))

    full = tl.sum(tl.where(old & (done == 0), 1, 0), 0) == 0
    if DIVIDED:
        ranked = ending / power
    else:
        ranked = ending * power
    if EARLY:
        ranked = tl.where(full, ranked + mask_value, ranked)
    ranked = tl.where(improvable, ranked, ranked + mask_value)
    ranked = tl.where(ended, ranked, ranked + mask_value)
    done = tl.where(old, done, ended)
    ranked_mask = old | (new & (tl.load(over_ptr) == 0))
    key = tl.where(ranked_mask, key_of(tl.where(old, finished, ranked), slot), lowest)
    changed, open_slots, worst = (
        tl.full([], 0, tl.int32),
        tl.full([], 0, tl.int32),
        tl.full([], 0.0, tl.float32),
    )
    for i in range(BEAMS):
        best = tl.max(key, 0)
        key = tl.where(key == best, lowest, key)
        source, worst = index_of(best), value_of(best)
        is_done = tl.sum(tl.where(slot == source, done.to(tl.int32), 0), 0)
        changed += tl.where(source != i, 1, 0)
        open_slots += 1 - is_done
        tl.store(running_ptr + 3 * column + i, source.to(tl.int64))
        tl.store(finished_ptr + sentence * BEAMS + i, worst)
        tl.store(done_ptr + sentence * BEAMS + i, is_done.to(tl.uint8))

    possible = first / far_power
    if not DIVIDED:
        possible = first * far_power
    better = ((open_slots < BEAMS) & (possible > worst)) | (
        (open_slots > 0) & (possible > mask_value)
    )
    still_improvable = (improvable & better).to(tl.uint8)
    tl.store(improvable_ptr + sentence, still_improvable)
    tl.store(flags_ptr + sentence, (changed > 0).to(tl.uint8))
    tl.store(flags_ptr + sentences + sentence, still_improvable)
    tl.store(flags_ptr + 2 * sentences + sentence, (open_slots == 0).to(tl.uint8))
    tl.store(flags_ptr + 3 * sentences + sentence, tl.min(hit.to(tl.int32), 0).to(tl.uint8))
    tl.debug_barrier()  # all writes of this program precede its increment of the counter
    if tl.atomic_add(ended_ptr, 1, sem="acq_rel") == sentences - 1:
        _decide_over(flags_ptr, over_ptr, sentences, EARLY, 128)
        tl.store(ended_ptr, 0)  # reset for the next launch


@jit("counts", "choosing")
def _kbest_and_choose_kernel(
    values_ptr, indices_ptr, pointers, counts, strides, choosing, K: constexpr, KEPT: constexpr,
    GROUP: constexpr, SLOTS: constexpr, ALL_BEAMS: constexpr, BEAMS: constexpr, PARTS: constexpr,
    CANDIDATES: constexpr, CHANGES: constexpr, BIAS: constexpr, TAKEN_OUT: constexpr,
    BANNED: constexpr, FORCED: constexpr, SUMMED: constexpr, WITHOUT_NAN: constexpr, ALL: constexpr,
    EARLY: constexpr, DIVIDED: constexpr,
):  # fmt: skip
    """Rank the k best of one sentence, then choose among them."""
    merge(
        *pointers, *counts, *strides, K, KEPT, GROUP, SLOTS, ALL_BEAMS, PARTS, CANDIDATES, CHANGES,
        BIAS, TAKEN_OUT, BANNED, FORCED, SUMMED, WITHOUT_NAN,
    )  # fmt: skip
    tl.debug_barrier()  # one thread has written what all of them read
    _choose_kernel(values_ptr, indices_ptr, *choosing, BEAMS, SLOTS, ALL, EARLY, DIVIDED)


@jit()
def _ends(token, ends_ptr, ends, last):
    """Return which tokens end a hypothesis; all of them do if `last` is 1."""
    found = tl.full(token.shape, 0, tl.int1) | (last != 0)
    for i in range(ends):
        found = found | (token == tl.load(ends_ptr + i))
    return found


@jit()
def _decide_over(flags_ptr, over_ptr, sentences, EARLY: constexpr, BLOCK: constexpr):
    """Decide whether the search is over, and write it to the fourth flag of every sentence.

    On entry that flag says whether all candidates of the sentence end.
    """
    improvable = tl.zeros([BLOCK], tl.uint8)
    full, all_hit = tl.full([BLOCK], 1, tl.uint8), tl.full([BLOCK], 1, tl.uint8)
    for start in range(0, sentences, BLOCK):
        sentence = start + tl.arange(0, BLOCK)
        inside = sentence < sentences
        flag_ptr = flags_ptr + sentence
        improvable |= tl.load(flag_ptr + sentences, mask=inside, other=0, cache_modifier=".cg")
        full &= tl.load(flag_ptr + 2 * sentences, mask=inside, other=1, cache_modifier=".cg")
        all_hit &= tl.load(flag_ptr + 3 * sentences, mask=inside, other=1, cache_modifier=".cg")
    over = (tl.max(improvable.to(tl.int32), 0) == 0) | (tl.min(all_hit.to(tl.int32), 0) == 1)
    if EARLY:
        over = over | (tl.min(full.to(tl.int32), 0) == 1)
    over = (over | (tl.load(over_ptr) != 0)).to(tl.uint8)
    tl.debug_barrier()  # several threads may hold the flags
    tl.store(over_ptr, over)
    for start in range(0, sentences, BLOCK):
        sentence = start + tl.arange(0, BLOCK)
        flag_ptr = flags_ptr + 3 * sentences + sentence
        tl.store(flag_ptr, tl.broadcast_to(over, [BLOCK]), mask=sentence < sentences)


@jit("candidates", "end")
def _choose_first_kernel(
    scores_ptr, tokens_ptr, beams_ptr, ignored_ptr, counts_ptr, lengths_ptr, length, running_ptr,
    chosen_ptr, over_ptr, candidates, end, BEAMS: constexpr, SLOTS: constexpr,
    CANDIDATES: constexpr, LAST: constexpr,
):  # fmt: skip
    """Choose the running beams and finished hypotheses of one sentence."""
    sentence, sentences = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    first_candidate, rows = sentence * candidates, sentence * BEAMS
    candidate, slot = tl.arange(0, CANDIDATES), tl.arange(0, SLOTS)
    inside, is_slot = candidate < candidates, slot < BEAMS
    score = tl.load(scores_ptr + first_candidate + candidate, mask=inside, other=0.0)
    token = tl.load(tokens_ptr + first_candidate + candidate, mask=inside, other=-1)
    ignored = tl.load(ignored_ptr + rows + candidate, mask=candidate < BEAMS, other=0) != 0
    count = tl.load(counts_ptr + sentence)
    lengths = tl.load(lengths_ptr + rows + slot, mask=is_slot, other=0)
    tl.debug_barrier()  # finish all reads of `ignored` before other threads write it

    ends = inside & (token == end) & (score != float("-inf"))
    finishing = ends & (candidate < BEAMS) & (ignored == 0)
    place = tl.cumsum(finishing.to(tl.int32), 0) + count.to(tl.int32)  # 1-based
    finishing_now = finishing & (place <= BEAMS)
    fills = finishing_now[:, None] & (place[:, None] == slot[None, :] + 1)
    filled_by = tl.max(tl.where(fills, candidate[:, None] + BEAMS, -1), 0)
    order_ptr = chosen_ptr + 2 * sentences * BEAMS + rows
    tl.store(order_ptr + slot, tl.where(filled_by >= 0, filled_by, slot).to(tl.int64), mask=is_slot)
    tl.store(
        lengths_ptr + rows + slot, tl.where(filled_by >= 0, tl.load(length), lengths), mask=is_slot
    )
    count = tl.maximum(count, tl.max(tl.where(finishing_now, place, 0), 0))
    tl.store(counts_ptr + sentence, count)
    over = count >= BEAMS
    if LAST:
        over = over | (tl.max(finishing.to(tl.int32), 0) > 0)
    tl.store(over_ptr + sentence, over.to(tl.uint8))

    rank = tl.where(inside, tl.where(ends | ignored, 2 * BEAMS, 0) + candidate, 4 * BEAMS)
    for i in range(BEAMS):
        lowest = tl.min(rank, 0)
        rank = tl.where(rank == lowest, 4 * BEAMS, rank)
        at = first_candidate + lowest % (2 * BEAMS)
        tl.store(running_ptr + rows + i, tl.load(scores_ptr + at))
        tl.store(chosen_ptr + rows + i, tl.load(tokens_ptr + at))
        tl.store(chosen_ptr + sentences * BEAMS + rows + i, tl.load(beams_ptr + at))
        tl.store(ignored_ptr + rows + i, (lowest >= 2 * BEAMS).to(tl.uint8))
