"""An engine as LangChain's chat model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any, NamedTuple, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import ConfigDict, Field, model_validator

from ingot.adapters.langchain.call_values import sampling_values
from ingot.adapters.langchain.langchain_messages import as_conversation, as_logprobs, usage
from ingot.adapters.langchain.langchain_tools import ToolUse, as_chunk
from ingot.config.sampling_params import SamplingParams
from ingot.errors import RequestError
from ingot.llm import LLM
from ingot.llm.outputs import Answer, Output, Piece
from ingot.llm.prompt_inputs import Chat


class ChatIngot(BaseChatModel):
    """A chat model that answers by an engine in this process.

    ``invoke``, ``stream``, ``batch`` and their async forms, from any number of threads and tasks, share the
    engine's steps. A dropped stream or a cancelled task ends its own request alone.

    Attributes:
        llm: an ``LLM``, or the folder or Hugging Face id to open one from. ``model`` is the same argument.
        model_name: what results call the model; by default the folder's name, or the architecture.
        params: values that the fields below are put over; None: the engine's defaults.
        temperature, top_p, top_k, max_tokens, seed, stop: as in ``SamplingParams``.
        logprobs: return each token's log-probability, in ``response_metadata["logprobs"]``.
        top_logprobs: return those of this many likeliest tokens too.
        streaming: answer ``invoke`` by a stream, so that callbacks get each piece.

    Every field of ``SamplingParams`` may also be given to a call: ``invoke(..., min_p=0.1)``.

    Raises:
        ValidationError: pydantic's; a value is out of range or unknown.
        EngineError, CheckpointError, DeviceError: the folder cannot be opened.
        RequestError: by a call, which holds what the engine does not take, or asks for another model.
    """

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    llm: LLM = Field(alias="model")
    model_name: str
    params: SamplingParams | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    streaming: bool = False

    @model_validator(mode="before")
    @classmethod
    def _opened(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The arguments with an ``LLM`` in place of a folder, and a name."""
        values = dict(values)
        given = [llm for name in ("model", "llm") if (llm := values.pop(name, None)) is not None]
        if len(given) > 1:
            raise RequestError("model and llm are the same argument", fix="give only one")
        llm = given[0] if given else None
        if llm is None:
            raise RequestError("no engine was given", fix="ChatIngot(model=LLM(...) or a folder)")
        if isinstance(llm, (str, Path)):
            name = Path(llm).resolve().name if Path(llm).exists() else str(llm)
            llm = LLM(llm)
        else:
            name = llm.engine.manifest.model.architecture if isinstance(llm, LLM) else ""
        return {"model_name": name, "llm": llm} | values

    @model_validator(mode="after")
    def _checked(self) -> Self:
        """Values out of range are refused here and not by the first call."""
        self._params(None, {})
        return self

    @property
    def _llm_type(self) -> str:
        return "ingot"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What decides an answer, for LangChain's caches and traces."""
        manifest = self.llm.engine.manifest
        # A checkpoint in memory has no hashes: what it answers is known only while it is there.
        known = f"object {id(self.llm)}"
        if manifest.tensors:
            known = json.dumps(manifest.to_json(), sort_keys=True)
        return {
            "model_name": self.model_name,
            "engine": hashlib.sha256(known.encode()).hexdigest(),
            "params": str(self._params(None, {})),
        }

    def get_token_ids(self, text: str) -> list[int]:
        """The engine's own tokens of a text, without special ones."""
        if self.llm.tokenizer is None:
            fix = "add its files to the checkpoint and build again"
            raise RequestError("the engine has no tokenizer", fix=fix)
        return self.llm.tokenizer.encode(text, add_special_tokens=False)

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Tokens of the prompt that a conversation becomes."""
        use, _ = ToolUse.of({"tools": tools})
        return len(self.llm.chat_ids(Chat(self._conversation(messages), use.tools)))

    def bind_tools(
        self, tools: Sequence[Any], *, tool_choice: str | dict[str, Any] | bool | None = None, **kwargs: Any
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with tools, which the engine's chat template must read.

        Args:
            tools: functions, pydantic classes, LangChain tools, or tools as in the OpenAI API.
            tool_choice: ``auto`` (None, too): the model decides; ``none``; ``any`` (``required`` or True,
                too) or a tool's name: the answer is held to calls by a grammar.
            kwargs: values of each call; ``parallel_tool_calls=False``: one call at most.

        Raises:
            RequestError: a tool is malformed, or ``tool_choice`` names none of them.
        """
        values = {"tools": [convert_to_openai_tool(tool) for tool in tools], "tool_choice": tool_choice}
        ToolUse.of(values)
        return self.bind(**values, **kwargs)

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Answer conversations in flight together: as many as the engine's batch holds, unless the config
        sets ``max_concurrency``.
        """
        most = self.llm.executor.max_batch_size
        configs = [{"max_concurrency": most} | one for one in get_config_list(config, len(inputs))]
        return super().batch(inputs, configs, return_exceptions=return_exceptions, **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        asked = self._asked(messages, stop, kwargs)
        return self._result(self.llm.generate(asked.chat, asked.params)[0], asked.use)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        asked = self._asked(messages, stop, kwargs)
        return self._result((await self.llm.agenerate(asked.chat, asked.params))[0], asked.use)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        asked = self._asked(messages, stop, kwargs, stream=True)
        chunk_of = self._chunks(asked)
        with closing(self.llm.stream(asked.chat, asked.params)) as pieces:
            for piece in pieces:
                chunk = chunk_of(piece)
                if chunk is not None:
                    if run_manager is not None:
                        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        asked = self._asked(messages, stop, kwargs, stream=True)
        chunk_of = self._chunks(asked)
        async with aclosing(self.llm.astream(asked.chat, asked.params)) as pieces:
            async for piece in pieces:
                chunk = chunk_of(piece)
                if chunk is not None:
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    def _params(self, stop: list[str] | None, kwargs: dict[str, Any]) -> SamplingParams:
        fields = {name: getattr(self, name) for name in _FIELDS}
        if stop:
            kwargs = kwargs | {"stop": stop}
        return (self.params or self.llm.default_params).replace(**sampling_values(fields, kwargs))

    def _asked(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None,
        kwargs: dict[str, Any],
        *,
        stream: bool = False,
    ) -> _Asked:
        use, rest = ToolUse.of(kwargs)
        params = self._params(stop, rest)
        if use.grammar is not None:
            params = params.replace(grammar=use.grammar)
        if stream and params.n > 1:
            raise RequestError("a stream has one answer", seen=f"n={params.n}", allowed="n=1", field="n")
        return _Asked(Chat(self._conversation(messages), use.tools), params, use)

    def _conversation(self, messages: list[BaseMessage]) -> list[dict[str, Any]]:
        takes = self.llm.engine.manifest.model.modality.in_messages
        return as_conversation(messages, self.llm.read_image if takes else None)

    def _result(self, output: Output, use: ToolUse) -> ChatResult:
        generations = []
        for answer in output.answers:
            message = use.message(answer.text or "")
            message.usage_metadata = usage(len(output.prompt_token_ids), len(answer.token_ids))
            info = self._ending(answer, has_calls=bool(message.tool_calls))
            if answer.logprobs is not None:
                info["logprobs"] = as_logprobs(answer.logprobs, self.llm.tokenizer)
            generations.append(ChatGeneration(message=message, generation_info=info))
        return ChatResult(generations=generations)

    def _chunks(self, asked: _Asked) -> Callable[[Piece], ChatGenerationChunk | None]:
        """A function from pieces of one answer to chunks; None for a piece that adds nothing."""
        num_tokens, parts = 0, asked.use.parts()

        def chunk_of(piece: Piece) -> ChatGenerationChunk | None:
            nonlocal num_tokens
            num_tokens += len(piece.token_ids)
            ends = piece.finish_reason is not None
            message = as_chunk(parts.feed(piece.text, final=ends))
            if not (message.content or message.tool_call_chunks or piece.logprobs or ends):
                return None
            info: dict[str, Any] = {}
            if piece.logprobs:
                info["logprobs"] = as_logprobs(piece.logprobs, self.llm.tokenizer)
            if ends:
                info |= self._ending(piece, has_calls=bool(parts.tool_calls))
                message.chunk_position = "last"
                message.usage_metadata = usage(len(self.llm.chat_ids(asked.chat)), num_tokens)
            return ChatGenerationChunk(message=message, generation_info=info)

        return chunk_of

    def _ending(self, answer: Answer | Piece, *, has_calls: bool) -> dict[str, Any]:
        calls = has_calls and answer.finish_reason == "stop"
        return {
            "finish_reason": "tool_calls" if calls else answer.finish_reason,
            "model_name": self.model_name,
            "model_provider": "ingot",
        }


class _Asked(NamedTuple):
    """The conversation with its tools, the values, and what the answer may call."""

    chat: Chat
    params: SamplingParams
    use: ToolUse


_FIELDS = ("temperature", "top_p", "top_k", "max_tokens", "seed", "stop", "logprobs", "top_logprobs")
