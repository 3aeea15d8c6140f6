"""What is compared, before any weight is read: the engine's facts, the prompts, and whether they go together.

Owns every check that can be made early. Knows no tensor but a trace's shapes.

    target = find_target("engine", device, "auto")
    cases, steps = make_cases(target, reference, ["Hello"], steps=4)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ingot.building.golden.golden_encoder import GoldenSpeech, golden_inputs
from ingot.building.golden.golden_prompts import golden_prompts, spliced_ids
from ingot.checkpoint.checkpoint_files import CONFIG, read_json
from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.checkpoint.minigpt4_files import is_minigpt4
from ingot.config.build_config import BuildConfig
from ingot.config.decoder_config import DecoderConfig
from ingot.config.modality import PICTURE
from ingot.config.quantization.quant_config import QuantConfig
from ingot.device import parse_dtype
from ingot.engine.engine_facts import read_text_side
from ingot.engine.engine_loader import compute_dtype
from ingot.engine.engine_text import TextParts
from ingot.errors import CheckpointError, ConfigError, RequestError
from ingot.measure.align.align_cases import AlignCase, PromptGiven, TextCheck, make_case, open_original_text
from ingot.measure.align.encoder_inputs import Given
from ingot.measure.align.original import HuggingFace, OtherEngine, Reference, Trace
from ingot.measure.side.huggingface import class_log_mel
from ingot.measure.side.side_spec import decoder_config, folder_of

DEFAULT_PROMPT = "The quick brown fox jumps over the lazy dog. In 1969, 2 + 2 was"


@dataclass(frozen=True)
class AlignTarget:
    """What is known of an engine before its weights are read.

    ``compute`` is the dtype of arithmetic, ``build.dtype`` that of its weights, ``quant`` how many bits
    they have.
    """

    path: str
    text: TextParts
    model: DecoderConfig
    build: BuildConfig
    compute: torch.dtype
    quant: QuantConfig = field(default_factory=QuantConfig)

    @property
    def weights(self) -> torch.dtype:
        """The dtype that weights were rounded to."""
        return parse_dtype(self.build.dtype)


def find_target(path: str, device: torch.device, dtype: str) -> AlignTarget:
    """The engine in a folder; a checkpoint or a Hugging Face id is one that ``LLM`` assembles.

    Raises:
        EngineError, CheckpointError: it cannot be read.
    """
    folder = folder_of(path)
    manifest, text = read_text_side(folder)
    compute = compute_dtype(manifest, device, dtype)
    return AlignTarget(str(folder), text, manifest.model, manifest.build, compute, manifest.quant)


def check_same_model(target: AlignTarget, source: Reference) -> None:
    """Refuse a reference whose shape is not the engine's.

    Raises:
        CheckpointError: it is another model, or a trace or engine whose hidden states are rotated otherwise.
    """
    model, layers = target.model, target.build.layers
    if isinstance(source, Trace) and target.quant.rotation:
        raise CheckpointError(
            "a trace holds the original's hidden states, but this engine's are rotated",
            seen=target.quant.summary,
            field="reference",
            fix="`reference=CHECKPOINT`",
        )
    if isinstance(source, OtherEngine) and source.manifest.quant.rotation != target.quant.rotation:
        raise CheckpointError(
            "the hidden states of one of the two engines are rotated",
            seen=f"{target.quant.summary}; the reference: {source.manifest.quant.summary}",
            field="reference",
            fix="`reference=CHECKPOINT`",
        )
    wanted: dict[str, object] = {"layers": model.num_layers, "hidden size": model.hidden_size}
    if isinstance(source, Trace):
        if layers is not None and layers[0] > 0:
            raise CheckpointError(
                "the trace has all layers, but the engine leaves out the first ones",
                field="reference",
                fix="`reference=CHECKPOINT`",
            )
        stream = source.file.get(0, "layers.0.attention")
        seen: dict[str, object] = {"layers": source.file.num_layers}
        seen["hidden size"] = None if stream is None else stream.shape[-1]
    else:
        if isinstance(source, OtherEngine):
            other, layers = source.manifest.model, None
        else:
            other = decoder_config(_config_of(source.path))
        kept = other.num_layers if layers is None else min(other.num_layers, layers[1]) - layers[0]
        wanted |= {"architecture": model.architecture, "vocabulary": model.vocab_size}
        seen = {"layers": kept, "hidden size": other.hidden_size}
        seen |= {"architecture": other.architecture, "vocabulary": other.vocab_size}
    odd = [f"{name} {value}" for name, value in seen.items() if value != wanted[name]]
    if odd:
        allowed = ", ".join(f"{name} {wanted[name]}" for name in seen)
        raise CheckpointError(
            "the reference is a different model", seen=", ".join(odd), allowed=allowed, field="reference"
        )


def _config_of(path: Path) -> dict[str, Any]:
    """config.json of a checkpoint, which one of several files has in memory alone."""
    if not is_minigpt4(path):
        return read_json(path / CONFIG)
    with open_checkpoint(path) as source:
        return source.config


def given_for(target: AlignTarget, source: Reference) -> Given | None:
    """What both sides of a model with an encoder are given: a golden input, with the original's features;
    None of another model.

    Raises:
        ConfigError: the original is a trace.
    """
    found = golden_inputs(target.model)
    if not found:
        return None
    if isinstance(source, Trace):
        raise ConfigError(
            "an engine with an encoder is not compared with a trace: its inputs are unknown",
            seen=source.name,
            allowed="a checkpoint, OpenAI's .pt file, or another engine",
            field="reference",
        )
    given = found[-1] if target.model.modality is PICTURE else found[0]  # one that is resized
    if not isinstance(source, HuggingFace) or not isinstance(given, GoldenSpeech):
        return Given(given, given.features)
    return Given(given, class_log_mel(given.samples, given.shape[0]))


def _check_fit(target: AlignTarget, case: AlignCase, steps: int) -> None:
    size, limit = target.model.vocab_size, target.build.max_seq_len
    odd = [i for i in case.ids if not 0 <= i < size]
    if odd:
        raise RequestError("token ids outside the vocabulary", seen=odd[:5], allowed=f"0 to {size - 1}")
    if not case.ids or len(case.ids) + steps > limit:
        raise RequestError(
            "the prompt and the steps exceed the engine's max_seq_len",
            seen=f"{len(case.ids)} tokens and {steps} steps",
            allowed=f"at least 1 token, at most {limit} with the steps",
            field=("prompt", "steps"),
        )


def make_cases(
    target: AlignTarget, source: Reference, prompts: Sequence[PromptGiven], steps: int
) -> tuple[list[AlignCase], int]:
    """The prompts' ids and checks, and the number of steps; a trace has its own of both.

    Raises:
        RequestError: the engine cannot make ids of a prompt or run them, or a trace is given several.
    """
    if isinstance(source, Trace):
        cases, steps = [_traced_case(target, source, prompts)], source.file.steps
    else:
        if not prompts and not target.model.modality.takes_text:
            prompts = [_any_ids(target)]
        if not prompts and target.text.tokenizer is None:
            raise RequestError(
                "the engine has no tokenizer, so there is no default prompt",
                field="ids",
                fix="`ids` or `prompt`",
            )
        original = None if target.text.tokenizer is None else open_original_text(source.files)
        cases = [make_case(target.text, prompt, original) for prompt in prompts or [DEFAULT_PROMPT]]
    cases = [_spliced(target, case) for case in cases]
    for case in cases:
        _check_fit(target, case, steps)
    return cases, steps


def _spliced(target: AlignTarget, case: AlignCase) -> AlignCase:
    """With placeholders of the input behind the first token, where rows are spliced."""
    encoder = target.model.encoder if target.model.splices else None
    if encoder is None:
        return case
    ids = spliced_ids(tuple(case.ids), encoder.max_positions, encoder.placeholder_id)
    if len(ids) == len(case.ids):
        raise RequestError("a prompt has the id that stands for pictures", seen=encoder.placeholder_id)
    return replace(case, ids=list(ids))


def _any_ids(target: AlignTarget) -> list[int]:
    """A few ids, the same for a vocabulary: what a speech model writes needs no words."""
    prompts = golden_prompts(None, target.model.vocab_size, target.build.max_seq_len // 2)
    return list(prompts[0].ids)


def _traced_case(target: AlignTarget, source: Trace, prompts: Sequence[PromptGiven]) -> AlignCase:
    """The trace's ids; a prompt given beside it, or noted in it, is checked against them."""
    ids = source.file.ids(0)
    if len(prompts) > 1:
        raise RequestError("a trace has one prompt", seen=len(prompts), allowed="at most 1", field="prompt")
    given = prompts[0] if prompts else source.file.metadata.get("prompt")
    if given is None or (not prompts and target.text.tokenizer is None):
        return AlignCase("the trace's prompt", ids)
    case = make_case(target.text, given, None)
    return AlignCase(case.title, ids, (TextCheck("token ids", ids, case.ids, "the trace"),))
