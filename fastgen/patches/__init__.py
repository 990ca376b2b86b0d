"""Patches for the supported toolkits.

This is the only package that imports a toolkit, and it does so only after the user has.
Each subpackage other than `engine` covers one toolkit. Its ``__init__`` declares `TOOLKIT` and
`PATCHES` as plain data, which this module registers with the patch engine.
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
