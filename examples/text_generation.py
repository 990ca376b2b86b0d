"""Continue texts with `pipeline("text-generation")`, in batches.

python examples/text_generation.py          # a tiny random model, whose texts are noise
python examples/text_generation.py MODEL    # a folder, or a name on the Hub
"""

import argparse
from pathlib import Path

from transformers import pipeline

import fastgen

parser = argparse.ArgumentParser()
parser.add_argument(
    "model",
    nargs="?",
    help="what from_pretrained takes (default: a tiny model with random weights)",
)
args = parser.parse_args()

if args.model is None:
    from tiny_model import tiny_model

    tokenizer, model = tiny_model()
    generator = pipeline("text-generation", model, tokenizer=tokenizer, device="cpu", batch_size=8)
else:
    generator = pipeline("text-generation", args.model, dtype="float32", batch_size=8)
    if generator.tokenizer.pad_token is None:  # as in GPT-2
        generator.tokenizer.pad_token = generator.tokenizer.eos_token
    generator.tokenizer.padding_side = "left"

lines = (Path(__file__).parent / "en-es" / "test.en").read_text("utf-8").splitlines()[:16]
prompts = [" ".join(line.split()[:4]) for line in lines]
for found in generator(prompts, max_new_tokens=24, do_sample=False):
    print(" ".join(found[0]["generated_text"].split()))

print(fastgen.status())
