"""A model that clients name: an engine's process and its text side."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ingot.audio.log_mel import HOP, WINDOW
from ingot.config.grammar_spec import Grammar, Thinking
from ingot.config.sampling_params import SamplingParams
from ingot.config.server_config import ServeConfig
from ingot.engine.engine_facts import read_text_side
from ingot.engine.engine_text import TextParts
from ingot.engine.manifest import Manifest, is_engine
from ingot.engine.proof_file import standing
from ingot.errors import DeviceError, EngineError, RequestError
from ingot.llm.explain_prompt import explain_request
from ingot.llm.explanation import Explanation
from ingot.llm.prompt_inputs import Chat, PromptLike, chat_pieces, prompt_entry
from ingot.llm.sampling_defaults import Defaults, read_defaults
from ingot.serve.api_errors import ApiError, bad_request, refused, stopping
from ingot.serve.engine_calls.answering import Job
from ingot.serve.engine_calls.engine_client import EngineClient
from ingot.serve.engine_calls.text_files import TextFiles
from ingot.serve.grammar_checks import GrammarChecks
from ingot.serve.long_prompts import LongPromptError, LongPrompts, is_long
from ingot.serve.media_parts import picture_places, refuse_media, without_parts
from ingot.serve.picture_service import ServedPictures
from ingot.serve.response_formats import AnswerFormat
from ingot.serve.speech_service import SpeechService, check_packages
from ingot.text.grammar.closed_schemas import closed_grammar
from ingot.text.grammar.grammar_check import check_ends, grammar_tokenizer
from ingot.text.grammar.grammar_compiler import with_text_start
from ingot.text.parsing.thinking import CLOSE, opens_thinking
from ingot.text.prompt_worker import placed, with_inputs
from ingot.text.tokenizer.tokenizer import Tokenizer

Value = TypeVar("Value")
_PROMPT_END = 16  # tokens in which a template opens or closes a block of thoughts
_MOST_IDS = 1 << 17  # that a prompt may have beyond the engine's length, to be tokenized
CHECKPOINT_DOUBT = "the model is unproven: it is a checkpoint, of which no engine was built"


@dataclass(frozen=True)
class TextSide:
    """A model without its weights; ``doubt``: why it is not to be trusted, None: it is; ``files``: copies of
    the files that its text was read from.
    """

    name: str
    folder: Path
    manifest: Manifest
    text: TextParts
    tokenizer: Tokenizer
    defaults: Defaults
    doubt: str | None
    files: TextFiles

    @property
    def speech_features(self) -> tuple[int, int] | None:
        """The shape of a window's features; None for a model that takes text."""
        config = self.manifest.model
        if config.encoder is None or config.modality.takes_text:
            return None
        return config.encoder.features[0], WINDOW // HOP

    @property
    def features(self) -> tuple[int, ...] | None:
        """The shape of one input; None for a model that takes text alone."""
        encoder = self.manifest.model.encoder
        return None if encoder is None else self.speech_features or encoder.features

    @classmethod
    def read(cls, name: str, folder: Path) -> TextSide:
        """Read an engine's or a checkpoint's folder; raises EngineError or CheckpointError where it cannot be
        read, or has no tokenizer.
        """
        manifest, text = read_text_side(folder)
        if text.tokenizer is None:
            fix = "add the tokenizer's files to the checkpoint and build it again"
            raise EngineError("the engine has no tokenizer, so it cannot be served", seen=folder, fix=fix)
        if not manifest.model.modality.takes_text:
            check_packages(name)
        doubt = standing(folder) if is_engine(folder) else CHECKPOINT_DOUBT
        files = TextFiles(folder, manifest, text.tokenizer.files)
        defaults = read_defaults(manifest.generation)
        return cls(name, folder, manifest, text, text.tokenizer, defaults, doubt, files)

    def check_proof(self, *, unproven: bool, allow: str) -> None:
        """Raises EngineError for a model that is not to be trusted, unless it is served ``unproven``;
        ``allow`` says how.
        """
        if self.doubt is not None and not unproven:
            fix = f"prove it with `ingot build` and `ingot verify`, or {allow}"
            raise EngineError(f"{self.name} is not served: {self.doubt}", fix=fix)


class ServedModel:
    """A text side and the engine that runs it; ``speech`` of a speech model, which takes no text,
    ``pictures`` of a model that takes them beside text.
    """

    def __init__(
        self,
        side: TextSide,
        engine: EngineClient,
        grammars: GrammarChecks,
        config: ServeConfig = ServeConfig(),  # noqa: B008
    ) -> None:
        self.side = side
        self._grammars = grammars
        self.name = side.name
        self.engine = engine
        self.tokenizer = side.tokenizer
        self.defaults = side.defaults
        self.max_seq_len = engine.limits.max_seq_len
        self.pictures = ServedPictures.of(side.manifest.model, engine)
        self._long = LongPrompts(side.files.folder, side.manifest, self.max_seq_len + _MOST_IDS)
        self.speech = None
        if side.speech_features is not None:
            self.speech = SpeechService(side.manifest, self.tokenizer, engine, config)
        # One thread per answer, so that no request waits for another's long prompt.
        self._threads = ThreadPoolExecutor(engine.most_answers, thread_name_prefix="prompt")
        self._closed = False
        self._closes_objects = config.closed_objects

    def close(self) -> None:
        """Take no more; callers that wait for a process get an error. The engine has its own ``close``."""
        self._closed = True
        self._threads.shutdown(wait=False)
        self._long.close()
        if self.speech is not None:
            self.speech.close()
        if self.pictures:
            self.pictures.close()

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Chat:
        """A conversation as a prompt; raises ApiError where a part is not text, a variable has the name of
        something else, or the chat format has no place for tools.
        """
        refuse_media(messages, images=self.pictures is not None)
        chat = self.side.text.chat
        if tools and chat is not None and "tools" not in chat.variables:
            text = f"tools: the chat format of {self.name} takes no tools; use a model whose format does"
            raise bad_request(text, "tools", "unsupported_parameter")
        try:
            return Chat(messages, tools, variables)
        except RequestError as error:
            raise self._api_error(error, "messages") from None

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[list[int], list[int]]:
        """Ids of a conversation, and where the placeholders of each picture begin; special tokens that a user
        typed stay text, and no picture is read. May take seconds. Raises ApiError where the messages or tools
        do not fit the chat format.
        """
        try:
            chat = self.conversation(messages, variables, tools)
            places = picture_places(messages) if self.pictures else []
            texts = without_parts(messages, places)
            if self.side.text.chat is not None and is_long([texts, variables, tools]):
                ids, starts = self._long.chat_ids(replace(chat, messages=texts), places)
            else:
                given = replace(chat, messages=with_inputs(texts, places))
                ids, starts = placed(chat_pieces(given, self.side.text))
            if self.pictures is None:
                return ids, []
            self._long.check(len(ids) + self.pictures.num_tokens(len(starts)))
            return self.pictures.with_placeholders(ids, starts)
        except RequestError as error:
            raise self._api_error(error, "messages") from None
        except LongPromptError as error:
            raise self._too_long(error.count, 1, "messages") from None

    def picture_slots(self, messages: Sequence[Mapping[str, Any]]) -> AbstractContextManager[Sequence[int]]:
        """A slot for each picture, until the block ends; raises ApiError where there are too many pictures,
        or too many are held already.
        """
        count = len(picture_places(messages)) if self.pictures else 0
        if self.pictures is None or not count:
            return nullcontext(())
        tokens = self.pictures.num_tokens(count)
        if tokens >= self.max_seq_len:  # before anything is decoded
            raise self._too_long(tokens, 1, "messages")
        return self.pictures.slots(count)

    def read_pictures(
        self, messages: Sequence[Mapping[str, Any]], slots: Sequence[int], cancelled: threading.Event
    ) -> None:
        """Decode the pictures into their slots. May take seconds. Raises ApiError where one cannot be
        read.
        """
        if self.pictures is None or not slots:
            return
        try:
            self.pictures.read(messages, slots, cancelled)
        except RequestError as error:
            raise self._api_error(error, "messages") from None

    def prompt_ids(
        self, prompt: str | Sequence[int], *, add_special_tokens: bool = True, field: str = "prompt"
    ) -> list[int]:
        """Ids of a prompt that is used as it is; its special tokens are parsed, as ``LLM.generate`` does.
        Raises ApiError where it cannot be encoded.
        """
        try:
            if isinstance(prompt, str) and is_long(prompt):
                return self._long.prompt_ids(prompt, add_special_tokens=add_special_tokens)
            if isinstance(prompt, str) and not add_special_tokens:
                return self.tokenizer.encode(prompt, add_special_tokens=False)
            return prompt_entry(prompt, self.side.text).ids
        except RequestError as error:
            raise self._api_error(error, field) from None
        except LongPromptError as error:
            raise self._too_long(error.count, 1, field) from None

    def explained(self, prompt: PromptLike, values: Mapping[str, Any]) -> Explanation:
        """What ``ingot explain`` says of a request that names these values. May take seconds. Raises ApiError
        where the prompt cannot be encoded.
        """
        served = replace(self.side.manifest.build, max_seq_len=self.max_seq_len)
        try:
            found = explain_request(replace(self.side.manifest, build=served), self.side.text, prompt, values)
            name = found.chat_format
            return found.replace(chat_format=name and name.replace(str(self.side.folder), self.name))
        except RequestError as error:
            raise self._api_error(error, "prompt") from None

    def check_ids(self, ids: Sequence[int], new_tokens: int, field: str) -> None:
        """Raises ApiError for a prompt that is empty, holds unknown ids, or is too long with ``new_tokens``
        (``context_length_exceeded``).
        """
        limits = self.engine.limits
        if not ids:
            raise bad_request(f"{field} is empty", field)
        if len(ids) + new_tokens > limits.max_seq_len:
            raise self._too_long(len(ids), new_tokens, field)
        if max(ids) >= limits.vocab_size:
            text = f"{field} holds the token id {max(ids)}; the model's are below {limits.vocab_size}"
            raise bad_request(text, field)

    def thoughts(self, ids: Sequence[int]) -> Thinking:
        """Whether the answer to a prompt begins with thoughts: it ``must`` where the prompt has opened them,
        and ``may`` where it has not closed them.
        """
        chat = self.side.text.chat
        if chat is None or not chat.thinks:
            return "no"
        end = self.tokenizer.decode(ids[-_PROMPT_END:], skip_special_tokens=False).rstrip()
        if opens_thinking(end):
            return "must"
        return "no" if end.endswith(CLOSE) else "may"

    @asynccontextmanager
    async def checked_grammars(self, jobs: Sequence[Job], field: str | None) -> AsyncIterator[list[Job]]:
        """The jobs with the bytes of their grammars, which have room until the block ends; the grammars are
        from ``field`` of the request. May take seconds. Raises ApiError where a grammar cannot be compiled,
        or there is no room for it now.
        """
        wanted = {job.params.grammar: job.params for job in jobs if job.params is not None}
        sizes: dict[Grammar, int] = {}
        for grammar, params in wanted.items():
            if grammar is None:
                continue
            try:
                check_ends(params, frozenset(self.side.text.stop_ids), self.engine.limits.vocab_size)
                grammar_tokenizer(self.tokenizer)
            except (RequestError, DeviceError) as error:
                raise self._api_error(error, field or "grammar") from None
            sizes[grammar] = await self._grammars.check(grammar, field)
        with self._grammars.room(sizes):
            grammars = [None if job.params is None else job.params.grammar for job in jobs]
            found = zip(jobs, grammars, strict=True)
            yield [replace(job, grammar_bytes=sizes[one]) if one else job for job, one in found]

    async def in_thread(
        self, work: Callable[..., Value], *args: Any, cancelled: threading.Event | None = None
    ) -> Value:
        """What ``work`` returns, which may take seconds. A cancelled caller sets ``cancelled`` and waits all
        the same: its place in the queue is taken as long as the work runs.
        """
        running = asyncio.get_running_loop().run_in_executor(self._threads, work, *args)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if cancelled is not None:
                cancelled.set()
            raise
        finally:
            await asyncio.wait({running})
            if not running.cancelled():
                running.exception()  # a cancelled caller does not ask, and asyncio would log it

    def held(
        self,
        params: SamplingParams,
        form: AnswerFormat | None,
        context: Sequence[int],
        thoughts: Thinking = "no",
    ) -> SamplingParams:
        """The values with the grammar of the answer's form, whose text continues that of the ``context``."""
        if form is None:
            return params
        grammar = closed_grammar(form.grammar) if self._closes_objects else form.grammar
        grammar = grammar if thoughts == "no" else grammar.replace(thinking=thoughts)
        return with_text_start(params.replace(grammar=grammar), self.tokenizer, context)

    def facts(self) -> dict[str, Any]:
        """The model as ``/v1/models`` lists it; ``unproven`` says why it is."""
        return {
            "id": self.name,
            "object": "model",
            "created": int(self.engine.started),
            "owned_by": "ingot",
            "max_model_len": self.max_seq_len,
            "input_modalities": ["audio"] if self.speech else ["text", *(["image"] if self.pictures else [])],
            "unproven": self.side.doubt,
        }

    def _too_long(self, count: int, new_tokens: int, field: str) -> ApiError:
        text = (
            f"This model's maximum context length is {self.max_seq_len} tokens. The request needs "
            f"{count + new_tokens}: {count} in {field}, {new_tokens} for the answer. Shorten "
            f"{field}{' or lower max_tokens' if new_tokens else ''}."
        )
        return bad_request(text, field, "context_length_exceeded")

    def _api_error(self, error: RequestError | DeviceError, field: str) -> ApiError:
        """The error without the place of the model's files; after ``close``, why it is one."""
        if self._closed:
            return stopping()
        found = refused(error)
        files = self.side.files
        message = found.message.replace(str(files.folder), str(files.origin))
        found.message = message.replace(str(self.side.folder), self.name)
        found.param = found.param or field
        return found
