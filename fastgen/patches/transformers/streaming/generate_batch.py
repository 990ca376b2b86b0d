"""`generate_batch` of transformers, on fastgen's continuous batching."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from torch import Tensor
from tqdm import tqdm
from transformers.generation.continuous_batching import RequestStatus
from transformers.generation.continuous_batching.requests import GenerationOutput

from fastgen.patches.engine import engine
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.streaming.padding import eos_tokens_of
from fastgen.patches.transformers.streaming.request_options import (
    RequestOptions,
    batching_of,
    check_beams,
    options_of,
    reason_for_paged,
)
from fastgen.patches.transformers.streaming.stream import MAX_TOKENS, generate_stream, token_ids

_NAME = "transformers.generate_batch"


def generate_batch(
    original: Callable[..., dict[str, GenerationOutput]],
    /,
    self: Any,
    inputs: Sequence[Sequence[int]],
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    **kwargs: Any,
) -> dict[str, GenerationOutput]:
    """Replace `ContinuousMixin.generate_batch`: results are those of `generate` for each input.

    Raises:
        ValueError: Several beams are requested and only transformers' own code, which ignores them,
            could run the call; the message has the reason.
    """
    if not inputs:
        return {}
    batching = batching_of(self, generation_config, continuous_batching_config)
    options = options_of(self, generation_config, kwargs)
    reason = _reason_of_arguments(
        self, options, record_timestamps, persistent_manager, kwargs
    ) or reason_for_paged(self, options, batching)
    if reason is not None:
        check_beams(options, reason)
        engine.fallback(_NAME, reason, (type(self).__name__, "generate_batch"))
        with engine.disabled():  # also for the manager that it makes
            return original(
                self,
                inputs,
                generation_config,
                continuous_batching_config,
                record_timestamps,
                progress_bar,
                persistent_manager,
                warmup,
                **kwargs,
            )
    self.eval()
    max_tokens = getattr(batching, "max_batch_tokens", None) or MAX_TOKENS
    results = _generated(self, inputs, options, max_tokens, record_timestamps, progress_bar)
    engine.hit(_NAME)
    return results


def _reason_of_arguments(
    model: Any,
    options: RequestOptions,
    record_timestamps: bool,
    persistent_manager: bool,
    kwargs: dict[str, Any],
) -> str | None:
    if persistent_manager or compat.kept_manager(model) is not None:
        return "the model keeps its manager"
    if record_timestamps and options.sequences > 1:
        return "timestamps of several sequences per request"
    for name in ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"):
        if kwargs.get(name):
            return f"{name} is given"
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and not bool(mask.all()):
        return "an attention mask with padding"
    return None


def _generated(
    model: Any,
    inputs: Sequence[Sequence[int]],
    options: RequestOptions,
    max_tokens: int,
    record_timestamps: bool,
    progress_bar: bool,
) -> dict[str, GenerationOutput]:
    begin = time.perf_counter()
    times: list[list[float]] = [[] for _ in inputs]
    prompts = [read_prompt(model, one) for one in inputs]
    errors = [error for _, error in prompts]
    outputs: dict[int, Tensor] = {}

    def stream(numbers: list[int]) -> Iterator[tuple[int, Tensor]]:
        for number in numbers:
            times[number].clear()

        def note(place: int, tokens: list[int]) -> None:
            times[numbers[place]] += [time.perf_counter()] * len(tokens)

        sequences = generate_stream(
            model,
            [prompts[number][0] for number in numbers],
            max_tokens=max_tokens,
            window=max(1, len(numbers)),
            on_tokens=note if record_timestamps else None,
            generation_config=options.config,
        )
        return zip(numbers, sequences, strict=True)

    def run(numbers: list[int], started: Iterator[tuple[int, Tensor]]) -> None:
        """Generate; after an error, run each half by itself, so that only its causes fail."""
        try:
            outputs.update(started)
        except Exception as error:
            if len(numbers) == 1:
                errors[numbers[0]] = f"{type(error).__name__}: {error}"
                return
            middle = len(numbers) // 2
            for half in (numbers[:middle], numbers[middle:]):
                run(half, stream(half))

    valid = [number for number, error in enumerate(errors) if error is None]
    run(valid, stream(valid))
    results: dict[str, GenerationOutput] = {}
    shown = tqdm(
        zip(prompts, errors, times, strict=True),
        total=len(inputs),
        disable=not progress_bar,
        desc=f"Solving {len(inputs)} requests",
        unit="request",
    )
    for number, ((prompt, _), error, own_times) in enumerate(shown):
        texts: list[list[int]] = [[]]
        if error is None:
            texts = generated_tokens(outputs[number], prompt, options)
        for name, tokens in _named(f"req_{number}", texts):
            results[name] = GenerationOutput(
                request_id=name,
                prompt_ids=prompt,
                generated_tokens=tokens,
                error=error,
                status=RequestStatus.FINISHED if error is None else RequestStatus.FAILED,
                created_time=begin,
                lifespan=(begin, own_times[-1] if own_times else time.perf_counter()),
                timestamps=own_times if record_timestamps else None,
            )
    return results


def _named(name: str, texts: list[list[int]]) -> Iterator[tuple[str, list[int]]]:
    """Yield the texts of a request by id. transformers lists further sequences first.

    The first sequence, which is the best one of a beam search, has the id of the request.
    """
    for number, text in enumerate(texts[1:]):
        yield f"{name}__child#{number}", text
    yield name, texts[0]


def generated_tokens(
    sequences: Tensor, prompt: Sequence[int], options: RequestOptions
) -> list[list[int]]:
    """Return the tokens of each sequence after the prompt, up to and including its end token.

    Args:
        sequences: Result of a stream, (N, L) int64.
        prompt: Token ids of the request.
        options: Options of the call.
    """
    begin = 1 if options.encoder_decoder else len(prompt)
    ends = set[int](cast(Any, eos_tokens_of(options.resolved)).tolist())
    texts: list[list[int]] = cast(Any, sequences[:, begin:]).tolist()
    for text in texts:
        end = next((place for place, token in enumerate(text) if token in ends), len(text))
        del text[end + 1 :]
    return texts


def read_prompt(model: Any, prompt: Any) -> tuple[list[int], str | None]:
    """Return the token ids of a request, and what is wrong with them; None if nothing is.

    Args:
        model: The model.
        prompt: Token ids, in any form. What cannot be read is returned as no token ids.
    """
    try:
        ids = token_ids(prompt)
    except (TypeError, ValueError, RuntimeError) as error:
        return [], str(error)
    tokens: list[int] = cast(Any, ids).tolist()
    vocabulary = getattr(model.get_input_embeddings(), "num_embeddings", None)
    wrong = [] if vocabulary is None else [id_ for id_ in tokens if not 0 <= id_ < vocabulary]
    return tokens, f"token id {wrong[0]} is outside of the vocabulary" if wrong else None
