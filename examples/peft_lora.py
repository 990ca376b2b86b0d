"""Generate with a LoRA adapter of PEFT, first beside the weights and then merged into them.

The adapter here is random; yours comes from `PeftModel.from_pretrained(model, FOLDER)`. Decode
steps run directly on the weights in both cases. Beside the weights, an adapter adds two small
products to each layer that it adapts.

    python examples/peft_lora.py
"""

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import fastgen

FOLDER = Path(__file__).parent / "en-es"

tokenizer = AutoTokenizer.from_pretrained(FOLDER / "model")
model = AutoModelForSeq2SeqLM.from_pretrained(FOLDER / "model", dtype="float32")
lines = (FOLDER / "test.en").read_text("utf-8").splitlines()[:8]
batch = tokenizer(lines, return_tensors="pt", padding=True)


def translate(model: torch.nn.Module) -> list[str]:
    ids = model.generate(**batch, num_beams=4, max_new_tokens=64)
    return [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]


torch.manual_seed(0)
adapter = LoraConfig(
    r=4, lora_alpha=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False
)
adapted = get_peft_model(model, adapter).eval()
print(*translate(adapted), sep="\n")
print(*translate(adapted.merge_and_unload()), sep="\n")

print(fastgen.status())
