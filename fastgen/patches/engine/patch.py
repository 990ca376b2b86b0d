"""Declarative descriptions of toolkits and patches."""

from dataclasses import dataclass
from typing import Self

from fastgen.patches.engine.slot import Address


@dataclass(frozen=True)
class Toolkit:
    """A library that fastgen patches.

    Attributes:
        name: Name that users know, such as ``"transformers"``.
        module: Top-level module. Its ``__version__`` is the version that counts, because forks have
            other distribution names.
        versions: Supported version range, such as ``">=5.17"``.
        tested: Newest tested version.
        canary: ``"module:function"`` that returns the parts to test once for each version newer
            than `tested` (see `canary.Canary`). None trusts newer versions whose signatures match.
        install_hint: Command that installs a supported version.

    Raises:
        ValueError: `canary` is not of the form ``"module:function"``.
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
        """Return whether ``version`` is in the supported range. Pre-releases are accepted.

        Raises:
            ValueError: The version or the range cannot be parsed.
        """
        # Imported lazily: these imports would be a quarter of the time of `import fastgen`.
        from packaging.specifiers import SpecifierSet
        from packaging.version import Version

        return SpecifierSet(self.versions).contains(Version(version), prereleases=True)

    def has_tested(self, version: str) -> bool:
        """Return whether ``version`` is at most the newest tested version.

        Raises:
            ValueError: One of the versions cannot be parsed.
        """
        from packaging.version import Version

        return Version(version) <= Version(self.tested)


@dataclass(frozen=True)
class Patch:
    """A replacement for one function or method of a toolkit.

    Attributes:
        name: ``"<toolkit name>.<patch>"``, as used in ``FASTGEN_SKIP`` and `fastgen.status`.
        toolkit: The library it belongs to.
        target: ``"module:function"`` or ``"module:Class.method"``. A classmethod or staticmethod
            remains one.
        replacement: ``"module:function"``, called as ``function(original, *args, **kwargs)``. The
            arguments of a method begin with self, those of a classmethod with the class, and
            ``original`` takes them in the same form.
        parameters: Names that the target's parameters must begin with, including ``self`` or
            ``cls``.
        help: One-line description.
        inner: Whether it only serves the plan of an outer patch. If no plan is running, the
            original is called directly.
        when: Module whose import triggers the patch; None for the target's own module. It is a
            module of the toolkit that is imported before the target is needed.
        covers: What users lose without it, such as ``"beam search"``. If the patch cannot be
            applied, the first call of its target warns. Empty if users would not notice.
        parts: Parts of the canary that must agree; empty for all parts. If all of them differ, the
            original runs. A replacement that serves several parts checks each of them with
            `engine.declined`.
        is_bugfix: Whether it fixes a failure of the toolkit, either with current versions of its
            dependencies or for inputs that only fastgen supports. It stays active in `disabled()`
            and with ``FASTGEN=compat``, where the toolkit otherwise runs its own code.

    Raises:
        ValueError: A name, target or function does not have the form above.
    """

    name: str
    toolkit: Toolkit
    target: str
    replacement: str
    parameters: tuple[str, ...]
    help: str
    inner: bool = False
    when: str | None = None
    is_bugfix: bool = False
    covers: str = ""
    parts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.name.startswith(f"{self.toolkit.name}."):
            raise ValueError(f"patch name {self.name!r} does not begin with '{self.toolkit.name}.'")
        Address.parse(self.target)
        _check_function(self.replacement)

    @property
    def address(self) -> Address:
        """The parsed target."""
        return Address.parse(self.target)

    @property
    def awaited(self) -> str:
        """The module whose import triggers the patch."""
        return self.when or self.address.module

    def within(self, prefix: str) -> bool:
        """Return whether ``prefix`` is the name or a dotted prefix of it, such as the toolkit."""
        return f"{self.name}.".startswith(f"{prefix}.")


class FallbackError(RuntimeError):
    """Raised when a call would fall back to the toolkit's own code.

    Only with ``FASTGEN_STRICT=1`` or inside a canary.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} fell back: {reason}")
        self.name = name
        self.reason = reason

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:
        return type(self), (self.name, self.reason)


class PatchError(RuntimeError):
    """Raised with ``FASTGEN_STRICT=1`` when a patch could not be applied."""

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
