"""What every publish keeps to: checksums, versions, chunks. On the reference engine."""

from __future__ import annotations

import copy

import pytest
import torch

from paceline.engine.publish import PublishLog, checksum
from paceline.engine.reference import ReferenceEngine
from paceline.errors import PublishError
from paceline.models.weights import policy_tensors
from paceline.testing.runs import tiny_policy
from paceline.types import Versions

torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_a_checksum_follows_every_value_and_its_place_and_nothing_else(dtype):
    generator = torch.Generator().manual_seed(0)
    tensor = (100 * torch.randn(37, 1021, generator=generator)).to(dtype)
    whole = checksum(tensor)
    assert checksum(tensor.clone()) == checksum(tensor.t().contiguous().t()) == whole
    assert checksum(torch.cat([tensor[:1], tensor])[1:]) == whole
    changed = tensor.clone()
    changed.view(torch.uint8)[20, 13] ^= 1
    others = [changed, tensor.flip(0), tensor.flip(1), tensor[[1, 0, *range(2, 37)]], tensor[:-1], tensor * 0]
    assert len({checksum(other) for other in [tensor, *others]}) == 7


def test_checksums_of_single_words_at_all_places_are_different():
    """Also across the pieces in which a long tensor is summed."""
    places = [0, 1, 2, 32767, 32768, 32769, 65536, 99_999]
    found = set()
    for place in places:
        tensor = torch.zeros(100_000, dtype=torch.int64)
        tensor[place] = 1
        found.add(checksum(tensor))
    assert len(found) == len(places)


def test_a_log_takes_rising_versions_and_knows_the_content_of_older_ones():
    log = PublishLog("policy", 3)
    log.check_content(3, {"a": "1", "b": "1"})  # what the engine started with is not known
    for version, content in ((3, {"a": "1", "b": "1"}), (4, {"a": "2", "b": "1"}), (7, {"a": "3", "b": "1"})):
        log.check_version(version)
        log.check_content(version, content)
        log.record(version, content)
    log.check_content(8, {"a": "4", "b": "1"})  # b never changes: it is not stale
    with pytest.raises(PublishError, match="version 6 was published after version 7"):
        log.check_version(6)
    with pytest.raises(PublishError, match="tensor a of version 7 differs"):
        log.check_content(7, {"a": "4", "b": "1"})
    with pytest.raises(PublishError, match="tensor a of version 8 is that of version 4"):
        log.check_content(8, {"a": "2", "b": "2"})
    log.forget()
    log.check_version(0)
    log.check_content(0, {"a": "2"})


def test_any_split_into_chunks_gives_the_same_weights_and_the_same_report():
    state = policy_tensors(tiny_policy(seed=4))
    names = list(state)
    reports = []
    thirds, singles = [{n: state[n] for n in names[k::3]} for k in range(3)], [{n: state[n]} for n in names[::-1]]
    for split in ([state], thirds, singles):
        engine = ReferenceEngine(copy.deepcopy(tiny_policy()))
        reports.append(engine.publish(iter([*split, {}]), Versions(policy=2)))
        assert all(torch.equal(tensor, state[name]) for name, tensor in policy_tensors(engine.model).items())
    assert len({report.digest for report in reports}) == 1
    assert reports[0].checksums == reports[1].checksums == reports[2].checksums
    assert (reports[0].tensors, reports[0].versions) == (len(state), Versions(policy=2))
    assert reports[0].bytes == sum(tensor.numel() * 8 for tensor in state.values())
    other = ReferenceEngine(tiny_policy()).publish(policy_tensors(tiny_policy(seed=5)), Versions(policy=2))
    assert other.digest != reports[0].digest


def test_a_stream_that_does_not_fit_names_the_tensor_and_changes_nothing():
    engine, state = ReferenceEngine(tiny_policy()), policy_tensors(tiny_policy(seed=4))
    before = {name: tensor.clone() for name, tensor in policy_tensors(engine.model).items()}
    name = "model.layers.1.mlp.up_proj.weight"
    rest = {n: t for n, t in state.items() if n != name}
    for message, chunks in {
        f"lacks the tensor {name}": [rest],
        f"{name} came twice": [state, {name: state[name]}],
        f"{name} holds NaN": [rest, {name: state[name] * torch.nan}],
        f"{name} of shape": [rest, {name: state[name][1:]}],
        f"{name} as torch.float16": [rest, {name: state[name].half()}],
        "has a tensor stray": [state, {"stray": state[name]}],
    }.items():
        with pytest.raises(PublishError, match=message):
            engine.publish(iter(chunks), Versions(policy=1))
        assert all(torch.equal(tensor, before[n]) for n, tensor in policy_tensors(engine.model).items())
        assert engine.versions == Versions(policy=0)


def test_an_engine_takes_a_version_again_only_with_its_content_and_another_run_after_forgetting():
    engine = ReferenceEngine(tiny_policy())
    first, second = (policy_tensors(tiny_policy(seed=seed)) for seed in (4, 5))
    engine.publish(first, Versions(policy=2))
    engine.publish(first, Versions(policy=2))
    with pytest.raises(PublishError, match="of version 2 differs"):
        engine.publish(second, Versions(policy=2))
    with pytest.raises(PublishError, match="version 1 was published after version 2"):
        engine.publish(second, Versions(policy=1))
    engine.publish(second, Versions(policy=3))
    with pytest.raises(PublishError, match="of version 4 is that of version 2"):
        engine.publish(first, Versions(policy=4))
    engine.forget_versions()
    engine.publish(first, Versions(policy=0))
    assert engine.versions == Versions(policy=0)
