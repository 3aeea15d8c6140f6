"""``ingot build``: a checkpoint becomes an engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli.console import size_text, stderr, stdout
from ingot.cli.flags import RARELY, Device, field_flags, given
from ingot.cli.metric_text import metric_line
from ingot.cli.prove_flags import ProveFlags
from ingot.cli.signals import ends_once
from ingot.cli.steps import bar_shown, parts_shown
from ingot.config.build import DEFAULT_MAX_BATCH_SIZE, DEFAULT_MAX_SEQ_LEN
from ingot.config.quant_file import read_quant
from ingot.config.schemes import HEADS, NARROW, SCHEMES, choosing, listed, of_method

if TYPE_CHECKING:
    from ingot.evaluate.proving import Proving

QUANT_PANEL = "Quantization"
RARE_QUANT = "Quantization, rarely needed"
Finish = Callable[[Path], None]
_BY_ROW = listed(name for name in choosing("group") if 0 in SCHEMES[name].group)
_COARSE = listed(name for name in choosing("group") if 32 not in SCHEMES[name].group)
_SCALED = listed(choosing("activations"))
_ROTATING = listed(choosing("rotation"))


@field_flags("proving")
def build(
    proving: ProveFlags,
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint folder or a Hugging Face id.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The engine folder to create.")],
    dtype: Annotated[
        str | None,
        typer.Option(help="fp16, bf16, fp32, or auto: the checkpoint's own.", show_default="auto"),
    ] = None,
    device: Device = None,
    max_batch_size: Annotated[
        int | None, typer.Option(help="Maximum requests per step.", show_default=str(DEFAULT_MAX_BATCH_SIZE))
    ] = None,
    max_seq_len: Annotated[
        int | None,
        typer.Option(
            help="Maximum tokens per request, prompt plus output.",
            show_default=f"the model's, at most {DEFAULT_MAX_SEQ_LEN}",
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            help="Default dtype of the KV cache: int8 or fp8 (docs/quantization.md), or model: the "
            "engine's dtype.",
            metavar="model|int8|fp8",
            show_default="model",
            rich_help_panel=RARE_QUANT,
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Keep only these decoder layers.",
            metavar="START:END",
            show_default="all",
            rich_help_panel=RARELY,
        ),
    ] = None,
    quant: Annotated[
        str | None,
        typer.Option(
            help=f"Quantize: {', '.join(NARROW)}, or FILE.yaml.",
            show_default="none",
            rich_help_panel=QUANT_PANEL,
        ),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            help=f"Columns per scale in {_BY_ROW} (0: one scale per row) and {_COARSE}, or per "
            f"block in RPTQ: 32 (not {_COARSE}), 64, 128.",
            show_default="128",
            rich_help_panel=QUANT_PANEL,
        ),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--asymmetric",
            help=f"Whether {listed(choosing('symmetric'))} goes without zero points.",
            show_default="asymmetric",
            rich_help_panel=RARE_QUANT,
        ),
    ] = None,
    quant_head: Annotated[
        bool,
        typer.Option("--quant-head", help="Also store the head in 8 bits.", rich_help_panel=QUANT_PANEL),
    ] = False,
    method: Annotated[
        str | None,
        typer.Option(
            help="How quantized values are chosen: round, or with --calib gptq, awq or "
            f"({listed(of_method('smoothquant'))}) smoothquant.",
            show_default="round; gptq for RPTQ",
            rich_help_panel=QUANT_PANEL,
        ),
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option(
            help=f"Activation scales in {_SCALED}: dynamic, one per token, or static, from --calib.",
            show_default="dynamic",
            rich_help_panel=RARE_QUANT,
        ),
    ] = None,
    alpha: Annotated[
        str | None,
        typer.Option(
            help="Strength of smoothquant: 0 to 1 (higher moves more of the outliers into the "
            "weights), or search.",
            show_default="0.5",
            rich_help_panel=RARE_QUANT,
        ),
    ] = None,
    weight_scales: Annotated[
        str | None,
        typer.Option(
            help=f"Weight scales in {listed(choosing('weight_scales'))}: one per channel, or one per tensor.",
            show_default="channel",
            rich_help_panel=RARE_QUANT,
        ),
    ] = None,
    rotate: Annotated[
        bool | None,
        typer.Option(
            "--rotate/--no-rotate",
            help=f"Whether {_ROTATING} rotates the hidden states to spread outliers over channels.",
            show_default=f"rotate for {_ROTATING}",
            rich_help_panel=RARE_QUANT,
        ),
    ] = None,
    calib: Annotated[
        Path | None,
        typer.Option(
            help="Calibration samples (.jsonl, .json or .txt), similar to what the engine will run.",
            rich_help_panel=QUANT_PANEL,
        ),
    ] = None,
    calib_samples: Annotated[
        int | None,
        typer.Option(
            help="Maximum samples to use from --calib, up to 512 tokens each.",
            show_default="128",
            rich_help_panel=RARE_QUANT,
        ),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(help="chatml, vicuna, vicuna-v0 or a .jinja file.", show_default="the checkpoint's own"),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="Use this plan.json as it is; nothing is measured.", rich_help_panel=RARELY),
    ] = None,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune/--no-tune", help="On a GPU, measure the kernels' tile sizes.", rich_help_panel=RARELY
        ),
    ] = True,
    proof: Annotated[
        bool,
        typer.Option(
            "--proof/--no-proof", help="Store golden cases for `ingot verify`.", rich_help_panel=RARELY
        ),
    ] = True,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a Hugging Face id.", rich_help_panel=RARELY)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing engine.")] = False,
) -> None:
    """Build an engine folder from a checkpoint. An interrupted build leaves nothing behind."""
    start = time.perf_counter()
    proving.check(proof=proof)
    head = HEADS[-1] if quant_head else None
    chosen = read_quant(
        quant,
        group=group_size,
        symmetric=symmetric,
        head=head,
        method=method,
        activations=activations,
        alpha=None if alpha is None else _number(alpha),
        weight_scales=weight_scales,
        rotation=rotate,
    )
    with ends_once():
        from ingot.engine import builder

        plan_of_metrics = proving.plan(checkpoint, revision, chat_template)
        with ExitStack() as shown:
            part = shown.enter_context(parts_shown())
            steps = part(lambda done, total: f"{done}/{total}")
            path = builder.build(
                checkpoint,
                output,
                force=force,
                progress=part(lambda done, total: f"{size_text(done)} of {size_text(total)}"),
                tune=tune,
                tune_progress=steps,
                proof=proof,
                proof_progress=steps,
                finish=_measuring(plan_of_metrics, device, shown),
                **given(
                    dtype=dtype,
                    device=device,
                    max_batch_size=max_batch_size,
                    max_seq_len=max_seq_len,
                    layers=layers,
                    kv_dtype=kv_dtype,
                    quant=chosen,
                    calib=calib,
                    calib_samples=calib_samples,
                    chat_template=chat_template,
                    plan=plan,
                    revision=revision,
                ),
            )
    _tell_of_ranges(path, calib)
    size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    typer.echo(f"{path}: {size_text(size)}, built in {time.perf_counter() - start:.1f} s")


def _tell_of_ranges(engine: Path, calib: Path | None) -> None:
    """Name the file that a calibrated build leaves beside its engine."""
    from ingot.engine.calibration_cache import cache_path

    file = cache_path(engine)
    if calib is not None and file.is_file():
        what = (
            "caches calibration statistics: the next build with these samples is faster. Delete it any time."
        )
        stderr().print(f"note: {file} ({size_text(file.stat().st_size)}) {what}", markup=False)


def _number(text: str) -> float | str:
    """A number where the text is one; else the text."""
    try:
        return float(text)
    except ValueError:
        return text


def _measuring(proving: Proving | None, device: str | None, shown: ExitStack) -> Finish | None:
    """What measures the finished engine and stores or refuses it; closes what is ``shown`` first, for there
    is one bar at a time.
    """
    if proving is None:
        return None

    def finish(folder: Path) -> None:
        from ingot.evaluate.metrics import keep, measure

        shown.close()
        with bar_shown() as progress:
            metrics = measure(folder, proving, progress=progress, **given(device=device))
        for name, text in map(metric_line, metrics):
            stdout().print(f"  {name:<10}{text}", markup=False)
        keep(folder, metrics)

    return finish
