"""transformers' `ContinuousBatchingManager` on fastgen's continuous batching."""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager, RequestStatus
from transformers.generation.continuous_batching.requests import GenerationOutput

from fastgen.config import settings
from fastgen.ops import native
from fastgen.patches.engine import engine
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.streaming.generate_batch import read_prompt
from fastgen.patches.transformers.streaming.request_loop import RequestLoop, Submission
from fastgen.patches.transformers.streaming.request_options import (
    OPTIONS,
    RequestOptions,
    batching_of,
    check_beams,
    options_of,
    reason_for_paged,
)
from fastgen.patches.transformers.streaming.request_results import Results
from fastgen.patches.transformers.streaming.stream import MAX_TOKENS, token_ids

_NAME = "transformers.request_manager"
_logger = logging.getLogger("fastgen")

TOKENS = 8 * MAX_TOKENS
"""Default of the tokens that running requests may hold in the KV cache."""

FULL = 10
"""Seconds that `add_request` waits for a place in a full queue, as in transformers.

In an event loop, where waiting would hold up everybody else, it raises at once.
"""


def init_continuous_batching(
    original: Callable[..., ContinuousBatchingManager],
    /,
    self: Any,
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    **kwargs: Any,
) -> ContinuousBatchingManager:
    """Replace `ContinuousMixin.init_continuous_batching`.

    Raises:
        ValueError: Several beams are requested and only transformers' own manager, which ignores
            them, could run the requests; the message has the reason.
    """
    kept = compat.kept_manager(self)
    if isinstance(kept, RequestManager):
        return kept
    batching = batching_of(self, generation_config, continuous_batching_config)
    options = options_of(self, generation_config, {})
    others = [name for name, value in kwargs.items() if value and name != "workload_hints"]
    if kept is not None:
        reason = "the model keeps its manager"
    elif others:
        reason = f"{others[0]} is given"
    elif native.library() is None and options.beams == 1 and not options.encoder_decoder:
        reason = (
            f"{native.why_off()}; without operations in C, requests that come one by one are slower"
        )
    else:
        reason = reason_for_paged(self, options, batching)
    if reason is not None:
        check_beams(options, reason)
        engine.fallback(_NAME, reason, (type(self).__name__, "ContinuousBatchingManager"))
        return original(self, generation_config, continuous_batching_config, **kwargs)
    self.eval()
    engine.hit(_NAME)
    return RequestManager(self, options.config, batching or ContinuousBatchingConfig())


class RequestManager(ContinuousBatchingManager):
    """A manager with the interface of transformers' that shares none of its code.

    The result of a request is that of `generate` for it alone, with the manager's generation
    config and the options of the request.

    Args:
        model: The model.
        config: Generation config for all requests.
        batching: Sizes of the queue and of the KV cache; other fields have no effect.
    """

    def __init__(self, model: Any, config: GenerationConfig, batching: Any) -> None:
        self.model, self.generation_config = model, config
        self.continuous_batching_config = batching
        self.warmed_up, self.batch_processor, self.is_tp_driver = True, None, True
        self.background_thread_status: Any = SimpleNamespace(fatal_error=None)
        page = getattr(batching, "page_size", None) or getattr(batching, "block_size", None)
        blocks = batching.num_blocks
        self.results = Results()
        self.loop = RequestLoop(
            model, blocks * page if blocks and page else TOKENS, self.results.put
        )
        self._numbers, self._lock = 0, threading.Lock()
        self._known = dict[str, RequestOptions]()
        self._thread: threading.Thread | None = None

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Do nothing: the model keeps its attention."""

    def warmup(self) -> None:
        """Do nothing: there is nothing to prepare on a CPU."""

    # Control of the thread.

    def is_running(self) -> bool:
        """Return whether the thread that generates runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread that generates."""
        if self.is_running():
            _logger.warning("the manager is running already")
            return
        self.loop.stopping, self.background_thread_status.fatal_error = 0, None
        self.results.open()
        inference = torch.is_inference_mode_enabled()
        self._thread = threading.Thread(
            target=self._serve, args=(inference,), name="fastgen-requests"
        )
        self._thread.start()

    def _serve(self, inference: bool) -> None:
        try:
            with torch.inference_mode() if inference else torch.no_grad():
                self.loop.serve()
        except BaseException as error:
            self.background_thread_status.fatal_error = error
            raise
        finally:
            self.results.close()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Stop the thread that generates.

        Args:
            block: Whether to wait for it.
            timeout: Maximum seconds to wait; None for no limit.
            keep_for_next_session: Whether the model keeps the manager.
            hard_stop: Whether requests that are not complete fail; otherwise they are completed.

        Raises:
            RuntimeError: Called within `pause`, which would wait for ever.
        """
        if self._thread is None:
            _logger.warning("the manager has not been started")
            return
        with self.loop.changed:
            if self.loop.pauses:
                raise RuntimeError("a paused manager cannot be stopped; leave `pause` first")
            self.loop.stopping = max(self.loop.stopping, 2 if hard_stop else 1)
            self.loop.changed.notify_all()
        if block:
            self.join(time.perf_counter(), timeout)
        if keep_for_next_session:
            compat.keep_manager(self.model, self)

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        """Wait for the thread to end."""
        if self._thread is None:
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            waited = time.perf_counter() - stop_trigger_time
            _logger.warning("requests are still being generated after %.1f s", waited)
        else:
            self._thread = None

    def destroy(self) -> None:
        """Stop the thread if it runs."""
        if self.is_running():
            self.stop()

    @contextmanager
    def pause(self) -> Generator[None]:
        """Return a context manager in which nothing is generated and the model may be changed.

        It begins when the running requests are complete. Waiting ones start at its end.

        Raises:
            RuntimeError: The manager does not run.
        """
        if not self.is_running():
            raise RuntimeError("the manager does not run, so that it cannot be paused")
        loop = self.loop
        with loop.changed:
            loop.pauses += 1
            loop.changed.wait_for(lambda: loop.is_idle)
        try:
            yield
        finally:
            with loop.changed:
                loop.pauses -= 1
                loop.changed.notify_all()

    # Requests and results.

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **logit_processor_kwargs: Any,
    ) -> str | None:
        """Add a request.

        Args:
            input_ids: Token ids of the prompt or the source.
            request_id: Its id; None for one that is made.
            max_new_tokens: Maximum number of new tokens; None for that of the manager.
            streaming: Whether to deliver a result whenever tokens are final.
            record_timestamps: Whether to record the time of each token.
            eos_token_id: End tokens; None for those of the manager.
            logit_processor_kwargs: Any other options of `generate`, for this request.

        Returns:
            The id; None if the manager is stopping and does not take the request.

        Raises:
            queue.Full: `max_queue_size` or else `FASTGEN_MAX_WAITING` requests wait, and have for
                some time.
        """
        if self.loop.stopping or self.background_thread_status.fatal_error is not None:
            _logger.warning("the manager is stopping; a request is dropped")
            return None
        if request_id is None:
            (request_id,) = self._names(1)
        given = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        given |= logit_processor_kwargs
        prompt, error = read_prompt(self.model, input_ids)
        output = GenerationOutput(request_id, prompt, timestamps=[] if record_timestamps else None)
        try:
            options = self._options(given)
        except (TypeError, ValueError) as wrong:
            options, error = None, str(wrong)
        if options is None or error is not None:
            output.status, output.error = RequestStatus.FAILED, error
            self.results.put(output)
            return request_id
        shared = dict(given)
        if options.is_open_ended and options.sequences == 1:
            del shared["max_new_tokens"]
        ids, alike = token_ids(prompt), repr(sorted(shared.items()))
        names, count = [request_id], options.sequences
        if count > 1 and options.resolved.do_sample and options.beams == 1:
            # Samples are independent, so that each can be a request by itself.
            options, alike = self._options(given | {"num_return_sequences": 1}), alike + " apart"
            names = [*(f"{request_id}__child#{number}" for number in range(count - 1)), request_id]
        elif count > 1 and (streaming or record_timestamps):
            output.status = RequestStatus.FAILED
            output.error = f"tokens of one text are followed, not of {count} beams"
            self.results.put(output)
            return request_id
        self._enqueue([
            Submission(
                GenerationOutput(
                    name, list(prompt), timestamps=[] if record_timestamps else None
                ),
                ids, options, alike, streaming,
            )
            for name in names
        ])  # fmt: skip
        return request_id

    def add_requests(
        self,
        inputs: Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **logit_processor_kwargs: Any,
    ) -> list[str]:
        """Add several requests with the same options and return their ids."""
        names = self._names(len(inputs))
        for name, ids in zip(names, inputs, strict=True):
            self.add_request(
                ids, name, max_new_tokens, streaming, record_timestamps, **logit_processor_kwargs
            )
        return names

    def _names(self, count: int) -> list[str]:
        with self._lock:
            self._numbers += count
            return [f"req_{number}" for number in range(self._numbers - count, self._numbers)]

    def _options(self, given: dict[str, Any]) -> RequestOptions:
        """Return the options of a request.

        Raises:
            ValueError: They are unknown, or cannot be applied.
        """
        for name in given.keys() - OPTIONS:
            raise ValueError(f"{name} is no generation option")
        key = repr(sorted(given.items()))
        if key not in self._known:
            options = options_of(self.model, self.generation_config, given)
            reason = reason_for_paged(self.model, options, self.continuous_batching_config)
            if reason is not None:
                raise ValueError(reason)
            if len(self._known) > _MOST_KNOWN:
                self._known.clear()
            self._known[key] = options
        return self._known[key]

    def _enqueue(self, submissions: list[Submission]) -> None:
        loop = self.loop
        most = self.continuous_batching_config.max_queue_size or settings().max_waiting
        with loop.changed:
            patience = 0 if _in_event_loop() else FULL
            if most and not loop.changed.wait_for(lambda: len(loop.waiting) < most, patience):
                raise queue.Full(f"{len(loop.waiting)} requests wait, {most} at most")
            loop.waiting += submissions
            loop.changed.notify_all()

    def cancel_request(self, request_id: str) -> None:
        """Cancel a request, which leaves its batch at the next step and gives no result."""
        self.loop.cancel(request_id)
        self.results.discard(request_id)

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """Return the next result.

        Args:
            request_id: Id of a request whose result is wanted; None for any.
            timeout: Maximum seconds to wait; None for no limit.

        Returns:
            The result; None after the timeout, or if there will be none as the thread has ended.
        """
        return self.results.get(request_id, timeout)

    def __iter__(self) -> Generator[GenerationOutput]:
        """Yield results as they come, until the manager is stopped."""
        while self.is_running() or self.results:
            if (result := self.get_result(timeout=0.1)) is not None:
                yield result

    def request_id_iter(self, request_id: str) -> Generator[GenerationOutput]:
        """Yield the results of a request until it is finished."""
        while self.is_running() or self.results:
            result = self.get_result(request_id, timeout=0.1)
            if result is not None:
                yield result
                if result.is_finished():
                    return
            elif not self.is_running():
                return

    def register_result_handler(
        self, request_id: str, callback: Callable[[GenerationOutput], object]
    ) -> None:
        """Call a function in the running event loop with each result of a request.

        It also gets results that came before it was registered.
        """
        self.results.register(request_id, callback, asyncio.get_running_loop())


def _in_event_loop() -> bool:
    with suppress(RuntimeError):
        return asyncio.get_running_loop().is_running()
    return False


_MOST_KNOWN = 1000
"""Combinations of options of requests whose prepared configs are kept."""
