"""Check torch.compile, torch.export and TorchScript on and around `generate`.

Outputs, graphs and graph breaks equal those of the same code without fastgen.
"""

import copy
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers.generation.configuration_utils import CompileConfig

import fastgen
from fastgen.patches.transformers.generate.report import last_call
from tests.support import zoo

GREEDY: dict[str, Any] = {"max_new_tokens": 2}
BEAMS: dict[str, Any] = {"num_beams": 2, "max_new_tokens": 2}


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    fastgen.status(reset=True)
    yield
    torch._dynamo.reset()


@contextmanager
def _stock() -> Generator[None]:
    """Remove all wrappers for a block; `disabled()` would keep them, visible to compilers."""
    fastgen.disable()
    try:
        yield
    finally:
        fastgen.enable()


def _compiled(function: Any, fullgraph: bool = False) -> Any:
    return torch.compile(function, backend="eager", fullgraph=fullgraph)


def _observed(call: Callable[[], Any]) -> tuple[Any, ...]:
    """Return the result of a call and Dynamo's counts of frames, graphs and graph breaks."""
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        found = call()
    return found, {name: dict(counters[name]) for name in ("frames", "stats", "graph_break")}


def _check(call: Callable[[], Any]) -> dict[str, dict[str, int]]:
    """Compare a call with the same call without fastgen; return Dynamo's counts."""
    with _stock():
        wanted, dynamo = _observed(call)
    found, ours = _observed(call)
    assert torch.equal(found, wanted)
    assert ours == dynamo
    return ours


def _reasons(loop: str) -> dict[str, int]:
    return dict(fastgen.status()[f"transformers.{loop}"].fallbacks)


def _model(family: str = "llama") -> tuple[Any, dict[str, Tensor]]:
    model = zoo.build(family, torch.float32)
    if family == "llama":  # one layer is enough, since Dynamo takes long for each
        del model.model.layers[1:]
        model.config.num_hidden_layers = 1
    return model, zoo.batch(model, 2, 7)


def _by_compile(model: Any) -> None:
    model.compile(backend="eager")


def _of_the_forward(model: Any) -> None:
    model.forward = _compiled(model.forward)


def _of_a_layer(model: Any) -> None:
    model.model.layers[0].compile(backend="eager", fullgraph=True)


def _in_place_of_a_part(model: Any) -> None:
    model.model.layers[0].mlp = _compiled(model.model.layers[0].mlp, fullgraph=True)


def _of_an_instance(model: Any) -> None:
    model.model.layers[0].mlp.forward = _compiled(model.model.layers[0].mlp.forward, fullgraph=True)


@pytest.mark.parametrize("options", [GREEDY, BEAMS], ids=["greedy", "beams"])
def test_a_compiled_wrapper_hands_generate_to_the_model_inside(options: dict[str, Any]) -> None:
    """The forward of the model inside is not compiled, so the call is accelerated."""
    model, inputs = _model()
    wrapper = _compiled(model)
    _check(lambda: wrapper.generate(**inputs, **options | {"max_new_tokens": 4}))
    call = last_call()
    assert call is not None
    assert call.plan.shared
    assert call.plan.fused


@pytest.mark.parametrize(
    ("compile_", "reason"),
    [
        (_by_compile, "the model is compiled"),
        (_of_the_forward, "the model is compiled"),
        (_of_a_layer, "a LlamaDecoderLayer is compiled"),
        (_in_place_of_a_part, "a OptimizedModule is compiled"),
        (_of_an_instance, "a LlamaMLP is compiled"),
    ],
)
@pytest.mark.slow
def test_a_model_that_is_compiled_in_whatever_way_runs_on_its_own_code(
    compile_: Callable[[Any], None], reason: str
) -> None:
    model, inputs = _model()
    model.generate(**inputs, **BEAMS)  # nothing of this call may affect the compiled one
    with torch.no_grad():
        compile_(model)
    fastgen.status(reset=True)
    dynamo = _check(lambda: model.generate(**inputs, **BEAMS))
    assert dynamo["stats"]["unique_graphs"] > 0
    assert not dynamo["graph_break"]
    assert _reasons("beam_search") == {reason: 1}
    assert fastgen.explain(model, **inputs, **BEAMS).reason == reason


def test_a_forward_of_a_class_that_is_compiled_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = _model()
    kind = type(model.model.layers[0].mlp)
    monkeypatch.setattr(kind, "forward", _compiled(kind.forward, fullgraph=True))
    assert _check(lambda: model.generate(**inputs, **BEAMS))["stats"]["unique_graphs"] > 0
    assert _reasons("beam_search") == {"a LlamaMLP is compiled": 1}


def test_a_function_that_is_compiled_gets_to_a_part_in_a_way_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, inputs = _model()
    kind = type(model.model.layers[0].mlp)
    own = _compiled(kind.forward, fullgraph=True)
    monkeypatch.setattr(kind, "forward", lambda self, x: own(self, x))
    assert not _check(lambda: model.generate(**inputs, **BEAMS))["graph_break"]
    assert _reasons("beam_search") == {"a LlamaMLP is compiled": 1}


def test_a_hook_hands_a_part_to_a_function_that_is_compiled() -> None:
    model, inputs = _model()
    own, norm = _compiled(lambda module, x: module(x), fullgraph=True), model.model.norm
    model.model.layers[0].mlp.register_forward_hook(
        lambda module, args, output: output + own(norm, output)
    )
    assert not _check(lambda: model.generate(**inputs, **BEAMS))["graph_break"]
    assert _reasons("beam_search") == {"a LlamaMLP is compiled": 1}


def test_the_encoder_is_compiled() -> None:
    model, inputs = _model("bart")
    model.model.encoder.compile(backend="eager", fullgraph=True)
    _check(lambda: torch.cat([model.generate(**inputs, **BEAMS) for _ in range(2)]))
    assert _reasons("beam_search") == {"a BartEncoder is compiled": 2}


@pytest.mark.slow
def test_generate_within_a_function_that_is_compiled() -> None:
    model, inputs = _model()
    dynamo = _check(lambda: _compiled(lambda: model.generate(**inputs, max_new_tokens=1))())
    assert dynamo["frames"]["total"] > 1
    assert sum(dynamo["graph_break"].values()) > 1
    assert not fastgen.status().calls
    with fastgen.disabled():
        wanted = model.generate(**inputs, **BEAMS)
    assert torch.equal(model.generate(**inputs, **BEAMS), wanted)
    assert fastgen.status()["transformers.beam_search"].hits == 1  # fastgen serves the call again


@pytest.mark.parametrize(
    ("family", "more"),
    [("llama", {}), ("llama", {"do_sample": True, "num_return_sequences": 2}), ("t5", {})],
)
def test_transformers_compiles_the_forward(family: str, more: dict[str, Any]) -> None:
    model, inputs = _model(family)
    config: Any = CompileConfig(fullgraph=True, dynamic=False, backend="eager")
    config._compile_all_devices = True
    asked: dict[str, Any] = (
        GREEDY | {"cache_implementation": "static", "compile_config": config} | more
    )

    def calls() -> Tensor:
        vars(model).pop("_compiled_call", None)
        found: list[Tensor] = []
        for _ in range(3):
            torch.manual_seed(0)
            found.append(model.generate(**inputs, **asked))
        return torch.cat(found)

    dynamo = _check(calls)
    assert dynamo["stats"]["unique_graphs"] == 1
    assert _reasons("sample") == {"transformers compiles the forward": 3}
    assert fastgen.status()["transformers.compiled_call"].hits == 3
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_that_is_compiled_before_and_called_behind_generate() -> None:
    model, inputs = _model()
    ids = inputs["input_ids"]

    def calls() -> Tensor:
        forward = _compiled(model, fullgraph=True)
        first = forward(ids).logits
        for more in (GREEDY, BEAMS):
            model.generate(**inputs, **more)
        return torch.cat((first, forward(ids).logits))

    assert _check(calls)["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_a_classifier_and_a_loss_are_compiled() -> None:
    bert, (model, inputs) = (
        zoo.encoder("Bert", "ForSequenceClassification", torch.float32),
        _model(),
    )
    ids = inputs["input_ids"]
    _check(lambda: _compiled(bert, fullgraph=True)(ids).logits)
    _check(lambda: _compiled(model, fullgraph=True)(ids, labels=ids).loss)

    def behind_a_break() -> Tensor:
        torch._dynamo.graph_break()
        return bert(ids).logits

    assert sum(_check(lambda: _compiled(behind_a_break)())["graph_break"].values()) == 1


@pytest.mark.parametrize("strict", [True, False])
def test_export_behind_generate(strict: bool) -> None:
    model, inputs = _model()
    ids = inputs["input_ids"]
    for more in (GREEDY, BEAMS):
        model.generate(**inputs, **more)

    def graph() -> tuple[str, Tensor]:
        with torch.no_grad():
            exported = torch.export.export(model, (ids,), {"use_cache": False}, strict=strict)
            return str(exported.graph), cast(Any, exported.module())(ids, use_cache=False).logits

    with _stock():
        wanted = graph()
    found = graph()
    assert found[0] == wanted[0]
    assert torch.equal(found[1], wanted[1])


def test_a_trace_of_an_encoder_records_transformers_own_code() -> None:
    bert, ids = (
        zoo.encoder("Bert", "ForSequenceClassification", torch.float32),
        _model()[1]["input_ids"],
    )
    trace = lambda: cast(Any, torch.jit.trace(bert, (ids,), strict=False))  # noqa: E731
    with _stock():
        wanted = trace()
    found = trace()
    assert _kinds(found) == _kinds(wanted)
    assert torch.equal(found(ids.flip(0))["logits"], wanted(ids.flip(0))["logits"])


def _kinds(traced: Any) -> list[str]:
    """Return the kinds of operation in a trace."""
    return [node.kind() for node in traced.inlined_graph.nodes()]


# fairseq

fairseq_zoo: Any = pytest.importorskip(
    "tests.support.fairseq_zoo", reason="fairseq", exc_type=ImportError
)


def _scripted_attention() -> tuple[Tensor, ...]:
    from fairseq.modules.multihead_attention import MultiheadAttention

    torch.manual_seed(0)
    module, x = MultiheadAttention(8, 2).eval(), torch.randn(3, 2, 8)
    scripted = torch.jit.script(module)
    assert torch.equal(scripted(x, x, x)[0], module(x, x, x)[0])
    return scripted(x, x, x)


def _scripted_transformer() -> tuple[Tensor, ...]:
    sample = fairseq_zoo.batch(2, 5)["net_input"]
    model = fairseq_zoo.build("transformer", torch.float32)
    before = torch.full((2, 1), fairseq_zoo.EOS)
    return (torch.jit.script(model)(sample["src_tokens"], sample["src_lengths"], before)[0],)


def _scripted_search() -> tuple[Tensor, ...]:
    from fairseq.sequence_generator import SequenceGenerator

    model = fairseq_zoo.build("transformer", torch.float32)
    generator = SequenceGenerator([model], fairseq_zoo.dictionary(), beam_size=2, max_len_b=6)
    found = torch.jit.script(generator).forward({"net_input": fairseq_zoo.batch(2, 5)["net_input"]})
    return tuple(hypothesis["tokens"] for sentence in found for hypothesis in sentence)


@pytest.mark.slow
@pytest.mark.parametrize("script", [_scripted_attention, _scripted_transformer, _scripted_search])
def test_torchscript_reads_what_fairseq_wrote(script: Callable[[], tuple[Tensor, ...]]) -> None:
    found = [script()]
    with _stock():
        found.append(script())
    found.append(script())
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_a_trace_of_fairseqs_attention() -> None:
    from fairseq.modules.multihead_attention import MultiheadAttention

    module, x = MultiheadAttention(8, 2).eval(), torch.randn(3, 2, 8)
    trace = lambda: cast(Any, torch.jit.trace(_Attention(module), (x,)))  # noqa: E731
    with _stock():
        wanted = trace()
    found, other = trace(), torch.randn(3, 2, 8)
    assert _kinds(found) == _kinds(wanted)
    assert torch.equal(found(other), wanted(other))


class _Attention(nn.Module):
    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        return self.of(x, x, x)[0]


def test_a_layer_of_fairseqs_is_compiled() -> None:
    from fairseq.sequence_generator import SequenceGenerator

    model = copy.deepcopy(fairseq_zoo.build("transformer", torch.float32))
    model.decoder.layers[0].compile(backend="eager")
    sample = fairseq_zoo.batch(2, 5)

    def call() -> Tensor:
        generator = SequenceGenerator([model], fairseq_zoo.dictionary(), beam_size=2, max_len_b=6)
        return torch.cat(
            [
                found["tokens"]
                for sentence in generator.generate([model], sample)
                for found in sentence
            ]
        )

    _check(call)
    assert fairseq_zoo.fallbacks() == {"a TransformerDecoderLayerBase is compiled": 1}
