"""Import hooks: run a callback once a module has been imported, in any import order."""

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

from fastgen.patches.engine.registry import registry

# Attribute of a module spec. importlib sets it to True and, when the import ends, to False.
_RUNNING = "_initializing"


def when_imported(name: str, callback: Callable[[], object]) -> None:
    """Call ``callback`` when the module is imported.

    If the module is already in `sys.modules`, even partially imported, call it now. While an
    earlier hook for the same module is pending, further calls are ignored: each module has at most
    one pending callback.
    """

    def hook(_: ModuleType) -> None:
        # Ignore the module argument: the module may have replaced itself in sys.modules.
        registry.hooked.discard(name)
        callback()

    import wrapt  # imported lazily, so that `startup.check` can report that it is missing

    if name in sys.modules or name not in registry.hooked:
        registry.hooked.add(name)
        wrapt.register_post_import_hook(hook, name)


def unfinished(module: ModuleType) -> bool:
    """Return whether the import of ``module`` is still in progress."""
    return bool(getattr(getattr(module, "__spec__", None), _RUNNING, False))


def when_finished(module: ModuleType, callback: Callable[[], object]) -> None:
    """Call ``callback`` when the import of an `unfinished` module ends, whether or not it succeeds.

    The import started before it could be hooked, so no loader of ours is notified of its end. But
    importlib sets an attribute of the module's spec at the end, and the spec can observe that.

    Raises:
        ValueError: The module's spec is an instance of a custom class.
    """
    spec = module.__spec__
    if type(spec) is not ModuleSpec and type(spec) is not _ListeningSpec:
        raise ValueError(
            f"{module.__name__} is half imported and its spec is a {type(spec).__name__}"
        )
    vars(spec).setdefault("_fastgen_callbacks", []).append(callback)
    spec.__class__ = _ListeningSpec
    if not unfinished(module):  # it ended in another thread before the class was changed
        setattr(spec, _RUNNING, False)


class _ListeningSpec(ModuleSpec):
    """A module spec that runs callbacks when the import of its module ends."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == _RUNNING and not value:
            callbacks: list[Callable[[], object]] = vars(self).pop("_fastgen_callbacks", [])
            object.__setattr__(self, "__class__", ModuleSpec)
            for callback in callbacks:
                callback()
