"""The house rules that imports and file sizes must keep."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("attention", "driver", "parallel", "scheduler", "workers")
OURS = {*FOLDERS, "quadriga", "tests", "scripts"}

# What each folder may import of ours: whole folders, or single modules of one.
ALLOWED = {
    "scheduler": {"scheduler"},
    "parallel": {"parallel"},
    "attention": {"attention"},
    "workers": {
        *("workers", "parallel", "attention"),
        *("scheduler.request", "scheduler.params", "scheduler.plan", "scheduler.frame"),
        "scheduler.logprobs",
    },
    "driver": {"driver", "workers", "scheduler", "parallel", "attention"},
    "quadriga": {"driver", "scheduler.params"},
}
SOURCES = [*sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")), ROOT / "quadriga.py"]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports_of(path: Path) -> set[str]:
    return set(imported_modules(path.read_text(encoding="utf-8"), list(path.relative_to(ROOT).parts[:-1])))


def imported_modules(code: str, package: list[str]) -> Iterator[str]:
    """Every module that a file imports anywhere: at the top, inside functions, for type checking, by name."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                # `from scheduler import plan` imports a module of that package, `from x import Name` only x.
                inner = ROOT.joinpath(*module.split("."), f"{alias.name}.py")
                yield f"{module}.{alias.name}" if inner.is_file() else module
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ("import_module", "__import__"):
                yield str(node.args[0].value)


def is_within(module: str, allowed: set[str]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in allowed)


def test_imports_of_every_form_are_seen() -> None:
    """The rule below is only as good as its eyes."""
    code = (
        "from typing import TYPE_CHECKING\nimport a.b as c, d\nfrom scheduler import plan, SOMETHING\n"
        "if TYPE_CHECKING:\n    from e import F\ndef g():\n    import h\n    from i.j import k\n"
        "import importlib\nimportlib.import_module('l.m')\n__import__('n')\n"
    )
    wanted = {"typing", "a.b", "d", "scheduler.plan", "scheduler", "e", "h", "i.j", "importlib", "l.m", "n"}
    assert set(imported_modules(code, [])) == wanted
    relative = "from . import text\nfrom .engine import Engine\nfrom ..scheduler import plan"
    assert set(imported_modules(relative, ["driver"])) == {"driver.text", "driver.engine", "scheduler.plan"}


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_run_downhill(path: Path) -> None:
    house = path.relative_to(ROOT).parts[0].removesuffix(".py")
    ours = {module for module in imports_of(path) if module.split(".")[0] in OURS}
    uphill = {module for module in ours if not is_within(module, ALLOWED[house])}
    assert not uphill, f"{name_of(path)} must not import {sorted(uphill)}"


@pytest.mark.parametrize("path", sorted((ROOT / "scheduler").rglob("*.py")), ids=name_of)
def test_scheduler_decides_from_its_arguments_alone(path: Path) -> None:
    """No device, no cluster, no clock, no chance, no network, no files, no threads."""
    banned = {"torch", "ray", "time", "datetime", "random", "secrets", "socket", "zmq", "os", "pathlib", "threading"}
    found = {module for module in imports_of(path) if module.split(".")[0] in banned}
    assert not found
    calls = {node.func.id for node in ast.walk(ast.parse(path.read_text())) if _calls_a_name(node)}
    assert not calls & {"open", "print", "input", "hash"}


def _calls_a_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


def test_the_driver_starts_without_torch_and_transformers() -> None:
    modules = [
        name_of(path).removesuffix(".py").replace("/", ".")
        for path in [*(ROOT / "driver").rglob("*.py"), ROOT / "quadriga.py"]
        if path.name != "__init__.py"
    ]
    assert "driver.cluster" in modules  # the one that brings in ray
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'transformers'} & set(sys.modules)\n"
        "    assert not heavy, f'{name} imports {heavy}'\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


def test_the_face_shows_what_it_says() -> None:
    import quadriga

    assert set(quadriga.__all__) >= {"LLM", "SamplingParams"}
    assert all(hasattr(quadriga, name) for name in quadriga.__all__)
