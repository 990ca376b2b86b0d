"""Fine-tune a UniLM on pairs of texts, and generate with it.

    python examples/unilm/train.py --train DIR/train --valid DIR/valid --minutes 10
        --out FOLDER [--bert FOLDER]

`DIR/train.source` and `DIR/train.target` hold one text per line. With `--bert` training starts from
your BERT. Otherwise a WordPiece vocabulary is learnt from both files, and a model of 3 layers
starts from random weights. The learning rate falls to zero at the end of the given time. ROUGE is
reported for the model's texts (4 beams) and, for comparison, for the most frequent words of the
targets.
"""

import argparse
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rouge_score.rouge_scorer import RougeScorer
from tokenizers import BertWordPieceTokenizer
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, PreTrainedTokenizerFast

import fastgen
from fastgen.unilm import UniLMConfig, UniLMForConditionalGeneration, load

LONGEST = {"source": 128, "target": 40}
BATCH = 8
ROUGE = ("rouge1", "rouge2", "rougeL")


def read_pairs(prefix: str) -> list[tuple[str, str]]:
    """Read two parallel files.

    Raises:
        ValueError: their line counts differ.
    """
    source, target = (
        Path(f"{prefix}.{side}").read_text("utf-8").splitlines() for side in ("source", "target")
    )
    return list(zip(source, target, strict=True))


def learn_vocabulary(pairs: list[tuple[str, str]], size: int) -> PreTrainedTokenizerFast:
    """Learn a WordPiece vocabulary, with BERT's special tokens and normalisation."""
    learnt = BertWordPieceTokenizer()
    learnt.train_from_iterator(
        [text for pair in pairs for text in pair], vocab_size=size, show_progress=False
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=learnt._tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]", mask_token="[MASK]", model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def small_model(tokenizer: Any) -> UniLMForConditionalGeneration:
    """Return a model with random weights for a vocabulary."""
    config = UniLMConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=512, num_hidden_layers=3,
        num_attention_heads=4, max_position_embeddings=256, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.sep_token_id, decoder_start_token_id=tokenizer.cls_token_id,
        mask_token_id=tokenizer.mask_token_id,
    )  # fmt: skip
    return UniLMForConditionalGeneration(config)


def encode(tokenizer: Any, pairs: list[tuple[str, str]]) -> list[dict[str, list[int]]]:
    """Return `[CLS] source [SEP]` as input_ids and `target [SEP]` as labels."""
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id

    def ids(text: str, side: str) -> list[int]:
        return [*tokenizer(text, add_special_tokens=False).input_ids[: LONGEST[side]], sep]

    return [
        {"input_ids": [cls, *ids(source, "source")], "labels": ids(target, "target")}
        for source, target in pairs
    ]


def loss_of(model: Any, collate: Any, examples: list[Any]) -> float:
    """Return the mean loss per target token."""
    model.eval()
    total, tokens = 0.0, 0
    with torch.no_grad():
        for first in range(0, len(examples), BATCH):
            batch = collate(examples[first : first + BATCH])
            count = int(batch["labels"].ne(-100).sum())
            total, tokens = total + float(model(**batch).loss) * count, tokens + count
    return total / tokens


def train(model: Any, collate: Any, examples: list[Any], minutes: float, rate: float) -> int:
    """Train for a given time; return the number of optimizer steps.

    Args:
        model: a UniLM.
        collate: makes a batch of examples.
        examples: training examples.
        minutes: duration.
        rate: highest learning rate.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    start, steps, order = time.monotonic(), 0, list[Any]()
    model.train()
    while (elapsed := (time.monotonic() - start) / (60 * minutes)) < 1:
        if not order:
            order = random.sample(examples, len(examples))
        batch, order = order[:BATCH], order[BATCH:]
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (steps + 1) / 50) * (1 - elapsed)
        loss = model(**collate(batch)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps % 50 == 0:
            print(
                f"{60 * minutes * elapsed:6.0f} s  step {steps}  loss {loss.item():.3f}", flush=True
            )
    return steps


def write(model: Any, tokenizer: Any, collate: Any, examples: list[Any]) -> list[str]:
    """Return the model's texts for the sources of the examples."""
    texts: list[str] = []
    for first in range(0, len(examples), BATCH):
        batch = collate(
            [{"input_ids": example["input_ids"]} for example in examples[first : first + BATCH]]
        )
        ids = model.generate(
            **batch, num_beams=4, max_new_tokens=LONGEST["target"], no_repeat_ngram_size=3
        )
        texts += tokenizer.batch_decode(ids, skip_special_tokens=True)
    return texts


def rouge(texts: list[str], references: list[str]) -> str:
    scorer = RougeScorer(ROUGE)
    results = [
        scorer.score(reference, text) for text, reference in zip(texts, references, strict=True)
    ]
    return ", ".join(
        f"{name} {100 * sum(f[name].fmeasure for f in results) / len(results):.2f}"
        for name in ROUGE
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", required=True, metavar="PREFIX")
    parser.add_argument("--valid", required=True, metavar="PREFIX")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument(
        "--bert", type=Path, metavar="FOLDER", help="a BERT or UniLM with its tokenizer"
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--vocabulary", type=int, default=3000)
    parser.add_argument(
        "--rate", type=float, default=1e-3, help="highest learning rate; 3e-5 for a trained BERT"
    )
    parser.add_argument(
        "--texts", type=int, default=96, help="of the valid texts, how many are written"
    )
    args = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)
    pairs, valid = read_pairs(args.train), read_pairs(args.valid)
    if args.bert is None:
        tokenizer: Any = learn_vocabulary(pairs, args.vocabulary)
        model: Any = small_model(tokenizer)
    else:
        tokenizer, model = AutoTokenizer.from_pretrained(args.bert), load(args.bert)
    collate = DataCollatorForSeq2Seq(tokenizer, model=model)
    examples, held_out = encode(tokenizer, pairs), encode(tokenizer, valid)
    before = loss_of(model, collate, held_out)
    model.config.label_smoothing = 0.1
    steps = train(model, collate, examples, args.minutes, args.rate)
    model.config.label_smoothing = 0.0
    print(
        f"{steps} steps; loss of the valid targets {before:.3f} before, "
        f"{loss_of(model, collate, held_out):.3f} after"
    )
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)

    held_out, references = held_out[: args.texts], [target for _, target in valid[: args.texts]]
    start = time.perf_counter()
    texts = write(model, tokenizer, collate, held_out)
    seconds = time.perf_counter() - start
    with fastgen.disabled():
        start = time.perf_counter()
        stock = write(model, tokenizer, collate, held_out)
        stock_seconds = time.perf_counter() - start
    print(
        f"{len(texts)} texts in {seconds:.1f} s, without fastgen {stock_seconds:.1f} s; "
        f"same texts: {texts == stock}"
    )
    common = Counter(word for _, target in pairs for word in target.lower().split())
    constant = " ".join(word for word, _ in common.most_common(20))
    print(f"ROUGE of the model's texts: {rouge(texts, references)}")
    print(f"ROUGE of the most common words: {rouge([constant] * len(references), references)}")
    print(*texts[:3], sep="\n")


if __name__ == "__main__":
    main()
