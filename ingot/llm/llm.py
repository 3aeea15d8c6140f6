"""The Python API: an engine that answers.

Owns the way from prompts and messages to outputs. Knows nothing of HTTP, terminals, scheduling or kernels.

    llm = LLM("engine", device="auto")
    llm.generate(["Hello"], SamplingParams(max_new_tokens=16))[0].text
"""

from __future__ import annotations

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
from ingot.llm.flights import Flights
from ingot.llm.outputs import Output, Piece
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
        self._flights = Flights(self.executor, engine.text.tokenizer)

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
        values = [self._with_chat_stops(v) for v in self._params_for(params, len(ids))]
        outputs = self._run(ids, values, chat=True)
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

        The request is checked at once, starts with the first piece, and is aborted when the iterator is
        closed. Several streams, and calls of ``generate``, may be open side by side.

        Raises:
            RequestError: as ``generate``.
        """
        chat = _is_chat(prompt)
        ids = self.chat_ids(prompt) if chat else Prompt.of(prompt).token_ids(self.tokenizer)  # type: ignore[arg-type]
        values = self._params_for(params, 1)[0]
        if chat:
            values = self._with_chat_stops(values)
        self.executor.check(ids, values)
        return self._pieces(ids, values, chat)

    def logits(self, prompt: PromptLike) -> torch.Tensor:
        """Teacher-forced logits of one prompt: float32 [num_tokens, vocab_size] on the CPU.

        Row i is what the model expects after token i.

        Raises:
            RequestError: the prompt is empty, too long, or holds unknown ids.
        """
        ids = Prompt.of(prompt).token_ids(self.tokenizer)
        return self._flights.logits(ids)

    def tap(self, *patterns: str) -> AbstractContextManager[Seen]:
        """Collect module outputs by name while the block runs: ``with llm.tap("layers.*") as seen``.

        ``seen`` maps each module's name to a tensor [tokens that ran, ...]. It changes no output.

        Raises:
            RequestError: a pattern matches no module.
        """
        return tap(self.engine.model, self.executor.runner, *patterns)

    def _run(
        self, prompts: list[list[int]], params: list[SamplingParams], *, chat: bool = False
    ) -> list[Output]:
        pairs = list(zip(prompts, params, strict=True))
        for position, (ids, values) in enumerate(pairs, start=1):
            self._check(ids, values, f"prompt {position}: " if len(pairs) > 1 else "")
        flights = [self._flights.start(ids, values, chat=chat) for ids, values in pairs]
        self._flights.finish(flights)
        return [flight.output() for flight in flights]

    def _check(self, ids: list[int], params: SamplingParams, which: str) -> None:
        """Refuse a request that cannot be served; ``which`` goes before the message."""
        try:
            self.executor.check(ids, params)
        except RequestError as error:
            raise RequestError(
                which + error.what, seen=error.seen, allowed=error.allowed, fix=error.fix
            ) from None

    def _pieces(self, ids: list[int], params: SamplingParams, chat: bool) -> Iterator[Piece]:
        flight = self._flights.start(ids, params, chat=chat)
        try:
            while flight.pieces or not flight.done:
                if flight.pieces:
                    yield flight.pieces.popleft()
                else:
                    self._flights.step()
        finally:
            self._flights.cancel(flight)

    def _with_chat_stops(self, params: SamplingParams) -> SamplingParams:
        """The values with the chat format's own stop strings (Vicuna's ``###``) added."""
        extra = self.chat_format.stop_strings if self.chat_format is not None else ()
        return params.replace(stop=(*params.stop, *extra)) if extra else params

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
