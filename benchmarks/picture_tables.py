"""Tables of models of pictures, as Markdown.

print(PICTURE_TABLES["pictures-7b"]())
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.result_values import value_at as of
from benchmarks.tables import markdown

SHAPE, TORCH, POCKET = "pictures_7b.json", "pictures_7b_torch.json", "pocket_vision_precisions.json"
BESIDE = "pictures_7b_beside.json"
_CAPTIONS = "captions_40x80"


def pictures_7b() -> str:
    """docs/vision.md: the 7B shape by scheme, and Hugging Face's classes beside it."""
    rows = []
    for row in of(SHAPE)["rows"]:
        first, captions = row["first_token"], row[_CAPTIONS]
        name = "fp16" if row["quant"] == "none" else row["quant"]
        by_count = {one["pictures"]: one["per_second"] for one in row["served"]}
        eager = {one["pictures"]: one["per_second"] for one in row["encoder"]}
        rows.append(
            [
                name,
                f"{first['ms']:.1f} ({first['p90']:.1f})",
                f"{captions['ms'] / 1e3:.2f}",
                *(f"{by_count[count]:.0f}" for count in (1, 8)),
                f"{eager[64]:.0f}",
            ]
        )
    torch = of(TORCH)
    per_second = {one["pictures"]: f"{one['per_second']:.0f}" for one in torch["encoder"]}
    first, captions = torch["first_token"], torch[f"{_CAPTIONS}_together"]
    rows.append(
        [
            "PyTorch, fp16",
            f"{first['ms']:.1f} ({first['p90']:.1f})",
            f"{captions['ms'] / 1e3:.2f}",
            per_second[1],
            "",
            per_second[64],
        ]
    )
    head = ["", "first token, ms (p90)", "40 captions of 80, s", "pictures/s: 1", "8 at once", "64 at once"]
    return markdown(head, rows)


def stages_7b() -> str:
    """docs/vision.md: parts of the encoder by themselves, 64 pictures, ms."""
    rows = []
    for row in of(SHAPE)["rows"]:
        name = "fp16" if row["quant"] == "none" else row["quant"]
        stages = next(one for one in row["encoder"] if one["pictures"] == 64)["stages"]
        rows.append([name, *(f"{stages[part]['ms']:.2f}" for part in ("vit", "qformer", "projector"))])
    return markdown(["ms of 64 pictures", "ViT", "Q-Former", "projector"], rows)


def beside_7b() -> str:
    """docs/vision.md: what streams of text see of their company."""
    rows = []
    for row in of(BESIDE)["rows"]:
        name = "fp16" if row["quant"] == "none" else row["quant"]
        kinds = row["beside"]
        medians, first = [f"{kinds['pictures']['ms']:.2f}"], kinds["pictures"]["first_token"]
        p99 = (f"{kinds[kind]['p99']:.2f}" for kind in ("nothing", "texts", "pictures"))
        rows.append([name, *medians, *p99, f"{first['ms']:.0f} ({first['p90']:.0f})"])
    head = ["ms between tokens", "median", "p99 alone", "beside texts", "beside pictures"]
    head.append("their first token (p90)")
    return markdown(head, rows)


def pocket_vision() -> str:
    """docs/vision.md: the pocket picture model by precision."""
    rows = []
    for name, row in of(POCKET)["engines"].items():
        one, together = row["one"], row["per_second"]
        rows.append(
            [
                name,
                f"{row['exact']:.1f}",
                f"{row['megabytes']:.1f}",
                f"{one['median']:.0f} ({one['p90']:.0f})",
                f"{together['median']:.1f}",
            ]
        )
    head = ["", "exact, %", "MB", "one answer, ms (p90)", "answers/s together"]
    return markdown(head, rows)


PICTURE_TABLES: dict[str, Callable[[], str]] = {
    "pictures-7b": pictures_7b,
    "pictures-7b-stages": stages_7b,
    "pictures-7b-beside": beside_7b,
    "pocket-vision": pocket_vision,
}
