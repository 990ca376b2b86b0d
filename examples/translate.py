"""Translate a file with plain transformers in batches with beam search.

`import fastgen` is the only additional line.

    python examples/translate.py
"""

from pathlib import Path

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import fastgen  # noqa: F401

FOLDER = Path(__file__).parent / "en-es"

tokenizer = AutoTokenizer.from_pretrained(FOLDER / "model")
model = AutoModelForSeq2SeqLM.from_pretrained(FOLDER / "model", dtype="float32")
lines = (FOLDER / "test.en").read_text("utf-8").splitlines()[:16]

for start in range(0, len(lines), 8):
    batch = tokenizer(lines[start : start + 8], return_tensors="pt", padding=True)
    ids = model.generate(**batch, num_beams=4, max_new_tokens=128)
    for text in tokenizer.batch_decode(ids, skip_special_tokens=True):
        print(text.strip())
