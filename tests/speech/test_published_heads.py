"""OpenAI's ``.pt`` files get the heads that OpenAI publishes for their size."""

from __future__ import annotations

import base64
import gzip
from pathlib import Path

import numpy as np
import pytest

from ingot.checkpoint import openai_whisper as openai_heads
from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.checkpoint.openai_whisper import PUBLISHED, published_heads
from ingot.engine.manifest import Manifest
from ingot.speech.dtw_alignment import alignment_heads
from ingot.speech.transcriber import Transcriber
from tests.encoders.speech import write_speech
from tests.speech.openai import save_openai

# Masks [layers, heads] as openai-whisper publishes them.
MASKS = {
    "tiny.en": b"ABzY8J1N>@0{>%R00Bk>$p{7v037`oCl~+#00",
    "tiny": b"ABzY8bu8Lr0{>%RKn9Fp%m@SkK7Kt=7ytkO",
    "base.en": b"ABzY8;40c<0{>%RzzG;p*o+Vo09|#PsxSZm00",
    "base": b"ABzY8KQ!870{>%RzyTQH3`Q^yNP!>##QT-<FaQ7m",
    "small.en": b"ABzY8>?_)10{>%RpeA61k&I|OI3I$65C{;;pbCHh0B{qLQ;+}v00",
    "small": b"ABzY8DmU6=0{>%Rpa?J`kvJ6qF(V^F86#Xh7JUGMK}P<N0000",
    "medium.en": b"ABzY8usPae0{>%R7<zz_OvQ{)4kMa0BMw6u5rT}kRKX;$NfYBv00*Hl@qhsU00",
    "medium": b"ABzY8B0Jh+0{>%R7}kK1fFL7w6%<-Pf*t^=N)Qr&0RR9",
    "large-v1": b"ABzY8r9j$a0{>%R7#4sLmoOs{s)o3~84-RPdcFk!JR<kSfC2yj",
    "large-v2": b"ABzY8zd+h!0{>%R7=D0pU<_bnWW*tkYAhobTNnu$jnkEkXqp)j;w1Tzk)UH3X%SZd&fFZ2fC2yj",
    "large-v3": b"ABzY8gWO1E0{>%R7(9S+Kn!D~%ngiGaR?*L!iJG9p-nab0JQ=-{D1-g00",
    "large-v3-turbo": b"ABzY8j^C+e0{>%RARaKHP%t(lGR*)0g!tONPyhe`",
}
SIZES = {  # layers of the decoder, width, heads
    "tiny": (4, 384, 6),
    "base": (6, 512, 8),
    "small": (12, 768, 12),
    "medium": (24, 1024, 16),
    "large": (32, 1280, 20),
    "large-v3-turbo": (4, 1280, 20),
}


SMALL = {"vocab_size": 51865, "num_mel_bins": 80, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}


def config_of(name: str) -> tuple[dict[str, int], int]:
    """Its sizes, and how many heads a layer has."""
    layers, width, heads = SIZES.get(name) or SIZES[name.split(".")[0].split("-")[0]]
    vocabulary = 51864 if name.endswith(".en") else 51866 if "large-v3" in name else 51865
    return {"decoder_layers": layers, "d_model": width, "vocab_size": vocabulary}, heads


@pytest.mark.parametrize("name", MASKS)
def test_heads_are_the_published_ones(name: str) -> None:
    config, heads = config_of(name)
    mask = np.frombuffer(gzip.decompress(base64.b85decode(MASKS[name])), bool)
    wanted = np.argwhere(mask.reshape(config["decoder_layers"], heads))
    assert published_heads(config, name) == tuple(map(tuple, wanted.tolist()))


def test_nothing_else_is_published() -> None:
    assert len(PUBLISHED) == len(MASKS) - 1, "large-v1 has the sizes of large-v2"
    tiny, _ = config_of("tiny")
    for key in tiny:
        assert published_heads(tiny | {key: tiny[key] + 8}, "tiny") is None
    assert published_heads(config_of("large-v2")[0], "mine") == published_heads(*_named("large-v2"))


def _named(name: str) -> tuple[dict[str, int], str]:
    return config_of(name)[0], name


def test_an_engine_of_a_file_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a size that nobody published, all heads of the upper half of the layers, as the original takes."""
    file = save_openai(write_speech(tmp_path / "folder", **SMALL), tmp_path / "own.pt")
    with open_checkpoint(file) as plain:
        assert plain.generation_config == {}
    assert _heads(file) == [(1, head) for head in range(4)]
    monkeypatch.setitem(openai_heads.PUBLISHED, (2, 32, 51865), ((0, 3), (1, 2)))
    assert _heads(file) == [(0, 3), (1, 2)]


def _heads(file: Path) -> list[tuple[int, int]]:
    manifest: Manifest = Transcriber(file, "cpu", max_batch_size=1).llm.engine.manifest
    return alignment_heads(manifest.generation, manifest.model)
