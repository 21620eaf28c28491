"""How a draft begins: what decides its weights, what it keeps of a checkpoint, and what the run is told about it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from paceline.cli.draft import tables
from paceline.cli.main import main
from paceline.config.run import Recipe, TinyPolicy
from paceline.data.prompts import load_prompts, prompt_style
from paceline.errors import ConfigError, ModelError
from paceline.loop import draft_eval
from paceline.loop.draft_eval import Rates, _share, evaluate_draft
from paceline.loop.draft_start import prepare_draft, read_report
from paceline.loop.parts import build_parts, make_sampling
from paceline.models.eagle3 import Eagle3Head
from paceline.models.folder import PolicyFolder, load_policy, load_tokenizer, resolve_policy
from paceline.observe.progress import Silent
from paceline.spec.stats import t_quantile
from paceline.testing.heads import write_specforge, write_speculators
from paceline.train.draft import predicted_acceptance

torch.set_num_threads(1)

EAGLE3: dict[str, Any] = {"method": "eagle3", "aux_layers": [1, 2, 3], "num_answers": 30, "epochs": 2, "depth": 2}
POLICY = TinyPolicy(num_layers=4, hidden_size=32, train_steps=40)


@dataclass
class Place:
    """One cache and one policy for all tests of this module."""

    cache: Path
    policy: PolicyFolder

    def prepare(self, root: Path, **draft: Any) -> Path:
        recipe = make(root, **draft)
        tokenizer = load_tokenizer(self.policy.path)
        prompts = load_prompts(recipe.data, tokenizer, prompt_style(recipe.policy, tokenizer))
        sampling = make_sampling(recipe.sampling, load_policy(self.policy.path), tokenizer)
        folder = prepare_draft(recipe, self.policy, prompts.train, sampling, self.cache, Silent())
        assert folder is not None
        return folder


def make(root: Path, **draft: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"root": str(root)},
            "policy": POLICY.model_dump(),
            "data": {"num_train": 12, "num_eval": 40, "max_terms": 4},
            "engine": {"kind": "reference"},
            "sampling": {"max_tokens": 24},
            "draft": EAGLE3 | draft,
        }
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache")
        patch.setenv("PACELINE_CACHE", str(cache))
        yield Place(cache, resolve_policy(POLICY))


@pytest.fixture(scope="module")
def trained(place: Place) -> Path:
    """A head of 14 tokens, trained on the policy's answers."""
    return place.prepare(place.cache, vocab_size=14)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def generic_file(folder: Path, *pairs: tuple[str, str]) -> Path:
    lines = [
        json.dumps({"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]})
        for ask, answer in pairs
    ]
    path = folder / "generic.jsonl"
    path.write_text("\n".join(lines))
    return path


PAIRS = [(f"{n}=", f"{n - 1}+1;{n - 2}+2") for n in range(3, 23)]


def test_the_weights_are_found_again_by_all_that_decides_them_and_by_nothing_else(place: Place, tmp_path: Path) -> None:
    in_domain = place.prepare(tmp_path)
    built_in = place.prepare(tmp_path, data="generic")
    texts = generic_file(tmp_path, *PAIRS)
    from_file = place.prepare(tmp_path, data="generic", generic_path=str(texts))
    assert len({in_domain, built_in, from_file}) == 3

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(texts, elsewhere / "other.jsonl")
    copied = elsewhere / "other.jsonl"
    assert place.prepare(tmp_path, data="generic", generic_path=str(copied), num_draft_tokens=5) == from_file
    assert place.prepare(tmp_path, online="off") == in_domain
    generic_file(tmp_path, *PAIRS[:-1], ("9=", "8+1"))
    assert place.prepare(tmp_path, data="generic", generic_path=str(texts)) != from_file


def test_the_content_of_a_start_counts_and_its_place_does_not(place: Place, trained: Path, tmp_path: Path) -> None:
    scratch = place.prepare(tmp_path, epochs=1)
    one, same, other = (tmp_path / name for name in ("one", "same", "other"))
    for folder in (one, same, other):
        shutil.copytree(trained, folder)
    head = Eagle3Head.load(other, load_policy(place.policy.path).config, 64)
    with torch.no_grad():
        head.fc.weight[0, 0] += 1e-3
    head.export(other)
    folders = [place.prepare(tmp_path, epochs=1, start=str(start)) for start in (one, same, other)]
    assert folders[0] == folders[1]
    assert len({scratch, *folders}) == 3


def test_training_from_a_checkpoint_begins_where_it_ended_and_keeps_its_vocabulary(
    place: Place, trained: Path, tmp_path: Path
) -> None:
    # Almost no step: what comes out is what went in.
    again = weights(place.prepare(tmp_path, start=str(trained), epochs=1, lr=1e-9, seed=5))
    before = weights(trained)
    assert again.keys() == before.keys()
    assert "d2t" in before
    for name, tensor in before.items():
        torch.testing.assert_close(again[name], tensor, rtol=0, atol=1e-6)
    further = weights(place.prepare(tmp_path, start=str(trained), data="generic", epochs=1))
    assert torch.equal(further["d2t"], before["d2t"])
    assert not torch.equal(further["fc.weight"], before["fc.weight"])


def test_a_start_that_does_not_fit_is_refused_by_the_name_of_the_field(
    place: Place, trained: Path, tmp_path: Path
) -> None:
    for changes, message in (
        ({"aux_layers": [0, 2, 3]}, r"draft\.aux_layers is \[0, 2, 3\].*draft\.start reads \[1, 2, 3\]"),
        ({"vocab_size": 15}, r"draft\.vocab_size is 15.*drafts 14 tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            place.prepare(tmp_path, start=str(trained), **changes)
    wrong = tmp_path / "wrong"
    shutil.copytree(trained, wrong)
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    with pytest.raises(ModelError, match=r"draft\.start: .*hidden_size 64, the policy has 32"):
        place.prepare(tmp_path, start=str(wrong))


@pytest.mark.parametrize("write", [write_specforge, write_speculators])
def test_a_head_of_another_layout_is_rewritten_for_the_engine_and_starts_training_too(
    write, place: Place, trained: Path, tmp_path: Path
) -> None:
    policy = load_policy(place.policy.path)
    write(Eagle3Head.load(trained, policy.config, 64), policy, tmp_path / "theirs")
    served = place.prepare(tmp_path, path=str(tmp_path / "theirs"))
    assert served.parent == place.cache
    assert place.prepare(tmp_path, path=str(trained)) == trained
    for name, tensor in weights(trained).items():
        assert torch.equal(weights(served)[name], tensor)
    started = place.prepare(tmp_path, start=str(tmp_path / "theirs"), epochs=1, lr=1e-9)
    assert torch.equal(weights(started)["d2t"], weights(trained)["d2t"])


def test_the_head_says_what_it_learned_from_and_what_came_of_it(place: Place, trained: Path, tmp_path: Path) -> None:
    report = read_report(trained)
    assert report is not None
    assert (report.data, report.start, report.num_held_out) == ("in_domain", "random", 3)
    # Answers of a single token teach nothing and are left out.
    assert 20 <= report.num_answers <= 27
    assert report.vocab_size == 14
    assert report.predicted_limit is not None
    assert 1 <= report.predicted_alpha < report.predicted_limit <= 4
    said = f"{report.predicted_limit:.2f} if every draft were the policy's own most likely token"
    assert said in report.sentences()[-1]
    # Heads that were trained before this figure was kept are still found in caches.
    older = json.loads((trained / "training.json").read_text())
    del older["predicted_limit"]
    (tmp_path / "training.json").write_text(json.dumps(older))
    kept = read_report(tmp_path)
    assert kept is not None and kept.predicted_limit is None
    assert kept.sentences()[-1].endswith("on 3 held-out answers")
    generic = read_report(place.prepare(tmp_path, data="generic", start=str(trained), epochs=1))
    assert generic is not None
    # The texts are not the policy's: answers of its own judge the head.
    assert (generic.data, generic.start, generic.num_answers, generic.num_held_out) == ("generic", "checkpoint", 30, 3)
    assert 1 <= generic.predicted_alpha <= 4
    assert 0 < generic.policy_coverage <= 1


def test_a_generic_draft_learns_its_texts_and_not_the_policys_answers(place: Place, tmp_path: Path) -> None:
    texts = generic_file(tmp_path, *[("9=", "1+2;3+4;5+6;7+8")] * 20)
    draft = {"vocab_size": 12, "epochs": 2, "data": "generic", "generic_path": str(texts)}
    folder = place.prepare(tmp_path, **draft)
    report = read_report(folder)
    assert report is not None
    # Digits 1-8, +, ; and the end are 11 tokens; the policy also writes "Answer:", "=", "-" and other digits.
    assert report.coverage == 1.0
    assert report.policy_coverage < 0.9
    assert report.num_answers == 20


def test_the_command_prints_coverage_and_figures_also_when_the_head_is_there_already(
    place: Place, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[policy]\nkind = "tiny"\nnum_layers = 4\nhidden_size = 32\ntrain_steps = 40\n'
        '[data]\nnum_train = 12\nnum_eval = 40\nmax_terms = 4\n[engine]\nkind = "reference"\n'
        "[sampling]\nmax_tokens = 24\n"
        '[draft]\nmethod = "eagle3"\naux_layers = [1, 2, 3]\nnum_answers = 30\nepochs = 2\ndepth = 2\nvocab_size = 14\n'
    )
    report = read_report(trained)
    assert report is not None
    for _ in range(2):
        assert main(["draft", "train", str(recipe)]) == 0
        out = capsys.readouterr().out
        assert f"{report.num_answers} answers of the policy, from random weights" in out
        assert "Draft vocabulary: 14 tokens" in out
        assert "if every draft were the policy's own most likely token" in out
        assert "draft.path takes it" in out
    assert main(["draft", "eval", str(recipe), "--answers", "40", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["answers"] == 40
    assert figures["measured"]["verify_steps"] > 0
    assert figures["ratio"] == pytest.approx(figures["predicted"]["alpha"] / figures["measured"]["alpha"])
    assert figures["predicted"]["alpha"] < figures["limit"]
    console = Console(width=200)
    with console.capture() as printed:
        console.print(tables(figures))
    (row,) = [line for line in printed.get().splitlines() if "its limit" in line]
    assert f"{figures['limit']:.3f}" in row
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": [{"role": "user", "content": "1=?"}]}')
    words = ["--draft.data", "generic", "--draft.generic_path", str(bad)]
    assert main(["draft", "train", str(recipe), *words]) == 2
    assert "bad.jsonl line 1" in " ".join(capsys.readouterr().err.split())


def agreement_limit(groups: int) -> float:
    """|z| that a right prediction exceeds once in a million."""
    return t_quantile(1 - 5e-7, groups - 1)


def test_prediction_and_count_agree_on_the_same_rollouts_and_a_damaged_draft_in_the_engine_shows(
    place: Place, tmp_path: Path
) -> None:
    recipe = make(tmp_path, epochs=8, num_answers=60)
    parts = build_parts(recipe, Silent())
    try:
        right = evaluate_draft(recipe, parts, 60)
        # The engine's copy loses its last layer's output; the trainer's is whole.
        parts.engine.drafter.head.norm.weight.data.mul_(-1.0)
        damaged = evaluate_draft(recipe, parts, 60)
    finally:
        parts.close()
    assert right.answers == 60
    assert right.measured.verify_steps > 300
    assert right.ratio is not None and right.ratio_se is not None and damaged.ratio is not None
    assert right.agrees
    assert abs(right.ratio - 1) < agreement_limit(20) * right.ratio_se
    assert right.measured.alpha is not None and right.measured.alpha > 1.2, (
        "nothing is accepted: the test shows nothing"
    )
    assert damaged.agrees is False
    assert damaged.ratio > 1.15
    assert damaged.ratio_se is not None
    assert abs(damaged.ratio - 1) > agreement_limit(20) * damaged.ratio_se
    identities(right.measured)
    identities(right.predicted)


def test_the_limit_over_all_groups_of_prompts_is_that_of_all_answers_at_once(
    place: Place, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = []

    def recorded(policy, head, answers, *rest):
        acceptance = predicted_acceptance(policy, head, answers, *rest)
        groups.append((answers, acceptance))
        return acceptance

    monkeypatch.setattr(draft_eval, "predicted_acceptance", recorded)
    recipe = make(tmp_path, vocab_size=14)
    parts = build_parts(recipe, Silent())
    try:
        figures = evaluate_draft(recipe, parts, 50)
    finally:
        parts.close()
    assert parts.draft is not None
    answers = [answer for group, _ in groups for answer in group]
    assert (len(groups), len(answers)) == (20, 50)
    at_once = predicted_acceptance(parts.trainer.model, parts.draft.head, answers, 3, parts.sampling)
    assert figures.limit == pytest.approx(at_once.limit, rel=1e-5)
    # Groups differ in their number of blocks.
    limits = [acceptance.limit for _, acceptance in groups if acceptance.num_blocks]
    assert abs(sum(limits) / len(limits) - at_once.limit) > 1e-3


def identities(rates: Rates) -> None:
    marginal = [share for share in rates.marginal if share is not None]
    assert rates.alpha == pytest.approx(1 + sum(marginal))
    assert rates.conditional[0] == pytest.approx(rates.marginal[0])
    assert all(error is not None and error > 0 for error in (rates.alpha_se, *rates.marginal_se, *rates.conditional_se))


def test_the_standard_error_of_a_share_is_its_spread_over_repetitions() -> None:
    generator = torch.Generator().manual_seed(4)
    shares, errors = [], []
    for _ in range(1500):
        # Groups that differ: their own rate, and a size that is not fixed.
        trials = torch.randint(20, 60, (20,), generator=generator)
        rates = 0.3 + 0.4 * torch.rand(20, generator=generator)
        counts = torch.binomial(trials.float(), rates, generator=generator)
        share, error = _share(counts.tolist(), trials.tolist())
        shares.append(share)
        errors.append(error)
    spread = float(torch.tensor(shares).std())
    assert float(torch.tensor(errors).pow(2).mean().sqrt()) == pytest.approx(spread, rel=0.15)
    assert _share([3.0], [4.0]) == (0.75, None)
    assert _share([0.0], [0.0]) == (None, None)
