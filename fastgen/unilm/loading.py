"""Checkpoints of UniLM: folders of transformers, a plain BERT's among them, and files as s2s-ft publishes them."""

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
)  # without one of these files transformers makes a small one up
_POSITIONS = "bert.embeddings.position_embeddings.weight"


def load(
    weights: str | Path,
    config: str | Path | None = None,
    max_position_embeddings: int | None = None,
    **kwargs: Any,
) -> UniLMForConditionalGeneration:
    """Load a UniLM, a MiniLM or a plain BERT, in evaluation mode.

    Nothing in a file is executed: what torch has saved is read with `weights_only=True`.

    Args:
        weights: a folder of a UniLM or a BERT as `save_pretrained` writes it (what a BERT's has no head for is fresh,
            as transformers then says, and its tokenizer says which its special tokens are); or a file of s2s-ft's, such
            as `unilm1.2-base-uncased.bin`.
        config: the JSON file that is published beside such a file; of a folder, the `config.json` in it.
        max_position_embeddings: so many positions, where the checkpoint has others: its table is cut, or begins again
            behind its end, as s2s-ft lengthens it.
        **kwargs: values of the config, as `source_type_id=4`, and arguments of `from_pretrained`, as `dtype`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the config asks for what is not computed here, a file lacks weights of a UniLM, or a BERT's folder
            has no tokenizer and `mask_token_id`, `decoder_start_token_id` and `eos_token_id` are not given.
    """
    weights = Path(weights)
    if weights.is_dir():
        model = _of_folder(weights, config, kwargs)
    elif config is None:
        raise ValueError(
            f"config is None: it must name the JSON file that was published beside {weights}"
        )
    else:
        wanted, model = _of_file(weights, Path(config), kwargs)
        max_position_embeddings = max_position_embeddings or wanted
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
    """The tokens that a UniLM needs and a BERT's config does not name, by the tokenizer in its folder.

    Raises:
        ValueError: there is none, and not all are given.
    """
    missing = [name for name in _SPECIAL if name not in given]
    if not missing:
        return {}
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ValueError(
            f"{folder} holds a {kind} without a tokenizer, so that its [MASK], [CLS] and [SEP] are not known: "
            f"{', '.join(missing)} must be given"
        )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return {
        name: tokenizer.convert_tokens_to_ids(getattr(tokenizer, _SPECIAL[name]))
        for name in missing
    }


def _of_file(
    file: Path, config: Path, kwargs: dict[str, Any]
) -> tuple[int, UniLMForConditionalGeneration]:
    """Return how many positions the config of a published file asks for, and the model with those that it has."""
    read, rest = _config(config, kwargs)
    found: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    # Older files name a norm's parameters as TensorFlow did.
    state = {
        name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
            "LayerNorm.beta", "LayerNorm.bias"
        ): value
        for name, value in found.items()
    }
    if _POSITIONS not in state:
        raise ValueError(f"{file} holds no weights of a UniLM: there is no {_POSITIONS}")
    wanted, read.max_position_embeddings = read.max_position_embeddings, state[_POSITIONS].shape[0]
    loaded: Any = UniLMForConditionalGeneration.from_pretrained(
        None, config=read, state_dict=state, output_loading_info=True, **rest
    )
    model, info = loaded
    missing = sorted(name for name in info["missing_keys"] if name.startswith("bert."))
    if missing:
        raise ValueError(f"{file} lacks {len(missing)} weights of a UniLM, {missing[0]} among them")
    return wanted, model


def _config(file: Path, kwargs: dict[str, Any]) -> tuple[UniLMConfig, dict[str, Any]]:
    """Return the config of a JSON file with the values that are given for it, and what else is given."""
    values: dict[str, Any] = json.loads(file.read_text("utf-8"))
    values.pop("model_type", None)
    known = UniLMConfig.__dataclass_fields__
    given = {name: value for name, value in kwargs.items() if name in known and name != "dtype"}
    return UniLMConfig(**values | given), {
        name: value for name, value in kwargs.items() if name not in given
    }


def _set_positions(model: UniLMForConditionalGeneration, count: int) -> None:
    """Give a model a table of `count` positions."""
    embeddings: Any = model.bert.embeddings
    rows = (
        torch.arange(count, dtype=torch.int64, device="cpu") % model.config.max_position_embeddings
    )
    table = embeddings.position_embeddings.weight.detach()[rows.to(model.device)]
    embeddings.position_embeddings = nn.Embedding.from_pretrained(table, freeze=False)
    embeddings.position_ids = torch.arange(count, device=model.device, dtype=torch.int64)[None]
    embeddings.token_type_ids = torch.zeros(1, count, dtype=torch.long, device=model.device)
    model.config.max_position_embeddings = count
