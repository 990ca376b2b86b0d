"""Chat with a decoder-only model and print each answer while it is generated.

The tokens arrive through a `TextIteratorStreamer`, while `generate` runs in a thread.

    # A tiny random model, whose answers are noise.
    python examples/chat.py
    # MODEL is a folder or a name on the Hub.
    python examples/chat.py --model MODEL "What is beam search?"
"""

import argparse
from threading import Thread

from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

import fastgen

parser = argparse.ArgumentParser()
parser.add_argument(
    "--model", help="what from_pretrained takes (default: a tiny model with random weights)"
)
parser.add_argument(
    "messages", nargs="*", default=["What is a beam search?", "And what is a greedy one?"]
)
args = parser.parse_args()

if args.model is None:
    from tiny_model import tiny_model

    tokenizer, model = tiny_model()
else:
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32")

chat = []
for message in args.messages:
    print(f"user: {message}")
    chat.append({"role": "user", "content": message})
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    options = {"max_new_tokens": 64, "do_sample": False, "streamer": streamer}
    thread = Thread(target=model.generate, kwargs={**inputs, **options})
    thread.start()
    print("assistant: ", end="")
    answer = ""
    for piece in streamer:
        print(piece, end="", flush=True)
        answer += piece
    print()
    thread.join()
    chat.append({"role": "assistant", "content": answer})

print(fastgen.status())
