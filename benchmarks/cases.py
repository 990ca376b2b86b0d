"""The benchmark cases as data: the model, its size, and the arguments of `generate`.

Models are built from a config at their real shape, with random seeded weights, so nothing is
downloaded. `Case.tiny()` shrinks a case to something that runs in a second. It serves tests of the
benchmark's own logic; its figures mean nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.harness import ROOT
from benchmarks.weights import Weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EXAMPLE = ROOT / "examples" / "en-es"


@dataclass(frozen=True)
class Shape:
    """A transformers model with random weights.

    Attributes:
        config: name of the transformers config class.
        values: arguments of that class.
        tiny: arguments that differ in the tiny version.
        weights: distribution of the random weights.
    """

    config: str
    values: dict[str, Any]
    tiny: dict[str, Any]
    weights: Weights

    def tiny_version(self) -> Shape:
        """Return the shape at a size for tests."""
        return replace(self, values=self.values | self.tiny)

    def build(self, dtype: torch.dtype, device: str) -> PreTrainedModel:
        """Return the model in evaluation mode, with the same weights every time."""
        import transformers

        config = getattr(transformers, self.config)(**self.values)
        auto = (
            transformers.AutoModelForSeq2SeqLM
            if config.is_encoder_decoder
            else transformers.AutoModelForCausalLM
        )
        torch.manual_seed(0)
        model = auto.from_config(config, dtype=torch.float32)
        self.weights.fill(model, model.get_decoder() if config.is_encoder_decoder else model)
        return model.to(device=device, dtype=dtype).eval()


@dataclass(frozen=True)
class FairseqShape:
    """A fairseq transformer with random weights.

    Attributes:
        architecture: name of the fairseq architecture.
        values: options of that architecture.
        words: size of its dictionary without the four special symbols.
        weights: distribution of the random weights.
    """

    architecture: str
    values: dict[str, Any]
    words: int
    weights: Weights

    def tiny_version(self) -> FairseqShape:
        """Return the shape at a size for tests."""
        return replace(self, values=self.values | _fairseq(2, 32, 4, 64), words=57)

    def build(self, dtype: torch.dtype, device: str) -> Any:
        """Return the model, ready to generate, with the same weights every time."""
        from argparse import Namespace
        from types import SimpleNamespace

        from fairseq.data import Dictionary
        from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

        dictionary = Dictionary()
        for i in range(self.words):
            dictionary.add_symbol(str(i))
        args = Namespace(
            **self.values, max_source_positions=1024, max_target_positions=1024, dropout=0.0
        )
        ARCH_CONFIG_REGISTRY[self.architecture](args)
        task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
        torch.manual_seed(0)
        model = ARCH_MODEL_REGISTRY[self.architecture].build_model(args, task)
        self.weights.fill(model, model.decoder)
        # Load the weights as from a checkpoint, which makes fairseq use its fused layers.
        torch.nn.Module.load_state_dict(model, model.state_dict())
        model.dictionary = dictionary
        model = model.to(device=device, dtype=dtype).eval()
        model.make_generation_fast_()
        return model


@dataclass(frozen=True)
class Case:
    """One row of the table of benchmarks.

    Attributes:
        name: name on the command line and of the results file.
        kind: runner that measures it: generate, best_batch, text, grid, step_time, setting, memory,
            fairseq or command.
        help: one line for the reader.
        shape: the model; None if `models` or a trained model is used.
        batch: number of sentences B.
        source: tokens of each source or prompt.
        beams: number of beams M.
        new_tokens: tokens to generate.
        options: further arguments of `generate`, or of fairseq's generator.
        target: speed-up to reach over the unpatched toolkit, or over the first value of a setting;
            None if there is no target.
        gpu_target: the same on a GPU, if it differs.
        peer_target: speed-up to reach over the peer.
        setting: an environment variable of fastgen and the two values to compare; None for other
            kinds.
        floor_target: the most times its floor that a decode step of one sentence may take.
        models: for tables over several models, their names in SHAPES (grid) or in CASES (memory).
        grid: values to measure by name. A grid takes all combinations, step_time changes one value
            at a time, and best_batch searches the batch sizes.
        sentences: the most sentences of a text to use.
        gpu: whether the case is made for a GPU. On a CPU it then runs only if it is named.
        rounds: rounds unless the command line sets them; for a grid, the most rounds of a cell.
    """

    name: str
    kind: str
    help: str
    shape: Shape | FairseqShape | None = None
    batch: int = 0
    source: int = 0
    beams: int = 0
    new_tokens: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    target: float | None = None
    gpu_target: float | None = None
    peer_target: float | None = None
    setting: tuple[str, str, str] | None = None
    floor_target: float | None = None
    models: tuple[str, ...] = ()
    grid: dict[str, tuple[int, ...]] = field(default_factory=dict)
    sentences: int = 0
    gpu: bool = False
    rounds: int = 7

    @property
    def generate_options(self) -> dict[str, Any]:
        """Arguments of `generate`.

        They ask for exactly `new_tokens` tokens, so that every run does the same work.
        """
        return {
            "num_beams": self.beams,
            "do_sample": False,
            "min_new_tokens": self.new_tokens,
            "max_new_tokens": self.new_tokens,
            **self.options,
        }

    def inputs(self, model: PreTrainedModel) -> dict[str, torch.Tensor]:
        """Return random seeded sources without padding and special tokens.

        The ids avoid both ends of the vocabulary, where the special tokens are.

        Returns:
            `input_ids` and `attention_mask`, (batch, source) int64.
        """
        ends = min(200, model.config.vocab_size // 8)
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(
            ends, model.config.vocab_size - ends, (self.batch, self.source), generator=generator
        )
        ids = ids.to(model.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def cells(self) -> Iterator[tuple[str, Shape, Case]]:
        """Yield the key, model shape and case of every cell of a grid, cheapest model first."""
        lengths = self.grid.get("new_tokens", (self.new_tokens,))
        for model, batch, beams, source, new in itertools.product(
            self.models, self.grid["batch"], self.grid["beams"], self.grid["source"], lengths
        ):
            key = f"{model}/batch{batch}/beams{beams}/source{source}" + f"/new{new}" * (
                "new_tokens" in self.grid
            )
            shape = SHAPES[model]
            yield (
                key,
                shape,
                replace(self, shape=shape, batch=batch, beams=beams, source=source, new_tokens=new),
            )

    def tiny(self) -> Case:
        """Return the case at a size for tests."""
        return replace(
            self,
            shape=self.shape and self.shape.tiny_version(),
            batch=min(self.batch, 3),
            source=min(self.source, 12),
            new_tokens=min(self.new_tokens, 6),
            grid={
                name: tuple(
                    sorted({min(v, {"source": 12, "new_tokens": 9}.get(name, 2)) for v in g})
                )
                for name, g in self.grid.items()
            },
            options={k: [[60]] if k == "bad_words_ids" else v for k, v in self.options.items()},
            rounds=2,
        )


def _tiny(**values: Any) -> dict[str, Any]:
    return {"vocab_size": 61, **values}


def _bart_like(layers: int, width: int, heads: int, ffn: int) -> dict[str, Any]:
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", layers), ("attention_heads", heads), ("ffn_dim", ffn))
    }
    return {"d_model": width, **sides}


def _fairseq(layers: int, width: int, heads: int, ffn: int) -> dict[str, Any]:
    sizes = {"layers": layers, "attention_heads": heads, "ffn_embed_dim": ffn, "embed_dim": width}
    return {
        f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sizes.items()
    }


# Without forced_bos_token_id and forced_eos_token_id the model selects all tokens itself.
SHAPES = {
    "bart_large": Shape(
        "BartConfig",
        {"forced_bos_token_id": None, "forced_eos_token_id": None},  # the defaults are bart-large's
        _tiny(**_bart_like(2, 32, 4, 64)),
        Weights(gain=2.0, embedding=0.1, mixing=0.03),
    ),
    "gpt2": Shape(
        "GPT2Config",
        {"pad_token_id": 50256},  # the defaults are the 124M model's
        _tiny(
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=64,
            bos_token_id=60,
            eos_token_id=60,
            pad_token_id=60,
        ),
        Weights(gain=2.8, embedding=0.1),
    ),
    "t5_base": Shape(
        "T5Config",
        {
            "d_model": 768,
            "d_ff": 3072,
            "num_layers": 12,
            "num_heads": 12,
            "vocab_size": 32128,
            "decoder_start_token_id": 0,
        },
        _tiny(d_model=32, d_ff=64, num_layers=2, num_heads=4, d_kv=8),
        Weights(gain=2.5, embedding=0.1, mixing=0.1, final_norm=30.0),
    ),
    "marian_base": Shape(  # the shape, vocabulary and embedding scale of the OPUS-MT models
        "MarianConfig",
        {
            **_bart_like(6, 512, 8, 2048),
            "vocab_size": 58101,
            "max_position_embeddings": 512,
            "activation_function": "swish",
            "scale_embedding": True,
            "forced_eos_token_id": None,
        },
        _tiny(**_bart_like(2, 32, 4, 64), pad_token_id=60, decoder_start_token_id=60),
        Weights(gain=2.0, embedding=0.1, mixing=0.1),
    ),
    "qwen2": Shape(  # Qwen2-0.5B
        "Qwen2Config",
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151_936,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 0,
        },
        _tiny(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
        ),
        Weights(gain=2.5, embedding=0.1),
    ),
    "small": Shape(  # the trained model of examples/en-es, with positions for a source of 512
        "MarianConfig",
        {
            **_bart_like(3, 256, 4, 512),
            "decoder_layers": 2,
            "vocab_size": 5000,
            "max_position_embeddings": 512,
            "scale_embedding": True,
            "pad_token_id": 0,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "decoder_start_token_id": 0,
            "forced_eos_token_id": None,
        },
        _tiny(**_bart_like(2, 32, 4, 64)),
        Weights(gain=3.0, embedding=0.1, mixing=0.05),
    ),
}

FAIRSEQ_SHAPES = {
    "iwslt": FairseqShape(
        "transformer",
        {**_fairseq(6, 512, 4, 1024), "share_all_embeddings": True},
        9_996,
        Weights(gain=2.0, embedding=0.1, mixing=0.1),
    ),
    "big": FairseqShape(
        "transformer_wmt_en_de_big",
        {"share_all_embeddings": True},
        32_764,
        Weights(gain=2.0, embedding=0.1, mixing=0.1),
    ),
    "bart": FairseqShape("bart_large", {}, 50_260, Weights(gain=2.0, embedding=0.1, mixing=0.03)),
}

_CHAT: dict[str, Any] = {
    "shape": SHAPES["qwen2"], "batch": 1, "source": 128, "beams": 1, "new_tokens": 64, "rounds": 5,
}  # fmt: skip
"""A prompt and its answer, shared by the cases of a chat model."""

_STREAM: dict[str, Any] = {
    "shape": SHAPES["marian_base"], "batch": 32, "source": 32, "beams": 1, "new_tokens": 128,
    "options": {"bad_words_ids": [[58100]]}, "target": 1.0, "rounds": 5, "gpu": True,
}  # fmt: skip
"""A stream of short sentences, shared by the cases that compare a setting."""

CASES = {
    case.name: case
    for case in (
        Case(
            "bart_large",
            "generate",
            "BART-large, 4 texts of 512 tokens, no repeated 3-gram",
            SHAPES["bart_large"],
            batch=4,
            source=512,
            beams=4,
            new_tokens=32,
            options={"no_repeat_ngram_size": 3},
            target=5.0,
            peer_target=2.0,
        ),
        Case(
            "gpt2",
            "generate",
            "GPT-2 124M, 4 prompts of 512 tokens",
            SHAPES["gpt2"],
            batch=4,
            source=512,
            beams=4,
            new_tokens=32,
            target=5.0,
        ),
        Case(
            "t5_base",
            "generate",
            "T5-base, 8 texts of 256 tokens",
            SHAPES["t5_base"],
            batch=8,
            source=256,
            beams=4,
            new_tokens=32,
            target=3.0,
        ),
        Case(
            "marian_base",
            "generate",
            "Marian-base, 32 sentences of 32 tokens",
            SHAPES["marian_base"],
            batch=32,
            source=32,
            beams=4,
            new_tokens=32,
            # The padding token, as in the generation config of the published models.
            options={"bad_words_ids": [[58100]]},
            target=3.0,
            peer_target=1.2,
        ),
        Case(
            "trained",
            "text",
            "the trained model of examples/en-es, on real sentences",
            batch=32,
            beams=4,
            new_tokens=160,
            target=4.0,
            peer_target=1.0,
            rounds=3,
        ),
        Case(
            "never_worse",
            "grid",
            "batch x beams x source, a small and a large model: no cell may be slower",
            new_tokens=16,
            target=0.98,
            models=("small", "bart_large"),
            grid={"batch": (1, 4, 16), "beams": (1, 2, 4), "source": (16, 128, 512)},
            rounds=40,
        ),
        Case(
            "few_tokens",
            "grid",
            "few new tokens, where set-up dominates: no cell may be slower",
            target=0.98,
            models=("small",),
            grid={"batch": (1, 8), "beams": (1, 4), "source": (16,), "new_tokens": (1, 2, 3, 5, 8)},
            rounds=40,
        ),
        Case(
            "step_time",
            "step_time",
            "time of a decode step by text, sentences, beams and source, and its lower bound",
            SHAPES["marian_base"],
            batch=8,
            source=128,
            beams=4,
            new_tokens=16,
            grid={
                "new_tokens": (96,),
                "batch": (1, 4, 8, 16),
                "beams": (1, 2, 4, 8),
                "source": (16, 128, 500),
            },
            rounds=2,
        ),
        Case(
            "fairseq_iwslt",
            "fairseq",
            "fairseq, 6 + 6 layers of 512, 32 sentences of 40 tokens",
            FAIRSEQ_SHAPES["iwslt"],
            batch=32,
            source=40,
            beams=4,
            new_tokens=60,
            target=2.0,
            gpu_target=4.0,
        ),
        Case(
            "fairseq_big",
            "fairseq",
            "fairseq's big transformer, 16 sentences of 40 tokens",
            FAIRSEQ_SHAPES["big"],
            batch=16,
            source=40,
            beams=4,
            new_tokens=40,
            target=2.0,
            gpu_target=5.0,
        ),
        Case(
            "fairseq_bart",
            "fairseq",
            "fairseq, BART-large, 4 texts of 512 tokens, no repeated 3-gram",
            FAIRSEQ_SHAPES["bart"],
            batch=4,
            source=512,
            beams=4,
            new_tokens=32,
            options={"no_repeat_ngram_size": 3},
            target=2.5,
            gpu_target=6.0,
        ),
        Case(
            "fairseq_one",
            "fairseq",
            "fairseq, 6 + 6 layers of 512, one sentence of 40 tokens",
            FAIRSEQ_SHAPES["iwslt"],
            batch=1,
            source=40,
            beams=4,
            new_tokens=60,
            target=0.98,
        ),
        Case(
            "fairseq_command",
            "command",
            "fairseq-generate, a tiny model, 2,000 real sentences, whole process",
            batch=64,
            beams=4,
            new_tokens=100,
            options={"--no-repeat-ngram-size": 3},
            target=2.5,
            gpu_target=4.0,
            sentences=2_000,
            rounds=3,
        ),
        Case(
            "gpu_bart_large",
            "generate",
            "BART-large on a GPU, 32 texts of 1,024 tokens, 140 new tokens",
            SHAPES["bart_large"],
            batch=32,
            source=1024,
            beams=4,
            new_tokens=140,
            options={"no_repeat_ngram_size": 3},
            target=8.0,
            gpu=True,
        ),
        Case(
            "gpu_bart_one",
            "generate",
            "BART-large on a GPU, one text of 1,024 tokens, 140 new tokens",
            SHAPES["bart_large"],
            batch=1,
            source=1024,
            beams=4,
            new_tokens=140,
            options={"no_repeat_ngram_size": 3},
            gpu=True,
        ),
        Case(
            "gpu_t5_base",
            "generate",
            "T5-base on a GPU, 32 texts of 512 tokens",
            SHAPES["t5_base"],
            batch=32,
            source=512,
            beams=4,
            new_tokens=64,
            target=8.0,
            gpu=True,
        ),
        Case(
            "gpu_gpt2",
            "generate",
            "GPT-2 124M on a GPU, 32 prompts of 512 tokens",
            SHAPES["gpt2"],
            batch=32,
            source=512,
            beams=4,
            new_tokens=128,
            target=10.0,
            gpu=True,
        ),
        Case(
            "gpu_best_batch",
            "best_batch",
            "BART-large on a GPU, sentences per second, each side at its best batch size",
            SHAPES["bart_large"],
            source=1024,
            beams=4,
            new_tokens=140,
            options={"no_repeat_ngram_size": 3},
            grid={"batch": (16, 32, 64, 128, 256)},
            target=6.0,
            gpu=True,
        ),
        Case(
            "gpu_step_time",
            "step_time",
            "BART-large on a GPU, time of a decode step and its lower bound",
            SHAPES["bart_large"],
            source=1024,
            beams=4,
            batch=32,
            new_tokens=140,
            options={"no_repeat_ngram_size": 3},
            floor_target=2.5,
            grid={
                "new_tokens": (140,),
                "batch": (1, 8, 32),
                "beams": (1, 4),
                "source": (256, 1024),
            },
            gpu=True,
        ),
        Case(
            "refill",
            "setting",
            "a stream of sentences of unequal output length: refilled batches against "
            "one batch after the other",
            **_STREAM,
            setting=("FASTGEN_REFILL", "off", "on"),
        ),
        Case(
            "graphs",
            "setting",
            "the same stream, on a GPU: CUDA graphs kept between calls against graphs per call",
            **_STREAM,
            setting=("FASTGEN_GRAPHS", "call", "auto"),
        ),
        Case(
            "greedy",
            "generate",
            "GPT-2 124M, greedy, 8 prompts of 128 tokens",
            SHAPES["gpt2"],
            batch=8,
            source=128,
            beams=1,
            new_tokens=64,
            target=1.5,
            peer_target=1.0,
        ),
        Case(
            "greedy_one",
            "generate",
            "GPT-2 124M, greedy, one prompt of 128 tokens",
            SHAPES["gpt2"],
            batch=1,
            source=128,
            beams=1,
            new_tokens=64,
            target=0.98,
            peer_target=1.0,
        ),
        Case(
            "qwen2",
            "generate",
            "Qwen2-0.5B, greedy, one prompt of 128 tokens",
            **_CHAT,
            target=1.4,
        ),
        Case(
            "qwen2_sampled",
            "generate",
            "Qwen2-0.5B, sampled, one prompt of 128 tokens",
            **_CHAT,
            options={"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9},
            target=1.4,
        ),
        Case(
            "qwen2_batch",
            "generate",
            "Qwen2-0.5B, greedy, 4 prompts of 128 tokens",
            **_CHAT | {"batch": 4},
            target=1.0,
        ),
        Case(
            "qwen2_beams",
            "generate",
            "Qwen2-0.5B, 4 beams, one prompt of 128 tokens",
            **_CHAT | {"beams": 4},
            target=1.4,
        ),
        Case(
            "qwen2_long",
            "generate",
            "Qwen2-0.5B, greedy, one prompt of 1,024 tokens, 16 new tokens",
            **_CHAT | {"source": 1024, "new_tokens": 16},
            target=1.0,
        ),
        Case(
            "kv_memory",
            "memory",
            "bytes of the KV cache, and the B*S + B*M*T entries per layer that it needs",
            models=("bart_large", "gpt2", "t5_base", "marian_base"),
        ),
    )
}
