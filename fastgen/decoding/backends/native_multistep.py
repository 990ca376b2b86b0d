"""Backend that runs many decode steps of a search in one C call, token selection included.

Between two steps C selects the candidates that continue, stores finished hypotheses and bans
tokens. Python takes over with the same state where values are equal, sentences are to leave, or a
buffer is full.
"""

import ctypes
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

from fastgen.decoding.backends.decode_backend import DecodeBackend, Search
from fastgen.decoding.logits.pipeline import phases
from fastgen.decoding.logits.text import Text
from fastgen.decoding.logits.transform import LogitsTransform, NGrams, Offsets, Penalty
from fastgen.decoding.search.stopping import Stop
from fastgen.models.runtime.native.multistep_job import Prepared
from fastgen.ops.dispatch import in_memory, plain
from fastgen.ops.native import search as c
from fastgen.ops.selection.token_mask import empty_mask

MOST = 64
"""Maximum number of steps per C call for which banned tokens are computed ahead."""


class MultistepModel(Protocol):
    """Stepper whose decode steps C can run."""

    @property
    def supports_multistep(self) -> bool:
        """Whether C may run the next steps. Checked before every step, so it must be cheap."""
        ...

    def step(self, ids: Tensor) -> Any:
        """Run one decode step for the newest token of ids (R, L)."""
        ...

    def begin_steps(self, most: int) -> Prepared | None:
        """Prepare at most `most` steps in C; return None if steps have to run one at a time."""
        ...

    def end_steps(self, run: int, began: Sequence[float], is_open: bool) -> None:
        """Account for steps that C has run.

        Args:
            run: number of steps.
            began: start time of each step, in seconds.
            is_open: whether the KV slots of the next step are already visible.
        """
        ...


def supported(stop: Stop, transforms: Sequence[LogitsTransform]) -> bool:
    """Return whether C supports the stopping criteria and transforms of a search."""
    return (
        not stop.others
        and stop.longest is not None
        and all(
            _bans_in_c(each) or each.update is not None or each.by_length for each in transforms
        )
    )


def _bans_in_c(transform: LogitsTransform) -> bool:
    """Return whether C bans the transform's tokens: n-grams, or one token mask for all texts."""
    return transform.form == "token mask" and (
        transform.ngrams is not None or not transform.reads_text
    )


class Steps:
    """Stopping criteria and transforms of a search in the form that C reads."""

    def __init__(self, stop: Stop, transforms: Sequence[LogitsTransform]) -> None:
        self.stop, self.transforms = stop, transforms
        ngrams = [each.ngrams for each in transforms if each.ngrams is not None]
        blocks = [each for each in ngrams if each.source is None or each.source.numel() > 0]
        self._sources = [None if e.source is None else e.source.contiguous().cpu() for e in blocks]
        self._ngrams = (c.NGrams * len(blocks))(*map(_ngrams, blocks, self._sources))
        self.ends = (
            torch.empty(0, dtype=torch.int64, device="cpu")
            if stop.eos is None
            else stop.eos.to(torch.int64).cpu()
        )
        self._masks: dict[tuple[tuple[int, ...], int], Tensor] = {}
        self._bans = [each for each in transforms if _bans_in_c(each) and each.ngrams is None]
        updates = [each.update for each in transforms]
        self._updating = [each for each, update in zip(transforms, updates, strict=True) if update]
        self._others = [
            each
            for each, update in zip(transforms, updates, strict=True)
            if not _bans_in_c(each) and not update
        ]

    def covers(self, sentences: int) -> bool:
        """Return whether C can read the n-gram sources, shared or one for each of `sentences`."""
        sources = (source for source in self._sources if source is not None)
        return all(
            in_memory(each, dtype=torch.int64) and len(each) in (1, sentences) for each in sources
        )

    def uniform_steps(self, text: Text) -> int:
        """Return for how many steps, up to `MOST`, C can apply the transforms unchanged.

        Returns:
            0 if a transform that C does not implement is active now.
        """
        now = phases(self._bans, text.length)
        for steps in range(MOST):
            length = text.length + steps
            if phases(self._bans, length) != now or not all(
                each.idle(_at(text, length)) for each in self._others
            ):
                return steps
            if self.stop.longest is not None and length + 1 >= self.stop.longest:
                return steps + 1
        return MOST

    def texts(
        self, text: Text, ids: Tensor, rows: int, prepared: Prepared, leave: int
    ) -> tuple[c.Texts, list[Any]]:
        """Return the structure that describes the texts to C.

        Args:
            text: tokens of the running rows.
            ids: token table, (B, M, L) or (R, L) int64.
            rows: R.
            prepared: steps that C is about to run.
            leave: number of finished sentences at which C returns; 0 for never.

        Returns:
            The structure, and the objects that must stay alive while C uses it.
        """
        vocabulary, longest = prepared.logits.shape[1], self.stop.longest
        assert longest is not None
        banned = self._banned(text, vocabulary)
        sets = (
            None
            if banned is None and not self._sources
            else empty_mask(rows, vocabulary, ids.device)
        )
        updates, read = self._updates(rows)
        texts = c.Texts(
            ids=ids.data_ptr(), ids_b=ids.stride(0), ids_m=ids.stride(1) if ids.dim() == 3 else 0,
            length=text.length, prompt=text.prompt_length, ends_at=longest,
            ends=self.ends.data_ptr(), end_count=len(self.ends),
            ngrams=ctypes.addressof(self._ngrams), ngram_count=len(self._sources),
            updates=ctypes.addressof(updates), update_count=len(updates),
            banned=None if banned is None else banned.data_ptr(),
            sets=None if sets is None else sets.data_ptr(),
            leave=leave, steps=prepared.steps,
        )  # fmt: skip
        return texts, [banned, sets, ids, updates, read]

    def note(self, length: int, made: int) -> None:
        """Call the length limits for the newest lengths, because a limit may warn.

        Args:
            length: length of the texts before the C call.
            made: number of tokens that C has selected for each text. The last two lengths are
                checked, because a limit may also warn at the second-to-last one.
        """
        for reached in range(max(length, length + made - 2) + 1, length + made + 1):
            self.stop.ends_all(reached)

    def _updates(self, rows: int) -> tuple[Any, list[Tensor]]:
        """Return the updates of the scores of `rows` texts, and the tensors that C reads."""
        updates, read = (c.Update * len(self._updating))(), list[Tensor]()
        for each, transform in zip(updates, self._updating, strict=True):
            match transform.update:
                case Penalty(factor, start):
                    starts = torch.as_tensor(start, dtype=torch.int64, device="cpu").clamp(min=0)
                    read.append(starts.expand(rows).contiguous())
                    each.penalty, each.starts = factor, read[-1].data_ptr()
                case Offsets(tokens, values):
                    read += [tokens, values]
                    each.tokens, each.offsets = tokens.data_ptr(), values.data_ptr()
                    each.count = len(tokens)
                case None:
                    raise AssertionError(f"{type(transform).__name__} has no update")
        return updates, read

    def _banned(self, text: Text, vocabulary: int) -> Tensor | None:
        """Return the mask of tokens that are banned in all texts, or None if there are none."""
        if not any(ban.active(text.length) for ban in self._bans):
            return None
        key = phases(self._bans, text.length), vocabulary
        if key not in self._masks:
            mask = empty_mask(1, vocabulary, torch.device("cpu"))
            for ban in self._bans:
                ban.add_to_mask(mask, text, vocabulary)
            self._masks[key] = mask
        return self._masks[key]


def _ngrams(block: NGrams, source: Tensor | None) -> c.NGrams:
    ngrams = c.NGrams(block.n, block.least)
    if source is not None:
        ngrams.source, ngrams.source_length = source.data_ptr(), source.shape[1]
        ngrams.source_b = source.stride(0) if len(source) > 1 else 0
    return ngrams


def _at(text: Text, length: int) -> Text:
    return Text(text.ids, text.prompt_length, length)


def covers_sight(prepared: Prepared, sentences: int, beams: int) -> bool:
    """Return whether C can write the attention mask, which needs one row per beam."""
    mask, own = prepared.mask, prepared.own
    return (
        mask is not None
        and plain(mask, own)
        and mask.shape[:2] == (sentences, beams)
        and mask.stride(2) == 1
        and own.shape == (beams, beams)
        and own.is_contiguous()
    )


def slot_mask(prepared: Prepared) -> c.SlotMask:
    """Return the structure that describes the attention mask to C.

    The KV slots of the next step are already visible.

    Args:
        prepared: steps of a decoder that has a mask.
    """
    mask = prepared.mask
    assert mask is not None
    return c.SlotMask(
        mask=mask.data_ptr(), own=prepared.own.data_ptr(),
        mask_b=mask.stride(0), mask_m=mask.stride(1),
        prefix=prepared.prefix, filled=prepared.filled,
        room=mask.shape[2] - prepared.prefix, open=mask.shape[1],
    )  # fmt: skip


class Outcome(NamedTuple):
    """Result of a C call that ran decode steps.

    Attributes:
        status: why C returned, a status of `ops.native.search`.
        made: number of tokens selected for each text.
    """

    status: int
    made: int

    @property
    def alone(self) -> bool:
        """Whether the next step runs in torch, which raises: a token id has no embedding row."""
        return self.status == c.NO_ROW and self.made == 0


def run(
    model: MultistepModel,
    prepared: Prepared,
    texts: c.Texts,
    search: Callable[[int], int],
    is_open: Callable[[], bool],
) -> Outcome:
    """Run steps in C and report them to the model.

    Args:
        model: runs the decode steps.
        prepared: the steps.
        texts: the texts of the search; C counts its steps there.
        search: runs the steps with a given number of threads and returns why it stopped.
        is_open: returns the argument of that name for `MultistepModel.end_steps`.

    Raises:
        OutOfMemoryError: C could not allocate memory.
    """
    status = search(torch.get_num_threads())
    if status == c.NO_MEMORY:
        raise torch.OutOfMemoryError(
            f"no memory for {prepared.steps} decode steps of {len(prepared.logits)} rows in C"
        )
    began: list[float] = cast(Any, prepared.began).tolist()
    model.end_steps(texts.run, began[: texts.run], is_open())
    return Outcome(status, texts.made)


_Search = TypeVar("_Search", bound=Search)


class NativeMultistep(DecodeBackend[_Search]):
    """Decode backend that runs many steps of a search per C call, token selection included.

    C returns to Python where a step has to be observed: where values are equal, sentences leave, a
    buffer is full or a logits transform becomes active.
    """

    description = "in C, many decode steps per call"

    most = MOST
    """Maximum number of steps of the next call of `advance`."""

    def __init__(self, search: _Search, model: MultistepModel) -> None:
        super().__init__(search, model)
        self.steps = self._steps_of(search)

    @classmethod
    def supports(cls, search: Search, model: Any) -> bool:
        """Return whether C covers this search and may run the steps of this model."""
        return hasattr(model, "begin_steps") and cls.covers(search)

    @staticmethod
    @abstractmethod
    def covers(search: Any) -> bool:
        """Return whether C can select the tokens of a search whose steps no callback observes."""

    @staticmethod
    @abstractmethod
    def _steps_of(search: Any) -> Steps: ...

    @abstractmethod
    def _run(self) -> Any:
        """Run steps in C until one has to be observed.

        Returns:
            Whether the search goes on; the output of the last step if Python has to select the next
            tokens; or None if the next step has to run by itself.
        """

    def advance(self) -> bool:
        """Run steps in C, or one step in Python; return whether the search goes on."""
        result = self._run() if self.model.supports_multistep else None
        if result is None:
            return super().advance()
        return result if isinstance(result, bool) else self.select(result)
