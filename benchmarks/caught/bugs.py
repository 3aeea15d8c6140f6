"""The ten bugs: what is written for a command, the bug, and the command that must find it.

Each bug is planted from outside of Ingot, the way it happens: a changed file, or one wrong function in the
process that runs the command. `docs/caught.md` shows what is printed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.caught import wrong_files, wrong_functions
from ingot import build

Plant = Callable[[], AbstractContextManager[object]]
ROOT = Path(__file__).resolve().parents[2]
TALK = ROOT / "examples" / "speech" / "talk.ogg"
SCHEMA = {"enum": ["yes", "no"]}
MESSAGES = [{"role": "user", "content": "Hi"}]


@dataclass(frozen=True)
class Bug:
    """One kind of bug.

    Attributes:
        name: for the command line.
        command: of Ingot, run in a folder of its own.
        exit_code: with the bug; without it 0.
        words: what the command then prints.
        prepare: writes what the command needs into the folder. True: with the bug, where it is in files.
        plant: the bug in the process, while it is open.
    """

    name: str
    command: str
    exit_code: int
    words: str
    prepare: Callable[[Path, bool], None]
    plant: Plant = nullcontext

    @property
    def in_files(self) -> bool:
        """Whether the bug is in the files, not in the process."""
        return self.plant is nullcontext


def _engine(folder: Path, name: str = "model", **options: Any) -> None:
    build(folder / name, folder / "engine", device="cpu", tune=False, **options)


def _tiny(**options: Any) -> Callable[[Path, bool], None]:
    """A tiny chat model and its engine; the bug is in the process."""

    def prepare(folder: Path, planted: bool) -> None:
        wrong_files.write_chat_model(folder / "model")
        _engine(folder, **options)

    return prepare


def _schema(folder: Path, planted: bool) -> None:
    """A model whose chat template closes the block of thoughts in the prompt."""
    wrong_files.write_chat_model(folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(wrong_files.NO_THOUGHTS, encoding="utf-8")
    (folder / "schema.json").write_text(json.dumps(SCHEMA), encoding="utf-8")
    _engine(folder, proof=False)


def _begin_twice(folder: Path, planted: bool) -> None:
    wrong_files.write_llama(folder / "model")
    (folder / "chat.json").write_text(json.dumps(MESSAGES), encoding="utf-8")
    _engine(folder, proof=False)


def _other_checkpoint(change: Callable[[Path], None]) -> Callable[[Path, bool], None]:
    """A checkpoint, and the engine of its copy, which the bug changes."""

    def prepare(folder: Path, planted: bool) -> None:
        wrong_files.write_chat_model(folder / "model")
        wrong_files.write_chat_model(folder / "copy")
        if planted:
            change(folder / "copy")
        _engine(folder, "copy", proof=False)

    return prepare


def _checkpoint(folder: Path, planted: bool) -> None:
    wrong_files.write_chat_model(folder / "model")


def _speech(folder: Path, planted: bool) -> None:
    (folder / "talk.ogg").symlink_to(TALK)
    build(ROOT / "models" / "pocket-whisper", folder / "engine", device="cpu", tune=False, proof=False)


_CHAT, _SHORT, _INT8_CACHE = _tiny(), _tiny(max_seq_len=40), _tiny(kv_dtype="int8")
_ALIGN = "ingot align engine --reference model --steps 0"
BUGS = (
    Bug(
        "kv-cache",
        "ingot verify engine",
        1,
        "layers.0.self_attn.qkv_proj (keys) is off by",
        _INT8_CACHE,
        wrong_functions.one_scale_per_block,
    ),
    Bug(
        "tokenizer",
        "ingot verify engine",
        1,
        "the tokenizer gives different ids from token 0 on",
        _CHAT,
        wrong_functions.space_before,
    ),
    Bug(
        "schema",
        "ingot run engine Really? --json-schema schema.json",
        1,
        "the grammar cannot follow the answer after 0 tokens",
        _schema,
        wrong_functions.grammar_waits_for_thoughts,
    ),
    Bug(
        "greedy",
        "ingot verify engine",
        1,
        "was chosen, but the step's own logits say",
        _CHAT,
        wrong_functions.draft_unchecked,
    ),
    Bug(
        "batch-invariant",
        "ingot verify engine --batch-invariant",
        1,
        "alone, ",
        _SHORT,
        wrong_functions.sums_by_rows,
    ),
    Bug(
        "bos",
        "ingot explain engine --messages chat.json",
        0,
        "the prompt begins with <s> twice",
        _begin_twice,
        wrong_functions.begin_added_again,
    ),
    Bug(
        "gate-up",
        _ALIGN,
        1,
        "cause: gate and up of layers.0.mlp are swapped",
        _other_checkpoint(wrong_files.exchange_branches),
    ),
    Bug(
        "zero-point",
        "ingot build model -o engine --quant w4a16",
        1,
        "a stored tensor is not what the checkpoint holds, so the build was discarded",
        _checkpoint,
        wrong_functions.zeros_off_by_one,
    ),
    Bug(
        "rotated",
        _ALIGN,
        1,
        "every row keeps its length, as where this product's inputs are rotated",
        _other_checkpoint(wrong_files.rotate_down_inputs),
    ),
    Bug(
        "timestamps",
        "ingot transcribe engine talk.ogg --language en --clip-timestamps 0,12",
        1,
        "the timestamps of a transcript cross",
        _speech,
        wrong_functions.times_may_fall,
    ),
)
