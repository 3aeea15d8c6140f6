"""The same shape by Hugging Face's classes: a ViT, a Q-Former and a LLaMA of random weights, in fp16.

BLIP-2's vision and Q-Former classes have MiniGPT-4's layers; ``generate`` takes the embedded prompt, as the
original does. Captions one by one, as the original, and all together, which it does not do. Weights are drawn
as Ingot draws its own: the classes leave those of the ViT almost zero, and on zeros a GPU at the limit of its
power computes faster.

    python benchmarks/pictures_torch.py --json docs/results/pictures_7b_torch.json
    python benchmarks/pictures_torch.py --encoders --json docs/results/pictures_encoders.json

``--encoders`` times nothing but the two encoders, in turns in one process.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.pictures import AFTER, BEFORE, CAPTIONS, SHAPE, WORDS, figures, timed
from ingot import LLM
from ingot.building.random_weights import STD
from ingot.layers.encoder_pass import EncoderPass
from ingot.measure.side.machine import machine

Row = dict[str, Any]


class Pipeline:
    """The classes on the GPU."""

    def __init__(self, shape: dict[str, Any], dtype: torch.dtype) -> None:
        import transformers as hf

        own = shape["minigpt4"]
        self.side, self.dtype = own["image_size"], dtype
        with torch.device("cuda"):
            vision = hf.Blip2VisionConfig(
                hidden_size=own["vit_width"],
                intermediate_size=own["vit_inner"],
                num_hidden_layers=own["vit_depth"],
                num_attention_heads=own["vit_heads"],
                image_size=own["image_size"],
                patch_size=own["patch_size"],
            )
            queries = hf.Blip2QFormerConfig(
                hidden_size=own["qformer_width"],
                intermediate_size=own["qformer_inner"],
                num_hidden_layers=own["qformer_layers"],
                num_attention_heads=own["qformer_heads"],
                encoder_hidden_size=own["vit_width"],
            )
            shape = {k: v for k, v in shape.items() if k not in ("model_type", "dtype")}
            text = hf.LlamaConfig(
                **{k: v for k, v in shape.items() if k not in ("architectures", "minigpt4")}
            )
            text.tie_word_embeddings = False
            torch.set_default_dtype(dtype)
            self.vit = hf.Blip2VisionModel(vision).eval()
            self.norm = torch.nn.LayerNorm(own["vit_width"])
            self.qformer = hf.Blip2QFormerModel(queries).eval()
            self.queries = torch.randn(1, own["queries"], own["qformer_width"])
            self.projector = torch.nn.Linear(own["qformer_width"], text.hidden_size)
            self.llm = hf.LlamaForCausalLM(text).eval()
            torch.set_default_dtype(torch.float32)
        for part in (self.vit, self.qformer, self.projector, self.llm):
            for name, weight in part.named_parameters():
                norm = weight.dim() == 1 and name.endswith("weight")
                torch.nn.init.ones_(weight) if norm else torch.nn.init.normal_(weight, std=STD)

    @torch.inference_mode()
    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """[N, 3, side, side] → [N, positions, hidden_size]."""
        seen = self.norm(self.vit(pixel_values=pixels.to("cuda", self.dtype)).last_hidden_state)
        asked = self.queries.expand(len(pixels), -1, -1)
        found = self.qformer(query_embeds=asked, encoder_hidden_states=seen).last_hidden_state
        return self.projector(found)

    @torch.inference_mode()
    def caption(self, pixels: torch.Tensor, words: int) -> torch.Tensor:
        """Greedy tokens behind the prompts [N, words]."""
        ids = torch.randint(3, 1000, (len(pixels), BEFORE + AFTER), device="cuda")
        embed = self.llm.get_input_embeddings()
        first, last = embed(ids[:, :BEFORE]), embed(ids[:, BEFORE:])
        rows = torch.cat([first, self.encode(pixels), last], dim=1)
        mask = torch.ones(rows.shape[:2], dtype=torch.int64, device="cuda")
        return self.llm.generate(
            inputs_embeds=rows,
            attention_mask=mask,
            max_new_tokens=words,
            min_new_tokens=words,
            do_sample=False,
        )


@torch.inference_mode()
def encoders(pipeline: Pipeline, shape: Path, counts: list[int], turns: int) -> list[Row]:
    """Pictures a second of the classes and of Ingot's encoder in turns, features on the device to rows."""
    rows: list[Row] = []
    with LLM.from_config(shape, "cuda", dtype="fp16", max_seq_len=2048, max_batch_size=1) as llm:
        fused, model = EncoderPass(fused=True), llm.engine.model
        for count in counts:
            pixels = torch.randn(count, 3, pipeline.side, pipeline.side, device="cuda", dtype=torch.float16)
            for turn in range(turns):
                sides = {
                    "pytorch": lambda pixels=pixels: pipeline.encode(pixels),
                    "ingot": lambda pixels=pixels: model.encode(pixels, fused),
                }
                for side, call in sides.items():
                    row = {"side": side, "pictures": count, "turn": turn} | timed(call, 15)
                    rows.append(row | {"per_second": round(1e3 * count / row["ms"], 1)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", type=Path, default=SHAPE)
    parser.add_argument("--alone", type=int, default=8, help="captions one by one")
    parser.add_argument("--encoders", action="store_true", help="beside Ingot's, in turns")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    pipeline = Pipeline(json.loads(given.shape.read_text()), torch.float16)
    if given.encoders:
        del pipeline.llm
        write(given.json, {"rows": encoders(pipeline, given.shape, [64], turns=3)})
        return
    shown = torch.randn(CAPTIONS, 3, pipeline.side, pipeline.side, generator=torch.Generator().manual_seed(0))
    found: Row = {"encoder": []}
    for count in (1, 64):
        pixels = shown.repeat(2, 1, 1, 1)[:count].to("cuda", torch.float16)
        row = {"pictures": count} | timed(lambda pixels=pixels: pipeline.encode(pixels), 10)
        found["encoder"].append(row | {"per_second": round(1e3 * count / row["ms"], 1)})
    found["first_token"] = timed(lambda: pipeline.caption(shown[:1], 1), 10)
    alone = []
    for number in range(given.alone + 1):
        begun = time.perf_counter()
        pipeline.caption(shown[number : number + 1], WORDS)
        torch.cuda.synchronize()
        alone.append(time.perf_counter() - begun)
    found[f"caption_of_{WORDS}"] = figures(alone[1:])
    found[f"captions_{CAPTIONS}x{WORDS}_together"] = timed(lambda: pipeline.caption(shown, WORDS), 3)
    write(given.json, found)


def write(path: Path | None, found: Row) -> None:
    """On the terminal, and into a file of results."""
    found = {"command": shlex.join(["python", *sys.argv]), "machine": machine(torch.device("cuda")), **found}
    print(json.dumps(found))
    if path:
        path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
