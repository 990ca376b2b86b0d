"""What `fairseq-generate` and `fairseq-interactive` print of a sentence, made from plain Python numbers.

fairseq makes the same text out of tensors, an element at a time, which takes as long as a small model's decoding.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fairseq import utils
from torch import Tensor


@dataclass
class Spoken:
    """A hypothesis: tokens, score and scores of the tokens in base 2, and what it is aligned to."""

    tokens: list[int]
    score: float
    token_scores: list[float]
    alignment: Any


@dataclass
class Sentence:
    """A sentence, its translations and its reference as numbers.

    source: its tokens, or its text where unknown words are to be replaced from it; None where there is none.
    target: likewise.
    constraints: of interactive; seconds: spent on its translation, of interactive too.
    """

    number: int
    source: list[int] | str | None
    target: list[int] | str | None
    hypotheses: list[Spoken]
    constraints: list[Tensor] = field(default_factory=list[Tensor])
    seconds: float | None = None


@dataclass
class Scored:
    """What a scorer is given of a sentence: texts, or the tokens they are encoded as."""

    target: str
    hypothesis: str
    target_tokens: list[int]
    hypothesis_tokens: list[int]


@dataclass
class Speaker:
    """Turns sentences into lines; with all that this takes.

    Attributes:
        ignored: symbols that are never printed.
        decode: undoes the tokenization of a text.
        decode_hypothesis: whether D lines are printed.
        align: the alignment dictionary, by which unknown words are replaced; None for none.
        print_alignment: "hard", "soft" or None.
        interactive: whether sources are printed as they were split into words.
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
        """The lines of some sentences, and what is scored of them."""
        lines: list[str] = []
        scored: list[Scored] = []
        for sentence in sentences:
            found = self._sentence(sentence, lines)
            if found is not None:
                scored.append(found)
        return "".join(f"{line}\n" for line in lines), scored

    def _sentence(self, sentence: Sentence, lines: list[str]) -> Scored | None:
        """Append the lines of a sentence; return what is scored of it, where it has a reference."""
        number, said = sentence.number, _Nothing() if self.quiet else lines
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
            said.append(f"S-{number}\t{source}")
        if sentence.seconds is not None:
            said.append(f"W-{number}\t{sentence.seconds:.3f}\tseconds")
        for constraint in sentence.constraints:
            said.append(
                f"C-{number}\t{self.target_dictionary.string(constraint, self.post_process)}"
            )
        if target is not None:
            said.append(f"T-{number}\t{target}")
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
            said.append(f"H-{number}\t{hypothesis.score}\t{text}")
            if self.decode_hypothesis:
                said.append(f"D-{number}\t{hypothesis.score}\t{decoded}")
            said.append(
                f"P-{number}\t{' '.join(f'{score:.4f}' for score in hypothesis.token_scores)}"
            )
            if self.print_alignment:
                said.append(f"A-{number}\t{_aligned(alignment, self.print_alignment)}")
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
        """As tokens: with unknown words replaced or without word pieces, those of the texts."""
        if self.align is not None or self.post_process is not None:
            encode = self.target_dictionary.encode_line
            encoded = [
                encode(text, add_if_not_exist=True).tolist() for text in (target, hypothesis)
            ]
            return Scored(target, hypothesis, *encoded)
        assert isinstance(sentence.target, list)
        return Scored(target, hypothesis, sentence.target, list(tokens))


class _Nothing:
    """A list that stays empty."""

    def append(self, line: str) -> None:
        pass


def _aligned(alignment: Any, kind: str) -> str:
    if kind == "soft":
        return " ".join(",".join(probabilities) for probabilities in alignment)
    return " ".join(f"{source}-{target}" for source, target in alignment)


def spoken(hypotheses: list[dict[str, Any]]) -> list[Spoken]:
    """fairseq's hypotheses as plain numbers; one read of the device for each field."""
    return [
        Spoken(
            hypothesis["tokens"].tolist(),
            float(hypothesis["score"] / math.log(2)),
            (hypothesis["positional_scores"].cpu() / math.log(2)).tolist(),
            _plain(hypothesis["alignment"]),
        )
        for hypothesis in hypotheses
    ]


def _plain(alignment: Any) -> Any:
    """An alignment; where there is none fairseq has an empty tensor, which takes another process long to read."""
    return [] if isinstance(alignment, Tensor) and alignment.numel() == 0 else alignment
