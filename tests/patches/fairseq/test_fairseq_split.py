"""Check that fairseq batches are halved when memory runs out, or raise the same error."""

from typing import Any

import pytest
import torch

from fastgen.models.runtime.decode_step import DecoderStep

pytest.importorskip("fairseq")
from fastgen.patches.fairseq.generator import generate
from tests.support import fairseq_zoo as zoo

BEAMS = 3


def run_out(monkeypatch: pytest.MonkeyPatch, stage: str, most: int) -> None:
    """Let memory run out where an encoder or decode step has more than `most` sentences."""
    step, encode = DecoderStep.__call__, generate.encode

    def stepped(self: Any, ids: torch.Tensor, context: Any) -> torch.Tensor:
        if stage == "step" and len(ids) > most * BEAMS:
            raise torch.OutOfMemoryError(f"no memory for {len(ids)} rows")
        return step(self, ids, context)

    def encoded(model: Any, net_input: dict[str, torch.Tensor]) -> Any:
        if stage == "encoder" and len(net_input["src_tokens"]) > most:
            # oneDNN's message for a lack of memory
            raise RuntimeError("could not create a primitive")
        return encode(model, net_input)

    monkeypatch.setattr(DecoderStep, "__call__", stepped)
    monkeypatch.setattr(generate, "encode", encoded)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "transforms": {"no_repeat_ngram_size": 2, "min_len": 4, "unk_penalty": 1.5, "len_penalty": 0.6},
    "lengths": {"max_len_a": 0.5, "max_len_b": 3},
    "match_source_len": {"match_source_len": True},
}


@pytest.mark.parametrize("stage", ["encoder", "step"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("names", [["transformer"], ["bart", "transformer"]], ids="+".join)
def test_halves(
    names: list[str],
    options: str,
    stage: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    models = [zoo.build(name, seed=seed) for seed, name in enumerate(names)]
    sample, given = zoo.batch(7, 8, "left"), {"beam_size": BEAMS} | OPTIONS[options]
    zoo.assert_same(models, sample, given)  # the first step of a model runs both ways
    run_out(monkeypatch, stage, 2)
    zoo.assert_same(models, sample, given)
    assert "not enough memory for a batch of 7 sentences" in caplog.text
    assert "not enough memory for a batch of 4 sentences" in caplog.text


def test_what_hypotheses_begin_with(monkeypatch: pytest.MonkeyPatch) -> None:
    models, sample = [zoo.build("transformer")], zoo.batch(5, 8, "left")
    prefix = torch.randint(4, 20, (5, 2), generator=torch.Generator().manual_seed(0))
    options = {"beam_size": BEAMS, "prefix_tokens": prefix}
    zoo.assert_same(models, sample, options)
    run_out(monkeypatch, "step", 2)
    zoo.assert_same(models, sample, options)


@pytest.mark.parametrize("why", ["one sentence", "sampling"])
def test_not_where_somebody_could_tell(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"beam_size": BEAMS} | ({"search_strategy": "sampling"} if why == "sampling" else {})
    run_out(monkeypatch, "encoder", 0 if why == "one sentence" else 2)
    with pytest.raises(RuntimeError, match="could not create a primitive"):
        zoo.call(
            [zoo.build("transformer")], zoo.batch(1 if why == "one sentence" else 5, 8), options
        )
