"""The EAGLE-3 head: which layers it reads, what it computes at each depth, what it exports, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from paceline.drafts.eagle3 import Eagle3Drafter
from paceline.errors import ModelError
from paceline.models.eagle3 import (
    AuxCapture,
    ChainMemory,
    Eagle3Config,
    Eagle3Head,
    KeyValueCache,
    default_aux_layers,
    embed,
    policy_parts,
)

torch.set_num_threads(1)

VOCAB_SIZE = 64
DRAFT_SIZE = 20


def make_policy(kind: str = "qwen3", num_kv_heads: int = 2, num_layers: int = 8) -> PreTrainedModel:
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": num_kv_heads,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    with torch.random.fork_rng():
        torch.manual_seed(3)
        if kind == "llama":
            return LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False)).eval()
        return Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True)).eval()


def make_head(policy: PreTrainedModel, **changes: object) -> Eagle3Head:
    generator = torch.Generator().manual_seed(5)
    draft_ids = torch.randperm(VOCAB_SIZE, generator=generator)[:DRAFT_SIZE].sort().values
    config = Eagle3Config.for_policy(policy.config, draft_vocab_size=DRAFT_SIZE).model_copy(update=changes)
    head = Eagle3Head.initialize(config, policy, draft_ids, generator)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "norm" in name:  # a norm left out or swapped would not show with weights of one
                parameter.uniform_(0.5, 1.5, generator=generator)
    return head.eval()


def random_ids(*shape: int) -> torch.Tensor:
    return torch.randint(VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(11))


def aux_of(policy: PreTrainedModel, head: Eagle3Head, token_ids: torch.Tensor) -> torch.Tensor:
    with AuxCapture(policy, head.config.aux_layers) as capture, torch.no_grad():
        policy(input_ids=token_ids)
    return capture.hidden()


@pytest.mark.parametrize("num_layers", range(1, 9))
def test_default_aux_layers_are_three_different_layers_or_an_error_that_names_the_key(num_layers: int) -> None:
    if num_layers < 7:
        with pytest.raises(ModelError, match=r"draft\.aux_layers"):
            default_aux_layers(num_layers)
    else:
        assert default_aux_layers(num_layers) == (2, num_layers // 2, num_layers - 3)
        assert len(set(default_aux_layers(num_layers))) == 3


@pytest.mark.parametrize("layers", [(), (2, 2, 5), (4, 2, 5), (-1, 2, 5), (2, 4, 9)])
def test_aux_layers_that_vllm_would_silently_reorder_or_drop_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match=r"draft\.aux_layers"):
        AuxCapture(make_policy(), layers)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_capture_is_the_residual_stream_at_the_input_of_each_layer(kind: str) -> None:
    policy = make_policy(kind)
    token_ids = random_ids(2, 9)
    with AuxCapture(policy, (0, 3, 8)) as capture, torch.no_grad():
        states = policy(input_ids=token_ids, output_hidden_states=True).hidden_states
    first, middle, after_last = capture.hidden().chunk(3, dim=-1)
    torch.testing.assert_close(first, embed(policy, token_ids))
    torch.testing.assert_close(middle, states[3])
    torch.testing.assert_close(policy_parts(policy).norm(after_last), states[8])
    with pytest.raises(ModelError, match="did not run"):
        capture.hidden()


def test_capture_leaves_no_hook_behind_and_keeps_no_graph() -> None:
    policy = make_policy()
    with AuxCapture(policy, (2, 4, 5)) as capture:
        policy(input_ids=random_ids(1, 4))
    assert not capture.hidden().requires_grad
    policy(input_ids=random_ids(1, 4))
    with pytest.raises(ModelError):
        capture.hidden()


@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize(("kind", "num_kv_heads"), [("qwen3", 1), ("qwen3", 2), ("llama", 2), ("llama", 4)])
def test_every_chain_in_training_equals_step_by_step_decoding_with_a_cache(
    kind: str, num_kv_heads: int, norm_before_residual: bool
) -> None:
    policy = make_policy(kind, num_kv_heads)
    head = make_head(policy, norm_before_residual=norm_before_residual)
    depth, num_roots = 4, 8
    token_ids = random_ids(2, num_roots + depth + 1)
    aux = aux_of(policy, head, token_ids)

    memory = ChainMemory()
    hidden = head.project(aux[:, :num_roots])
    positions = torch.arange(num_roots)
    together = []
    for j in range(depth):
        hidden = head(hidden, embed(policy, token_ids[:, 1 + j : 1 + j + num_roots]), positions + j, memory)
        together.append(head.logits(hidden))

    for row in range(2):
        for root in range(num_roots):
            cache = KeyValueCache()
            step = head.project(aux[row : row + 1, : root + 1])
            tokens = token_ids[row : row + 1, 1 : root + 2]
            positions = torch.arange(root + 1)
            for j in range(depth):
                step = head(step, embed(policy, tokens), positions, cache)[:, -1:]
                torch.testing.assert_close(head.logits(step)[0, 0], together[j][row, root], rtol=1e-4, atol=1e-4)
                tokens = token_ids[row : row + 1, root + 2 + j : root + 3 + j]
                positions = positions[-1:] + 1


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_depth_zero_is_the_published_layer_written_out_by_hand(num_kv_heads: int) -> None:
    policy = make_policy(num_kv_heads=num_kv_heads)
    head = make_head(policy)
    token_ids = random_ids(1, 6)
    aux = aux_of(policy, head, token_ids)
    weights = {name: tensor.double() for name, tensor in head.named_parameters()}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + head.config.rms_norm_eps).sqrt() * weights[f"{name}.weight"]

    def rotate(x: torch.Tensor, position: int) -> torch.Tensor:
        half = x.shape[-1] // 2
        angles = position / head.config.rope_parameters["rope_theta"] ** (torch.arange(half).double() / half)
        low, high = x[..., :half], x[..., half:]
        return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], -1)

    hidden = aux[0, :5].double() @ weights["fc.weight"].T
    embeds = norm(embed(policy, token_ids[0, 1:]).double(), "midlayer.input_layernorm")
    inputs = torch.cat([embeds, norm(hidden, "midlayer.hidden_norm")], -1)
    queries = (inputs @ weights["midlayer.self_attn.q_proj.weight"].T).view(5, 4, 16)
    keys = (inputs @ weights["midlayer.self_attn.k_proj.weight"].T).view(5, num_kv_heads, 16)
    values = (inputs @ weights["midlayer.self_attn.v_proj.weight"].T).view(5, num_kv_heads, 16)
    attended = []
    for query_head in range(4):
        shared = query_head * num_kv_heads // 4  # neighbouring query heads share a key head
        rotated_keys = torch.stack([rotate(keys[t, shared], t) for t in range(5)])
        scores = rotated_keys @ rotate(queries[4, query_head], 4) / 16**0.5
        attended.append(scores.softmax(-1) @ values[:, shared])
    residual = hidden[4] + torch.cat(attended) @ weights["midlayer.self_attn.o_proj.weight"].T
    normed = norm(residual, "midlayer.post_attention_layernorm")
    gate = functional.silu(normed @ weights["midlayer.mlp.gate_proj.weight"].T)
    up = normed @ weights["midlayer.mlp.up_proj.weight"].T
    output = residual + (gate * up) @ weights["midlayer.mlp.down_proj.weight"].T
    logits = norm(output, "norm") @ weights["lm_head.weight"].T

    _, ours = head.draft(policy, aux[0, :5], token_ids[0], 1)
    torch.testing.assert_close(ours[0].double(), logits, rtol=1e-4, atol=1e-4)


def test_initialisation_depends_on_the_generator_alone_and_leaves_the_global_stream() -> None:
    policy = make_policy()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = make_head(policy).export_state()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = make_head(policy).export_state()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_export_then_load_gives_the_same_drafts(tmp_path: Path) -> None:
    policy = make_policy(num_kv_heads=1)
    head = make_head(policy, trained_depth=4)
    head.export(tmp_path)
    loaded = Eagle3Head.load(tmp_path, policy.config, 100)
    assert loaded.config == head.config
    token_ids = random_ids(7)
    aux = aux_of(policy, head, token_ids[None])[0, :6]
    ours, theirs = (h.draft(policy, aux, token_ids, 3) for h in (head, loaded))
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


def test_exported_tables_name_the_same_distinct_tokens_and_drafts_never_leave_them(tmp_path: Path) -> None:
    policy = make_policy()
    head = make_head(policy)
    head.export(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    draft_ids = stored["d2t"] + torch.arange(DRAFT_SIZE)
    assert torch.equal(draft_ids, stored["t2d"].nonzero().flatten())
    assert torch.equal(draft_ids, head.draft_ids)
    token_ids = random_ids(12)
    aux = aux_of(policy, head, token_ids[None])[0, :11]
    drafted, logits = head.draft(policy, aux, token_ids, 5)
    assert drafted.tolist() == [int(draft_ids[row.argmax()]) for row in logits]


def test_export_state_is_a_copy_that_later_training_does_not_change() -> None:
    head = make_head(make_policy())
    state = head.export_state()
    before = state["fc.weight"].clone()
    with torch.no_grad():
        head.fc.weight.add_(1.0)
    assert torch.equal(state["fc.weight"], before)
    assert "d2t" in state
    assert not any("embed" in name for name in state)


def test_a_full_vocabulary_is_exported_without_a_table(tmp_path: Path) -> None:
    policy = make_policy()
    head = Eagle3Head.initialize(Eagle3Config.for_policy(policy.config), policy, None, torch.Generator())
    head.export(tmp_path)
    assert not {"d2t", "t2d"} & set(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(Eagle3Head.load(tmp_path, policy.config, 64).draft_ids, torch.arange(VOCAB_SIZE))


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


BROKEN = {
    "missing tensor": (lambda f: edit_tensors(f, **{"fc.weight": None}), r"lacks the tensor fc\.weight"),
    "extra tensor": (lambda f: edit_tensors(f, **{"midlayer.bias": torch.zeros(2)}), r"extra .*midlayer\.bias"),
    "embedding": (lambda f: edit_tensors(f, **{"embed_tokens.weight": torch.zeros(2)}), r"embed_tokens\.weight"),
    "shape": (lambda f: edit_tensors(f, **{"norm.weight": torch.ones(47)}), r"norm\.weight .*\[47\].*\[48\]"),
    "not finite": (lambda f: edit_tensors(f, **{"norm.weight": torch.full((48,), torch.nan)}), r"norm\.weight.*finite"),
    "no table": (lambda f: edit_tensors(f, d2t=None, t2d=None), "no table d2t"),
    "zero table": (lambda f: edit_tensors(f, d2t=torch.zeros(DRAFT_SIZE).long()), "t2d and d2t"),
    "table that repeats": (lambda f: edit_tensors(f, d2t=-torch.arange(DRAFT_SIZE), t2d=None), "repeating"),
    "table out of range": (lambda f: edit_tensors(f, d2t=torch.full((DRAFT_SIZE,), 60), t2d=None), "outside"),
    "table of floats": (lambda f: edit_tensors(f, d2t=torch.zeros(DRAFT_SIZE)), "whole numbers"),
    "hidden size": (lambda f: edit_config(f, hidden_size=96), "hidden_size 96, the policy has 48"),
    "vocabulary": (lambda f: edit_config(f, vocab_size=65), "vocab_size 65, the policy has 64"),
    "rope range": (lambda f: edit_config(f, max_position_embeddings=40), "up to 40"),
    "two layers": (lambda f: edit_config(f, num_hidden_layers=2), "num_hidden_layers"),
    "norm_output": (lambda f: edit_config(f, norm_output=True), "norm_output"),
    "heads": (lambda f: edit_config(f, num_key_value_heads=3), "multiple of 3"),
    "aux layers": (
        lambda f: edit_config(
            f, eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 12], "aux_layer_convention": "input"}
        ),
        r"aux layers.*0\.\.8",
    ),
    "not json": (lambda f: (f / "config.json").write_text("{"), "not JSON"),
    "no config": (lambda f: (f / "config.json").unlink(), r"no config\.json"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"no model\.safetensors"),
    "cut weights": (lambda f: (f / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{"), "cannot be read"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_folder_that_does_not_fit_is_refused_by_name(fault: str, tmp_path: Path) -> None:
    policy = make_policy()
    make_head(policy).export(tmp_path)
    Eagle3Head.load(tmp_path, policy.config, 64)
    damage, message = BROKEN[fault]
    damage(tmp_path)
    with pytest.raises(ModelError, match=message) as caught:
        Eagle3Head.load(tmp_path, policy.config, 64)
    assert "draft.path" in str(caught.value)


def test_a_reduced_vocabulary_without_a_table_is_refused() -> None:
    config = Eagle3Config.for_policy(make_policy().config, draft_vocab_size=DRAFT_SIZE)
    with pytest.raises(ModelError, match=r"draft\.vocab_size"):
        Eagle3Head(config)


def test_what_the_drafter_proposes_for_a_row_does_not_depend_on_its_neighbours() -> None:
    policy = make_policy()
    head = make_head(policy)
    drafter = Eagle3Drafter(head, policy)
    rows = [random_ids(9).tolist(), random_ids(5).tolist(), random_ids(2).tolist()]
    hidden = [aux_of(policy, head, torch.tensor([row]))[0, :-1] for row in rows]
    generators = [torch.Generator() for _ in rows]
    together = drafter.propose(rows, [3, 2, 0], hidden, generators)
    assert together.probs is None
    assert [len(ids) for ids in together.token_ids] == [3, 2, 0]
    for index, (row, k) in enumerate(zip(rows, [3, 2, 0], strict=True)):
        alone = drafter.propose([row], [k], [hidden[index]], generators[:1])
        assert alone.token_ids == [together.token_ids[index]]
