"""Measure the BLEU of a model of this folder on parallel text.

python examples/en-es/evaluate.py --model examples/en-es/model --test examples/en-es/test
"""

import argparse
from pathlib import Path

import torch
from sacrebleu.metrics import BLEU
from tqdm import tqdm
from transformers import AutoTokenizer, MarianMTModel

import fastgen


def translate(
    model: MarianMTModel, tokenizer: AutoTokenizer, lines: list[str], batch: int, beams: int
) -> list[str]:
    """Translate lines in batches of similar length; return the translations in line order."""
    order = sorted(range(len(lines)), key=lambda i: len(lines[i]))
    translations = [""] * len(lines)
    for start in tqdm(range(0, len(order), batch)):
        chosen = order[start : start + batch]
        inputs = tokenizer(
            [lines[i] for i in chosen],
            return_tensors="pt",
            padding=True,
            return_token_type_ids=False,
        )
        ids = model.generate(**inputs, num_beams=beams, max_new_tokens=160)
        for i, text in zip(
            chosen, tokenizer.batch_decode(ids, skip_special_tokens=True), strict=True
        ):
            translations[i] = text.strip()
    return translations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", required=True, help="folder of the model and its tokenizer")
    parser.add_argument(
        "--test", required=True, help="prefix of the test files: PREFIX.en and PREFIX.es"
    )
    parser.add_argument(
        "--source", default="en", help="source language, the ending of its file (default: en)"
    )
    parser.add_argument(
        "--target", default="es", help="target language, the ending of its file (default: es)"
    )
    parser.add_argument("--batch", type=int, default=32, help="sentences in a batch (default: 32)")
    parser.add_argument("--beams", type=int, default=4, help="beams (default: 4)")
    parser.add_argument("--out", help="file to write the translations to")
    args = parser.parse_args()
    sources, references = (
        Path(f"{args.test}.{lang}").read_text("utf-8").splitlines()
        for lang in (args.source, args.target)
    )
    model = MarianMTModel.from_pretrained(args.model, dtype=torch.float32).eval()
    translations = translate(
        model, AutoTokenizer.from_pretrained(args.model), sources, args.batch, args.beams
    )
    if args.out:
        Path(args.out).write_text("".join(f"{line}\n" for line in translations), "utf-8")
    bleu = BLEU()
    print(bleu.corpus_score(translations, [references]))
    print(bleu.get_signature())
    print(fastgen.status())


if __name__ == "__main__":
    main()
