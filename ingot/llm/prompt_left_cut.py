"""Prompts that are too long, cut from the left as MiniGPT-4's demonstration cuts them."""

from __future__ import annotations

from ingot.errors import RequestError
from ingot.llm.llm import LLM
from ingot.llm.picture_prompts import Pictures
from ingot.llm.prompt_inputs import Messages, PromptLike, prompt_pieces
from ingot.text.prompt import Embeddings, Input, Piece, Prompt

DEMO_MOST = 2000  # tokens of prompt and answer


def read_prompt(llm: LLM, prompt: PromptLike | Messages) -> Prompt:
    """A prompt or conversation as token ids and inputs, with its pictures read; raises RequestError."""
    pictures = Pictures.of(llm.engine.manifest.model)
    try:
        return Prompt(prompt_pieces(prompt, llm.engine.text, pictures)[0])
    finally:
        if pictures is not None:
            pictures.close()


def left_cut(
    llm: LLM, prompt: PromptLike | Messages, most: int = DEMO_MOST, *, max_new_tokens: int = 300
) -> Prompt:
    """The prompt without as many of its first tokens, the text's start token among them, as it takes for
    prompt and answer to fit in ``most``. Of a picture in which the cut falls the last rows stay, as
    embeddings.

    Raises:
        RequestError: as ``read_prompt``, or nothing would be left.
    """
    whole = read_prompt(llm, prompt)
    if max_new_tokens >= most:
        what = "the answer leaves no room for a prompt"
        raise RequestError(what, seen=f"{max_new_tokens} of {most} tokens", field=("max_new_tokens", "most"))
    pieces: list[Piece] = whole.pieces(llm.tokenizer)
    placeholders = llm.engine.manifest.model.placeholders
    sizes = []
    for one in pieces:
        values = one.rows if isinstance(one, Embeddings) else one
        sizes.append(placeholders if isinstance(values, Input) else len(values))
    over = sum(sizes) + max_new_tokens - most
    left: list[Piece] = []
    for piece, size in zip(pieces, sizes, strict=True):
        if over < size:
            left.append(piece if over <= 0 else _without_first(llm, piece, over))
        over -= size
    return Prompt(left)


def _without_first(llm: LLM, piece: Piece, count: int) -> Piece:
    if isinstance(piece, Input):
        return Embeddings(llm.encode_image(piece)[count:])
    return Embeddings(piece.rows[count:]) if isinstance(piece, Embeddings) else piece[count:]
