"""Model folders that come from a stranger: nothing outside of them is read, and no number in them runs for ever."""

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import zeros

from fullshard.config.errors import WeightsError
from fullshard.distributed import runtime
from fullshard.sft.checked_run import check_model_folder
from fullshard.weights.adapter_files import open_adapter
from fullshard.weights.config_limits import check_config
from fullshard.weights.load import load_pretrained
from fullshard.weights.locate import has_weights, open_source
from fullshard.weights.model_dir_writer import copy_files
from tests.pool import ranks
from tests.report.small_results import command
from tests.weights.models import save

SECRET = "model-secret.safetensors"


@pytest.fixture
def folder(tmp_path):
    """A model's folder, beside it a file that does not belong to it."""
    save_file({"a": zeros(2)}, tmp_path / SECRET)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


def _index(folder: Path, name: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))


@pytest.mark.parametrize("spelled", ["../{}", "{top}/{}", "sub/../../{}", "./../{}", "link.safetensors", "linked/{}"])
def test_an_index_cannot_leave_its_folder(folder, spelled):
    (folder / "link.safetensors").symlink_to(folder.parent / SECRET)
    (folder / "linked").symlink_to(folder.parent)
    (folder / "sub").mkdir()
    _index(folder, spelled.format(SECRET, top=folder.parent))
    with pytest.raises(WeightsError, match=r"is outside of the model's folder \(.*copy it into"):
        open_source(folder)
    with pytest.raises(WeightsError, match="is outside of the model's folder"):
        open_source(folder / "model.safetensors.index.json")
    assert not has_weights(folder)


@pytest.mark.parametrize("name", [5, None, ["a"], {"b": 1}, "a\0b", "[" * 5])
def test_an_index_with_other_things_than_names(folder, name):
    _index(folder, name)
    with pytest.raises(WeightsError, match=r"is not a safetensors index|but 1 are missing"):
        open_source(folder)
    (folder / "model.safetensors.index.json").write_text("[" * 200_000)
    with pytest.raises(WeightsError, match="is not a safetensors index"):
        open_source(folder)


def test_links_that_lead_elsewhere_are_refused_and_those_of_the_hub_s_cache_are_not(folder, tmp_path):
    link = folder / "model.safetensors"
    link.symlink_to(tmp_path / SECRET)
    with pytest.raises(WeightsError, match="is outside of the model's folder"):
        open_source(folder)
    (folder / "adapter_model.safetensors").symlink_to(tmp_path / SECRET)
    with pytest.raises(WeightsError, match="is outside of the model's folder"):
        open_adapter(folder)
    link.unlink()
    save_file({"b": zeros(2)}, folder / "here.safetensors")
    link.symlink_to("here.safetensors")
    (tmp_path / "other-name").symlink_to(folder)  # the user's own link to the folder
    assert open_source(folder).entries.keys() == open_source(tmp_path / "other-name").entries.keys() == {"b"}
    repository = tmp_path / "models--some--model"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    save_file({"c": zeros(2)}, repository / "blobs" / "abcdef")
    (snapshot / "model-1.safetensors").symlink_to("../../blobs/abcdef")
    _index(snapshot, "model-1.safetensors")
    assert open_source(snapshot).entries.keys() == {"c"}
    (snapshot / "model-1.safetensors").unlink()
    (snapshot / "model-1.safetensors").symlink_to("../../../" + SECRET)
    with pytest.raises(WeightsError, match="is outside of the model's folder"):
        open_source(snapshot)


def test_a_result_takes_no_files_from_elsewhere(folder, tmp_path):
    """Tokenizer files are copied beside the weights, and may then be published."""
    (tmp_path / "private").write_text("a secret")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "merges.txt").symlink_to(tmp_path / "private")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "one.jinja").symlink_to(tmp_path / "private")
    (tmp_path / "out").mkdir()
    copy_files(folder, tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").rglob("*")] == ["tokenizer.json"]


# --- config.json ------------------------------------------------------------------------------------------------------

SIZES = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 416,
}  # fmt: skip
HUGE = [
    {"num_hidden_layers": 10**9}, {"num_labels": 10**9}, {"vocab_size": 10**12}, {"hidden_size": 2**70},
    {"num_attention_heads": 10**9}, {"max_position_embeddings": 10**15},
    {"model_type": "mixtral", "num_local_experts": 10**9},
    {"model_type": "gpt2", "n_layer": 10**9}, {"model_type": "t5", "num_decoder_layers": 10**9},
    {"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**9}},
    {"model_type": "qwen2_vl", "vision_config": {"depth": 10**9}}, {"num_hidden_layers": -(10**9)},
    {"mlp_only_layers": [1, 10**9]}, {"num_nextn_predict_layers": 10**9},
]  # fmt: skip


@pytest.mark.parametrize("change", HUGE, ids=lambda change: "-".join(map(str, change)))
def test_numbers_that_no_model_has(tmp_path, change):
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, **change}))
    message = r"config.json has \w+ = .*; at most [\d,]+ is supported"
    for read in (check_config, lambda place: check_config(place / "config.json"), lambda p: check_model_folder(str(p))):
        with pytest.raises(WeightsError, match=message):
            read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    check_config(tmp_path)
    with pytest.raises(WeightsError, match=message):
        check_config(tmp_path, change)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000])
def test_a_config_that_is_nested_without_end(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(WeightsError, match="nested too deeply"):
        check_config(tmp_path)


@pytest.mark.parametrize("words", [("plan", "MODEL"), ("show", "MODEL"), ("chat", "MODEL", "--prompt", "a"),
                                   ("export", "MODEL", "OUT"), ("sft", "--model_name_or_path", "MODEL")])  # fmt: skip
def test_commands_refuse_them_in_one_line(tmp_path, words):
    save("llama", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10**9}))
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "one two three"}\n')
    names = {"MODEL": tmp_path / "model", "OUT": tmp_path / "out"}
    more = ["--dataset_name", str(data), "--output_dir", str(tmp_path / "out")] if words[0] == "sft" else []
    code, _, said = command(*(str(names.get(word, word)) for word in words), *more)
    assert code == 2 and "num_hidden_layers = 1,000,000,000; at most 2,000 is supported" in " ".join(said.split())
    assert "Traceback" not in said and not (tmp_path / "out").exists()


@ranks(2)
def test_loading_refuses_them(tmp_path):
    if runtime.is_main():
        save("llama", tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10**9}))
    runtime.barrier()
    with pytest.raises(WeightsError, match="num_hidden_layers = 1,000,000,000; at most 2,000 is supported"):
        load_pretrained(tmp_path)
    with pytest.raises(WeightsError, match="vocab_size = a number of 71 bits"):
        load_pretrained(tmp_path, config={"num_hidden_layers": 2, "vocab_size": 2**70})
