"""Tests of the patch engine.

Cover import orders, repeated and undone patches, patches by other libraries, threads, and
unsupported versions.
"""

import itertools
import json
import sys
from pathlib import Path

import pytest

from fastgen.patches.engine.remedies import remedy_for
from tests.support.fake_toolkit import Sandbox


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path)


# Importing


IMPORTS = (
    "import fastgen",
    "import toolkit",
    "from toolkit.gen import Model as Alias; live = Alias(7)",
    "import ours",
)


@pytest.mark.parametrize(
    "order",
    list(itertools.permutations(IMPORTS)),
    ids=lambda order: "-".join(line.split()[1] for line in order),
)
def test_any_order_of_imports(sandbox: Sandbox, order: tuple[str, ...]) -> None:
    sandbox.run(
        "\n".join(order)
        + """
patched()
assert live.step(2, scale=3) == ["ours", ("step", 7, 6)]
assert Alias.build(1) == ["ours", ("Model", 1)]
fastgen.disable()
plain()
assert live.step(2, scale=3) == ("step", 7, 6)
assert "ours" not in str(states()) and states() == {"off": 5}
"""
    )


def test_pending_until_imported_and_imports_nothing(sandbox: Sandbox) -> None:
    sandbox.run(
        """
        import sys
        import fastgen
        assert not {"toolkit", "ours", "canary", "torch"} & set(sys.modules)
        assert states() == {"pending": 5}
        assert fastgen.status()["toolkit.step"].reason == "toolkit.gen is not imported yet"
        assert fastgen.status().toolkits[0].found == "not imported"
        import toolkit
        assert states() == {"pending": 5}
        import toolkit.gen
        assert states() == {"applied": 5}
        assert "ours" not in sys.modules, "a replacement is imported by the first call, not by the toolkit's import"
        patched()
        assert fastgen.status().toolkits[0].found == "1.5"
        """  # noqa: E501
    )


def test_toolkit_not_installed(sandbox: Sandbox) -> None:
    for file in sandbox.folder.glob("toolkit/*.py"):
        file.unlink()
    sandbox.folder.joinpath("toolkit").rmdir()
    sandbox.run(
        """
        import fastgen
        assert fastgen.status()["toolkit.step"].reason == "toolkit is not installed; get toolkit"
        assert fastgen.status().toolkits[0].found == "not installed"
        """
    )


def test_alias_of_a_function_sees_the_patch_only_if_made_later(sandbox: Sandbox) -> None:
    sandbox.run(
        """
        from toolkit.gen import greet as early
        import fastgen
        from toolkit.gen import greet as late
        assert early("a") == "hello a" and late("a") == ["ours", "hello a"]
        """
    )


GEN = Path("toolkit/gen.py")


@pytest.mark.parametrize("where", ["before", "between", "after"])
@pytest.mark.parametrize("version_comes", ["first", "last"])
def test_half_imported(sandbox: Sandbox, where: str, version_comes: str) -> None:
    """The toolkit imports fastgen while the toolkit itself is half imported, before any hook."""
    text = (sandbox.folder / GEN).read_text()
    at = {"before": 0, "between": text.index("class Child"), "after": len(text)}[where]
    sandbox.write(str(GEN), text[:at] + "import plugin\n" + text[at:])
    sandbox.write("plugin.py", "import toolkit.gen, fastgen; first = fastgen.status().to_dict()")
    lines = ['__version__ = "1.5"', "from toolkit import gen"]
    sandbox.write(
        "toolkit/__init__.py", "\n".join(lines if version_comes == "first" else lines[::-1])
    )
    sandbox.run(
        """
        import toolkit, fastgen
        patched()
        fastgen.disable()
        plain()
        fastgen.enable()
        patched()
        assert type(toolkit.__spec__).__name__ == type(toolkit.gen.__spec__).__name__ == "ModuleSpec"
        """  # noqa: E501
    )


def test_an_import_that_failed_before_is_tried_again(sandbox: Sandbox) -> None:
    """A failed import leaves a submodule without its package.

    The engine must not take that submodule for an imported toolkit.
    """
    sandbox.write(
        "toolkit/__init__.py", '__version__ = "1.5"\nfrom toolkit import gen\nimport needed'
    )
    sandbox.run(
        """
        import sys, types
        try:
            import toolkit
        except ModuleNotFoundError:
            assert "toolkit.gen" in sys.modules and "toolkit" not in sys.modules
        import fastgen
        assert states() == {"pending": 5}
        sys.modules["needed"] = types.ModuleType("needed")
        patched()
        """
    )


def test_half_imported_waits_for_the_version_at_the_end_of_the_top_module(sandbox: Sandbox) -> None:
    sandbox.write(
        "toolkit/__init__.py",
        'from toolkit import gen\nfrom checks import plain; plain()\n__version__ = "1.5"',
    )
    sandbox.run("import fastgen, toolkit; patched()")


def test_half_imported_and_the_import_fails_and_is_repeated(sandbox: Sandbox) -> None:
    text = (sandbox.folder / GEN).read_text()
    sandbox.write(str(GEN), "import plugin\nplugin.fail()\n" + text)
    sandbox.write(
        "plugin.py",
        """
        import fastgen
        calls = []
        def fail():
            calls.append(1)
            if len(calls) == 1:
                raise ImportError("only the first time")
        """,
    )
    sandbox.run(
        """
        try:
            import toolkit.gen
        except ImportError as error:
            assert str(error) == "only the first time"
        assert states() == {"pending": 5}
        import toolkit.gen
        patched()
        """
    )


def test_import_that_fails_under_the_hook_and_is_repeated(sandbox: Sandbox) -> None:
    text = (sandbox.folder / GEN).read_text()
    sandbox.write(str(GEN), text + "\nimport appears_later\n")
    sandbox.run(
        """
        import fastgen, pathlib, importlib
        try:
            import toolkit.gen
        except ImportError:
            pathlib.Path("appears_later.py").write_text("")
        importlib.invalidate_caches()
        assert states() == {"pending": 5}
        import toolkit.gen
        patched()
        """
    )


def test_imported_by_one_thread_while_another_imports_fastgen(sandbox: Sandbox) -> None:
    text = (sandbox.folder / GEN).read_text()
    sandbox.write(
        "events.py", "import threading; inside, go_on = threading.Event(), threading.Event()"
    )
    sandbox.write(
        str(GEN), "import events; events.inside.set(); assert events.go_on.wait(60)\n" + text
    )
    sandbox.run(
        """
        import events, importlib, threading
        thread = threading.Thread(target=importlib.import_module, args=("toolkit.gen",))
        thread.start()
        assert events.inside.wait(60)
        import fastgen
        assert states() == {"pending": 5}
        events.go_on.set()
        thread.join()
        patched()
        """
    )


def test_module_that_replaces_itself(sandbox: Sandbox) -> None:
    """Like the lazy modules of transformers."""
    sandbox.write(
        "toolkit/__init__.py",
        """
        import sys, types
        class Lazy(types.ModuleType):
            def __getattr__(self, name):
                if name == "__version__":
                    return "1.5"
                raise AttributeError(name)
        lazy = Lazy(__name__)
        lazy.__path__, lazy.__spec__, lazy.__file__ = __path__, __spec__, __file__
        sys.modules[__name__] = lazy
        """,
    )
    sandbox.run("import fastgen; patched()")
    sandbox.run("import toolkit.gen, fastgen; patched()")


# Unchanged attributes


def test_signatures_names_docs_and_kinds_are_unchanged(sandbox: Sandbox) -> None:
    sandbox.run(
        """
        import inspect
        from toolkit import gen

        def facts():
            model = gen.Model(1)
            for thing in (gen.greet, gen.Model.step, model.step, model.build, model.add, gen.double):
                yield str(inspect.signature(thing)), inspect.isfunction(thing), inspect.ismethod(thing)
                yield thing.__name__, thing.__qualname__, thing.__module__, thing.__doc__
            for name in ("step", "build", "add"):
                yield type(inspect.getattr_static(gen.Model, name))

        before = list(facts())
        import fastgen
        patched()
        assert list(facts()) == before
        assert str(inspect.signature(gen.Model.step)) == "(self, x, *, scale=1)"
        """  # noqa: E501
    )


def test_pickle_copy_and_deepcopy_of_instances_and_functions(sandbox: Sandbox) -> None:
    sandbox.run(
        """
        import copy, pickle
        from toolkit import gen
        old = pickle.dumps(gen.Model(3))
        import fastgen
        patched()
        model = gen.Model(3)
        for clone in (pickle.loads(pickle.dumps(model)), copy.copy(model), copy.deepcopy(model), pickle.loads(old)):
            assert type(clone) is gen.Model and clone.n == 3 and clone.step(1) == ["ours", ("step", 3, 1)]
        assert pickle.loads(pickle.dumps(gen.greet)) is gen.greet is copy.deepcopy(gen.greet)
        assert pickle.loads(pickle.dumps(model.step))(1) == ["ours", ("step", 3, 1)]
        kept = pickle.dumps([model, gen.greet, gen.Model.build])
        fastgen.disable()
        clone, greet, build = pickle.loads(kept)
        assert clone.step(1) == ("step", 3, 1) and greet is gen.greet and build(2) == ("Model", 2)
        """  # noqa: E501
    )


def test_originals_are_really_restored(sandbox: Sandbox) -> None:
    sandbox.run(
        """
        from toolkit import gen
        before = dict(vars(gen)), dict(vars(gen.Model)), list(vars(gen.Model))
        import fastgen
        for _ in range(3):
            patched()
            fastgen.disable()
            after = dict(vars(gen)), dict(vars(gen.Model)), list(vars(gen.Model))
            assert all(a == b for a, b in zip(before, after))
            assert all(before[1][name] is after[1][name] for name in before[1] if name != "__dict__")
            fastgen.enable()
        """  # noqa: E501
    )


def test_subclasses_and_inherited_targets(sandbox: Sandbox) -> None:
    text = (sandbox.folder / "declaration.py").read_text()
    sandbox.write(
        "declaration.py",
        text.replace("Model.step", "Heir.step").replace("Model.build", "Heir.build"),
    )
    sandbox.run(
        """
        import fastgen
        from toolkit import gen
        assert gen.Heir(1).step(1) == ["ours", ("step", 1, 1)] and gen.Heir.build(2) == ["ours", ("Heir", 2)]
        assert gen.Model(1).step(1) == ("step", 1, 1) and gen.Child(1).step(1) == ("child", ("step", 1, 1))
        fastgen.disable()
        assert gen.Heir(1).step(1) == ("step", 1, 1) and not {"step", "build"} & set(vars(gen.Heir))
        """  # noqa: E501
    )
    sandbox.write("declaration.py", text)
    sandbox.run(
        """
        import fastgen
        from toolkit import gen
        assert gen.Child(1).step(1) == ("child", ["ours", ("step", 1, 1)])
        assert gen.Heir.build(2) == ["ours", ("Heir", 2)]
        """
    )


def test_keyword_arguments_of_any_name_get_through(sandbox: Sandbox) -> None:
    sandbox.write("toolkit/gen.py", "def take(first, **rest): return first, rest")
    sandbox.write(
        "declaration.py",
        """
        from fastgen.patches.engine.engine import Patch, Toolkit
        TOOLKIT = Toolkit("toolkit", "toolkit", ">=1", "1.5")
        PATCHES = (Patch("toolkit.add", TOOLKIT, "toolkit.gen:take", "ours:add", ("first",), "a test"),)
        """,  # noqa: E501
    )
    sandbox.run(
        """
        import fastgen
        from toolkit.gen import take
        rest = {name: 0 for name in ("entry", "original", "self", "args", "kwargs", "name", "replacement")}
        assert take(1, **rest) == ["ours", (1, rest)]
        """  # noqa: E501
    )


def test_a_patch_that_mends_stays_where_the_toolkits_own_code_runs(sandbox: Sandbox) -> None:
    sandbox.write(
        "declaration.py",
        """
        from fastgen.patches.engine.engine import Patch, Toolkit
        TOOLKIT = Toolkit("toolkit", "toolkit", ">=1", "1.5")
        PATCHES = (
            Patch("toolkit.add", TOOLKIT, "toolkit.gen:Model.add", "ours:add", ("a", "b"), "a test", is_bugfix=True),
            Patch("toolkit.greet", TOOLKIT, "toolkit.gen:greet", "ours:greet", ("name",), "a test"),
        )
        """,  # noqa: E501
    )
    sandbox.run(
        """
        import fastgen
        from toolkit import gen
        with fastgen.disabled():
            assert gen.Model.add(1, 2) == ["ours", 3]
            assert gen.greet("you") == "hello you"
        fastgen.disable()
        assert gen.Model.add(1, 2) == 3
        fastgen.enable()
        assert gen.Model.add(1, 2) == ["ours", 3]
        """
    )


def test_a_patch_can_wait_for_another_module_than_its_targets(sandbox: Sandbox) -> None:
    """A patch is applied when another module of the toolkit is imported.

    The target is called while the toolkit itself is still half imported.
    """
    sandbox.write("toolkit/early.py", "")
    sandbox.write("toolkit/late.py", "import elsewhere\nfound = elsewhere.take(1)")
    sandbox.write(
        "toolkit/__init__.py",
        "__version__ = '1.5'\nfrom toolkit import early\nfrom toolkit import late",
    )
    sandbox.write("elsewhere.py", "def take(first): return first")
    sandbox.write(
        "declaration.py",
        """
        from fastgen.patches.engine.engine import Patch, Toolkit
        TOOLKIT = Toolkit("toolkit", "toolkit", ">=1", "1.5")
        PATCHES = (
            Patch("toolkit.add", TOOLKIT, "elsewhere:take", "ours:add", ("first",), "a test", when="toolkit.early"),
        )
        """,  # noqa: E501
    )
    sandbox.run(
        """
        import elsewhere
        import fastgen
        assert elsewhere.take(1) == 1
        assert fastgen.status()["toolkit.add"].reason == "toolkit.early is not imported yet"
        from toolkit import late
        assert late.found == ["ours", 1]
        fastgen.disable()
        assert elsewhere.take(1) == 1
        """
    )


# Switching


def test_enable_and_disable_twice(sandbox: Sandbox) -> None:
    sandbox.run(
        """
        import fastgen
        fastgen.enable(); fastgen.enable()
        patched()
        assert fastgen.status()["toolkit.step"].hits == 1, "wrapped once, so counted once"
        fastgen.disable(); fastgen.disable()
        plain()
        assert fastgen.status()["toolkit.step"].hits == 1 and not fastgen.status().enabled
        assert fastgen.status()["toolkit.step"].reason == "disabled"
        fastgen.enable(); fastgen.enable()
        patched()
        assert fastgen.status()["toolkit.step"].hits == 2
        """
    )


def test_switched_before_the_toolkit_is_imported(sandbox: Sandbox) -> None:
    sandbox.run(
        """
        import fastgen
        for _ in range(3):
            fastgen.disable(); fastgen.enable()
        fastgen.disable()
        plain()
        assert states() == {"off": 5}
        fastgen.enable()
        patched()
        """
    )
    sandbox.run("import fastgen; fastgen.disable(); fastgen.enable(); patched()")


def test_disabled_is_for_this_context_only(sandbox: Sandbox) -> None:
    sandbox.run(
        """
        import contextvars, threading
        import fastgen
        patched()
        seen = []
        with fastgen.disabled():
            plain()
            with fastgen.disabled():
                plain()
            plain()
            thread = threading.Thread(target=lambda: seen.append(results()))
            thread.start(); thread.join()
            assert contextvars.Context().run(results) == PATCHED
            assert contextvars.copy_context().run(results) == PLAIN
        assert seen == [PATCHED]
        patched()
        try:
            with fastgen.disabled():
                raise KeyError("leaves by an exception")
        except KeyError:
            patched()
        assert states() == {"applied": 5}
        assert fastgen.status()["toolkit.step"].hits == 5 and not fastgen.status()["toolkit.step"].fallbacks
        """  # noqa: E501
    )


PLANNED = """
    import threading
    from fastgen.patches.engine import engine

    inside, go_on = threading.Event(), threading.Event()

    def greet(original, /, *args, **kwargs):
        if kwargs.pop("times", 1) == 2:
            inside.set(); assert go_on.wait(60)
        with engine.running("the plan") as plan:
            assert plan == engine.current_plan() == "the plan"
            engine.hit("toolkit.greet")
            if args == ("loop",):
                inside.set(); assert go_on.wait(60)
            if args == ("fail",):
                raise ArithmeticError("in the plan")
            if args == ("off",):
                engine.disable()
            return ["ours", original(*args, **kwargs)]

    def step(original, self, x, **kwargs):
        return ["ours", engine.current_plan(), original(self, x, **kwargs)]
"""


def test_what_is_left_off_is_counted_and_what_other_processes_count(sandbox: Sandbox) -> None:
    sandbox.run(
        """
        import fastgen
        from toolkit import gen
        from fastgen.ops.counts import calls
        from fastgen.patches.engine import engine
        for _ in range(2):
            engine.hit("toolkit.greet", {"a mapping's names": None})
        before = engine.counted()
        engine.hit("toolkit.greet", ["a list's"])
        engine.note_skipped("toolkit.step", "too small")
        engine.fallback("toolkit.step", "too large")
        calls["kbest", "reference"] += 3
        engine.merge_counts(engine.counted() - before)
        greet, step = fastgen.status()["toolkit.greet"], fastgen.status()["toolkit.step"]
        assert (greet.hits, greet.left_off) == (4, {"a mapping's names": 2, "a list's": 2}), greet
        assert (step.hits, step.left_off, step.fallbacks) == (0, {"too small": 2}, {"too large": 2}), step
        assert fastgen.status().operations == {"kbest": {"reference": 6}}
        """  # noqa: E501
    )


def test_disable_while_a_plan_runs_raises_and_changes_nothing(sandbox: Sandbox) -> None:
    sandbox.write("ours.py", PLANNED)
    sandbox.run(
        """
        import fastgen, ours, threading
        from toolkit import gen
        got = []
        thread = threading.Thread(target=lambda: got.append(gen.greet("loop")))
        thread.start()
        assert ours.inside.wait(60)
        assert ours.engine.current_plan() is None, "the plan belongs to the other thread"
        try:
            fastgen.disable()
        except RuntimeError as error:
            assert "1 patched generate call(s)" in str(error)
        else:
            raise AssertionError("disabled under a running plan")
        assert fastgen.status().enabled and states() == {"applied": 5}
        ours.go_on.set(); thread.join()
        assert got == [["ours", "hello loop"]]
        try:
            gen.greet("off")
        except RuntimeError:
            pass
        else:
            raise AssertionError("disabled by the plan itself")
        fastgen.disable()
        assert gen.greet("loop") == "hello loop"
        """
    )


def test_disable_between_the_call_and_its_plan_runs_the_original(sandbox: Sandbox) -> None:
    sandbox.write("ours.py", PLANNED)
    sandbox.run(
        """
        import fastgen, ours, threading
        from toolkit import gen
        got = []
        thread = threading.Thread(target=lambda: got.append(gen.greet("you", times=2)))
        thread.start()
        assert ours.inside.wait(60)
        fastgen.disable()
        ours.go_on.set(); thread.join()
        assert got == ["hello you" * 2], got
        assert fastgen.status()["toolkit.greet"].hits == 0
        """
    )


def test_an_exception_leaves_nothing_behind(sandbox: Sandbox) -> None:
    sandbox.write("ours.py", PLANNED)
    sandbox.run(
        """
        import fastgen, ours
        from toolkit import gen
        for args, kind in ((("fail",), ArithmeticError), ((), TypeError)):
            try:
                gen.greet(*args)
            except kind:
                pass
            else:
                raise AssertionError(args)
            assert ours.engine.current_plan() is None
            assert gen.greet("you") == ["ours", "hello you"] and states() == {"applied": 5}
            with fastgen.disabled():
                assert gen.greet("you") == "hello you"
        fastgen.disable()
        assert gen.greet("you") == "hello you"
        """
    )


def test_inner_patch_serves_only_a_plan(sandbox: Sandbox) -> None:
    text = (sandbox.folder / "declaration.py").read_text()
    sandbox.write(
        "declaration.py",
        text.replace('"Model.step", "self", "x"', '"Model.step", "self", "x", inner=True'),
    )
    sandbox.write("ours.py", PLANNED)
    sandbox.run(
        """
        import fastgen, ours
        from toolkit import gen
        assert gen.Model(1).step(2) == ("step", 1, 2)
        with ours.engine.running("p"):
            assert gen.Model(1).step(2) == ["ours", "p", ("step", 1, 2)]
            with ours.engine.running("q"):
                assert gen.Model(1).step(2) == ["ours", "q", ("step", 1, 2)]
            assert gen.Model(1).step(2) == ["ours", "p", ("step", 1, 2)]
        assert gen.Model(1).step(2) == ("step", 1, 2)
        """
    )


def test_switching_and_calling_from_many_threads(sandbox: Sandbox) -> None:
    sandbox.run(
        """
        import sys, threading
        sys.setswitchinterval(1e-5)
        import fastgen
        patched()
        wrong = []
        def caller():
            for _ in range(300):
                for name, value in results().items():
                    if value not in (PLAIN[name], PATCHED[name]):
                        wrong.append(value)
        def switcher():
            for _ in range(100):
                fastgen.disable(); fastgen.enable(); str(fastgen.status())
        threads = [threading.Thread(target=t) for t in (caller, caller, switcher, switcher)]
        [t.start() for t in threads]; [t.join() for t in threads]
        assert not wrong, wrong[:3]
        fastgen.enable()
        patched()
        fastgen.disable()
        plain()
        """
    )


def test_counts_are_exact_under_threads(sandbox: Sandbox) -> None:
    sandbox.run(
        """
        import sys, threading
        sys.setswitchinterval(1e-6)
        import fastgen
        from fastgen.patches.engine.engine import fallback
        from toolkit import gen
        def work():
            for _ in range(2000):
                gen.greet("you"); fallback("toolkit.greet", "why")
        threads = [threading.Thread(target=work) for _ in range(4)]
        [t.start() for t in threads]; [t.join() for t in threads]
        row = fastgen.status()["toolkit.greet"]
        assert (row.hits, row.fallbacks) == (8000, {"why": 8000}), row
        """
    )


def test_what_is_kept_is_released(sandbox: Sandbox) -> None:
    sandbox.run(
        """
        import fastgen
        from fastgen.models.state import CachedState, process_state
        calls = []
        class Cache(CachedState):
            def release(self):
                calls.append("release")
                return False
        process_state().of(Cache)
        fastgen.release()
        assert calls == ["release"]
        fastgen.disable(); fastgen.disable()
        assert calls == ["release"] * 2
        """
    )


# Patches by other libraries


OTHER = """
    import functools
    from toolkit import gen

    def over(original, named):
        def other(self, x, **kwargs):
            return ("other", original(self, x, **kwargs))
        return functools.wraps(original)(other) if named else other
"""


@pytest.mark.parametrize(
    ("named", "after"),
    [(True, ("other", ["ours", ("step", 1, 2)])), (False, ["ours", ("other", ("step", 1, 2))])],
    ids=["naming what they wrap", "not naming it"],
)
def test_patched_over_after_us(sandbox: Sandbox, named: bool, after: object) -> None:
    sandbox.write("other.py", OTHER)
    sandbox.run(
        f"""
        import fastgen, toolkit.gen, other
        from toolkit.gen import Model
        Model.step = theirs = other.over(Model.step, {named})
        Model.build = classmethod(other.over(vars(Model)["build"].__func__, True))
        model = Model(1)
        assert model.step(2) == ("other", ["ours", ("step", 1, 2)])
        assert fastgen.status()["toolkit.step"].state == "applied"
        assert fastgen.status()["toolkit.step"].reason == "others have patched over it since"
        for _ in range(2):
            fastgen.disable()
            assert Model.step is theirs, "what is not ours is left alone"
            assert model.step(2) == ("other", ("step", 1, 2)), "and our layer below it is transparent"
            assert Model.build(2) == ("other", ("Model", 2))
            assert fastgen.status()["toolkit.add"].reason == "disabled"
            assert "stays below another's" in fastgen.status()["toolkit.build"].reason
            fastgen.enable()
            assert states() == {{"applied": 5}}
            assert Model.build(2) == ("other", ["ours", ("Model", 2)])
            assert model.step(2) == {after!r}, "once, wherever our layer lies"
        """  # noqa: E501
    )


def test_patched_over_after_us_with_another_signature(sandbox: Sandbox) -> None:
    sandbox.run(
        """
        import fastgen, toolkit.gen
        from toolkit.gen import Model
        ours = Model.step
        Model.step = lambda *args: ("other", ours(*args))
        fastgen.disable()
        fastgen.enable()
        assert Model(1).step(2) == ("other", ("step", 1, 2))
        assert fastgen.status()["toolkit.step"].state == "failed"
        assert "(self, x, ...) expected, (args) found" in fastgen.status()["toolkit.step"].reason
        """
    )


@pytest.mark.parametrize("they_undo_while", ["enabled", "disabled"])
def test_patched_over_after_us_and_undone_by_them(sandbox: Sandbox, they_undo_while: str) -> None:
    sandbox.write("other.py", OTHER)
    sandbox.run(
        f"""
        import fastgen, toolkit.gen, other
        from toolkit.gen import Model
        fastgen.disable()
        original = Model.step
        fastgen.enable()
        ours = Model.step
        Model.step = other.over(ours, True)
        if {they_undo_while!r} == "enabled":
            Model.step = ours
            fastgen.disable()
            assert Model.step is original
        else:
            fastgen.disable()
            Model.step = ours
            assert Model(1).step(2) == ("step", 1, 2)
            fastgen.disable()
            assert Model.step is original, "a second disable() takes out what the first one had to leave"
        assert fastgen.status()["toolkit.step"].reason == "disabled"
        fastgen.enable()
        patched()
        fastgen.disable()
        assert Model.step is original
        """  # noqa: E501
    )


def test_replaced_or_deleted_after_us(sandbox: Sandbox) -> None:
    sandbox.run(
        """
        import fastgen, toolkit.gen
        from toolkit.gen import Model
        Model.step = new = lambda self, x: "new"
        del toolkit.gen.double
        fastgen.disable()
        assert Model.step is new and not hasattr(toolkit.gen, 'double')
        fastgen.enable()
        assert Model(1).step(2) == ["ours", "new"]
        assert fastgen.status()["toolkit.double"].state == "failed"
        fastgen.disable()
        assert Model.step is new
        """
    )


@pytest.mark.parametrize("fastgen_is_imported", ["first", "last"])
def test_patched_by_others_before_us(sandbox: Sandbox, fastgen_is_imported: str) -> None:
    sandbox.write(
        "other.py",
        OTHER + "\n    gen.Model.step = over(gen.Model.step, True)\n    step = gen.Model.step\n",
    )
    sandbox.run(
        f"""
        if {fastgen_is_imported!r} == "first":
            import fastgen; fastgen.disable()
        import other, fastgen
        from toolkit.gen import Model
        fastgen.enable()
        assert Model(1).step(2) == ["ours", ("other", ("step", 1, 2))] and states() == {{"applied": 5}}
        fastgen.disable()
        assert Model.step is other.step and Model(1).step(2) == ("other", ("step", 1, 2))
        """  # noqa: E501
    )


def test_hidden_signature_is_declined(sandbox: Sandbox) -> None:
    """The guard declines to patch a wrapper that hides the signature of what it wraps."""
    sandbox.write("other.py", OTHER + "\n    gen.Model.step = lambda *args, **kwargs: None\n")
    sandbox.run(
        """
        import other, fastgen
        row = fastgen.status()["toolkit.step"]
        assert row.state == "failed" and "(self, x, ...) expected, (args, kwargs) found" in row.reason, row
        assert states() == {"applied": 4, "failed": 1}
        """  # noqa: E501
    )


# Guards


@pytest.mark.parametrize(
    ("version", "state", "reason"),
    [
        ("1.1", "skipped", "toolkit 1.1 found; >=1.2 is supported; get toolkit"),
        ("1.2", "applied", ""),
        ("1.5.dev3", "applied", ""),
        ("1.5", "applied", ""),
        ("not a version", "failed", "InvalidVersion: Invalid version: 'not a version'"),
    ],
)
def test_versions(sandbox: Sandbox, version: str, state: str, reason: str) -> None:
    sandbox.version(version)
    sandbox.run(
        f"""
        import fastgen, toolkit.gen
        assert states() == {{{state!r}: 5}}
        assert {{row.reason for row in fastgen.status().rows}} == {{{reason!r}}}, str(fastgen.status())
        patched() if {state!r} == "applied" else plain()
        assert fastgen.status().toolkits[0].found == {version!r}
        """  # noqa: E501
    )


def test_no_version(sandbox: Sandbox) -> None:
    sandbox.write("toolkit/__init__.py", "")
    sandbox.run(
        """
        import fastgen, toolkit.gen
        assert states() == {"failed": 5} and "toolkit has no __version__" in fastgen.status().rows[0].reason
        plain()
        """  # noqa: E501
    )


@pytest.mark.parametrize(
    ("old", "new", "name", "reason"),
    [
        (
            "def step(self, x,",
            "def step(self, y, x,",
            "step",
            "(self, x, ...) expected, (self, y, x, scale) found",
        ),
        ("def add(a, b)", "def add(b, a)", "add", "(a, b, ...) expected, (b, a) found"),
        ("def greet(name", "def welcome(name", "greet", "toolkit.gen has no 'greet'"),
        ("class Model:", "class Modell:", "step", "toolkit.gen has no 'Model'"),
        (
            "return 2 * x",
            "pass\ndouble = '_double'",
            "double",
            "a function was expected there, not '_double'",
        ),
        ("@staticmethod", "@property", "add", "a function was expected there, not <property"),
    ],
)
def test_changed_target_fails_alone(
    sandbox: Sandbox, old: str, new: str, name: str, reason: str
) -> None:
    text = (sandbox.folder / GEN).read_text()
    if old == "class Model:":
        text = text.replace("(Model)", "(Modell)")
    sandbox.write(str(GEN), text.replace(old, new))
    sandbox.run(
        f"""
        import fastgen, toolkit.gen
        row = fastgen.status()["toolkit.{name}"]
        assert row.state == "failed" and {reason!r} in row.reason, row
        assert states()["failed"] == (3 if "Model" in row.reason else 1)
        """
    )


def test_class_as_target_is_declined(sandbox: Sandbox) -> None:
    text = (sandbox.folder / "declaration.py").read_text()
    sandbox.write("declaration.py", text.replace('"Model.step", "self", "x"', '"Model"'))
    sandbox.run(
        """
        import fastgen, toolkit.gen
        assert "a function was expected there, not <class" in fastgen.status()["toolkit.step"].reason
        """  # noqa: E501
    )


def test_replacement_that_cannot_be_imported(sandbox: Sandbox) -> None:
    sandbox.write("ours.py", "raise OSError('no such thing')")
    sandbox.run(
        """
        import fastgen
        plain()
        plain()
        assert states() == {"failed": 5}
        row = fastgen.status()["toolkit.step"]
        assert row.reason == "OSError: no such thing"
        assert row.fallbacks == {"the replacement could not be imported": 1}
        fastgen.disable()
        plain()
        """
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            "Patch('other.x', T, 'a:b', 'c:d', (), '')",
            "patch name 'other.x' does not begin with 'toolkit.'",
        ),
        ("Patch('toolkit.x', T, 'a.b', 'c:d', (), '')", "target 'a.b' is not"),
        ("Patch('toolkit.x', T, 'a:b', 'c:d.e', (), '')", "'c:d.e' is not 'module:function'"),
        ("Toolkit('t', 't', '1.2', '1.5').supports('1.4')", "1.2"),
        ("Toolkit('t', 't', '>=1.2', '1.5').supports('old')", "old"),
        ("Toolkit('t', 't', '>=1.2', 'new').has_tested('1.4')", "new"),
        (
            "declare(Patch('toolkit.x', T, 'toolkit.gen:greet', 'c:d', (), ''))",
            "collides with toolkit.greet",
        ),
        (
            "declare(Patch('toolkit.greet', T, 'toolkit.gen:x', 'c:d', (), ''))",
            "collides with toolkit.greet",
        ),
        ("hit('toolkit.unknown')", "no patch is named 'toolkit.unknown'; there are toolkit.greet"),
        ("fallback('unknown', 'why')", "no patch is named 'unknown'"),
    ],
)
def test_bad_declarations(sandbox: Sandbox, call: str, message: str) -> None:
    sandbox.run(
        f"""
        from fastgen.patches.engine.engine import *
        from declaration import TOOLKIT as T
        try:
            {call}
        except ValueError as error:
            assert {message!r} in str(error), error
        else:
            raise AssertionError("accepted")
        """
    )


def test_declared_twice_is_declared_once(sandbox: Sandbox) -> None:
    sandbox.run(
        "from fastgen.patches.engine import engine; import declaration; "
        "engine.declare(*declaration.PATCHES); patched()"
    )


# The canary


@pytest.fixture
def newer(sandbox: Sandbox) -> Sandbox:
    """Return a toolkit newer than tested, with a canary that logs a line per run."""
    sandbox.version("1.6")
    canary(sandbox, "None")
    return sandbox


def canary(sandbox: Sandbox, finds: str, names: str = "NAMES") -> None:
    """Write a canary.

    Args:
        finds: Source of the expression that the parts in `names` return.
        names: Source of the names of these parts; all other parts return None.
    """
    sandbox.write(
        "canary.py",
        f"""
        import fastgen
        from checks import NAMES
        from toolkit import gen

        def part():
            assert gen.greet("you") == ["ours", "hello you"], "its own calls run the replacement and do not ask"
            with fastgen.disabled():
                assert gen.greet("you") == "hello you"
            return {finds}

        def parts():
            open("asked.txt", "a").write("x")
            return {{name: part if name in {names} else lambda: None for name in NAMES}}
        """,  # noqa: E501
    )


def asked(sandbox: Sandbox) -> int:
    file = sandbox.folder / "asked.txt"
    return len(file.read_text()) if file.exists() else 0


def test_canary_says_equal_and_is_asked_once_per_version(newer: Sandbox) -> None:
    code = """
        import fastgen, toolkit.gen
        assert states() == {"applied": 5}
        assert {r.reason for r in fastgen.status().rows} == {"newer than 1.5, the newest tested"}
        assert fastgen.status().toolkits[0].canary == "asked at the first patched call"
        for _ in range(2):
            patched()
        assert fastgen.status()["toolkit.greet"].hits == 2, "the canary's own calls are not counted"
        fastgen.disable(); fastgen.enable()
        patched()
        print(fastgen.status().toolkits[0].canary)
        """
    first, second = newer.run(code), newer.run(code)
    assert asked(newer) == 1
    (file,) = (newer.folder / "cache").iterdir()
    assert first == second == f"all 5 parts agree (kept in {file})\n"
    kept = json.loads(file.read_text())
    assert (kept["parts"], kept["differing"]) == (["greet", "step", "build", "add", "double"], {})
    assert kept["key"]["toolkit"] == "1.6"
    assert kept["key"]["torch"] == "none"
    assert set(kept["key"]) == {"toolkit", "fastgen", "torch", "python"}
    newer.version("1.7")
    newer.run(code)
    assert asked(newer) == 2, "another version is another question"


DECLINED = """
    import fastgen
    plain()
    plain()
    assert states() == {"skipped": 5}, str(fastgen.status())
    row = fastgen.status()["toolkit.step"]
    (reason,) = row.fallbacks
    assert row.hits == 0 and row.fallbacks[reason] == 2 and reason.startswith("declined by the canary: ")
    print(row.reason)
    fastgen.disable()
    plain()
"""  # noqa: E501


def test_canary_says_different(newer: Sandbox) -> None:
    canary(newer, "'token 3'")
    for _ in range(2):
        assert newer.run(DECLINED) == "the canary found: token 3\n"
    assert asked(newer) == 1


def test_canary_judges_part_by_part(newer: Sandbox) -> None:
    """Parts that agree stay accelerated; parts that differ are skipped. Status reports both."""
    canary(newer, "'token 3'", "('step', 'add')")
    code = """
        import fastgen
        found = results()
        assert {name for name in NAMES if found[name] == PATCHED[name]} == {"greet", "build", "double"}
        assert {name for name in NAMES if found[name] == PLAIN[name]} == {"step", "add"}
        status = fastgen.status()
        assert status["toolkit.step"].state == "skipped" and status["toolkit.greet"].state == "applied"
        print(status.toolkits[0].canary)
        print(status)
    """  # noqa: E501
    for _ in range(2):
        first, *lines = newer.run(code).splitlines()
        assert first.startswith("2 of 5 parts differ: token 3; 3 agree (kept in ")
        assert "  not running, toolkit.step, toolkit.add: the canary found: token 3" in lines
    assert asked(newer) == 1


def test_a_patch_of_no_part_runs_while_any_part_agrees(newer: Sandbox) -> None:
    text = (newer.folder / "declaration.py").read_text()
    newer.write("declaration.py", text.replace('"greet", "name")', '"greet", "name", parts=())'))
    canary(newer, "'token 3'", "('step', 'add')")
    newer.run("import fastgen; assert results()['greet'] == PATCHED['greet']")
    newer.version("1.7")
    canary(newer, "'token 3'")
    newer.run("import fastgen; plain(); assert states() == {'skipped': 5}")


def test_a_patch_of_several_parts(newer: Sandbox) -> None:
    """It runs while one of its parts agrees, and checks each part separately."""
    text = (newer.folder / "declaration.py").read_text()
    newer.write(
        "declaration.py",
        text.replace('"greet", "name")', '"greet", "name", parts=("greet", "step"))'),
    )
    canary(newer, "'token 3'", "('step',)")
    newer.run(
        """
        import fastgen, warnings
        from fastgen.patches.engine import engine
        assert results()["greet"] == PATCHED["greet"]
        row = fastgen.status()["toolkit.greet"]
        assert (row.state, row.reason) == ("applied", "in part, as the canary found: token 3")
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            assert engine.declined("toolkit", "greet") is None
            for _ in range(2):
                assert engine.declined("toolkit", "step") == "declined by the canary: token 3"
        (warning,) = heard
        assert warning.category is fastgen.FastgenWarning
        text = str(warning.message)
        assert "fastgen leaves step to toolkit 1.6: token 3. 1.5 is the newest tested" in text
        assert "warnings.filterwarnings" in text and 'pip install "toolkit<=1.5"' in text
        """
    )


def test_canary_raises(newer: Sandbox) -> None:
    canary(newer, "1 / 0")
    for _ in range(2):
        assert "the canary found: step raised ZeroDivisionError: division by zero" in newer.run(
            DECLINED
        )
    assert asked(newer) == 2, "what may pass is not kept"


def test_canary_that_cannot_be_imported(newer: Sandbox) -> None:
    newer.write("canary.py", "import nothing_like_that")
    assert "ModuleNotFoundError: No module named 'nothing_like_that'" in newer.run(DECLINED)


def test_canary_whose_calls_fall_back_proves_nothing(newer: Sandbox) -> None:
    newer.write(
        "ours.py",
        """
        from fastgen.patches.engine.engine import fallback
        def greet(original, /, *args, **kwargs):
            fallback("toolkit.greet", "too small")
            return original(*args, **kwargs)
        """,
    )
    assert "step raised FallbackError: toolkit.greet fell back: too small" in newer.run(DECLINED)


def test_canary_is_not_asked_by_disabled_calls(newer: Sandbox) -> None:
    newer.run("import fastgen\nwith fastgen.disabled(): plain()")
    assert asked(newer) == 0


def test_canary_asked_by_many_threads_runs_once(newer: Sandbox) -> None:
    canary(newer, '__import__("time").sleep(0.05)')
    newer.run(
        """
        import fastgen, toolkit.gen, threading
        seen = []
        threads = [threading.Thread(target=lambda: seen.append(results())) for _ in range(8)]
        [t.start() for t in threads]; [t.join() for t in threads]
        assert seen == [PATCHED] * 8, seen
        """,
        # no thread may read a result that another thread cached
        FASTGEN_CACHE_DIR="/dev/null/no-folder",
    )
    assert asked(newer) == 1


def test_canary_without_a_cache_folder_works_and_says_so(newer: Sandbox) -> None:
    newer.write("a_file", "where the folder should be")
    for _ in range(2):
        said = newer.run(
            "import fastgen; patched(); print(fastgen.status().toolkits[0].canary)",
            FASTGEN_CACHE_DIR=str(newer.folder / "a_file" / "cache"),
        )
        assert said.startswith("all 5 parts agree (not kept, asked again in the next process: ")
        assert "a_file" in said
    assert asked(newer) == 2


@pytest.mark.skipif(
    sys.platform == "win32", reason="permissions of folders are another thing there"
)
def test_canary_in_a_read_only_cache_folder(newer: Sandbox) -> None:
    folder = newer.folder / "cache"
    folder.mkdir()
    folder.chmod(0o500)
    said = newer.run("import fastgen; patched(); print(fastgen.status().toolkits[0].canary)")
    assert said.startswith("all 5 parts agree (")  # root may write even there
    folder.chmod(0o700)


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"key": 1}', '{"parts": [1]}', "\x00"])
def test_canary_with_a_damaged_cache_asks_again_and_mends_it(newer: Sandbox, damage: str) -> None:
    code = "import fastgen; patched()"
    newer.run(code)
    (file,) = (newer.folder / "cache").iterdir()
    file.write_text(damage)
    newer.run(code)
    newer.run(code)
    assert asked(newer) == 2
    assert json.loads(file.read_text())["differing"] == {}


def test_no_canary_declared(newer: Sandbox) -> None:
    text = (newer.folder / "declaration.py").read_text()
    newer.write("declaration.py", text.replace('canary="canary:parts", ', ""))
    newer.run(
        "import fastgen; patched(); assert 'newer than 1.5' in fastgen.status().rows[0].reason"
    )


# The report


def test_status_prints_and_serialises(sandbox: Sandbox) -> None:
    printed = sandbox.run(
        """
        import json, fastgen
        from fastgen.patches.engine.engine import fallback
        patched()
        fallback("toolkit.step", "one beam")
        fallback("toolkit.step", "one beam")
        status = fastgen.status(verbose=True)
        assert json.loads(json.dumps(status.to_dict()))["rows"][1]["fallbacks"] == {"one beam": 2}
        assert [row.name for row in status.rows] == ["toolkit." + name for name in NAMES]
        try:
            status["toolkit.nothing"]
        except KeyError:
            print(status)
        """
    )
    lines = [line.split() for line in printed.splitlines()]
    assert lines[0][0] == "fastgen"
    assert lines[0][-1] == "enabled"
    assert ["toolkit", "1.5", ">=1.2", "1.5", "not", "needed"] in lines
    assert ["toolkit.greet", "applied", "1", "0"] in lines
    assert ["toolkit.step", "applied", "1", "2"] in lines
    assert lines[lines.index(["toolkit.step", "applied", "1", "2"]) + 1] == [
        "2",
        "fallback:",
        "one",
        "beam",
    ]


def test_a_summary_says_what_matters_first(sandbox: Sandbox) -> None:
    printed = sandbox.run(
        """
        import fastgen
        from fastgen.patches.engine import engine
        patched()
        for _ in range(3):
            engine.note_call("toolkit", "Bart", "beam search", "accelerated")
        engine.note_call("toolkit", "Bart", "beam search", "partly", ["a Bart is in training mode"])
        engine.note_call("toolkit", "Mamba", "greedy search", "not", ["no keys"])
        print(fastgen.status())
        """
    )
    blocks = [block.splitlines() for block in printed.strip().split("\n\n")]
    assert blocks[0][1] == "toolkit 1.5 (1.5 is the newest tested): 5 patches run"
    assert [line.split() for line in blocks[1]] == [
        ["calls", "method", "accelerated", "partly", "not"],
        ["Bart", "beam", "search", "3", "1", "0"],
        ["1", "partly:", "a", "Bart", "is", "in", "training", "mode"],
        ["->", "call", "model.eval()", "first"],
        ["Mamba", "greedy", "search", "0", "0", "1"],
        ["1", "not:", "no", "keys"],
    ]
    assert blocks[-1] == [
        "every patch, with all counts: fastgen.status(verbose=True), or `fastgen status --all`"
    ]
    assert "toolkit.greet" not in printed


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("the model is compiled", "generate with the model as it is, not compiled"),
        (
            "there are none for this processor: no compiler",
            "install a C compiler and fastgen again",
        ),
        (
            "the weights are float64, which C does not read",
            'load the model with dtype="float32"',
        ),
        ("keys and values are not shared: use_cache=False", "leave use_cache=False out"),
        ("synced_gpus=True", ""),
    ],
)
def test_what_would_help(reason: str, advice: str) -> None:
    assert (
        remedy_for(reason).startswith(advice)
        if not advice.startswith("dtype")
        else advice in remedy_for(reason)
    )
    assert bool(remedy_for(reason)) == bool(advice)


def test_counts_are_set_to_zero(sandbox: Sandbox) -> None:
    sandbox.run(
        """
        import fastgen
        from fastgen.patches.engine import engine
        patched()
        engine.fallback("toolkit.step", "one beam", ("Model", "step"))
        engine.note_skipped("toolkit.step", "too small")
        engine.compared("equal")
        found = fastgen.status(reset=True)
        assert found["toolkit.step"].hits == 1 and found.calls[0].not_accelerated == 1 and found.parity == {"equal": 1}
        after = fastgen.status()
        assert not (after.calls or after.parity or any(r.hits or r.fallbacks or r.left_off for r in after.rows))
        assert states() == {"applied": 5}, "what is patched stays so"
        patched()
        assert fastgen.status()["toolkit.step"].hits == 1
        """  # noqa: E501
    )


def test_counts_of_another_process_are_added(sandbox: Sandbox) -> None:
    sandbox.run(
        """
        import fastgen
        from fastgen.patches.engine import engine
        patched()
        engine.fallback("toolkit.step", "one beam", ("Model", "step"))
        engine.merge_counts(engine.counted())
        found = fastgen.status()
        assert found["toolkit.step"].hits == 2 and found["toolkit.step"].fallbacks == {"one beam": 2}
        (group,) = found.calls
        assert (group.model, group.method, group.not_accelerated, group.reasons[0].calls) == ("Model", "step", 2, 2)
        """  # noqa: E501
    )


def test_a_report_at_the_end(sandbox: Sandbox) -> None:
    code = "import fastgen; from toolkit import gen; gen.greet('you'); print('done')"
    assert sandbox.process(code).stderr == ""
    done = sandbox.process(code, FASTGEN_REPORT="1")
    assert done.stdout == "done\n"
    assert done.stderr.startswith("\nfastgen ")
    assert "toolkit 1.5 (1.5 is the newest tested): 5 patches run" in done.stderr


# Warnings about inactive patches


LOUD = """
    import warnings
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        import fastgen, toolkit.gen
        assert not heard, "nothing is said before a call that would have been accelerated"
        for _ in range(2):
            plain()
        with fastgen.disabled():
            plain()
    (warning,) = heard
    assert warning.category is fastgen.FastgenWarning and issubclass(warning.category, UserWarning)
    assert "warnings.filterwarnings" in str(warning.message) and "FASTGEN=0" in str(warning.message)
    print(warning.message)
    (group,) = fastgen.status().calls
    assert (group.model, group.method, group.not_accelerated) == ("Model", "stepping", 2), group
    fastgen.disable()
    plain()
    fastgen.enable()
    plain()
"""


@pytest.fixture
def loud(sandbox: Sandbox) -> Sandbox:
    """Return a toolkit with a patch whose absence is worth a warning (`covers`)."""
    text = (sandbox.folder / "declaration.py").read_text()
    sandbox.write("declaration.py", text.replace('"self", "x")', '"self", "x", covers="stepping")'))
    return sandbox


def test_an_unsupported_version_is_said_once(loud: Sandbox) -> None:
    loud.version("1.1")
    said = loud.run(LOUD)
    expected = (
        "fastgen accelerates nothing of toolkit: toolkit 1.1 found; >=1.2 is supported; "
        "get toolkit. To silence"
    )
    assert said.startswith(expected)


def test_a_failed_patch_is_said_once(loud: Sandbox) -> None:
    text = (loud.folder / "toolkit" / "gen.py").read_text()
    loud.write(
        "toolkit/gen.py",
        text.replace("def step(self, x,", "def step(self, y,").replace("x * scale", "y * scale"),
    )
    said = loud.run(LOUD.replace("plain()", "results()"))
    assert said.startswith(
        "fastgen does not accelerate stepping of toolkit 1.5: "
        "toolkit.step failed, TypeError: parameters"
    )
    assert ">=1.2 is supported and 1.5 the newest tested; see `fastgen doctor`." in said


def test_a_target_that_is_gone_is_said_at_once(loud: Sandbox) -> None:
    """The warning comes at import, since no call of the target can emit it."""
    text = (loud.folder / "toolkit" / "gen.py").read_text()
    loud.write("toolkit/gen.py", text.replace("def step(", "def walk("))
    done = loud.process("import fastgen, toolkit.gen")
    assert (
        "FastgenWarning: fastgen does not accelerate stepping of toolkit 1.5: "
        "toolkit.step failed, LookupError" in done.stderr
    )


def test_a_warning_of_a_gone_target_may_be_an_exception(loud: Sandbox) -> None:
    """The exception is raised after all other patches are applied, with no lock held."""
    text = (loud.folder / "toolkit" / "gen.py").read_text()
    loud.write("toolkit/gen.py", text.replace("def step(", "def walk("))
    loud.run(
        """
        import threading, warnings
        import fastgen
        from fastgen.patches.engine.registry import registry
        free = []
        def take():
            free.append(registry.lock.acquire(timeout=20))
            registry.lock.release()
        def show(*_, **__):
            other = threading.Thread(target=take)
            other.start()
            other.join()
            raise RuntimeError("the user's own")
        warnings.showwarning = show
        try:
            import toolkit.gen
        except RuntimeError as error:
            assert str(error) == "the user's own", error
        assert free == [True]
        states = {row.name: row.state for row in fastgen.status().rows}
        assert states.pop("toolkit.step") == "failed" and set(states.values()) == {"applied"}, states
        """  # noqa: E501
    )


def test_a_canary_that_declines_is_said_once(loud: Sandbox) -> None:
    loud.version("1.6")
    loud.write("canary.py", "def parts(): return {'step': lambda: 'token 3'}")
    code = LOUD.replace("plain()", "results()").replace(
        '("Model", "stepping", 2), group', '("Model", "stepping", 2)'
    )
    code = code.split("(group,)")[0]
    assert loud.run(code).startswith(
        "fastgen leaves stepping to toolkit 1.6: token 3. 1.5 is the newest tested: a newer"
    )


def test_what_a_user_has_asked_for_is_not_warned_of(loud: Sandbox) -> None:
    for environment in ({"FASTGEN": "0"}, {"FASTGEN_SKIP": "toolkit.step"}):
        done = loud.process("import fastgen; results()", **environment)
        assert done.stderr == ""


def test_torch_compile_follows_patched_functions(sandbox: Sandbox) -> None:
    """Code under compilation runs the original, since Dynamo cannot trace context variables."""
    sandbox.run(
        """
        import torch, fastgen
        from toolkit import gen
        model, x = gen.Model(2), torch.ones(3)
        assert model.step(x)[0] == "ours"
        compiled = torch.compile(lambda x: model.step(x)[2] + 1, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), x + 1)
        """
    )
