"""``ingot build``: a checkpoint becomes an engine."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ingot.cli.opening import expect_model
from ingot.cli.options.files_flags import PartFlags
from ingot.cli.options.flags import (
    CHECKPOINT,
    HALF_DTYPES,
    RARELY,
    Device,
    Revision,
    field_flags,
    given,
    given_of,
    option,
)
from ingot.cli.options.prove_flags import ProveFlags
from ingot.cli.options.quant_flags import RARE_QUANT, QuantFlags
from ingot.cli.terminal.console import print_lines, size_text, stderr, stdout
from ingot.cli.terminal.metric_text import metric_line
from ingot.cli.terminal.signals import ends_once
from ingot.cli.terminal.step_list import bar_shown, parts_shown
from ingot.config.build_config import DEFAULT_MAX_BATCH_SIZE, DEFAULT_MAX_SEQ_LEN

_DTYPE = f"fp16, bf16, fp32, or auto: the checkpoint's own; {HALF_DTYPES}."


@dataclass(frozen=True)
class BuildFlags:
    """The checkpoint, the engine's limits, and what else a build does."""

    output: Annotated[Path, option("The engine folder to create.", "--output", "-o")]
    checkpoint: Annotated[str | None, CHECKPOINT] = None
    dtype: Annotated[str | None, option(_DTYPE, shown="auto", metavar="DTYPE")] = None
    device: Device = None
    max_batch_size: Annotated[
        int | None, option("Maximum requests per step.", shown=str(DEFAULT_MAX_BATCH_SIZE))
    ] = None
    max_seq_len: Annotated[
        int | None,
        option(
            "Maximum tokens per request, prompt plus output.",
            shown=f"the model's, at most {DEFAULT_MAX_SEQ_LEN}",
        ),
    ] = None
    kv_dtype: Annotated[
        str | None,
        option(
            "Default dtype of the KV cache: int8 or fp8 (docs/quantization.md), or model: the engine's "
            "dtype.",
            shown="model",
            panel=RARE_QUANT,
            metavar="model|int8|fp8",
        ),
    ] = None
    layers: Annotated[
        str | None,
        option("Keep only these decoder layers.", shown="all", panel=RARELY, metavar="START:END"),
    ] = None
    chat_template: Annotated[
        str | None, option("chatml, vicuna, vicuna-v0 or a .jinja file.", shown="the checkpoint's own")
    ] = None
    tokenizer: Annotated[
        Path | None,
        option("A folder with another tokenizer and chat template.", shown="the checkpoint's", panel=RARELY),
    ] = None
    plan: Annotated[
        Path | None, option("Use this plan.json as it is; nothing is measured.", panel=RARELY)
    ] = None
    tune: Annotated[
        bool, option("On a GPU, measure the kernels' tile sizes.", "--tune/--no-tune", panel=RARELY)
    ] = True
    proof: Annotated[
        bool, option("Store golden cases for `ingot verify`.", "--proof/--no-proof", panel=RARELY)
    ] = True
    revision: Revision = None
    force: Annotated[bool, option("Replace an existing engine.", "--force")] = False


@field_flags("proving")
@field_flags("quantized")
@field_flags("parts")
@field_flags("flags")
def build(flags: BuildFlags, parts: PartFlags, quantized: QuantFlags, proving: ProveFlags) -> None:
    """Build an engine folder from a checkpoint. An interrupted build leaves nothing behind."""
    start = time.perf_counter()
    proving.check(proof=flags.proof)
    checkpoint = parts.checkpoint(flags.checkpoint)
    if proving.prove is not None and not isinstance(checkpoint, str):
        what = "it needs one path: name the files in a YAML file (docs/vision.md) and give that"
        raise typer.BadParameter(what, param_hint="--prove")
    if isinstance(checkpoint, str):
        expect_model(checkpoint, flags.revision)
    quant = quantized.config()
    with ends_once():
        from ingot.building import builder

        metrics_to_prove = proving.metrics(
            str(checkpoint), flags.revision, flags.chat_template, flags.tokenizer
        )
        with ExitStack() as shown:

            def measure_finished(folder: Path) -> None:
                from ingot.measure.evaluate.proof_metrics import keep, measure

                assert metrics_to_prove is not None
                shown.close()  # there is one bar at a time
                with bar_shown() as progress:
                    metrics = measure(
                        folder, metrics_to_prove, progress=progress, **given(device=flags.device)
                    )
                for name, text in map(metric_line, metrics):
                    stdout().print(f"  {name:<10}{text}", markup=False)
                keep(folder, metrics)

            part = shown.enter_context(parts_shown())
            steps = part(lambda done, total: f"{done}/{total}")
            path = builder.build(
                checkpoint,
                engine=flags.output,
                quant=quant,
                progress=part(lambda done, total: f"{size_text(done)} of {size_text(total)}"),
                tune_progress=steps,
                proof_progress=steps,
                finish=None if metrics_to_prove is None else measure_finished,
                **given_of(flags, "output", "checkpoint"),
                **given(
                    calib=quantized.calib,
                    calib_samples=quantized.calib_samples,
                    calib_prompt_seed=quantized.calib_prompt_seed,
                ),
            )
    _show_built(path, quantized, time.perf_counter() - start)


def _show_built(path: Path, quantized: QuantFlags, seconds: float) -> None:
    """What a finished build left, and what its weights lost."""
    from ingot.building.calibration.calibration_cache import cache_path
    from ingot.engine.manifest import Manifest
    from ingot.engine.proof_file import read_proof
    from ingot.engine.source_figures import errors_text

    cache = cache_path(path)
    if quantized.calib is not None and cache.is_file():
        what = (
            "caches calibration statistics: the next build with these samples is faster. Delete it any time."
        )
        stderr().print(f"note: {cache} ({size_text(cache.stat().st_size)}) {what}", markup=False)
    calibration = Manifest.read(path).calibration
    for site, ranges in [] if calibration is None else calibration.range_lines:
        print_lines([f"  ranges of {site}: {ranges}"])
    proof = read_proof(path)
    if proof is not None and proof.claims.source is not None and proof.claims.source.errors:
        print_lines([f"  weight error: {errors_text(proof.claims.source.errors)}"])
    size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    typer.echo(f"{path}: {size_text(size)}, built in {seconds:.1f} s")
