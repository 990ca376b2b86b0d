"""A model and its tokenizer, from a folder as `save_pretrained` writes it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastgen.errors import CommandError, needs


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


def check_folder(folder: Path) -> None:
    """Raise CommandError where no model can lie."""
    if not folder.is_dir():
        raise CommandError(f"{folder}: there is no such folder; a model is a folder, as save_pretrained writes it")
    if not (folder / "config.json").is_file():
        raise CommandError(f"{folder} holds no model: config.json is missing")


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # libraries below raise kinds of their own for a torn file
        raise CommandError(f"{folder}: its tokenizer cannot be read: {first_line(error)}") from error


def load_config(folder: Path) -> Any:
    from transformers import AutoConfig

    import fastgen.unilm  # noqa: F401 so that its folders are known

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise CommandError(f"{folder}: the model cannot be loaded: {first_line(error)}") from error


def load_model(folder: Path, device: str, dtype: str) -> Any:
    """The model of a folder, ready to generate: an encoder-decoder, or a decoder-only model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    kind = AutoModelForSeq2SeqLM if load_config(folder).is_encoder_decoder else AutoModelForCausalLM
    try:
        model: Any = kind.from_pretrained(folder, local_files_only=True, dtype=getattr(torch, dtype))
        return model.to(device).eval()
    except Exception as error:  # of a torn file, too little memory on the device ...
        raise CommandError(f"{folder}: the model cannot be loaded: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
