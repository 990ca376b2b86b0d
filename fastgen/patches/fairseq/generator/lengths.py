"""Source lengths of a call of `SequenceGenerator`, and the maximum length of its hypotheses."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor


def source_lengths(
    original: Callable[..., Any], generator: Any, net_input: dict[str, Tensor]
) -> Tensor:
    """Return the source lengths (B,).

    fairseq 0.12.2 counts the source tokens without ends and padding. Forks read `src_lengths`,
    which counts the ends, and may report the same version. So the original's code is inspected.

    Args:
        original: fairseq's `_generate`.
        generator: fairseq's generator.
        net_input: The model inputs of the sample.
    """
    if "src_lengths" in net_input and "src_lengths" in inspect.unwrap(original).__code__.co_consts:
        return net_input["src_lengths"]
    source = net_input["src_tokens"]
    return (source.ne(generator.eos) & source.ne(generator.pad)).long().sum(1)


def longest_of(generator: Any, source: Tensor, lengths: Tensor | None = None) -> int:
    """Return the maximum tokens of a hypothesis, without its end.

    Args:
        generator: fairseq's generator.
        source: (B, S) int64.
        lengths: (B,), the source lengths; required with `match_source_len`.
    """
    if generator.match_source_len:
        assert lengths is not None
        longest = int(lengths.max())
    else:
        longest = min(
            int(generator.max_len_a * source.shape[1] + generator.max_len_b), generator.max_len - 1
        )
    assert generator.min_len <= longest, (
        "min_len cannot be larger than max_len, please adjust these!"
    )
    return longest
