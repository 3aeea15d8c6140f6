"""Flags of ``ingot build`` for the files of a model that is published in parts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli.options.flags import option

if TYPE_CHECKING:
    from ingot.checkpoint.minigpt4_files import MiniGPT4Files

_PANEL = "MiniGPT-4 from its official files (docs/vision.md)"
_MODELS = ("minigpt4",)
_NEEDED = ("llm", "vit", "projector")


def _file(help: str, shown: str | bool = False) -> object:
    return option(help, panel=_PANEL, shown=shown, exists=True, dir_okay=False, metavar="FILE")


_LLM = option(
    "A LLaMA or Vicuna folder.", panel=_PANEL, shown=False, exists=True, file_okay=False, metavar="FOLDER"
)


@dataclass(frozen=True)
class PartFlags:
    """Files in place of CHECKPOINT; the keys of a YAML file that names them."""

    model: Annotated[
        str | None, option("minigpt4: the flags below name its files.", panel=_PANEL, shown=False)
    ] = None
    llm: Annotated[Path | None, _LLM] = None
    vit: Annotated[Path | None, _file("The ViT, such as eva_vit_g.pth.")] = None
    qformer: Annotated[
        Path | None, _file("The Q-Former, such as blip2_pretrained_flant5xxl.pth.", "the Llama-2 variant")
    ] = None
    projector: Annotated[Path | None, _file("The projector, such as pretrained_minigpt4_7b.pth.")] = None

    def checkpoint(self, given: str | None) -> str | MiniGPT4Files:
        """CHECKPOINT, or the files in its place; exactly one must be given."""
        named = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if not named:
            if given is None:
                raise typer.BadParameter(
                    "missing: a folder, an id, or --model with its files", param_hint="CHECKPOINT"
                )
            return given
        if self.model is None:
            raise typer.BadParameter("it needs --model minigpt4", param_hint=f"--{named[0]}")
        if self.model not in _MODELS:
            raise typer.BadParameter(f"{self.model}; allowed: {', '.join(_MODELS)}", param_hint="--model")
        if given is not None:
            what = f"it takes the place of CHECKPOINT, but {given} is given"
            raise typer.BadParameter(what, param_hint="--model")
        absent = [f"--{name}" for name in _NEEDED if name not in named]
        if absent or self.llm is None or self.vit is None or self.projector is None:
            raise typer.BadParameter(f"it needs {', '.join(absent)}", param_hint="--model minigpt4")
        from ingot.checkpoint.minigpt4_files import MiniGPT4Files

        return MiniGPT4Files(self.llm, self.vit, self.projector, self.qformer)
