"""Compile the C operations when fastgen is installed or its wheel is built.

Without a compiler the build continues without them.
"""

import importlib.util
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARIES = "fastgen/ops/native/lib"


class NativeOperations(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        # Load the module by its path: importing the package needs torch, which is not there yet.
        spec = importlib.util.spec_from_file_location(
            "build", Path(self.root, "fastgen/ops/native/build.py")
        )
        assert spec is not None
        assert spec.loader is not None
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        if version == "editable":
            reason = native.build()
        else:
            # Compile outside the sources, so that a wheel holds exactly what was compiled for it
            # and a checkout keeps its own libraries.
            self.made = TemporaryDirectory()
            folder = Path(self.made.name, "lib")
            reason = native.build(folder)
            build_data["force_include"][str(folder)] = LIBRARIES
        if reason is not None:
            self.app.display_warning(f"fastgen is built without its operations in C: {reason}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(
            ".", "_"
        )

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self.made.cleanup()
