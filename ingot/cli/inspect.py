"""``ingot inspect``: what is inside an engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from ingot.cli.opening import local_folder
from ingot.cli.options.flags import AsJson, EnginePath, option
from ingot.cli.terminal.console import print_facts, print_json, print_rows, print_table, size_text, stdout
from ingot.cli.terminal.metric_text import metric_line

if TYPE_CHECKING:
    from ingot.config.decoder_config import RopeConfig
    from ingot.config.sampling_params import SamplingParams
    from ingot.engine.engine_facts import Description

_FEW = 12  # languages that are named


def inspect(
    engine: EnginePath,
    as_json: AsJson = False,
    tensors: Annotated[
        bool, option("List every tensor with its hash, and each layer's error.", "--tensors")
    ] = False,
) -> None:
    """Show what is inside an engine, or what a checkpoint would become.

    Reads no weights, so it finds no damage to them: `ingot verify` does.
    """
    folder = local_folder(engine)
    from ingot.engine.engine_facts import describe
    from ingot.engine.source_figures import percent
    from ingot.llm.sampling_defaults import default_params

    found = describe(folder)
    params = default_params(found.manifest.generation)
    if as_json:
        value = found.to_json() | {"default_params": params.to_json()}
        print_json(value if tensors else {k: v for k, v in value.items() if k != "tensors"})
        return
    stdout().print(f"{found.kind} {found.path}", style="bold", markup=False)
    print_facts(_facts(found, params), 14)
    if tensors:
        shapes = {name: "x".join(map(str, tensor.shape)) for name, tensor in found.tensors.items()}
        rows = [(name, t.dtype, shapes[name], t.sha256 or "") for name, t in found.tensors.items()]
        print_rows(rows)
        errors = {} if found.proof is None else found.proof.errors
        if errors:
            from ingot.measure.side.text_table import Table

            shares = tuple((name, percent(error)) for name, error in errors.items())
            print_table(Table("error of the weights in fewer bits", ("layer", "relative error"), shares))


def _facts(found: Description, params: SamplingParams) -> Iterator[tuple[str, str]]:
    model, build = found.manifest.model, found.manifest.build
    kind = "" if model.encoder is None else f" ({model.modality.model}, {model.wiring})"
    yield "architecture", f"{model.architecture}{kind}, {model.num_layers} layers, hidden {model.hidden_size}"
    heads = f"{model.num_heads} heads of {model.head_dim}, {model.num_kv_heads} for keys and values"
    yield "attention", heads + (f", window {model.sliding_window}" if model.sliding_window else "")
    yield "MLP", f"{model.mlp}, {model.intermediate_size} wide"
    yield "positions", _positions(found)
    yield from _encoder(found)
    yield "parameters", f"{found.num_parameters:,}"
    kept = "" if build.layers is None else f", layers {build.layers[0]}:{build.layers[1]} of the checkpoint"
    yield "weights", f"{build.dtypes} (checkpoint: {found.manifest.source_dtype}){kept}"
    yield "quantization", found.manifest.quant.summary
    for pattern, scheme in found.manifest.quant.layers.items():
        yield "", f"{pattern}: {scheme}"
    calibration = found.manifest.calibration
    if calibration is not None:
        samples = f"{calibration.samples} samples, {calibration.tokens:,} tokens"
        yield "calibrated on", f"{samples}, from a file with sha256 {calibration.sha256[:16]}…"
        for site, ranges in calibration.range_lines:
            yield f"ranges, {site}", ranges
    yield "size on disk", size_text(found.bytes_on_disk)
    cache = build.dtype if build.kv_dtype == "model" else build.kv_dtype
    yield "KV cache", f"{size_text(found.kv_bytes_per_token)} per token in {cache}"
    for place, (step, kernels) in enumerate(found.kernels.items()):
        yield "" if place else "on a GPU", f"{step}: {kernels}"
    yield "limits", f"{build.max_batch_size} requests per step, {build.max_seq_len} tokens per request"
    yield "tokenizer", f"{found.tokenizer}, {found.vocabulary} ids" if found.tokenizer else "none"
    yield "vocabulary", f"{model.vocab_size} rows"
    yield "chat format", found.chat_format or "none"
    yield "stop ids", " ".join(map(str, found.manifest.stop_ids)) or "none"
    yield "sampling", _changed(params)
    yield "kernel plan", _plan(found)
    if found.kind == "engine":
        yield from _proof(found)
        yield "checked", "its text files; the weights were not read: `ingot verify` checks them"
        yield "versions", f"ingot {found.manifest.ingot_version}, format {found.manifest.format_version}"


def _proof(found: Description) -> Iterator[tuple[str, str]]:
    from ingot.engine.source_figures import errors_text

    if found.proof is None:
        yield "proven by", f"nothing: {found.doubt}"
        return
    made = found.proof.made
    when = f", {found.proof.when}" if found.proof.when else ""
    yield "proven by", f"Ingot {made.ingot} on {made.device}{when}, {made.dtype} weights"
    cases = (f"{name} {prompt}+{new}" for name, (prompt, new) in found.proof.cases.items())
    yield "golden cases", ", ".join(cases) + " (tokens of prompt + new)" if found.proof.cases else "none"
    if found.proof.errors:
        yield "weight error", errors_text(found.proof.errors)
    for metric in found.proof.metrics:
        yield metric_line(metric)
    if found.doubt is not None:
        yield "verified", found.doubt
    else:
        yield (
            "verified",
            f"here, {found.proof.verified}" if found.proof.verified else "not on this machine yet",
        )


def _encoder(found: Description) -> Iterator[tuple[str, str]]:
    config = found.manifest.model.encoder
    if config is None:
        return
    own = config.settings
    layers = f"{own['num_layers']} layers, " if "num_layers" in own else ""
    heads = f", {own['num_heads']} heads" if "num_heads" in own else ""
    inner = f", {own['intermediate_size']} wide" if "intermediate_size" in own else ""
    yield "encoder", f"{layers}hidden {config.hidden_size}{heads}{inner}"
    size = " x ".join(str(n) if n else "any" for n in config.features)
    cache = f"{size_text(found.input_bytes)} of encoder cache"
    yield "features", f"{size}, at most {config.max_positions} positions: {cache}"
    if not found.manifest.model.modality.takes_text:
        yield "languages", _languages(found)


def _languages(found: Description) -> str:
    from ingot.errors import IngotError
    from ingot.models.speech_tokens import SpeechTokens
    from ingot.models.whisper_generation import SpeechGeneration

    size = found.manifest.model.vocab_size
    named = SpeechGeneration.of(found.manifest.generation, size).languages
    if named is not None:
        return ", ".join(named) if len(named) <= _FEW else f"{len(named)}"
    try:
        tokens = SpeechTokens.of_vocabulary(size)
    except IngotError:  # not a published vocabulary: only its tokenizer names them
        return "those of its tokenizer" if found.tokenizer else "unknown: no tokenizer"
    return f"{len(tokens.languages)}" if tokens.multilingual else "English"


def _positions(found: Description) -> str:
    model = found.manifest.model
    if model.rope is None:
        return f"learned, {model.max_positions}"
    local = "" if model.local_rope is None else f", {_rope(model.local_rope)} in layers with a window"
    return f"RoPE, {_rope(model.rope)}{local}, {model.max_positions}"


def _rope(rope: RopeConfig) -> str:
    scaling = "" if rope.scaling == "none" else f", scaling {rope.scaling}"
    return f"theta {rope.theta:g}{scaling}"


def _changed(params: SamplingParams) -> str:
    plain = type(params)().to_json()
    changed: dict[str, Any] = {k: v for k, v in params.to_json().items() if v != plain[k]}
    return ", ".join(f"{k} {v:g}" for k, v in changed.items()) or "greedy, Ingot's defaults"


def _plan(found: Description) -> str:
    plan = found.plan
    if plan.gpu is None:
        return "defaults, nothing measured"
    measured = sum(map(len, plan.measured.values()))
    where = f"measured on {plan.gpu} with Triton {plan.triton}"
    text = f"{plan.num_choices} choices other than the defaults, {measured} {where}"
    return text if found.plan_unused is None else f"{text}; not used here: {found.plan_unused}"
