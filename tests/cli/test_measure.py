"""Speed comparison (`fastgen.cli.bench.measure`) and the logic of the benchmarks, at toy size."""

import gc
import json
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

import fastgen
from benchmarks import kv, launches, ops, peer_ctranslate2, plot, run
from benchmarks.cases import CASES, EXAMPLE
from benchmarks.runners import run_generate
from benchmarks.session import Session
from fastgen import config
from fastgen.cli.bench import measure
from fastgen.cli.bench.agreement import Agreement, margins
from fastgen.cli.bench.measure import Outcome, Verdict, compare, interleave, paired_ratio
from fastgen.decoding.search.near_ties import closest_decision, end_tokens, replayed
from fastgen.ops import cache, dispatch, tables
from fastgen.ops.selection import sample
from fastgen.patches.engine import engine


def exactly(a, b):
    return Verdict(a == b, note=f"{a} is not {b}")


def sleeper(seconds, result=7):
    def call():
        time.sleep(seconds)
        return result

    return call


def test_the_ratio_is_baseline_over_candidate():
    outcome = compare(sleeper(0.02), sleeper(0.005), 5, exactly)
    assert outcome.equal
    assert len(outcome.rounds) == 5
    assert 2 < outcome.ratio < 4.5
    assert outcome.low <= outcome.ratio <= outcome.high
    assert outcome.baseline_seconds > outcome.candidate_seconds


def test_arms_alternate_and_are_warmed_and_synchronized():
    calls = []
    arms = [lambda name=name: calls.append(name) for name in "ABC"]
    times, difference = interleave(
        arms, 2, lambda outputs: None, synchronize=lambda: calls.append("|")
    )
    assert difference is None
    assert "".join(calls) == "ABC" + "|A||B||C|" + "|C||B||A|"
    assert [len(row) for row in times] == [3, 3]


@pytest.mark.parametrize("warmup", [0, 1])
def test_no_speed_where_outputs_differ(warmup):
    outcome = compare(sleeper(0, 1), sleeper(0, 2), 3, exactly, warmup=warmup)
    assert not outcome.equal
    assert outcome.rounds == []
    assert math.isnan(outcome.ratio)
    data = json.loads(json.dumps(outcome.to_dict(), allow_nan=False))
    assert data["ratio"] is None
    assert data["note"] == "1 is not 2"


def test_every_round_is_compared():
    outputs = iter([1, 1, 1, 2])
    outcome = compare(lambda: 1, lambda: next(outputs), 5, exactly)
    assert not outcome.equal


def test_near_ties_are_counted_once_per_round():
    outcome = compare(lambda: 1, lambda: 2, 3, lambda a, b: Verdict(True, near_ties=2))
    assert outcome.equal
    assert outcome.near_ties == 2


def test_precision_and_budget():
    wide = compare(lambda: 0, lambda: 0, 50, exactly, precision=1e9)
    assert len(wide.rounds) == measure.MIN_ROUNDS
    late = compare(lambda: 0, lambda: 0, 50, exactly, budget=0)
    assert len(late.rounds) == measure.MIN_ROUNDS


@pytest.mark.parametrize(("rounds", "warmup"), [(0, 1), (1, -1)])
def test_bad_numbers_are_named(rounds, warmup):
    with pytest.raises(ValueError, match=r"0|-1"):
        compare(lambda: 0, lambda: 0, rounds, exactly, warmup=warmup)


def test_who_leaves_things_out_of_collections_first_takes_them_in_again():
    gc.unfreeze()  # undoes the freeze in conftest.py
    try:
        with measure.frozen():
            with measure.frozen():
                assert gc.get_freeze_count() > 0
            assert gc.get_freeze_count() > 0
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()


def test_an_exception_of_an_arm_passes_and_garbage_collection_is_on_again():
    calls = iter([None, None])

    def fails():
        return next(calls)

    with pytest.raises(StopIteration):
        compare(lambda: None, fails, 5, exactly)
    assert gc.isenabled()


def test_paired_ratio():
    assert paired_ratio([4.0], [2.0]) == (2.0, 2.0, 2.0)
    # Drift that is common to a pair cancels.
    baseline, candidate = (
        [2.0, 4.0, 6.0, 8.0, 90.0],
        [1.0, 2.0, 3.0, 4.0, 9.0],
    )
    ratio, low, high = paired_ratio(baseline, candidate)
    assert ratio == 2
    assert low == 2 <= high
    assert paired_ratio(baseline, candidate) == (ratio, low, high)
    with pytest.raises(ValueError, match="got 1 and 2"):
        paired_ratio([1.0], [1.0, 2.0])


def test_environment_is_json():
    place = json.loads(json.dumps(measure.environment()))
    assert place["torch"] == torch.__version__
    assert place["threads"] == torch.get_num_threads()
    assert {
        "git_sha",
        "git_dirty",
        "cpu",
        "cores",
        "date",
        "python",
        "transformers",
        "fastgen",
        "gpu",
    } <= set(place)


def test_peak_memory_sees_a_large_tensor():
    if not Path("/proc/self/clear_refs").exists():
        assert measure.peak_memory(lambda: None) is None
        return
    peak = measure.peak_memory(lambda: torch.ones(64, 2**20))
    assert peak is not None
    assert peak > 128 * 2**20


def test_outcome_without_rounds_has_no_seconds():
    assert math.isnan(Outcome(True, 0).baseline_seconds)


# Margins: replays of the toolkit's search


@pytest.fixture(scope="module")
def bart():
    case = CASES["bart_large"].tiny()
    assert case.shape is not None
    return case, case.shape.build(torch.float32, "cpu")


def generate_with_scores(case, model, **changes):
    options = case.generate_options | changes
    run = model.generate(
        **case.inputs(model),
        **options,
        num_return_sequences=case.beams,
        return_dict_in_generate=True,
        output_scores=True,
    )
    return options, run


@pytest.mark.parametrize(
    "changes", [{}, {"min_new_tokens": 1, "eos_token_id": list(range(20)), "length_penalty": 0.5}]
)
def test_the_replay_finds_the_toolkits_own_hypotheses(bart, changes):
    case, model = bart
    options, run = generate_with_scores(case, model, **changes)
    ends = end_tokens(options.get("eos_token_id", 2))
    scores = run.sequences_scores.view(case.batch, case.beams).tolist()
    for row, tokens in enumerate(run.sequences.tolist()):
        sentence, beam = divmod(row, case.beams)
        if beam:
            margin = closest_decision(run, sentence * case.beams, case.beams, tokens, ends)
            assert 0 <= margin <= scores[sentence][0] - scores[sentence][beam]


def test_every_call_of_a_sampled_case_draws_the_same():
    case, lines = CASES["qwen2_sampled"].tiny(), []
    session = Session(rounds=2, say=lines.append)
    result = run_generate(case, session)
    assert result["equal"], lines
    assert result["distinct_tokens"]


def test_a_wrong_sequence_is_no_near_tie(bart):
    case, model = bart
    inputs, options = case.inputs(model), case.generate_options
    agreement = Agreement(model, inputs, options)
    stock = model.generate(**inputs, **options)
    assert agreement(stock, stock.clone()) == Verdict(True)
    wrong = stock.clone()
    wrong[1, 3] = (wrong[1, 3] + 1) % model.config.vocab_size
    assert set(margins(model, inputs, options, stock, wrong)) == {1}
    verdict = agreement(stock, wrong)
    assert not verdict.equal
    assert "1 of 3 sequences differ" in verdict.note
    assert agreement(stock, wrong) is verdict
    assert not agreement(stock, stock[:1]).equal
    assert not agreement(stock, torch.nn.functional.pad(stock, (0, 1))).equal


def test_twins_are_a_near_tie():
    """Two tokens with the same embedding have the same score, so choosing the other is no error."""
    case = CASES["bart_large"].tiny()
    assert case.shape is not None
    model = case.shape.build(torch.float32, "cpu")
    inputs, options = case.inputs(model), case.generate_options
    with fastgen.disabled():
        stock = model.generate(**inputs, **options)
        chosen = int(stock[1, -1])
        twin = next(token for token in range(4, model.config.vocab_size) if token not in stock)
        weight = model.get_input_embeddings().weight.data
        weight[twin] = weight[chosen]
        stock = model.generate(**inputs, **options)
    place = next(
        i for i, token in reversed(list(enumerate(stock[1].tolist()))) if token in (chosen, twin)
    )
    other = stock.clone()
    other[1, place] = chosen + twin - stock[1, place]
    verdict = Agreement(model, inputs, options)(stock, other)
    assert verdict.equal
    assert verdict.near_ties == 1


def test_a_tie_has_no_margin():
    step = torch.tensor([[-1.0, -1.0, -5.0, -9.0]]).expand(2, 4)
    assert replayed([step[:1], step[:1]], [1, 0], set()) == 0
    assert replayed([step[:1], step[:1]], [2, 0], set()) == 4
    assert replayed([step, step], [1, 1], set()) == 0  # four hypotheses tie for two places
    far = torch.tensor([[-1.0, -2.0, -5.0, -9.0]]).expand(2, 4)
    assert replayed([far, far], [2, 0], set()) == 3
    assert replayed([far, far], [4, 0], set()) == math.inf, "no token of the vocabulary"


# Benchmarks


def bench(*words):
    return run.main(["--scale", "tiny", "--threads", "1", *map(str, words)])


def result_of(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


def test_cases_run_and_say_what_they_rest_on(tmp_path, capsys):
    assert bench("--case", "bart_large", "gpt2", "t5_base", "marian_base", "--out", tmp_path) == 0
    out = capsys.readouterr().out
    for name in ("bart_large", "gpt2", "t5_base", "marian_base"):
        data = result_of(tmp_path, name)
        assert name in out
        assert data["result"]["equal"]
        assert len(data["result"]["rounds"]) == 2
        assert data["environment"]["torch"] == torch.__version__
        assert "status" in data
    assert plot.main(["--results", str(tmp_path), "--out", str(tmp_path / "plots")]) == 0
    first = (tmp_path / "plots" / f"{tmp_path.name}-speed.svg").read_bytes()
    plot.main(["--results", str(tmp_path), "--out", str(tmp_path / "plots")])
    assert (tmp_path / "plots" / f"{tmp_path.name}-speed.svg").read_bytes() == first


def test_no_speed_is_printed_or_written_for_a_wrong_output(tmp_path, capsys, monkeypatch):
    from transformers import BartForConditionalGeneration

    from fastgen.patches.engine import engine

    right = BartForConditionalGeneration.generate

    def wrong(self, *args, **kwargs):
        ids = right(self, *args, **kwargs)
        if not engine.is_disabled() and isinstance(ids, torch.Tensor):
            ids[:, -1] = (ids[:, -1] + 1) % self.config.vocab_size
        return ids

    monkeypatch.setattr(BartForConditionalGeneration, "generate", wrong)
    assert bench("--case", "bart_large", "--out", tmp_path) == 1
    assert "OUTPUTS DIFFER: 3 of 3" in capsys.readouterr().out
    result = result_of(tmp_path, "bart_large")["result"]
    assert result["ratio"] is None
    assert result["rounds"] == []
    assert "tokens_per_second" not in result
    assert plot.main(["--results", str(tmp_path), "--out", str(tmp_path)]) == 1


def test_a_grid_is_measured_in_pieces(tmp_path):
    assert (
        bench(
            "--case", "never_worse", "--cells", "small/batch1/*", "--rounds", 1, "--out", tmp_path
        )
        == 0
    )
    cells = result_of(tmp_path, "never_worse")["result"]["cells"]
    assert {cell["batch"] for cell in cells.values()} == {1}
    bench(
        "--case",
        "never_worse",
        "--cells",
        "small/*/beams1/*",
        "--rounds",
        1,
        "--resume",
        "--out",
        tmp_path,
    )
    merged = result_of(tmp_path, "never_worse")["result"]["cells"]
    assert set(merged) - set(cells) == {"small/batch2/beams1/source12"}
    assert all(merged[key] == cell for key, cell in cells.items())
    assert plot.main(["--results", str(tmp_path), "--out", str(tmp_path)]) == 0


@pytest.mark.slow
def test_step_times_and_their_floor(tmp_path):
    assert bench("--case", "step_time", "--out", tmp_path) == 0
    cells = result_of(tmp_path, "step_time")["result"]["cells"]
    assert {cell["axis"] for cell in cells.values()} == {"new_tokens", "batch", "beams", "source"}
    for cell in cells.values():
        count = len(cell["floor"])
        assert len(cell["steps"]["fastgen"]) == len(cell["steps"]["stock"]) == count
        assert all(
            seconds > 0
            for seconds in (*cell["floor"], *cell["steps"]["fastgen"], *cell["steps"]["stock"])
        )
    first, last = cells["batch1"]["floor"], cells["batch2"]["floor"]
    assert last[0] > first[0], "more sentences read more"
    assert first[-1] > first[0], "a longer text reads more"
    assert plot.main(["--results", str(tmp_path), "--out", str(tmp_path / "plots")]) == 0


def test_memory_counts_keys_and_values(tmp_path):
    assert bench("--case", "kv_memory", "--out", tmp_path) == 0
    for model in result_of(tmp_path, "kv_memory")["result"]["models"].values():
        assert model["stock"]["measured"] == model["expected"]["stock"]
        assert model["expected"]["fastgen"] < model["expected"]["stock"]
        assert model["fastgen"]["measured"] > 0
    assert plot.main(["--results", str(tmp_path), "--out", str(tmp_path)]) == 0


def test_bytes_by_the_formula(bart):
    _, model = bart
    assert kv.head_shape(model.config) == (2, 4, 8)
    entry = 2 * 2 * 4 * 8 * 4
    assert kv.expected_bytes(model, 3, 12, 4, 6) == {
        "fastgen": entry * (3 * 12 + 3 * 4 * 6),
        "stock": entry * (3 * 4 * (12 + 6)),
    }


def test_operations_run_and_say_how_fast_a_copy_is(tmp_path, capsys, monkeypatch):
    small = [row for row in ops.rows() if "128x1024" in row.name or "reorder 4x4" in row.name]
    monkeypatch.setattr(ops, "rows", lambda: iter(small))
    words = [
        "--op",
        "norm",
        "cache",
        "--rounds",
        3,
        "--seconds",
        0,
        "--threads",
        1,
        "--out",
        tmp_path,
    ]
    assert ops.main(list(map(str, words))) == 0
    data = result_of(tmp_path, "ops")
    assert data["copy_gb_per_s"] > 0
    assert data["paths"]["norm reference"] > 0
    assert {name.partition("/")[0] for name in data["result"]} == {"norm", "cache"}
    assert all(row["equal"] and row["ratio"] > 0 for row in data["result"].values())
    assert plot.main(["--results", str(tmp_path), "--out", str(tmp_path)]) == 0


@pytest.mark.slow
def test_an_operation_that_computes_something_else_gets_no_speed(tmp_path, capsys, monkeypatch):
    from fastgen.ops import norm

    right = norm.norm
    monkeypatch.setattr(
        norm, "norm", lambda *args, **options: (right(*args, **options)[0] + 1, args[0])
    )
    words = [
        "--op",
        "norm",
        "--rounds",
        "3",
        "--seconds",
        "0",
        "--threads",
        "1",
        "--out",
        str(tmp_path),
    ]
    assert ops.main(words) == 1
    assert "outputs differ, no speed given" in capsys.readouterr().out
    assert not any("ratio" in row for row in result_of(tmp_path, "ops")["result"].values())


@pytest.mark.parametrize(
    ("op", "name", "module"),
    [
        ("sample", "sample", sample), ("cache", "reorder_rows_", cache),
        ("tables", "extend_rows_", tables),
    ],
)  # fmt: skip
def test_outputs_of_another_form_are_compared(op, name, module, monkeypatch):
    """Random draws and updates in place are compared too, however often they run."""
    rig, right = ops.Rig("cpu", torch.float32), getattr(module, name)
    row = next(row for row in ops.rows() if row.op == op and row.only is None)
    assert ops.measure(row, rig, 2, 0.0, 1.0)["equal"]

    def wrong(first, *args, **options):
        if op == "sample":
            return torch.topk(first, 60).indices[:, -1]
        return right(first, *(a.flip(1) if isinstance(a, torch.Tensor) else a for a in args))

    monkeypatch.setattr(module, name, wrong)
    assert not ops.measure(row, rig, 2, 0.0, 1.0)["equal"]


def test_every_operation_has_a_row():
    files = [
        path
        for path in Path(dispatch.__file__).parent.rglob("*.py")
        if "@jit" in path.read_text("utf-8")
    ]
    kernels = {path.stem.removesuffix("_kernels") for path in files}
    assert {row.op for row in ops.rows()} >= kernels - {"dispatch", "token_mask"}


@pytest.mark.slow
def test_launches_of_a_decode_step(tmp_path):
    assert launches.main(["--scale", "tiny", "--case", "bart_large", "--out", str(tmp_path)]) == 0
    result = result_of(tmp_path, "launches")["result"]["bart_large"]
    assert min(result["fastgen"], result["stock"]) > 0


@pytest.mark.skipif(
    not (EXAMPLE / "model" / "config.json").is_file(), reason="the trained model is not there"
)
def test_the_trained_model(tmp_path):
    assert bench("--case", "trained", "--out", tmp_path) == 0
    result = result_of(tmp_path, "trained")["result"]
    assert result["identical_text"]
    assert result["sentences"] == 6
    assert len(result["steps"]["stock"]) == 2


@pytest.mark.parametrize("name", ["bart_large", "gpt2", "t5_base", "marian_base"])
def test_ctranslate2_gives_the_same_tokens(tmp_path, name):
    pytest.importorskip("ctranslate2", reason="a dependency of this benchmark only")
    assert bench("--case", name, "--peer", "ctranslate2", "--out", tmp_path) == 0
    result = result_of(tmp_path, f"{name}_ctranslate2")["result"]
    assert result["near_ties"] == {"fastgen": 0, "ctranslate2": 0}
    assert set(result["systems"]) == {"stock", "fastgen", "ctranslate2"}
    assert plot.main(["--results", str(tmp_path), "--out", str(tmp_path)]) == 0


def test_ctranslate2_translates_the_same_texts(tmp_path):
    pytest.importorskip("ctranslate2", reason="a dependency of this benchmark only")
    assert bench("--case", "trained", "--peer", "ctranslate2", "--out", tmp_path) == 0
    result = result_of(tmp_path, "trained_ctranslate2")["result"]
    assert result["same_texts"]["ctranslate2"] >= 0.9 * result["sentences"]
    assert set(result["over"]) == {"stock", "ctranslate2"}


# A Python in whose environment optimum-intel is transformers, with a clock that only `generate`
# moves: a second for each call.
OTHER_PYTHON = """#!{python}
import importlib.metadata, runpy, sys, time, types
import transformers

clock = [0.0]

class Model:
    @classmethod
    def from_pretrained(cls, folder, **_):
        self = cls()
        self.model = cls.kind.from_pretrained(folder)
        return self

    def generate(self, **arguments):
        print("not an answer")
        clock[0] += 1
        return self.model.generate(**arguments) + {wrong}

intel = types.ModuleType("optimum.intel")
for name in ("CausalLM", "Seq2SeqLM"):
    kind = getattr(transformers, "AutoModelFor" + name)
    wrapper = type("Wrapper", (Model,), {{"kind": kind}})
    setattr(intel, "OVModelFor" + name, wrapper)
if {installed}:
    sys.modules |= {{"optimum": types.ModuleType("optimum"), "optimum.intel": intel}}
importlib.metadata.version = lambda name: "1.2.3"
time.perf_counter = lambda: clock[0]
runpy.run_path(sys.argv[2], run_name="__main__")
"""


def other_python(folder, wrong=0, installed=True):
    file = folder / "python"
    file.write_text(OTHER_PYTHON.format(python=sys.executable, wrong=wrong, installed=installed))
    file.chmod(0o755)
    return ("--peer", "openvino", "--python", file, "--out", folder)


def test_a_peer_in_another_environment(tmp_path):
    assert bench("--case", "gpt2", "marian_base", *other_python(tmp_path)) == 0
    for name in ("gpt2", "marian_base"):
        data = result_of(tmp_path, f"{name}_openvino")
        assert data["result"]["near_ties"] == {"fastgen": 0, "openvino": 0}
        assert data["result"]["systems"]["openvino"] == 1.0  # the other process's own seconds
        assert {row[2] for row in data["result"]["rounds"]} == {1.0}
        assert data["result"]["over"]["openvino"]["ratio"] > 1
        assert data["result"]["openvino"]["optimum-intel"] == "1.2.3"
        assert data["arguments"]["python"] == "python"


def test_a_peer_in_another_environment_whose_tokens_differ(tmp_path):
    assert bench("--case", "gpt2", *other_python(tmp_path, wrong=1)) == 1
    result = result_of(tmp_path, "gpt2_openvino")["result"]
    assert result["note"].startswith("openvino: 3 of 3 sequences differ")
    assert "systems" not in result


def test_an_environment_without_the_peer(tmp_path):
    with pytest.raises(RuntimeError, match=r"exit status 1:[\s\S]*No module named 'optimum'"):
        bench("--case", "gpt2", *other_python(tmp_path, installed=False))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), r"pip install optimum-intel==.*; got None"),
        (("--python", "/nowhere/python"), "got /nowhere/python"),
        (("--dtype", "bfloat16"), r"not in torch\.bfloat16 on cpu"),
        (("--case", "qwen2_sampled", "--python", sys.executable), "the case 'qwen2_sampled'"),
    ],
)
def test_what_the_peer_in_another_environment_refuses(tmp_path, words, message):
    with pytest.raises(SystemExit, match=message):
        bench("--case", "gpt2", "--peer", "openvino", "--out", tmp_path, *words)


@pytest.mark.skipif(
    not (EXAMPLE / "model" / "config.json").is_file(), reason="the trained model is not there"
)
def test_a_text_in_another_environment(tmp_path):
    assert bench("--case", "trained", *other_python(tmp_path)) == 0
    result = result_of(tmp_path, "trained_openvino")["result"]
    assert result["same_texts"] == {"openvino": result["sentences"]}
    assert result["systems"]["openvino"] == 2.0  # two batches


@pytest.mark.parametrize("name", ["gpu_bart_large", "gpu_gpt2"])
def test_cases_for_a_gpu_in_bfloat16(tmp_path, name):
    """Check the logic of these cases at small size, on a CPU."""
    assert bench("--case", name, "--dtype", "bfloat16", "--out", tmp_path) == 0
    assert result_of(tmp_path, f"{name}_bfloat16")["result"]["equal"]


def test_a_missing_peer_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ctranslate2", None)
    with pytest.raises(SystemExit, match=r"pip install ctranslate2==4\.8\.5"):
        peer_ctranslate2.load()


def test_list_names_every_case(capsys):
    assert run.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in CASES)


def test_another_batch_size_has_its_own_file(tmp_path):
    assert bench("--case", "bart_large", "--batch", 2, "--rounds", 1, "--out", tmp_path) == 0
    assert (tmp_path / "bart_large_batch2.json").is_file()
    with pytest.raises(ValueError, match="never_worse"):
        bench("--case", "never_worse", "--batch", 2, "--out", tmp_path)


@pytest.mark.slow
def test_transformers_own_compiled_forward(tmp_path):
    assert bench("--case", "greedy", "--peer", "compiled", "--out", tmp_path) == 0
    result = result_of(tmp_path, "greedy_compiled")["result"]
    assert set(result["systems"]) == {"stock", "fastgen", "compiled"}
    assert result["near_ties"] == {"fastgen": 0, "compiled": 0}
    assert plot.main(["--results", str(tmp_path), "--out", str(tmp_path)]) == 0


def test_a_peer_that_has_no_way_to_run_a_case(tmp_path):
    with pytest.raises(
        SystemExit, match="no way to run the case 'gpt2': transformers compiles greedy search"
    ):
        bench("--case", "gpt2", "--peer", "compiled", "--out", tmp_path)


def test_steps_for_a_gpu_beside_their_floor(tmp_path, capsys):
    """Steps of a model this small far exceed the floor on a CPU.

    Those of one sentence, which have a target, miss it.
    """
    assert bench("--case", "gpu_step_time", "--dtype", "bfloat16", "--out", tmp_path) == 0
    cells = result_of(tmp_path, "gpu_step_time_bfloat16")["result"]["cells"]
    assert all(len(cell["floor"]) == len(cell["steps"]["fastgen"]) for cell in cells.values())
    for cell in cells.values():
        for side, steps in cell["steps"].items():
            ratios = [step / floor for step, floor in zip(steps, cell["floor"], strict=True)]
            assert min(ratios) <= cell["over_floor"][side] <= max(ratios)
    printed = [line for line in capsys.readouterr().out.splitlines() if "a step takes" in line]
    assert {line.split()[1] for line in printed if line.startswith("gpu_step_time")} == set(cells)
    assert {"batch1 " in line for line in printed if "ABOVE TARGET 2.5x" in line} == {True}


@pytest.mark.parametrize(
    ("case", "before", "now"), [("refill", "off", "on"), ("graphs", "call", "auto")]
)
def test_a_setting_at_two_values(tmp_path, monkeypatch, case, before, now):
    asked, stream = [], fastgen.generate_stream

    def streamed(*args, **kwargs):
        asked.append(getattr(config.settings(), case))
        return stream(*args, **kwargs)

    monkeypatch.setattr(fastgen, "generate_stream", streamed)
    assert bench("--case", case, "--rounds", 2, "--out", tmp_path) == 0
    result = result_of(tmp_path, case)["result"]
    assert len(result["lengths"]) == result["sentences"] > 0
    assert asked == [before, now, before, now, now, before]  # the warm-up, then two rounds
    assert config.settings() == config.read(os.environ)


@pytest.mark.parametrize("full", [4, None], ids=["full", "all fit"])
def test_the_best_batch_of_each(tmp_path, capsys, monkeypatch, full):
    """If memory runs out on one side, that side's best batch is one of the smaller ones."""
    case = replace(CASES["gpu_best_batch"].tiny(), grid={"batch": (2, 4)})
    monkeypatch.setattr(type(case), "tiny", lambda case: case)
    monkeypatch.setitem(CASES, "gpu_best_batch", case)
    right = transformers.BartForConditionalGeneration.generate

    def generate(model, input_ids, **options):
        if len(input_ids) == full and engine.is_disabled():
            raise torch.OutOfMemoryError("no room")
        return right(model, input_ids, **options)

    monkeypatch.setattr(transformers.BartForConditionalGeneration, "generate", generate)
    assert bench("--case", "gpu_best_batch", "--out", tmp_path) == 0
    result = result_of(tmp_path, "gpu_best_batch")["result"]
    seconds = result["seconds_per_sentence"]
    assert set(seconds["fastgen"]) == {"2", "4"}
    assert set(seconds["stock"]) == ({"2", "4"} if full is None else {"2"})
    assert ("stock: 4 sentences do not fit" in capsys.readouterr().out) == (full is not None)
    best = {name: min(found.values()) for name, found in seconds.items()}
    assert all(
        seconds[name][str(batch)] == best[name] for name, batch in result["best_batch"].items()
    )
    assert result["ratio"] == pytest.approx(best["stock"] / best["fastgen"], rel=0.5)
