"""`fairseq-generate` without a KV cache.

Every decode step runs over the whole sequence again.
"""

from fairseq.sequence_generator import EnsembleModel
from fairseq_cli.generate import cli_main


def _none(self: EnsembleModel) -> bool:
    return False


if __name__ == "__main__":
    EnsembleModel.has_incremental_states = _none
    cli_main()
