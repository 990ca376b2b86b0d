"""Evaluate with `Seq2SeqTrainer`.

With `predict_with_generate=True` it calls `model.generate` for every batch.

    python examples/seq2seq_trainer.py
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from sacrebleu.metrics import BLEU
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

import fastgen  # noqa: F401

FOLDER = Path(__file__).parent / "en-es"

tokenizer = AutoTokenizer.from_pretrained(FOLDER / "model")
model = AutoModelForSeq2SeqLM.from_pretrained(FOLDER / "model", dtype="float32")
sources, references = (
    (FOLDER / f"test.{side}").read_text("utf-8").splitlines()[:16] for side in ("en", "es")
)
samples = [tokenizer(s, text_target=r) for s, r in zip(sources, references, strict=True)]


def bleu(found: EvalPrediction) -> dict[str, float]:
    # Texts that end early are filled with -100.
    ids = np.where(found.predictions >= 0, found.predictions, tokenizer.pad_token_id)
    texts = [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]
    print(*texts, sep="\n")
    return {"bleu": BLEU().corpus_score(texts, [references]).score}


with TemporaryDirectory() as folder:
    trainer = Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(
            folder,
            per_device_eval_batch_size=8,
            predict_with_generate=True,
            generation_num_beams=4,
            generation_max_length=128,
            report_to=[],
        ),
        eval_dataset=samples,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        compute_metrics=bleu,
    )
    figures = trainer.evaluate()
print(f"BLEU {figures['eval_bleu']:.2f}, loss {figures['eval_loss']:.4f}")
