"""The model families whose decode step is proven to run over the shared cache: one record each."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """A family of models, by the `model_type` of its config.

    Attributes:
        name: the config's `model_type`.
        encoder_decoder: whether it decodes from an encoder's output.
    """

    name: str
    encoder_decoder: bool


FAMILIES = {
    family.name: family
    for family in (
        *(
            Family(name, encoder_decoder=True)
            for name in (
                "bart", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "mt5", "pegasus", "plbart",
                "t5", "umt5",
            )
        ),
        *(
            Family(name, encoder_decoder=False)
            for name in (
                "gemma", "gemma2", "gemma3_text", "gpt2", "llama", "mistral", "opt", "phi3", "qwen2", "qwen3",
            )
        ),
    )
}  # fmt: skip


def family_of(model_type: str) -> Family | None:
    """The record of a family, or None where its step is not proven."""
    return FAMILIES.get(model_type)
