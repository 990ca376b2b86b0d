"""The process that runs OpenVINO for peer_openvino.py, in an environment without fastgen.

It reads one line of JSON with the job, exports the model, and answers with the versions of its
packages. To every further line it answers with the seconds and the outputs of one run.
"""

import gc
import json
import os
import sys
import time
from importlib.metadata import version
from typing import Any

PACKAGES = ("openvino", "optimum-intel", "transformers", "torch")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    job = json.loads(sys.stdin.readline())
    import torch

    torch.set_num_threads(job["threads"])
    torch.set_grad_enabled(False)
    model = exported(job["model"], job["is_encoder_decoder"], job["threads"])
    batches = [{name: torch.tensor(ids) for name, ids in batch.items()} for batch in job["batches"]]
    gc.collect()
    gc.freeze()  # as in the other process
    print(json.dumps({name: version(name) for name in PACKAGES}), file=answers, flush=True)
    for _ in sys.stdin:
        begin = time.perf_counter()
        outputs = [model.generate(**batch, **job["options"]) for batch in batches]
        seconds = time.perf_counter() - begin
        answer = {"seconds": seconds, "outputs": [ids.tolist() for ids in outputs]}
        print(json.dumps(answer), file=answers, flush=True)


def exported(folder: str, is_encoder_decoder: bool, threads: int) -> Any:
    """Return the model of a folder in OpenVINO.

    Products and KV cache are in fp32; OpenVINO's defaults are shorter on many processors.
    """
    from optimum.intel import OVModelForCausalLM, OVModelForSeq2SeqLM

    kind = OVModelForSeq2SeqLM if is_encoder_decoder else OVModelForCausalLM
    return kind.from_pretrained(
        folder,
        export=True,
        load_in_8bit=False,
        ov_config={
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "INFERENCE_NUM_THREADS": threads,
        },
    )


if __name__ == "__main__":
    main()
