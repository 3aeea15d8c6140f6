"""The engine's facts and the prompts of a comparison, checked before weights are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from ingot.engine.engine_loader import compute_dtypes
from ingot.engine.engine_text import TextParts, read_engine_text, read_text_parts
from ingot.engine.manifest import Manifest, is_engine
from ingot.errors import CheckpointError, ConfigError, RequestError, TokenizerError
from ingot.measure.align.encoder_inputs import Given
from ingot.measure.align.original import HuggingFace, OtherEngine, Reference, Trace
from ingot.measure.side.huggingface import ClassTokenizer, class_log_mel
from ingot.measure.side.side_spec import decoder_config, folder_of
from ingot.proof.golden_replay import first_difference

DEFAULT_PROMPT = "The quick brown fox jumps over the lazy dog. In 1969, 2 + 2 was"
PromptGiven = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class TextCheck:
    """The rendered prompt, or the token ids, of both sides; ``against``: the origin of the expected ones."""

    stage: str
    expected: str | list[int]
    got: str | list[int]
    against: str

    @property
    def is_bad(self) -> bool:
        return self.expected != self.got

    @property
    def first(self) -> int | None:
        return first_difference(self.expected, self.got) if self.is_bad else None


@dataclass(frozen=True)
class AlignCase:
    """One prompt: a short title, the ids that both sides get, and the checks of text and ids."""

    title: str
    ids: list[int]
    checks: tuple[TextCheck, ...] = ()


@dataclass(frozen=True)
class AlignTarget:
    """An engine's facts; ``compute`` is the dtype of arithmetic, the wider one if its halves have two, and
    ``build.dtypes`` are those of its weights.
    """

    path: str
    text: TextParts
    model: DecoderConfig
    build: BuildConfig
    compute: torch.dtype
    quant: QuantConfig = field(default_factory=QuantConfig)


def find_target(path: str, device: torch.device, dtype: str) -> AlignTarget:
    """The engine in a folder, or the one that ``LLM`` assembles of a checkpoint or Hugging Face id."""
    folder = folder_of(path)
    manifest, text = read_text_side(folder)
    compute = parse_dtype(compute_dtypes(manifest, device, dtype).wider)
    return AlignTarget(str(folder), text, manifest.model, manifest.build, compute, manifest.quant)


def check_same_model(target: AlignTarget, source: Reference) -> None:
    """Raise CheckpointError if the reference is another model, or its hidden states are rotated otherwise."""
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
            if is_minigpt4(source.path):  # its config is made of several files
                with open_checkpoint(source.path) as checkpoint:
                    hf = checkpoint.config
            else:
                hf = read_json(source.path / CONFIG)
            other = decoder_config(hf)
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


def given_for(target: AlignTarget, source: Reference) -> Given | None:
    """The golden input of a model with an encoder, with the original's features; None for other models."""
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
        RequestError: the engine cannot tokenize or run a prompt, or a trace gets several.
    """
    if isinstance(source, Trace):
        if len(prompts) > 1:
            raise RequestError(
                "a trace has one prompt", seen=len(prompts), allowed="at most 1", field="prompt"
            )
        ids, steps = source.file.ids(0), source.file.steps
        cases = [AlignCase("the trace's prompt", ids)]
        given = prompts[0] if prompts else source.file.metadata.get("prompt")
        if given is not None and (prompts or target.text.tokenizer is not None):
            case = make_case(target.text, given, None)
            cases = [AlignCase(case.title, ids, (TextCheck("token ids", ids, case.ids, "the trace"),))]
    else:
        if not prompts and not target.model.modality.takes_text:  # a speech model needs no words
            golden = golden_prompts(None, target.model.vocab_size, target.build.max_seq_len // 2)
            prompts = [list(golden[0].ids)]
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
    """With placeholders after the first token, if the input is spliced."""
    encoder = target.model.encoder if target.model.splices else None
    if encoder is None:
        return case
    ids = spliced_ids(tuple(case.ids), encoder.max_positions, encoder.placeholder_id)
    if len(ids) == len(case.ids):
        raise RequestError("a prompt has the id that stands for pictures", seen=encoder.placeholder_id)
    return replace(case, ids=list(ids))


class FolderText:
    """The original's files read by our tokenizers, if there is no other reader."""

    name = "the checkpoint's files"

    def __init__(self, folder: Path) -> None:
        if is_engine(folder):
            text = read_engine_text(folder, Manifest.read(folder))
        else:
            with open_checkpoint(folder) as source:
                text = read_text_parts(source)
        if text.tokenizer is None:
            raise TokenizerError("the checkpoint has no tokenizer", seen=folder)
        self._tokenizer, self._chat = text.tokenizer, text.chat

    def ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[int]] | None:
        if self._chat is None:
            return None
        text = self._chat.prompt_text(messages, tokenizer=self._tokenizer)
        return text, self._chat.prompt_ids(messages, self._tokenizer)


OriginalText = ClassTokenizer | FolderText


def open_original_text(folder: Path) -> tuple[OriginalText, str] | None:
    """A folder's tokenizer and its origin: Hugging Face's class, else our reading of the files; or None."""
    found = None if is_engine(folder) else ClassTokenizer.of(folder)
    if found is not None:
        return found, "Hugging Face's tokenizer"
    try:
        return FolderText(folder), FolderText.name
    except TokenizerError:
        return None


def make_case(text: TextParts, prompt: PromptGiven, original: tuple[OriginalText, str] | None) -> AlignCase:
    """A prompt's ids and checks. Both sides run on the original's ids, so that a wrong token does not hide
    later stages.

    Raises:
        RequestError: the engine lacks the tokenizer or chat format for it.
    """
    if not isinstance(prompt, str) and all(isinstance(i, int) for i in prompt):
        return AlignCase(" ".join(map(str, prompt))[:60], [int(i) for i in prompt])  # type: ignore[arg-type]
    if text.tokenizer is None:
        raise RequestError(
            "the engine has no tokenizer", seen=repr(prompt)[:60], allowed="token ids", field="ids"
        )
    if isinstance(prompt, str):
        ids = text.tokenizer.encode(prompt)
        if original is None:
            return AlignCase(_title(prompt), ids)
        theirs = original[0].ids(prompt)
        return AlignCase(_title(prompt), theirs, (TextCheck("token ids", theirs, ids, original[1]),))
    if text.chat is None:
        raise RequestError(
            "the engine has no chat template",
            field="chat",
            fix="leave out `chat`, or rebuild with `chat_template=chatml`",
        )
    messages: Sequence[Mapping[str, Any]] = prompt  # type: ignore[assignment]
    ids = text.chat.prompt_ids(messages, text.tokenizer)
    title = _title(str(messages[-1].get("content")))
    chat = None if original is None else original[0].chat(messages)
    if chat is None or original is None:
        return AlignCase(title, ids)
    rendered = text.chat.prompt_text(messages, tokenizer=text.tokenizer)
    checks = (
        TextCheck("rendered prompt", chat[0], rendered, original[1]),
        TextCheck("token ids", chat[1], ids, original[1]),
    )
    return AlignCase(title, chat[1], checks)


def _title(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"
