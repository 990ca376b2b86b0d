"""Exceptions, the warning class, and messages about missing packages."""

from typing import Self


class CommandError(Exception):
    """An error that the user has to fix; commands print its message without a traceback."""


class SetupError(Exception):
    """fastgen cannot start in this environment; the message says what to change."""


class VariableError(SetupError, ValueError):
    """A ``FASTGEN_*`` environment variable has an invalid value.

    Attributes:
        name: The variable.
        value: Its value.
        problem: What is wrong with the value.
        remedy: What to do.
    """

    def __init__(self, name: str, value: str, problem: str, remedy: str) -> None:
        self.name, self.value, self.problem, self.remedy = name, value, problem, remedy
        super().__init__(f"{self.found}; {remedy}")

    def __reduce__(self) -> tuple[type[Self], tuple[str, str, str, str]]:
        return type(self), (self.name, self.value, self.problem, self.remedy)

    @property
    def found(self) -> str:
        """The message without the remedy, on one line."""
        value = self.value if self.value.isprintable() else repr(self.value)
        return f"{self.name}={value}: {self.problem}"


class MissingPackageError(SetupError, ModuleNotFoundError):
    """A required package is not installed."""


class FastgenWarning(UserWarning):
    """fastgen does nothing here, as a whole or for a decoding method; issued once per reason."""


REQUIREMENTS = {
    "accelerate": "accelerate>=1.1",
    "datasets": "datasets>=4",
    "matplotlib": "matplotlib",
    "numpy": "numpy",
    "prometheus_client": "ray[data,serve]>=2.60",
    "pyarrow": "pyarrow>=18",
    "pydantic": "ray[data,serve]>=2.60",
    "ray": "ray[data,serve]>=2.60",
    "rouge_score": "rouge-score>=0.1.2",
    "sacrebleu": "sacrebleu>=2",
    "starlette": "ray[data,serve]>=2.60",
    "torch": "torch>=2.11",
    "tqdm": "tqdm",
    "transformers": "transformers>=5.17",
    "triton": "triton>=3.7",
    "wrapt": "wrapt>=1.16",
    "zstandard": "zstandard>=0.23",
}
"""Requirement that installs a module, by import name. The versions are those of pyproject.toml.

Messages name these requirements instead of an extra of this package. The package is not on the
package index yet: `fastgen` there is another project.
"""


def needs(*modules: str) -> str:
    """Return a message that names missing modules, with the pip command that installs them.

    The command covers the modules in `REQUIREMENTS`.

    Args:
        *modules: Import names, such as ``rouge_score`` or ``matplotlib.pyplot``.
    """
    roots = [name.partition(".")[0] for name in modules]
    known = dict.fromkeys(REQUIREMENTS[root] for root in roots if root in REQUIREMENTS)
    message = f"needs {', '.join(modules)}"
    if not known:
        return message
    quoted = (
        f'"{requirement}"' if set("<>[") & set(requirement) else requirement
        for requirement in known
    )
    return f"{message}: pip install {' '.join(quoted)}"
