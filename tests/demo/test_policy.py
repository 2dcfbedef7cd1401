"""The policy: one set of log-probs in both layouts, weights from a seed, files that are whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trinity_buffer.demo.policy import PolicyConfig, TransformerPolicy
from trinity_buffer.errors import CheckpointError, InvalidArgumentError

CONFIG = PolicyConfig(vocab_size=11, width=16, layers=2, heads=2, max_length=12)
LENGTHS = (5, 1, 12, 3)


def make_policy(seed: int = 0) -> TransformerPolicy:
    return TransformerPolicy(CONFIG, seed=seed).double()


def make_rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 11, (length,), generator=generator) for length in LENGTHS]


def boundaries() -> Tensor:
    return torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)


def test_packed_and_padded_scores_are_equal() -> None:
    policy, rows = make_policy(), make_rows()
    mask = pad_sequence([torch.ones(len(row), dtype=torch.bool) for row in rows], True)
    padded = policy.scores({"input_ids": pad_sequence(rows, True), "attention_mask": mask})
    packed = policy.scores(
        {"input_ids": torch.cat(rows), "cu_seqlens": boundaries(), "max_seqlen": 12}
    )
    for one, other in zip(padded, packed, strict=True):
        torch.testing.assert_close(one[mask], other, rtol=0, atol=1e-13)
        assert one[~mask].eq(0).all()


def test_packed_and_padded_gradients_are_equal() -> None:
    policy, rows = make_policy(), make_rows()
    mask = pad_sequence([torch.ones(len(row), dtype=torch.bool) for row in rows], True)
    gradients = []
    for scores in (
        policy.scores({"input_ids": pad_sequence(rows, True), "attention_mask": mask}),
        policy.scores({"input_ids": torch.cat(rows), "cu_seqlens": boundaries()}),
    ):
        policy.zero_grad()
        (scores.logprob.sum() + scores.entropy.square().sum()).backward()
        gradients.append([p.grad.clone() for p in policy.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(list(policy.parameters()))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-12)


def test_no_sequence_of_a_pack_sees_another_one() -> None:
    policy, rows = make_policy(), make_rows()
    before = policy.scores({"input_ids": torch.cat(rows), "cu_seqlens": boundaries()}).logprob
    rows[2] = (rows[2] + 1) % 11
    after = policy.scores({"input_ids": torch.cat(rows), "cu_seqlens": boundaries()}).logprob
    untouched = torch.ones(len(before), dtype=torch.bool)
    untouched[6:18] = False
    assert torch.equal(before[untouched], after[untouched])
    assert not torch.equal(before[6:18], after[6:18])


def test_a_token_is_scored_by_what_comes_before_it_alone() -> None:
    policy = make_policy()
    ids = torch.arange(8).unsqueeze(0)
    changed = ids.clone()
    changed[0, 5] = 9
    one, other = (
        policy.scores({"input_ids": ids}).logprob[0],
        policy.scores({"input_ids": changed}).logprob[0],
    )
    assert torch.equal(one[:5], other[:5])
    assert (one[5:] != other[5:]).all()


def test_the_score_of_a_token_is_read_from_the_logits_before_it() -> None:
    policy, ids = make_policy(), torch.tensor([[3, 1, 4]])
    everything = policy(ids).log_softmax(-1)[0]
    scores = policy.scores({"input_ids": ids})
    wanted = torch.stack([torch.zeros((), dtype=torch.float64), everything[0, 1], everything[1, 4]])
    torch.testing.assert_close(scores.logprob[0], wanted)
    entropy = torch.distributions.Categorical(logits=everything[1]).entropy()
    torch.testing.assert_close(scores.entropy[0, 2], entropy)


def test_positions_that_are_given_are_used() -> None:
    policy, rows = make_policy(), make_rows()
    counted = torch.cat([torch.arange(length) for length in LENGTHS])
    ids, limits = torch.cat(rows), boundaries()
    given = policy.scores({"input_ids": ids, "position_ids": counted, "cu_seqlens": limits}).logprob
    assert torch.equal(given, policy.scores({"input_ids": ids, "cu_seqlens": limits}).logprob)
    moved = policy.scores(
        {"input_ids": ids, "position_ids": counted.flip(0), "cu_seqlens": limits}
    ).logprob
    assert not torch.equal(given, moved)


def test_reading_with_a_cache_gives_the_logits_of_reading_everything() -> None:
    policy, ids = make_policy(), torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
    cache = policy.new_cache()
    policy.read(ids[:, :3], cache)
    cache = cache.take(torch.tensor([1, 0, 1]))
    policy.read(ids[[1, 0, 1], 3:4], cache)
    last = policy.read(ids[[1, 0, 1], 4:5], cache)
    torch.testing.assert_close(last, policy(ids[[1, 0, 1]])[:, -1], rtol=0, atol=1e-13)


def test_weights_depend_on_the_seed_alone_and_leave_the_global_state() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one = TransformerPolicy(CONFIG, seed=3).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(6)
    again = TransformerPolicy(CONFIG, seed=3).state_dict()
    other = TransformerPolicy(CONFIG, seed=4).state_dict()
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["head.weight"], other["head.weight"])


def test_a_saved_policy_is_loaded_as_it_was(tmp_path: Path) -> None:
    policy, path = TransformerPolicy(CONFIG, seed=9), tmp_path / "policy-7.safetensors"
    policy.save(path)
    loaded = TransformerPolicy.load(path)
    assert loaded.config == CONFIG
    ids = torch.arange(11).unsqueeze(0)
    assert torch.equal(loaded(ids), policy(ids))
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_equal_policies_are_equal_bytes(tmp_path: Path) -> None:
    for name in "ab":
        TransformerPolicy(CONFIG).save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_policy_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real, seen = tmp_path / "policy", os.fsync, []

    def watched(descriptor: int) -> None:
        seen.append((Path(f"/proc/self/fd/{descriptor}").readlink(), path.exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    TransformerPolicy(CONFIG).save(path)
    (file, named_then), (folder, named_at_last) = seen
    assert (file.parent, named_then) == (tmp_path, False)
    assert (folder, named_at_last) == (tmp_path, True)


def test_a_save_that_fails_leaves_the_old_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "policy"
    TransformerPolicy(CONFIG).save(path)
    old = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        TransformerPolicy(CONFIG, seed=1).save(path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "content", [None, b"", b"not a policy at all", b"\x08" + b"\0" * 7 + b"{}      "]
)
def test_what_is_no_policy_is_refused_by_its_path(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "policy"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=str(path)):
        TransformerPolicy.load(path)


def test_weights_of_another_shape_than_the_config_are_refused(tmp_path: Path) -> None:
    policy, path = TransformerPolicy(CONFIG), tmp_path / "policy"
    policy.config = PolicyConfig(vocab_size=11, width=32, heads=2)
    policy.save(path)
    with pytest.raises(CheckpointError, match="do not fit"):
        TransformerPolicy.load(path)


@pytest.mark.parametrize("wrong", [{"width": 30}, {"layers": 0}, {"vocab_size": -1}])
def test_an_impossible_shape_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        PolicyConfig(**{"vocab_size": 11, "width": 32, "heads": 4, **wrong})


def test_too_long_sequences_and_other_layouts_are_refused() -> None:
    policy = make_policy()
    with pytest.raises(InvalidArgumentError, match="max_length"):
        policy(torch.zeros(1, 13, dtype=torch.long))
    with pytest.raises(InvalidArgumentError, match="max_length"):
        policy(torch.zeros(13, dtype=torch.long), cu_seqlens=torch.tensor([0, 13]))
    with pytest.raises(InvalidArgumentError, match="cu_seqlens"):
        policy(torch.zeros(3, dtype=torch.long))
