"""The shape of the package: imports point one way, and importing it is cheap."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fastgen"

# A part may import itself and those before it. All parts may import what is not listed,
# which imports no part.
ORDER = (
    "ops",
    "models",
    "decoding",
    "patches",
    "__init__",
    "unilm",
    "corpus",
    "ray",
    "cli",
    "__main__",
)
FREE = ("config", "constraints", "context", "errors", "number", "_version")
TOOLKITS = ("transformers", "fairseq", "accelerate", "peft")
TOOLKIT_FOLDERS = ("patches", "unilm", "corpus", "ray", "cli")


def violations(package: Path) -> list[str]:
    """Return what is wrong with the imports of a package laid out like fastgen, one line each."""
    found: list[str] = []
    for file in sorted(package.rglob("*.py")):
        part = _part(file, package)
        if part not in (*ORDER, *FREE):
            found.append(f"{file.relative_to(package)}: {part!r} is no known part of the package")
            continue
        for line, module in _imports(file, package):
            where = f"{file.relative_to(package)}:{line}: {part} imports {module}"
            top, *below = module.split(".")
            if top in TOOLKITS and part not in TOOLKIT_FOLDERS:
                found.append(f"{where}: toolkits are imported in {', '.join(TOOLKIT_FOLDERS)} only")
            if top == "ray" and part != "ray":
                found.append(f"{where}: Ray is imported in ray only")
            if top != package.name:
                continue
            target = below[0] if below else "__init__"
            if target in FREE or target == part:
                continue
            if target not in ORDER:
                found.append(f"{where}, which is no known part of the package")
            elif part in FREE or ORDER.index(target) > ORDER.index(part):
                found.append(f"{where}, which points back")
    return found


def _part(file: Path, package: Path) -> str:
    first = file.relative_to(package).parts[0]
    return first.removesuffix(".py")


def _imports(file: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Yield line and absolute name of every module that a file imports, at any place."""
    here = (package.name, *file.relative_to(package).parent.parts)
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            if module != package.name:
                yield node.lineno, module
                continue
            for alias in (
                node.names
            ):  # `from fastgen import x`: a part, or a public name of the package itself
                is_part = (package / alias.name).is_dir() or (
                    package / f"{alias.name}.py"
                ).is_file()
                yield node.lineno, f"{module}.{alias.name}" if is_part else module


def test_imports_point_one_way_and_toolkits_stay_in_their_folders() -> None:
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "statement", "complaint"),
    [
        (
            "ops/a.py",
            "from fastgen.models import b",
            "ops imports fastgen.models, which points back",
        ),
        ("ops/a.py", "import fastgen.patches.engine.engine", "points back"),
        ("ops/a.py", "from ..models import b", "ops imports fastgen.models, which points back"),
        ("ops/a.py", "from .. import models", "ops imports fastgen.models, which points back"),
        (
            "ops/deep/a.py",
            "from ...models.b import c",
            "ops imports fastgen.models.b, which points back",
        ),
        ("ops/a.py", "from fastgen import status", "ops imports fastgen, which points back"),
        (
            "models/a.py",
            "from fastgen import decoding",
            "models imports fastgen.decoding, which points back",
        ),
        (
            "models/a.py",
            "def f():\n    import fastgen.decoding",
            "a.py:2: models imports fastgen.decoding",
        ),
        ("models/a.py", "if TYPE_CHECKING:\n    from fastgen.decoding.c import d", "points back"),
        ("decoding/a.py", "import fastgen", "decoding imports fastgen, which points back"),
        (
            "decoding/a.py",
            "import torch, fastgen.cli",
            "decoding imports fastgen.cli, which points back",
        ),
        (
            "patches/a.py",
            "from fastgen.cli.b import c",
            "patches imports fastgen.cli.b, which points back",
        ),
        (
            "__init__.py",
            "from fastgen.cli import main",
            "__init__ imports fastgen.cli, which points back",
        ),
        ("config.py", "from fastgen.ops import a", "config imports fastgen.ops, which points back"),
        ("config.py", "import fastgen", "config imports fastgen, which points back"),
        (
            "decoding/a.py",
            "import transformers",
            "decoding imports transformers: toolkits are imported in",
        ),
        ("models/a.py", "from transformers.cache_utils import Cache", "toolkits are imported in"),
        ("ops/a.py", "def f():\n    import fairseq.data as d", "toolkits are imported in"),
        ("models/a.py", "from peft import PeftModel", "toolkits are imported in"),
        (
            "models/a.py",
            "try:\n    import accelerate\nexcept ImportError: pass",
            "toolkits are imported in",
        ),
        ("__init__.py", "import transformers", "toolkits are imported in"),
        (
            "corpus/a.py",
            "from fastgen.ray import b",
            "corpus imports fastgen.ray, which points back",
        ),
        ("ray/a.py", "from fastgen.cli import b", "ray imports fastgen.cli, which points back"),
        ("cli/a.py", "import ray.data", "cli imports ray.data: Ray is imported in ray only"),
        ("utils/a.py", "", "'utils' is no known part of the package"),
        ("helpers.py", "", "'helpers' is no known part of the package"),
        ("patches/a.py", "import fastgen.helpers", "no known part of the package"),
    ],
)
def test_a_planted_violation_is_found(
    tmp_path: Path, file: str, statement: str, complaint: str
) -> None:
    package = _package(tmp_path)
    _write(package, file, statement)
    (found,) = violations(package)
    assert complaint in found
    assert found.startswith(file)


@pytest.mark.parametrize(
    ("file", "statement"),
    [
        (
            "ops/a.py",
            (
                "import torch\nfrom fastgen.ops.b import c\n"
                "from fastgen import config\nfrom . import d"
            ),
        ),
        (
            "models/a.py",
            "from fastgen.ops import a\nfrom fastgen.config import settings\nfrom ..ops import b",
        ),
        ("decoding/a.py", "from fastgen import models, ops\nimport transformers_extra"),
        (
            "patches/a.py",
            (
                "import transformers, fairseq\n"
                "from fastgen.decoding import a\nfrom fastgen import _version"
            ),
        ),
        (
            "cli/a.py",
            (
                "import fastgen\nfrom fastgen import status\n"
                "import transformers\nfrom fastgen.patches import a"
            ),
        ),
        ("__init__.py", "from fastgen.patches import enable\nfrom fastgen.config import settings"),
        ("ray/a.py", "import ray.data\nfrom fastgen.corpus import b\nfrom fastgen.ray.c import d"),
        ("cli/a.py", "def f():\n    from fastgen.ray import engine"),
        ("__main__.py", "from fastgen.cli import main"),
    ],
)
def test_what_is_allowed_is_not_found(tmp_path: Path, file: str, statement: str) -> None:
    package = _package(tmp_path)
    _write(package, file, statement)
    assert violations(package) == []


def _package(folder: Path) -> Path:
    package = folder / "fastgen"
    for part in ORDER:
        _write(package, f"{part}.py" if part.startswith("__") else f"{part}/__init__.py", "")
    for part in FREE:
        _write(package, f"{part}.py", "")
    return package


def _write(package: Path, file: str, text: str) -> None:
    (package / file).parent.mkdir(parents=True, exist_ok=True)
    (package / file).write_text(text, encoding="utf-8")


MOST_FILES = 16
"""Modules of a folder."""

CONTEXT_VARIABLES = 5
"""Of the whole package; each is a value that functions get without being passed it."""

STATE = {
    "ops/counts.py: calls": "counts of operations; the hot path reads it without an attribute",
    "ops/counts.py: launches": "counts of kernel launches, which tests read",
    "ops/dispatch.py: _counted": "the counters of the graph that this thread captures",
    "models/state.py: _states": "what is kept between calls, by module and for the process",
    "patches/engine/registry.py: registry": "patches, toolkits, running plans, counts of calls",
    "patches/transformers/generate/report.py: _last": "the newest report, for benchmarks",
    "patches/fairseq/commands/options.py: command_line": "fairseq drops options of others",
    "patches/fairseq/commands/background.py: _work": "what a forked process inherits to run",
    "cli/environment/hook.py: install": "a command, which commands of one file cannot be modules",
    "cli/environment/hook.py: remove": "the same",
}
"""All objects of modules that change while a process runs, and why each is one."""

MUTABLE = [
    "dict",
    "list",
    "set",
    "bytearray",
    "Counter",
    "defaultdict",
    "deque",
    "OrderedDict",
    "SimpleNamespace",
    "local",
    "WeakKeyDictionary",
    "WeakSet",
    "WeakValueDictionary",
]
MUTATORS = [
    "add",
    "append",
    "appendleft",
    "clear",
    "discard",
    "extend",
    "insert",
    "pop",
    "popitem",
    "popleft",
    "remove",
    "setdefault",
    "update",
]


def state_of_modules(package: Path) -> set[str]:
    """Return the module-level objects of a package that change, as ``file: name``.

    These are names that a function declares `global`, and containers and instances of classes that
    are not frozen. Constants, named in capitals, count only where something changes them.
    """
    trees = {
        str(file.relative_to(package)): ast.parse(file.read_text("utf-8"))
        for file in package.rglob("*.py")
    }
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    kinds = {*MUTABLE, *(n.name for n in nodes if isinstance(n, ast.ClassDef) and not _frozen(n))}
    changed = {name for node in nodes for name in _changed_by(node)}
    found: set[str] = set()
    for file, tree in trees.items():
        names = {
            name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names
        }
        for name, value in _assigned(tree.body):
            is_constant = name.isupper() and name not in changed
            if not is_constant and name != "__all__" and _is_mutable(value, kinds):
                names.add(name)
        found |= {f"{file}: {name}" for name in names}
    return found


def _assigned(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    """Yield name and value of the assignments of a module, also within `if`, `try` and `with`."""
    for node in body:
        if isinstance(node, ast.Assign):
            yield from ((t.id, node.value) for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            yield node.target.id, node.value
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            for part in ("body", "orelse", "finalbody"):
                yield from _assigned(getattr(node, part, []))


def _is_mutable(value: ast.expr, kinds: set[str]) -> bool:
    if isinstance(value, (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)):
        return True
    if not isinstance(value, ast.Call):
        return False
    function = value.func.value if isinstance(value.func, ast.Subscript) else value.func
    return ast.unparse(function).rpartition(".")[2] in kinds


def _frozen(node: ast.ClassDef) -> bool:
    bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    decorators = " ".join(map(ast.unparse, node.decorator_list))
    return "frozen=True" in decorators or bool(bases & {"NamedTuple", "Enum", "Action"})


def _changed_by(node: ast.AST) -> Iterator[str]:
    """Yield names of objects that a statement changes in place."""
    target: ast.AST | None = None
    if isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
        target = node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        target = node.func.value if node.func.attr in MUTATORS else None
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Attribute):
        yield target.attr


def test_state_of_modules_is_little() -> None:
    assert state_of_modules(PACKAGE) == set(STATE)
    assert len(STATE) <= 10


@pytest.mark.parametrize(
    ("statement", "names"),
    [
        ("cache = {}", {"cache"}),
        ("cache: dict[str, int] = {}", {"cache"}),
        ("if True:\n    seen = set[str]()", {"seen"}),
        ("seen = weakref.WeakSet()", {"seen"}),
        ("class A: pass\na = A()", {"a"}),
        ("n = 0\ndef f():\n    global n\n    n += 1", {"n"}),
        ("TABLE = {}\ndef f(): TABLE['x'] = 1", {"TABLE"}),
        ("TABLE = []\ndef f(): TABLE.append(1)", {"TABLE"}),
        ("from b import TABLE\ndef f(): del TABLE['x']", set()),
        ("TABLE = {'x': 1}\ndef f(): return TABLE['x']", set()),
        ("@dataclass(frozen=True)\nclass A: pass\na = A()", set()),
        ("_lock = threading.RLock()", set()),
        ("T = TypeVar('T')\n__all__ = ['a']\nn: int = 0", set()),
        ("def f():\n    cache = {}", set()),
    ],
)
def test_planted_state_is_found(tmp_path: Path, statement: str, names: set[str]) -> None:
    package = _package(tmp_path)
    _write(package, "models/a.py", statement)
    assert state_of_modules(package) == {f"models/a.py: {name}" for name in names}


def test_folders_are_small() -> None:
    folders = {file.parent for part in ("fastgen", "tests") for file in (ROOT / part).rglob("*.py")}
    for folder in sorted(folders - {ROOT / "tests" / "support"}):
        modules = [file.name for file in folder.glob("*.py") if file.name != "__init__.py"]
        assert len(modules) <= MOST_FILES, f"{folder.relative_to(ROOT)}: {len(modules)} modules"


def test_context_variables_are_few() -> None:
    trees = [ast.parse(file.read_text("utf-8")) for file in PACKAGE.rglob("*.py")]
    made = [
        ast.unparse(node)
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "ContextVar"
    ]
    assert len(made) <= CONTEXT_VARIABLES, made


IMPORTED = """
import json, sys, torch
before = set(sys.modules)
import fastgen
print(json.dumps(sorted(set(sys.modules) - before)))
"""

MOST_MODULES = 50
"""Modules that `import fastgen` imports after torch. With 43 it takes 2% of torch's import."""


def test_import_is_cheap_and_imports_no_toolkit() -> None:
    modules = json.loads(_python(IMPORTED))
    assert not {name.split(".")[0] for name in modules} & set(TOOLKITS), modules
    assert len(modules) <= MOST_MODULES, modules


def test_import_does_not_need_torch() -> None:
    assert (
        _python("import sys, fastgen; fastgen.status(); print('torch' in sys.modules)") == "False\n"
    )


def _python(code: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FASTGEN")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **kept,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
