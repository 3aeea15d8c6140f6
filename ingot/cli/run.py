"""``ingot run``: prompts in, answers out."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.cli.console import print_json, speed_text, stderr, write
from ingot.cli.flags import AsJson, Device, EnginePath, Threads, open_llm
from ingot.cli.limits import Limits, limit_flags
from ingot.cli.prompts import PromptGiven, read_prompts
from ingot.cli.sampling import flag_name, sampling_flags, with_given
from ingot.config.sampling import SamplingParams

if TYPE_CHECKING:
    from ingot.llm import LLM, Answer, Output
    from ingot.llm.llm import Messages, PromptLike
    from ingot.processors.tokenizer import Tokenizer


@limit_flags
@sampling_flags()
def run(
    engine: EnginePath,
    sampling: dict[str, Any],
    limits: Limits,
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Prompts; none: stdin is one prompt.", show_default=False)
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            help="Prompts from a file, one a line ('-': stdin). Lines of a .jsonl file are objects with "
            "prompt, messages or prompt_token_ids."
        ),
    ] = None,
    as_json: AsJson = False,
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="Make each prompt a user's message of the chat format.")
    ] = False,
    ids: Annotated[bool, typer.Option("--ids", help="Prompts are token ids with spaces between.")] = False,
    device: Device = None,
    threads: Threads = None,
) -> None:
    """Answer prompts, all in flight together.

    Sampling values that are not given are those of the checkpoint's generation_config.
    """
    if "logprobs" in sampling and not as_json:
        raise typer.BadParameter("--logprobs needs --json, which shows them")
    given = read_prompts(prompts or [], file, chat=chat, ids=ids)
    start = time.perf_counter()
    llm = open_llm(engine, device, threads, limits)
    params = with_given(llm.default_params, sampling)
    inputs = [_input(one) for one in given]
    lengths, limit = [len(llm.prompt_ids(one)) for one in inputs], llm.engine.manifest.build.max_seq_len
    _note_room(lengths, params.max_new_tokens, limit)
    loaded = time.perf_counter()
    streams = sys.stdout.isatty() and not as_json and len(given) == params.n == params.num_beams == 1
    if streams and llm.tokenizer is not None:
        num_tokens, is_cut = _stream(llm, inputs[0], params)
        _note_cut([lengths[0] + num_tokens] if is_cut else [], limit)
        outputs = []
    else:
        outputs = llm.generate(inputs, params)
        num_tokens = sum(len(a.token_ids) for output in outputs for a in output.answers)
    seconds = time.perf_counter() - loaded
    if as_json:
        timing = {"load_seconds": loaded - start, "seconds": seconds, "output_tokens": num_tokens}
        _print_json(given, outputs, timing, llm.tokenizer)
    else:
        _print_text(given, outputs, limit)
    stderr().print(speed_text(num_tokens, seconds), style="dim")


def _input(given: PromptGiven) -> PromptLike | Messages:
    if given.messages is not None:
        return given.messages
    return given.prompt if given.prompt is not None else list(given.prompt_token_ids or [])


def _note_room(lengths: list[int], wanted: int | None, limit: int) -> None:
    """Say once on stderr that prompts leave less room than for the new tokens that are wanted."""
    tight = [n for n in lengths if wanted is not None and limit - wanted < n < limit]
    if not tight:
        return
    longest, room = max(tight), limit - max(tight)
    text = f"the prompt's {longest} tokens leave room for {room} new ones, not {wanted}"
    if len(lengths) > 1:
        some = f"{len(tight)} of {len(lengths)} prompts leave room for fewer than {wanted} new tokens"
        text = f"{some}, the longest ({longest} tokens) for {room}"
    stderr().print(f"note: {text}: the engine takes {limit}", style="dim")


def _stream(llm: LLM, prompt: PromptLike | Messages, params: SamplingParams) -> tuple[int, bool]:
    """Write an answer as it comes; returns its number of tokens, and whether it was cut off."""
    count = 0
    reason = None
    for piece in llm.stream(prompt, params):
        write(piece.text)
        count += len(piece.token_ids)
        reason = piece.finish_reason
    write("\n")
    return count, reason == "length"


def _print_text(given: list[PromptGiven], outputs: list[Output], limit: int) -> None:
    """The answers; a line that begins with === goes before each when there are several."""
    for i, (one, output) in enumerate(zip(given, outputs, strict=False), start=1):
        for j, answer in enumerate(output.answers, start=1):
            which = f" answer {j}/{len(output.answers)}" if len(output.answers) > 1 else ""
            if len(given) > 1 or which:
                write(f"=== {i}/{len(given)}{which}: {one.title}\n")
            write(_text(answer) + "\n")
    cut = [(o, a) for o in outputs for a in o.answers if a.finish_reason == "length"]
    _note_cut([len(o.prompt_token_ids) + len(a.token_ids) for o, a in cut], limit)


def _note_cut(totals: list[int], limit: int) -> None:
    """Say on stderr that answers ended at their limit and not by themselves; ``totals`` are the tokens of
    their prompts and theirs, ``limit`` the engine's own.
    """
    if totals:
        which = "the answer was" if len(totals) == 1 else f"{len(totals)} answers were"
        flag = "the engine's --max-seq-len" if min(totals) >= limit else flag_name("max_new_tokens")
        stderr().print(f"({which} cut off; {flag} sets the limit)", style="dim")


def _text(answer: Answer) -> str:
    """The answer's text, or its token ids where the engine has no tokenizer."""
    return " ".join(map(str, answer.token_ids)) if answer.text is None else answer.text


def _print_json(
    given: list[PromptGiven], outputs: list[Output], timing: dict[str, Any], tokenizer: Tokenizer | None
) -> None:
    """An object a line and prompt; the timing is of all prompts together. Tokens with log-probabilities
    have their text beside them.
    """
    for one, output in zip(given, outputs, strict=True):
        line: dict[str, Any] = {"prompt": one.prompt}
        if one.messages is not None:
            line["messages"] = one.messages
        line["prompt_token_ids"] = output.prompt_token_ids
        line["answers"] = [asdict(answer) for answer in output.answers]
        for entry in (e for answer in line["answers"] for e in answer["logprobs"] or ()):
            if tokenizer is not None:
                entry["text"] = tokenizer.token_text(entry["token_id"])
                entry["top"] = [[i, value, tokenizer.token_text(i)] for i, value in entry["top"]]
        print_json(line | {"timing": timing})
