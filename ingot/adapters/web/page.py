"""What is on the page, and which event does what."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import gradio as gr

from ingot.adapters.web.page_answers import Shown, answers, is_empty
from ingot.adapters.web.page_client import AnswerError, Api, ListedModel
from ingot.adapters.web.page_math import marked
from ingot.adapters.web.page_messages import ANY_SEED, MOST_PICTURE, Values

TITLE = "Ingot"
_TO_THE_END = 4096  # of the slider, where the server does not say how long its context is
_KEPT_SECONDS = 3600  # of files that readers have uploaded
_MATH = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": "\\[", "right": "\\]", "display": True},
    {"left": "\\(", "right": "\\)", "display": False},
]

# The settings are open where they do not cover the chat, as they would on a phone. A press counts once the
# page is alive.
HEAD = """<script>
if (window.innerWidth >= 768) {
  const pressing = setInterval(() => {
    if (document.querySelector(".sidebar.open")) clearInterval(pressing);
    else document.querySelector(".sidebar .toggle-button")?.click();
  }, 100);
  setTimeout(() => clearInterval(pressing), 20000);
}
</script>"""


def make_page(api: Api, inputs: frozenset[str]) -> gr.Blocks:
    """The page; ``inputs``: what the server's models take beside text: ``image``, ``audio``."""
    cache = (_KEPT_SECONDS // 6, _KEPT_SECONDS) if inputs else None
    with gr.Blocks(title=TITLE, analytics_enabled=False, fill_height=True, delete_cache=cache) as page:
        with gr.Sidebar(width=320, open=False):
            fields = _fields()
            state = gr.Markdown(visible=False)
        # Which sources it has, the chosen model says.
        box = gr.MultimodalTextbox(sources=[], file_types=sorted(inputs), stop_btn=True) if inputs else None
        chat = _Chat(
            _answering(api),
            title=TITLE,
            multimodal=bool(inputs),
            textbox=box,
            chatbot=gr.Chatbot(
                label="Chat",
                buttons=["copy"],
                height="calc(100dvh - 10rem)",
                feedback_options=None,
                latex_delimiters=_MATH,
            ),
            additional_inputs=fields,
            concurrency_limit=None,
            analytics_enabled=False,
            api_visibility="private",
        )
        model, longest = fields[0], fields[-2]
        page.load(_models(api), None, [model, longest, state], api_visibility="private", queue=False)
        if inputs:
            model.change(_sources(api), model, chat.textbox, api_visibility="private", queue=False)
    return page


class _Chat(gr.ChatInterface):
    """Gradio's chat, which ignores empty messages."""

    def get_block_name(self) -> str:
        return "chatinterface"

    def _message_as_message_dict(self, message: Any, role: Any) -> Any:
        empty = role == "user" and is_empty(message)
        return [] if empty else super()._message_as_message_dict(message, role)


def _fields() -> list[Any]:
    """Model, system prompt and sampling values, in the order of ``_answering``."""
    model = gr.Dropdown([], label="Model", interactive=True)
    system = gr.Textbox(label="System prompt", lines=3)
    own = gr.Checkbox(True, label="The server's sampling values")
    plain = Values()
    with gr.Column(visible=False) as sliders:
        chosen = [
            gr.Slider(0, 2, plain.temperature, step=0.05, label="Temperature"),
            gr.Slider(0.05, 1, plain.top_p, step=0.05, label="Top-p"),
            gr.Slider(0, 200, plain.top_k, step=1, label="Top-k", info="0: all tokens"),
            gr.Slider(0.8, 2, plain.repetition_penalty, step=0.05, label="Repetition penalty"),
        ]
    own.change(
        lambda given: gr.Column(visible=not given), own, sliders, api_visibility="private", queue=False
    )
    longest = gr.Slider(0, _TO_THE_END, 0, step=1, label="Max tokens", info="0: the server decides")
    seed = gr.Number(ANY_SEED, precision=0, label="Seed", info=f"{ANY_SEED}: a new one each time")
    return [model, system, own, *chosen, longest, seed]


def _sources(api: Api) -> Any:
    async def sources(name: str | None) -> Any:
        """The paperclip and the microphone, as the model takes files."""
        try:
            found = next((one for one in await api.models() if one.name == name), ListedModel(""))
        except AnswerError:
            return gr.skip()
        given = ["upload"] * bool(found.inputs) + ["microphone"] * ("audio" in found.inputs)
        text = f"Type a message, or add pictures of up to {MOST_PICTURE >> 20} MiB"
        placeholder = text if "image" in found.inputs else None
        return gr.MultimodalTextbox(
            sources=given, file_types=sorted(found.inputs) or None, placeholder=placeholder
        )

    return sources


def _models(api: Api) -> Any:
    async def load() -> tuple[Any, Any, Any]:
        """The list of models, or why there is none."""
        try:
            models = await api.models()
        except AnswerError as error:
            return gr.skip(), gr.skip(), gr.Markdown(f"**{error}**", visible=True)
        names = [model.name for model in models]
        longest = max((model.max_len or 0 for model in models), default=0) or _TO_THE_END
        return gr.Dropdown(names, value=names[0]), gr.Slider(maximum=longest), gr.Markdown(visible=False)

    return load


def _answering(api: Api) -> Any:
    async def answer(
        message: Any, history: Sequence[Mapping[str, Any]], model: str | None, system: str, *values: Any
    ) -> AsyncIterator[list[gr.ChatMessage]]:
        """The messages of an answer; Gradio closes the generator when it is stopped or the reader leaves."""
        if is_empty(message):
            return
        async with aclosing(answers(api, model, system, history, message, Values(*values))) as pictures:
            async for shown in pictures:
                yield _messages(shown)

    return answer


def _messages(shown: Shown) -> list[gr.ChatMessage]:
    """Thoughts, folded once the text begins; the text; what went wrong."""
    found = []
    if shown.thought:
        thinking = not shown.text and not shown.ended
        found.append(_titled("Thoughts", shown.thought, status="pending" if thinking else "done"))
    if shown.text or not (shown.thought or shown.error):
        found.append(gr.ChatMessage(marked(shown.text)))
    if shown.error:
        found.append(_titled("The answer broke off" if shown.text else "No answer", shown.error))
    return found


def _titled(title: str, text: str, **metadata: Any) -> gr.ChatMessage:
    """A message of the page's own: requests leave it out (``messages.body``)."""
    return gr.ChatMessage(text, metadata={"title": title, **metadata})
