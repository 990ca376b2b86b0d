"""fastgen: `import fastgen`, and `generate` gives the same output sooner.

Importing it patches the toolkits that are or will be imported, unless the variable ``FASTGEN`` says otherwise. It
imports no toolkit and not torch.

    status()            the calls so far: accelerated, partly or not, why, and what would help
    explain(model, **)  what a `model.generate(**)` would run, and the bytes of its keys and values, without running it
    bild(small, **)     fairseq: within it, a small model drafts and the generator's own looks over what it drafted
    generate_stream(model, inputs, **)  many sentences in batches of like lengths, results in their order
    score(model, texts, **)  log-probabilities of texts that are given, token by token
    disable(), enable() take the patches out, put them back
    disabled()          a context in which the toolkit's own code runs
    release()           drop the memory kept between calls
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
    "release",
    "score",
    "status",
]


def explain(model: Any, **generate_kwargs: Any) -> Any:
    """Say what ``model.generate(**generate_kwargs)`` would run, without running it.

    It also gives the bytes of keys and values, and of the packed copies of weights.

    The command ``fastgen explain MODEL`` does the same for a model's folder.

    Args:
        model: a transformers model that can generate.
        generate_kwargs: what `generate` would be given.
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
    """Return a context in which fairseq's generators, with one beam, decode by a small model and their own.

    The small model drafts, and the generator's model looks over what it drafted (big-little decoding, `docs/bild.md`).
    In transformers the same is asked for by arguments of `generate`.

    Args:
        small: a fairseq model, or what `from_pretrained` returns, of the same dictionary as the large one.
        early_exit: in its place, how many of the large model's own first layers draft.
        fallback_threshold: probability of its likeliest token below which the small model stops (0.6).
        rollback_threshold: -log p under the large model above which a drafted token does not stand (2.0).
        max_draft: tokens that it drafts in a row at most (10).
        lossless: let none stand but the large model's own: the output is that of ``--beam 1``.
        adaptive_draft: draft only where that is faster, by the clock; needs `lossless`, and goes with it.

    What the context yields has `counts`, summed over all texts.

    Raises:
        ValueError, TypeError: an option is not one that it can have; a generator cannot decode so (when it is called).
    """
    from fastgen.patches.fairseq.bild.bild import bild as bild_of_fairseq

    given = {
        "fallback_threshold": fallback_threshold,
        "rollback_threshold": rollback_threshold,
        "max_draft": max_draft,
        "lossless": lossless or None,
        "adaptive_draft": adaptive_draft,
    }
    asked = {name: value for name, value in given.items() if value is not None}
    return bild_of_fairseq(small, early_exit, asked)


def generate_stream(model: Any, inputs: Iterable[Any], **options: Any) -> Iterator[Any]:
    """Yield what ``model.generate`` gives for each of `inputs`, in their order, from batches of like lengths.

    Args:
        model: a transformers model that can generate.
        inputs: the token ids of each sentence, without padding.
        options: ``max_tokens`` of a batch, ``window`` of sentences to sort by length, ``scores`` for pairs of sequences
            and their scores, ``wanted``, a function that says whether somebody still waits for a sentence,
            ``on_tokens``, a function that gets the tokens of each sentence as they come, and what `generate` takes;
            ``forced_bos_token_id`` may have a token for each sentence.

    Yields:
        (N, L) int64: the sequences of a sentence; see `fastgen.patches.transformers.streaming.stream`.
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
    """Return how likely a model finds each of `texts`, token by token, without ever holding the logits of all tokens.

    The mean of ``-log_probs`` of a text of one window is the loss that ``model(ids, labels=ids)`` gives. A longer text
    is read in windows, each token being scored in the first one that has it, so that at least
    ``max_length - stride`` tokens precede it.

    Args:
        model: a transformers model of a family that `generate` is accelerated for, in evaluation mode.
        texts: the token ids of each, without padding; or strings, which need a `tokenizer`.
        sources: of encoder-decoder models, each text's source, likewise.
        tokenizer: makes token ids of strings, special tokens included, as ``tokenizer(text)`` and for the texts of
            encoder-decoder models ``tokenizer(text_target=text)`` do.
        max_length: tokens of a window at most; None for what the model has positions for.
        stride: how many tokens a window lies behind the one before; None for half of `max_length`.
        max_tokens: tokens of a batch, padding counted.

    Returns:
        `TextScore` objects (`introspection.score`), one for each text: `log_probs` (L,), `tokens`, `total`.

    Raises:
        TypeError: texts are strings and there is no `tokenizer`, or they are one string and not several.
        ValueError: an option or a text is not one that there can be, or the model is of another family.
    """
    from fastgen.patches.transformers.introspection.score import score as score_texts

    return score_texts(model, texts, sources, tokenizer, max_length, stride, max_tokens)


def _is_command() -> bool:
    """Whether this process runs a command of fastgen's: each asks itself whether it can start, and says why not."""
    place = len(sys.orig_argv) - len(sys.argv)  # of the script, or of the module behind `python -m`
    program = sys.orig_argv[place].removeprefix("-m") if 0 <= place < len(sys.orig_argv) else ""
    return Path(program).stem in ("fastgen", "fastgen-generate", "fastgen-interactive")


try:
    start()
    if settings().report:
        atexit.register(lambda: print(f"\n{status()}", file=sys.stderr))
except SetupError:
    if not _is_command():
        raise
