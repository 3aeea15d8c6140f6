"""``ingot run``: prompts in, answers out."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.cli.opening import open_llm
from ingot.cli.options.flags import AsJson, Device, EnginePath, Threads, field_flags, option
from ingot.cli.options.limit_flags import Limits
from ingot.cli.options.prompt_sources import ManyIds, PromptFile, PromptGiven, SystemText, read_prompts
from ingot.cli.options.sampling_flags import sampling_flags
from ingot.cli.terminal.console import print_json, speed_text, stderr, write
from ingot.config.files.json_text import read_text
from ingot.config.grammar_spec import Grammar
from ingot.config.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ingot.llm import LLM, Output
    from ingot.llm.llm import Messages, PromptLike
    from ingot.text.tokenizer.tokenizer import Tokenizer


_IMAGE = "A picture that stands before each prompt, of an engine that takes pictures; may be repeated."
_STRUCTURE = "Structured answers"
_RAW = "Continue texts as they are, instead of sending them as user messages to a model that chats."


@dataclass(frozen=True)
class GrammarFlags:
    """What the text of an answer must be; at most one is given."""

    json_schema: Annotated[
        Path | None,
        option(
            "JSON, valid under the schema in this file.",
            panel=_STRUCTURE,
            shown=False,
            exists=True,
            dir_okay=False,
        ),
    ] = None
    regex: Annotated[
        str | None, option("Text that the whole pattern matches.", panel=_STRUCTURE, shown=False)
    ] = None
    choice: Annotated[
        list[str] | None, option("This text; repeated, one of several.", panel=_STRUCTURE, shown=False)
    ] = None

    def grammar(self) -> Grammar | None:
        """The grammar; None without a flag."""
        if sum(bool(one) for one in (self.json_schema, self.regex, self.choice)) > 1:
            raise typer.BadParameter("give one of --json-schema, --regex and --choice")
        if self.json_schema is not None:
            try:
                return Grammar.json_schema(read_text(self.json_schema))
            except (OSError, UnicodeDecodeError) as error:
                raise typer.BadParameter(f"{self.json_schema}: {error}", param_hint="--json-schema") from None
        if self.regex:
            return Grammar.regex(self.regex)
        return Grammar.choice(self.choice) if self.choice else None


@dataclass(frozen=True)
class RunFlags:
    """The prompts, and how answers are shown."""

    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="Prompts; without any, stdin is one prompt.", show_default=False),
    ] = None
    image: Annotated[list[str] | None, option(_IMAGE, "--image", metavar="FILE")] = None
    file: PromptFile = None
    as_json: AsJson = False
    system: SystemText = None
    raw: Annotated[bool, option(_RAW, "--raw")] = False
    ids: ManyIds = None
    device: Device = None
    threads: Threads = None


@field_flags("limits")
@field_flags("structure")
@sampling_flags()
@field_flags("flags")
def run(
    engine: EnginePath, sampling: dict[str, Any], structure: GrammarFlags, limits: Limits, flags: RunFlags
) -> None:
    """Answer prompts, batched together. A model that chats takes each text as a user message.

    Sampling values that are not given come from the checkpoint's generation_config.
    """
    as_json = flags.as_json
    if "logprobs" in sampling and not as_json:
        raise typer.BadParameter("--logprobs needs --json, which shows them")
    given = read_prompts(flags.prompts or [], flags.file, flags.ids or [])
    if flags.system is not None and (flags.raw or any(one.prompt_token_ids is not None for one in given)):
        what = "--raw sends texts without it" if flags.raw else "goes with texts and messages, not token ids"
        raise typer.BadParameter(what, param_hint="--system")
    grammar = structure.grammar()
    start = time.perf_counter()
    llm = open_llm(engine, flags.device, flags.threads, limits, verb="`ingot run`")
    params = llm.default_params.replace(**sampling).replace(grammar=grammar)
    given = _in_chat(llm, given, flags)
    inputs = [one.value for one in given]
    lengths, limit = [len(llm.prompt_ids(one)) for one in inputs], llm.engine.manifest.build.max_seq_len
    _note_room(lengths, params.max_new_tokens, limit)
    loaded = time.perf_counter()
    if llm.tokenizer is not None and not as_json and params.n == params.num_beams == 1:
        cut = _stream(llm, given, inputs, params)
        num_tokens = sum(count for count, _ in cut)
        _note_cut([n + count for n, (count, is_cut) in zip(lengths, cut, strict=True) if is_cut], limit)
    else:
        outputs = llm.generate(inputs, params)
        num_tokens = sum(len(a.token_ids) for output in outputs for a in output.answers)
        if as_json:
            seconds = time.perf_counter() - loaded
            timing = {"load_seconds": loaded - start, "seconds": seconds, "output_tokens": num_tokens}
            _print_json(given, outputs, timing, llm.tokenizer)
        else:
            for i, output in enumerate(outputs):
                count = len(output.answers)
                for j, answer in enumerate(output.answers, start=1):
                    _write_title(given, i, f" answer {j}/{count}" if count > 1 else "")
                    ids = " ".join(map(str, answer.token_ids))  # of an engine without a tokenizer
                    write((ids if answer.text is None else answer.text) + "\n")
            ended = [(o, a) for o in outputs for a in o.answers if a.finish_reason == "length"]
            _note_cut([len(o.prompt_token_ids) + len(a.token_ids) for o, a in ended], limit)
    seconds = time.perf_counter() - loaded
    stderr().print(speed_text(num_tokens, seconds), style="dim")


def _in_chat(llm: LLM, given: list[PromptGiven], flags: RunFlags) -> list[PromptGiven]:
    """The prompts as messages, where the model chats and the flags do not say otherwise."""
    if flags.image and (flags.raw or llm.chat_format is None or not llm.chat_format.takes_inputs):
        what = "--raw sends no pictures" if flags.raw else "this engine takes no pictures"
        raise typer.BadParameter(what, param_hint="--image")
    if flags.system is not None and llm.chat_format is None:
        what = "this engine has no chat format; `ingot build --chat-template` sets one"
        raise typer.BadParameter(what, param_hint="--system")
    if flags.raw or llm.chat_format is None:
        return given
    if any(one.prompt is not None for one in given):
        stderr().print("note: sent in the model's chat format; --raw sends the text as it is", style="dim")
    if flags.image and any(one.prompt is None for one in given):
        raise typer.BadParameter("goes with prompts of text", param_hint="--image")
    return [one.as_message(flags.image or [], flags.system) for one in given]


def _note_room(lengths: list[int], wanted: int | None, limit: int) -> None:
    """Note on stderr that prompts leave room for fewer new tokens than are wanted."""
    tight = [n for n in lengths if wanted is not None and limit - wanted < n < limit]
    if not tight:
        return
    longest, room = max(tight), limit - max(tight)
    text = f"the prompt's {longest} tokens leave room for {room} new ones, not {wanted}"
    if len(lengths) > 1:
        some = f"{len(tight)} of {len(lengths)} prompts leave room for fewer than {wanted} new tokens"
        text = f"{some}, the longest ({longest} tokens) for {room}"
    stderr().print(f"note: {text}: the engine's limit is {limit}", style="dim")


def _stream(
    llm: LLM, given: list[PromptGiven], inputs: list[PromptLike | Messages], params: SamplingParams
) -> list[tuple[int, bool]]:
    """Stream the answers in the order of their prompts; per answer its tokens, and whether it was cut off."""
    pieces = llm.stream_many(inputs, params)
    texts, counts = [""] * len(inputs), [0] * len(inputs)
    reasons: list[str | None] = [None] * len(inputs)
    turn = 0
    _write_title(given, turn)
    for position, piece in pieces:
        texts[position] += piece.text
        counts[position] += len(piece.token_ids)
        reasons[position] = piece.finish_reason
        while turn < len(inputs) and (texts[turn] or reasons[turn]):
            write(texts[turn])
            texts[turn] = ""
            if reasons[turn] is None:
                break
            write("\n")
            turn += 1
            _write_title(given, turn)
    return [(count, reason == "length") for count, reason in zip(counts, reasons, strict=True)]


def _write_title(given: list[PromptGiven], turn: int, which: str = "") -> None:
    """The line above an answer where there are several."""
    if turn < len(given) and (len(given) > 1 or which):
        write(f"=== {turn + 1}/{len(given)}{which}: {given[turn].title}\n")


def _note_cut(totals: list[int], limit: int) -> None:
    """Note on stderr that answers were cut off; ``totals``: their tokens with the prompts'."""
    if totals:
        which = "the answer was" if len(totals) == 1 else f"{len(totals)} answers were"
        flag = "the engine's --max-seq-len" if min(totals) >= limit else "--max-new-tokens"
        stderr().print(f"({which} cut off; {flag} sets the limit)", style="dim")


def _print_json(
    given: list[PromptGiven], outputs: list[Output], timing: dict[str, Any], tokenizer: Tokenizer | None
) -> None:
    """One line of JSON per prompt. Log-probabilities get their tokens' text; the timing is of all prompts."""
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
