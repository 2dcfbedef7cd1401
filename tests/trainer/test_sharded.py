"""A model that ranks hold in parts: its checkpoints are read by any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import transformers
from torch import Tensor

import trinity_buffer as tb
from tests.handles import VerifyReport
from tests.trainer.data import prepared
from tests.trainer.forked_ranks import said_by
from tests.trainer.sharded_rank import main, model_of, trainer_on
from trinity_buffer import open_store, verify
from trinity_buffer.algorithm import build

pytestmark = [
    pytest.mark.long,  # processes that import transformers
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of peft, as in test_wrapped_models
]


def ranks(url: str, folder: Path, world: int, steps: int, name: str, *how: str) -> list[str]:
    """Train with so many ranks; return what each said."""
    given = [
        (url, str(folder), str(rank), str(world), str(steps), name, *how) for rank in range(world)
    ]
    return said_by(main, given, folder)


def alone(url: str, folder: Path, name: str, steps: int | None = None, **how: Any) -> tb.Trainer:
    """Train in this process, with the whole model; perhaps on from what ranks have written."""
    torch.set_num_threads(1)
    with tb.open_train_stream(
        url, experiment="run", strategy="grpo", consumer=name, groups_per_step=2
    ) as stream:
        trainer = trainer_on(stream, folder / name, model_of(**how), max_steps=steps)
        trainer.run()
    return trainer


def weights(trainer: tb.Trainer) -> dict[str, Tensor]:
    return {name: p for name, p in trainer.policy.model.named_parameters() if p.requires_grad}


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5)


async def verified(url: str, name: str, folder: Path) -> VerifyReport:
    async with open_store(url, read_only=True) as store:
        return await verify(await store.experiment("run"), checkpoint=folder, consumer=name)


@pytest.fixture
def url(tmp_path: Path) -> str:
    found = f"sqlite:///{tmp_path}/store.db"
    anyio.run(prepared, found, build("grpo"))
    return found


def newest(folder: Path, name: str) -> Path:
    return max((folder / name).glob("step-*"))


def test_two_ranks_three_ranks_and_one_process_follow_one_another(url: str, tmp_path: Path) -> None:
    assert [one[0] for one in ranks(url, tmp_path, 2, 1, "t")] == ["0"] * 2
    first = newest(tmp_path, "t")
    assert {file.name for file in (first / "policy").iterdir()} >= {
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    }
    assert [one[0] for one in ranks(url, tmp_path, 3, 2, "t")] == ["0"] * 3
    through = alone(url, tmp_path, "through")
    last = alone(url, tmp_path, "t")
    assert last.state.step == through.state.step == 3
    assert_near(weights(last), weights(through))
    with tb.open_replay_stream(url, experiment="run", consumer="t") as stream:
        replayed = trainer_on(stream, tmp_path / "replayed", model_of())
        replayed.run()
    assert_near(weights(replayed), weights(through))
    report = anyio.run(verified, url, "t", newest(tmp_path, "t"))
    assert (report.ok, report.lost, report.duplicated) == (True, 0, 0)


def test_transformers_reads_what_ranks_have_written_together(url: str, tmp_path: Path) -> None:
    ranks(url, tmp_path, 2, 1, "t", "async")
    through = alone(url, tmp_path, "through", 1)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(newest(tmp_path, "t") / "policy")
    assert_near(dict(loaded.named_parameters()), weights(through))
    report = anyio.run(verified, url, "t", newest(tmp_path, "t"))
    assert (report.ok, report.lost, report.duplicated) == (True, 0, 0)


def test_ranks_go_on_from_what_one_process_has_written(url: str, tmp_path: Path) -> None:
    alone(url, tmp_path, "t", 1)
    assert [one[0] for one in ranks(url, tmp_path, 2, 2, "t", "async")] == ["0"] * 2
    last, through = alone(url, tmp_path, "t"), alone(url, tmp_path, "through")
    assert_near(weights(last), weights(through))


def test_an_adapter_is_one_file_of_many_ranks(url: str, tmp_path: Path) -> None:
    said = ranks(url, tmp_path, 2, 1, "t", "lora")
    assert [one[0] for one in said] == ["0"] * 2, said
    files = {file.name for file in (newest(tmp_path, "t") / "policy").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors"}
    assert [one[0] for one in ranks(url, tmp_path, 2, 2, "t", "lora")] == ["0"] * 2
    last, through = (alone(url, tmp_path, name, lora=True) for name in ("t", "through"))
    assert_near(weights(last), weights(through))


@pytest.mark.parametrize("how", [(), ("async",)])
def test_a_rank_that_cannot_write_ends_all_and_nothing_is_committed(
    url: str, tmp_path: Path, how: tuple[str, ...]
) -> None:
    said = ranks(url, tmp_path, 2, 2, "t", "broken", *how)
    assert [one[0] for one in said] == ["1"] * 2
    assert all("No space left on device" in one for one in said)
    assert list((tmp_path / "t").iterdir()) == []
    assert [one[0] for one in ranks(url, tmp_path, 2, 1, "t")] == ["0"] * 2


def test_halves_that_each_hold_the_model_train_as_one_process(url: str, tmp_path: Path) -> None:
    said = ranks(url, tmp_path, 4, 2, "t", "hybrid", "async")
    assert [one[0] for one in said] == ["0"] * 4, said
    last, through = alone(url, tmp_path, "t"), alone(url, tmp_path, "through")
    assert_near(weights(last), weights(through))
    report = anyio.run(verified, url, "t", newest(tmp_path, "t"))
    assert (report.ok, report.lost, report.duplicated) == (True, 0, 0)
