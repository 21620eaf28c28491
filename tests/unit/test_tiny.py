"""Laws of the tiny policy: its answers, its tokenizer, and that the same recipe gives the same folder."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch

from paceline.config.run import Data, TinyPolicy
from paceline.data.prompts import load_prompts
from paceline.errors import ConfigError, ModelError
from paceline.models import tiny
from paceline.models.cache import build_once, file_checksums
from paceline.models.folder import load_policy, load_tokenizer
from paceline.rewards import chain_sum

SMALL = TinyPolicy(num_layers=4, hidden_size=32, train_steps=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("tiny")
    tiny.train_tiny(SMALL, path)
    return path


def test_a_chain_works_the_prompt_out_step_by_step_and_is_right() -> None:
    rng = random.Random(0)
    score = chain_sum.make_score()
    for _ in range(300):
        problem = tiny.make_problem(rng, chain_share=1.0)
        steps = problem.response.split(";")
        total, terms = int(problem.prompt[0]), re.findall(r"[+-]\d", problem.prompt)
        for step, term in zip(steps[:-1], terms, strict=True):
            assert step == f"{total}{term}={total + int(term)}"
            total += int(term)
        assert steps[-1] == f"Answer:{total}" and total == problem.answer
        assert score(problem.response, str(problem.answer)) == 1.0


def test_a_direct_guess_has_no_steps_and_is_mostly_wrong() -> None:
    rng = random.Random(0)
    guesses = [tiny.make_problem(rng, chain_share=0.0) for _ in range(500)]
    assert all(re.fullmatch(r"Answer:-?\d+", guess.response) for guess in guesses)
    assert sum(guess.response == f"Answer:{guess.answer}" for guess in guesses) < 50


def test_chains_have_the_share_that_the_recipe_asks_for() -> None:
    rng = random.Random(0)
    chains = sum(";" in tiny.make_problem(rng, chain_share=0.3).response for _ in range(2000))
    assert abs(chains / 2000 - 0.3) < 0.05


def test_the_tokenizer_survives_its_folder_and_gives_every_text_back(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    rng = random.Random(1)
    for _ in range(50):
        problem = tiny.make_problem(rng, chain_share=0.5)
        ids = tokenizer.encode(problem.prompt + problem.response, add_special_tokens=True)
        assert ids == [tiny.SYMBOLS.index(symbol) for symbol in problem.prompt + problem.response]
        assert tokenizer.decode(ids) == problem.prompt + problem.response
    assert tokenizer.eos_token_id == tiny.SYMBOLS.index(tiny.EOS)


def test_every_prompt_of_the_default_task_is_in_the_vocabulary_and_leaves_room(folder: Path) -> None:
    sets = load_prompts(Data(num_train=200, num_eval=50), load_tokenizer(folder), "compact")
    longest = max(len(prompt.token_ids) for prompt in sets.train + sets.held_out)
    chains = (tiny.make_problem(random.Random(seed), chain_share=1.0).response for seed in range(2000))
    assert longest + max(map(len, chains)) + 1 <= tiny.MAX_POSITIONS


def test_the_folder_holds_no_sampling_defaults_that_could_leak_into_rollouts(folder: Path) -> None:
    generation = load_policy(folder).generation_config
    assert generation is not None
    changed = set(generation.to_diff_dict()) - {"transformers_version"}
    assert changed == {"eos_token_id", "pad_token_id"}


def test_problems_of_one_packed_row_do_not_see_each_other() -> None:
    torch.manual_seed(0)
    model = tiny.make_model(SMALL).eval()
    tokens, _, positions = next(tiny._batches(SMALL))
    row = 0
    start = positions[row].eq(0).nonzero().flatten().tolist()[1]
    end = positions[row].eq(0).nonzero().flatten().tolist()[2]
    with torch.no_grad():
        packed = model(input_ids=tokens, position_ids=positions, use_cache=False).logits[row, start:end]
        alone = model(input_ids=tokens[row : row + 1, start:end], use_cache=False).logits[0]
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


def test_only_responses_and_their_ends_are_trained_on() -> None:
    tokens, labels, _ = next(tiny._batches(SMALL))
    kept = labels != -100
    assert torch.equal(tokens[kept], labels[kept])
    equals, end = tiny.SYMBOLS.index("="), tiny.SYMBOLS.index(tiny.EOS)
    for row in range(tiny.ROWS):
        # A prompt ends at the first `=` of its problem; what follows, up to the end token, is the response.
        inside = False
        for token, is_kept in zip(tokens[row].tolist(), kept[row].tolist(), strict=True):
            assert is_kept == inside
            inside = (inside or token == equals) and token != end


def test_the_same_recipe_gives_the_same_weights_and_another_seed_others(folder: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(99)
    for name, config in (("same", SMALL), ("other", SMALL.model_copy(update={"seed": 1}))):
        (tmp_path / name).mkdir()
        tiny.train_tiny(config, tmp_path / name)
    weights = [file_checksums(path)["model.safetensors"] for path in (folder, tmp_path / "same", tmp_path / "other")]
    assert weights[0] == weights[1] != weights[2]


def test_training_leaves_the_global_random_state_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    tiny.train_tiny(SMALL.model_copy(update={"train_steps": 1}), tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    first, last = (
        tiny.train_tiny(SMALL.model_copy(update={"train_steps": steps}), tmp_path / str(steps)).loss
        for steps in (1, 30)
    )
    assert last < first - 0.3


def test_a_width_that_the_heads_do_not_divide_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy.hidden_size is 40.*multiple of 32"):
        tiny.train_tiny(TinyPolicy(hidden_size=40), tmp_path)
    assert not list(tmp_path.iterdir())


def write_one(folder: Path) -> None:
    (folder / "weights").write_text("right")


def test_a_cached_folder_is_built_once_and_again_when_a_file_changed_or_went(tmp_path: Path) -> None:
    built: list[Path] = []

    def build(folder: Path) -> None:
        built.append(folder)
        write_one(folder)

    for damage in (None, "changed", "gone", "more", None):
        folder = build_once(tmp_path, "x", build)
        assert (folder / "weights").read_text() == "right"
        if damage == "changed":
            (folder / "weights").write_text("wrong")
        elif damage == "gone":
            (folder / "weights").unlink()
        elif damage == "more":
            (folder / "model-2.safetensors").write_text("of another model")
    assert len(built) == 4


def test_a_build_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        write_one(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path, "x", build)
    assert [path.name for path in tmp_path.iterdir()] == [".x.lock"]


def test_a_full_disk_is_told_with_its_remedy(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        write_one(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(ModelError, match=r"No space left.*PACELINE_CACHE"):
        build_once(tmp_path, "x", build)
    assert [path.name for path in tmp_path.iterdir()] == [".x.lock"]
