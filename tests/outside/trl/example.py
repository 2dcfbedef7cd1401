"""TRL trains on what a store holds: `python example.py sqlite:///runs/run.db runs/out`."""

import sys

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig

import trinity_buffer as tb
from trinity_buffer.integrations.trl import StoredGRPOTrainer

URL, FOLDER = sys.argv[1:]


class Report(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        print("step", state.global_step, flush=True)


# Yours: AutoModelForCausalLM.from_pretrained, AutoTokenizer.from_pretrained
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
model = Qwen3ForCausalLM(Qwen3Config(vocab_size=64, **sizes, **heads))
words = Tokenizer(models.WordLevel({str(i): i for i in range(64)}, unk_token="0"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")

args = GRPOConfig(
    output_dir=FOLDER,
    max_steps=20,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_generations=4,
    learning_rate=1e-2,
    save_steps=2,
    report_to=[],
    use_cpu=True,
)
with tb.open_train_stream(URL, experiment="run", strategy="grpo", groups_per_step=2) as stream:
    trainer = StoredGRPOTrainer(
        model, stream=stream, args=args, processing_class=tokenizer, callbacks=[Report()]
    )
    trainer.train()  # after a crash: the same program again
