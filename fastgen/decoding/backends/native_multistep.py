"""Steps of a search that C makes in a row, choices and all: as many as nobody has to look at.

Between two steps C decides all that is plain: which candidates go on, what has finished, what may not come next. Where
values are equal, where sentences are to leave, where a buffer is full, Python goes on with the same state.
"""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

from fastgen.decoding.logits.transforms import Ban, LogitsTransform, NGramBlock, Text
from fastgen.decoding.search.stopping import Stop
from fastgen.models.runtime.native_multistep_job import Prepared
from fastgen.ops.dispatch import in_memory, plain
from fastgen.ops.native import search as c
from fastgen.ops.selection.token_mask import add_tokens_, empty_mask

MOST = 64
"""Steps in a row at most, for which a search is asked what may come next."""


class MultistepModel(Protocol):
    """A stepper whose decode steps C can run."""

    @property
    def supports_multistep(self) -> bool:
        """Whether C may run them now; asked before each, so that it costs next to nothing where it never can."""
        ...

    def step(self, ids: Tensor) -> Any:
        """Run the newest token of ids (R, L) by itself."""
        ...

    def begin_steps(self, most: int) -> Prepared | None:
        """Have at most so many steps ready; None where they have to be made one at a time."""
        ...

    def end_steps(self, run: int, began: Sequence[float], is_open: bool) -> None:
        """So many steps have been made, which began then; is_open: whether the slots of the next are open."""
        ...


def able(stop: Stop, transforms: Sequence[LogitsTransform]) -> bool:
    """Whether C knows when texts end, and what may not come next."""
    return not stop.others and stop.longest is not None and all(map(_may_pass, transforms))


def _may_pass(edit: LogitsTransform) -> bool:
    """Whether an edit is one that C makes, or that may do nothing at some lengths."""
    return isinstance(edit, NGramBlock | Ban) or getattr(edit, "active", None) is not None


class Steps:
    """What C needs to know of a search beside its texts, as long as one lasts."""

    def __init__(self, stop: Stop, transforms: Sequence[LogitsTransform]) -> None:
        self.stop, self.transforms = stop, transforms
        blocks = [
            e
            for e in transforms
            if isinstance(e, NGramBlock) and (e.source is None or e.source.numel() > 0)
        ]
        self._sources = [None if e.source is None else e.source.contiguous().cpu() for e in blocks]
        self._ngrams = (c.NGrams * len(blocks))(*map(_ngrams, blocks, self._sources))
        self.ends = (
            torch.empty(0, dtype=torch.int64, device="cpu")
            if stop.eos is None
            else stop.eos.to(torch.int64).cpu()
        )
        self._sets: dict[tuple[tuple[bool, ...], int], Tensor] = {}
        self._others = [e for e in transforms if not isinstance(e, NGramBlock | Ban)]
        self._bans = [e for e in transforms if isinstance(e, Ban)]

    def covers(self, sentences: int) -> bool:
        """Whether C can read the sources of n-grams, of all sentences or of each of so many."""
        sources = (source for source in self._sources if source is not None)
        return all(
            in_memory(each, dtype=torch.int64) and len(each) in (1, sentences) for each in sources
        )

    def alike(self, text: Text) -> int:
        """For how many steps the same may not come next, up to `MOST`; 0 where something else is edited."""
        now = self._active(text.length)
        for steps in range(MOST):
            length = text.length + steps
            if self._active(length) != now or not all(
                e.idle(_at(text, length)) for e in self._others
            ):
                return steps
            if self.stop.longest is not None and length + 1 >= self.stop.longest:
                return steps + 1
        return MOST

    def texts(
        self, text: Text, ids: Tensor, rows: int, prepared: Prepared, leave: int
    ) -> tuple[c.Texts, list[Any]]:
        """What C reads of texts ids (B, M, L), or (R, L), and what has to be held for it."""
        vocabulary, longest = prepared.logits.shape[1], self.stop.longest
        assert longest is not None
        banned = self._banned(text, vocabulary)
        sets = (
            None
            if banned is None and not self._sources
            else empty_mask(rows, vocabulary, ids.device)
        )
        texts = c.Texts(
            ids=ids.data_ptr(), ids_b=ids.stride(0), ids_m=ids.stride(1) if ids.dim() == 3 else 0, length=text.length,
            prompt=text.prompt_length, ends_at=longest, ends=self.ends.data_ptr(), end_count=len(self.ends),
            ngrams=ctypes.addressof(self._ngrams), ngram_count=len(self._sources),
            banned=None if banned is None else banned.data_ptr(), sets=None if sets is None else sets.data_ptr(),
            leave=leave, steps=prepared.steps,
        )  # fmt: skip
        return texts, [banned, sets, ids]

    def note(self, length: int, made: int) -> None:
        """Ask whether texts end at the lengths that they have come to: a limit may warn, before the last one too."""
        for reached in range(max(length, length + made - 2) + 1, length + made + 1):
            self.stop.ends_all(reached)

    def _active(self, length: int) -> tuple[bool, ...]:
        return tuple(ban.active(length) for ban in self._bans)

    def _banned(self, text: Text, vocabulary: int) -> Tensor | None:
        """The set of tokens that may not come next in any text; None for none."""
        key = self._active(text.length), vocabulary
        if not any(key[0]):
            return None
        if key not in self._sets:
            made = empty_mask(1, vocabulary, torch.device("cpu"))
            for ban, active in zip(self._bans, key[0], strict=True):
                if active:
                    add_tokens_(made, ban.tokens[None], vocabulary)
            self._sets[key] = made
        return self._sets[key]


def _ngrams(block: NGramBlock, source: Tensor | None) -> c.NGrams:
    found = c.NGrams(block.n, block.least)
    if source is not None:
        found.source, found.source_length = source.data_ptr(), source.shape[1]
        found.source_b = source.stride(0) if len(source) > 1 else 0
    return found


def _at(text: Text, length: int) -> Text:
    return Text(text.ids, text.prompt_length, length)


def covers_sight(prepared: Prepared, sentences: int, beams: int) -> bool:
    """Whether each beam has a row of its own in what is seen, which C writes to."""
    mask, own = prepared.mask, prepared.own
    return (
        mask is not None
        and plain(mask, own)
        and mask.shape[:2] == (sentences, beams)
        and mask.stride(2) == 1
        and own.shape == (beams, beams)
        and own.is_contiguous()
    )


def sight(prepared: Prepared) -> c.Sight:
    """What beams see of the text, of a decoder with a mask, whose next slots are open."""
    mask = prepared.mask
    assert mask is not None
    return c.Sight(
        mask=mask.data_ptr(), own=prepared.own.data_ptr(), mask_b=mask.stride(0), mask_m=mask.stride(1),
        prefix=prepared.prefix, filled=prepared.filled, room=mask.shape[2] - prepared.prefix, open=mask.shape[1],
    )  # fmt: skip


class Outcome(NamedTuple):
    """What steps in C have come to.

    Attributes:
        status: why there are no more, as `ops.native.search` has it. made: tokens chosen in each text.
    """

    status: int
    made: int

    @property
    def alone(self) -> bool:
        """Whether the next step has to be made by itself: a token is no row of the embedding, which torch says."""
        return self.status == c.NO_ROW and self.made == 0


def run(
    model: MultistepModel,
    prepared: Prepared,
    texts: c.Texts,
    search: Callable[[int], int],
    is_open: Callable[[], bool],
) -> Outcome:
    """Make steps, and tell the model of them.

    Args:
        search: makes them with so many threads, and says why there are no more.
        is_open: of `MultistepModel.end_steps`, then.
    Raises:
        OutOfMemoryError: there was no memory.
    """
    status = search(torch.get_num_threads())
    if status == c.NO_MEMORY:
        raise torch.OutOfMemoryError(
            f"no memory for {prepared.steps} decode steps of {len(prepared.logits)} rows in C"
        )
    began: list[float] = cast(Any, prepared.began).tolist()
    model.end_steps(texts.run, began[: texts.run], is_open())
    return Outcome(status, texts.made)


_Search = TypeVar("_Search")


class NativeMultistep(ABC, Generic[_Search]):
    """The decode backend that runs many steps of a search in C per call, token selection included.

    It hands back to Python where a step has to be observed: where values are equal, sentences leave, a buffer is full
    or a logits transform wakes up.
    """

    def __init__(self, search: _Search, model: MultistepModel) -> None:
        self.search, self.model, self.steps = search, model, self._steps_of(search)

    @classmethod
    def supports(cls, search: Any, model: Any) -> bool:
        """Whether C covers this search, and may cover the steps of this model."""
        return hasattr(model, "begin_steps") and cls.covers(search)

    @staticmethod
    @abstractmethod
    def covers(search: Any) -> bool:
        """Whether C selects the tokens of a search, and nobody observes its steps."""

    @staticmethod
    @abstractmethod
    def _steps_of(search: Any) -> Steps: ...

    @abstractmethod
    def _run(self) -> Any:
        """Run steps as long as nobody has to observe one; return whether the search goes on.

        Where Python has to select the next tokens: what the last step returned. Where the next step has to run by
        itself: None.
        """

    def advance(self) -> bool:
        found = self._run() if self.model.supports_multistep else None
        if isinstance(found, bool):
            return found
        search: Any = self.search
        return search.advance(
            self.model, self.model.step(search.text.ids) if found is None else found
        )
