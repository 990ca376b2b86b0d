"""`fastgen run` and the import hook: programs that do not mention fastgen run with it."""

import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from fastgen.cli import main
from fastgen.cli.environment import hook, run
from fastgen.patches.fairseq import TOOLKIT as FAIRSEQ

# A console script as pip writes it: its folder comes first on the module search path.
COMMAND = "import sys; from fastgen.cli import main; sys.exit(main())"
SHORT = "import sys; from fastgen.cli.environment.run import generate; sys.exit(generate())"
PROGRAM = """
import sys
print(__name__, sys.argv[1:], "fastgen" in sys.modules)
sys.exit(int(sys.argv[1]))
"""


def _python(
    *arguments: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | environment,
        check=False,
    )


def test_file(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    (tmp_path / "program.py").write_text(PROGRAM + "import beside\n")
    found = _python("-m", "fastgen", "run", str(tmp_path / "program.py"), "3", "--beam", "5")
    assert found.returncode == 3, found.stderr
    assert found.stdout == "__main__ ['3', '--beam', '5'] True\n"


def test_module(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    found = _python(
        "-m",
        "fastgen",
        "run",
        "-m",
        "program",
        "0",
        PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
    )
    assert (found.returncode, found.stdout) == (0, "__main__ ['0'] True\n"), found.stderr


def _command(
    folder: Path, *words: str, name: str = "fastgen", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a fastgen command, as installed, in a folder."""
    script = folder / "bin" / name
    script.parent.mkdir(exist_ok=True)
    script.write_text(SHORT if name == "fastgen-generate" else COMMAND)
    variables = os.environ | {"PYTHONPATH": str(Path(hook.__file__).parents[3])} | environment
    return subprocess.run(
        [sys.executable, str(script), *words],
        capture_output=True,
        text=True,
        env=variables,
        cwd=folder,
        check=False,
    )


PROGRAMS = {
    "boom.py": "def f():\n    1 / 0\n\nf()\n",
    "wrong.py": "def f(:\n",
    "package/__init__.py": "",
    "package/needs.py": "import no_such_thing\n",
    "package/fails.py": "raise SystemExit(7)\n",
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    for name, text in PROGRAMS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-m", "no_such_module"], "there is no module named 'no_such_module' here"),
        (["-m", "package.none"], "there is no module named 'package.none' here"),
        (["-m", ".relative"], "there is no module named '.relative' here"),
        (["-m", "package"], "package is a package without a module __main__, so it cannot be run"),
        (["none.py"], "there is no console script named 'none.py' here, and no such file"),
        (["-m", "fairseq_cli.none"], "there is no module named 'fairseq_cli.none' here"),
    ],
)
def test_what_there_is_not_to_run(programs: Path, words: list[str], message: str) -> None:
    done = _command(programs, "run", *words)
    assert (done.returncode, done.stdout) == (2, "")
    line = done.stderr.splitlines()[-1].partition(": pip install")[0]
    assert line == f"fastgen run: {message}"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words", [["boom.py"], ["-m", "boom"], ["wrong.py"], ["-m", "package.needs"]]
)
def test_an_exception_is_shown_as_python_shows_it(programs: Path, words: list[str]) -> None:
    ours, plain = _command(programs, "run", *words), _python(*words, cwd=programs)
    assert ours.returncode == plain.returncode == 1
    shown = [line for line in plain.stderr.splitlines() if "runpy" not in line]
    assert ours.stderr.splitlines() == shown


def test_an_exit_status_is_the_programs_own(programs: Path) -> None:
    done = _command(programs, "run", "-m", "package.fails")
    assert (done.returncode, done.stderr) == (7, "")


@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() == 0, reason="whoever is root may read everything"
)
def test_a_file_that_cannot_be_read(programs: Path) -> None:
    (programs / "closed.py").write_text("")
    (programs / "closed.py").chmod(0)
    done = _command(programs, "run", "closed.py")
    assert (done.returncode, done.stderr) == (
        2,
        "fastgen run: closed.py cannot be read: Permission denied\n",
    )


MAYBE = "FASTGEN=maybe: the value must be one of 1, 0, compat; unset it for the default, 1"


@pytest.mark.parametrize(
    "command", ["status", "explain", "run", "install-hook", "fastgen-generate", "python -m"]
)
def test_a_bad_variable_is_one_line_in_every_command(tmp_path: Path, command: str) -> None:
    words = {"explain": ["explain", "model"], "run": ["run", "x.py"], "fastgen-generate": ["data"]}
    name = command if command == "fastgen-generate" else "fastgen"
    if command == "python -m":
        done = _python("-m", "fastgen", "status", FASTGEN="maybe")
    else:
        done = _command(tmp_path, *words.get(command, [command]), name=name, FASTGEN="maybe")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{name}: {MAYBE}\n")


def test_help_is_given_with_a_bad_variable(tmp_path: Path) -> None:
    done = _command(tmp_path, "--help", FASTGEN_SKIP="nothing")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_script_gets_an_exception_for_a_bad_variable(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "try:\n    import fastgen\nexcept ValueError as error:\n    print(error)\n"
    )
    done = _python(str(tmp_path / "script.py"), FASTGEN="maybe")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{MAYBE}\n", "")


@pytest.mark.parametrize("variables", [{"FASTGEN": "maybe"}, {"FASTGEN_SKIP": "nothing"}, {}])
def test_with_the_hook_programs_run_whatever_keeps_fastgen_from_starting(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    (tmp_path / "fairseq").mkdir()
    (tmp_path / "fairseq/__init__.py").write_text("__version__ = '0.12.2'\n")
    (tmp_path / "fairseq/sequence_scorer.py").write_text(
        "class SequenceScorer:\n    def generate(self): ...\n"
    )
    missing = "" if variables else "sys.modules['wrapt'] = None; "
    code = (
        f"import sys; {missing}import fastgen_hook; "
        "from fairseq.sequence_scorer import SequenceScorer as scorer; "
    )
    done = _python(
        "-c", f"{code}print(scorer.generate.__qualname__, hasattr(scorer.generate, '__wrapped__'))",
        PYTHONPATH=f"{tmp_path}:{Path(hook.__file__).parents[3]}", **variables,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "SequenceScorer.generate False\n"), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("fastgen: not active, since importing it failed: ")
    assert next(iter(variables), "needs wrapt: pip install") in line


def test_a_missing_package_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['wrapt'] = None\n")
    path = f"{tmp_path}:{Path(hook.__file__).parents[3]}"
    for command in ("status", "doctor"):
        done = _command(tmp_path, command, PYTHONPATH=path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == 'fastgen: needs wrapt: pip install "wrapt>=1.16"\n'
    done = _python("-c", "import fastgen", PYTHONPATH=path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        'MissingPackageError: needs wrapt: pip install "wrapt>=1.16"'
    )


def test_console_script() -> None:
    found = _python("-m", "fastgen", "run", "fastgen", "--version")
    assert found.returncode == 0
    assert found.stdout.startswith("fastgen ")


def test_no_such_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "no-such-script"]) == 2
    assert "'no-such-script'" in capsys.readouterr().err


def says_what_it_got() -> str:
    """Stand in for the function of a console script."""
    print(sys.argv)
    return "went wrong"


def test_short_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        run,
        "_script",
        lambda name: EntryPoint(name, f"{__name__}:says_what_it_got", "console_scripts"),
    )
    for command in (run.generate, run.interactive):
        monkeypatch.setattr(sys, "argv", ["bin/fastgen-x", "DATA", "--beam", "5"])
        assert command() == 1
        said = capsys.readouterr()
        assert said.out == f"['fairseq-{command.__name__}', 'DATA', '--beam', '5']\n"
        assert said.err == "went wrong\n"


@pytest.mark.parametrize("what", ["fairseq", "hydra"])
def test_what_to_install_is_said(
    what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = (
        None
        if what == "fairseq"
        else EntryPoint("fairseq-generate", "no_hydra:main", "console_scripts")
    )
    monkeypatch.setattr(run, "_script", lambda name: script)
    monkeypatch.setattr(sys, "argv", ["bin/fastgen-generate", "DATA"])
    missing = (
        "there is no console script named"
        if script is None
        else "cannot be imported: No module named 'no_hydra'"
    )
    for command in (lambda: main(["run", "fairseq-generate", "DATA"]), run.generate):
        assert command() == 2
        said = capsys.readouterr().err
        assert missing in said
        assert said.endswith(f": {FAIRSEQ.install_hint}\n")


def test_hook(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fairseq.py").write_text("__version__ = '0.12.2'\n")  # stands in for the toolkit
    place = ["--site-packages", str(tmp_path)]
    program = "import sys, site; site.addsitedir(sys.argv[1]); {} print('fastgen' in sys.modules)"
    imports = program.format("import fairseq;")
    path = f"{tmp_path}:{Path(hook.__file__).parents[3]}"
    assert _python("-c", imports, str(tmp_path), PYTHONPATH=path).stdout == "False\n"
    for _ in range(2):  # installing twice is harmless
        assert main(["install-hook", *place]) == 0
    assert sorted(file.name for file in tmp_path.glob("f*")) == ["fairseq.py", "fastgen.pth"]
    assert len((tmp_path / "fastgen.pth").read_text().splitlines()) == 1
    assert _python("-c", imports, str(tmp_path), PYTHONPATH=path).stdout == "True\n"
    assert _python("-c", program.format(""), str(tmp_path), PYTHONPATH=path).stdout == "False\n"
    for said in ("is gone", "nothing to remove"):
        assert main(["remove-hook", *place]) == 0
        assert said in capsys.readouterr().out
    assert _python("-c", imports, str(tmp_path), PYTHONPATH=path).stdout == "False\n"


def test_hook_leaves_alone_what_is_not_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fastgen.pth").write_text("import other\n")
    for command in ("install-hook", "remove-hook"):
        assert main([command, "--site-packages", str(tmp_path)]) == 2
        assert "has other content" in capsys.readouterr().err
    assert (tmp_path / "fastgen.pth").read_text() == "import other\n"
    assert main(["install-hook", "--site-packages", str(tmp_path / "nowhere")]) == 2
    assert "nowhere is not a folder" in capsys.readouterr().err


def test_hook_costs_little() -> None:
    """The hook imports a single small module, all of whose imports Python has loaded by then."""
    path = str(Path(hook.__file__).parents[3])
    code = (
        "import sys; before = set(sys.modules); import fastgen_hook; "
        "print(sorted(set(sys.modules) - before))"
    )
    assert _python("-c", code, PYTHONPATH=path).stdout.strip() == "['fastgen_hook']"
