"""`fastgen run` and the hook: programs that say nothing of fastgen run with it."""

import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from fastgen.cli import hook, main, run
from fastgen.patches.fairseq import TOOLKIT as FAIRSEQ

PROGRAM = """
import sys
print(__name__, sys.argv[1:], "fastgen" in sys.modules)
sys.exit(int(sys.argv[1]))
"""


def _python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=os.environ | environment, check=False
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
        "-m", "fastgen", "run", "-m", "program", "0", PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    )
    assert (found.returncode, found.stdout) == (0, "__main__ ['0'] True\n"), found.stderr


def test_console_script() -> None:
    found = _python("-m", "fastgen", "run", "fastgen", "--version")
    assert found.returncode == 0
    assert found.stdout.startswith("fastgen ")


def test_no_such_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "no-such-script"]) == 2
    assert "'no-such-script'" in capsys.readouterr().err


def says_what_it_got() -> str:
    """Stands for the function of a console script."""
    print(sys.argv)
    return "went wrong"


def test_short_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        run, "_script", lambda name: EntryPoint(name, f"{__name__}:says_what_it_got", "console_scripts")
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
    script = None if what == "fairseq" else EntryPoint("fairseq-generate", "no_hydra:main", "console_scripts")
    monkeypatch.setattr(run, "_script", lambda name: script)
    monkeypatch.setattr(sys, "argv", ["bin/fastgen-generate", "DATA"])
    missing = "there is no console script named" if script is None else "cannot be imported: No module named 'no_hydra'"
    for command in (lambda: main(["run", "fairseq-generate", "DATA"]), run.generate):
        assert command() == 2
        said = capsys.readouterr().err
        assert missing in said
        assert said.endswith(f": {FAIRSEQ.install_hint}\n")


def test_hook(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fairseq.py").write_text("__version__ = '0.12.2'\n")  # stands for the toolkit
    place = ["--site-packages", str(tmp_path)]
    program = "import sys, site; site.addsitedir(sys.argv[1]); {} print('fastgen' in sys.modules)"
    imports = program.format("import fairseq;")
    path = f"{tmp_path}:{Path(hook.__file__).parents[2]}"
    assert _python("-c", imports, str(tmp_path), PYTHONPATH=path).stdout == "False\n"
    for _ in range(2):  # twice is harmless
        assert main(["install-hook", *place]) == 0
    assert sorted(file.name for file in tmp_path.glob("f*")) == ["fairseq.py", "fastgen.pth"]
    assert len((tmp_path / "fastgen.pth").read_text().splitlines()) == 1
    assert _python("-c", imports, str(tmp_path), PYTHONPATH=path).stdout == "True\n"
    assert _python("-c", program.format(""), str(tmp_path), PYTHONPATH=path).stdout == "False\n"
    for said in ("is gone", "nothing to remove"):
        assert main(["remove-hook", *place]) == 0
        assert said in capsys.readouterr().out
    assert _python("-c", imports, str(tmp_path), PYTHONPATH=path).stdout == "False\n"


def test_hook_leaves_alone_what_is_not_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fastgen.pth").write_text("import other\n")
    for command in ("install-hook", "remove-hook"):
        assert main([command, "--site-packages", str(tmp_path)]) == 2
        assert "holds something else" in capsys.readouterr().err
    assert (tmp_path / "fastgen.pth").read_text() == "import other\n"
    assert main(["install-hook", "--site-packages", str(tmp_path / "nowhere")]) == 2
    assert "nowhere is not a folder" in capsys.readouterr().err


def test_hook_costs_little() -> None:
    """The line imports one small module, which imports nothing that Python has not imported by then."""
    path = str(Path(hook.__file__).parents[2])
    code = "import sys; before = set(sys.modules); import fastgen_hook; print(sorted(set(sys.modules) - before))"
    assert _python("-c", code, PYTHONPATH=path).stdout.strip() == "['fastgen_hook']"
