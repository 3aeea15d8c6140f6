"""What to do about a wrong command line, where it shows what was meant: a prompt without its flag, another
program's name of a verb.
"""

from __future__ import annotations

from typing import Any

# Options whose value is often given without them.
_TAKES_WORDS = {
    "--prompt": "--prompt TEXT",
    "--source": "--source CHECKPOINT",
    "--url": "--url http://HOST:PORT",
}
_STDIN = "`ingot run ENGINE PROMPT` answers one prompt; chat reads its messages from stdin"
_RUN = "`ingot run ENGINE PROMPT`: prompts have no flag"
_SAME = {  # verbs elsewhere: of vLLM, llama.cpp, Hugging Face and optimum
    **dict.fromkeys(("generate", "complete", "completion", "infer", "prompt"), "run"),
    **dict.fromkeys(("convert", "quantize", "export", "compile"), "build"),
    "server": "serve",
    "benchmark": "bench",
    "evaluate": "eval",
}


def usage_fix(error: Any) -> str | None:
    """The fix for an error of click's; None: nothing more than its message is known."""
    if error.ctx is None:
        return None
    command, path = error.ctx.command, error.ctx.command_path
    what = error.format_message()
    if "unexpected extra argument" in what:
        if command.name == "chat":
            return _STDIN
        options = {name for param in command.params for name in param.opts}
        return next((fix for name, fix in _TAKES_WORDS.items() if name in options), None)
    if command.name == "run" and getattr(error, "option_name", None) in ("--prompt", "-p"):
        return _RUN
    if what.startswith("No such command"):
        verbs = list(command.commands)
        same = _SAME.get(what.partition("'")[2].partition("'")[0])
        if path != "ingot":
            return f"`{path} VERB`, one of {', '.join(verbs)}"
        return f"`ingot {same}`" if same in verbs else None
    return None
