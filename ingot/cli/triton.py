"""``ingot triton``: a model repository for Triton Inference Server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ingot.cli.opening import server_packages
from ingot.cli.options.flags import EngineFolder, Threads, field_flags, given_of, option
from ingot.cli.options.limit_flags import Limits
from ingot.cli.terminal.console import stderr
from ingot.engine.manifest import expect_engine
from ingot.errors import DeviceError

_REPOSITORY = "Model repository; other models in it stay as they are."
_NAME = "Model name that clients use."
_COPY = "Copy the engine into the repository, which can then be moved; else it holds the engine's path."
_UNPROVEN = "Also load an engine without a proof, or whose last `ingot verify` failed."
_FORCE = "Replace a model that this verb wrote."
_DEVICE = "Where Triton is to run it: cuda, cuda:N, cpu, or auto: a GPU if this machine has one."
_QUEUE = "Requests that may wait beside a full batch."


@field_flags("limits")
def triton(
    engine: EngineFolder,
    limits: Limits,
    output: Annotated[Path, option(_REPOSITORY, "-o", "--output", shown=False, metavar="REPO")],
    name: Annotated[str | None, option(_NAME, shown="the folder's")] = None,
    copy: Annotated[bool, option(_COPY, "--copy")] = False,
    unproven: Annotated[bool, option(_UNPROVEN, "--unproven")] = False,
    force: Annotated[bool, option(_FORCE, "--force")] = False,
    max_queue: Annotated[int | None, option(_QUEUE, shown="256", min=0)] = None,
    device: Annotated[str | None, option(_DEVICE, shown="auto")] = None,
    threads: Threads = None,
) -> None:
    """Write a model repository, with which Triton Inference Server serves the engine.

    Limits go into the model's config.pbtxt and can be changed there.
    """
    expect_engine(engine)
    with server_packages():
        from ingot.adapters.triton.model_repository import write_model
        from ingot.adapters.triton.triton_service import trusted_side
        from ingot.adapters.triton.triton_settings import Settings
    from ingot.config.modality import expect_text
    from ingot.measure.side.side_spec import model_of

    limits.arguments()  # which says now what is out of range
    instead = "`ingot serve ENGINE` serves a speech engine"
    expect_text(model_of(str(engine)).modality, "Triton's backend", instead)
    found = name or engine.resolve().name
    settings = Settings(
        str(engine), unproven=unproven, max_queue=max_queue, threads=threads, **given_of(limits)
    )
    trusted_side(found, engine, unproven=unproven)
    if device in (None, "auto"):
        from ingot.device import resolve_device

        device = str(resolve_device("auto"))
    kind, _, index = str(device).partition(":")  # of the machine that serves, which may be another
    if device != "cpu" and (kind != "cuda" or (index and not index.isdigit())):
        raise DeviceError("unknown device", seen=device, allowed="auto, cpu, cuda, cuda:N", field="device")
    gpu = None if device == "cpu" else int(index or 0)
    folder = write_model(output, found, settings, gpu=gpu, copy=copy, force=force)
    stderr().print(f"wrote {folder} for {'a CPU' if gpu is None else f'GPU {gpu}'}", markup=False)
    if not copy:
        held = f"its config.pbtxt holds the path {engine.resolve()}; --copy makes the repository movable"
        stderr().print(held, markup=False)
