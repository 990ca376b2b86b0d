"""Train a small text VAE and generate from points between the latents of two sentences.

An encoder maps a sentence to a latent variable. A GPT-2 decodes it from a few embeddings that are
computed from the latent and passed as a prompt (`inputs_embeds`); all beams of a sentence share
their KV cache. Half a minute of training is short, so the texts between two sentences show the
information in the latents, not the limits of the method. The environment variable `STEPS` sets the
number of training steps.

    python examples/text_vae.py

Source: Bowman et al. 2016, Generating Sentences from a Continuous Space (KL annealing, word
dropout, homotopies).
"""

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

import fastgen

FOLDER = Path(__file__).parent / "en-es"
STEPS = int(os.environ.get("STEPS", "500"))
WIDTH, LATENT, PREFIX, POINTS, ROUNDS = 64, 32, 4, 8, 3

tokenizer = AutoTokenizer.from_pretrained(FOLDER / "model")
EOS, PAD = tokenizer.eos_token_id, tokenizer.pad_token_id
lines = [line for line in (FOLDER / "test.en").read_text("utf-8").splitlines() if len(line) <= 45]


class TextVAE(nn.Module):
    """A variational autoencoder that encodes a bag of words and decodes a text."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.decoder = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=vocabulary, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=64,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None,
                eos_token_id=EOS, pad_token_id=PAD,
            )
        )  # fmt: skip
        self.words = nn.EmbeddingBag(vocabulary, 2 * LATENT, padding_idx=PAD)
        self.prefix = nn.Linear(LATENT, PREFIX * WIDTH)

    def encode(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and the log-variance of the latents.

        Args:
            ids: (B, L) int64 token ids.
        Returns:
            Two tensors (B, LATENT).
        """
        mean, log_variance = self.words(ids).chunk(2, -1)
        return mean, log_variance - 4.0

    def prompt(self, latent: Tensor) -> Tensor:
        """Return the prompt embeddings (B, PREFIX, WIDTH) of latents (B, LATENT)."""
        return self.prefix(latent).view(-1, PREFIX, WIDTH)

    def loss(self, ids: Tensor, kl_weight: float) -> Tensor:
        mean, log_variance = self.encode(ids)
        latent = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        dropped = ids.masked_fill(torch.rand(ids.shape) < 0.3, tokenizer.unk_token_id)
        inputs = torch.cat([self.prompt(latent), self.decoder.get_input_embeddings()(dropped)], 1)
        logits = self.decoder(inputs_embeds=inputs).logits[:, PREFIX - 1 : -1]
        text = F.cross_entropy(
            logits.flatten(0, 1), ids.flatten(), ignore_index=PAD, reduction="sum"
        )
        kl = (mean**2 + log_variance.exp() - 1.0 - log_variance).sum() / 2
        return (text + kl_weight * kl) / len(ids)


def train(sentences: list[str]) -> TextVAE:
    torch.manual_seed(0)
    vae = TextVAE(len(tokenizer))
    optimizer = torch.optim.AdamW(vae.parameters(), lr=4e-3)
    for step in range(STEPS):
        chosen = torch.randint(len(sentences), (16,)).tolist()
        ids = tokenizer(
            [sentences[i] for i in chosen], return_tensors="pt", padding=True
        ).input_ids[:, :24]
        optimizer.zero_grad()
        vae.loss(ids, kl_weight=0.05 * min(1.0, step / STEPS * 2)).backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 5.0)
        optimizer.step()
    return vae.eval()


vae = train(lines)
with torch.no_grad():
    ends = vae.encode(tokenizer(lines[:4], return_tensors="pt", padding=True).input_ids)[0]
    way = torch.linspace(0.0, 1.0, POINTS)[:, None]
    points = torch.cat([ends[0] + way * (ends[1] - ends[0]), ends[2] + way * (ends[3] - ends[2])])
    prompt = vae.prompt(points)


def generate() -> Tensor:
    return vae.decoder.generate(
        inputs_embeds=prompt, num_beams=4, max_new_tokens=24, no_repeat_ngram_size=3
    )


for text in tokenizer.batch_decode(generate(), skip_special_tokens=True):
    print(text.strip())

took = {"with": 0.0, "without": 0.0}
same = True
for _ in range(ROUNDS):
    start = time.perf_counter()
    ours = generate()
    middle = time.perf_counter()
    with fastgen.disabled():
        stock = generate()
    took["with"] += middle - start
    took["without"] += time.perf_counter() - middle
    same = same and torch.equal(ours, stock)
print(
    f"the same tokens: {same}; transformers takes "
    f"{took['without'] / took['with']:.2f} times as long as fastgen"
)

print(fastgen.status())
