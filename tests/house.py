"""What the house measures: lines, full folders, repeated names, private words, flags, walks.

    python -m tests.house
    python -m tests.house --root ../another-checkout --json

Everything is read from the source as text and syntax; nothing is imported. A **walk** follows one parameter:
from a function into each function of the package that it, or a local made from it, is an argument of, and on,
each function once. A *stay* is a change of file on the way there or back; *rooms* are the files entered.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

WALKS = {"load_engine": "folder", "Transcriber._transcribe": "source"}
PRIVATE_WORDS = re.compile(r"\b(told|heard|hears)\b", re.IGNORECASE)
FLAG = re.compile(r"(?<![-\w])--[a-z][a-z-]+")
FLAT = 20  # files of a folder that a reader takes in at a glance


@dataclass
class Module:
    """A source file: its dotted name, text and syntax."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @cached_property
    def definitions(self) -> dict[str, ast.FunctionDef]:
        """Functions and methods by qualified name; a class stands for its ``__init__``."""
        found: dict[str, ast.FunctionDef] = {}
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef):
                found[node.name] = node
            elif isinstance(node, ast.ClassDef):
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef):
                        found[f"{node.name}.{inner.name}"] = inner
                        if inner.name == "__init__":
                            found[node.name] = inner
        return found

    @cached_property
    def imported(self) -> dict[str, str]:
        """Dotted origins of imported names."""
        return {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }


@dataclass
class House:
    """The package under ``root``."""

    root: Path
    modules: dict[str, Module] = field(default_factory=dict)

    @classmethod
    def read(cls, root: Path) -> House:
        house = cls(root)
        for path in sorted((root / "ingot").rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            text = path.read_text(encoding="utf-8")
            house.modules[name] = Module(name, path, text, ast.parse(text))
        return house

    def lines(self) -> int:
        return sum(module.text.count("\n") for module in self.modules.values())

    def full_folders(self) -> dict[str, int]:
        """Folders with more files than ``FLAT``, ``__init__.py`` apart."""
        paths = [m.path.relative_to(self.root) for m in self.modules.values()]
        files = Counter(str(path.parent) for path in paths if path.stem != "__init__")
        return {folder: count for folder, count in sorted(files.items()) if count > FLAT}

    def repeated_files(self) -> dict[str, list[str]]:
        """File names that several folders have."""
        places = defaultdict(list)
        for module in self.modules.values():
            if not module.path.stem.startswith("__"):
                places[module.path.stem].append(str(module.path.parent.relative_to(self.root)))
        return {name: found for name, found in sorted(places.items()) if len(found) > 1}

    def repeated_classes(self) -> dict[str, list[str]]:
        """Public class names that several files define."""
        places = defaultdict(list)
        for module in self.modules.values():
            for node in module.tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(module.name)
        return {name: found for name, found in sorted(places.items()) if len(found) > 1}

    def private_words(self) -> int:
        return sum(len(PRIVATE_WORDS.findall(module.text)) for module in self.modules.values())

    def files_with_flags(self) -> list[str]:
        """Files outside ``cli/`` with a flag in a string, docstrings included."""
        return [
            module.name
            for module in self.modules.values()
            if not module.name.startswith("ingot.cli")
            and any(
                isinstance(node, ast.Constant) and isinstance(node.value, str) and FLAG.search(node.value)
                for node in ast.walk(module.tree)
            )
        ]

    def used_once(self) -> int:
        """Private functions of a module that are named once apart from their definition."""
        count = 0
        for module in self.modules.values():
            names = Counter(
                node.id if isinstance(node, ast.Name) else node.attr
                for node in ast.walk(module.tree)
                if isinstance(node, ast.Name | ast.Attribute)
            )
            count += sum(
                node.name.startswith("_") and not node.name.startswith("__") and names[node.name] == 1
                for node in ast.walk(module.tree)
                if isinstance(node, ast.FunctionDef)
            )
        return count

    def function(self, name: str) -> tuple[Module, str]:
        """Where a public function or method of this name is defined."""
        for module in self.modules.values():
            for qualified in module.definitions:
                if qualified == name:
                    return module, qualified
        raise LookupError(name)

    def walk(self, name: str, parameter: str) -> dict[str, int]:
        """Stays, rooms and functions of a parameter's walk."""
        module, qualified = self.function(name)
        walk = _Walk(self)
        walk.enter(module, qualified, {parameter})
        return {"stays": walk.stays, "rooms": len(walk.rooms), "functions": len(walk.entered)}

    def resolve(self, module: Module, call: ast.expr, owner: str) -> tuple[Module, str] | None:
        """The function of the package that a call names, where the source alone says so."""
        if isinstance(call, ast.Name):
            origin = module.imported.get(call.id)
            if origin is None:
                return (module, call.id) if call.id in module.definitions else None
            return self._defined(origin)
        if isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name):
            if call.value.id in ("self", "cls"):
                own = f"{owner}.{call.attr}"
                return (module, own) if own in module.definitions else None
            origin = module.imported.get(call.value.id)
            return None if origin is None else self._defined(f"{origin}.{call.attr}")
        return None

    def _defined(self, dotted: str) -> tuple[Module, str] | None:
        parts = dotted.split(".")
        for end in range(len(parts) - 1, 0, -1):
            module = self.modules.get(".".join(parts[:end]))
            name = ".".join(parts[end:])
            if module is not None:
                return (module, name) if name in module.definitions else None
        return None


@dataclass
class _Walk:
    house: House
    stays: int = 0
    rooms: set[str] = field(default_factory=set)
    entered: set[tuple[str, str]] = field(default_factory=set)

    def enter(self, module: Module, name: str, parameters: set[str]) -> None:
        self.entered.add((module.name, name))
        self.rooms.add(module.name)
        followed = set(parameters)
        for node in _in_order(module.definitions[name]):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                if _mentions(node.value, followed):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    followed |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
            elif isinstance(node, ast.Call):
                self._call(module, name, node, followed)

    def _call(self, module: Module, name: str, call: ast.Call, followed: set[str]) -> None:
        found = self.house.resolve(module, call.func, name.partition(".")[0])
        if found is None:
            return
        arguments = found[0].definitions[found[1]].args
        names = [a.arg for a in [*arguments.posonlyargs, *arguments.args] if a.arg not in ("self", "cls")]
        passed = [n for n, value in zip(names, call.args, strict=False) if _mentions(value, followed)]
        passed += [k.arg for k in call.keywords if k.arg is not None and _mentions(k.value, followed)]
        if passed and (found[0].name, found[1]) not in self.entered:
            away = found[0] is not module
            self.stays += away
            self.enter(*found, set(passed))
            self.stays += away


def _in_order(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """A function's nodes in the order of its text; calls inside an argument come before the call."""
    yield from sorted(
        (n for n in ast.walk(function) if hasattr(n, "end_lineno") and n is not function),
        key=lambda n: (n.end_lineno or 0, n.end_col_offset or 0, isinstance(n, ast.Assign)),  # type: ignore[attr-defined]
    )


def _mentions(node: ast.expr, names: set[str]) -> bool:
    return any(isinstance(n, ast.Name) and n.id in names for n in ast.walk(node))


def measures(root: Path) -> dict[str, object]:
    """All measures of a checkout, as JSON types."""
    house = House.read(root)
    architecture = root / "docs" / "architecture.md"
    tests = sorted((root / "tests").rglob("*.py"))
    return {
        "package_files": len(house.modules),
        "package_lines": house.lines(),
        "test_files": len(tests),
        "test_lines": sum(path.read_text(encoding="utf-8").count("\n") for path in tests),
        "architecture_lines": architecture.read_text(encoding="utf-8").count("\n"),
        "full_folders": house.full_folders(),
        "repeated_file_names": house.repeated_files(),
        "repeated_class_names": house.repeated_classes(),
        "private_words": house.private_words(),
        "files_with_flags_outside_cli": len(house.files_with_flags()),
        "private_functions_used_once": house.used_once(),
        "walks": {name: house.walk(name, parameter) for name, parameter in WALKS.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    here = Path(__file__).parent.parent
    parser.add_argument("--root", type=Path, default=here, help="a checkout; default: this one")
    parser.add_argument("--json", action="store_true", help="everything as JSON, names included")
    arguments = parser.parse_args()
    found = measures(arguments.root)
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        shown = len(value) if isinstance(value, dict) and name != "walks" else value
        print(f"{name.replace('_', ' '):32} {shown}")


if __name__ == "__main__":
    main()
