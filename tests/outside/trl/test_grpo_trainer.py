"""TRL's trainer on stored rollouts: our loss, and each group once, also after a kill."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import anyio
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig

import trinity_buffer as tb
from trinity_buffer.algorithm.policy_loss_fn import POLICY_LOSS_FN
from trinity_buffer.errors import CheckpointError, TrainingError
from trinity_buffer.integrations.trl import StoredGRPOTrainer

GROUPS, RUNS = 40, 4
EXAMPLE = Path(__file__).with_name("example.py")
TWO_RANKS = Path(__file__).with_name("two_ranks.py")


def fresh_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=64, **sizes, **heads))


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({str(i): i for i in range(64)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")


async def record(url: str, *, at_once: int = RUNS, temperature: float = 1.0) -> None:
    """Write prompts and answers of several lengths, each with a token that nobody trains.

    Args:
        at_once: so many rows of a group are a segment.
        temperature: that all are said to be sampled at.
    """
    draw = torch.Generator().manual_seed(1)
    async with tb.open_store(url) as store:
        experiment = await store.experiment("run", config={"rollouts_per_group": RUNS})
        writer = experiment.writer(actor="explorer-0")
        for task in range(GROUPS):
            prompt = 2 + task % 4
            rows = []
            for run in range(RUNS):
                answer = 3 + (task + run) % 5
                mask = torch.ones(answer, dtype=torch.bool)
                mask[1] = False
                rows.append(
                    tb.Experience(
                        eid=tb.EID("b0", task, run, 0),
                        tokens=torch.randint(2, 64, (prompt + answer,), generator=draw),
                        prompt_length=prompt,
                        action_mask=mask,
                        logprobs=-4 + torch.rand(answer, generator=draw),
                        reward=float(torch.rand((), generator=draw)),
                        info={"sampling_segments": [{"temperature": temperature}]},
                    )
                )
            for first in range(0, RUNS, at_once):
                await writer.write(rows[first : first + at_once])
        await tb.run_strategy(experiment, "grpo")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("recorded") / "run.db"
    anyio.run(record, f"sqlite:///{path}")
    return path.read_bytes()


def settings(folder: Path, **given: object) -> GRPOConfig:
    chosen = {
        "output_dir": str(folder),
        "max_steps": 20,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": RUNS,
        "learning_rate": 1e-2,
        "loss_type": "grpo",
        "logging_steps": 1,
        "save_steps": 5,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
    }
    return GRPOConfig(**{**chosen, **given})


class Watched(StoredGRPOTrainer):
    """Notes our loss of each step, in ``expected``."""

    def _generate_and_score_completions(self, inputs: object) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = super()._generate_and_score_completions(inputs)
        modes = {"grpo": "seq-mean-token-mean", "dapo": "token-mean"}
        mode = modes[self.args.loss_type]
        ours = POLICY_LOSS_FN.get("ppo")(clip_range=0.2, loss_agg_mode=mode)
        loss = 0.0
        for batch in self.trained.microbatches:
            with torch.no_grad():
                scores = tb.token_scores(self.model, batch)
            names = ("action_mask", "advantages", "old_logprob")
            kept = {name: batch[name] for name in names}
            loss += float(ours(scores.logprob, layout=batch.layout, **kept)[0])
        self.expected.append(loss)
        return found


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_the_loss_of_each_step_is_ours(recorded: bytes, tmp_path: Path, loss_type: str) -> None:
    (tmp_path / "run.db").write_bytes(recorded)
    with tb.open_train_stream(
        f"sqlite:///{tmp_path}/run.db", experiment="run", strategy="grpo", groups_per_step=2
    ) as stream:
        trainer = Watched(
            fresh_model(),
            stream=stream,
            args=settings(tmp_path / "out", loss_type=loss_type),
            processing_class=tokenizer(),
        )
        trainer.expected = []
        trainer.train()
    assert len(losses(trainer)) == 20
    assert losses(trainer) == pytest.approx(trainer.expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("given", [0.5, 1.0])
def test_rows_are_trained_at_the_temperature_that_they_were_sampled_at_and_no_other(
    tmp_path: Path, given: float
) -> None:
    url = f"sqlite:///{tmp_path}/run.db"
    anyio.run(partial(record, url, temperature=0.5))
    with tb.open_train_stream(url, experiment="run", strategy="grpo", groups_per_step=2) as stream:
        trainer = Watched(
            fresh_model(),
            stream=stream,
            args=settings(tmp_path / "out", temperature=given, max_steps=2),
            processing_class=tokenizer(),
        )
        trainer.expected = []
        if given != 0.5:
            with pytest.raises(TrainingError, match=r"sampled at 0\.5"):
                trainer.train()
            return
        trainer.train()
    assert losses(trainer) == pytest.approx(trainer.expected, rel=1e-5, abs=1e-5)


def losses(trainer: StoredGRPOTrainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def damage(path: Path, rows: list[int]) -> None:
    """Flip a bit in the tokens of these rows, counted as they were written."""
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        named = "SELECT sql FROM sqlite_master WHERE name = 'segment_forbids_update'"
        (guard,) = database.execute(named).fetchone()
        database.execute("DROP TRIGGER segment_forbids_update")
        families = "SELECT rowid, data FROM segment WHERE family = 'tokens' ORDER BY rowid"
        found = database.execute(families).fetchall()
        for place, data in (found[row] for row in rows):
            flipped = bytes([*data[:-1], data[-1] ^ 1])
            database.execute("UPDATE segment SET data = ? WHERE rowid = ?", (flipped, place))
        database.execute(guard)


class Weights(TrainerCallback):
    """Keeps what the weights are after each step."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def on_step_end(self, *_: object, model: torch.nn.Module, **__: object) -> None:
        self.found.append(torch.cat([one.detach().flatten() for one in model.parameters()]))


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_rows_that_were_dropped_do_not_count(tmp_path: Path, loss_type: str) -> None:
    url = f"sqlite:///{tmp_path}/run.db"
    anyio.run(partial(record, at_once=1), url)
    options = {"experiment": "run", "strategy": "grpo", "groups_per_step": 2}
    with tb.open_train_stream(url, **options) as stream:
        assert [next(stream).step, next(stream).step] == [1, 2]
    damage(tmp_path / "run.db", [1, *range(2 * RUNS, 4 * RUNS)])
    weights = Weights()
    with tb.open_train_stream(url, **options, damaged_rows="drop") as stream:
        trainer = Watched(
            fresh_model(),
            stream=stream,
            args=settings(tmp_path / "out", loss_type=loss_type, max_steps=3, save_steps=1),
            processing_class=tokenizer(),
            callbacks=[weights],
        )
        trainer.expected = []
        trainer.train()
    first, second, third = weights.found
    assert torch.equal(first, second)
    assert not torch.equal(second, third)
    trained = trainer.expected
    assert losses(trainer) == pytest.approx([trained[0], 0.0, trained[1]], rel=1e-5, abs=1e-5)
    with tb.open_replay_stream(url, experiment="run") as replay:
        assert [len(step.manifest.groups) for step in replay] == [2 * RUNS - 1, 0, 2 * RUNS]


@pytest.mark.parametrize(("groups", "steps"), [(8, 5), (20, 2)])
def test_a_run_that_ends_with_the_stream_saves_its_last_step(
    recorded: bytes, tmp_path: Path, groups: int, steps: int
) -> None:
    (tmp_path / "run.db").write_bytes(recorded)
    place = f"sqlite:///{tmp_path}/run.db"
    options = {"experiment": "run", "strategy": "grpo", "groups_per_step": groups}
    with tb.open_train_stream(place, **options) as stream:
        trainer = StoredGRPOTrainer(
            fresh_model(),
            stream=stream,
            args=settings(tmp_path / "out", save_steps=2, max_steps=100),
            processing_class=tokenizer(),
        )
        trainer.train()
    with tb.open_train_stream(place, **options) as stream:
        assert stream.resume is not None
        assert stream.resume.checkpoint == tmp_path / "out" / f"checkpoint-{steps}"
        trainer = StoredGRPOTrainer(
            fresh_model(),
            stream=stream,
            args=settings(tmp_path / "out", max_steps=100),
            processing_class=tokenizer(),
        )
        with pytest.raises(CheckpointError, match=f"goes on after step {steps}, with .*-{steps}:"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))


@pytest.mark.parametrize(("loss_type", "groups"), [("grpo", 3), ("dapo", 3), ("grpo", 1)])
def test_two_ranks_with_other_numbers_of_rows_train_as_one(
    recorded: bytes, tmp_path: Path, loss_type: str, groups: int
) -> None:
    weights = []
    for world in (1, 2):
        folder = tmp_path / str(world)
        folder.mkdir()
        (folder / "run.db").write_bytes(recorded)
        command = [sys.executable, str(TWO_RANKS), str(folder), loss_type, str(groups)]
        meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        ranks = []
        for rank in range(world):
            among = {**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {}
            ranks.append(subprocess.Popen(command, env={**os.environ, **among}))
        assert [process.wait(timeout=300) for process in ranks] == [0] * world
        weights.append(torch.load(folder / "weights.pt"))
    begun = torch.cat([one.detach().flatten() for one in fresh_model().parameters()])
    alone, together = (trained - begun for trained in weights)
    assert (alone - together).abs().max() < 1e-3 * alone.abs().max()


def free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        port: int = asked.getsockname()[1]
        return port


def test_killed_and_resumed_each_group_is_trained_once(recorded: bytes, tmp_path: Path) -> None:
    (tmp_path / "run.db").write_bytes(recorded)
    command = [sys.executable, str(EXAMPLE), f"sqlite:///{tmp_path}/run.db", str(tmp_path / "out")]
    seen: list[str] = []
    for kill_after in (7, 5, None):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            steps = 0
            for line in child.stdout:
                seen.append(line.strip())
                steps += line.startswith("step ")
                if steps == kill_after:
                    os.kill(child.pid, signal.SIGKILL)
                    break
    assert child.returncode == 0, seen
    checkpoint = json.loads((tmp_path / "out" / "checkpoint-20" / "trainer_state.json").read_text())
    assert checkpoint["global_step"] == 20

    with tb.open_replay_stream(f"sqlite:///{tmp_path}/run.db", experiment="run") as stream:
        groups = [row for step in stream for row in step.manifest.experiences]
    assert len(groups) == len(set(groups)) == GROUPS * RUNS


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"max_steps": -1, "num_train_epochs": 1}, "max_steps"),
        ({"beta": 0.1}, "beta=0.1"),
        ({"num_iterations": 2}, "one optimizer step"),
        ({"mask_truncated_completions": True}, "mask_truncated_completions=True"),
    ],
)
def test_settings_that_the_store_cannot_serve_are_refused(
    tmp_path: Path, given: dict[str, object], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        StoredGRPOTrainer(None, stream=None, args=settings(tmp_path, **given))
