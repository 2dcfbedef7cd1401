"""verl's synchronous trainer without its engines, which need GPUs: what a model would say is drawn.

Data loading, dispatch, the agent loop's records, checkpoints and resumption are verl's own code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.checkpoint_callback import build_checkpoint_callback
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.dataset.rl_dataset import collate_fn

RUNS, PROMPTS = 4, 2
MODULE = "trinity_buffer.integrations.verl"


def configured(url: str, job: Path, mode: str = "sync", strategy: str = "grpo") -> Any:
    """Return of verl's configuration what is read here; it names our two classes."""
    sampler = {
        "max_off_policy_threshold": None,
        "max_off_policy_strategy": "drop",
        "custom_sampler": {"path": f"pkg://{MODULE}", "name": "StoreReplayBuffer"},
        "sampler_kwargs": {"url": url, "experiment": "run", "strategy": strategy, "lease_ttl_s": 1},
    }
    trainer = {
        "v1": {"trainer_mode": mode, "sampler": sampler},
        "checkpoint_callback_class": f"{MODULE}.StoreCheckpointCallback",
        "default_local_dir": str(job),
        "default_hdfs_dir": None,
        "resume_mode": "auto",
        "del_local_ckpt_after_load": False,
    }
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "calculate_log_probs": True}
    rollout = {"n": RUNS, **sampling, "agent": {"default_agent_loop": "single_turn_agent"}}
    engines = {"actor": {}, "rollout": rollout}
    data = {"train_batch_size": PROMPTS}
    return OmegaConf.create({"data": data, "trainer": trainer, "actor_rollout_ref": engines})


class Prompts:
    """Batches of rows as verl's data set makes them, and what verl's data loader can do besides.

    Args:
        extra: of each prompt in turn, what stands in its ``extra_info``; read here are ``failing``,
            so many of its last sessions, and ``reward`` of the others.
    """

    def __init__(self, *extra: dict[str, Any]) -> None:
        self._extra, self._next = extra, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            self._next += PROMPTS
            yield collate_fn([self._row(n) for n in range(self._next - PROMPTS, self._next)])

    def _row(self, number: int) -> dict[str, Any]:
        extra = self._extra[number] if number < len(self._extra) else {}
        return {
            "raw_prompt": [{"role": "user", "content": f"task {number}"}],
            "dummy_tensor": torch.tensor([0], dtype=torch.uint8),
            "data_source": "here",
            "reward_model": {"ground_truth": "4", "style": "rule"},
            "extra_info": {"index": number, **extra},
            "index": number,
            "tools_kwargs": {},
            "interaction_kwargs": {},
        }

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


class Sessions(AgentLoopWorkerTQ.__ray_actor_class__):
    """verl's agent loop worker, in this process; its sessions draw tokens."""

    def __init__(self, config: Any) -> None:
        self.config, self.background_tasks = config, set()
        without = {"processor": None, "reward_loop_worker_handles": None}
        vars(self).update(without, distillation_enabled=False)

    def run_all(self, prompts: Any) -> None:
        """Return when all sessions have ended."""

        async def run() -> None:
            await self.generate_sequences(prompts)
            await asyncio.gather(*self.background_tasks)

        asyncio.run(run())

    async def _run_agent_loop(self, *_: Any, trajectory: dict[str, Any], **prompt: Any) -> None:
        del prompt["agent_name"], prompt["trace"]  # as verl's own does
        extra = prompt["extra_info"]
        if prompt["session_id"] >= RUNS - extra.get("failing", 0):
            raise RuntimeError("a session fails")
        output = drawn(prompt["global_steps"] - 1)
        output.reward_score = extra.get("reward", output.reward_score)
        await self._agent_loop_postprocess(output, trajectory["validate"], **prompt)


def drawn(version: int) -> AgentLoopOutput:
    """Return what a session of policy ``version`` might say."""
    size = int(torch.randint(2, 7, ()))
    return AgentLoopOutput(
        prompt_ids=torch.randint(2, 64, (3,)).tolist(),
        response_ids=torch.randint(2, 64, (size,)).tolist(),
        response_mask=[1, *[0] * (size > 3), *[1] * (size - 1 - (size > 3))],
        response_logprobs=(-4 + torch.rand(size)).tolist(),
        reward_score=float(torch.rand(())),
        num_turns=2,
        metrics=AgentLoopMetrics(),
        extra_fields={"min_global_steps": version, "max_global_steps": version},
    )


class Trainer(PPOTrainerSync):
    """verl's trainer as it is before its first step, with a folder where an actor would be."""

    def __init__(self, config: Any, *extra: dict[str, Any]) -> None:
        self.config, self.trainer_mode = config, config.trainer.v1.trainer_mode
        self.use_critic = False
        self.train_dataloader, self.sessions = Prompts(*extra), Sessions(config)
        vars(self).update(
            train_dataloader_it=None,
            agent_loop_manager=SimpleNamespace(generate_sequences=self.sessions.run_all),
            actor_rollout_wg=SimpleNamespace(save_checkpoint=save, load_checkpoint=load),
        )
        self.checkpoint_callback = build_checkpoint_callback(config)
        self.replay_buffer = self._build_replay_buffer()
        self.replay_buffer.poll_interval = 0.05
        self._load_checkpoint()
        self.global_steps += 1

    def sampled(self) -> Any:
        """Return the keys of this step, generated and sampled as `fit` does."""
        self.prepare_step()
        return self.replay_buffer.sample(self.global_steps, "train", PROMPTS)[0]


def save(folder: str, *_: Any, **__: Any) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / "weights").write_text("w")


def load(local_path: str, **_: Any) -> None:
    assert (Path(local_path) / "weights").read_text() == "w"
