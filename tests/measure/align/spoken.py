"""A tiny LLaMA that reads text: a vocabulary of single bytes and four tokens that frame a prompt.

Owns its checkpoint, which needs no data from elsewhere. Knows nothing of Ingot.

    write_spoken(folder)
    edit(folder / "generation_config.json", eos_token_id=TURN)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from tests.tiny_models import save_model, tiny_config

BEGIN, END, TURN, PAD = 256, 257, 258, 259
SPECIAL = {"<s>": BEGIN, "</s>": END, "<|im_end|>": TURN, "<pad>": PAD}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"


def write_spoken(folder: Path) -> Path:
    """The checkpoint; its texts begin with <s>, its answers end with </s>, and it has no chat template."""
    save_model(tiny_config("llama", vocab_size=260, eos_token_id=END, bos_token_id=BEGIN), folder, seed=3)
    edit(folder / "generation_config.json", eos_token_id=END, bos_token_id=BEGIN)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(_bytes(), []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BEGIN)]
    )
    backend.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    edit(folder / "tokenizer_config.json", **named)
    return folder


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None takes a key away."""
    whole = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({key: value for key, value in (whole | changes).items() if value is not None}))


def _bytes() -> dict[str, int]:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    return {character: i for i, character in enumerate(alphabet)}
