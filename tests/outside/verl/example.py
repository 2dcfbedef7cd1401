"""verl's own loop, fed from a store: `python example.py sqlite:///runs/run.db runs/job 20`.

On verl's command line this is

    trainer.checkpoint_callback_class=trinity_buffer.integrations.verl.StoreCheckpointCallback
    trainer.v1.sampler.custom_sampler.path=pkg://trinity_buffer.integrations.verl
    trainer.v1.sampler.custom_sampler.name=StoreReplayBuffer
    "+trainer.v1.sampler.sampler_kwargs={url: sqlite:///runs/run.db, experiment: run}"

and verl's `fit` in place of the loop below, which leaves out what needs a GPU.
"""

import os
import sys
from pathlib import Path

import ray
import transfer_queue as tq
from no_engines import Trainer, configured

URL, JOB, STEPS = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])

ray.init(os.environ.get("RAY_ADDRESS", "local"))
tq.init()
trainer = Trainer(configured(URL, JOB))  # goes on after its newest checkpoint
while trainer.global_steps <= STEPS:
    batch = trainer.sampled()
    print("step", trainer.global_steps, *batch.keys, flush=True)  # here verl's actor trains
    if trainer.global_steps % 2 == 0:
        trainer._save_checkpoint()
    tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
    trainer.global_steps += 1
