"""Base class of logits transforms: what a logits processor does, in a form that backends can use.

The pipeline and the backends ask a transform these questions, and never for its class.
"""

from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fastgen.decoding.logits.text import Text
from fastgen.ops.selection.kbest import SparseUpdate
from fastgen.ops.selection.token_mask import empty_mask, unpacked

Form = Literal["token mask", "sparse update", "forced token", "dense"]


class NGrams(NamedTuple):
    """N-grams that must not be repeated, as C reads them.

    Attributes:
        n: Size of the n-grams.
        least: Minimum length of a text in which a token can be banned.
        source: (B, S) int64 source texts, or (1, S) for all sentences; None for the text itself.
    """

    n: int
    least: int
    source: Tensor | None


class Penalty(NamedTuple):
    """A repetition penalty, as C reads it.

    Attributes:
        factor: Factor of negative scores and divisor of the others; positive and finite in fp32.
        start: Index of the first token that counts, for all rows or (R,) int64 per row.
    """

    factor: float
    start: int | Tensor


class Offsets(NamedTuple):
    """Numbers that are added to the scores of some tokens in all rows, as C reads them.

    Attributes:
        tokens: (N,) int64 on the CPU, distinct.
        values: (N,) fp32, finite.
    """

    tokens: Tensor
    values: Tensor


class Warper(NamedTuple):
    """A filter of the scores from which tokens are drawn, as C reads it.

    Attributes:
        kind: What the filter is; `"temperature"` divides the scores.
        value: Its parameter.
    """

    kind: Literal["temperature", "top-k", "top-p", "min-p"]
    value: float


class LogitsTransform:
    """A transform of the scores (R, V) before token selection.

    Scores are logits, or log-probabilities in a beam search. A subclass implements the method of
    its form, and `__call__` unless the form is a token mask:

    | `form` | what the transform does | method |
    |---|---|---|
    | `"token mask"` | some tokens become -inf | `add_to_mask` |
    | `"sparse update"` | some scores are multiplied or shifted | `sparse_update` |
    | `"forced token"` | one token per row remains, with score 0 | `forced_tokens` |
    | `"dense"` | anything else | `__call__` |

    All forms but `"dense"` run inside the k-best kernels, which write no log-probabilities. C
    applies a token mask if `reads_text` is false or `ngrams` describes it. In greedy
    search and sampling it also applies a sparse update that `update` describes, and in sampling the
    last transforms if they are warpers.

    Attributes:
        form: What the transform does.
        by_length: Whether the transform is idle at some lengths, at which a backend that does not
            implement it can run.
        reads_text: Whether the result depends on the tokens of the text, not just on its length.
        needs_log_probs: Whether the sparse update equals the transform only for scores that are
            not positive.
        in_place: Whether `__call__` may change its argument, so that a caller that keeps the
            scores passes a copy.
        warper: Description of a filter that keeps at least one token and gives -inf to the others;
            None if the transform is not one.
        unread: Fields that a captured step does not read, or whose effect `phase` says.
    """

    form: Form = "dense"
    by_length: bool = False
    reads_text: bool = True
    needs_log_probs: bool = False
    in_place: bool = True
    warper: Warper | None = None
    unread: ClassVar[tuple[str, ...]] = ()

    @property
    def capturable(self) -> bool:
        """Whether the transform can be captured as part of a CUDA graph.

        It then runs the same kernels whenever `phase` is equal, reads what changes on the device
        and never synchronizes with it.
        """
        return self.form != "dense"

    @property
    def ngrams(self) -> NGrams | None:
        """N-grams that describe the whole token mask; None if there is no such description."""
        return None

    @property
    def update(self) -> Penalty | Offsets | None:
        """Description of the whole sparse update at every length; None if there is none."""
        return None

    @property
    def raises_scores(self) -> bool:
        """Whether the sparse update may make a score positive that was not."""
        return False

    @property
    def depends_on_rows(self) -> bool:
        """Whether the transform holds state of single sentences, which `keep_sentences` selects."""
        return False

    def active(self, length: int) -> bool:
        """Return whether the transform may change the scores of texts of this length."""
        return True

    def phase(self, length: int) -> int:
        """Return a key of the behavior at a length; equal keys mean equal behavior."""
        return self.active(length)

    def idle(self, text: Text) -> bool:
        """Return whether to skip the transform in this step.

        The next transform, such as a user's function, then gets the same tensor and not a copy.
        """
        return not self.active(text.length)

    def keep_sentences(self, sentences: Tensor, beams: int) -> None:
        """Keep the state of only the given sentences.

        Args:
            sentences: int64 indices into the current batch.
            beams: Rows per sentence.
        """

    def add_to_mask(self, mask: Tensor, text: Text, vocabulary: int) -> None:
        """Add the banned tokens to a token mask (R, ceil(V / 32)) int32."""
        raise NotImplementedError(f"{type(self).__name__} is not a token mask")

    def token_mask(self, text: Text, vocabulary: int) -> Tensor:
        """Return the banned tokens as a new token mask (R, ceil(V / 32)) int32."""
        mask = empty_mask(text.ids.shape[0], vocabulary, text.ids.device)
        self.add_to_mask(mask, text, vocabulary)
        return mask

    def sparse_update(self, text: Text, vocabulary: int) -> SparseUpdate:
        """Return the transform as a sparse update of log-probabilities."""
        raise NotImplementedError(f"{type(self).__name__} is not a sparse update")

    def forced_tokens(self, rows: int, device: torch.device) -> Tensor:
        """Return the forced token of each row, (R,) int64."""
        raise NotImplementedError(f"{type(self).__name__} forces no token")

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        """Return the transformed scores (R, V); by default those of the token mask."""
        mask = self.token_mask(text, scores.shape[1])
        return scores.masked_fill_(unpacked(mask, scores.shape[1]), -torch.inf)
