"""The model families whose decode step is verified to run over the shared KV cache."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """A model family, identified by the `model_type` of its config.

    Attributes:
        name: The config's `model_type`.
        encoder_decoder: Whether it decodes from an encoder's output.
        activated: Pairs of names within one module: a linear layer, and the activation function
            that is the only reader of its output.
        output_bias: Name of the model's head, and of the bias added to its output and used nowhere
            else.
        own_attention: Whether its modules compute attention themselves, without transformers'
            attention functions. Beams then share keys and values only in fused decode steps.
        segments: Whether its own `generate` calls transformers' `generate` once per input segment.
    """

    name: str
    encoder_decoder: bool
    activated: tuple[tuple[str, str], ...] = ()
    output_bias: tuple[str, str] | None = None
    own_attention: bool = False
    segments: bool = False


_BART, _T5, _LLAMA = (
    (("fc1", "activation_fn"),),
    (("wi", "act"), ("wi_0", "act")),
    (("gate_proj", "act_fn"),),
)


FAMILIES = {
    family.name: family
    for family in (
        *(
            Family(
                name, encoder_decoder=True, activated=_BART,
                output_bias=("lm_head", "final_logits_bias"),
            )
            for name in (
                "bart", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart"
            )
        ),
        Family("m2m_100", encoder_decoder=True, activated=_BART),
        *(Family(name, encoder_decoder=True, activated=_T5) for name in ("mt5", "t5", "umt5")),
        *(
            Family(name, encoder_decoder=False, activated=_LLAMA)
            for name in ("gemma", "gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3")
        ),
        Family("gpt2", encoder_decoder=False, activated=(("c_fc", "act"),)),
        Family("gpt_neox", encoder_decoder=False, activated=(("dense_h_to_4h", "act"),)),
        Family("opt", encoder_decoder=False, activated=_BART),
        Family("phi", encoder_decoder=False, activated=_BART),
        Family("phi3", encoder_decoder=False),
        *(
            Family(name, encoder_decoder=False, activated=_LLAMA)
            for name in ("cohere", "granite", "olmo2", "stablelm")
        ),
        Family("starcoder2", encoder_decoder=False, activated=(("c_fc", "act"),)),
        Family(
            "bloom", encoder_decoder=False, activated=(("dense_h_to_4h", "gelu_impl"),),
            own_attention=True,
        ),
        Family(
            "falcon", encoder_decoder=False, activated=(("dense_h_to_4h", "act"),),
            own_attention=True,
        ),
        *(
            Family(name, encoder_decoder=False, activated=(("fc_in", "act"),), own_attention=True)
            for name in ("codegen", "gptj")
        ),
        Family("gpt_neo", encoder_decoder=False, activated=(("c_fc", "act"),), own_attention=True),
        Family("mpt", encoder_decoder=False, activated=(("up_proj", "act"),), own_attention=True),
        Family("xglm", encoder_decoder=False, activated=_BART, own_attention=True),
        *(
            Family(
                name, encoder_decoder=True, activated=_BART,
                output_bias=("lm_head", "final_logits_bias"),
                own_attention=True,
            )
            for name in ("led", "mvp")
        ),
        Family("fsmt", encoder_decoder=True, activated=_BART, own_attention=True),
        Family(
            "unilm", encoder_decoder=True,
            activated=(("dense", "intermediate_act_fn"), ("dense", "transform_act_fn")),
        ),
        Family(
            "prophetnet", encoder_decoder=True, activated=(("intermediate", "activation_fn"),),
            own_attention=True
        ),
        Family("whisper", encoder_decoder=True, activated=_BART, segments=True),
    )
}  # fmt: skip


def family_of(model_type: str) -> Family | None:
    """Return the family of a `model_type`; None where its decode step is not verified."""
    return FAMILIES.get(model_type)
