"""Check that names that vary across transformers releases are confined to `compat.py`."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from transformers import DynamicCache, EncoderDecoderCache
from transformers.generation import logits_process as lp
from transformers.generation import utils as gu
from transformers.modeling_outputs import CausalLMOutputWithPast, Seq2SeqLMOutput

from fastgen.patches.transformers import TOOLKIT, compat
from fastgen.patches.transformers.compat import CACHE, INSTALLED, RELEASES
from tests.support import zoo
from tests.support.parity import assert_same, fallbacks, hits

FOLDER = Path(compat.__file__).parent
PRIVATE = re.compile(r"_[a-z][a-z0-9_]*")
OF_OTHERS = {
    "_buffers", "_parameters", "_compiled_call_impl", "_global_forward_hooks",
    "_global_forward_pre_hooks", "_orig_mod", "_functorch", "_current_level", "_hf_hook",
    "_features", "_engine", "_room", "_version",
}  # fmt: skip
"""Private names of torch, accelerate and fastgen itself."""


def private_names(folder: Path) -> Iterator[tuple[str, int, str]]:
    """Yield (file, line, name) of private names that files of a folder use but do not define."""
    trees = {
        file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(folder.rglob("*.py"))
    }
    own = {name for tree in trees.values() for name in _defined(tree)}
    for file, tree in trees.items():
        if file.name in ("__init__.py", "compat.py"):
            continue
        for node in ast.walk(tree):
            name = _name_in(node)
            if name is not None and PRIVATE.fullmatch(name) and name not in own | OF_OTHERS:
                yield file.name, node.lineno, name  # pyright: ignore[reportAttributeAccessIssue]


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) == "self"
        ):
            yield node.attr


def _name_in(node: ast.AST) -> str | None:
    """Return the name that a node reads, as an attribute, an import or a string."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.alias):
        return node.name.rpartition(".")[2]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return None


def test_private_names_of_transformers_are_in_one_file() -> None:
    assert list(private_names(FOLDER)) == []


@pytest.mark.parametrize(
    "text",
    [
        "def f(model):\n    return model._prefill(1)",
        "def f(config):\n    return getattr(config, '_eos_token_tensor', None)",
        "from transformers.generation.utils import _crop",
        "METHODS = {'_beam_search': 1}",
    ],
)
def test_a_planted_private_name_is_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.py").write_text(text, encoding="utf-8")
    (tmp_path / "compat.py").write_text(
        "def f(model):\n    return model._prefill", encoding="utf-8"
    )
    assert len(list(private_names(tmp_path))) == 1


def test_no_other_module_asks_for_a_version() -> None:
    """Differences between releases of transformers are fields of `Release`."""
    for file in FOLDER.rglob("*.py"):
        assert file.name == "compat.py" or "__version__" not in file.read_text(encoding="utf-8"), (
            file.name
        )


@pytest.mark.parametrize(
    ("version", "since"),
    [
        ("5.17.0", "5.17"), ("5.22.2", "5.17"), ("5.23.0.dev0", "5.23"), ("5.23.1", "5.23"),
        ("5.24.0", "5.24"), ("5.24.0.dev0", "5.24"), ("5.25.0", "5.24"), ("6.0.0", "5.24"),
    ],
)  # fmt: skip
def test_the_release_of_a_version(version: str, since: str) -> None:
    assert compat.release_of(version).since == since


def test_a_version_older_than_all_is_refused() -> None:
    with pytest.raises(ValueError, match=r"transformers 5\.16\.1 is older than 5\.17"):
        compat.release_of("5.16.1")


def test_releases_are_in_order_and_supported() -> None:
    versions = [Version(release.since) for release in RELEASES]
    assert versions == sorted(versions)
    assert all(TOOLKIT.supports(release.since) for release in RELEASES)
    assert versions[-1] <= Version(TOOLKIT.tested)


def test_the_cache_is_called_as_the_installed_release_calls_it() -> None:
    outputs = (
        gu.GenerateDecoderOnlyOutput, gu.GenerateEncoderDecoderOutput,
        gu.GenerateBeamDecoderOnlyOutput, gu.GenerateBeamEncoderDecoderOutput,
        CausalLMOutputWithPast, Seq2SeqLMOutput,
    )  # fmt: skip
    for kind in outputs:
        assert CACHE in kind.__dataclass_fields__, kind.__name__


def test_what_the_installed_release_does_is_what_is_said_of_it() -> None:
    penalised = True
    try:
        lp.RepetitionPenaltyLogitsProcessor(2.0, torch.zeros(1, dtype=torch.int64))  # pyright: ignore[reportArgumentType]
    except ValueError:
        penalised = False
    assert INSTALLED.penalty_skips_padding == penalised
    bias = lp.SequenceBiasLogitsProcessor([[[5, 6], 3.0]])
    scores = bias(torch.tensor([[5]]), torch.zeros(1, 9))
    assert INSTALLED.bias_reaches_start == bool(scores[0, 6] == 3.0)


def test_drawn_beams_are_ordered_as_in_the_installed_release() -> None:
    """With three very different candidates, draw order and score order differ for some seed."""
    scores = torch.log_softmax(torch.tensor([[0.0, 2.0, 4.0, 1.0]]), -1)
    model = zoo.build("bart")
    ordered: set[bool] = set()
    for seed in range(20):
        torch.manual_seed(seed)
        texts, beams = (
            torch.zeros(1, 1, 3, dtype=torch.int64),
            torch.zeros(1, 1, 2, dtype=torch.int32),
        )
        values = model._get_top_k_continuations(  # pyright: ignore[reportPrivateUsage]
            accumulated_log_probs=scores, running_sequences=texts, running_beam_indices=beams,
            cur_len=1, decoder_prompt_len=1, do_sample=True, beams_to_keep=3, num_beams=1,
            batch_size=1, vocab_size=4,
        )[0]  # fmt: skip
        ordered.add(bool((values[0].diff() <= 0).all()))
    assert ordered == ({True} if INSTALLED.ranks_drawn_beams else {True, False})


@pytest.mark.parametrize("family", ["bart", "gpt2"])
@pytest.mark.parametrize("name", sorted(compat.CACHE_ARGUMENTS - {"cache_params"}))
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_a_cache_by_either_name(family: str, name: str, options: dict[str, Any]) -> None:
    """Arguments that the installed release accepts work, and the output has stock's field."""
    model = zoo.build(family)
    encoder_decoder = model.config.is_encoder_decoder
    cache = (
        EncoderDecoderCache(DynamicCache(), DynamicCache()) if encoder_decoder else DynamicCache()
    )
    kwargs = zoo.batch(model, 2, 6) | options
    before = hits(), fallbacks()
    found = assert_same(
        model, {**kwargs, name: cache, "max_new_tokens": 5, "return_dict_in_generate": True}
    )
    assert CACHE in found.value
    assert hits() == before[0] + 1
    assert fallbacks() == before[1]


MATRIX = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20, "num_return_sequences": 2},
    "beams": {"num_beams": 4},
    "beam sampling": {"num_beams": 3, "do_sample": True},
    "n-gram blocking": {"num_beams": 4, "no_repeat_ngram_size": 2},
    "several sequences": {"num_beams": 4, "num_return_sequences": 3},
    "dict": {"num_beams": 3, "return_dict_in_generate": True, "output_scores": True},
}


@pytest.mark.parametrize("family", ["bart", "marian", "t5", "gpt2", "llama", "qwen3"])
@pytest.mark.parametrize("options", MATRIX.values(), ids=MATRIX.keys())
def test_what_people_run_is_run_here(family: str, options: dict[str, Any]) -> None:
    """fastgen serves these calls on the installed release, with stock's output."""
    model = zoo.build(family)
    before = hits(), fallbacks()
    result = assert_same(model, zoo.batch(model, 3, 7) | options | {"max_new_tokens": 8})
    assert result.error is None
    assert hits() == before[0] + 1
    assert fallbacks() == before[1]


@pytest.mark.parametrize("family", ["bart", "marian", "t5", "gpt2", "llama", "qwen3"])
def test_diverse_beams_run_here(family: str) -> None:
    """transformers has removed them; `test_restored.py` compares them with recorded output."""
    model = zoo.build(family)
    before = hits(), fallbacks()
    options = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "max_new_tokens": 6}
    model.generate(**zoo.batch(model, 2, 6), **options)
    assert hits() == before[0] + 1
    assert fallbacks() == before[1]


def test_the_newest_tested_release_is_the_pinned_one() -> None:
    pins = (Path(__file__).parents[3] / "constraints.txt").read_text(encoding="utf-8")
    assert f"transformers=={TOOLKIT.tested}\n" in pins
