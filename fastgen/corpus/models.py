"""A model and its tokenizer, from a folder as `save_pretrained` writes it, or by their id on the hub."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastgen.errors import CommandError, needs

_NOT_NEEDED = [
    "*/*",
    "*.bin",
    "*.ckpt",
    "*.gguf",
    "*.h5",
    "*.md",
    "*.msgpack",
    "*.onnx",
    "*.ot",
    "*.pt",
    "*.pth",
]
"""Files of a model on the hub that transformers does not read, or reads where there are no safetensors."""

HELP = "folder of the model and its tokenizer, or their id on the hub"

_NAMED = 3  # weights that a message names


def need(*modules: str) -> None:
    """Raise CommandError with the pip command for those optional modules that are not installed."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise CommandError(needs(*missing))


def usable_device(device: str | None, threads: int | None) -> str:
    """The device to run on, CUDA where there is one and none is named; torch gets its number of CPU threads.

    Raises:
        CommandError: torch cannot use it.
    """
    import torch

    if threads:
        torch.set_num_threads(threads)
    found = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=found, dtype=torch.float32)
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without CUDA
        raise CommandError(f"--device {found}: {first_line(error)}") from error
    return found


def folder_of(model: str | Path) -> Path:
    """Return the folder of a model, which is named by its folder or by its id on the hub.

    The files of an id are downloaded into the hub's cache, and are its own there: a cached model needs no network.

    Raises:
        CommandError: there is neither; the message has what transformers says.
    """
    folder = Path(model)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise CommandError(f"{folder} holds no model: config.json is missing")
        return folder
    need("transformers")
    name = folder.as_posix()
    try:
        return _snapshot(name)
    except Exception as error:  # of transformers, of the hub, or of the network below it
        told = " ".join(str(error).split())
        raise CommandError(
            f"{name}: there is no such folder; as a model's id on the hub: {told}"
        ) from error


@functools.cache
def _snapshot(name: str) -> Path:
    """Return the folder of a model in the hub's cache, the same one whenever this process asks."""
    from huggingface_hub import is_offline_mode, snapshot_download
    from transformers.utils.hub import cached_file

    folder = Path(str(cached_file(name, "config.json"))).parent
    if not is_offline_mode():
        fetch = functools.partial(snapshot_download, name, revision=folder.name)
        fetch(ignore_patterns=_NOT_NEEDED)
        if not any(folder.glob("*.safetensors")):
            fetch(allow_patterns="pytorch_model*")
    return folder


def shared_name(model: Path) -> Path:
    """Return a model's name for processes on other machines: the absolute path of a folder, or the id on the hub.

    Raises:
        CommandError: there is no such model here.
    """
    return model.absolute() if folder_of(model) == model else model


def load_tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder_of(model), local_files_only=True)
    except Exception as error:  # libraries below raise kinds of their own for a torn file
        raise CommandError(f"{model}: its tokenizer cannot be read: {first_line(error)}") from error


def load_config(model: Path) -> Any:
    from transformers import AutoConfig

    import fastgen.unilm

    try:
        return AutoConfig.from_pretrained(folder_of(model), local_files_only=True)
    except Exception as error:
        raise CommandError(f"{model}: the model cannot be loaded: {first_line(error)}") from error


def load_model(name: Path, device: str, dtype: str) -> Any:
    """Load a model, ready to generate: an encoder-decoder, or a decoder-only model.

    Args:
        name: its folder, or its id on the hub.

    Raises:
        CommandError: it cannot be loaded, its files lack weights, or a weight has a NaN or infinite number.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    kind = AutoModelForSeq2SeqLM if load_config(name).is_encoder_decoder else AutoModelForCausalLM
    try:
        found: Any = kind.from_pretrained(
            folder_of(name),
            local_files_only=True,
            dtype=getattr(torch, dtype),
            output_loading_info=True,
        )
        model = found[0].to(device).eval()
    except Exception as error:  # of a torn file, too little memory on the device ...
        raise CommandError(f"{name}: the model cannot be loaded: {first_line(error)}") from error
    parameters = dict(
        model.named_parameters(remove_duplicate=False)
    )  # a tied weight by all of its names
    _refuse(
        name,
        "its files lack",
        [key for key in sorted(found[1]["missing_keys"]) if key in parameters],
    )
    _refuse(name, f"in {dtype}, NaN or infinite numbers are in", _not_finite(model))
    return model


def _not_finite(model: Any) -> list[str]:
    """Return the names of parameters with a NaN or infinite number.

    A sum shows them in one pass without a copy. One that overflows, as in fp16 it may, is looked at again.
    """
    import torch

    weights = {
        name: weight for name, weight in model.named_parameters() if weight.is_floating_point()
    }
    if not weights:
        return []
    with torch.no_grad():
        good = torch.stack([weight.sum().isfinite() for weight in weights.values()]).tolist()
        suspects = [name for name, is_good in zip(weights, good, strict=True) if not is_good]
        return [name for name in suspects if not weights[name].isfinite().all()]


def _refuse(model: Path, problem: str, names: list[str]) -> None:
    """Raise CommandError where a problem has the names of weights."""
    if names:
        many = f"{len(names)} weights" if len(names) > 1 else "1 weight"
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        raise CommandError(f"{model}: {problem} {many}: {', '.join(names[:_NAMED])}{more}")


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
