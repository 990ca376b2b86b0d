"""Translate with a pipeline, in batches.

transformers 5 removed `pipeline("translation")`. A custom task replaces it: a class with four
methods. The remaining generation pipelines are for decoder-only models;
`pipeline("text-generation")` works in the same way.

    python examples/pipeline.py
"""

from pathlib import Path

from transformers import AutoModelForSeq2SeqLM, Pipeline, pipeline
from transformers.pipelines import PIPELINE_REGISTRY

import fastgen  # noqa: F401

FOLDER = Path(__file__).parent / "en-es"


class Translation(Pipeline):
    def _sanitize_parameters(self, **options):
        return {}, options, {}

    def preprocess(self, text):
        return self.tokenizer(text, return_tensors="pt")

    def _forward(self, batch, **options):
        return {"ids": self.model.generate(**batch, **options)}

    def postprocess(self, found):
        return self.tokenizer.decode(found["ids"][0], skip_special_tokens=True).strip()


PIPELINE_REGISTRY.register_pipeline("text-to-text", Translation, pt_model=AutoModelForSeq2SeqLM)
translate = pipeline(
    "text-to-text", str(FOLDER / "model"), dtype="float32", device="cpu", batch_size=8
)
lines = (FOLDER / "test.en").read_text("utf-8").splitlines()[:16]
print(*translate(lines, num_beams=4, max_new_tokens=128), sep="\n")
