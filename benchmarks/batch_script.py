"""Translate a file with plain transformers, 32 lines per batch in file order, without fastgen.

Many people have a script like this one; `benchmarks.corpus` uses it as the baseline.

    python benchmarks/batch_script.py MODEL INPUT OUTPUT
        [--num-beams 4] [--max-new-tokens 128] [--batch-size 32] [--threads N]
"""

import argparse

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("input")
parser.add_argument("output")
parser.add_argument("--num-beams", type=int, default=4)
parser.add_argument("--max-new-tokens", type=int, default=128)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--threads", type=int)
args = parser.parse_args()

if args.threads:
    torch.set_num_threads(args.threads)
tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForSeq2SeqLM.from_pretrained(args.model, dtype=torch.float32).eval()
with (
    open(args.input, encoding="utf-8") as source,
    open(args.output, "w", encoding="utf-8") as target,
):
    lines = [line.rstrip("\n") for line in source]
    for start in range(0, len(lines), args.batch_size):
        batch = tokenizer(
            lines[start : start + args.batch_size],
            padding=True,
            truncation=True,
            return_tensors="pt",
        )
        found = model.generate(
            **batch, num_beams=args.num_beams, max_new_tokens=args.max_new_tokens
        )
        for text in tokenizer.batch_decode(found, skip_special_tokens=True):
            print(text.strip().replace("\n", " "), file=target)
