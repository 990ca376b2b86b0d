"""Loading of UniLM checkpoints, in transformers' format or as s2s-ft publishes them.

A plain BERT in transformers' format can be loaded too.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from fastgen.unilm.config import UniLMConfig
from fastgen.unilm.model import UniLMForConditionalGeneration

_SPECIAL = {
    "mask_token_id": "mask_token",
    "decoder_start_token_id": "cls_token",
    "eos_token_id": "sep_token",
}
_TOKENIZERS = (
    "tokenizer.json",
    "vocab.txt",
)  # if all of them are missing, transformers makes up a small tokenizer
_POSITIONS = "bert.embeddings.position_embeddings.weight"


def load(
    weights: str | Path,
    config: str | Path | None = None,
    max_position_embeddings: int | None = None,
    **kwargs: Any,
) -> UniLMForConditionalGeneration:
    """Load a UniLM, a MiniLM or a plain BERT, in evaluation mode.

    No code from a file is executed: torch files are read with `weights_only=True`.

    Args:
        weights: A directory of a UniLM or a BERT, as `save_pretrained` writes it; or a file of
            s2s-ft, such as `unilm1.2-base-uncased.bin`. Weights that a BERT lacks are newly
            initialized, as transformers then reports, and its tokenizer supplies the special
            tokens.
        config: The JSON file that is published with such a file. For a directory, None selects its
            `config.json`.
        max_position_embeddings: Number of positions, if it is to differ from the checkpoint's. The
            position table is truncated, or repeated from its start, as s2s-ft extends it.
        **kwargs: Config values, such as `source_type_id=4`, and arguments of `from_pretrained`,
            such as `dtype`.

    Raises:
        FileNotFoundError: A file does not exist.
        ValueError: The config selects an unsupported variant; a file lacks weights of a UniLM, or
            its `config` is None; or a BERT's directory has no tokenizer, and `mask_token_id`,
            `decoder_start_token_id` and `eos_token_id` are not all given.
    """
    weights = Path(weights)
    if weights.is_dir():
        model = _of_folder(weights, config, kwargs)
    elif config is None:
        raise ValueError(
            f"config is None: it must name the JSON file that was published beside {weights}"
        )
    else:
        positions, model = _of_file(weights, Path(config), kwargs)
        max_position_embeddings = max_position_embeddings or positions
    if (
        max_position_embeddings is not None
        and max_position_embeddings != model.config.max_position_embeddings
    ):
        _set_positions(model, max_position_embeddings)
    return model.eval()


def _of_folder(
    folder: Path, config: str | Path | None, kwargs: dict[str, Any]
) -> UniLMForConditionalGeneration:
    file = folder / "config.json" if config is None else Path(config)
    if (kind := json.loads(file.read_text("utf-8")).get("model_type")) not in (
        None,
        UniLMConfig.model_type,
    ):
        kwargs = _special_tokens(folder, kind, kwargs) | kwargs
    read, rest = _config(file, kwargs)
    return UniLMForConditionalGeneration.from_pretrained(folder, config=read, **rest)


def _special_tokens(folder: Path, kind: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the special tokens that a UniLM needs and a BERT config lacks, from its tokenizer.

    Raises:
        ValueError: There is no tokenizer, and not all of the tokens are given.
    """
    missing = [name for name in _SPECIAL if name not in given]
    if not missing:
        return {}
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ValueError(
            f"{folder} holds a {kind} without a tokenizer, so that its [MASK], [CLS] and [SEP] are "
            f"not known: {', '.join(missing)} must be given"
        )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return {
        name: tokenizer.convert_tokens_to_ids(getattr(tokenizer, _SPECIAL[name]))
        for name in missing
    }


def _of_file(
    file: Path, config: Path, kwargs: dict[str, Any]
) -> tuple[int, UniLMForConditionalGeneration]:
    """Load a published file.

    Returns:
        The number of positions that the config requests, and the model, which has as many positions
        as the file.
    """
    read, rest = _config(config, kwargs)
    tensors: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    # Older files use TensorFlow's names for a norm's parameters.
    state = {
        name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
            "LayerNorm.beta", "LayerNorm.bias"
        ): value
        for name, value in tensors.items()
    }
    if _POSITIONS not in state:
        raise ValueError(f"{file} holds no weights of a UniLM: there is no {_POSITIONS}")
    positions, read.max_position_embeddings = (
        read.max_position_embeddings,
        state[_POSITIONS].shape[0],
    )
    loaded: Any = UniLMForConditionalGeneration.from_pretrained(
        None, config=read, state_dict=state, output_loading_info=True, **rest
    )
    model, info = loaded
    missing = sorted(name for name in info["missing_keys"] if name.startswith("bert."))
    if missing:
        raise ValueError(f"{file} lacks {len(missing)} weights of a UniLM, {missing[0]} among them")
    return positions, model


def _config(file: Path, kwargs: dict[str, Any]) -> tuple[UniLMConfig, dict[str, Any]]:
    """Return the config of a JSON file, updated with `kwargs`, and the remaining arguments."""
    values: dict[str, Any] = json.loads(file.read_text("utf-8"))
    values.pop("model_type", None)
    known = UniLMConfig.__dataclass_fields__
    config_values = {
        name: value for name, value in kwargs.items() if name in known and name != "dtype"
    }
    return UniLMConfig(**values | config_values), {
        name: value for name, value in kwargs.items() if name not in config_values
    }


def _set_positions(model: UniLMForConditionalGeneration, count: int) -> None:
    """Resize a model's position table to `count` rows."""
    embeddings: Any = model.bert.embeddings
    rows = (
        torch.arange(count, dtype=torch.int64, device="cpu") % model.config.max_position_embeddings
    )
    table = embeddings.position_embeddings.weight.detach()[rows.to(model.device)]
    embeddings.position_embeddings = nn.Embedding.from_pretrained(table, freeze=False)
    embeddings.position_ids = torch.arange(count, device=model.device, dtype=torch.int64)[None]
    embeddings.token_type_ids = torch.zeros(1, count, dtype=torch.long, device=model.device)
    model.config.max_position_embeddings = count
