"""Names of GGUF files: which are parts of one model, and which type of weights they have."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from ingot.config.build_config import MANIFEST_FILE

SUFFIX = ".gguf"
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.I | re.S)
_ID = re.compile(r"(?P<repo>\w[\w.-]*/[\w.-]+)(?::(?P<kind>[\w.-]+)|/(?P<file>.+\.gguf))", re.I)
_TYPE = r"(?:^|[-_.]){}$"
_NO_MODEL = ("mmproj", "imatrix")  # a picture encoder's, and statistics, beside a model's files


@dataclass(frozen=True)
class FilePart:
    """One part of a model, by its name: ``number`` from 1 to ``count``."""

    stem: str
    number: int
    count: int
    suffix: str

    def names(self) -> list[str]:
        """Of all parts, in order."""
        return [f"{self.stem}-{n:05d}-of-{self.count:05d}{self.suffix}" for n in range(1, self.count + 1)]


@dataclass(frozen=True)
class GgufId:
    """Files of a repository on the hub: one by its name, those of a type of weights, or (neither) the only
    model.
    """

    repo: str
    kind: str = ""
    file: str = ""

    @classmethod
    def of(cls, name: str) -> GgufId | None:
        """``org/name:Q4_K_M`` or ``org/name/file.gguf``; None: it is neither."""
        found = _ID.fullmatch(name)
        if found is None or ".." in PurePosixPath(found["file"] or "").parts:
            return None
        return cls(found["repo"], found["kind"] or "", found["file"] or "")

    @property
    def text(self) -> str:
        """As it was given."""
        return self.repo + (f":{self.kind}" if self.kind else f"/{self.file}" if self.file else "")

    def chosen(self, names: Iterable[str]) -> list[str] | None:
        """Its files among ``names``, of parts all that there should be; None: not exactly one model's."""
        models = models_of(names)
        if self.file:
            models = [files for files in models if self.file in files]
        elif self.kind:
            models = of_type(models, self.kind)
        return models[0] if len(models) == 1 else None


def is_suffixed(name: str) -> bool:
    return name.lower().endswith(SUFFIX)


def part_of(name: str) -> FilePart | None:
    """What a file's name says of its parts; None: it is no part's."""
    found = _PART.fullmatch(name)
    if found is None:
        return None
    number, count = int(found["number"]), int(found["count"])
    return FilePart(found["stem"], number, count, name[-len(SUFFIX) :]) if 1 <= number <= count else None


def models_of(names: Iterable[str]) -> list[list[str]]:
    """The files of each GGUF model among ``names``, in order; of parts all that there should be."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if is_suffixed(name) and not PurePosixPath(name).name.lower().startswith(_NO_MODEL):
            part = part_of(name)
            files = [name] if part is None else part.names()
            models.setdefault(files[0], files)
    return list(models.values())


def only_gguf(names: Iterable[str]) -> bool:
    """Whether files hold a GGUF model, and no weights in another format, nor an engine."""
    known = set(names)
    others = any(name.endswith(".safetensors") or name.startswith("pytorch_model") for name in known)
    return not others and MANIFEST_FILE not in known and bool(models_of(known))


def of_type(models: Iterable[list[str]], kind: str) -> list[list[str]]:
    """The models whose names end in a type of weights, such as ``Q4_K_M``; case does not matter."""
    ending = re.compile(_TYPE.format(re.escape(kind)), re.I)
    return [files for files in models if ending.search(_stem(files[0]))]


def _stem(name: str) -> str:
    part = part_of(name)
    return PurePosixPath(part.stem if part is not None else name[: -len(SUFFIX)]).name
