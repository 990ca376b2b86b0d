"""What a patch is: data that says what is replaced by what, and under which conditions."""

from dataclasses import dataclass
from typing import Self

from fastgen.patches.engine.slot import Address


@dataclass(frozen=True)
class Toolkit:
    """A library that is patched.

    Attributes:
        name: as users say it, ``"transformers"``.
        module: its top module, whose ``__version__`` counts (forks have other distribution names).
        versions: the supported range, ``">=5.17"``.
        tested: the newest version that is tested.
        canary: ``"module:function"`` whose parts are tried once for versions newer than tested (`canary.Canary`); None
            to trust newer versions as long as the signatures hold.
        install_hint: what to type to get a supported version.
    Raises:
        ValueError: `canary` is not readable as a function.
    """

    name: str
    module: str
    versions: str
    tested: str
    canary: str | None = None
    install_hint: str = ""

    def __post_init__(self) -> None:
        if self.canary is not None:
            _check_function(self.canary)

    def supports(self, version: str) -> bool:
        """Whether ``version`` is in the supported range; development versions are taken by their number.

        Raises:
            ValueError: a version or the range is not readable as such.
        """
        from packaging.specifiers import (
            SpecifierSet,
        )  # a quarter of what `import fastgen` would take
        from packaging.version import Version

        return SpecifierSet(self.versions).contains(Version(version), prereleases=True)

    def has_tested(self, version: str) -> bool:
        """Whether ``version`` is not newer than the newest that is tested; raises as `supports` does."""
        from packaging.version import Version

        return Version(version) <= Version(self.tested)


@dataclass(frozen=True)
class Patch:
    """One thing that is patched.

    Attributes:
        name: ``"<toolkit's name>.<what>"``, as in ``FASTGEN_SKIP`` and `fastgen.status`.
        toolkit: the library it belongs to.
        target: ``"module:function"`` or ``"module:Class.method"``. A classmethod or staticmethod stays one.
        replacement: ``"module:function"``, called as ``function(original, *args, **kwargs)``, where a method's
            arguments begin with self and a classmethod's with the class, and so they are passed to ``original``.
        parameters: the names with which the target's parameters must begin, ``self`` or ``cls`` included.
        help: what it does, one line.
        inner: whether it only serves the plan of an outer patch; where no plan runs, the original is called at once.
        when: module after whose import it is applied, where that is not the target's: one of the toolkit's own that
            comes before the target is needed.
        covers: what users lose without it, such as ``"beam search"``: where it cannot be applied, the first call of its
            target warns. Empty where nobody would miss it by itself.
        parts: the parts of the canary that have to agree, all of them where none is named; where all of these differ,
            the original runs. A replacement that serves several asks for each by itself (`engine.declined`).
        mends: whether the toolkit would fail without it, on today's versions or where it is given more than it knows.
            It stays in place in `disabled()` and with ``FASTGEN=compat``, where the toolkit's own code runs otherwise.
    Raises:
        ValueError: a name, target or function is not of the form above.
    """

    name: str
    toolkit: Toolkit
    target: str
    replacement: str
    parameters: tuple[str, ...]
    help: str
    inner: bool = False
    when: str | None = None
    mends: bool = False
    covers: str = ""
    parts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.name.startswith(f"{self.toolkit.name}."):
            raise ValueError(f"patch name {self.name!r} does not begin with '{self.toolkit.name}.'")
        Address.parse(self.target)
        _check_function(self.replacement)

    @property
    def address(self) -> Address:
        """The target, read."""
        return Address.parse(self.target)

    @property
    def awaited(self) -> str:
        """The module whose import it waits for."""
        return self.when or self.address.module

    def within(self, prefix: str) -> bool:
        """Whether ``prefix`` is the patch's name or a dotted beginning of it, such as the toolkit's name."""
        return f"{self.name}.".startswith(f"{prefix}.")


class FallbackError(RuntimeError):
    """With ``FASTGEN_STRICT=1``: a call would have run the toolkit's own code."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} fell back: {reason}")
        self.name = name
        self.reason = reason

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:
        return type(self), (self.name, self.reason)


class PatchError(RuntimeError):
    """With ``FASTGEN_STRICT=1``: a patch could not be applied."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} failed: {reason}")
        self.name = name
        self.reason = reason

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:
        return type(self), (self.name, self.reason)


def _check_function(target: str) -> None:
    address = Address.parse(target)
    if "." in address.path:
        raise ValueError(f"{target!r} is not 'module:function'")
