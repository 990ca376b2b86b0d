"""Record the outputs of decoding methods in the last transformers release that had them.

Run it with that release installed, 4.56.2 for beam methods and 4.55.4 for contrastive search:
``python record.py CALLS.json > OUTPUTS.json``. A call is ``{"model": ..., "seed": ..., "options":
{...}}``.
"""

import json
import sys
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
import models


def noting(scorer, seen):
    """Make a scorer's `finalize` record its scores.

    Requesting them from `generate` fails in fp64, and with too few beams.
    """
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
