"""Which functions of the package some files outside it call to register something, read from their source.

registrations(Path("dummy_scheme.py"))    # {"ingot.quant.schemes.scheme_registry.register_scheme"}
"""

from __future__ import annotations

import ast
from pathlib import Path

HERE = Path(__file__).parent


def registrations(*names: str) -> set[str]:
    """Dotted names of the registering functions that files of this folder call."""
    return {name for file in names for name in _calls(ast.parse((HERE / file).read_text()))}


def touched_files(*names: str) -> int:
    """A seam's own files, and the package's modules that they register in."""
    return len(names) + len({name.rpartition(".")[0] for name in registrations(*names)})


def patches(*names: str) -> list[str]:
    """Where files of this folder change the package otherwise: by setattr, or by storing into what they
    import from it.
    """
    return [f"{file}:{line}" for file in names for line in _patches(ast.parse((HERE / file).read_text()))]


def _imported(tree: ast.Module) -> dict[str, str]:
    """Local name → dotted name of everything from the package."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ingot":
            found |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
        if isinstance(node, ast.Import):
            found |= {(one.asname or one.name): one.name for one in node.names if "ingot" in one.name}
    return found


def _calls(tree: ast.Module) -> set[str]:
    known = _imported(tree)
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_name(node.func)}
    return {known[name] for name in called if name in known and name.startswith("register")}


def _is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Name)


def _patches(tree: ast.Module) -> list[int]:
    known = _imported(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            found.append(node.lineno)
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            root: ast.expr = node
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            if isinstance(root, ast.Name) and root.id in known:
                found.append(node.lineno)
    return found
