"""How long the sources of a call of `SequenceGenerator` are, and its hypotheses at most."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor


def source_lengths(
    original: Callable[..., Any], generator: Any, net_input: dict[str, Tensor]
) -> Tensor:
    """Return the lengths (B,) of the sources: as given where fairseq's own code asks for them, else without ends.

    What is given counts the ends. 0.12.2 does not ask for it; the fork does, and so may what calls itself 0.12.2 too.
    """
    if "src_lengths" in net_input and "src_lengths" in inspect.unwrap(original).__code__.co_consts:
        return net_input["src_lengths"]
    source = net_input["src_tokens"]
    return (source.ne(generator.eos) & source.ne(generator.pad)).long().sum(1)


def longest_of(generator: Any, source: Tensor, lengths: Tensor | None = None) -> int:
    """Tokens of a hypothesis at most, its end not counted; lengths: where `match_source_len` wants them."""
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
