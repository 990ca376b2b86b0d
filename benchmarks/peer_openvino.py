"""OpenVINO through optimum-intel as a peer, with the same weights exported in fp32.

optimum-intel needs an older transformers than fastgen, so OpenVINO runs in a child process
(`openvino_child.py`) of another environment's Python, which `--python` names. It takes turns with
transformers unpatched and with fastgen, and measures its own seconds.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import openvino_child, peers
from benchmarks.cases import Case
from benchmarks.runners import translation
from benchmarks.session import Session

INSTALL = "pip install optimum-intel==2.2.0 openvino==2026.4.1 transformers==4.57.6"


def suits(case: Case) -> bool:
    """Return whether the case is one batch without sampling."""
    return case.kind == "generate" and not case.options.get("do_sample")


def run(case: Case, session: Session) -> dict[str, Any]:
    """Time transformers, fastgen and OpenVINO on the same inputs, in turn.

    All outputs are compared in every round.

    Raises:
        SystemExit: the other Python, the case, the device or the precision is not supported.
    """
    if session.dtype != torch.float32 or session.device != "cpu":
        raise SystemExit(
            "--peer openvino computes in float32 on the CPU, "
            f"not in {session.dtype} on {session.device}"
        )
    if session.python is None or not session.python.is_file():
        raise SystemExit(
            "--peer openvino needs --python, the Python of an environment with optimum-intel "
            f"({INSTALL}); got {session.python}"
        )
    if case.kind == "text":
        task = translation(case, session)
        with Peer(session.python, task.model, task.batches, task.options) as peer:
            result = peers.texts("openvino", peer, task, case, session, peer.seconds)
    elif suits(case) and case.shape is not None:
        model = case.shape.build(session.dtype, session.device)
        inputs, options = case.inputs(model), case.generate_options
        with Peer(session.python, model, [inputs], options) as peer:
            result = peers.one_batch(
                "openvino", lambda **_: peer()[0], model, inputs, options, case, session,
                seconds=peer.seconds,
            )  # fmt: skip
    else:
        raise SystemExit(f"--peer openvino has no way to run the case {case.name!r}")
    return result | {"openvino": peer.versions}


class Peer:
    """A model in OpenVINO in a process of its own, as a function without arguments.

    It returns the token ids of every batch in the layout of transformers' `generate`. Leaving the
    context ends the process.

    Args:
        python: Python of an environment with optimum-intel.
        model: the transformers model.
        batches: tensor arguments of `generate`, one dict per batch.
        options: the other arguments of `generate`.

    Attributes:
        seconds: duration of every call so far, as measured in the process.
        versions: versions of the packages in the other environment.
    """

    def __init__(
        self, python: Path, model: Any, batches: list[dict[str, Tensor]], options: dict[str, Any]
    ) -> None:
        self.seconds: list[float] = []
        self._python = python
        self._job = {
            "is_encoder_decoder": model.config.is_encoder_decoder,
            "threads": torch.get_num_threads(),
            "batches": [{name: ids.tolist() for name, ids in batch.items()} for batch in batches],
            "options": options,
        }
        self._model = model

    def __enter__(self) -> Peer:
        self._folder = tempfile.TemporaryDirectory()
        place = Path(self._folder.name)
        self._model.save_pretrained(place / "model")
        self._log = place / "log"
        with self._log.open("wb") as log:
            # -I: a module of this folder must not hide one of the other environment.
            self._process = subprocess.Popen(
                [self._python, "-I", openvino_child.__file__],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        try:
            self.versions = self._answer(self._job | {"model": str(place / "model")})
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # the end of its input ends the process
        self._folder.cleanup()

    def __call__(self) -> list[Tensor]:
        answer = self._answer("again")
        self.seconds.append(answer["seconds"])
        return [torch.tensor(ids) for ids in answer["outputs"]]

    def _answer(self, request: Any) -> Any:
        """Send one line of JSON and return the answer.

        Raises:
            RuntimeError: the process has ended; the message holds the end of its errors.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the end of its errors says why
            print(json.dumps(request), file=self._process.stdin, flush=True)
        if line := self._process.stdout.readline():
            return json.loads(line)
        code = self._process.wait()
        errors = self._log.read_text("utf-8", "replace")[-4000:]
        raise RuntimeError(f"{self._python} ended with exit status {code}:\n{errors}")
