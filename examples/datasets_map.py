"""Add a column of translations to a dataset with `datasets.map`, in batches.

python examples/datasets_map.py
"""

from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import fastgen  # noqa: F401

FOLDER = Path(__file__).parent / "en-es"

tokenizer = AutoTokenizer.from_pretrained(FOLDER / "model")
model = AutoModelForSeq2SeqLM.from_pretrained(FOLDER / "model", dtype="float32")
dataset = Dataset.from_dict({"en": (FOLDER / "test.en").read_text("utf-8").splitlines()[:16]})


def translate(rows: dict[str, list[str]]) -> dict[str, list[str]]:
    batch = tokenizer(rows["en"], return_tensors="pt", padding=True)
    ids = model.generate(**batch, num_beams=4, max_new_tokens=128)
    return {"es": [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]}


for row in dataset.map(translate, batched=True, batch_size=8):
    print(row["es"])
