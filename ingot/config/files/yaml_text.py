"""Reads YAML from untrusted files: limited in size and depth, without aliases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ingot.config.files.json_text import read_text

_MOST_LEVELS = 8


class YamlError(ValueError):
    """Not YAML, or beyond a limit; the text says why."""


def load_yaml(path: Path) -> Any:
    """The value in a YAML file.

    Raises:
        YamlError: it is not YAML, not UTF-8, too large or too deep, or has aliases.
        OSError: it cannot be read.
    """
    try:
        return yaml.load(read_text(path), _PlainLoader)
    except (yaml.YAMLError, ValueError) as error:
        raise YamlError(str(error)) from None


class _PlainLoader(yaml.SafeLoader):
    """YAML of few levels and without aliases, with which a short text can mean a huge value."""

    levels = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        fault = f"nested more than {_MOST_LEVELS} levels deep" if self.levels == _MOST_LEVELS else None
        fault = "aliases are not supported" if self.check_event(yaml.AliasEvent) else fault
        if fault is not None:
            raise yaml.composer.ComposerError(None, None, fault, self.peek_event().start_mark)
        self.levels += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.levels -= 1
