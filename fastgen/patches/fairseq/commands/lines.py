"""Output lines of `fairseq-generate` and `fairseq-interactive`, built from plain Python numbers.

fairseq builds the same text from tensors, element by element, which takes as long as decoding with
a small model.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fairseq import utils
from torch import Tensor


@dataclass
class PlainHypothesis:
    """A hypothesis as plain numbers.

    Attributes:
        tokens: Token ids.
        score: Score, in base 2.
        token_scores: Scores of the tokens, in base 2.
        alignment: fairseq's alignment; an empty list if there is none.
    """

    tokens: list[int]
    score: float
    token_scores: list[float]
    alignment: Any


@dataclass
class Sentence:
    """A sentence, its translations and its reference, as plain numbers.

    Attributes:
        number: fairseq's number of the sentence.
        source: Token ids, or the text if unknown words are to be replaced from it; None if absent.
        target: The same for the reference.
        hypotheses: The translations, best first.
        constraints: Constraints of `fairseq-interactive`.
        seconds: Translation time, in `fairseq-interactive`.
    """

    number: int
    source: list[int] | str | None
    target: list[int] | str | None
    hypotheses: list[PlainHypothesis]
    constraints: list[Tensor] = field(default_factory=list[Tensor])
    seconds: float | None = None


@dataclass
class Scored:
    """A scorer's input for one sentence: texts, and the tokens they are encoded as."""

    target: str
    hypothesis: str
    target_tokens: list[int]
    hypothesis_tokens: list[int]


@dataclass
class LineFormatter:
    """Formatter of a sentence's output lines.

    Attributes:
        source_dictionary: fairseq's dictionary of the source, or None.
        target_dictionary: fairseq's dictionary of the target.
        ignored: Symbols that are never printed.
        decode: Undoes the tokenization of a text.
        post_process: fairseq's `--post-process`: how word pieces are joined.
        nbest: Number of hypotheses per sentence.
        quiet: Whether to print nothing.
        decode_hypothesis: Whether to print D lines.
        align: The alignment dictionary for replacing unknown words, or None.
        print_alignment: "hard", "soft" or None.
        interactive: Whether sources are printed as they were split into words.
    """

    source_dictionary: Any
    target_dictionary: Any
    ignored: set[int]
    decode: Callable[[str], str]
    post_process: str | None = None
    nbest: int = 1
    quiet: bool = False
    decode_hypothesis: bool = True
    align: Any = None
    print_alignment: str | None = None
    interactive: bool = False

    def batch(self, sentences: list[Sentence]) -> tuple[str, list[Scored]]:
        """Return the output lines of sentences, and the scorer's inputs."""
        lines: list[str] = []
        scored: list[Scored] = []
        for sentence in sentences:
            entry = self._sentence(sentence, lines)
            if entry is not None:
                scored.append(entry)
        return "".join(f"{line}\n" for line in lines), scored

    def _sentence(self, sentence: Sentence, lines: list[str]) -> Scored | None:
        """Append the lines of a sentence.

        Returns:
            The scorer's input; None if the sentence has no reference.
        """
        number, output = sentence.number, _Nothing() if self.quiet else lines
        source = self._text(self.source_dictionary, sentence.source)
        target = (
            None
            if sentence.target is None
            else self._text(self.target_dictionary, sentence.target, target=True)
        )
        if not self.interactive:
            source = self.decode(source)
            target = None if target is None else self.decode(target)
        if self.source_dictionary is not None:
            output.append(f"S-{number}\t{source}")
        if sentence.seconds is not None:
            output.append(f"W-{number}\t{sentence.seconds:.3f}\tseconds")
        for constraint in sentence.constraints:
            output.append(
                f"C-{number}\t{self.target_dictionary.string(constraint, self.post_process)}"
            )
        if target is not None:
            output.append(f"T-{number}\t{target}")
        scored: Scored | None = None
        for rank, hypothesis in enumerate(sentence.hypotheses[: self.nbest]):
            tokens, text, alignment = utils.post_process_prediction(
                hypo_tokens=hypothesis.tokens,
                src_str=source,
                alignment=hypothesis.alignment,
                align_dict=self.align,
                tgt_dict=self.target_dictionary,
                remove_bpe=self.post_process,
                extra_symbols_to_ignore=self.ignored,
            )
            scores = target is not None and rank == 0
            decoded = self.decode(text) if self.decode_hypothesis or scores else ""
            output.append(f"H-{number}\t{hypothesis.score}\t{text}")
            if self.decode_hypothesis:
                output.append(f"D-{number}\t{hypothesis.score}\t{decoded}")
            output.append(
                f"P-{number}\t{' '.join(f'{score:.4f}' for score in hypothesis.token_scores)}"
            )
            if self.print_alignment:
                output.append(f"A-{number}\t{_aligned(alignment, self.print_alignment)}")
            if scores:
                assert target is not None
                scored = self._scored(sentence, target, decoded, tokens)
        return scored

    def _text(self, dictionary: Any, tokens: list[int] | str | None, target: bool = False) -> str:
        if dictionary is None or tokens is None:
            return ""
        if isinstance(tokens, str):
            return tokens
        if target:
            return dictionary.string(
                tokens, self.post_process, escape_unk=True, extra_symbols_to_ignore=self.ignored
            )
        return dictionary.string(tokens, self.post_process)

    def _scored(self, sentence: Sentence, target: str, hypothesis: str, tokens: Any) -> Scored:
        """Encode both texts again if unknown words were replaced or word pieces joined."""
        if self.align is not None or self.post_process is not None:
            encode = self.target_dictionary.encode_line
            encoded = [
                encode(text, add_if_not_exist=True).tolist() for text in (target, hypothesis)
            ]
            return Scored(target, hypothesis, *encoded)
        assert isinstance(sentence.target, list)
        return Scored(target, hypothesis, sentence.target, list(tokens))


class _Nothing:
    """A list that discards what is appended."""

    def append(self, line: str) -> None:
        pass


def _aligned(alignment: Any, kind: str) -> str:
    if kind == "soft":
        return " ".join(",".join(probabilities) for probabilities in alignment)
    return " ".join(f"{source}-{target}" for source, target in alignment)


def plain_hypotheses(hypotheses: list[dict[str, Any]]) -> list[PlainHypothesis]:
    """Convert fairseq's hypotheses to plain numbers, with one device read per field."""
    return [
        PlainHypothesis(
            hypothesis["tokens"].tolist(),
            float(hypothesis["score"] / math.log(2)),
            (hypothesis["positional_scores"].cpu() / math.log(2)).tolist(),
            _plain(hypothesis["alignment"]),
        )
        for hypothesis in hypotheses
    ]


def _plain(alignment: Any) -> Any:
    """Return an alignment, and an empty list instead of fairseq's empty tensor.

    An empty tensor is slow to send to another process.
    """
    return [] if isinstance(alignment, Tensor) and alignment.numel() == 0 else alignment
