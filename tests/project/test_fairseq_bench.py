"""fairseq's benchmark cases at toy size: which outputs count as equal, in half precision too."""

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks import fairseq_command, run
from benchmarks.cases import CASES, EXAMPLE
from benchmarks.fairseq_agreement import FairseqAgreement
from benchmarks.session import Session
from fastgen.decoding.search.near_ties import NEAR_TIE

pytest.importorskip("fairseq")

Found = list[list[dict[str, torch.Tensor]]]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["fairseq_big", "fairseq_bart"])
def test_cases(tmp_path: Path, name: str, dtype: str) -> None:
    words = [
        "--case",
        name,
        "--dtype",
        dtype,
        "--scale",
        "tiny",
        "--rounds",
        "2",
        "--out",
        str(tmp_path),
    ]
    assert run.main(words) == 0
    file = f"{name}.json" if dtype == "float32" else f"{name}_{dtype}.json"
    result = json.loads((tmp_path / file).read_text("utf-8"))["result"]
    assert result["equal"] or (dtype == "float16" and result["within_noise"]), result["note"]
    assert len(result["rounds"]) == 2
    assert result["hits"]["fairseq.generate"] > 0
    assert result["near_ties"] == 0


@pytest.fixture
def agreement() -> FairseqAgreement:
    return agreement_in(torch.float32)


def agreement_in(dtype: torch.dtype) -> FairseqAgreement:
    from fairseq.sequence_generator import SequenceGenerator

    case = CASES["fairseq_iwslt"].tiny()
    assert case.shape is not None
    model = case.shape.build(dtype, "cpu")
    source = torch.randint(
        4, len(model.dictionary), (3, 9), generator=torch.Generator().manual_seed(1)
    )
    sample = {
        "id": torch.tensor([17, 4, 9]),
        "net_input": {"src_tokens": source, "src_lengths": torch.full((3,), 9)},
    }
    generator = SequenceGenerator([model], model.dictionary, 4, max_len_b=6, no_repeat_ngram_size=2)
    return FairseqAgreement(model, generator, sample)


def found_by(agreement: FairseqAgreement) -> Found:
    return agreement.generator.generate([agreement.model], agreement.sample)


def test_the_same_output(agreement: FairseqAgreement) -> None:
    verdict = agreement(found_by(agreement), found_by(agreement))
    assert verdict.equal
    assert verdict.near_ties == 0


def test_a_token_that_the_search_had_no_reason_to_take(agreement: FairseqAgreement) -> None:
    stock, other = found_by(agreement), found_by(agreement)
    other[1][0]["tokens"] = (other[1][0]["tokens"] + 1) % 61
    verdict = agreement(stock, other)
    assert not verdict.equal
    assert verdict.note.startswith("1 of 3 sentences differ, largest margin")


@pytest.mark.parametrize(("apart", "equal"), [(1e-6, True), (1e-2, False)])
def test_hypotheses_that_change_places(
    agreement: FairseqAgreement, apart: float, equal: bool
) -> None:
    """Hypotheses that swap places are a near tie if their scores nearly tie.

    The decisions of the search itself are clear.
    """
    stock, other = found_by(agreement), found_by(agreement)
    other[2][:2] = other[2][1::-1]
    stock[2][1]["score"] = stock[2][0]["score"] - apart
    verdict = agreement(stock, other)
    assert verdict.equal is equal
    assert verdict.near_ties == int(equal)


@pytest.mark.parametrize(("gap", "equal"), [(1e-6, True), (1e-2, False)])
def test_a_decision_that_rounding_turns(
    agreement: FairseqAgreement, gap: float, equal: bool
) -> None:
    """For a sentence's first word, the last kept and the first dropped score are `gap` apart."""
    stock, other = found_by(agreement), found_by(agreement)
    (first,) = {len(step) for step in agreement._steps()[0]}
    scores = agreement._steps()[0][0][0]
    kept, dropped = scores.argsort(descending=True)[first - 1 : first + 1].tolist()
    scores[dropped] = scores[kept] - gap
    other[0][0]["tokens"] = torch.tensor([dropped, 2])
    assert agreement(stock, other).equal is equal


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_judged_by_its_own_noise(dtype: torch.dtype) -> None:
    """Other texts are no error where the log-probabilities are as accurate as fairseq's own."""
    agreement = agreement_in(dtype)
    stock, other = found_by(agreement), found_by(agreement)
    noise = agreement.noise(other)
    assert 0 < noise.own < 0.1
    assert noise.explains, noise
    stock[0].reverse()
    verdict = agreement(stock, other)
    assert (verdict.equal, verdict.within_noise) == (False, True)
    assert verdict.note.startswith("1 of 3 sentences differ, error of the log")
    for hypotheses in other:
        for hypothesis in hypotheses:
            hypothesis["positional_scores"] = hypothesis["positional_scores"] + 4 * noise.own
    assert not agreement.noise(other).explains


@pytest.mark.slow
def test_texts_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens and a replay tell differing texts apart, whatever post-processing did to them."""
    case = CASES["fairseq_command"].tiny()
    fairseq_command.prepare(tmp_path, EXAMPLE, 12, 5)
    words = fairseq_command.arguments(tmp_path, case, "cpu")
    stock, _ = fairseq_command.run("fairseq-generate", *words)
    agreement = fairseq_command.CommandAgreement(tmp_path, words, Session())
    assert agreement(stock, stock).equal
    ours = re.sub(r"^(H-3\t.*\t).*", r"\1text", stock, flags=re.MULTILINE)
    found = agreement(stock, ours)
    # The other run has these tokens too, and fairseq's search has clearly kept them.
    assert not found.equal
    assert found.note.startswith("1 translations differ, largest margin ")
    agreement._known.clear()
    monkeypatch.setitem(NEAR_TIE, torch.float32, 1e9)
    assert agreement(stock, ours).near_ties == 1
    assert not agreement(stock, stock.replace("H-3\t", "H-30\t")).equal
