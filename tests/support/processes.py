"""Run programs in separate processes that are forked from one that has imported torch.

Importing torch takes longer than most of what tests do in a program. The parent imports no toolkit.
"""

import atexit
import multiprocessing
import os
import runpy
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["pytest", "torch", "torch._dynamo", "hydra.compose", "sacrebleu"])
_STREAMS = ("stdin", "stdout", "stderr")


def python(
    arguments: Sequence[str],
    text: str = "",
    cwd: Path = ROOT,
    environment: Mapping[str, str] | None = None,
) -> CompletedProcess[str]:
    """Run a program as a Python interpreter with these arguments would.

    Args:
        arguments: -m MODULE or -c CODE, then the program's arguments.
        text: standard input.
        cwd: working directory.
        environment: all environment variables; by default, those of this process.
    """
    with TemporaryDirectory() as folder:
        (Path(folder) / "stdin").write_text(text, "utf-8")
        environment = dict(os.environ if environment is None else environment)
        child = _CONTEXT.Process(target=_run, args=(list(arguments), environment, str(cwd), folder))
        child.start()
        child.join(300)
        if child.exitcode is None:
            child.kill()
            raise TimeoutExpired(list(arguments), 300)
        _, stdout, stderr = ((Path(folder) / name).read_text("utf-8") for name in _STREAMS)
        return CompletedProcess(list(arguments), child.exitcode, stdout, stderr)


def _run(arguments: list[str], environment: dict[str, str], cwd: str, folder: str) -> None:
    for number, name in enumerate(_STREAMS):
        opened = os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(i, mode, encoding="utf-8") for i, mode in enumerate("rww")
    )
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path[:] = [
        "",
        *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)),
        *sys.path,
    ]
    how, what, *rest = arguments
    sys.argv = [how, *rest]
    try:
        if how == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(what, "<string>", "exec"), main.__dict__)
    finally:
        atexit._run_exitfuncs()
