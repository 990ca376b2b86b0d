"""Compare fairseq's beam search by the kernels with stock.

The kernels normalize only the chosen candidates.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastgen import config
from fastgen.ops import dispatch
from fastgen.ops.counts import calls

pytest.importorskip("fairseq")
from fastgen.patches.fairseq.generator.shared_stepper import Member
from tests.support import fairseq_zoo as zoo

pytestmark = pytest.mark.skipif(
    not dispatch.INTERPRETED, reason="kernels are compiled where there is a GPU"
)


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FASTGEN_OPS", "triton")
    config.reload()
    yield
    monkeypatch.undo()
    config.reload()


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return a list that collects the log-probabilities computed for all tokens."""
    made: list[Tensor] = []
    make = Member._log_softmax

    def noted(member: Any, logits: Tensor) -> Tensor:
        made.append(make(member, logits))
        return made[-1]

    monkeypatch.setattr(Member, "_log_softmax", noted)
    return made


def _served(models: list[Any], sample: dict[str, Any], options: dict[str, Any]) -> set[str]:
    """Assert that output equals fairseq's; return the operations whose Triton kernels ran."""
    hits, before = zoo.hits(), calls.copy()
    zoo.assert_same(models, sample, options, 1e-4)
    assert zoo.hits() == hits + 1
    return {operation for operation, path in calls - before if path == "triton"}


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"beam_size": 1},
    "max_len": {"max_len_b": 3},
    "one_token": {"max_len_b": 1},
    "match_source_len": {"match_source_len": True},
    "temperature": {"temperature": 0.6},
    "unk_penalty": {"unk_penalty": 0.4},
    "ngrams": {"no_repeat_ngram_size": 2},
    "eos": {"eos": 7, "bos_token": 0},
    "all": {
        "no_repeat_ngram_size": 3, "min_len": 4, "unk_penalty": -1.0,
        "tokens_to_suppress": ("w3", "w5"), "normalize_scores": False,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "option"),
    [*(("transformer", option) for option in OPTIONS), ("bart", "all"), ("prenorm", "all")],
)
@pytest.mark.slow
def test_option(name: str, option: str, written: list[Tensor]) -> None:
    options = {"beam_size": 3, "max_len_b": 5} | OPTIONS[option]
    ran = _served([zoo.build(name, torch.float32)], zoo.batch(3, 7), options)
    assert {"kbest", "token_mask", "beam_attention"} | (
        {"ngram_block"} if option in ("ngrams", "all") else set()
    ) <= ran
    assert not written


def test_sentences_leave(written: list[Tensor]) -> None:
    options = {"beam_size": 2, "max_len_b": 12, "no_repeat_ngram_size": 3}
    _served([zoo.build("prenorm", torch.float32)], zoo.batch(6, 9), options)
    assert not written


@pytest.mark.slow
def test_prefix(written: list[Tensor]) -> None:
    """Log-probabilities of all tokens are computed while there is a prefix."""
    prefix = torch.tensor([[5, 6], [7, 1], [1, 1]])
    options = {
        "beam_size": 3,
        "max_len_b": 8,
        "no_repeat_ngram_size": 2,
        "min_len": 3,
        "prefix_tokens": prefix,
    }
    ran = _served([zoo.build("transformer", torch.float32)], zoo.batch(3, 7), options)
    assert "kbest" in ran
    assert len(written) == 2


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (["transformer", "bart"], {}),
        (["transformer"], {"lm_model": "lm", "lm_weight": 0.3}),
        (["transformer"], {"search_strategy": "siblings"}),
        (["adaptive"], {}),
    ],
    ids=["ensemble", "language_model", "search", "adaptive"],
)
@pytest.mark.slow
def test_log_probabilities_where_they_are_needed(names: list[str], options: dict[str, Any]) -> None:
    models = [zoo.build(name, torch.float32) for name in names]
    if "lm_model" in options:
        options = options | {"lm_model": zoo.build(options["lm_model"], torch.float32)}
    _served(
        models,
        zoo.batch(3, 7),
        {"beam_size": 4, "max_len_b": 4, "no_repeat_ngram_size": 2} | options,
    )


@pytest.mark.parametrize("name", zoo.LANGUAGE_MODELS)
def test_prompt(name: str, written: list[Tensor]) -> None:
    prompt = torch.randint(4, 30, (3, 6), generator=torch.Generator().manual_seed(0))
    sample = {"net_input": {"src_tokens": prompt, "src_lengths": torch.full((3,), 6)}}
    options = {"beam_size": 3, "max_len_b": 9, "unk_penalty": 0.5, "prefix_tokens": prompt}
    _served([zoo.build(name, torch.float32)], sample, options)
    assert not written


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.slow
def test_rows_of_nan(value: float, written: list[Tensor]) -> None:
    """A row of logits whose log-softmax is NaN has no candidates."""
    model, spoilt = zoo.build("transformer", torch.float32, 2), []

    class Spoilt(nn.Module):
        """The model's head with some invalid logits."""

        def forward(self, features: Tensor) -> Tensor:
            logits = head(features)
            # The third best token decides: some rows of a sentence are affected, seldom all.
            bad = logits.topk(3).indices[..., 2] % 4 == 0
            spoilt.append(int(bad.sum()))
            logits[..., 9] = torch.where(bad, value, logits[..., 9])
            return logits

    head, model.decoder.output_projection = model.decoder.output_projection, Spoilt()
    try:
        _served([model], zoo.batch(3, 7), {"beam_size": 4, "max_len_b": 6})
    finally:
        model.decoder.output_projection = head
    assert sum(spoilt) > 3
    assert not written
