"""A small toolkit for the engine to patch, in separate processes.

Each `Sandbox` is a folder with a package ``toolkit`` and a copy of fastgen whose patches target
that toolkit instead of transformers. Tests therefore cover the whole path from ``import fastgen``
on, with a toolkit that does what real ones do.
"""

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

FASTGEN = Path(__file__).parents[2] / "fastgen"

TOOLKIT = {
    "toolkit/__init__.py": '__version__ = "1.5"',
    "toolkit/gen.py": """
        def greet(name, times=1):
            "Greet somebody."
            return f"hello {name}" * times

        class Model:
            def __init__(self, n=0):
                self.n = n

            def step(self, x, *, scale=1):
                "One step."
                return ("step", self.n, x * scale)

            @classmethod
            def build(cls, n):
                return (cls.__name__, n)

            @staticmethod
            def add(a, b):
                return a + b

        class Child(Model):
            def step(self, x, *, scale=1):
                return ("child", super().step(x, scale=scale))

        class Heir(Model):
            pass

        def double(x):
            return 2 * x
    """,
    "declaration.py": """
        from fastgen.patches.engine.engine import Patch, Toolkit

        TOOLKIT = Toolkit("toolkit", "toolkit", ">=1.2", "1.5", canary="canary:parts", install_hint="get toolkit")

        def patch(what, target, *parameters, **more):
            target, more = "toolkit.gen:" + target, {"parts": (what,)} | more
            return Patch("toolkit." + what, TOOLKIT, target, "ours:" + what, parameters, "a test", **more)

        PATCHES = (
            patch("greet", "greet", "name"),
            patch("step", "Model.step", "self", "x"),
            patch("build", "Model.build", "cls", "n"),
            patch("add", "Model.add", "a", "b"),
            patch("double", "double", "x"),
        )
    """,  # noqa: E501
    "ours.py": """
        from fastgen.patches.engine.engine import hit

        def _replacement(name):
            def replacement(original, /, *args, **kwargs):
                hit("toolkit." + name)
                return ["ours", original(*args, **kwargs)]
            return replacement

        greet, step, build, add, double = map(_replacement, ("greet", "step", "build", "add", "double"))
    """,  # noqa: E501
    "canary.py": """
        def parts():
            raise AssertionError("the canary is not to be asked")
    """,
    "checks.py": """
        from collections import Counter

        NAMES = ("greet", "step", "build", "add", "double")

        def results():
            from toolkit import gen

            model = gen.Model(7)
            return {
                "greet": gen.greet("you"),
                "step": model.step(2, scale=3),
                "build": gen.Model.build(4),
                "add": model.add(1, 2),
                "double": gen.double(5),
            }

        PLAIN = {"greet": "hello you", "step": ("step", 7, 6), "build": ("Model", 4), "add": 3, "double": 10}
        PATCHED = {name: ["ours", value] for name, value in PLAIN.items()}

        def states():
            import fastgen

            return Counter(row.state for row in fastgen.status().rows)

        def patched():
            assert results() == PATCHED, results()
            assert states() == {"applied": 5}, str(__import__("fastgen").status())

        def plain():
            assert results() == PLAIN, results()
    """,  # noqa: E501
}


class Sandbox:
    """A folder with the toolkit, and processes that run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in TOOLKIT.items():
            self.write(name, text)

    def write(self, name: str, text: str) -> None:
        """Write a file of the toolkit or of its patch declarations."""
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text).lstrip(), encoding="utf-8")

    def version(self, version: str) -> None:
        """Change the toolkit's version."""
        self.write("toolkit/__init__.py", f"__version__ = {version!r}")

    def run(self, code: str, **environ: str) -> str:
        """Run ``code`` in a new process and return its output; fail the test if it raises."""
        done = self.process(code, **environ)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def process(self, code: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run ``code`` in a new process, after ``from checks import *``."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FASTGEN")}
        path = os.pathsep.join([str(self.folder), str(_copy_of_fastgen())])
        # Files are rewritten within a second, so cached byte code of the toolkit could be stale.
        ours = {
            "PYTHONPATH": path,
            "PYTHONDONTWRITEBYTECODE": "1",
            "FASTGEN_CACHE_DIR": str(self.folder / "cache"),
        }
        return subprocess.run(
            [sys.executable, "-c", "from checks import *\n" + textwrap.dedent(code)],
            env={**kept, **ours, **environ},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
        )


@functools.cache
def _copy_of_fastgen() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fastgen-copy-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(
        FASTGEN,
        folder / "fastgen",
        ignore=shutil.ignore_patterns("transformers", "fairseq", "__pycache__"),
    )
    for name, text in {
        "transformers": "from declaration import PATCHES, TOOLKIT\n",
        "fairseq": "PATCHES = ()\n",
    }.items():
        declarations = folder / "fastgen" / "patches" / name
        declarations.mkdir()
        (declarations / "__init__.py").write_text(text, encoding="utf-8")
    return folder
