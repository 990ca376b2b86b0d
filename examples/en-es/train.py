"""Train the small English->Spanish model of this folder from two parallel text files.

    python examples/en-es/train.py --train DIR/train --valid DIR/valid
        --out examples/en-es/model --minutes 90

`DIR/train.en` and `DIR/train.es` hold one sentence per line. One byte-level BPE vocabulary is
learnt from both sides. A Marian model is trained with label smoothing under bfloat16 autocast, on
batches with about equal numbers of tokens. The average of the last weights is saved in half
precision. The learning rate falls to zero at the end of the given time, so any budget ends in a
finished model.
"""

import argparse
import copy
import json
import math
import random
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional as F
from tqdm import tqdm
from transformers import MarianConfig, MarianMTModel, PreTrainedTokenizerFast

PAD, EOS, UNK = 0, 1, 2


def read_pairs(prefix: str, source: str, target: str) -> tuple[list[str], list[str]]:
    """Read two parallel files.

    Raises:
        ValueError: their line counts differ.
    """
    sides = [Path(f"{prefix}.{lang}").read_text("utf-8").splitlines() for lang in (source, target)]
    if len(sides[0]) != len(sides[1]):
        raise ValueError(
            f"{prefix}: {len(sides[0])} {source} lines but {len(sides[1])} {target} lines"
        )
    return sides[0], sides[1]


def learn_vocabulary(lines: list[str], size: int) -> PreTrainedTokenizerFast:
    """Learn one byte-level BPE vocabulary for both languages; encoding appends `</s>`."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<pad>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", EOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=512,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def build_model(vocab_size: int) -> MarianMTModel:
    config = MarianConfig(
        vocab_size=vocab_size,
        d_model=256,
        encoder_layers=3,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        activation_function="gelu",
        dropout=0.1,
        max_position_embeddings=512,
        scale_embedding=True,
        pad_token_id=PAD,
        bos_token_id=PAD,
        eos_token_id=EOS,
        decoder_start_token_id=PAD,
        forced_eos_token_id=None,
    )
    # On a CPU, eager attention trains faster than the backward pass of flash attention.
    model = MarianMTModel._from_config(config, attn_implementation="eager")
    model.generation_config.bad_words_ids = [[PAD]]
    return model


def token_batches(
    pairs: list[tuple[list[int], list[int]]], tokens: int, rng: random.Random
) -> list[list[int]]:
    """Group pairs of similar length into batches, in random order.

    Args:
        pairs: token ids of source and target.
        tokens: the most padded tokens per side of a batch.
        rng: random number generator.
    Returns:
        Indices of the pairs in each batch.
    """
    order = sorted(
        range(len(pairs)), key=lambda i: (max(map(len, pairs[i])) + rng.random() * 4, rng.random())
    )
    batches, batch, longest = [], [], 0
    for i in order:
        length = max(map(len, pairs[i]))
        if batch and max(longest, length) * (len(batch) + 1) > tokens:
            batches.append(batch)
            batch, longest = [], 0
        batch.append(i)
        longest = max(longest, length)
    batches.append(batch)
    rng.shuffle(batches)
    return batches


def collate(pairs: list[tuple[list[int], list[int]]]) -> dict[str, torch.Tensor]:
    pad = lambda rows, fill: torch.nn.utils.rnn.pad_sequence(  # noqa: E731
        [torch.tensor(row) for row in rows], batch_first=True, padding_value=fill
    )
    sources, targets = pad([p[0] for p in pairs], PAD), pad([p[1] for p in pairs], PAD)
    start = torch.full((len(pairs), 1), PAD)
    return {
        "input_ids": sources,
        "attention_mask": (sources != PAD).long(),
        "decoder_input_ids": torch.cat([start, targets[:, :-1]], 1),
        "labels": targets,
    }


def loss_of(model: MarianMTModel, batch: dict[str, torch.Tensor], smoothing: float) -> torch.Tensor:
    device = model.device
    labels = batch["labels"].to(device)
    inputs = {k: v.to(device) for k, v in batch.items() if k != "labels"}
    hidden = model.model(**inputs, use_cache=False).last_hidden_state
    scored = labels != PAD  # project to the vocabulary only where a token is scored
    logits = model.lm_head(hidden[scored]).float()
    return F.cross_entropy(logits, labels[scored], label_smoothing=smoothing)


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    train_text = read_pairs(args.train, args.source, args.target)
    valid_text = read_pairs(args.valid, args.source, args.target)
    tokenizer = learn_vocabulary(train_text[0] + train_text[1], args.vocab)
    encode = lambda text: list(  # noqa: E731
        zip(*(tokenizer(side)["input_ids"] for side in text), strict=True)
    )
    pairs = [p for p in encode(train_text) if max(map(len, p)) <= args.max_length]
    valid = [p for p in encode(valid_text) if max(map(len, p)) <= args.max_length][:400]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_model(len(tokenizer)).to(device)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.998)
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01
    )
    autocast = torch.autocast(device, torch.bfloat16)
    tokens = sum(len(target) for _, target in pairs)
    print(
        f"{len(pairs)} pairs, {tokens} target tokens, {model.num_parameters()} parameters, "
        f"{device}",
        flush=True,
    )

    begin, updates, epoch, running = time.monotonic(), 0, 0, []
    progress = lambda: (time.monotonic() - begin) / (60 * args.minutes)  # noqa: E731
    while progress() < 1:
        epoch += 1
        for batch in tqdm(
            token_batches(pairs, args.tokens, rng), desc=f"epoch {epoch}", mininterval=30
        ):
            done = progress()
            if done >= 1:
                break
            model.train()
            rate = (
                args.lr
                * min(1, (updates + 1) / args.warmup)
                * 0.5
                * (1 + math.cos(math.pi * min(1, done)))
            )
            for group in optimizer.param_groups:
                group["lr"] = rate
            with autocast:
                loss = loss_of(model, collate([pairs[i] for i in batch]), 0.1)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
            if done > 0.5:
                average.update_parameters(model)
            running.append(loss.item())
        model.eval()
        with torch.no_grad(), autocast:
            losses = [
                loss_of(model, collate([valid[i] for i in b]), 0.0).item()
                for b in token_batches(valid, args.tokens, rng)
            ]
        print(
            json.dumps(
                {
                    "epoch": epoch,
                    "updates": updates,
                    "minutes": round((time.monotonic() - begin) / 60, 1),
                    "train": round(sum(running) / max(1, len(running)), 3),
                    "valid": round(sum(losses) / len(losses), 3),
                }
            ),
            flush=True,
        )
        running = []
        # Save after every epoch, so that an interrupted run leaves a model.
        final = copy.deepcopy(average.module if progress() > 0.6 else model)
        final.set_attn_implementation("sdpa")
        final.half().save_pretrained(args.out)
        tokenizer.save_pretrained(args.out)
    print(f"saved {args.out}: {updates} updates, {epoch} epochs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--train", required=True, help="prefix of the training files: PREFIX.en and PREFIX.es"
    )
    parser.add_argument("--valid", required=True, help="prefix of the validation files")
    parser.add_argument(
        "--out", required=True, help="folder to write the model and the tokenizer to"
    )
    parser.add_argument(
        "--source", default="en", help="source language, the ending of its files (default: en)"
    )
    parser.add_argument(
        "--target", default="es", help="target language, the ending of its files (default: es)"
    )
    parser.add_argument("--minutes", type=float, default=90, help="time for training (default: 90)")
    parser.add_argument(
        "--vocab", type=int, default=5000, help="size of the shared BPE vocabulary (default: 5000)"
    )
    parser.add_argument(
        "--tokens", type=int, default=4096, help="padded tokens a side in a batch (default: 4096)"
    )
    parser.add_argument(
        "--max-length",
        type=int,
        default=160,
        help="longest sentence kept, in tokens (default: 160)",
    )
    parser.add_argument(
        "--lr", type=float, default=2e-3, help="peak learning rate (default: 0.002)"
    )
    parser.add_argument(
        "--warmup", type=int, default=800, help="updates of linear warm-up (default: 800)"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of weights, dropout and batch order (default: 1)"
    )
    train(parser.parse_args())


if __name__ == "__main__":
    main()
