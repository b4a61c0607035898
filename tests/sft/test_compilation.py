"""What a run compiles and which attention it has where the settings leave both open, and that neither changes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPTJConfig, GPTJForCausalLM, GptOssConfig, GptOssForCausalLM, TrainingArguments

from fullshard.config.errors import ConfigError
from fullshard.models.attention import is_own
from fullshard.parallel.settings import EngineSettings
from fullshard.sft import model_steps
from fullshard.sft.base_model import choose_attention
from fullshard.sft.checked_run import sharding_settings
from fullshard.sft.cli_args import config_of
from fullshard.sft.model_steps import choose_compilation
from tests.pool import ranks
from tests.sft.runs import losses, settings, train
from tests.sft.tiny import make_model


@pytest.mark.parametrize(
    ("wanted", "device", "steps", "backend"),
    [
        (None, "cuda", 100, "inductor"),
        (None, "cuda", 1, "no"),
        (None, "cpu", 100, "no"),
        (False, "cuda", 100, "no"),
        (True, "cpu", 1, "inductor"),
    ],
)
def test_layers_are_compiled_on_gpus_where_it_pays(
    wanted: bool | None, device: str, steps: int, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(tmp_path, torch_compile=wanted)
    monkeypatch.setattr(model_steps, "COMPILE_FROM", 10 * model_steps.training_flops(config, 1000, 1))
    engine = sharding_settings(config, None, [])
    assert choose_compilation(config, engine, 1000, steps, torch.device(device)).backend == backend


def test_what_the_launcher_and_other_libraries_say(tmp_path: Path) -> None:
    launched = EngineSettings(backend="inductor")
    assert sharding_settings(settings(tmp_path), launched, []).backend == "inductor"
    assert sharding_settings(settings(tmp_path, torch_compile=False), launched, []).backend == "no"
    for given, expected in (({}, None), ({"torch_compile": True}, True)):
        config, _ = config_of(TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **given))
        assert config.torch_compile is expected, "False is the default of TrainingArguments, and no wish"


@pytest.mark.parametrize(
    ("asked", "made_with", "given", "own"),
    [
        (None, "sdpa", False, True),
        ("sdpa", "sdpa", False, False),
        (None, "eager", True, False),
        (None, "sdpa", True, True),
    ],
)
def test_attention_is_our_own_on_gpus_unless_another_is_asked_for(
    asked: str | None, made_with: str, given: bool, own: bool, tmp_path: Path
) -> None:
    model = make_model(attn_implementation=made_with)
    config = settings(tmp_path, attn_implementation=asked)
    choose_attention(config, model, torch.device("cpu"), given)
    assert not is_own(model.config), "on a CPU transformers chooses"
    choose_attention(config, model, torch.device("cuda"), given)
    assert is_own(model.config) is own


def test_a_model_in_memory_has_the_default_of_its_class(tmp_path: Path) -> None:
    """Classes that SDPA does not serve are made with transformers' eager attention, which keeps all scores."""
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "head_dim": 4}
    shape = GptOssConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, num_local_experts=2)
    model = GptOssForCausalLM(shape)
    assert model.config._attn_implementation == "eager"
    choose_attention(settings(tmp_path), model, torch.device("cuda"), in_memory=True)
    assert is_own(model.config)


def test_a_model_with_an_attention_of_its_own_is_refused_by_name(tmp_path: Path) -> None:
    model = GPTJForCausalLM(GPTJConfig(vocab_size=8, n_embd=8, n_layer=1, n_head=2, rotary_dim=4))
    with pytest.raises(ConfigError, match="GPTJForCausalLM has an attention of its own"):
        choose_attention(settings(tmp_path, attn_implementation="fullshard"), model, torch.device("cpu"), False)


@pytest.mark.slow
@ranks(1)
def test_a_run_with_both_has_the_losses_of_one_without(tmp_path: Path) -> None:
    found = []
    for number, changes in enumerate(({}, {"attn_implementation": "fullshard", "torch_compile_backend": "eager"})):
        more: dict[str, Any] = {"max_steps": 3, "packing": True, "max_length": 96, "per_device_train_batch_size": 2}
        place = tmp_path / str(number)
        torch._dynamo.reset()
        make_model().save_pretrained(place / "model")
        trainer = train(str(place / "model"), settings(place, **more, **changes))
        assert is_own(trainer.parts.model.config) is bool(changes)
        found.append(losses(trainer))
    assert found[1] == pytest.approx(found[0], rel=1e-5) and len(found[0]) == 3
