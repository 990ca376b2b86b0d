"""fastgen: one `import fastgen` makes text generation faster, with identical output.

The import patches transformers and fairseq: at once where they are loaded already, otherwise when
they are imported. It imports neither of them, nor torch. ``FASTGEN=0`` turns patching off.

    status()            Calls so far: accelerated or not, fallback reasons, and advice.
    explain(model, **)  What `model.generate(**)` would run, and the size of its KV cache.
    bild(small, **)     fairseq: big-little decoding; a small model drafts, the large one verifies.
    generate_stream(model, inputs, **)  Many inputs, batched by length; results in input order.
    prefix_cache(bytes=)  Within it, prompts reuse the keys and values of earlier ones.
    score(model, texts, **)  Log-probabilities of existing texts, token by token.
    disable(), enable() Remove the patches, or apply them again.
    disabled()          Context manager within which the toolkit's own code runs.
    release()           Free the memory that is kept between calls.
"""

import atexit
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fastgen._version import __version__
from fastgen.config import settings
from fastgen.errors import FastgenWarning, SetupError
from fastgen.patches import disable, disabled, enable, release, start, status

__all__ = [
    "FastgenWarning",
    "__version__",
    "bild",
    "disable",
    "disabled",
    "enable",
    "explain",
    "generate_stream",
    "prefix_cache",
    "release",
    "score",
    "status",
]


def explain(model: Any, **generate_kwargs: Any) -> Any:
    """Explain what ``model.generate(**generate_kwargs)`` would run, without running it.

    The command ``fastgen explain MODEL`` prints the same for a model directory.

    Args:
        model: A transformers model that can generate.
        **generate_kwargs: The arguments of `generate`.

    Returns:
        An `Explanation` (`fastgen.patches.transformers.introspection.explain`): the plan or the
        fallback reason, the size of the KV cache and of packed weights in bytes. Printing it shows
        everything.

    Raises:
        TypeError: The model cannot generate.
        Exception: Whatever `generate` raises for these arguments before its decode loop.
    """
    from fastgen.patches.transformers.introspection.explain import explain as explain_transformers

    return explain_transformers(model, **generate_kwargs)


def bild(
    small: Any = None,
    *,
    early_exit: int | None = None,
    fallback_threshold: float | None = None,
    rollback_threshold: float | None = None,
    max_draft: int | None = None,
    lossless: bool = False,
    adaptive_draft: bool | None = None,
) -> AbstractContextManager[Any]:
    """Return a context within which fairseq's generators run big-little decoding, with one beam.

    The small model drafts tokens, and the generator's own model verifies them (`docs/bild.md`).
    In transformers, arguments of `generate` request the same.

    Args:
        small: A fairseq model, or what `from_pretrained` returns. It shares the large model's
            dictionary.
        early_exit: Draft with this many of the large model's first layers instead of `small`.
        fallback_threshold: Drafting stops when the small model's most likely token has a lower
            probability than this (default 0.6).
        rollback_threshold: A drafted token is rejected if its -log p (natural log) under the large
            model is higher than this (default 2.0).
        max_draft: Maximum number of tokens per draft (default 10).
        lossless: Accept only tokens that the large model would have chosen. The output is that of
            ``--beam 1``.
        adaptive_draft: Draft only while measured timings show that drafting is faster. Requires
            `lossless`, and is on by default with it.

    Returns:
        A context manager. It yields an object whose `counts` sum the drafted tokens, model calls,
        fallbacks and rollbacks of all texts.

    Raises:
        ValueError: An option has an invalid value, or not exactly one of `small` and `early_exit`
            is given. A generator that cannot decode this way raises it when it is called.
        TypeError: An option has the wrong type.
    """
    from fastgen.patches.fairseq.bild.bild import bild as bild_of_fairseq

    values = {
        "fallback_threshold": fallback_threshold,
        "rollback_threshold": rollback_threshold,
        "max_draft": max_draft,
        "lossless": lossless or None,
        "adaptive_draft": adaptive_draft,
    }
    options = {name: value for name, value in values.items() if value is not None}
    return bild_of_fairseq(small, early_exit, options)


def prefix_cache(*, bytes: int = 2**30) -> AbstractContextManager[Any]:  # noqa: A002
    """Return a context in which prompts reuse keys and values of the first tokens of earlier ones.

    A chat that sends its history again runs only what is new, and a system prompt runs once. This
    holds for decoder-only models of transformers whose decode steps fastgen reads from the weights.
    All texts of a batch have to begin alike. The cache is emptied when a model changes.
    ``FASTGEN_PREFIX_CACHE=1GiB`` does the same for a whole process, and for all of its threads.

    Args:
        bytes: Maximum size of the keys and values that this context keeps, of all models together.
            Those used least recently are dropped.

    Returns:
        A context manager. It yields an object whose ``hits`` counts how often the cache had the
        first tokens of prompts, or a source, and ``tokens`` how many tokens these were.

    Raises:
        TypeError: `bytes` is not an integer.
        ValueError: `bytes` is negative.
    """
    from fastgen.patches.transformers.planning.cached_prompt import prefix_caching

    return prefix_caching(bytes)


def generate_stream(model: Any, inputs: Iterable[Any], **options: Any) -> Iterator[Any]:
    """Yield the output of ``model.generate`` for each input, in input order.

    Inputs are sorted by length and generated in batches, so that batches contain little padding.

    Args:
        model: A transformers model that can generate.
        inputs: The token ids of each sentence, without padding.
        **options: The arguments of `generate`, and those of the stream:
            ``max_tokens``, the size of a batch in tokens, padding included;
            ``window``, how many sentences are read ahead and sorted by length;
            ``scores``, whether to yield pairs of sequences and their scores;
            ``wanted``, a function of a sentence's number that returns False to cancel it;
            ``on_tokens``, a function that receives each sentence's tokens as they become final.
            ``forced_bos_token_id`` may be an iterable with one token per sentence.

    Yields:
        (N, L) int64: the N sequences of one sentence. See
        `fastgen.patches.transformers.streaming.stream` for all options.

    Raises:
        TypeError: An argument is not supported by streams; the message names it.
        ValueError: An option or an input has an invalid value; the message contains it.
    """
    from fastgen.patches.transformers.streaming.stream import generate_stream as stream

    return stream(model, inputs, **options)


def score(
    model: Any,
    texts: Iterable[Any],
    sources: Iterable[Any] | None = None,
    *,
    tokenizer: Any = None,
    max_length: int | None = None,
    stride: int | None = None,
    max_tokens: int = 4096,
) -> list[Any]:
    """Return the log-probability of every token of `texts`, without storing all logits at once.

    For a text that fits one window, the mean of ``-log_probs`` is the loss of ``model(ids,
    labels=ids)``. A longer text is split into overlapping windows. Each token is scored in the
    first window that contains it: from the second window on, at least ``max_length - stride``
    tokens precede it.

    Args:
        model: A transformers model of a family whose `generate` is accelerated, in evaluation mode.
        texts: The token ids of each text, without padding; or strings, which require a `tokenizer`.
        sources: For encoder-decoder models, the source of each text, in the same form.
        tokenizer: Converts strings to token ids, special tokens included: ``tokenizer(text)``, and
            ``tokenizer(text_target=text)`` for the texts of encoder-decoder models.
        max_length: Maximum tokens per window; None for the number of positions of the model.
        stride: Distance in tokens between the starts of two windows; None for half of `max_length`.
        max_tokens: Maximum tokens per batch, padding included.

    Returns:
        One `TextScore` (`fastgen.patches.transformers.introspection.score`) per text: `log_probs`
        (L,), `tokens`, `total`.

    Raises:
        TypeError: Texts are strings and `tokenizer` is None, or `texts` is a single string.
        ValueError: An option or a text has an invalid value, or the model's family is not
            supported.
    """
    from fastgen.patches.transformers.introspection.score import score as score_texts

    return score_texts(model, texts, sources, tokenizer, max_length, stride, max_tokens)


def _is_command() -> bool:
    """Return whether this process runs one of fastgen's commands.

    Commands check by themselves whether they can start, and print why not.
    """
    place = len(sys.orig_argv) - len(sys.argv)  # index of the script, or of `python -m`'s module
    program = sys.orig_argv[place].removeprefix("-m") if 0 <= place < len(sys.orig_argv) else ""
    return Path(program).stem in ("fastgen", "fastgen-generate", "fastgen-interactive")


try:
    start()
    if settings().report:
        atexit.register(lambda: print(f"\n{status()}", file=sys.stderr))
except SetupError:
    if not _is_command():
        raise
