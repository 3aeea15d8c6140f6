"""``ingot plan``: every byte before any is allocated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ingot.cli.opening import expect_model
from ingot.cli.options.flags import HALF_DTYPES, RARELY, AsJson, Revision, field_flags, given_of, option
from ingot.cli.options.limit_flags import cache_tokens, memory_fraction, runtime_values, token_budget
from ingot.cli.terminal.console import print_json, print_lines, print_rows, size_text, stdout
from ingot.cli.terminal.field_flags import flags_text
from ingot.config.build_config import DEFAULT_MAX_BATCH_SIZE, DEFAULT_MAX_SEQ_LEN
from ingot.config.quantization.scheme_table import narrow_schemes
from ingot.config.units import gib_text, parse_size
from ingot.errors import DeviceError

if TYPE_CHECKING:
    from ingot.memory.host_memory import HostBytes
    from ingot.memory.ledger import Capacity, Ledger, MemorySetting
    from ingot.memory.memory_fixes import CardRow, Fix

_NO_GPU = (
    "no GPU on this machine, so no verdict: see the table of cards below, or ask about one with --gpu 24GiB"
)


_MODEL = (
    "An engine or checkpoint folder, a config.json, or a Hugging Face id (only its config.json is "
    "downloaded)."
)
_DTYPE = f"fp16, bf16, fp32, or auto: the model's own; {HALF_DTYPES}."
_QUANT = f"none, {', '.join(narrow_schemes())} or FILE.yaml."
_GPU = (
    "What to plan for: a memory size (23.6GiB; GB: 10^9 bytes, GiB: 2^30), auto (this machine's GPU), "
    "cuda:N, or cpu."
)
_LENGTH = f"the engine's, or the model's up to {DEFAULT_MAX_SEQ_LEN}"
_CACHE = "a full batch of the longest requests; on a CPU at most 256 MiB"
_SIZE = f"the engine's, or {DEFAULT_MAX_BATCH_SIZE}"


@dataclass(frozen=True)
class PlanFlags:
    """The model, its limits, and where it is to run."""

    model: Annotated[str, typer.Argument(help=_MODEL, metavar="CHECKPOINT|ENGINE|CONFIG")]
    dtype: Annotated[str | None, option(_DTYPE, metavar="DTYPE", shown="auto")] = None
    quant: Annotated[str | None, option(_QUANT, shown="the engine's, or none")] = None
    gpu: Annotated[str, option(_GPU)] = "auto"
    max_batch_size: Annotated[int | None, option("Maximum requests per step.", shown=_SIZE)] = None
    max_seq_len: Annotated[
        int | None, option("Maximum tokens per request, prompt plus output.", shown=_LENGTH)
    ] = None
    cache_tokens: Annotated[int | None, cache_tokens(RARELY, _CACHE)] = None
    token_budget: Annotated[int | None, token_budget(RARELY)] = None
    memory_fraction: Annotated[float | None, memory_fraction(RARELY)] = None
    kv_dtype: Annotated[
        str | None,
        option(
            "Dtype of the KV cache: int8, fp8, or model: the compute dtype.",
            shown="auto: the engine's, or model",
            metavar="auto|model|int8|fp8",
        ),
    ] = None
    embedding: Annotated[
        str | None,
        option(
            "Where the token embedding stays: device, or host, in pinned memory.",
            shown="device",
            panel=RARELY,
            metavar="device|host",
        ),
    ] = None
    revision: Revision = None
    as_json: AsJson = False


@field_flags("flags")
def plan(flags: PlanFlags) -> None:
    """Count every byte that a model needs, before any is allocated. Exit code 0: it fits, 1: it does not.

    "Fits" means that the KV cache holds a full batch of the longest requests, or --cache-tokens.
    If it does not fit, the changes that make it fit are listed, cheapest first.
    """
    from ingot.checkpoint.hub import local_path

    if not local_path(flags.model).is_file():  # as a config.json is
        expect_model(flags.model, flags.revision)
    from ingot.building.ledger_source import read_setting
    from ingot.config.runtime_config import RuntimeConfig
    from ingot.memory.host_memory import host_ledger
    from ingot.memory.ledger import ledger
    from ingot.memory.memory_fixes import fits_by_card, fixes

    runtime = runtime_values(flags)
    kind, capacity = _capacity(flags.gpu)
    limits = given_of(flags, "model", "gpu", "as_json", *runtime)
    setting = read_setting(flags.model, device=kind, runtime=RuntimeConfig(**runtime), **limits)
    bill, host = ledger(setting, capacity), host_ledger(setting)
    options, cards = fixes(bill), list(fits_by_card(setting))
    if flags.as_json:
        shown = [{"flags": flags_text(fix.changes)} | fix.to_json() for fix in options]
        card_rows = [row.to_json() for row in cards]
        print_json(bill.to_json() | {"fixes": shown, "host": host.to_json(), "cards": card_rows})
    else:
        _show(bill, options, host)
        _show_cards(setting, cards)
    raise typer.Exit(1 if capacity is not None and not bill.fits else 0)


def _capacity(gpu: str) -> tuple[Literal["cuda", "cpu"], Capacity | None]:
    """The kind of device and its memory; None where ``auto`` finds no GPU."""
    from ingot.device import resolve_device
    from ingot.memory.ledger import Capacity
    from ingot.memory.memory_error import capacity_of

    if gpu in ("auto", "cpu") or gpu.startswith("cuda"):
        try:
            device = resolve_device(gpu)
        except DeviceError as error:
            raise DeviceError(error.what, seen=gpu, field="gpu", fix="`gpu=24GiB`, auto or cpu") from None
        if device.type == "cpu":
            return ("cuda", None) if gpu == "auto" else ("cpu", capacity_of(device))
        return "cuda", capacity_of(device)
    return "cuda", Capacity(f"--gpu {gpu}", parse_size(gpu, "gpu"))


def _show(bill: Ledger, options: list[Fix], host: HostBytes) -> None:
    setting = bill.setting
    model, scheme = setting.model, setting.quant.label
    head = f"{model.architecture}, {model.num_layers} layers, hidden {model.hidden_size}, {setting.dtypes}"
    head += "" if scheme == "none" else f", {scheme}"
    stdout().print(head, style="bold", markup=False)
    limits = f"{setting.max_batch_size} requests per step, {setting.max_seq_len} tokens per request"
    cache = size_text(setting.block_bytes / setting.runtime.block_size)
    print_lines([f"{limits}, KV cache {cache} per token", ""])
    kind, rows = "", []
    for item in bill.items:
        if item.bytes or item.note:
            name = "" if item.kind == kind else item.kind
            rows.append((name, item.name, size_text(item.bytes), item.note))
            kind = item.kind
    print_rows([*rows, ("needed", "", size_text(bill.needed), "")], right=(2,))
    typer.echo("")
    print_lines(_verdict(bill))
    if not options and bill.capacity is not None and not bill.fits:
        typer.echo("no change of limits makes it fit")
    if options:
        typer.echo("\nto make it fit, cheapest first:")
        print_rows(
            [
                (flags_text(f.changes), f"costs {f.cost}", f"needs {size_text(f.needed)}", f.note, f.where)
                for f in options
            ]
        )
    typer.echo("\nhost")
    print_rows([(n, size_text(b), note) for n, b, note in host.rows()], right=(1,))


def _verdict(bill: Ledger) -> Iterator[str]:
    from ingot.memory.memory_fixes import CARDS

    if bill.capacity is None:
        yield _NO_GPU
        return
    setting = bill.setting
    yield list(bill.lines())[1]
    sold = next((name for name in CARDS if bill.capacity.name == f"--gpu {name.replace(' ', '')}"), None)
    if sold is not None:
        has = f"{gib_text(CARDS[sold])}, which is {size_text(CARDS[sold])}"
        yield f"note: a GB is 10^9 bytes; a card sold as {sold} has {has}: use --gpu {gib_text(CARDS[sold])}"
    if bill.fits:
        yield f"fits: at most {size_text(bill.used)} in use"
    elif bill.loads:
        at_once = (
            f"{bill.requests_at_once} of {setting.max_batch_size} requests of {setting.max_seq_len} tokens"
        )
        tokens = f"{bill.blocks * setting.runtime.block_size} tokens"
        yield f"does not fit as asked, but runs with a cache of {tokens}: {at_once} at once"
    else:
        yield f"does not fit: not even one request of {setting.max_seq_len} tokens"


def _show_cards(setting: MemorySetting, card_rows: list[CardRow]) -> None:
    """Two tables with a row per number format and a column per card, named as ``--gpu`` takes it."""
    cards = list(dict.fromkeys(row.total for row in card_rows))
    sold = ", ".join(dict.fromkeys(row.card.removesuffix(" GB") for row in card_rows))
    formats = list(dict.fromkeys((row.dtype, row.quant) for row in card_rows))
    found = {(row.total, row.dtype, row.quant): row for row in card_rows}
    titles = {
        "max_batch_size": f"largest batch of requests of {setting.max_seq_len} tokens",
        "max_seq_len": f"longest request at batch 1 (the model's limit is {setting.model.max_positions})",
    }
    for field, title in titles.items():
        share = f"memory_fraction {setting.runtime.memory_fraction:g}"
        print_lines(["", f"{title}, by actual memory of cards sold as {sold} GB, {share}"])
        rows = [
            (dtype, quant, *(str(getattr(found[card, dtype, quant], field) or "-") for card in cards))
            for dtype, quant in formats
        ]
        head = ("dtype", "quant", *map(gib_text, cards))
        print_rows([head, *rows], range(2, len(head)), names=2)
