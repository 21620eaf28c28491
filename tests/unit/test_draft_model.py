"""A draft model: the law stays the policy's, nothing changes its weights, and what does not fit is refused by name."""

from __future__ import annotations

import copy
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from paceline.cli.doctor import Check, checks
from paceline.config.load import load_arms, load_recipe
from paceline.config.run import DraftModelDraft, FolderPolicy, Recipe, TinyPolicy
from paceline.drafts.draft_model import DraftModelDrafter, load_draft_model
from paceline.engine.reference import ReferenceEngine
from paceline.errors import ConfigError, ModelError, PublishError
from paceline.loop.draft_start import smaller_tiny
from paceline.models.folder import load_policy, load_tokenizer
from paceline.models.tiny import make_tokenizer
from paceline.models.weights import policy_tensors
from paceline.testing.faults import P_LIMIT, chi_square_p
from paceline.testing.models import against, exact_law, random_mtp_policy, random_policy
from paceline.testing.runs import tiny_policy
from paceline.types import Prompt, Request, Sampling, Versions

torch.set_num_threads(1)

VOCAB, K = 6, 3
PROMPT = (3, 4, 5, 3)
RANDOM = Sampling(max_tokens=3, stop_token_ids=(1,))
FILTERED = Sampling(temperature=0.7, top_k=4, top_p=0.9, max_tokens=3, stop_token_ids=(1,))
GREEDY = Sampling(temperature=0.0, max_tokens=20, stop_token_ids=(1,))


@pytest.fixture(scope="module")
def policy():
    return tiny_policy(vocab_size=VOCAB)


def draft_model(kind: str, policy):
    match kind:
        case "the policy itself":
            return copy.deepcopy(policy)
        case "another model":
            return tiny_policy(vocab_size=VOCAB, seed=1)
        case _:
            return against(policy)


KINDS = ("the policy itself", "another model", "one against the policy")


def requests(count: int, sampling: Sampling = RANDOM) -> list[Request]:
    return [Request(Prompt("p", PROMPT), index, seed=7000 + index) for index in range(count)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [RANDOM, FILTERED], ids=["T=1", "T=0.7 filtered"])
def test_responses_follow_the_exact_law_of_the_policy_whatever_the_draft_model(policy, kind, sampling):
    engine = ReferenceEngine(policy, DraftModelDrafter(draft_model(kind, policy)), num_draft_tokens=K, max_num_seqs=500)
    rollouts = engine.generate(requests(1500), sampling)
    counts = Counter(completion.token_ids for completion in rollouts.completions)
    assert chi_square_p(counts, exact_law(policy, PROMPT, sampling)) > P_LIMIT
    assert rollouts.stats.drafted > 1500 and rollouts.stats.recovered > 100


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_without_speculation_and_only_the_policy_itself_is_always_accepted(policy, kind):
    asked = [Request(Prompt("p", (2, first, second)), 0, 0) for first in range(2, 6) for second in range(2, 6)]
    engine = ReferenceEngine(policy, DraftModelDrafter(draft_model(kind, policy)), num_draft_tokens=K)
    plain, speculative = ReferenceEngine(policy).generate(asked, GREEDY), engine.generate(asked, GREEDY)
    assert [c.token_ids for c in speculative.completions] == [c.token_ids for c in plain.completions]
    stats = speculative.stats
    match kind:
        case "the policy itself":
            assert stats.accepted == stats.drafted > 0
        case "another model":
            assert 0 < stats.accepted < stats.drafted
        case _:
            assert stats.accepted == 0 < stats.drafted


def test_drafts_are_the_models_most_likely_tokens_and_rows_of_other_lengths_do_not_change_them(policy):
    drafter = DraftModelDrafter(tiny_policy(seed=1))
    texts, lengths = [[2, 3, 4, 5, 2], [7], [9, 9, 3]], [3, 1, 0]
    together = drafter.propose(texts, lengths, None, [])
    assert together.probs is None
    for text, k, drafted in zip(texts, lengths, together.token_ids, strict=True):
        expected: list[int] = []
        for _ in range(k):
            expected.append(int(drafter.model(torch.tensor([text + expected])).logits[0, -1].argmax()))
        assert drafted == expected


def test_a_publish_of_the_policy_leaves_the_draft_model_and_its_version_as_they_were(policy):
    model = tiny_policy(vocab_size=VOCAB, seed=1)
    before = {name: tensor.clone() for name, tensor in policy_tensors(model).items()}
    engine = ReferenceEngine(
        copy.deepcopy(policy), DraftModelDrafter(model), num_draft_tokens=K, versions=Versions(policy=0, draft=0)
    )
    engine.publish({name: tensor + 0.1 for name, tensor in policy_tensors(policy).items()}, Versions(policy=1, draft=0))
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy_tensors(model).items())
    assert engine.generate(requests(2), RANDOM).completions[0].versions == Versions(policy=1, draft=0)
    with pytest.raises(PublishError, match="frozen"):
        engine.publish_draft(before, Versions(policy=1, draft=1))


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"online": "always"}, "online is 'always', and a draft model is frozen"),
        ({"online": "below_peak"}, "online is 'below_peak', and a draft model is frozen"),
        ({"depth": 3}, "depth without effect: a draft model is frozen"),
        ({"vocab_size": 100}, "vocab_size without effect"),
        ({"data": "generic", "epochs": 2}, "data, epochs without effect"),
        ({"online_lr": 1e-3}, "online_lr without effect"),
        ({"path": "somewhere", "num_layers": 3}, "num_layers without effect: the model in path has its own shape"),
        ({"hidden_size": 40}, "multiple of 32"),
        ({"nonsense": 1}, "Extra inputs are not permitted"),
    ],
)
def test_a_setting_that_a_frozen_draft_model_cannot_have_is_refused_with_the_reason(keys, message):
    with pytest.raises(ValidationError, match=message):
        DraftModelDraft.model_validate(keys)


def test_off_is_the_one_value_of_online_and_a_written_config_loads_again():
    draft = DraftModelDraft.model_validate({"online": "off", "num_layers": 1})
    assert DraftModelDraft.model_validate(draft.model_dump(mode="json", exclude_none=True)) == draft
    with pytest.raises(ValidationError, match=r"set draft\.path"):
        Recipe(policy=FolderPolicy(path=Path("x")), draft=DraftModelDraft())


def test_an_arm_of_draft_models_leaves_out_what_only_a_trained_draft_has(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[draft]\nmethod = "eagle3"\nnum_draft_tokens = 2\nonline = "below_peak"\nepochs = 3\n')
    arms = load_arms(recipe, ["--draft.depth", "2"], ["eagle3", "draft_model"])
    assert arms["draft_model"].draft == DraftModelDraft(num_draft_tokens=2)
    assert load_recipe(recipe, ["--draft.method", "draft_model"]).draft == DraftModelDraft(num_draft_tokens=2)
    with pytest.raises(ConfigError, match=r"command line: draft|draft -> online is 'always'"):
        load_recipe(recipe, ["--draft.method", "draft_model", "--draft.online", "always"])


def test_the_smaller_tiny_is_taught_as_the_policy_is():
    small = smaller_tiny(TinyPolicy(train_steps=30, chain_share=0.2, seed=4), DraftModelDraft(hidden_size=32))
    assert small == TinyPolicy(num_layers=2, hidden_size=32, train_steps=30, chain_share=0.2, seed=4)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    tokenizer = make_tokenizer()
    random_policy(folder, num_layers=2, hidden_size=32, vocab_size=len(tokenizer), max_positions=64)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "draft"))


def refused(folder: Path, num_positions: int = 64, policy_vocab_size: int = 24) -> str:
    config = copy.deepcopy(tiny_policy(vocab_size=policy_vocab_size).config)
    with pytest.raises(ModelError) as caught:
        load_draft_model(folder, config, make_tokenizer(), num_positions)
    assert "draft.path" in str(caught.value) and "policy.path" not in str(caught.value)
    return str(caught.value)


def set_config(folder: Path, **keys: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))


def test_a_draft_model_that_fits_loads_with_its_own_weights(folder: Path):
    config = tiny_policy(vocab_size=24).config
    loaded = load_draft_model(folder, config, make_tokenizer(), 64)
    expected = policy_tensors(load_policy(folder))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in policy_tensors(loaded).items())


def test_another_vocabulary_of_the_same_size_is_refused_at_the_first_token_that_differs(folder: Path):
    written = json.loads((folder / "tokenizer.json").read_text())
    vocab = written["model"]["vocab"]
    vocab["7"], vocab["8"] = vocab["8"], vocab["7"]
    (folder / "tokenizer.json").write_text(json.dumps(written))
    token_id = make_tokenizer().get_vocab()["7"]
    said = refused(folder)
    assert f"token {token_id} is '7' in the policy's" in said and "'8' in the draft's" in said


def test_a_vocabulary_with_one_token_more_is_refused_and_named(folder: Path):
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(folder)
    size = len(make_tokenizer())
    assert f"token {size} is no token in the policy's ({size} tokens) and '<more>' in the draft's" in refused(folder)


def test_logits_of_another_number_of_tokens_are_refused(folder: Path):
    said = refused(folder, policy_vocab_size=32)
    assert "logits of 24 tokens, and the policy of 32" in said and "resize_token_embeddings" in said


def test_too_few_positions_are_refused_and_just_enough_are_not(folder: Path):
    load_draft_model(folder, tiny_policy(vocab_size=24).config, make_tokenizer(), 64)
    assert "has 64 positions, and prompt and response may have 65" in refused(folder, num_positions=65)


def test_attention_within_a_window_is_refused(folder: Path):
    set_config(folder, sliding_window=32, use_sliding_window=True, max_window_layers=0)
    assert "sliding window of 32" in refused(folder)


def test_a_model_with_an_mtp_layer_is_refused(tmp_path: Path):
    random_mtp_policy(tmp_path / "draft", vocab_size=24)
    make_tokenizer().save_pretrained(tmp_path / "draft")
    assert "MTP layer" in refused(tmp_path / "draft")


def drop_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: shutil.rmtree(f), "does not exist"),
        (lambda f: (f / "model.safetensors").unlink(), "no *.safetensors"),
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer"),
        (lambda f: set_config(f, hidden_size=64), "belong together"),
        (drop_a_tensor, "lacks the tensor model.layers.1.mlp.down_proj.weight"),
    ],
)
def test_a_broken_folder_is_refused_under_the_drafts_key(folder: Path, damage, message):
    damage(folder)
    assert message in refused(folder)


def test_the_doctor_says_what_a_run_would_refuse(folder: Path, tmp_path: Path):
    def says(max_tokens: int) -> Check:
        recipe = Recipe.model_validate(
            {
                "run": {"root": str(tmp_path / "runs")},
                "policy": {"kind": "tiny", "num_layers": 4, "hidden_size": 32},
                "data": {"num_train": 8, "num_eval": 4},
                "engine": {"kind": "reference"},
                "sampling": {"max_tokens": max_tokens},
                "draft": {"method": "draft_model", "path": str(folder)},
            }
        )
        return next(check for check in checks(recipe) if check.name == "draft")

    assert (says(16).state, says(100).state) == ("ok", "fail")
    assert "draft.path" in says(100).says and "has 64 positions" in says(100).says
