"""Advice to users, by the reason why fastgen did not accelerate a call."""

import re

_REMEDIES: tuple[tuple[str, str], ...] = (
    # (regular expression to search for in the reason, advice)
    (
        r"the weights are float64",
        'load the model with dtype="float32" if its precision is enough',
    ),
    (r"FASTGEN_OPS=native", "FASTGEN_OPS=native turns them on; compare with `fastgen bench`"),
    (r"FASTGEN_(OPS|STEP|GRAPHS|LINEAR|MEMORY)=", "unset the variable"),
    (r"memory is short", "leave the process more memory, or set FASTGEN_MEMORY (docs/switches.md)"),
    (r"FASTGEN_MEMORY allows", "raise FASTGEN_MEMORY (docs/switches.md)"),
    (
        r"there are none for|no compiler",
        "install a C compiler and fastgen again; `fastgen doctor` says more",
    ),
    (
        r"prompt lookup",
        "fastgen runs greedy prompt lookup on a CPU in float32, bfloat16 or float16 (docs/bild.md)",
    ),
    (
        r"assisted (decoding|generation)",
        "add lossless=True: fastgen drafts with the same assistant_model (docs/bild.md)",
    ),
    (r"assistant_early_exit", "add lossless=True to the call (docs/bild.md)"),
    (r"custom_generate", "leave custom_generate out for fastgen's own loop"),
    (r"in training mode", "call model.eval() first"),
    (
        r"attention implementation|an attention function",
        'load the model with attn_implementation="sdpa"',
    ),
    (
        r"output_attentions=True|hidden states or attentions",
        "leave output_attentions and output_hidden_states out",
    ),
    (r"a KV cache is given", "leave the cache out if nothing needs it afterwards"),
    (r"the cache is a |the cache has a |the cache is offloaded", "leave cache_implementation out"),
    (r"use_cache=False", "leave use_cache=False out"),
    (
        r"the model is compiled|is compiled$|compiles the forward",
        "generate with the model as it is, not compiled",
    ),
    (r"several devices", "place the model on one device where it fits"),
    (r"\bhook on\b", "remove the hook while generating"),
    (r"gradients are enabled", "call it under torch.no_grad()"),
    (r"is supported", "install a supported version; `fastgen doctor` says which"),
    (
        r"is not supported|there is no spec of",
        "see docs/supported.md for the families; open an issue for yours",
    ),
)


def remedy_for(reason: str) -> str:
    """Return advice on how to avoid a fallback reason; empty if none is known."""
    return next((advice for pattern, advice in _REMEDIES if re.search(pattern, reason)), "")
