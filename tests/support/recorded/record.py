"""Write what the last transformers that had a method gave for a list of calls.

Run it where that release is installed, 4.56.2 for beams and 4.55.4 for contrastive search:
``python record.py CALLS.json > OUTPUTS.json``. A call is {"model": ..., "seed": ..., "options": {...}}.
"""

import json
import sys
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
import models


def noting(scorer, seen):
    """Have a scorer's `finalize` note its scores: asking `generate` for them fails in fp64, or with too few beams."""
    finalize = scorer.finalize

    def noted(self, *args, **kwargs):
        found = finalize(self, *args, **kwargs)
        seen[:] = found["sequence_scores"].double().tolist()
        return found

    scorer.finalize = noted


seen = []
noting(transformers.BeamSearchScorer, seen)
noting(transformers.ConstrainedBeamSearchScorer, seen)
found = []
for call in json.loads(Path(sys.argv[1]).read_text()):
    model = models.build(call["model"])
    seen.clear()
    try:
        sequences = model.generate(**models.inputs(model, call["seed"]), **call["options"])
    except ValueError as error:
        found.append({**call, "error": str(error).splitlines()[0]})
        continue
    found.append(
        {**call, "sequences": sequences.tolist(), "scores": [round(score, 7) for score in seen]}
    )
json.dump(
    {"transformers": transformers.__version__, "torch": torch.__version__, "calls": found},
    sys.stdout,
)
