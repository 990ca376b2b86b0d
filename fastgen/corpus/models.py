"""Loading of a model and its tokenizer, from a folder of `save_pretrained` or by id on the hub."""

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
"""Files on the hub that transformers does not read, or reads only if there are no safetensors."""

HELP = "folder of the model and its tokenizer, or their id on the hub"

_NAMED = 3  # the most weights that a message names


def need(*modules: str) -> None:
    """Raise CommandError with the pip command for optional modules that are not installed."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise CommandError(needs(*missing))


def usable_device(device: str | None, threads: int | None) -> str:
    """Return the device to run on; also set torch's number of CPU threads.

    Args:
        device: name of the device; None for CUDA if available, else the CPU.
        threads: number of threads; None or 0 to leave it as it is.

    Raises:
        CommandError: torch cannot use the device.
    """
    import torch

    if threads:
        torch.set_num_threads(threads)
    found = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=found, dtype=torch.float32)
    except (RuntimeError, AssertionError) as error:  # the latter if torch was built without CUDA
        raise CommandError(f"--device {found}: {first_line(error)}") from error
    return found


def folder_of(model: str | Path) -> Path:
    """Return the folder of a model that is named by its folder or by its id on the hub.

    The files of an id are downloaded into the hub's cache; this needs no network if they are
    cached.

    Raises:
        CommandError: there is no such folder or id; the message includes transformers' own.
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
    except Exception as error:  # from transformers, the hub's client or the network
        message = " ".join(str(error).split())
        raise CommandError(
            f"{name}: there is no such folder; as a model's id on the hub: {message}"
        ) from error


@functools.cache
def _snapshot(name: str) -> Path:
    """Return the folder of a model in the hub's cache, the same one throughout this process."""
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
    """Return a model's name on other machines: an absolute path, or the id on the hub.

    Raises:
        CommandError: there is no such model here.
    """
    return model.absolute() if folder_of(model) == model else model


def load_tokenizer(model: Path) -> Any:
    """Load a model's tokenizer.

    Raises:
        CommandError: it cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder_of(model), local_files_only=True)
    except Exception as error:  # other libraries raise their own exceptions for a truncated file
        raise CommandError(f"{model}: its tokenizer cannot be read: {first_line(error)}") from error


def load_config(model: Path) -> Any:
    """Load a model's config.

    Raises:
        CommandError: it cannot be read.
    """
    from transformers import AutoConfig

    import fastgen.unilm  # noqa: F401  # registers UniLM's config

    try:
        return AutoConfig.from_pretrained(folder_of(model), local_files_only=True)
    except Exception as error:
        raise CommandError(f"{model}: the model cannot be loaded: {first_line(error)}") from error


def load_model(name: Path, device: str, dtype: str) -> Any:
    """Load a model for generation: an encoder-decoder or a decoder-only model.

    Args:
        name: its folder, or its id on the hub.
        device: the device to put it on.
        dtype: dtype of its weights, as torch names it.

    Raises:
        CommandError: it cannot be loaded, its files lack weights, or a weight is NaN or infinite.
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
    except Exception as error:  # a truncated file, too little memory on the device ...
        raise CommandError(f"{name}: the model cannot be loaded: {first_line(error)}") from error
    # Tied weights are listed under all of their names.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    _refuse(
        name,
        "its files lack",
        [key for key in sorted(found[1]["missing_keys"]) if key in parameters],
    )
    _refuse(name, f"in {dtype}, NaN or infinite numbers are in", _not_finite(model))
    return model


def _not_finite(model: Any) -> list[str]:
    """Return the names of parameters with a NaN or infinite number.

    A sum finds candidates in one pass without a copy. Since a sum may overflow, as in fp16, each
    candidate is then checked in full.
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
    """Raise CommandError if there are weights with a problem."""
    if names:
        many = f"{len(names)} weights" if len(names) > 1 else "1 weight"
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        raise CommandError(f"{model}: {problem} {many}: {', '.join(names[:_NAMED])}{more}")


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().partition("\n")[0]
