"""The text of the two files that ``ingot port -o`` writes; ``<<names>>`` are filled in."""

from __future__ import annotations

MODEL = '''"""<<name>>, from outside Ingot's package: started by ``ingot port``.

The nearest architecture is <<nearest>>, score <<score>>.

register_<<name>>()
build(checkpoint, engine)
"""

from __future__ import annotations

from ingot.checkpoint.weight_map import <<names>>
from ingot.config.decoder_config import DecoderConfig
from ingot.errors import CheckpointError
from ingot.models.architecture import Architecture, LayerRange<<head>>
from ingot.models.hf_values import HfConfig
from ingot.models.model_registry import architecture_named, register

# What is open. Remove a line when the code below does what it says; until then no model is built.
TODO: tuple[str, ...] = <<todo>>
NAME = "<<name>>"
NEAREST = architecture_named("<<nearest>>")
# Key of config.json -> the key of the same meaning that <<nearest>> reads.
READ_AS: dict[str, str] = <<read_as>>
KEYS = NEAREST.keys | frozenset(READ_AS)


def config_from_hf(hf: HfConfig) -> DecoderConfig:
    """config.json -> DecoderConfig, by <<nearest>>'s reading of the keys that both have."""
    if TODO:
        raise CheckpointError(
            f"the port of {NAME} is not finished",
            seen="".join(f"\\n  {line}" for line in TODO),
            fix=f"do what the {len(TODO)} lines of TODO in {__file__} say, and remove them",
        )
    known = {READ_AS.get(key, key): value for key, value in hf.items()}
    # <<nearest>> fills in, of the checkpoint's config.json:
<<fields>>    # Where config.json lacks these keys, it takes its own defaults; compare them with the class's:
<<defaults>>    return NEAREST.config_from_hf(known).replace(architecture=NAME)


def weight_map(config: DecoderConfig, layers: LayerRange = None) -> WeightMap:
    """Stored tensor names -> Ingot's."""
<<proposed>>    rules = (
<<rules>>    )
    return WeightMap(rules, config.num_layers, layers<<prefixes>>)


MODEL = Architecture(NAME, <<classes>>, <<model_type>>, KEYS, config_from_hf, weight_map)


def register_<<name>>() -> None:
    """Make the architecture known to this process."""
    register(MODEL)
'''

TEST = '''"""<<name>> computes what Hugging Face's class does: logits and greedy ids of a tiny random model.

python -m pytest test_<<name>>.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import <<name>> as port
from ingot import LLM, SamplingParams

# The checkpoint's config.json with small sizes.
CONFIG = {
<<config>>}
TOLERANCE = 1e-4  # of the largest logit, both in fp32 on the CPU
NEW_TOKENS = 32
IDS = torch.randint(CONFIG.get("vocab_size", 97), (24,), generator=torch.Generator().manual_seed(5)).tolist()


@torch.no_grad()
def random_model() -> PreTrainedModel:
    """The class with weights that have clear winners, norms and biases away from 1 and 0."""
    config = AutoConfig.for_model(<<model_type>>, **CONFIG)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() == 1:
            weight.copy_(0.3 * noise + (0.0 if name.endswith("bias") else 1.0))
        else:
            weight.copy_(1.3 * noise / min(weight.shape) ** 0.5)
    model.tie_weights()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return random_model()


@pytest.fixture(scope="module")
def llm(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    if port.TODO:
        count, lines = len(port.TODO), "\\n".join(port.TODO)
        pytest.fail(f"{count} TODOs are open in {port.__file__}:\\n{lines}", pytrace=False)
    folder: Path = tmp_path_factory.mktemp("<<name>>")
    model.save_pretrained(folder)
    port.register_<<name>>()
    return LLM(folder, "cpu", max_batch_size=2)


def test_logits(llm: LLM, model: PreTrainedModel) -> None:
    with torch.inference_mode():
        theirs = model(torch.tensor([IDS])).logits[0].float()
    ours = llm.logits(IDS)
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max() / theirs.abs().max()) <= TOLERANCE


def test_greedy_ids(llm: LLM, model: PreTrainedModel) -> None:
    prompt = torch.tensor([IDS])
    with torch.inference_mode():
        theirs = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )[0, len(IDS) :].tolist()
    assert len(set(theirs)) > 1
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    assert llm.generate(IDS, params)[0].token_ids == theirs
'''
