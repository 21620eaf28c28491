"""Heads of other trainers: read as they were meant, or refused with the field that is wrong or has two meanings."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from paceline.errors import ModelError
from paceline.models.eagle3 import AuxCapture, Eagle3Config, Eagle3Head
from paceline.models.eagle3_formats import read_draft_ids
from paceline.testing.heads import write_specforge, write_speculators
from paceline.testing.models import random_policy

torch.set_num_threads(1)

VOCAB_SIZE, DRAFT_SIZE = 48, 14
DRAFT_IDS = torch.tensor([0, 1, 2, 5, 6, 9, 13, 17, 18, 26, 33, 40, 41, 47])


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return random_policy(tmp_path_factory.mktemp("policy"), vocab_size=VOCAB_SIZE, num_kv_heads=2)


def make_head(
    policy: PreTrainedModel,
    draft_ids: torch.Tensor | None = DRAFT_IDS,
    aux_layers: tuple[int, ...] | None = None,
    **changes: object,
) -> Eagle3Head:
    generator = torch.Generator().manual_seed(7)
    config = Eagle3Config.for_policy(policy.config, aux_layers, None if draft_ids is None else len(draft_ids))
    head = Eagle3Head.initialize(config.model_copy(update=changes), policy, draft_ids, generator)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "norm" in name:  # norms that are swapped or left out would not show with weights of one
                parameter.uniform_(0.5, 1.5, generator=generator)
    return head


def load(folder: Path, policy: PreTrainedModel) -> Eagle3Head:
    return Eagle3Head.load(folder, policy.config, 64, embedding=policy.get_input_embeddings().weight)


def drafts(head: Eagle3Head, policy: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    token_ids = torch.randint(VOCAB_SIZE, (11,), generator=torch.Generator().manual_seed(2))
    with AuxCapture(policy, head.aux_layers) as capture, torch.no_grad():
        policy(input_ids=token_ids[None, :-1])
    return head.draft(policy, capture.hidden()[0], token_ids, 4)


def write_bin(head: Eagle3Head, policy: PreTrainedModel, folder: Path) -> None:
    write_specforge(head, policy, folder, pickled=True)


HEADS: dict[str, dict[str, object]] = {
    "reduced vocabulary": {},
    "whole vocabulary": {"draft_ids": None},
    "layers of its own": {"aux_layers": (1, 2, 8)},
    "residual of the normed state": {"norm_before_residual": True},
}


@pytest.mark.parametrize("write", [write_specforge, write_bin, write_speculators], ids=lambda write: write.__name__)
@pytest.mark.parametrize("kind", HEADS)
def test_a_head_of_another_layout_drafts_the_same_and_is_exported_with_the_same_tensors(
    kind: str, write: Callable[[Eagle3Head, PreTrainedModel, Path], None], policy: PreTrainedModel, tmp_path: Path
) -> None:
    head = make_head(policy, **HEADS[kind])  # pyrefly: ignore[bad-argument-type]
    write(head, policy, tmp_path / "theirs")
    read = load(tmp_path / "theirs", policy)
    assert read.config == head.config
    for ours, theirs in zip(drafts(head, policy), drafts(read, policy), strict=True):
        assert torch.equal(ours, theirs)
    for name, exported in (("direct", head), ("rewritten", read)):
        exported.export(tmp_path / name)
    direct, rewritten = (load_file(tmp_path / name / "model.safetensors") for name in ("direct", "rewritten"))
    assert direct.keys() == rewritten.keys()
    assert all(torch.equal(tensor, rewritten[name]) for name, tensor in direct.items())
    configs = [(tmp_path / name / "config.json").read_text() for name in ("direct", "rewritten")]
    assert configs[0] == configs[1]


def edit_config(folder: Path, **changes: object) -> None:
    """A value of `...` removes the key."""
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {name: value for name, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))


def edit_layer(folder: Path, **changes: object) -> None:
    layer = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    edit_config(folder, transformer_layer_config=layer | changes)


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


SPECULATORS = {
    "another kind": (lambda f: edit_config(f, speculators_model_type="peagle"), "speculators_model_type is 'peagle'"),
    "no layer": (lambda f: edit_config(f, transformer_layer_config=...), "transformer_layer_config is missing"),
    "qwen3 layer": (lambda f: edit_layer(f, model_type="qwen3"), r"transformer_layer_config\.model_type is 'qwen3'"),
    "residual not said": (lambda f: edit_config(f, norm_before_residual=...), "norm_before_residual is missing"),
    "two layers": (lambda f: edit_layer(f, num_hidden_layers=2), "num_hidden_layers"),
    "a layer size is missing": (lambda f: edit_layer(f, intermediate_size=None), "intermediate_size"),
    "norm of the output": (lambda f: edit_config(f, norm_output=True), "norm_output"),
    "norm before fc": (lambda f: edit_config(f, norm_before_fc=True), "norm_before_fc"),
    "norms of the aux layers": (lambda f: edit_config(f, fc_norm=True), "fc_norm"),
    "another width": (lambda f: edit_config(f, target_hidden_size=32), "target_hidden_size is 32"),
    "four layers of which fc takes three": (
        lambda f: edit_config(f, eagle_aux_hidden_state_layer_ids=[2, 4, 5, 8]),
        r"fc\.weight .*\[64, 192\].*\[64, 256\].*4 aux layers",
    ),
    "missing tensor": (lambda f: edit_tensors(f, **{"layers.0.hidden_norm.weight": None}), r"lacks .*hidden_norm"),
    "extra tensor": (lambda f: edit_tensors(f, **{"verifier_norm.weight": torch.ones(64)}), "extra .*verifier_norm"),
    "shape": (lambda f: edit_tensors(f, **{"norm.weight": torch.ones(63)}), r"norm\.weight .*\[63\].*\[64\]"),
    "layer twice": (
        lambda f: edit_tensors(f, **{"midlayer.hidden_norm.weight": torch.ones(64)}),
        "hidden_norm.* twice",
    ),
}
SPECFORGE = {
    "layers without a convention": (
        lambda f: edit_config(f, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}),
        r"eagle_aux_hidden_state_layer_ids is \[1, 3, 4\].*inputs.*outputs.*aux_layer_convention",
    ),
    "unknown convention": (
        lambda f: edit_config(
            f, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "aux_layer_convention": "after"}
        ),
        "aux_layer_convention is 'after'",
    ),
    "output of a layer that is not there": (
        lambda f: edit_config(
            f, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 8], "aux_layer_convention": "output"}
        ),
        r"aux layers.*\[2, 4, 9\].*0\.\.8",
    ),
    "two answers": (
        lambda f: edit_config(f, draft_vocab_size=14, eagle_config={"draft_vocab_size": 15}),
        "draft_vocab_size is 14 and in eagle_config 15",
    ),
    "two RoPE bases": (
        lambda f: edit_config(f, rope_theta=5e5, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
        "rope_theta is 500000.0 and in rope_parameters 10000.0",
    ),
    "another architecture": (lambda f: edit_config(f, architectures=["PEagleDraftModel"]), "architectures is"),
    "another model": (lambda f: edit_config(f, model_type="qwen3"), "model_type is 'qwen3'"),
    "scaled logits": (lambda f: edit_config(f, logit_scale=0.5), "logit_scale is 0.5"),
    "quantised": (lambda f: edit_config(f, quantization_config={"bits": 4}), "quantization_config"),
    "sliding window": (lambda f: edit_config(f, layer_types=["sliding_attention"]), "layer_types"),
    "aux layers counted otherwise": (
        lambda f: edit_config(f, num_aux_hidden_states=4, eagle_aux_hidden_state_layer_ids=[2, 4, 5]),
        "num_aux_hidden_states is 4",
    ),
    "fused": (
        lambda f: edit_tensors(f, **{"midlayer.self_attn.qkv_proj.weight": torch.ones(256, 128)}),
        r"fused midlayer\.self_attn\.qkv_proj.*interleaved",
    ),
    "an embedding of its own": (
        lambda f: edit_tensors(f, **{"embed_tokens.weight": torch.ones(VOCAB_SIZE, 64)}),
        r"embed_tokens\.weight",
    ),
    "short RoPE range": (lambda f: edit_config(f, max_position_embeddings=63), r"up to 63.*max_position_embeddings"),
    "not an object": (lambda f: (f / "config.json").write_text("[]"), "not a JSON object"),
}


@pytest.mark.parametrize("fault", [*SPECULATORS, *SPECFORGE])
def test_a_wrong_or_ambiguous_layout_is_refused_by_the_name_of_the_field(
    fault: str, policy: PreTrainedModel, tmp_path: Path
) -> None:
    write = write_speculators if fault in SPECULATORS else write_specforge
    write(make_head(policy), policy, tmp_path)
    load(tmp_path, policy)
    damage, message = (SPECULATORS | SPECFORGE)[fault]
    damage(tmp_path)
    with pytest.raises(ModelError, match=message) as caught:
        Eagle3Head.load(tmp_path, policy.config, 64, key="draft.start", embedding=policy.get_input_embeddings().weight)
    assert str(caught.value).startswith("draft.start: ")


def test_an_aux_layer_is_read_as_the_input_or_the_output_that_the_file_says(
    policy: PreTrainedModel, tmp_path: Path
) -> None:
    write_specforge(make_head(policy), policy, tmp_path)
    read = {}
    for convention in ("input", "output"):
        layers = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "aux_layer_convention": convention}
        edit_config(tmp_path, eagle_config=layers)
        read[convention] = load(tmp_path, policy).aux_layers
    assert read == {"input": (1, 3, 4), "output": (2, 4, 5)}


def mask(draft_ids: torch.Tensor) -> torch.Tensor:
    drafted = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    drafted[draft_ids] = True
    return drafted


def read_table(d2t: torch.Tensor | None, t2d: torch.Tensor | None) -> torch.Tensor | None:
    return read_draft_ids(d2t, t2d, DRAFT_SIZE, VOCAB_SIZE, "head")


COUNTED = torch.arange(DRAFT_SIZE)
PERMUTED = DRAFT_IDS.flip(0)
SCATTERED = COUNTED * 3 + 2  # no two neighbouring ids: as offsets these would be rising ids, too


def test_a_table_of_offsets_and_one_of_token_ids_are_told_apart() -> None:
    for t2d in (None, mask(DRAFT_IDS), mask(DRAFT_IDS).to(torch.uint8)):
        read = read_table((DRAFT_IDS - COUNTED).to(torch.int32), t2d)
        assert read is not None and torch.equal(read, DRAFT_IDS)
    read = read_table(DRAFT_IDS, mask(DRAFT_IDS))
    assert read is not None and torch.equal(read, DRAFT_IDS)


TABLES = {
    "ids or offsets, no mask": (COUNTED * 2, None, "offsets and as token ids"),
    "ids, and the mask of something else": (DRAFT_IDS, mask(SCATTERED), "different tokens"),
    "permuted": (PERMUTED - COUNTED, mask(DRAFT_IDS), "another order"),
    "permuted, no mask": (PERMUTED - COUNTED, None, "permuted"),
    "permuted ids": (PERMUTED, mask(DRAFT_IDS), "another order"),
    "never filled": (torch.zeros_like(COUNTED), None, "before it is filled"),
    "never filled, and a mask": (torch.zeros_like(COUNTED), mask(DRAFT_IDS), "different tokens"),
    "mask of more tokens": (DRAFT_IDS - COUNTED, torch.ones(VOCAB_SIZE, dtype=torch.bool), "48 tokens in t2d"),
    "mask of the draft's size": (DRAFT_IDS - COUNTED, torch.ones(DRAFT_SIZE, dtype=torch.bool), r"t2d is .*\[14\]"),
    "map instead of a mask": (DRAFT_IDS - COUNTED, torch.arange(VOCAB_SIZE), "t2d is not a mask"),
    "outside": (torch.full_like(COUNTED, VOCAB_SIZE), None, "outside"),
    "floats": (torch.zeros(DRAFT_SIZE), mask(DRAFT_IDS), "whole numbers"),
    "mask alone": (None, mask(DRAFT_IDS), "no table d2t"),
}


@pytest.mark.parametrize("fault", TABLES)
def test_a_table_that_could_mean_another_vocabulary_is_refused(fault: str) -> None:
    d2t, t2d, message = TABLES[fault]
    with pytest.raises(ModelError, match=message) as caught:
        read_table(d2t, t2d)
    assert str(caught.value).startswith("head: ")


def test_the_tables_of_a_whole_vocabulary_may_say_nothing_but_that() -> None:
    identity, everything = torch.zeros(VOCAB_SIZE, dtype=torch.long), torch.ones(VOCAB_SIZE, dtype=torch.bool)
    assert read_draft_ids(identity, everything, VOCAB_SIZE, VOCAB_SIZE, "head") is None
    for d2t, t2d in ((identity + 1, everything), (identity, mask(DRAFT_IDS))):
        with pytest.raises(ModelError, match="whole vocabulary"):
            read_draft_ids(d2t, t2d, VOCAB_SIZE, VOCAB_SIZE, "head")


class Program:
    """A pickle of it makes a folder when it is read the careless way."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.proof),)


@pytest.mark.parametrize("content", ["program", "list", "cut"])
def test_a_pickle_with_anything_but_tensors_is_refused_and_never_run(
    content: str, policy: PreTrainedModel, tmp_path: Path
) -> None:
    folder, proof = tmp_path / "head", tmp_path / "it-ran"
    write_specforge(make_head(policy), policy, folder, pickled=True)
    load(folder, policy)
    path = folder / "pytorch_model.bin"
    if content == "cut":
        path.write_bytes(path.read_bytes()[:2000])
    else:
        tensors = torch.load(path, weights_only=True)
        torch.save([*tensors.values()] if content == "list" else {**tensors, "extra": Program(proof)}, path)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.*model\.safetensors"):
        load(folder, policy)
    assert not proof.exists()
    if content == "program":
        torch.load(path, weights_only=False)
        assert proof.exists(), "the pickle was harmless: the test shows nothing"
