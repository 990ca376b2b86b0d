"""Compiles the operations in C when fastgen is installed or a wheel of it is built; without a compiler it goes on."""

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeOperations(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        # By its path: importing the package would ask for torch, which is not here yet.
        spec = importlib.util.spec_from_file_location("build", Path(self.root, "fastgen/ops/native/build.py"))
        assert spec is not None
        assert spec.loader is not None
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        reason = native.build()
        if reason is not None:
            self.app.display_warning(f"fastgen is installed without its operations in C: {reason}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")
