"""``ingot serve``: engines behind an OpenAI-compatible API."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli.console import stderr
from ingot.cli.flags import Device, Threads, field_flags, given, given_of, option
from ingot.cli.limits import Limits
from ingot.cli.page_flags import PANEL, PageFlags
from ingot.config.serve import ServeConfig
from ingot.errors import EngineError, RequestError

if TYPE_CHECKING:
    from ingot.serve.model import TextSide
    from ingot.serve.protocol import Load
    from ingot.web.process import PageProcess

_SERVER = "Server"
_KEY = "Key that clients must send; every route but /health asks for it."
_NAME = "Model name that clients use, one for each engine in order; may be repeated."
_WEB = "Serve a chat page beside the API, in a process of its own (needs the extra `web`)."
_UNPROVEN = "Serve an engine without a proof, or whose last `ingot verify` failed, and a checkpoint."


@dataclass(frozen=True)
class Address:
    """Fields of ``ServeConfig``; None: as the library has it."""

    host: Annotated[str | None, option("Address to listen on.", shown="127.0.0.1", panel=_SERVER)] = None
    port: Annotated[
        int | None, option("Port; 0 takes a free one.", shown="8000", panel=_SERVER, min=0, max=65535)
    ] = None
    max_queue: Annotated[
        int | None,
        option("Answers that may wait beside a full batch.", shown="256", panel=_SERVER, min=0),
    ] = None
    max_body: Annotated[
        int | None, option("Bytes of a request's body.", shown="8388608", panel=_SERVER, min=1024)
    ] = None
    max_unread: Annotated[
        int | None,
        option("Pieces that a slow client may leave unread.", shown="4096", panel=_SERVER, min=1),
    ] = None
    drain_seconds: Annotated[
        float | None,
        option("Time for answers under way after SIGTERM.", shown="30", panel=_SERVER, min=0),
    ] = None


@field_flags("limits")
@field_flags("page")
@field_flags("address")
def serve(
    engines: Annotated[
        list[str],
        typer.Argument(
            help="Engine folders, checkpoint folders or Hugging Face ids.",
            metavar="ENGINE",
            show_default=False,
        ),
    ],
    address: Address,
    limits: Limits,
    page: PageFlags,
    name: Annotated[list[str] | None, option(_NAME, shown="the folder's", panel=_SERVER)] = None,
    api_key: Annotated[
        str | None, option(_KEY, shown="none", panel=_SERVER, envvar="INGOT_API_KEY", show_envvar=True)
    ] = None,
    web: Annotated[bool, option(_WEB, "--web", panel=PANEL)] = False,
    unproven: Annotated[bool, option(_UNPROVEN, "--unproven", panel=_SERVER)] = False,
    device: Device = None,
    threads: Threads = None,
) -> None:
    """Serve engines over HTTP with an OpenAI-compatible API, one process per engine.

    Ctrl-C or SIGTERM stops accepting, lets answers under way finish, and exits.
    """
    check_key(api_key)
    config = ServeConfig(**given_of(address))
    _check_page(page, web)
    sides = _text_sides(engines, name)
    for side in sides:
        _check_proof(side, unproven)
    loads = {side.name: _load(side, limits, device, threads) for side in sides}
    import asyncio

    from ingot.serve.server import serve as run

    with contextlib.ExitStack() as beside:

        def ready(url: str) -> None:
            stderr().print(f"serving {', '.join(loads)} on {url}", markup=False)
            if web:
                beside.enter_context(_page_process(page, url, api_key))

        if asyncio.run(run(sides, loads, config, api_key=api_key, on_ready=ready)):
            raise KeyboardInterrupt


def check_key(key: str | None) -> None:
    """Refuse a key that no HTTP header can carry."""
    if key is not None and (not key.isascii() or not key.isprintable() or not key.strip()):
        raise typer.BadParameter("the key must be printable ASCII", param_hint="--api-key")


def _check_page(page: PageFlags, web: bool) -> None:
    """What would keep the page from starting is known before engines are loaded."""
    if web:
        from ingot.web.process import check_page

        check_page(page.config("http://127.0.0.1"))  # the server's own, which is not known yet
    elif page != PageFlags():
        raise typer.BadParameter("flags of the page need --web", param_hint="--web")


def _page_process(page: PageFlags, url: str, key: str | None) -> contextlib.closing[PageProcess]:
    from ingot.web.process import PageProcess

    return contextlib.closing(PageProcess(page.config(url), key))


def _text_sides(engines: list[str], names: list[str] | None) -> list[TextSide]:
    """What is known of each model, under the names that clients use."""
    from ingot.checkpoint.hub import resolve_checkpoint
    from ingot.engine.manifest import is_engine

    try:
        from ingot.serve.model import TextSide
        from ingot.serve.server import serve  # noqa: F401
    except ModuleNotFoundError as error:
        raise EngineError(
            "a package that the server needs is not installed",
            seen=error.name,
            fix="pip install 'ingot[serve]'",
        ) from None

    paths = [Path(one) if is_engine(Path(one)) else resolve_checkpoint(one) for one in engines]
    found = names or [
        path.resolve().name if Path(one).exists() else one for one, path in zip(engines, paths, strict=True)
    ]
    if len(found) != len(engines):
        raise RequestError("one name for each engine", seen=len(found), allowed=len(engines), flag="--name")
    if len(set(found)) != len(found):
        raise RequestError("two engines have the same name", seen=found, flag="--name")
    return [TextSide.read(one, path) for one, path in zip(found, paths, strict=True)]


def _check_proof(side: TextSide, unproven: bool) -> None:
    if side.doubt is not None and not unproven:
        raise EngineError(
            f"{side.name} is not served: {side.doubt}",
            fix="prove it with `ingot build` and `ingot verify`, or add --unproven",
        )


def _load(side: TextSide, limits: Limits, device: str | None, threads: int | None) -> Load:
    from ingot.serve.protocol import Load

    values = limits.arguments()  # which says now what is out of range
    runtime = values.pop("runtime").to_json() if "runtime" in values else {}
    path = str(side.folder.resolve())
    return Load(path, runtime=runtime, **values, **given(device=device, threads=threads))
