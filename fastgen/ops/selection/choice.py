"""Selection of running and finished beams in a beam search step, in one or two launches.

In torch this takes up to fifty operations on a few hundred numbers, and each costs a device as much
as a large one. Here one program of a kernel handles a sentence: it ranks the candidates that
continue and the hypotheses that finish. For transformers' rules a second kernel, one program,
decides for all sentences whether the search is over.

Sources: Wang et al. 2021 (LightSeq), section 2.1 (all operations between two matrix products in one
launch). The rules are those of `decoding.search.finishing_rules` and
`decoding.search.first_finished`, whose torch code is the reference.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.ops.dispatch import constexpr, jit, launch, power_of_two, tl
from fastgen.ops.selection.kbest_kernels import index_of, key_of, value_of

MOST = 1024
"""Largest number of candidates plus finished hypotheses of a sentence that a program ranks."""

MOST_SENTENCES = 8192
"""Largest number of sentences that the program of the second kernel handles."""


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
        never: added to scores that must not be chosen.
        stops_early: whether a sentence is finished once it has M hypotheses.
        powers: (N,) fp32, each length to the power of the length penalty, as returned by
            `decoding.search.finishing_rules.length_powers`.
        far: the length by which running beams are judged; 0 for their current length.
    """

    never: float
    stops_early: bool
    powers: Tensor
    far: int


class Chosen(NamedTuple):
    """The result of `choose_`.

    Attributes:
        parents: (B, M) int64, the beams that the running beams continue.
        tokens: (B, M) int64, the next tokens of the running beams.
        order: (B, M) int64, the finished hypotheses: an index into M old ones, then K candidates.
        flags: (4, B) bool, as in `decoding.search.beam_search.Choice`.
    """

    parents: Tensor
    tokens: Tensor
    order: Tensor
    flags: Tensor


def covered(values: Tensor, beams: int) -> bool:
    """Return whether the kernels cover candidates (B, K) of this number of beams."""
    return (
        values.dtype == torch.float32
        and values.shape[1] + beams <= MOST
        and values.shape[0] <= MOST_SENTENCES
    )


def choose_(candidates: Candidates, state: State, rules: Rules, new_tokens: Tensor) -> Chosen:
    """Choose the running beams and finished hypotheses of a step; updates `state` in place.

    Of equal values the first candidate wins, and an old hypothesis wins over a candidate.

    Args:
        candidates: the candidates of the step.
        state: the state before the step.
        rules: the finishing rules.
        new_tokens: (1,) int64, the number of new tokens of a candidate.
    """
    (b, k), m = candidates.values.shape, state.finished.shape[1]
    values, beam, token, hits = (each.contiguous() for each in candidates)
    parents, tokens, order = beam.new_empty(3, b, m).unbind()
    flags, over = hits.new_empty(4, b), _bytes(state.over)
    launch(
        _choose_kernel, (b,), values, beam, token, _bytes(hits), state.scores, state.finished,
        _bytes(state.done), _bytes(state.improvable), over, rules.powers, new_tokens, parents,
        tokens, order, _bytes(flags), k, rules.far, rules.never, BEAMS=m,
        CANDIDATES=power_of_two(k), ALL=power_of_two(m + k), EARLY=rules.stops_early,
        DIVIDED=values.device.type != "cuda", num_warps=1 if m + k <= 128 else 4,
    )  # fmt: skip
    launch(
        _over_kernel, (1,), _bytes(flags), over, b, EARLY=rules.stops_early,
        BLOCK=max(32, power_of_two(b)), num_warps=1 if b <= 256 else 4,
    )  # fmt: skip
    return Chosen(parents, tokens, order, flags)


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


@jit("candidates", "far")
def _choose_kernel(
    values_ptr, beam_ptr, token_ptr, hits_ptr, scores_ptr, finished_ptr, done_ptr, improvable_ptr,
    over_ptr, powers_ptr, new_tokens_ptr, parents_ptr, tokens_ptr, order_ptr, flags_ptr, candidates,
    far, never, BEAMS: constexpr, CANDIDATES: constexpr, ALL: constexpr, EARLY: constexpr,
    DIVIDED: constexpr,
):  # fmt: skip
    """Rank the candidates and finished hypotheses of one sentence."""
    sentence, sentences = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    new_tokens = tl.load(new_tokens_ptr)
    power = tl.load(powers_ptr + new_tokens)
    far_power = tl.load(powers_ptr + tl.where(far > 0, far, new_tokens))
    improvable = tl.load(improvable_ptr + sentence) != 0

    slot, first_candidate = tl.arange(0, ALL), sentence * candidates
    old, new = slot < BEAMS, (slot >= BEAMS) & (slot < BEAMS + candidates)
    finished = tl.load(finished_ptr + sentence * BEAMS + slot, mask=old, other=0.0)
    done = tl.load(done_ptr + sentence * BEAMS + slot, mask=old, other=0) != 0
    ended = (
        tl.load(hits_ptr + first_candidate + slot - BEAMS, mask=new & (slot < 2 * BEAMS), other=0)
        != 0
    )
    ending = tl.load(values_ptr + first_candidate + slot - BEAMS, mask=new, other=0.0)
    candidate = tl.arange(0, CANDIDATES)
    inside = candidate < candidates
    value = tl.load(values_ptr + first_candidate + candidate, mask=inside, other=0.0)
    hit = tl.load(hits_ptr + first_candidate + candidate, mask=inside, other=1) != 0
    tl.debug_barrier()  # finish all reads before other threads write the same addresses

    lowest = -0x7FFFFFFFFFFFFFFF
    key = tl.where(inside, key_of(tl.where(hit, value + never, value), candidate), lowest)
    first = value_of(tl.max(key, 0))
    for i in range(BEAMS):
        best = tl.max(key, 0)
        key = tl.where(key == best, lowest, key)
        chosen = first_candidate + index_of(best)
        tl.store(parents_ptr + sentence * BEAMS + i, tl.load(beam_ptr + chosen))
        tl.store(tokens_ptr + sentence * BEAMS + i, tl.load(token_ptr + chosen))
        tl.store(scores_ptr + sentence * BEAMS + i, value_of(best))

    full = tl.sum(tl.where(old & (done == 0), 1, 0), 0) == 0
    if DIVIDED:
        ranked = ending / power
    else:
        ranked = ending * power
    if EARLY:
        ranked = tl.where(full, ranked + never, ranked)
    ranked = tl.where(improvable, ranked, ranked + never)
    ranked = tl.where(ended, ranked, ranked + never)
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
        tl.store(order_ptr + sentence * BEAMS + i, source.to(tl.int64))
        tl.store(finished_ptr + sentence * BEAMS + i, worst)
        tl.store(done_ptr + sentence * BEAMS + i, is_done.to(tl.uint8))

    possible = first / far_power
    if not DIVIDED:
        possible = first * far_power
    better = ((open_slots < BEAMS) & (possible > worst)) | ((open_slots > 0) & (possible > never))
    still_improvable = (improvable & better).to(tl.uint8)
    tl.store(improvable_ptr + sentence, still_improvable)
    tl.store(flags_ptr + sentence, (changed > 0).to(tl.uint8))
    tl.store(flags_ptr + sentences + sentence, still_improvable)
    tl.store(flags_ptr + 2 * sentences + sentence, (open_slots == 0).to(tl.uint8))
    tl.store(flags_ptr + 3 * sentences + sentence, tl.min(hit.to(tl.int32), 0).to(tl.uint8))


@jit("sentences")
def _over_kernel(flags_ptr, over_ptr, sentences, EARLY: constexpr, BLOCK: constexpr):
    """Decide whether the search is over, and write it to the fourth flag of every sentence.

    On entry that flag says whether all candidates of the sentence end.
    """
    sentence = tl.arange(0, BLOCK)
    inside = sentence < sentences
    flags_ptr += sentence
    improvable = tl.max(tl.load(flags_ptr + sentences, mask=inside, other=0).to(tl.int32), 0)
    full = tl.min(tl.load(flags_ptr + 2 * sentences, mask=inside, other=1).to(tl.int32), 0)
    all_hit = tl.min(tl.load(flags_ptr + 3 * sentences, mask=inside, other=1).to(tl.int32), 0)
    over = (1 - improvable) | all_hit
    if EARLY:
        over = over | full
    over = over | tl.load(over_ptr).to(tl.int32)
    tl.store(over_ptr, over.to(tl.uint8))
    tl.debug_barrier()  # several threads may hold the flags
    tl.store(flags_ptr + 3 * sentences, tl.broadcast_to(over.to(tl.uint8), [BLOCK]), mask=inside)


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
