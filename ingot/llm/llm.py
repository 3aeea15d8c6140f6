"""The Python API: an engine that answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, Unpack, overload

import torch

from ingot.building.random_weights import engine_from_config
from ingot.config.build_config import DEFAULT_MAX_BATCH_SIZE
from ingot.config.modality import expect_text
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.config.sampling_params import SamplingParams, SamplingValues
from ingot.device import resolve_device, respect_quota
from ingot.engine.engine_loader import Engine
from ingot.errors import EngineError, RequestError
from ingot.llm.active_requests import ActiveRequest
from ingot.llm.batch_calls import Calls, Progress, keeping, only_async_pieces, only_pieces, pooled
from ingot.llm.explain_prompt import explain_request
from ingot.llm.explanation import Explanation
from ingot.llm.open_engine import executor_of, open_engine
from ingot.llm.outputs import Output, Piece
from ingot.llm.picture_prompts import Pictures, encoded
from ingot.llm.prompt_inputs import Chat, Entry, Messages, PromptLike, prompt_entry, split_prompts
from ingot.llm.sampling_defaults import default_params, params_for
from ingot.runtime.likelihood import keep_likelihood, keep_logits
from ingot.runtime.rehearsal import warm_up
from ingot.runtime.tap import Seen, tap
from ingot.text.chat.chat_renderer import ChatFormat
from ingot.text.prompt import Input, Prompt
from ingot.text.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ingot.image.image_reader import Source

Prompts = PromptLike | Messages | Sequence[PromptLike | Messages]
Params = SamplingParams | Sequence[SamplingParams] | None  # one for all prompts, or one for each


class LLM:
    """An engine, or a checkpoint assembled in memory, ready to generate; a context manager that closes it.

    Any number of threads and asyncio tasks may use it at once: their requests share steps. A caller that is
    interrupted or cancelled, or drops a stream, ends its own requests alone.

    An engine without a proof, or whose last ``ingot verify`` on this machine failed, is logged as a warning.

    Args:
        path: an engine folder, a checkpoint folder, or a Hugging Face id.
        device: ``auto``, ``cuda``, ``cuda:N`` or ``cpu``.
        compute_dtype: dtype of arithmetic; ``auto``: the engine's own on a GPU, fp32 on a CPU.
        runtime: cache and step sizes, CUDA graphs, and whether arithmetic is batch invariant.
        max_batch_size, max_seq_len: the limits; of an engine at most those that it was built with, lowered
            for this process alone. Less memory is taken then.
        layers, quant, chat_template, tokenizer, revision: for a checkpoint, as in ``build``; an engine has
            its own.

    Raises:
        ConfigError: a limit is larger than the engine's, or a value is the build's alone.
        EngineError, CheckpointError: the folder cannot be loaded.
        DeviceError: the device is missing, or too small.
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
        layers: str | None = None,
        quant: str | QuantConfig | None = None,
        chat_template: str | None = None,
        tokenizer: str | Path | None = None,
        revision: str | None = None,
    ) -> None:
        engine = open_engine(
            path,
            resolve_device(device),
            compute_dtype,
            given={
                "chat_template": chat_template,
                "layers": layers,
                "quant": quant,
                "tokenizer": tokenizer,
            },
            revision=revision,
            limits={"max_batch_size": max_batch_size, "max_seq_len": max_seq_len, "runtime": runtime},
        )
        self._setup(engine, runtime or RuntimeConfig())

    @classmethod
    def of_engine(cls, engine: Engine, runtime: RuntimeConfig | None = None) -> Self:
        """An engine that is loaded already, whatever its proof says; OutOfMemoryError where the device is too
        small.
        """
        llm = cls.__new__(cls)
        llm._setup(engine, runtime or RuntimeConfig())
        return llm

    @classmethod
    def from_config(
        cls,
        config: str | Path,
        device: str = "auto",
        *,
        dtype: str = "auto",
        runtime: RuntimeConfig | None = None,
        max_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
        max_seq_len: int | None = None,
        quant: str | QuantConfig | None = None,
        seed: int = 0,
    ) -> Self:
        """A model of a config.json's shape with random weights and no tokenizer, for measuring.

        Args:
            config: a Hugging Face config.json, or the folder that holds one.
            dtype: ``fp16``, ``bf16``, ``fp32`` or ``auto``: the config's own (fp32 on a CPU).
            quant: as in ``build``.

        Raises:
            CheckpointError: the config cannot be read, or its architecture is unknown.
            DeviceError: the device is missing, or too small.
        """
        place = resolve_device(device)
        engine = engine_from_config(
            Path(config),
            place,
            dtype,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            quant=quant,
            seed=seed,
            runtime=runtime,
        )
        return cls.of_engine(engine, runtime)

    def _setup(self, engine: Engine, runtime: RuntimeConfig) -> None:
        self.engine = engine
        self.runtime = runtime = runtime.of_engine(engine.manifest.build.kv_dtype)
        respect_quota()
        self.executor = executor_of(engine, runtime)
        self._calls = Calls(self.executor, engine.text)
        self._pictures = Pictures.of(engine.manifest.model)

    def __repr__(self) -> str:
        if "engine" not in vars(self):
            return "LLM(closed)"
        engine = self.engine
        limits = engine.manifest.build
        return (
            f"LLM({engine.manifest.model.architecture}, {engine.device}, {engine.dtypes}, "
            f"max_batch_size={limits.max_batch_size}, max_seq_len={limits.max_seq_len})"
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in ("engine", "executor", "runtime", "_calls"):
                raise EngineError("this LLM is closed", fix="make a new one")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce__(self) -> NoReturn:
        raise EngineError("an LLM cannot be copied or sent to another process", fix="make it there")

    def close(self) -> None:
        """End all requests, and free weights and caches. Calls that wait, and later ones, get an EngineError.
        Closing it again does nothing.
        """
        if "_calls" in vars(self):
            self._calls.loop.close()
            if self._pictures is not None:
                self._pictures.close()
            del self._calls, self.executor, self.engine, self.runtime

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

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
        """What a call without parameters takes: the checkpoint's generation_config over Ingot's defaults."""
        return default_params(self.engine.manifest.generation)

    def generate(
        self,
        prompts: Prompts,
        params: Params = None,
        *,
        progress: Progress | None = None,
        **values: Unpack[SamplingValues],
    ) -> list[Output]:
        """Answer prompts, all in flight together; outputs follow the prompts' order.

        Args:
            prompts: one prompt (text, a list of ids, a Prompt, or a conversation as in ``chat``) or a list. A
                Prompt may hold inputs beside text, for a model that takes them.
            params: one for all, or one for each prompt.
            progress: called as (prompts that are answered, prompts) whenever one is. What it raises ends the
                call.
            values: fields of ``SamplingParams`` by name, over ``params``: ``max_new_tokens=64``.

        Raises:
            RequestError: a prompt or value cannot be served; nothing is generated then.
        """
        return self._calls.generate(self._requests(prompts, params, values), progress)

    async def agenerate(
        self, prompts: Prompts, params: Params = None, **values: Unpack[SamplingValues]
    ) -> list[Output]:
        """``generate`` for asyncio; a task that is cancelled ends its requests."""
        return await self._calls.agenerate(self._requests(prompts, params, values))

    @overload
    def chat(
        self, messages: Messages, params: SamplingParams | None = None, **values: Unpack[SamplingValues]
    ) -> Output: ...

    @overload
    def chat(
        self,
        messages: Sequence[Messages],
        params: SamplingParams | None = None,
        **values: Unpack[SamplingValues],
    ) -> list[Output]: ...

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | None = None,
        **values: Unpack[SamplingValues],
    ) -> Output | list[Output]:
        """Answer a conversation, ``[{"role": "user", "content": "..."}]``; a list of conversations gives a
        list. ``params`` and ``values`` as in ``generate``.

        Raises:
            RequestError: the messages are malformed, or the engine has no chat format.
            ConfigError: the engine is of speech.
        """
        if isinstance(messages, str) or not isinstance(messages, Sequence):
            seen, form = repr(messages)[:80], '[{"role": "user", "content": "..."}]'
            raise RequestError(
                "a conversation is a list of messages", seen=seen, allowed=form, fix="messages"
            )
        single = not messages or isinstance(messages[0], Mapping)
        conversations = [messages] if single else messages
        chosen = self._params(params, values, len(conversations))
        self._expect_chat()
        entries = [self._entry(m) for m in conversations]  # type: ignore[arg-type]
        outputs = self._calls.generate(self._calls.requests(entries, chosen))
        return outputs[0] if single else outputs

    def prompt_ids(self, prompt: PromptLike | Messages) -> list[int]:
        """Token ids that a prompt, or a conversation, becomes; placeholders where inputs stand."""
        return self._entry(prompt).ids

    def chat_ids(self, messages: Messages | Chat) -> list[int]:
        """Token ids of the prompt that a conversation becomes; placeholders where pictures stand."""
        self._expect_chat()
        return self._entry(messages if isinstance(messages, Chat) else Chat(messages)).ids

    def encode_image(self, image: Source | Input) -> torch.Tensor:
        """What a picture becomes in a prompt: float32 [positions, hidden_size], on the CPU.

        Args:
            image: a path, a data URL, a file's bytes, an open file, a PIL image, RGB values [3, height,
                width], or what ``read_image`` gave.

        Raises:
            RequestError: it cannot be read, or the engine takes no pictures.
        """
        picture = image if isinstance(image, Input) else self.read_image(image)
        return self._calls.loop.between_steps(partial(encoded, self.engine, picture))

    def read_image(self, image: Source) -> Input:
        """A picture as a ``Prompt`` takes it, and a message in a part ``{"type": "input", "input": …}``: what
        is asked about again is decoded once. Takes and raises what ``encode_image`` does.
        """
        if self._pictures is None:
            seen = self.engine.manifest.model.modality.model
            raise RequestError("this engine takes no pictures", seen=seen, fix="an engine of MiniGPT-4")
        return self._pictures.read(image)

    def stream(
        self,
        prompt: PromptLike | Messages,
        params: SamplingParams | None = None,
        **values: Unpack[SamplingValues],
    ) -> Generator[Piece, None, None]:
        """Answer one prompt (or conversation) piece by piece; text never ends in half a character.

        The request is checked at once, as by ``generate``, starts with the first piece, and is aborted when
        the iterator is closed. Several streams, and calls of ``generate``, may be open side by side.
        """
        return only_pieces(self._calls.stream(self._requests(prompt, params, values, one=True)))

    def astream(
        self,
        prompt: PromptLike | Messages,
        params: SamplingParams | None = None,
        **values: Unpack[SamplingValues],
    ) -> AsyncGenerator[Piece, None]:
        """``stream`` for asyncio. Cancelling the task that reads, or ``aclose()``, ends the request."""
        return only_async_pieces(self._calls.astream(self._requests(prompt, params, values, one=True)))

    def stream_many(
        self, prompts: Prompts, params: Params = None, **values: Unpack[SamplingValues]
    ) -> Iterator[tuple[int, Piece]]:
        """``stream`` for several prompts, all in flight together: (position of the prompt, piece)."""
        return self._calls.stream(self._requests(prompts, params, values))

    def logits(self, prompt: PromptLike) -> torch.Tensor:
        """Teacher-forced logits of one prompt: float32 [num_tokens, vocab_size] on the CPU; row i is what the
        model expects after token i.

        Raises:
            RequestError: the prompt is empty, too long, holds unknown ids, or inputs that the model does not
                take.
        """
        return self._calls.read(self._read_entry(prompt), keep_logits).kept

    def log_likelihood(self, prompt: PromptLike) -> torch.Tensor:
        """Log-probability of each token but the first, given those before it: float32 [num_tokens - 1] on the
        CPU. Unlike ``logits`` it keeps no row of the vocabulary; raises as that does. In the places of
        embeddings it is NaN: they are no tokens.
        """
        entry = self._read_entry(prompt)
        found = self._calls.read(entry, keep_likelihood(entry.ids)).kept
        for rows in (given for given in entry.inputs if not given.encodes):
            found[max(rows.place - 1, 0) : rows.end - 1] = torch.nan
        return found

    def cross_attention(
        self, prompt: PromptLike, heads: Sequence[tuple[int, int]], below: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the tokens of one prompt attend to in its input, teacher-forced.

        Args:
            heads: as (layer, head).
            below: log-probabilities are those among the ids below it.

        Returns:
            ``log_likelihood`` of the prompt, and scores before the softmax, float32 [num_tokens, heads,
            positions], both on the CPU.

        Raises:
            RequestError: as ``logits``; or the prompt has no input, the model no such head.
        """
        entry, model = self._read_entry(prompt), self.engine.manifest.model
        if not model.crosses or not entry.inputs:
            seen = f"{len(entry.inputs)} inputs, a model of wiring {model.wiring}"
            fix = "a prompt with an input, for a model whose layers attend to one"
            raise RequestError("there is no cross-attention", seen=seen, fix=fix)
        bad = [(i, j) for i, j in heads if not (0 <= i < model.num_layers and 0 <= j < model.num_heads)]
        if bad or not heads:
            allowed = f"layer 0 to {model.num_layers - 1}, head 0 to {model.num_heads - 1}"
            raise RequestError("the model has no such heads", seen=bad, allowed=allowed, fix="the heads")
        reading = self._calls.read(entry, keep_likelihood(entry.ids, below), heads)
        return reading.kept, reading.scores

    def embed(self, prompts: PromptLike | Sequence[PromptLike], pooling: str = "mean") -> torch.Tensor:
        """One vector per prompt, of its tokens' hidden states behind the final norm (not of unit length):
        float32 [N, hidden_size] on the CPU. Prompts share steps, with answers too; nothing is generated.

        A ``w4a8`` engine's states are rotated and lack the final norm's weight.

        Args:
            prompts: one prompt or a list of them, each at most ``max_seq_len`` tokens long.
            pooling: ``mean`` over all tokens (BOS included), or ``last``: the last token's states.

        Raises:
            RequestError: unknown pooling, or a prompt is empty (or too long …, as in ``logits``).
        """
        texts = split_prompts(prompts)
        for position, prompt in enumerate(texts, start=1):
            if isinstance(prompt, str) and not prompt:  # a tokenizer's BOS would hide it
                raise RequestError(f"prompt {position}: the text is empty", fix="leave it out")
        entries, keep = [self._read_entry(prompt) for prompt in texts], keeping(pooling)  # type: ignore[arg-type]
        if not entries:
            return torch.empty(0, self.engine.manifest.model.hidden_size)
        chunks = self._calls.read_hidden(entries, keep)
        return torch.stack([pooled(c, len(e.ids), pooling) for c, e in zip(chunks, entries, strict=True)])

    def explain(
        self, prompt: PromptLike | Messages, params: SamplingParams | Mapping[str, Any] | None = None
    ) -> Explanation:
        """What a request is made of, without running it: its exact prompt, what ends it, where every value is
        from, and what Hugging Face's ``generate`` would do differently.

        Args:
            params: as in ``generate``, or only the values that a request names, over the defaults.

        Raises:
            RequestError: it is no prompt, or a value is out of range.
        """
        return explain_request(self.engine.manifest, self.engine.text, prompt, params)

    def warm_up(self, batch_sizes: Iterable[int] | None = None, kinds: Iterable[str] | None = None) -> None:
        """Do now what the first requests would wait for: capture the graphs for batches of these sizes (None:
        of every size that the engine takes) and for prompts that join them, build kernels, run prompts of
        many lengths. Nothing to do on a CPU.

        Args:
            kinds: of sampling, each with graphs of its own: ``greedy``, ``unfiltered`` (a temperature),
                ``filtered`` (top-k or top-p too), ``penalized`` (penalties or a minimum length too),
                ``masked`` (grammars too), ``greedy_logprobs``, and ``logprobs`` (everything); of speech also
                ``transcript`` (a greedy one) and ``everything`` (transcripts too). None: all. All sizes of a
                7B take 1.2 s a kind on an H200.

        Raises:
            RequestError: a size that the engine's batch does not hold, or an unknown kind.
        """
        self._calls.loop.between_steps(partial(warm_up, self.executor, batch_sizes, kinds))

    def tap(self, *patterns: str) -> AbstractContextManager[Seen]:
        """Collect module outputs by name while the block runs: ``with llm.tap("layers.*") as seen``.

        ``seen`` maps each module's name to a tensor [tokens that ran, ...], those of other threads'
        requests included. It changes no output. ``step.positions``, ``step.seq_lens``, ``step.query_start``,
        ``step.input_ids`` and ``step.visible.N`` are the steps' rows and the mask of layer N (``Seen``).

        Raises:
            RequestError: a pattern matches no module.
        """
        return self._calls.loop.within(tap(self.engine.model, self.executor, *patterns))

    def _entry(self, prompt: PromptLike | Messages) -> Entry:
        admission = self.executor.admission
        return prompt_entry(prompt, self.engine.text, admission.inputs, self._pictures, admission.rows)

    def _expect_chat(self) -> None:
        expect_text(self.engine.manifest.model.modality, "a conversation", "Transcriber(ENGINE)")

    def _read_entry(self, prompt: PromptLike) -> Entry:
        """The entry of a prompt that is no conversation."""
        return self._entry(Prompt.of(prompt))

    def _params(self, params: Params, values: Mapping[str, Any], count: int) -> list[SamplingParams]:
        return params_for(params, self.default_params, values, self.tokenizer, count)

    def _requests(
        self, prompts: Prompts, params: Params, values: Mapping[str, Any], *, one: bool = False
    ) -> list[ActiveRequest]:
        """Checked requests for one prompt, or for as many as there are."""
        many = [prompts] if one else split_prompts(prompts)
        entries = [self._entry(p) for p in many]  # type: ignore[arg-type]
        return self._calls.requests(entries, self._params(params, values, len(entries)))
