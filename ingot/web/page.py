"""The page itself.

Owns what is on it and which event does what. Chat, stop, retry, undo and clear are Gradio's own; what an
answer is comes from ``answers.py``.

    make_page(api, inputs=frozenset()).launch()
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import gradio as gr

from ingot.web.answers import Shown, answers
from ingot.web.api import AnswerError, Api
from ingot.web.messages import ANY_SEED, Values

TITLE = "Ingot"
_TO_THE_END = 4096  # of the slider, where the server does not say how long its context is


def make_page(api: Api, inputs: frozenset[str]) -> gr.Blocks:
    """The page.

    Args:
        inputs: what the server's models take beside text: ``image``, ``audio``.
    """
    with gr.Blocks(title=TITLE, analytics_enabled=False, fill_height=True) as page:
        with gr.Sidebar(width=320):
            fields = _fields()
            state = gr.Markdown(visible=False)
        gr.ChatInterface(
            _answering(api),
            multimodal=bool(inputs),
            textbox=_files_box(inputs) if inputs else None,
            chatbot=gr.Chatbot(
                label="Chat", buttons=["copy"], height="calc(100vh - 7rem)", feedback_options=None
            ),
            additional_inputs=fields,
            concurrency_limit=None,
            analytics_enabled=False,
            api_visibility="private",
        )
        model, longest = fields[0], fields[-2]
        page.load(_models(api), None, [model, longest, state], api_visibility="private", queue=False)
    return page


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


def _files_box(inputs: frozenset[str]) -> gr.MultimodalTextbox:
    """The box of a server whose models take more than text."""
    sources = ["upload", *(["microphone"] if "audio" in inputs else [])]
    return gr.MultimodalTextbox(sources=sources, file_types=sorted(inputs))


def _models(api: Api) -> Any:
    async def load() -> tuple[Any, Any, Any]:
        """The list of models, or why there is none."""
        try:
            models = await api.models()
        except AnswerError as error:
            return gr.skip(), gr.skip(), gr.Markdown(f"**{error}**", visible=True)
        names = [model.name for model in models]
        longest = max((model.max_len or 0 for model in models), default=0) or _TO_THE_END
        return (
            gr.Dropdown(names, value=names[0]),
            gr.Slider(maximum=longest),
            gr.Markdown(visible=False),
        )

    return load


def _answering(api: Api) -> Any:
    async def answer(
        said: Any, history: Sequence[Mapping[str, Any]], model: str | None, system: str, *values: Any
    ) -> AsyncIterator[list[gr.ChatMessage]]:
        """The messages of an answer; Gradio closes the generator when it is stopped or the reader leaves."""
        async with aclosing(answers(api, model, system, history, said, Values(*values))) as pictures:
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
        found.append(gr.ChatMessage(shown.text))
    if shown.error:
        found.append(_titled("The answer broke off" if shown.text else "No answer", shown.error))
    return found


def _titled(title: str, text: str, **metadata: Any) -> gr.ChatMessage:
    """A message of the page's own: requests leave it out (``messages.body``)."""
    return gr.ChatMessage(text, metadata={"title": title, **metadata})
