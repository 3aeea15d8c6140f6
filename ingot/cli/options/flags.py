"""Parameters that several verbs share, and dataclasses whose fields become flags."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from ingot.config.quantization.scheme_table import sample_free_schemes

RARELY = "Rarely needed"
DTYPES = ("auto", "fp16", "bf16", "fp32")
HALF_DTYPES = "or encoder=DTYPE,decoder=DTYPE for a model with an encoder"


def option(help: str, *names: str, panel: str | None = None, shown: str | bool = True, **rest: Any) -> Any:
    """``typer.Option``: ``panel`` is where the help lists it, ``shown`` what it says of the default."""
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=shown, **rest)


ENGINE_HELP = "An engine folder, a checkpoint folder or a Hugging Face id."
EngineOrCheckpoint = typer.Argument(help=ENGINE_HELP, metavar="ENGINE_OR_CHECKPOINT", show_default=False)
EnginePath = Annotated[str, typer.Argument(help=ENGINE_HELP, metavar="ENGINE")]
EngineFolder = Annotated[Path, typer.Argument(help="An engine folder.", metavar="ENGINE")]
CHECKPOINT = typer.Argument(
    help="A checkpoint folder, a GGUF file or a Hugging Face id.", metavar="CHECKPOINT", show_default=False
)
Checkpoint = Annotated[str, CHECKPOINT]
Device = Annotated[str | None, option("auto, cuda, cuda:N or cpu.", shown="auto")]
_QUANT = (
    f"Quantize a checkpoint on load: {', '.join(sample_free_schemes())}, FILE.yaml; an engine keeps its own."
)
Quant = Annotated[str | None, option(_QUANT, shown="none")]
Revision = Annotated[str | None, option("Branch, tag or commit of a Hugging Face id.", panel=RARELY)]
Threads = Annotated[
    int | None,
    option(
        "CPU threads; lower it when several processes share the same cores.",
        shown="PyTorch's choice",
        panel=RARELY,
        min=1,
    ),
]
Where = Annotated[
    list[str] | None,
    option(
        "Only records whose field has this value; may be repeated.",
        shown=False,
        panel=RARELY,
        metavar="FIELD=VALUE",
    ),
]
SkipBad = Annotated[
    bool, option("Skip bad lines of the data instead of refusing it.", "--skip-bad", panel=RARELY)
]
PromptTokens = Annotated[int, option("Tokens per prompt.")]
NewTokens = Annotated[int, option("Tokens generated per prompt.")]
AsJson = Annotated[bool, option("Print JSON instead of text.", "--json")]


def writable_file(value: str | None) -> str | None:
    """The file, checked to be writable before anything is computed."""
    if value is None:
        return None
    if value == "-":
        raise typer.BadParameter("it takes a file; --json prints to stdout")
    path = Path(value)
    is_new = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8"):
            pass
        if is_new:
            path.unlink()  # nothing is left where the work fails
    except OSError as error:
        raise typer.BadParameter(f"cannot be written: {error}") from None
    return value


JsonFile = Annotated[
    str | None,
    option("Write every figure to a file as JSON.", "--json-file", metavar="FILE", callback=writable_file),
]


def field_pairs(where: Sequence[str] | None) -> list[tuple[str, str]]:
    """The pairs of ``--where``."""
    pairs = [one.partition("=") for one in where or ()]
    bad = ["".join(pair) for pair in pairs if not all(pair)]
    if bad:
        raise typer.BadParameter(f"{bad[0]}; it takes FIELD=VALUE", param_hint="--where")
    return [(field, value) for field, _, value in pairs]


def given(**values: Any) -> dict[str, Any]:
    """The values that are not None: the callee's defaults stand for the others."""
    return {name: value for name, value in values.items() if value is not None}


def given_of(flags: Any, *without: str) -> dict[str, Any]:
    """``given`` of a dataclass's fields, except for those named."""
    return given(**{name: value for name, value in vars(flags).items() if name not in without})


def flags_for(
    verb: Callable[..., None],
    name: str,
    flags: Sequence[inspect.Parameter],
    pack: Callable[[dict[str, Any]], Any],
) -> Callable[..., None]:
    """The verb with these flags in place of its parameter ``name``; ``pack`` makes its value of theirs."""
    hints = typing.get_type_hints(verb, include_extras=True)
    own = [p for p in inspect.signature(verb).parameters.values() if p.name != name]

    @functools.wraps(verb)
    def with_flags(**values: Any) -> None:
        packed = pack({flag.name: values.pop(flag.name) for flag in flags})
        verb(**values, **{name: packed})

    parameters = [*(p.replace(annotation=hints[p.name]) for p in own), *flags]

    def is_rare(flag: inspect.Parameter) -> bool:
        options = getattr(flag.annotation, "__metadata__", ())
        return any(RARELY.lower() in (getattr(o, "rich_help_panel", None) or "").lower() for o in options)

    parameters = sorted((p.replace(kind=p.KEYWORD_ONLY) for p in parameters), key=is_rare)
    with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_flags.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_flags


def field_flags(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a verb's parameter of this name, a dataclass, by a flag per field."""

    def replaced(verb: Callable[..., None]) -> Callable[..., None]:
        kind = typing.get_type_hints(verb)[name]
        types = typing.get_type_hints(kind, include_extras=True)
        flags = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.default is MISSING else field.default,
                annotation=types[field.name],
            )
            for field in fields(kind)
        ]
        return flags_for(verb, name, flags, lambda values: kind(**values))

    return replaced


def set_threads(threads: int | None) -> None:
    """Apply ``--threads``."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
