"""The key `device`: where a run is trained and replayed, and what a machine without it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor, nn

from tests.cli.calling import Cli
from tests.cli.test_option_matrix import SMALL, stored, words_of
from tests.raw_store import rows
from tests.trainer.qwen import qwen2
from trinity_buffer import open_store
from trinity_buffer.cli import roles
from trinity_buffer.cli.run_backends import backend_for
from trinity_buffer.cli.run_config import resolved
from trinity_buffer.demo.policy import KeyValueCache, PolicyConfig, TransformerPolicy
from trinity_buffer.demo.rollout import evaluate
from trinity_buffer.demo.tasks import SortDigits
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.trainer.models import new_critic

SHAPE = PolicyConfig(vocab_size=12, width=8, layers=1, heads=1, max_length=8)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return what is moved to which device."""
    seen: list[tuple[str, str]] = []

    def to(self: nn.Module, device: object) -> nn.Module:
        seen.append((type(self).__name__, str(device)))
        return self

    monkeypatch.setattr(nn.Module, "to", to)
    return seen


def gpus(monkeypatch: pytest.MonkeyPatch, number: int, **environment: str) -> list[object]:
    """Let torch see so many GPUs; return which become its current one."""
    current: list[object] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return current


@pytest.mark.parametrize(
    ("device", "environment", "here"),
    [
        ("cpu", {}, "cpu"),
        ("cuda", {}, "cuda:0"),
        ("cuda:1", {}, "cuda:1"),
        ("cuda", {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "cuda:1"),
    ],
)
def test_cuda_is_the_gpu_of_the_rank_and_becomes_the_current_one(
    monkeypatch: pytest.MonkeyPatch, device: str, environment: dict[str, str], here: str
) -> None:
    current = gpus(monkeypatch, 2, **environment)
    assert roles.at_its_device(resolved({"device": device})).device == here
    assert current == ([] if here == "cpu" else [here])


@pytest.mark.parametrize(
    ("device", "number", "environment", "message"),
    [
        ("cuda", 0, {}, "device=cuda needs 1 GPU, and torch .* sees 0 .*--set device=cpu"),
        ("cuda:2", 2, {}, "device=cuda:2 needs 3 GPUs, and torch .* sees 2"),
        ("cuda", 1, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "needs 2 GPUs, and torch .* 1"),
        ("cuda:1", 2, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "2 ranks .* device=cuda "),
    ],
)
def test_a_gpu_that_is_not_there_or_not_alone_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    number: int,
    environment: dict[str, str],
    message: str,
) -> None:
    gpus(monkeypatch, number, **environment)
    with pytest.raises(InvalidArgumentError, match=message):
        roles.device_here(device)


@pytest.mark.parametrize(("available", "backend"), [(True, "cpu:gloo,cuda:nccl"), (False, "gloo")])
def test_ranks_exchange_tensors_of_a_gpu_by_nccl_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, available: bool, backend: str
) -> None:
    asked: list[str] = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in roles.SET_BY_TORCHRUN[:1] + roles.SET_BY_TORCHRUN[2:]:
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(roles, "rendezvous", lambda _: iter([(None, 0, 2)]))
    monkeypatch.setattr(roles, "PrefixStore", lambda *_: None)
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda backend, **_: asked.append(backend)
    )
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    with roles.ranks_of_environment():
        assert asked == [backend]


def test_every_model_of_a_run_goes_where_it_is_trained(
    tmp_path: Path, moved: list[tuple[str, str]]
) -> None:
    config = resolved({"device": "cuda:1", "model": {"width": 8, "layers": 1, "heads": 1}})
    ends = backend_for(config)
    ends.policy().save(tmp_path / "policy")
    ends.load(tmp_path / "policy")
    assert moved[0] == ("TransformerPolicy", "cuda:1")
    assert moved[-1] == ("TransformerPolicy", "cuda:1")  # a reference or a teacher
    new_critic(TransformerPolicy(SHAPE))
    assert moved[-1] == ("TransformerCritic", "cpu")


@pytest.mark.long
def test_a_model_of_transformers_goes_where_it_is_trained(
    tmp_path: Path, moved: list[tuple[str, str]]
) -> None:
    qwen2().save_pretrained(tmp_path)
    ends = backend_for(resolved({"device": "cuda:1", "model": str(tmp_path)}))
    ends.policy()
    assert moved == [("Qwen2ForCausalLM", "cuda:1")]


def test_answers_are_sampled_where_the_policy_is(monkeypatch: pytest.MonkeyPatch) -> None:
    read, seen = TransformerPolicy.read, set[str]()

    def noting(self: TransformerPolicy, ids: Tensor, cache: KeyValueCache) -> Tensor:
        seen.add(ids.device.type)
        return read(self, ids, cache)

    monkeypatch.setattr(TransformerPolicy, "read", noting)
    policy, task = TransformerPolicy(SHAPE), SortDigits(digits=2)
    with torch.device("meta"):  # where a tensor is made if nothing says the policy's device
        assert 0 <= evaluate(policy, task, 4, seed=0) <= 1
    assert seen == {"cpu"}


def recorded_run(cli: Cli, url: str, *words: str) -> None:
    """Explore and annotate a run on a machine that need not have the device."""
    chosen = [*words_of(SMALL | {"max_staleness": "null", "max_queued_groups": "null"}), *words]
    assert cli("explore", "--store", url, "--actor", "e0", "--batches", 4, *chosen).code == 0
    assert cli("annotate", "--store", url).code == 0


async def environments(url: str) -> list[dict[str, Any]]:
    async with open_store(url, read_only=True) as store:
        experiment = await store.experiment("run")
        return [e.body["environment"] async for e in experiment.events(kinds=("StepsCommitted",))]


def test_a_run_is_trained_and_replayed_on_its_device_or_another(
    cli: Cli, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"sqlite:///{tmp_path / 'run.db'}"
    recorded_run(cli, url, "--set", "device=cpu:0", "--set", "algorithm=ppo")
    assert cli("train", "--store", url).code == 0
    assert {one["device"] for one in anyio.run(environments, url)} == {"cpu:0"}
    same = cli("replay", "--store", url, "--json")
    assert (same.code, json.loads(same.out)["identical"]) == (0, True)
    assert json.loads(same.out)["differences"] == {}
    other = cli("replay", "--store", url, "--set", "device=cpu", "--tolerance", "1e-6", "--json")
    told = json.loads(other.out)
    assert (other.code, told["within"], told["differences"]) == (
        0,
        True,
        {"device": ["cpu:0", "cpu"]},
    )
    assert "step 1 was trained with device cpu:0 (here cpu): do not expect" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_without_a_gpu_cuda_is_refused_before_anything_is_recorded(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path / 'run.db'}"
    for command in (["train", "--store", url], ["demo"]):
        ended = cli(*command, *words_of(SMALL), "--set", "device=cuda")
        assert (ended.code, len(ended.err.splitlines())) == (2, 1), ended
        assert "device=cuda needs 1 GPU" in ended.err
        assert not list(tmp_path.rglob("*.db"))
    recorded_run(cli, url, "--set", "device=cuda")  # explorers need none
    refused = cli("train", "--store", url)
    assert "--set device=cpu" in refused.err
    assert anyio.run(_consumers, url) == ["grpo"]
    assert cli("train", "--store", url, "--set", "device=cpu").code == 0
    assert anyio.run(stored, url)[1] == SMALL["max_steps"]


async def _consumers(url: str) -> list[str]:
    async with open_store(url, read_only=True) as store:
        experiment = await store.experiment("run")
        return [row["name"] for row in await rows(experiment, "consumer")]
