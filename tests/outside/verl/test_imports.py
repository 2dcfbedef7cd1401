"""Rollouts that verl's own trainer dumped, imported."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from trinity_buffer.integrations.imports import formats
from trinity_buffer.integrations.imports.rows import Rows, Texts

WORDS = ["<e>", "one", "two", "three"]


def tokenizer(folder: Path) -> Path:
    vocabulary = {word: at for at, word in enumerate(WORDS)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<e>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<e>").save_pretrained(folder)
    return folder


def test_what_their_trainer_dumped_is_read(tmp_path: Path) -> None:
    keys = [f"{uid}_{session}_0" for uid in ("u-1", "u-2") for session in range(2)]
    for step in (9, 10):
        PPOTrainer._write_generations(
            inputs=["one two"] * 4,
            outputs=["three"] * 4,
            gts=["4"] * 4,
            scores=[0.0, 1.0, 0.5, 0.25],
            reward_extra_infos_dict={"uid": keys},
            dump_path=str(tmp_path / "dumps"),
            global_steps=step,
        )
    texts = Texts(tokenizer(tmp_path / "tokenizer"))
    found = list(formats.read_verl(tmp_path / "dumps", texts, Rows("experience")))
    uids = [f"step-{step}/{key.replace('_', '/')}/" for step in (9, 10) for key in keys]
    assert [one.eid.uid for one in found] == uids
    assert [one.reward for one in found] == [0.0, 1.0, 0.5, 0.25] * 2
    assert [one.info["model_version"] for one in found] == [8] * 4 + [9] * 4
    # Without an end: the dumps lack all special tokens, so nobody knows which answers were ended.
    assert {tuple(one.tokens.tolist()) for one in found} == {(1, 2, 3)}
