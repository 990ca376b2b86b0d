"""What fastgen changes in the toolkits. The only folder that imports a toolkit, and only once the user has.

Each subfolder is one toolkit. Its ``__init__`` holds plain data, `TOOLKIT` and `PATCHES`, declared here.
"""

from fastgen.patches import fairseq, transformers
from fastgen.patches.engine.engine import (
    check,
    declare,
    disable,
    disabled,
    enable,
    release,
    start,
    status,
)

__all__ = ["check", "disable", "disabled", "enable", "release", "start", "status"]

declare(*transformers.PATCHES, *fairseq.PATCHES)
