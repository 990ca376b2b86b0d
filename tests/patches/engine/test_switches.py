"""Check every FASTGEN_* variable: accepted values, error messages and effect on patches."""

import json
import os
import pickle
import re
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

from fastgen import config
from fastgen.errors import VariableError
from fastgen.patches import fairseq, transformers
from tests.support.fake_toolkit import Sandbox
from tests.support.processes import python


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path)


def test_defaults() -> None:
    settings = config.read({"HOME": "/home/somebody"})
    assert settings == config.Settings(
        mode="1",
        skip=(),
        ops="auto",
        strict=False,
        parity=False,
        linear="auto",
        memory=None,
        step="auto",
        graphs="auto",
        refill="auto",
        unknown="check",
        precision="model",
        self_draft="auto",
        int8_head="auto",
        prefix_cache=0,
        max_waiting=0,
        report=False,
        fairseq_allow=(),
        cache_dir=settings.cache_dir,
    )
    assert settings.cache_dir.name == "fastgen"
    assert config.read({variable.name: "" for variable in config.VARIABLES}) == settings, (
        "empty is unset"
    )
    assert (
        config.read({variable.name: variable.default for variable in config.VARIABLES}) == settings
    )


def test_values() -> None:
    settings = config.read(
        {
            "FASTGEN": "0",
            "FASTGEN_SKIP": "a, b.c ,,",
            "FASTGEN_OPS": "triton",
            "FASTGEN_STRICT": "1",
            "FASTGEN_PARITY": " 1 ",
            "FASTGEN_LINEAR": "packed",
            "FASTGEN_MEMORY": "1.5GiB",
            "FASTGEN_STEP": "module",
            "FASTGEN_GRAPHS": "off",
            "FASTGEN_REFILL": "on",
            "FASTGEN_UNKNOWN": "off",
            "FASTGEN_PRECISION": "int8",
            "FASTGEN_SELF_DRAFT": "on",
            "FASTGEN_INT8_HEAD": "off",
            "FASTGEN_PREFIX_CACHE": "1MiB",
            "FASTGEN_MAX_WAITING": "64",
            "FASTGEN_REPORT": "1",
            "FASTGEN_FAIRSEQ_ALLOW": "a.B,c.D",
            "FASTGEN_CACHE_DIR": "some/where",
        }
    )
    cache_dir = Path.cwd() / "some" / "where"
    assert settings == config.Settings(
        "0",
        ("a", "b.c"),
        "triton",
        True,
        True,
        "packed",
        3 * 2**29,
        "module",
        "off",
        "on",
        "off",
        "int8",
        "on",
        "off",
        2**20,
        64,
        True,
        ("a.B", "c.D"),
        cache_dir,
    )


@pytest.mark.parametrize(
    "variable", [v for v in config.VARIABLES if v.allowed], ids=lambda v: v.name
)
def test_every_allowed_value_is_accepted_and_no_other(variable: config.Variable) -> None:
    assert variable.default in variable.allowed
    for value in variable.allowed:
        assert variable.read({variable.name: value}) == value
    for value in ("2", "true", "AUTO", "-1", "no,", "10"):
        with pytest.raises(
            VariableError,
            match=f"^{variable.name}={value}: the value must be one of "
            f"{', '.join(variable.allowed)}; ",
        ):
            config.read({variable.name: value})


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("auto", None), ("", None), ("0", 0), ("4096", 4096), ("7B", 7), ("500MB", 500_000_000),
        ("2 gib", 2**31), (".5KiB", 512), ("1.5 TB", 1_500_000_000_000),
    ],
)  # fmt: skip
def test_memory_is_a_size(text: str, size: int | None) -> None:
    assert config.read({"FASTGEN_MEMORY": text}).memory == size


@pytest.mark.parametrize("text", ["lots", "-1", "GiB", "1e9", "2GiBs", ".", "10%", "inf", "1.2.3"])
def test_memory_that_is_no_size(text: str) -> None:
    with pytest.raises(VariableError, match=f"FASTGEN_MEMORY.*{re.escape(text)}.*2GiB"):
        config.read({"FASTGEN_MEMORY": text})


@pytest.mark.parametrize("text", ["many", "-1", "1.5"])
def test_requests_that_may_wait_are_a_number(text: str) -> None:
    with pytest.raises(VariableError, match=f"FASTGEN_MAX_WAITING={text}: .*a number; unset it"):
        config.read({"FASTGEN_MAX_WAITING": text})


def test_the_size_of_the_prefix_cache() -> None:
    assert config.read({"FASTGEN_PREFIX_CACHE": "64MiB"}).prefix_cache == 2**26
    with pytest.raises(VariableError, match=r"FASTGEN_PREFIX_CACHE=auto: .*unset it .*, 0"):
        config.read({"FASTGEN_PREFIX_CACHE": "auto"})


def test_the_environment_is_read_once_and_again_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    before = config.settings()
    monkeypatch.setenv("FASTGEN_LINEAR", "off")
    assert config.settings() is before
    assert config.reload().linear == "off"
    assert config.settings().linear == "off"
    monkeypatch.undo()
    assert config.reload() == before


@pytest.mark.parametrize(
    ("platform", "environ", "folder"),
    [
        ("linux", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/fastgen"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "~/.cache/fastgen"),
        ("linux", {}, "~/.cache/fastgen"),
        ("darwin", {"XDG_CACHE_HOME": "/xdg"}, "~/Library/Caches/fastgen"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/fastgen"),
        ("win32", {}, "~/AppData/Local/fastgen"),
        ("linux", {"FASTGEN_CACHE_DIR": "~/mine", "XDG_CACHE_HOME": "/xdg"}, "~/mine"),
    ],
)
def test_cache_folder(
    monkeypatch: pytest.MonkeyPatch,
    platform: str,
    environ: dict[str, str],
    folder: str,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(config.sys, "platform", platform)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config.read(environ).cache_dir == Path(folder.replace("~", str(tmp_path)))


def test_cache_folder_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(config.Path, "home", no_home)
    monkeypatch.setattr(config.tempfile, "tempdir", str(tmp_path))
    assert config.read({}).cache_dir == tmp_path / "fastgen"


def test_off(sandbox: Sandbox) -> None:
    sandbox.run(
        """
        import fastgen
        plain()
        assert states() == {"off": 5} and not fastgen.status().enabled
        assert {row.reason for row in fastgen.status().rows} == {"FASTGEN=0"}
        fastgen.disable()
        plain()
        fastgen.enable()
        patched()
        """,
        FASTGEN="0",
    )


@pytest.mark.parametrize(
    ("value", "skipped"),
    [
        ("toolkit", {"greet", "step", "build", "add", "double"}),
        ("toolkit.step", {"step"}),
        ("toolkit.step,toolkit.add", {"step", "add"}),
        (" toolkit.step , toolkit.step, ", {"step"}),
        ("transformers.loss,toolkit.add,fairseq.refine", {"add"}),  # patches of earlier releases
        ("", set()),
    ],
)
def test_skip(sandbox: Sandbox, value: str, skipped: set[str]) -> None:
    sandbox.run(
        f"""
        import fastgen
        for _ in range(2):
            for name, value in results().items():
                row = fastgen.status()["toolkit." + name]
                if name in {skipped!r}:
                    assert value == PLAIN[name] and (row.state, row.reason) == ("skipped", "FASTGEN_SKIP")
                else:
                    assert value == PATCHED[name] and row.state == "applied"
            fastgen.disable()
            plain()
            fastgen.enable()
        """,  # noqa: E501
        FASTGEN_SKIP=value,
    )


@pytest.mark.parametrize(
    "value", ["toolkit.stepp", "toolkit.ste", "tool", "step", "toolkit.step,other"]
)
def test_skip_of_what_is_not_there_is_an_error(sandbox: Sandbox, value: str) -> None:
    done = sandbox.process("import fastgen", FASTGEN_SKIP=value)
    assert done.returncode == 1
    unknown = value.split(",")[-1]
    expected = (
        f"fastgen.errors.VariableError: FASTGEN_SKIP={value}: no patch is named '{unknown}'; "
    )
    assert done.stderr.splitlines()[-1].startswith(expected)


def test_bad_value_stops_the_import(sandbox: Sandbox) -> None:
    done = sandbox.process("import fastgen", FASTGEN_OPS="tritom")
    assert done.returncode == 1
    expected = (
        "FASTGEN_OPS=tritom: the value must be one of auto, reference, native, triton; "
        "unset it for the default"
    )
    assert done.stderr.splitlines()[-1] == f"fastgen.errors.VariableError: {expected}, auto"


def test_errors_are_value_errors_on_one_line_that_can_be_sent_to_another_process() -> None:
    with pytest.raises(VariableError) as caught:
        config.read({"FASTGEN": "a\nb"})
    error = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(error, ValueError)
    assert str(error) == str(caught.value)
    assert (
        str(error)
        == r"FASTGEN='a\nb': the value must be one of 1, 0, compat; unset it for the default, 1"
    )
    assert error.name == "FASTGEN"


def test_a_folder_below_a_home_that_is_not_there() -> None:
    with pytest.raises(
        VariableError,
        match=r"^FASTGEN_CACHE_DIR=~nobody-here/x: there is no home folder for ~nobody-",
    ):
        config.read({"FASTGEN_CACHE_DIR": "~nobody-here/x"})


MENDS = """
    from fastgen.patches.engine.engine import Patch, Toolkit
    TOOLKIT = Toolkit("toolkit", "toolkit", ">=1", "1.5", canary="canary:parts")
    PATCHES = (
        Patch("toolkit.add", TOOLKIT, "toolkit.gen:Model.add", "ours:add", ("a", "b"), "a test", is_bugfix=True),
        Patch("toolkit.greet", TOOLKIT, "toolkit.gen:greet", "ours:greet", ("name",), "a test", covers="greetings"),
    )
"""  # noqa: E501


def test_compat_is_what_is_left_in_disabled(sandbox: Sandbox) -> None:
    sandbox.write("declaration.py", MENDS)
    sandbox.run(
        """
        import fastgen
        from toolkit import gen
        def rows():
            return {row.name: (row.state, row.reason) for row in fastgen.status().rows}
        assert (gen.Model.add(1, 2), gen.greet("you")) == (["ours", 3], "hello you")
        assert rows() == {"toolkit.add": ("applied", ""), "toolkit.greet": ("off", "FASTGEN=compat")}
        status = fastgen.status()
        assert status.compat and not status.enabled
        assert str(status).splitlines()[0].endswith(", disabled but for what mends toolkits")
        fastgen.disable()
        assert (gen.Model.add(1, 2), gen.greet("you")) == (3, "hello you")
        assert set(rows().values()) == {("off", "disabled")} and not fastgen.status().compat
        fastgen.enable()
        assert (gen.Model.add(1, 2), gen.greet("you")) == (["ours", 3], ["ours", "hello you"])
        assert fastgen.status().enabled and not fastgen.status().compat
        """,  # noqa: E501
        FASTGEN="compat",
    )


@pytest.mark.parametrize("mode", ["1", "compat"])
def test_what_mends_does_not_ask_the_canary(sandbox: Sandbox, mode: str) -> None:
    """If it were called first, the canary would compare the toolkit's code with itself."""
    sandbox.write("declaration.py", MENDS)
    sandbox.version("1.6")
    sandbox.write("canary.py", "def parts(): raise AssertionError('the canary is not to be asked')")
    sandbox.run(
        """
        import fastgen
        from toolkit import gen
        with fastgen.disabled():
            assert (gen.Model.add(1, 2), gen.greet("you")) == (["ours", 3], "hello you")
        row = fastgen.status()["toolkit.add"]
        assert (row.state, row.hits) == ("applied", 1)
        assert "not tried" not in fastgen.status().toolkits[0].canary
        """,
        FASTGEN=mode,
    )


def test_compat_in_the_toolkits() -> None:
    """Only patches that mend are applied, none that accelerates or restores a method."""
    code = """
        import json, fastgen
        from fastgen.cli.environment.status import import_targets
        import_targets()
        print(json.dumps({row.name: row.state for row in fastgen.status().rows}))
    """
    done = python(["-c", textwrap.dedent(code)], environment=os.environ | {"FASTGEN": "compat"})
    assert done.returncode == 0, done.stderr
    states = json.loads(done.stdout.splitlines()[-1])
    for toolkit in (transformers, fairseq):
        assert any(patch.is_bugfix for patch in toolkit.PATCHES)
        for patch in toolkit.PATCHES if find_spec(toolkit.TOOLKIT.module) else ():
            assert states[patch.name] == ("applied" if patch.is_bugfix else "off"), patch.name


def test_strict_fallback_raises_and_is_counted(sandbox: Sandbox) -> None:
    sandbox.write(
        "ours.py",
        """
        from fastgen.patches.engine.engine import fallback
        def greet(original, /, *args, **kwargs):
            fallback("toolkit.greet", "one beam")
            return original(*args, **kwargs)
        """,
    )
    code = """
        import fastgen
        from fastgen.patches.engine.engine import FallbackError
        from toolkit import gen
        try:
            assert gen.greet("you") == "hello you"
        except FallbackError as error:
            assert (error.name, error.reason) == ("toolkit.greet", "one beam")
            print(error)
        assert fastgen.status()["toolkit.greet"].fallbacks == {"one beam": 1}
        with fastgen.disabled():
            assert gen.greet("you") == "hello you"
        """
    assert sandbox.run(code) == ""
    assert sandbox.run(code, FASTGEN_STRICT="1") == "toolkit.greet fell back: one beam\n"


CHANGED = """
    def greet(times, name): return "changed"
    def welcome(name): return "new"
"""


def test_strict_failed_patch_raises_in_the_toolkits_import(sandbox: Sandbox) -> None:
    sandbox.write("toolkit/gen.py", CHANGED)
    code = "import fastgen, toolkit.gen; assert states() == {'failed': 5}"
    sandbox.run(code)
    done = sandbox.process(code, FASTGEN_STRICT="1")
    assert done.returncode == 1
    last_line = done.stderr.splitlines()[-1]
    assert last_line == (
        "fastgen.patches.engine.patch.PatchError: toolkit.greet failed: "
        "TypeError: parameters (name, ...) expected, (times, name) found"
    )


def test_strict_failed_patch_raises_in_enable(sandbox: Sandbox) -> None:
    text = (sandbox.folder / "toolkit" / "gen.py").read_text()
    sandbox.write("toolkit/gen.py", text.replace("def greet(name", "def greet(who"))
    sandbox.run(
        """
        import toolkit.gen
        try:
            import fastgen
        except RuntimeError as error:
            assert "toolkit.greet failed" in str(error)
        else:
            raise AssertionError("no error")
        """,
        FASTGEN_STRICT="1",
    )
    sandbox.run(
        """
        import toolkit.gen, fastgen
        try:
            fastgen.enable()
        except RuntimeError as error:
            assert "toolkit.greet failed" in str(error)
        assert states() == {"applied": 4, "failed": 1}, "one failure does not keep the others from being applied"
        fastgen.disable()
        """,  # noqa: E501
        FASTGEN_STRICT="1",
        FASTGEN="0",
    )


def test_strict_unsupported_version_is_no_failure(sandbox: Sandbox) -> None:
    sandbox.version("1.1")
    sandbox.run(
        "import fastgen, toolkit.gen; plain(); assert states() == {'skipped': 5}",
        FASTGEN_STRICT="1",
    )


def test_strict_with_a_canary_that_declines(sandbox: Sandbox) -> None:
    sandbox.version("1.6")
    sandbox.write("canary.py", "def parts(): return {'greet': lambda: 'token 3'}")
    sandbox.run(
        """
        import fastgen
        from toolkit import gen
        for _ in range(2):
            try:
                gen.greet("you")
            except RuntimeError as error:
                assert str(error) == "toolkit.greet fell back: declined by the canary: token 3"
            else:
                raise AssertionError("no error")
        """,
        FASTGEN_STRICT="1",
    )


def test_strict_with_a_replacement_that_cannot_be_imported(sandbox: Sandbox) -> None:
    sandbox.write("ours.py", "")
    sandbox.run(
        """
        import fastgen
        from toolkit import gen
        try:
            gen.greet("you")
        except RuntimeError as error:
            assert "toolkit.greet failed: AttributeError" in str(error)
        else:
            raise AssertionError("no error")
        assert fastgen.status()["toolkit.greet"].state == "failed"
        """,
        FASTGEN_STRICT="1",
    )


def test_the_variables_are_the_documented_ones() -> None:
    names = [variable.name for variable in config.VARIABLES]
    assert len(set(names)) == len(names)
    assert all(variable.help and "\n" not in variable.help for variable in config.VARIABLES)
    package = Path(config.__file__).parent
    used = {
        word.strip("\"'`=(),.:;[]{}")
        for file in package.rglob("*.py")
        for word in file.read_text(encoding="utf-8").replace("=", " ").split()
        if word.strip("\"'`=(),.:;[]{}").startswith("FASTGEN_")
    }
    assert used - set(names) - {"FASTGEN_*"} == set(), "a variable that the table does not list"
    assert os.environ.keys() >= {"FASTGEN_CACHE_DIR"}, "tests keep nothing in the user's folder"
