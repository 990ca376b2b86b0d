"""The generation loop of a manager of requests: waiting requests join running ones at any step.

Requests that start together form a batch. The decode steps of all batches run together
(`decoding.batching.continuous_batching`), and each request ends by itself.
"""

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.continuous_batching import RequestStatus
from transformers.generation.continuous_batching.requests import GenerationOutput

from fastgen.context import isolated
from fastgen.decoding.batching.continuous_batching import InFlightBatch
from fastgen.decoding.kv_cache import common_prefix
from fastgen.models.memory.scratch import is_out_of_memory
from fastgen.patches.engine.out_of_memory import NO_MEMORY
from fastgen.patches.generation_call import requesting
from fastgen.patches.transformers.streaming.generate_batch import generated_tokens
from fastgen.patches.transformers.streaming.padding import Padding, eos_tokens_of
from fastgen.patches.transformers.streaming.refill import Batch, Refill, what_wraps_generate
from fastgen.patches.transformers.streaming.request_options import RequestOptions

MAX_IN_FLIGHT = 8
"""Maximum number of batches whose decode steps run together."""

PREFILL = 1024
"""Tokens of prompts, padding included, that may start between two decode steps."""


@dataclass(eq=False)
class Submission:
    """A request, and what has become of it.

    Attributes:
        output: Its result so far.
        ids: Token ids (L,) int64.
        options: How it is generated.
        alike: Requests with equal values may share a batch.
        streaming: Whether each new token is delivered.
        is_alone: Whether it runs by itself, as requests that it ran with have failed.
        is_over: Whether it is finished, failed or cancelled.
    """

    output: GenerationOutput
    ids: Tensor
    options: RequestOptions
    alike: Hashable
    streaming: bool = False
    is_alone: bool = False
    is_over: bool = False

    def __post_init__(self) -> None:
        self.ends = frozenset[int](cast(Any, eos_tokens_of(self.options.resolved)).tolist())
        self.padding = Padding.of(self.options.resolved, self.options.encoder_decoder)
        self.alike = (self.alike, self.padding.length_of(self.ids))

    @property
    def may_restart(self) -> bool:
        """Whether it can run again by itself: not once tokens that it has drawn are delivered."""
        is_drawn = self.options.resolved.do_sample and self.output.generated_tokens
        return not (self.is_alone or is_drawn)

    @property
    def cost(self) -> int:
        """Tokens that the request may hold in the KV cache; beams share those of the prompt."""
        return len(self.ids) + self.options.beams * self.options.new_tokens


@dataclass(eq=False)
class _Requests(Batch):
    members: list[Submission] = field(kw_only=True)

    @property
    def options(self) -> RequestOptions:
        """The options of the call: those of the request that may have the most new tokens."""
        return max((one.options for one in self.members), key=lambda one: one.new_tokens)

    @property
    def cost(self) -> int:
        return self.width + self.options.beams * self.options.new_tokens


class RequestLoop(Refill):
    """Generates submitted requests until it is stopped.

    Args:
        model: The model.
        tokens: Maximum number of tokens that running requests may hold in the KV cache, padding
            included. A request that could hold more runs by itself.
        deliver: Called with each result, from the thread that generates.

    Attributes:
        changed: Guards the attributes below; notified when one changes.
        waiting: Requests that have not started, the oldest first.
        stopping: 1 to end once nothing waits or runs, 2 to end at the next step.
        pauses: Number of callers for which no request may run or start.
        is_idle: Whether no request runs.
    """

    draws_apart = True

    def __init__(
        self, model: Any, tokens: int, deliver: Callable[[GenerationOutput], object]
    ) -> None:
        super().__init__(model, tokens, self._generated, GenerationConfig(), {})
        self.deliver = deliver
        self.changed = threading.Condition()
        self.waiting: list[Submission] = []
        self.stopping = self.pauses = 0
        self.is_idle = True
        self._begun: list[Submission] = []
        self._has_joined = False

    def serve(self) -> None:
        """Generate requests until `stopping` is set."""
        while self._is_needed():
            try:
                isolated(self.run, self._take, self._done)
            except Exception as error:  # of the running requests, not of the waiting ones
                self._run_alone(self._begun, error)
            if self.stopping == 2:
                self._fail(self._begun, RuntimeError(_STOPPED))
            self._begun = []
        with self.changed:
            waiting, self.waiting, self.is_idle = self.waiting, [], True
            self.changed.notify_all()
        self._fail(waiting, RuntimeError(_STOPPED))

    def cancel(self, name: str) -> None:
        """Cancel the requests with an id; they leave their batch at the next step."""
        with self.changed:
            for one in (*self.waiting, *self._begun):
                if one.output.request_id == name:
                    one.is_over = True
            self.waiting = [one for one in self.waiting if not one.is_over]
            self.changed.notify_all()

    def _is_needed(self) -> bool:
        """Wait for requests; return False once there will be none."""
        with self.changed:
            self.is_idle = True
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.stopping or (self.waiting and not self.pauses))
            self.is_idle = self.stopping == 2 or not self.waiting
            return not self.is_idle

    def _take(self, room: int) -> Batch | None:
        """Return the oldest waiting request with those like it whose lengths are closest to its."""
        with self.changed:
            self._begun = [one for one in self._begun if not one.is_over]
            if self.stopping == 2 or self.pauses or not self.waiting:
                return None
            oldest = self.waiting[0]
            if self._begun and any(one.is_alone for one in (oldest, *self._begun)):
                return None
            alike = self._beginning_alike(
                [one for one in self.waiting if one.alike == oldest.alike], oldest
            )
            # The sort is stable: of equals, the oldest comes first.
            alike.sort(key=lambda one: abs(len(one.ids) - len(oldest.ids)))
            members, width, new = list[Submission](), 0, 0
            for one in alike:
                width, new = max(width, len(one.ids)), max(new, one.cost - len(one.ids))
                rows, alone = len(members) + 1, not members and room == self.tokens
                if (rows * (width + new) > room and not alone) or rows * width > max(
                    width, PREFILL
                ):
                    break
                members.append(one)
            if not members:
                return None
            members.sort(key=lambda one: -len(one.ids))
            taken = set(members)
            self.waiting = [one for one in self.waiting if one not in taken]
            self._begun += members
            self._has_joined = True
            self.changed.notify_all()
        now = time.perf_counter()
        for one in members:
            one.output.status, one.output.lifespan = RequestStatus.DECODING, (now, -1)
        return _Requests(list(range(len(members))), [one.ids for one in members], members=members)

    def _beginning_alike(self, alike: list[Submission], oldest: Submission) -> list[Submission]:
        """Return those of some requests that begin as the oldest, if they are best run apart."""
        width = getattr(self.model.config.get_text_config(decoder=True), "hidden_size", 0)
        start = oldest.ids[: common_prefix.LEAST]
        same = [one for one in alike if torch.equal(one.ids[: common_prefix.LEAST], start)]
        if oldest.options.encoder_decoder or len(same) in (1, len(alike)):
            return alike
        texts: list[list[int]] = [cast(Any, one.ids).tolist() for one in same]
        # Others wait, so that a group of these is one among several.
        groups = common_prefix.groups([*texts, []], oldest.options.new_tokens, width)
        return same if groups else alike

    def _room(self, running: Sequence[InFlightBatch]) -> int:
        waits = bool(running) and self._has_joined  # until the running requests have had a step
        if self.refused is not None or waits or len(running) >= MAX_IN_FLIGHT:
            return 0
        return max(0, self.tokens - sum(cohort.tokens for cohort in running))

    def _advance(self, running: list[Any], replay: Any, done: Any) -> None:
        super()._advance(running, replay, done)
        self._has_joined = False

    def _call(self, batch: Batch, refused: str | None) -> Any:
        result = super()._call(batch, refused)
        if self.refused != NO_MEMORY:
            self.refused = None  # the reason holds for requests with these options
        return result

    def _generated(self, batch: Batch) -> Any:
        """Return the output of `generate`, or a suspended loop; None if the call failed."""
        assert isinstance(batch, _Requests)
        options = batch.options
        inputs = batch.inputs(self.model, batch.members[0].padding.fill)

        def is_wanted(row: int) -> bool:
            return not batch.members[row].is_over and self.stopping < 2

        def tell(row: int, place: int, tokens: Sequence[int]) -> None:
            self._add(batch.members[row], place, list(tokens))

        observed = what_wraps_generate(self.model, self.config, self.kwargs) is None
        try:
            with requesting(
                self.model,
                wanted=is_wanted if observed else None,
                on_tokens=tell if observed and options.sequences == 1 else None,
            ):
                return self.model.generate(**inputs, generation_config=options.config)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self._run_alone(batch.members, error)
            return None

    def _add(self, one: Submission, place: int, tokens: list[int]) -> None:
        """Add final tokens to a request; a batch that was restarted has told some of them before.

        Args:
            one: The request.
            place: Number of its tokens before these.
            tokens: Token ids.
        """
        known = one.output.generated_tokens
        if one.is_over or not (new := tokens[len(known) - place : one.options.new_tokens - place]):
            return
        known += new
        if one.output.timestamps is not None:
            one.output.timestamps += [time.perf_counter()] * len(new)
        if new[-1] in one.ends or len(known) == one.options.new_tokens:
            self._finish(one)
        elif one.streaming:
            self.deliver(_copy(one.output))

    def _done(self, batch: Batch, output: Any) -> None:
        """Finish the requests of a batch that is over. Most of them have been told token by token.

        Args:
            batch: The batch.
            output: Sequences of all its requests, (B * N, L) int64; None if it failed.
        """
        assert isinstance(batch, _Requests)
        for row, one in enumerate(batch.members):
            if one.is_over or output is None or self.stopping == 2:
                continue
            options = one.options
            count = options.sequences
            own = output[row * count : (row + 1) * count].cpu()
            if not options.encoder_decoder:
                own = own[:, batch.width - len(one.ids) :]
            first, *others = generated_tokens(own, one.output.prompt_ids, options)
            del first[options.new_tokens :]
            for number, tokens in enumerate(others):
                name = f"{one.output.request_id}__child#{number}"
                self._deliver_finished(replace(one.output, request_id=name), tokens)
            if one.output.timestamps is not None:
                untold = len(first) - len(one.output.generated_tokens)
                one.output.timestamps += [time.perf_counter()] * untold
            one.output.generated_tokens = first
            self._finish(one)

    def _finish(self, one: Submission) -> None:
        one.is_over = True
        self._deliver_finished(one.output, one.output.generated_tokens)

    def _deliver_finished(self, output: GenerationOutput, tokens: list[int]) -> None:
        output.status, output.generated_tokens = RequestStatus.FINISHED, tokens
        output.lifespan = output.lifespan[0], time.perf_counter()
        self.deliver(_copy(output))

    def _run_alone(self, submissions: Sequence[Submission], error: Exception) -> None:
        """After an error, let each request run by itself, so that only its cause fails."""
        were_alone = len(submissions) == 1
        self._fail([one for one in submissions if were_alone or not one.may_restart], error)
        with self.changed:
            again = [one for one in submissions if not one.is_over]
            for one in again:
                one.is_alone, one.alike = True, id(one)
            self._begun = [one for one in self._begun if one not in again]
            self.waiting = again + self.waiting

    def _fail(self, submissions: Sequence[Submission], error: BaseException) -> None:
        for one in submissions:
            if not one.is_over:
                one.is_over = True
                one.output.status, one.output.error = RequestStatus.FAILED, str(error)
                one.output.lifespan = one.output.lifespan[0], time.perf_counter()
                self.deliver(_copy(one.output))


_STOPPED = "the manager was stopped before the request was complete"


def _copy(output: GenerationOutput) -> GenerationOutput:
    times = output.timestamps
    return replace(
        output,
        generated_tokens=list(output.generated_tokens),
        timestamps=None if times is None else list(times),
    )
