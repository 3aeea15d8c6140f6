"""``ingot serve``: engines behind an OpenAI-compatible API."""

from __future__ import annotations

import contextlib
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.cli.opening import check_key, expect_model, server_packages
from ingot.cli.options.flags import Threads, field_flags, given, given_of, option
from ingot.cli.options.limit_flags import PANEL as LIMITS
from ingot.cli.options.limit_flags import Limits
from ingot.cli.options.serve_file import ServeFile, behind, flag_types, read_serve_file
from ingot.cli.terminal.console import stderr
from ingot.cli.web import PANEL, PageFlags
from ingot.config.server_config import ServeConfig
from ingot.errors import RequestError

if TYPE_CHECKING:
    from ingot.serve.engine_calls.blank_process import BlankProcess
    from ingot.serve.engine_calls.process_protocol import LoadEngine
    from ingot.serve.served_model import TextSide

_SERVER = "Server"
_KEY = "Key that clients must send; every route but /health asks for it."
_NAME = "Model name that clients use, one for each engine in order; may be repeated."
_DEVICE = "auto, cuda, cuda:N or cpu: one for all engines, or repeated, one for each in order."
_HOSTS = "Name by which clients may reach the server and its page beside localhost; may be repeated."
_PRIVATE = "Reuse beginnings of prompts only among requests of one cache_salt (a hit is faster, and tells)."
_CLOSED = "Objects of a JSON schema have no properties but those it names, unless additionalProperties says."
_CONFIG = "Flags, and engines with flags of their own; the command line overrides it (docs/serving.md)."
_CHUNK = "Tokens of one prompt per step while others decode; more shorten its TTFT and slow their steps."
_CHUNKS = "64 of prompts over 2048 tokens on a GPU, 16 on a CPU"
_SHARE = "Share of a step that a long prompt may take while others decode; a larger one shortens its TTFT."
_WEB = "Serve a chat page beside the API, in a process of its own (needs the extra `web`)."
_UNPROVEN = "Serve an engine without a proof, or whose last `ingot verify` failed, and a checkpoint."


@dataclass(frozen=True)
class Address:
    """Fields of ``ServeConfig``; None: its default."""

    host: Annotated[str | None, option("Address to listen on.", shown="127.0.0.1", panel=_SERVER)] = None
    port: Annotated[
        int | None,
        option(
            "Port; 0 takes a free one.", shown="8000", panel=_SERVER, min=0, max=65535,
            envvar="INGOT_PORT", show_envvar=True,
        ),
    ] = None  # fmt: skip
    allowed_host: Annotated[list[str] | None, option(_HOSTS, shown="none", panel=_SERVER)] = None
    private_prefixes: Annotated[bool, option(_PRIVATE, "--private-prefixes", panel=_SERVER)] = False
    closed_objects: Annotated[bool, option(_CLOSED, "--closed-objects", panel=_SERVER)] = False
    max_queue: Annotated[
        int | None,
        option("Answers that may wait beside a full batch.", shown="256", panel=_SERVER, min=0),
    ] = None
    max_body: Annotated[
        int | None, option("Bytes of a request's body.", shown="8388608", panel=_SERVER, min=1024)
    ] = None
    max_audio: Annotated[
        int | None, option("Bytes of a recording.", shown="26214400", panel=_SERVER, min=1024)
    ] = None
    max_audio_seconds: Annotated[
        float | None, option("Seconds of a recording.", shown="7200", panel=_SERVER, min=1)
    ] = None
    max_unread: Annotated[
        int | None,
        option("Pieces that a slow client may leave unread.", shown="4096", panel=_SERVER, min=1),
    ] = None
    drain_seconds: Annotated[
        float | None,
        option("Time for unfinished answers after SIGTERM.", shown="30", panel=_SERVER, min=0),
    ] = None


@dataclass(frozen=True)
class ServeFlags:
    """What is served, and how; None: the library's default."""

    name: Annotated[
        list[str] | None,
        option(
            _NAME, shown="the folder's", panel=_SERVER, envvar="INGOT_MODEL_NAME", show_envvar=True,
        ),
    ] = None  # fmt: skip
    api_key: Annotated[
        str | None, option(_KEY, shown="none", panel=_SERVER, envvar="INGOT_API_KEY", show_envvar=True)
    ] = None
    web: Annotated[bool, option(_WEB, "--web", panel=PANEL)] = False
    unproven: Annotated[bool, option(_UNPROVEN, "--unproven", panel=_SERVER)] = False
    device: Annotated[list[str] | None, option(_DEVICE, shown="auto")] = None
    threads: Threads = None
    prompt_chunk: Annotated[int | None, option(_CHUNK, shown=_CHUNKS, panel=LIMITS, min=1)] = None
    prompt_share: Annotated[float | None, option(_SHARE, shown="none", panel=LIMITS, min=0.001, max=1.0)] = (
        None
    )


@dataclass(frozen=True)
class Own:
    """What an engine in the file may set for itself, beside limits."""

    name: Annotated[str | None, option(_NAME)] = None
    unproven: Annotated[bool, option(_UNPROVEN)] = False
    device: Annotated[str | None, option(_DEVICE)] = None
    threads: Threads = None
    prompt_chunk: Annotated[int | None, option(_CHUNK, min=1)] = None
    prompt_share: Annotated[float | None, option(_SHARE, min=0.001, max=1.0)] = None


@field_flags("limits")
@field_flags("page")
@field_flags("serving")
@field_flags("address")
def serve(
    address: Address,
    serving: ServeFlags,
    page: PageFlags,
    limits: Limits,
    engines: Annotated[
        list[str] | None,
        typer.Argument(
            help="Engine folders, checkpoint folders or Hugging Face ids; without any, those of --config.",
            metavar="ENGINE",
            show_default=False,
        ),
    ] = None,
    config: Annotated[Path | None, option(_CONFIG, shown="none", panel=_SERVER, metavar="FILE.yaml")] = None,
) -> None:
    """Serve engines over HTTP with an OpenAI-compatible API, one process per engine.

    Ctrl-C or SIGTERM stops accepting, lets unfinished answers finish, and exits.
    """
    file = ServeFile()
    if config is not None:
        of_all = flag_types(Address, ServeFlags, PageFlags, Limits)
        file = read_serve_file(config, of_all, flag_types(Own, Limits))
    models = _models(engines, serving, limits, file)
    page, wanted = behind(page, file.values), behind(serving, file.values)
    key = wanted.api_key
    check_key(key)
    served = ServeConfig(**given_of(behind(address, file.values)))
    if wanted.web:
        from ingot.adapters.web.page_process import check_page

        check_page(page.config("http://127.0.0.1", ()))  # the server's own URL is not known yet
    elif page != PageFlags():
        raise typer.BadParameter("flags of the page need --web", param_hint="--web")
    for model in models:
        expect_model(model.path)
    with contextlib.ExitStack() as beside:
        _end_at_sigterm(beside)
        started = _started([model.device for model in models], beside)
        sides = _text_sides(models)
        for side, model in zip(sides, models, strict=True):
            side.check_proof(unproven=model.unproven, allow="add --unproven")
        loads = {side.name: _load(side, model) for side, model in zip(sides, models, strict=True)}
        blanks = dict(zip(loads, started, strict=True))
        import asyncio

        from ingot.serve.server import serve as run

        def ready(url: str) -> None:
            stderr().print(f"serving {', '.join(loads)} on {url}", markup=False)
            if wanted.web:
                from ingot.adapters.web.page_process import PageProcess

                process = PageProcess(page.config(url, served.allowed_host), key)
                beside.enter_context(contextlib.closing(process))

        if asyncio.run(run(sides, loads, served, api_key=key, blanks=blanks, on_ready=ready)):
            raise KeyboardInterrupt


@dataclass(frozen=True)
class ServedEngine:
    """An engine to serve; ``prompt``: fields of ``RuntimeConfig`` that only a server has flags for."""

    path: str
    name: str | None
    device: str | None
    threads: int | None
    prompt: dict[str, Any]
    unproven: bool
    limits: Limits


def _models(
    engines: list[str] | None, serving: ServeFlags, limits: Limits, file: ServeFile
) -> list[ServedEngine]:
    """The engines of the command line or, without any, of the file."""
    found = [(path, {}) for path in engines] if engines else file.engines
    if not found:
        raise RequestError(
            "no engine is named", field="engine", fix="ENGINE, or engines: in --config FILE.yaml"
        )
    names = _one_each(serving.name, file.values.get("name"), [own.get("name") for _, own in found], "name")
    devices = _one_each(
        serving.device, file.values.get("device"), [own.get("device") for _, own in found], "device"
    )
    models = []
    for (path, own), name, device in zip(found, names, devices, strict=True):
        values = file.values | own
        mine = behind(serving, values)
        limited = behind(limits, values)
        prompt = given(prompt_chunk=mine.prompt_chunk, prompt_share=mine.prompt_share)
        models.append(ServedEngine(path, name, device, mine.threads, prompt, mine.unproven, limited))
    return models


def _one_each(
    given_values: list[str] | None, of_file: list[str] | None, own: list[str | None], flag: str
) -> list[str | None]:
    """One value for each engine: the command line's, else its own, else the file's for all."""
    every: list[list[str | None]] = []
    for listed in (given_values, of_file):
        if listed and len(listed) != len(own) and not (flag == "device" and len(listed) == 1):
            what = f"one {flag} for each engine"
            raise RequestError(what, seen=len(listed), allowed=len(own), field=flag)
        every.append([*listed] * (len(own) // len(listed)) if listed else [None] * len(own))
    return [first or mine or last for first, mine, last in zip(every[0], own, every[1], strict=True)]


def _end_at_sigterm(beside: contextlib.ExitStack) -> None:
    """Until the server has handlers of its own SIGTERM ends this process at once, with exit code 0, and the
    engines' with it; the first process of a container would not even notice it.
    """

    def end(*_: object) -> None:
        raise SystemExit(0)

    if threading.current_thread() is threading.main_thread():
        beside.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, end))


def _started(devices: list[str | None], beside: contextlib.ExitStack) -> list[BlankProcess]:
    """Processes for engines on these devices, which import their modules while this one does; ``beside`` ends
    those that got no engine.
    """
    with server_packages():
        from ingot.serve.engine_calls import process_protocol  # noqa: F401
    from ingot.serve.engine_calls.blank_process import BlankProcess, shared_memory

    blanks = [BlankProcess(shared_memory(), device) for device in devices]
    return [beside.enter_context(contextlib.closing(blank)) for blank in blanks]


def _text_sides(models: list[ServedEngine]) -> list[TextSide]:
    """Each model's text side, under the name that clients use."""
    from ingot.checkpoint.hub import resolve_checkpoint
    from ingot.engine.manifest import is_engine

    with server_packages():
        from ingot.serve.served_model import TextSide
        from ingot.serve.server import serve  # noqa: F401

    paths = [Path(one.path) if is_engine(Path(one.path)) else resolve_checkpoint(one.path) for one in models]
    names = [
        one.name or (path.resolve().name if Path(one.path).exists() else one.path)
        for one, path in zip(models, paths, strict=True)
    ]
    if len(set(names)) != len(names):
        raise RequestError("two engines have the same name", seen=names, field="name")
    return [TextSide.read(one, path) for one, path in zip(names, paths, strict=True)]


def _load(side: TextSide, model: ServedEngine) -> LoadEngine:
    from ingot.serve.engine_calls.process_protocol import LoadEngine

    values = model.limits.arguments()  # which says now what is out of range
    runtime = values.pop("runtime").to_json() if "runtime" in values else {}
    runtime |= model.prompt
    path = str(side.folder.resolve())
    return LoadEngine(path, runtime=runtime, **values, **given(device=model.device, threads=model.threads))
