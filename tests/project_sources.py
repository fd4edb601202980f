"""The project's source files as tests read them: modules, what they import, and the sizes of their functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("model", "kernels", "sim", "calibrate", "k3sim")


@dataclass(frozen=True, kw_only=True)
class Import:
    """One name that a file imports, absolute, with the line; ``for_types``: under ``if TYPE_CHECKING``."""

    name: str
    line: int
    for_types: bool


@cache
def sources() -> dict[str, Path]:
    """Module name -> file, of every file that installs."""
    return {
        module_of(path): path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))
    }


def module_of(path: Path) -> str:
    """``sim/engine.py`` installs as ``k3sim.sim.engine``, ``sim/__init__.py`` as ``k3sim.sim``."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts if parts[0] == "k3sim" else ["k3sim", *parts])


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def imports(path: Path) -> tuple[Import, ...]:
    """Everything that a file imports, wherever in the file it does so."""
    return tuple(_imports(tree(path), path, for_types=False))


def _imports(node: ast.AST, path: Path, *, for_types: bool) -> Iterator[Import]:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for child in node.body:
            yield from _imports(child, path, for_types=True)
        for child in node.orelse:
            yield from _imports(child, path, for_types=for_types)
        return
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(name=alias.name, line=node.lineno, for_types=for_types)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{path.relative_to(ROOT)} line {node.lineno}: imports are absolute"
        assert node.module is not None
        for alias in node.names:
            # "from k3sim.kernels import work" imports the module k3sim.kernels.work
            yield Import(name=f"{node.module}.{alias.name}", line=node.lineno, for_types=for_types)
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, path, for_types=for_types)


def file_graph() -> dict[str, set[str]]:
    """Module -> modules of the project that it imports, inside functions too, but not for types alone."""
    known = sources()
    return {
        module: {
            found
            for one in imports(path)
            if not one.for_types and (found := nearest(one.name)) is not None and found != module
        }
        for module, path in known.items()
    }


def nearest(name: str) -> str | None:
    """The module of the project that an imported name is, or stands in; None for another package's."""
    known = sources()
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or None


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one node (Tarjan's algorithm), each sorted."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            component = sorted(stack[at:])
            del stack[at:]
            if len(component) > 1:
                found.append(component)

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return sorted(found)


def functions(path: Path) -> Iterator[tuple[str, int, bool]]:
    """(name, lines, whether it is device code) of every function of a file.

    Device code is what the kernel language compiles: decorated ``cute.kernel``, ``cute.jit``, ``dsl_user_op``.
    """
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = " ".join(ast.unparse(one) for one in node.decorator_list)
            device = any(word in decorators for word in ("cute.kernel", "cute.jit", "dsl_user_op"))
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1, device
