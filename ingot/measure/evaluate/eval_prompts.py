"""Prompts for items, articles cut to fit, and items as running text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ingot.config.modality import EVAL_WER, expect_text
from ingot.engine.engine_text import TextParts
from ingot.errors import ConfigError
from ingot.measure.evaluate.data_item import DataItem, Message
from ingot.measure.evaluate.rouge import is_cjk
from ingot.measure.side.open_side import check_side
from ingot.measure.side.side_spec import INGOT, SideSpec, model_of, read_text
from ingot.text.chat.chat_messages import with_system
from ingot.text.chat.chat_renderer import ChatFormat
from ingot.text.tokenizer.tokenizer import Tokenizer

ARTICLE = "{article}"
CHAT_TEMPLATES = {
    "en": "Summarize the following article in a few sentences:\n\n{article}",
    "zh": "请用几句话概括下面的文章：\n\n{article}",
}
PLAIN_TEMPLATES = {"en": "{article}\n\nTL;DR:", "zh": "{article}\n\n总结："}

_SAMPLES = 20  # items whose ids are compared to tell two tokenizers apart


@dataclass(frozen=True)
class EvalCase:
    """A prompt for an item. ``stops`` end the answer; ``cut_tokens`` of the article were cut off."""

    item: DataItem
    prompt_ids: list[int]
    asked: str
    stops: tuple[str, ...] = ()
    cut_tokens: int = 0


class Prompter:
    """Makes prompts of at most ``most_tokens``.

    Args:
        text: tokenizer and chat format of the engine.
        chat: articles and prompts as a user's message; None: articles if the engine has a chat format.
        template: text around ``{article}``; None: the default of the article's language.
        system: a message before each conversation that has none; articles and prompts become messages.

    Raises:
        ConfigError: there is no tokenizer, no chat format for what needs one, or no room for a prompt.
    """

    def __init__(
        self,
        text: TextParts,
        most_tokens: int,
        *,
        chat: bool | None = None,
        template: str | None = None,
        system: str | None = None,
    ) -> None:
        if system is not None:
            _check_system(text, chat)
            chat = True
        if chat and text.chat is None:
            fix = "use `chat=False`, or rebuild with `chat_template=chatml`"
            raise ConfigError("the engine has no chat template", field="chat", fix=fix)
        if template is not None and ARTICLE not in template:
            raise ConfigError(f"the template has no {ARTICLE}", seen=template, field="template")
        if most_tokens < 1:
            raise ConfigError(
                "the new tokens leave no room for a prompt", seen=most_tokens, field="max_new_tokens"
            )
        self._tokenizer = need_tokenizer(text)
        self._format = text.chat
        self._most = most_tokens
        self._chat = chat
        self._template = template
        self._system = system

    def case(self, item: DataItem) -> EvalCase | None:
        """The item's prompt; None if it is too long and cannot be cut."""
        if item.article is not None:
            return self._article(item, item.article)
        if item.messages is not None:
            chat, asked, ids = True, item.messages[-1]["content"], self._chat_ids(item.messages)
        else:
            assert item.prompt is not None, "a question is an article, a prompt or messages"
            chat, asked = bool(self._chat), item.prompt
            ids = self._ids(asked, chat)
        return EvalCase(item, ids, asked, self._stops(chat)) if len(ids) <= self._most else None

    def _article(self, item: DataItem, article: str) -> EvalCase | None:
        """The article in its template, cut at its end where it is too long."""
        chat = self._format is not None if self._chat is None else self._chat
        templates = CHAT_TEMPLATES if chat else PLAIN_TEMPLATES
        template = self._template or templates["zh" if is_cjk(article) else "en"]

        fitted = self._fitted(article, lambda part: self._ids(template.replace(ARTICLE, part), chat))
        if fitted is None:
            return None
        part, ids, cut = fitted
        return EvalCase(item, ids, template.replace(ARTICLE, part), self._stops(chat), cut)

    def _fitted(self, article: str, build: Callable[[str], list[int]]) -> tuple[str, list[int], int] | None:
        """(the part of the article that fits, the prompt's ids, tokens cut off)."""
        ids = build(article)
        if len(ids) <= self._most:
            return article, ids, 0
        tokens = self._tokenizer.encode(article, add_special_tokens=False, parse_special=False)
        keep = min(len(tokens) - 1, len(tokens) - (len(ids) - self._most))
        while keep > 0:
            part = self._tokenizer.decode(tokens[:keep], skip_special_tokens=False).rstrip("\ufffd")
            ids = build(part)
            if len(ids) <= self._most:
                return part, ids, len(tokens) - keep
            keep -= len(ids) - self._most
        return None

    def _ids(self, text: str, chat: bool) -> list[int]:
        if chat:
            return self._chat_ids([{"role": "user", "content": text}])
        return self._tokenizer.encode(text, parse_special=False)

    def _chat_ids(self, messages: Sequence[Message]) -> list[int]:
        messages = with_system(messages, self._system)
        return need_chat(self._format).prompt_ids(messages, self._tokenizer)

    def _stops(self, chat: bool) -> tuple[str, ...]:
        return self._format.stop_strings if chat and self._format is not None else ()


def _check_system(text: TextParts, chat: bool | None) -> None:
    """Raise ConfigError where prompts have no place for a system message."""
    if chat is False:
        what = "a system message needs the chat template, which `chat=False` leaves out"
        raise ConfigError(what, field="system", fix="leave out `system` or `chat=False`")
    if text.chat is None:
        fix = "leave out `system`, or rebuild with `chat_template=chatml`"
        raise ConfigError("the engine has no chat template for a system message", field="system", fix=fix)


def need_tokenizer(text: TextParts) -> Tokenizer:
    """The tokenizer, or ConfigError."""
    if text.tokenizer is None:
        raise ConfigError(
            "the engine has no tokenizer, but the data has texts",
            field="data",
            fix="use `data` with token_ids (perplexity and divergence only)",
        )
    return text.tokenizer


def need_chat(chat: ChatFormat | None) -> ChatFormat:
    """The chat format, or ConfigError."""
    if chat is None:
        raise ConfigError(
            "the engine has no chat template, but the data has messages",
            field="data",
            fix="use `data` with prompts, or rebuild with `chat_template=chatml`",
        )
    return chat


def document_ids(item: DataItem, text: TextParts) -> list[int]:
    """The item as running text: its ids, its text or article, or its question and the first answer."""
    if item.token_ids is not None:
        return list(item.token_ids)
    tokenizer = need_tokenizer(text)
    whole = item.text or item.article
    if whole is not None:
        return tokenizer.encode(whole, parse_special=False)
    if item.messages is not None:
        ids = need_chat(text.chat).prompt_ids(item.messages, tokenizer)
    else:
        ids = tokenizer.encode(item.prompt or "", parse_special=False)
    answer = item.references[0] if item.references else ""
    return [*ids, *tokenizer.encode(answer, add_special_tokens=False, parse_special=False)]


def common_text(specs: Sequence[SideSpec], items: Sequence[DataItem]) -> TextParts:
    """The first side's text, after checking that every side takes text and has the same tokens."""
    for spec in specs:
        check_side(spec)
        expect_text(model_of(spec.source).modality, "an evaluation of text", EVAL_WER)
    text = read_text(specs[0].source)
    for spec in specs[1:]:
        check_same_tokens(spec, text, items)
    return text


def check_same_tokens(spec: SideSpec, ours: TextParts, items: Sequence[DataItem]) -> None:
    """Raise ConfigError if an item's text has other ids in the other model."""
    theirs = read_text(spec.source) if spec.kind == INGOT else ours
    if ours.tokenizer is None or theirs.tokenizer is None or theirs is ours:
        return
    for item in items[:_SAMPLES]:
        for text in filter(None, (item.text, item.article, item.prompt, *item.references)):
            sample = text[:1000]
            ids = [one.encode(sample, add_special_tokens=False) for one in (ours.tokenizer, theirs.tokenizer)]
            if ids[0] != ids[1]:
                raise ConfigError(
                    "the two models have different tokenizers, so their results cannot be compared",
                    seen=f"item {item.number}: {len(ids[0])} and {len(ids[1])} tokens, or other ids",
                    field="against",
                    fix="`against` a model with the same vocabulary",
                )
