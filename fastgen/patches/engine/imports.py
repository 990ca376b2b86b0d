"""Run a callback once a module has been imported, in whatever order things are imported."""

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

_RUNNING = "_initializing"  # the attribute of a spec that importlib sets to True, and to False at the import's end

_hooked: set[str] = set()


def when_imported(name: str, callback: Callable[[], object]) -> None:
    """Call ``callback`` when the module is imported, or now if it is already there, be it half imported.

    While an earlier hook for the same module waits, a second call adds nothing: one callback per module is kept.
    """

    def hook(_: ModuleType) -> None:
        # The module that is passed is not used: it may have put another object into sys.modules in its place.
        _hooked.discard(name)
        callback()

    import wrapt  # here, so that `startup.check` can say that it is missing

    if name in sys.modules or name not in _hooked:
        _hooked.add(name)
        wrapt.register_post_import_hook(hook, name)


def unfinished(module: ModuleType) -> bool:
    """Whether the import of ``module`` is still under way."""
    return bool(getattr(getattr(module, "__spec__", None), _RUNNING, False))


def when_finished(module: ModuleType, callback: Callable[[], object]) -> None:
    """Call ``callback`` when the import of an `unfinished` module has ended, well or not.

    The import of such a module began before anyone could hook it, so there is no loader of ours that would hear of its
    end. But importlib marks the end on the module's spec, and a spec can listen.

    Raises:
        ValueError: the module's spec is of a kind of its own.
    """
    spec = module.__spec__
    if type(spec) is not ModuleSpec and type(spec) is not _ListeningSpec:
        raise ValueError(
            f"{module.__name__} is half imported and its spec is a {type(spec).__name__}"
        )
    vars(spec).setdefault("_fastgen_callbacks", []).append(callback)
    spec.__class__ = _ListeningSpec
    if not unfinished(module):  # it ended, in another thread, before the spec listened
        setattr(spec, _RUNNING, False)


class _ListeningSpec(ModuleSpec):
    """The spec of a module under import, which runs callbacks at the import's end."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == _RUNNING and not value:
            callbacks: list[Callable[[], object]] = vars(self).pop("_fastgen_callbacks", [])
            object.__setattr__(self, "__class__", ModuleSpec)
            for callback in callbacks:
                callback()
