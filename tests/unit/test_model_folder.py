"""Laws of policy folders: a broken one is refused with key and remedy, and the hash follows the weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from paceline.config.run import FolderPolicy, TinyPolicy
from paceline.errors import ModelError
from paceline.models.folder import load_policy, load_tokenizer, resolve_policy
from paceline.models.tiny import make_model, make_tokenizer


def untrained() -> Qwen3ForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make_model(TinyPolicy(num_layers=4, hidden_size=32)).eval()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    untrained().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "policy"))


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def name_a_missing_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


BROKEN: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: shutil.rmtree(f), "does not exist"),
    (lambda f: (shutil.rmtree(f), f.write_text("x")), "is a file"),
    (lambda f: (f / "config.json").unlink(), "no config.json"),
    (lambda f: (f / "config.json").write_text("{"), "cannot be read"),
    (lambda f: (f / "config.json").write_text("{}"), "no architectures"),
    (lambda f: (f / "model.safetensors").unlink(), r"no \*.safetensors"),
    (lambda f: (f / "model.safetensors").write_bytes(b""), "damaged or incomplete"),
    (lambda f: (f / "model.safetensors").write_text("version https://git-lfs"), "damaged or incomplete"),
    (truncate, "damaged or incomplete"),
    (name_a_missing_shard, "lacks model-2.safetensors"),
    (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer"),
]


@pytest.mark.parametrize(("damage", "message"), BROKEN)
def test_a_broken_folder_is_refused_in_one_paragraph_that_names_the_key(
    folder: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=message) as caught:
        resolve_policy(FolderPolicy(path=folder))
    assert str(caught.value).startswith("policy.path") and "\n" not in str(caught.value)


def test_weights_of_another_shape_than_the_config_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    with pytest.raises(ModelError, match="belong together"):
        load_policy(folder)


def test_a_tokenizer_that_cannot_be_read_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="tokenizer"):
        load_tokenizer(folder)


def test_a_whole_folder_is_used_where_it_lies_and_nothing_is_cached(folder: Path, tmp_path: Path) -> None:
    policy = resolve_policy(FolderPolicy(path=folder), cache=tmp_path / "cache")
    assert (policy.path, policy.kind, policy.label) == (folder, "folder", "policy")
    assert not (tmp_path / "cache").exists()


def test_the_hash_is_that_of_the_weights_wherever_they_lie(whole: Path, folder: Path) -> None:
    same = resolve_policy(FolderPolicy(path=folder)).hash
    assert same == resolve_policy(FolderPolicy(path=whole)).hash
    (folder / "README.md").write_text("a note")
    assert same == resolve_policy(FolderPolicy(path=folder)).hash
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert same != resolve_policy(FolderPolicy(path=folder)).hash


def test_the_loaded_policy_computes_what_was_saved(folder: Path) -> None:
    saved = untrained()
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(load_policy(folder)(tokens).logits, saved(tokens).logits)
