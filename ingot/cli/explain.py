"""``ingot explain``: what a request is made of, before it runs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ingot.cli.opening import local_folder
from ingot.cli.options.flags import AsJson, EnginePath
from ingot.cli.options.prompt_sources import MessagesFile, PromptIds, PromptText, one_prompt
from ingot.cli.options.sampling_flags import sampling_flags
from ingot.cli.terminal.console import aligned, print_json, stdout, write
from ingot.cli.terminal.field_flags import flag_of
from ingot.config.modality import expect_text

if TYPE_CHECKING:
    from ingot.llm.explanation import Explanation

_HF = "Hugging Face's generate, called with the same values,"


@sampling_flags()
def explain(
    engine: EnginePath,
    sampling: dict[str, Any],
    messages: MessagesFile = None,
    prompt: PromptText = None,
    ids: PromptIds = None,
    as_json: AsJson = False,
) -> None:
    """Show the exact prompt, its tokens, what ends the answer, and where each value comes from.

    Nothing is run and no weights are read. The last part says what Hugging Face's generate would do
    differently for this request.
    """
    folder, request = local_folder(engine), one_prompt(messages, prompt, ids)
    from ingot.engine.engine_facts import read_text_side
    from ingot.llm.explain_prompt import explain_request
    from ingot.llm.sampling_defaults import default_params

    manifest, text = read_text_side(folder)
    expect_text(manifest.model.modality, "`ingot explain`")
    default_params(manifest.generation).replace(**sampling)  # refuses what is out of range
    found = explain_request(manifest, text, request, sampling)
    if as_json:
        print_json(found.to_json())
    else:
        _show(found)


def _show(found: Explanation) -> None:
    limit = "" if found.max_new_tokens == found.room else f", at most {found.max_new_tokens} requested"
    how = f" by {found.chat_format}" if found.chat_format else ""
    _part(f"prompt ({found.kind}{how})", [] if found.prompt_text is None else [found.prompt_text])
    if found.rendered_text not in (None, found.prompt_text):
        _part("text rendered by the chat format, before tokenization", [str(found.rendered_text)])
    head = f"{found.num_prompt_tokens} of {found.max_seq_len} tokens, room for {found.room} new ones{limit}"
    tokens = [
        (
            str(place),
            str(token.id),
            "?" if token.text is None else token.text if token.special else _quoted(token.text),
            "special" if token.special else f"bytes {token.bytes}" if token.bytes else "",
        )
        for place, token in enumerate(found.tokens)
    ]
    _part(head, aligned(tokens, right=(0, 1)))
    stops = [
        (
            _quoted(s.text or "") if s.id is None else f"{s.id} {s.text or ''}".rstrip(),
            ", ".join(s.origins),
            "" if s.active else "off: ignore_eos",
        )
        for s in found.stops
    ]
    _part("ends at", list(aligned(stops)) or ["only the limit"])
    rows = [(flag_of(v.name), _shown(v.value), v.origin, v.note or "") for v in found.sampling]
    _part("values", aligned(rows))
    steps = [*found.processors, found.choice]
    _part("for each token", [f"{i}. {step}" for i, step in enumerate(steps, start=1)])
    _part("seed", [found.seed])
    _part(_HF if found.differences else f"{_HF} would do the same", found.differences)
    if found.notes:
        _part("notes", found.notes)


def _part(title: str, lines: Iterable[str]) -> None:
    stdout().print(title, style="bold", markup=False)
    for line in lines:
        write("".join(f"  {part}".rstrip(" ") + "\n" for part in line.split("\n")))


def _quoted(text: str) -> str:
    """Text as JSON, which shows its white space."""
    return json.dumps(text, ensure_ascii=False).replace("\\\\x", "\\x")


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(_quoted(v) if isinstance(v, str) else str(v) for v in value) or "none"
    if isinstance(value, bool) or value is None:
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
