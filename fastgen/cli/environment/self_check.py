"""Check of each patched toolkit: tiny random models generate with fastgen and without it."""

from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import fastgen
from fastgen.cli.environment.checks import Finding, error_line

REPORT = "set FASTGEN=0 for now, and report it with the output of `fastgen doctor --json`"
PATHS = {"triton": "Triton's kernels", "native": "C", "reference": "torch"}


def self_check() -> Iterator[Finding]:
    """Check that the output is the same and that fastgen's decode loops produced it.

    Yields:
        A finding for each toolkit, and notes on disabled features and fallbacks.
    """
    for toolkit, (loops, compare) in TRIED.items():
        if any(fastgen.status()[loop].state == "applied" for loop in loops):
            yield from _tried(loops, compare)
        else:
            yield Finding("note", f"{toolkit}: not tried: its decode loops are not patched")


def _tried(loops: tuple[str, ...], compare: Callable[[], tuple[bool, str]]) -> Iterator[Finding]:
    before, differed = [_counts(loop) for loop in loops], _differed()
    try:
        equal, compared = compare()
    except Exception as error:
        yield Finding(
            "trouble",
            f"tiny models of {_toolkit(loops)} did not generate: {error_line(error)}",
            REPORT,
        )
        return
    if not equal or _differed() > differed:
        yield Finding("trouble", f"tokens differ from those without fastgen: {compared}", REPORT)
        return
    done = sum(
        (_counts(loop) - earlier for loop, earlier in zip(loops, before, strict=True)),
        Counter[str](),
    )
    calls = done.pop("calls", 0)
    if calls:
        ran = {path for by_path in fastgen.status().operations.values() for path in by_path}
        paths = " and ".join(name for path, name in PATHS.items() if path in ran)
        yield Finding("ok", f"{compared}; {calls} calls ran fastgen's loops, operations by {paths}")
    else:
        yield Finding(
            "trouble",
            f"{compared}, but fastgen's loops did not run",
            "the patches below have the reason",
        )
    for what, count in done.items():
        yield Finding("note", f"in {count} of the calls: {what}")


def _counts(loop: str) -> Counter[str]:
    """Return the calls of a decode loop so far, its disabled features, and its fallback reasons."""
    row = fastgen.status()[loop]
    not_served = Counter(
        {f"on {_toolkit((loop,))}'s own code: {why}": count for why, count in row.fallbacks.items()}
    )
    return Counter(calls=row.hits) + Counter(row.left_off) + not_served


def _differed() -> int:
    """Return the number of differences found in parity mode.

    Parity mode runs both implementations and returns the toolkit's output.
    """
    return fastgen.status().parity.get("different", 0)


def _toolkit(loops: tuple[str, ...]) -> str:
    return loops[0].partition(".")[0]


def _transformers() -> tuple[bool, str]:
    from fastgen.patches.transformers.introspection.canary import agree

    return agree()


def _fairseq() -> tuple[bool, str]:
    """Translate with a tiny transformer, patched and unpatched.

    Returns:
        Whether the tokens are equal, and what was compared.
    """
    import torch
    from fairseq.data import Dictionary
    from fairseq.models.transformer import TransformerModel, base_architecture
    from fairseq.sequence_generator import SequenceGenerator

    words = Dictionary()
    for i in range(60):
        words.add_symbol(f"w{i}")
    sizes = {"embed_dim": 16, "ffn_embed_dim": 24, "attention_heads": 2, "layers": 2}
    args = Namespace(
        **{
            f"{part}_{name}": size
            for part in ("encoder", "decoder")
            for name, size in sizes.items()
        }
    )
    args.max_source_positions = args.max_target_positions = 64
    base_architecture(args)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
        model: Any = TransformerModel.build_model(args, task).double().eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "_weight" not in name:
                parameter.normal_(0, 0.5)  # so that no two tokens are nearly equal
        source = torch.randint(4, len(words), (2, 7), dtype=torch.int64, device="cpu")
        source[0, :3], source[:, -1] = words.pad(), words.eos()
        sample = {"net_input": {"src_tokens": source, "src_lengths": source.ne(words.pad()).sum(1)}}

        def tokens(beams: int) -> list[list[int]]:
            generator = SequenceGenerator([model], words, beam_size=beams, max_len_b=8)
            return [
                text["tokens"].tolist()
                for texts in generator.generate([model], sample)
                for text in texts
            ]

        for beams in (3, 1):
            ours = tokens(beams)
            with fastgen.disabled():
                if ours != tokens(beams):
                    return False, f"SequenceGenerator with {beams} beams gave other tokens"
    return True, "fairseq's transformer, beams and greedy: equal tokens"


TRIED: dict[str, tuple[tuple[str, ...], Callable[[], tuple[bool, str]]]] = {
    "transformers": (("transformers.beam_search", "transformers.sample"), _transformers),
    "fairseq": (("fairseq.generate",), _fairseq),
}
