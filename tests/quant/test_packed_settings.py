"""What quantizers write about their weights: what is known is read, what is not is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ingot import LLM
from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.checkpoint.packed_config import PackedFormat, packed_format
from ingot.errors import CheckpointError
from tests.quant.packed_checkpoints import (
    Packing,
    Written,
    change_quantization,
    reference_logits,
    write_packed,
)
from tests.tiny_models import edit_config, random_ids

Json = dict[str, Any]
AUTOGPTQ: Json = json.loads(  # 0.7 and 0.8
    """
    {"bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": true, "static_groups": false, "sym":
    true, "true_sequential": true, "model_name_or_path": "m", "model_file_base_name": "model", "quant_method":
    "gptq", "checkpoint_format": "gptq", "is_marlin_format": false}
    """
)
GPTQMODEL: Json = json.loads(  # 7.7
    """
    {"bits": 4, "group_size": 128, "desc_act": false, "lm_head": false, "method": "gptq", "sym": true,
    "quant_method": "gptq", "format": "gptq", "checkpoint_format": "gptq", "pack_dtype": "int32", "meta":
    {"quantizer": ["gptqmodel:7.7.0"], "uri": "https://github.com/modelcloud/gptqmodel", "act_group_aware":
    true, "fallback": {"strategy": "rtn", "threshold": "0.5%", "smooth": null}, "hessian": {"chunk_size":
    null, "staging_dtype": "float32"}, "preprocessors": [{"code": "smoother"}], "offload_to_disk_path":
    "/tmp/x"}}
    """
)
OPTIMUM: Json = json.loads(  # as transformers 4.4x writes its GPTQConfig
    """
    {"batch_size": 1, "bits": 4, "block_name_to_quantize": null, "cache_block_outputs": true,
    "checkpoint_format": "gptq", "damp_percent": 0.1, "dataset": ["text"], "desc_act": false,
    "exllama_config": {"version": 1}, "group_size": 128, "max_input_length": null, "sym": true, "meta":
    {"quantizer": ["optimum:1.23"]}, "model_seqlen": 2048, "pad_token_id": 0,
    "module_name_preceding_first_block": ["model.embed_tokens"], "quant_method": "gptq",
    "modules_in_block_to_quantize": [["q"]], "tokenizer": null, "true_sequential": true, "use_cuda_fp16":
    false, "use_exllama": true, "backend": "auto"}
    """
)
AUTOROUND: Json = json.loads(  # 0.16, its export to GPTQ
    """
    {"bits": 4, "group_size": 128, "sym": false, "data_type": "int", "iters": 1000, "nsamples": 512,
    "enable_quanted_input": false, "enable_minmax_tuning": false, "seqlen": 512, "batch_size": 4,
    "scale_dtype": "torch.float32", "lr": 0.001, "minmax_lr": 0.002, "gradient_accumulate_steps": 2, "amp":
    false, "low_gpu_mem_usage": true, "autoround_version": "0.16.1", "provider": "auto-round", "lm_head":
    false, "quant_method": "gptq", "desc_act": false, "true_sequential": false, "damp_percent": 0.01,
    "act_bits": 16, "block_name_to_quantize": "model.layers"}
    """
)
AUTOAWQ: Json = json.loads(  # 0.2.9, and transformers' AwqConfig
    """
    {"bits": 4, "group_size": 128, "modules_to_not_convert": ["visual"], "quant_method": "awq", "version":
    "gemm", "zero_point": true, "backend": "autoawq", "do_fuse": false, "exllama_config": null,
    "fuse_max_seq_len": null, "modules_to_fuse": null}
    """
)
OLD_AWQ: Json = json.loads(  # quant_config.json
    """
    {"zero_point": true, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
    """
)
COMPRESSED: Json = json.loads(  # 0.20
    """
    {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"actorder": "weight", "block_structure":
    null, "dynamic": false, "group_size": 128, "num_bits": 4, "observer": "minmax", "observer_kwargs": {},
    "strategy": "group", "symmetric": true, "type": "int", "scale_dtype": null, "zp_dtype": "torch.int8"},
    "input_activations": null, "output_activations": null, "format": "pack-quantized"}}, "format":
    "pack-quantized", "global_compression_ratio": 1.9, "ignore": ["lm_head"], "kv_cache_scheme": null,
    "quant_method": "compressed-tensors", "quantization_status": "compressed", "sparsity_config": {},
    "transform_config": {}, "version": "0.20.0", "moe_sparsity_config": null}
    """
)
WRITTEN: dict[str, tuple[Json, PackedFormat]] = {
    "autogptq": (AUTOGPTQ, PackedFormat("gptq", 4, 128, True, act_order=True, stored_zero=1)),
    "gptqmodel": (GPTQMODEL, PackedFormat("gptq", 4, 128, True, stored_zero=1)),
    "gptqmodel v2": (
        GPTQMODEL | {"format": "gptq_v2", "checkpoint_format": "gptq_v2", "sym": False},
        PackedFormat("gptq", 4, 128, False),
    ),
    "optimum": (OPTIMUM, PackedFormat("gptq", 4, 128, True, stored_zero=1)),
    "autoround": (AUTOROUND, PackedFormat("gptq", 4, 128, False, stored_zero=1)),
    "autoawq": (AUTOAWQ, PackedFormat("awq", 4, 128, False)),
    "compressed-tensors": (COMPRESSED, PackedFormat("compressed-tensors", 4, 128, True)),
}
# Keys of other quantizers, and of these that nobody has thought of yet.
UNKNOWN: dict[str, Any] = {
    "rotation": "hadamard",
    "activation": {"mode": "w8a8"},
    "adapter": {"path": "x"},
    "static_kv_dtype": "fp8",
    "super_bits": 6,
    "layer_config": {"a": {"bits": 8}},
    "invented": 1,
}


def read(found: Json, **beside: Json) -> PackedFormat | None:
    return packed_format({"quantization_config": found}, {f"{k}.json": v for k, v in beside.items()})


def refusal(found: Json, **beside: Json) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(found, **beside)
    assert caught.value.fix
    return str(caught.value)


def nested(found: Json, path: tuple[str, ...], **changes: Any) -> Json:
    """With changes of an object within."""
    changed: Json = json.loads(json.dumps(found))
    place = changed
    for key in path:
        if place[key] is None:
            place[key] = {"num_bits": 8, "dynamic": True}
        place = place[key]
    place |= changes
    return changed


@pytest.mark.parametrize("name", WRITTEN)
class TestWhatQuantizersWrite:
    def test_is_read(self, name: str) -> None:
        found, expected = WRITTEN[name]
        assert read(found) == expected

    @pytest.mark.parametrize("key", UNKNOWN)
    def test_a_key_that_is_not_known(self, name: str, key: str) -> None:
        found, expected = WRITTEN[name]
        reported = refusal(found | {key: UNKNOWN[key]})
        assert (
            f"settings unknown to Ingot that may change what the stored weights mean; seen: {key}="
            in reported
        )
        for off in (None, False, 0, "", {}, []):
            assert read(found | {key: off}) == expected


GROUP = ("config_groups", "group_0")


@pytest.mark.parametrize("path", [GROUP, (*GROUP, "weights"), (*GROUP, "input_activations")], ids=str)
def test_unknown_keys_of_groups(path: tuple[str, ...]) -> None:
    found = nested(COMPRESSED, (*GROUP, "weights"), num_bits=8, strategy="channel", group_size=None)
    found = nested(found | {"format": "int-quantized"}, GROUP, format=None)
    reported = refusal(nested(found, path, rotated=True))
    assert f"seen: {'.'.join(path)}.rotated=True" in reported


@pytest.mark.parametrize(
    ("found", "reported"),
    [
        (nested(COMPRESSED, (*GROUP, "weights"), dynamic=True), "dynamic True"),
        (nested(COMPRESSED, (*GROUP, "weights"), actorder="magnitude"), "actorder.*magnitude"),
        (nested(COMPRESSED, (*GROUP, "weights"), actorder=["group"]), "actorder"),
        (nested(COMPRESSED, (*GROUP, "weights"), symmetric="true"), "symmetric; seen: 'true'"),
        (nested(COMPRESSED, (*GROUP, "weights"), block_structure=[128, 128]), "weights.block_structure"),
        (nested(COMPRESSED, GROUP, format="int-quantized"), "format of a compressed-tensors group"),
        (nested(COMPRESSED, GROUP, input_activations=[8]), "activations; seen: .8.; allowed: an object"),
        (COMPRESSED | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (COMPRESSED | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        (AUTOGPTQ | {"sym": "false"}, "sym; seen: 'false'"),
        (AUTOGPTQ | {"desc_act": 1}, "desc_act; seen: 1"),
        (AUTOGPTQ | {"method": "qqq"}, "gptq and qqq"),
        (AUTOGPTQ | {"format": "gptq_v2"}, "names two layouts.*'checkpoint_format': 'gptq'"),
        (AUTOGPTQ | {"dynamic": ["a"]}, "dynamic"),
        (AUTOGPTQ | {"pack_dtype": "int16"}, "pack_dtype; seen: int16"),
        (AUTOROUND | {"data_type": "mx_fp"}, "data_type; seen: mx_fp"),
        (AUTOROUND | {"act_bits": 8, "act_sym": True}, "act_bits; seen: 8"),
        (AUTOAWQ | {"backend": "llm-awq"}, "llm-awq"),
        (AUTOAWQ | {"zero_point": False}, "zero_point false"),
        (AUTOAWQ | {"desc_act": True}, "desc_act true"),
        (AUTOAWQ | {"lm_head": True}, "quantized lm_head"),
        (AUTOAWQ | {"dynamic": {"+:.*": {"bits": 8}}}, "different bits"),
        (AUTOAWQ | {"format": "gemv"}, "AWQ version; seen: gemv"),
    ],
)
def test_known_keys_of_another_meaning(found: Json, reported: str) -> None:
    assert re.search(reported, refusal(found))


class TestFilesBeside:
    """quantize_config.json and quant_config.json, which say what config.json says, or say it alone."""

    def test_they_may_say_the_same(self) -> None:
        old = {k: v for k, v in AUTOGPTQ.items() if k not in ("quant_method", "checkpoint_format")}
        assert read(AUTOGPTQ, quantize_config=old) == WRITTEN["autogptq"][1]
        assert read(AUTOAWQ, quant_config=OLD_AWQ) == WRITTEN["autoawq"][1]

    def test_one_may_say_it_alone(self) -> None:
        old = {k: v for k, v in AUTOGPTQ.items() if k != "quant_method"}
        assert packed_format({}, {"quantize_config.json": old}) == WRITTEN["autogptq"][1]
        assert packed_format({}, {"quant_config.json": OLD_AWQ}) == WRITTEN["autoawq"][1]
        assert packed_format({"compression_config": COMPRESSED}) == WRITTEN["compressed-tensors"][1]
        assert packed_format({}, {}) is None

    @pytest.mark.parametrize(
        ("changes", "seen"),
        [
            ({"sym": False}, "symmetric True and False"),
            ({"bits": 8}, "bits 4 and 8"),
            ({"desc_act": False}, "act_order True and False"),
            ({"checkpoint_format": "gptq_v2"}, "stored_zero 1 and 0"),
        ],
    )
    def test_they_may_not_differ(self, changes: Json, seen: str) -> None:
        reported = refusal(AUTOGPTQ, quantize_config=AUTOGPTQ | changes)
        assert (
            f"quantization_config and quantize_config.json describe different formats; seen: {seen}"
            in reported
        )

    def test_their_keys_are_checked(self) -> None:
        for name in ("quantize_config", "quant_config"):
            reported = refusal(AUTOGPTQ, **{name: AUTOGPTQ | {"rotation": "random"}})
            assert f"{name}.json (gptq) has settings unknown" in reported
            assert "rotation='random'" in reported

    def test_autoawq_s_old_file(self, tmp_path: Path) -> None:
        written = write_packed(tmp_path, Packing("awq", symmetric=False))
        edit_config(tmp_path, "quantization_config")
        (tmp_path / "quant_config.json").write_text(json.dumps(OLD_AWQ | {"q_group_size": 32}))
        ids = random_ids(12)
        found = LLM(tmp_path, "cpu").logits(ids)
        torch.testing.assert_close(found, reference_logits(written, ids), rtol=1e-4, atol=1e-4)


ZEROS = [
    Packing("gptq"),
    Packing("gptq_v2"),
    Packing("gptq", bits=8),
    Packing("gptq_v2", bits=8),
    Packing("gptq", symmetric=False),
    Packing("gptq_v2", symmetric=False),
    Packing("gptq", group=0, symmetric=False),
    Packing("gptq_v2", group=0, symmetric=False),
]


class TestZerosOfGptq:
    """Zeros stored less 1 or as they are, under either name: what can be told from the tensors is."""

    @pytest.mark.parametrize("packing", ZEROS, ids=lambda packing: packing.label)
    def test_the_other_layout_is_named(self, packing: Packing, tmp_path: Path) -> None:
        """Whatever ``sym`` says, the advice is the layout's name; followed, outputs are right."""
        written = write_packed(tmp_path, packing)
        other = "gptq_v2" if packing.form == "gptq" else "gptq"
        for symmetric in (packing.symmetric, False):
            change_quantization(tmp_path, checkpoint_format=other, sym=symmetric)
            reported = loading(tmp_path)
            assert f'to fix: "checkpoint_format": "{packing.form}" in the checkpoint' in reported
            assert '"sym"' not in reported
        change_quantization(tmp_path, checkpoint_format=packing.form, sym=packing.symmetric)
        assert_right(written)

    @pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
    def test_sym_is_named_where_it_is_the_cure(self, form: str, tmp_path: Path) -> None:
        written = write_packed(tmp_path, Packing(form, symmetric=False))
        change_quantization(tmp_path, sym=True)
        assert 'to fix: "sym": false' in loading(tmp_path)
        change_quantization(tmp_path, sym=False)
        assert_right(written)

    @pytest.mark.parametrize(
        ("packing", "changes"),
        [
            (Packing("gptq", symmetric=False), {"checkpoint_format": "gptq_v2", "sym": True}),
            (Packing("gptq_v2", symmetric=False), {"checkpoint_format": "gptq", "sym": True}),
            (Packing("gptq", bits=8, symmetric=False), {"sym": True}),
            (Packing("gptq_v2", bits=8, symmetric=False), {"checkpoint_format": "gptq", "sym": True}),
        ],
        ids=str,
    )
    def test_no_advice_where_two_things_may_be_wrong(
        self, packing: Packing, changes: Json, tmp_path: Path
    ) -> None:
        write_packed(tmp_path, packing)
        change_quantization(tmp_path, **changes)
        reported = loading(tmp_path)
        assert "symmetric, but zero points are not in the middle" in reported
        assert '"sym": false' not in reported
        assert "download" in reported

    def test_a_layer_s_own_average_is_no_layout(self, tmp_path: Path) -> None:
        """Weights whose average is a part of a step away from 0, and few of them."""
        for packing in (Packing("gptq", symmetric=False), Packing("gptq_v2", symmetric=False)):
            written = write_packed(tmp_path / packing.form, packing, hidden_size=32, intermediate_size=32)
            assert_right(written)


def loading(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        LLM(folder, "cpu")
    return str(caught.value)


def assert_right(written: Written) -> None:
    ids = random_ids(12)
    found = LLM(written.folder, "cpu").logits(ids)
    torch.testing.assert_close(found, reference_logits(written, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stored", [0, 3])
def test_zeros_beside_symmetric_compressed_tensors(stored: int, tmp_path: Path) -> None:
    written = write_packed(tmp_path, Packing("pack"))
    file, name = tmp_path / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(file)
    zeros = torch.full(tensors[f"{name}_scale"].shape, stored, dtype=torch.int8)
    save_file(tensors | {f"{name}_zero_point": zeros}, file)
    if stored:
        assert "symmetric, but zero points are not 0" in loading(tmp_path)
    else:
        assert_right(written)


@pytest.mark.parametrize("form", ["gptq", "gptq_v2", "awq", "pack", "int"])
def test_a_checkpoint_with_an_unknown_setting_is_not_opened(form: str, tmp_path: Path) -> None:
    bits = 8 if form == "int" else 4
    write_packed(tmp_path, Packing(form, bits, group=0, symmetric=form != "awq"))
    change_quantization(tmp_path, rotation="hadamard")
    with pytest.raises(CheckpointError, match="rotation='hadamard'"):
        open_checkpoint(tmp_path)
