"""The Python API: an engine that answers.

Owns the way from prompts and messages to outputs. Knows nothing of HTTP, terminals, scheduling or kernels.

    llm = LLM("engine", device="auto")
    llm.generate(["Hello"], SamplingParams(max_new_tokens=16))[0].text
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from numbers import Integral
from pathlib import Path
from typing import Any, overload

import torch

from ingot.checkpoint.hub import resolve_checkpoint
from ingot.config.build import DEFAULT_MAX_BATCH_SIZE
from ingot.config.runtime import RuntimeConfig
from ingot.config.sampling import SamplingParams
from ingot.device import resolve_device
from ingot.engine.loader import Engine, engine_in_memory, load_engine
from ingot.engine.manifest import is_engine
from ingot.errors import ConfigError, RequestError
from ingot.llm.defaults import default_params
from ingot.llm.outputs import AnswerAssembler, Output, Piece
from ingot.processors.chat import ChatFormat
from ingot.processors.prompt import Prompt
from ingot.processors.tokenizer import Tokenizer
from ingot.runtime.setup import make_executor
from ingot.runtime.tap import Seen, tap

Messages = Sequence[Mapping[str, Any]]
PromptLike = str | Sequence[int] | Prompt


class LLM:
    """An engine, or a checkpoint assembled in memory, ready to generate.

    Args:
        path: an engine folder, a checkpoint folder, or a Hugging Face id.
        device: ``auto``, ``cuda``, ``cuda:N`` or ``cpu``.
        compute_dtype: dtype of arithmetic; ``auto``: the engine's own on a GPU, fp32 on a CPU.
        runtime: cache and step sizes; they change speed and memory, never output.
        max_batch_size, max_seq_len, chat_template, revision: for a checkpoint, as in ``build``; an engine
        has its
            own.

    Raises:
        EngineError, CheckpointError: the folder cannot be loaded.
        DeviceError: the device is not there, or too small.
    """

    def __init__(
        self,
        path: str | Path,
        device: str = "auto",
        *,
        compute_dtype: str = "auto",
        runtime: RuntimeConfig | None = None,
        max_batch_size: int | None = None,
        max_seq_len: int | None = None,
        chat_template: str | None = None,
        revision: str | None = None,
    ) -> None:
        place = resolve_device(device)
        given = {"max_batch_size": max_batch_size, "max_seq_len": max_seq_len, "chat_template": chat_template}
        if is_engine(Path(path)):
            fixed = sorted(name for name, value in given.items() if value is not None)
            if fixed:
                raise ConfigError(
                    "these values are fixed when an engine is built", seen=fixed, fix="build it again"
                )
            engine = load_engine(Path(path), place, compute_dtype)
        else:
            engine = engine_in_memory(
                resolve_checkpoint(path, revision=revision),
                place,
                compute_dtype,
                max_batch_size=DEFAULT_MAX_BATCH_SIZE if max_batch_size is None else max_batch_size,
                max_seq_len=max_seq_len,
                chat_template=chat_template,
            )
        self._setup(engine, runtime or RuntimeConfig())

    def _setup(self, engine: Engine, runtime: RuntimeConfig) -> None:
        self.engine = engine
        self.runtime = runtime
        limits = engine.manifest.build
        self.executor = make_executor(
            engine.model,
            engine.device,
            engine.dtype,
            stop_ids=frozenset(engine.text.stop_ids),
            max_batch_size=limits.max_batch_size,
            max_seq_len=limits.max_seq_len,
            config=runtime,
        )
        self._ids = itertools.count()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The engine's tokenizer; None for an engine built from a checkpoint without one."""
        return self.engine.text.tokenizer

    @property
    def chat_format(self) -> ChatFormat | None:
        """How messages become a prompt; None where neither checkpoint nor build named a template."""
        return self.engine.text.chat

    @property
    def default_params(self) -> SamplingParams:
        """What is used when a call names no parameters: the checkpoint's generation_config over Ingot's
        defaults.
        """
        return default_params(self.engine.manifest.generation)

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Output]:
        """Answer prompts, all in flight together; outputs follow the prompts' order.

        Args:
            prompts: one prompt (text, a list of ids, a Prompt) or a list of them.
            params: one for all, or one for each prompt.

        Raises:
            RequestError: a prompt or value cannot be served; nothing is generated then.
        """
        many = as_prompts(prompts)
        ids = [p.token_ids(self.tokenizer) for p in many]
        return self._run(ids, self._params_for(params, len(ids)))

    @overload
    def chat(self, messages: Messages, params: SamplingParams | None = None) -> Output: ...

    @overload
    def chat(self, messages: Sequence[Messages], params: SamplingParams | None = None) -> list[Output]: ...

    def chat(
        self, messages: Messages | Sequence[Messages], params: SamplingParams | None = None
    ) -> Output | list[Output]:
        """Answer a conversation, ``[{"role": "user", "content": "..."}]``; a list of conversations gives a
        list.

        Raises:
            RequestError: the messages are malformed, or the engine has no chat format.
        """
        single = not messages or isinstance(messages[0], Mapping)
        conversations = [messages] if single else messages
        ids = [self.chat_ids(m) for m in conversations]  # type: ignore[arg-type]
        outputs = self._run(ids, self._params_for(params, len(ids)))
        return outputs[0] if single else outputs

    def chat_ids(self, messages: Messages) -> list[int]:
        """Token ids of the prompt that a conversation becomes."""
        if self.tokenizer is None or self.chat_format is None:
            what = "chat template" if self.tokenizer is not None else "tokenizer"
            raise RequestError(
                f"the engine has no {what}", fix="build with --chat-template chatml, vicuna or a file"
            )
        return self.chat_format.prompt_ids(messages, self.tokenizer)

    def stream(self, prompt: PromptLike | Messages, params: SamplingParams | None = None) -> Iterator[Piece]:
        """Answer one prompt (or conversation) piece by piece; text never ends in half a character.

        The request is checked at once, and aborted when the iterator is closed.

        Raises:
            RequestError: as ``generate``.
        """
        ids = self.chat_ids(prompt) if _is_chat(prompt) else Prompt.of(prompt).token_ids(self.tokenizer)  # type: ignore[arg-type]
        values = params or self.default_params
        request_id = f"r{next(self._ids)}"
        self.executor.add(request_id, ids, values)
        return self._pieces(request_id, ids, values)

    def logits(self, prompt: PromptLike) -> torch.Tensor:
        """Teacher-forced logits of one prompt: float32 [num_tokens, vocab_size] on the CPU.

        Row i is what the model expects after token i.

        Raises:
            RequestError: the prompt is empty, too long, or holds unknown ids.
        """
        ids = Prompt.of(prompt).token_ids(self.tokenizer)
        request_id = f"r{next(self._ids)}"
        self.executor.add_logits(request_id, ids)
        while self.executor.has_work:
            self.executor.step()
        return self.executor.take_logits(request_id)

    def tap(self, *patterns: str) -> AbstractContextManager[Seen]:
        """Collect module outputs by name while the block runs: ``with llm.tap("layers.*") as seen``.

        ``seen`` maps each module's name to a tensor [tokens that ran, ...]. It changes no output.

        Raises:
            RequestError: a pattern matches no module.
        """
        return tap(self.engine.model, self.executor.runner, *patterns)

    def _run(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Output]:
        names = [f"r{next(self._ids)}" for _ in prompts]
        answers: dict[str, list[AnswerAssembler]] = {}
        try:
            for name, ids, values in zip(names, prompts, params, strict=True):
                self.executor.add(name, ids, values)
                answers[name] = [AnswerAssembler(self.tokenizer, values, ids, i) for i in range(values.n)]
            while self.executor.has_work:
                self._advance(answers)
        except BaseException:
            for name in names:
                self.executor.abort(name)
            raise
        return [
            Output(ids, [a.answer for a in answers[name] if a.done])
            for name, ids in zip(names, prompts, strict=True)
        ]

    def _advance(self, answers: Mapping[str, list[AnswerAssembler]]) -> list[Piece]:
        """One step of the executor; returns the pieces that it brought to these answers."""
        pieces = []
        for update in self.executor.step():
            found = answers.get(update.request_id)
            if found is None:
                continue
            assembler = found[update.index]
            pieces.append(assembler.add(update))
            if assembler.done and update.finish_reason is None:
                self.executor.abort(update.request_id, update.index)
        return pieces

    def _pieces(self, request_id: str, ids: list[int], params: SamplingParams) -> Iterator[Piece]:
        answers = [AnswerAssembler(self.tokenizer, params, ids, i) for i in range(params.n)]
        try:
            while not all(a.done for a in answers) and self.executor.has_work:
                yield from self._advance({request_id: answers})
        finally:
            self.executor.abort(request_id)

    def _params_for(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None:
            params = self.default_params
        if isinstance(params, SamplingParams):
            params = [params] * count
        if not isinstance(params, Sequence) or not all(isinstance(v, SamplingParams) for v in params):
            raise RequestError(
                "params must be SamplingParams or a list of them", seen=repr(params)[:80], fix="params"
            )
        if len(params) != count:
            raise RequestError("as many params as prompts", seen=len(params), allowed=count, fix="params")
        if self.tokenizer is None and any(v.stop for v in params):
            raise RequestError(
                "the engine has no tokenizer to find stop strings with", seen="stop", fix="stop_token_ids"
            )
        return list(params)


def as_prompts(value: PromptLike | Sequence[PromptLike]) -> list[Prompt]:
    """One prompt or a list of prompts → a list; a list of integers is one prompt of ids."""
    if isinstance(value, (str, Prompt)) or not isinstance(value, Sequence):
        return [Prompt.of(value)]
    if value and all(isinstance(v, Integral) for v in value):
        return [Prompt.of(value)]
    return [Prompt.of(v) for v in value]


def _is_chat(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)
