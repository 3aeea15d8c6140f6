"""Write a trained pocket speech model as a Hugging Face folder: fp16 safetensors, configs, tokenizer.

Same weights and vocabulary in, same bytes out.

    python -m recipes.whisper.export --run run --out models/pocket-whisper
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from ingot.models.speech_tokens import SpeechTokens, non_speech_tokens
from ingot.text.tokenizer.tokenizer import load_tokenizer
from recipes.fp16 import half
from recipes.whisper.model import Shape
from recipes.whisper.vocabulary import SpeechVocabulary

MOST_BYTES = 8_000_000  # of the whole folder


def model_config(shape: Shape, vocabulary: SpeechVocabulary) -> dict[str, Any]:
    """config.json of WhisperForConditionalGeneration."""
    sides = {"encoder": shape.encoder_layers, "decoder": shape.decoder_layers}
    sizes = {f"{side}_layers": layers for side, layers in sides.items()}
    sizes |= {f"{side}_attention_heads": shape.heads for side in sides}
    sizes |= {f"{side}_ffn_dim": shape.inner for side in sides}
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "activation_function": "gelu",
        "vocab_size": shape.vocab,
        "d_model": shape.size,
        **sizes,
        "num_hidden_layers": shape.encoder_layers,
        "num_mel_bins": shape.mels,
        "max_source_positions": shape.source,
        "max_target_positions": shape.target,
        "is_encoder_decoder": True,
        "scale_embedding": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "init_std": 0.02,
        "bos_token_id": vocabulary.end,
        "eos_token_id": vocabulary.end,
        "pad_token_id": vocabulary.end,
        "decoder_start_token_id": vocabulary.start,
        "torch_dtype": "float16",
    }


def generation_config(shape: Shape, vocabulary: SpeechVocabulary, folder: Path) -> dict[str, Any]:
    """What Hugging Face's ``generate`` needs; the suppressed tokens are OpenAI's of this vocabulary."""
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    tokens = SpeechTokens.of_tokenizer(tokenizer)
    frame = {tokens.start, tokens.previous, tokens.start_lm, tokens.no_speech, *vocabulary.tasks.values()}
    return {
        # Times of words come out nearest to the truth by these; training points head 0 at whole words.
        "alignment_heads": [[shape.decoder_layers - 1, head] for head in range(1, shape.heads)],
        "begin_suppress_tokens": [*tokenizer.encode_parts([" "]), tokens.end],
        "bos_token_id": tokens.end,
        "decoder_start_token_id": tokens.start,
        "eos_token_id": tokens.end,
        "pad_token_id": tokens.end,
        "is_multilingual": True,
        "lang_to_id": {f"<|{code}|>": token for code, token in tokens.languages.items()},
        "max_initial_timestamp_index": 50,
        "max_length": shape.target,
        "no_timestamps_token_id": tokens.no_timestamps,
        "prev_sot_token_id": tokens.previous,
        "return_timestamps": False,
        "suppress_tokens": sorted(non_speech_tokens(tokenizer) | frame),
        "task_to_id": vocabulary.tasks,
    }


_FEATURES: dict[str, Any] = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "processor_class": "WhisperProcessor",
    "feature_size": 80,
    "sampling_rate": 16000,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": 30,
    "n_samples": 480000,
    "nb_max_frames": 3000,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": False,
}


def export(weights: dict[str, Tensor], shape: Shape, vocabulary: Path, out: Path) -> int:
    """Write the whole folder; returns its bytes.

    Raises:
        OverflowError: a weight does not fit fp16.
        ValueError: the folder is larger than ``MOST_BYTES``.
    """
    out.mkdir(parents=True, exist_ok=True)
    names = ("tokenizer.json", "tokenizer_config.json")
    for name in names:
        if vocabulary.resolve() != out.resolve():
            shutil.copyfile(vocabulary / name, out / name)
    words = SpeechVocabulary(out)
    kept = {f"model.{name}": tensor for name, tensor in weights.items() if not name.startswith("phones.")}
    save_file(half(kept), out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    files = {
        "config": model_config(shape, words),
        "generation_config": generation_config(shape, words, out),
        "preprocessor_config": _FEATURES,
    }
    for name, data in files.items():
        (out / f"{name}.json").write_text(json.dumps(data, indent=2) + "\n")
    written = [*names, "model.safetensors", *(f"{name}.json" for name in files)]
    size = sum((out / name).stat().st_size for name in written)
    if size > MOST_BYTES:
        raise ValueError(f"{out} has {size} bytes, more than {MOST_BYTES}")
    return size


def main() -> None:
    """Parse the command line and export a run's folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run", type=Path, required=True, help="folder that recipes.whisper.train wrote")
    parser.add_argument("--vocabulary", type=Path, required=True, help="folder with its tokenizer.json")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    shape = Shape(vocab=SpeechVocabulary(args.vocabulary).size)
    print(f"{export(load_file(args.run / 'weights.safetensors'), shape, args.vocabulary, args.out)} bytes")


if __name__ == "__main__":
    main()
