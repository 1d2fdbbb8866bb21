"""Fine-tune a Llama with transformers' Trainer in mixed precision; with --lora low-rank updates.

Needs transformers and accelerate; with --lora also peft. The text is PyTorch's own source code,
byte by byte.
"""

import inspect
import sys
import tempfile

import torch
from before_after import DEVICE, HAS_BFLOAT16, Training, before_after
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import inplace_ops

BATCH, LENGTH, STEPS = 4, 256, 6
LLAMA = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2}
OPTIONS = {"max_steps": STEPS, "logging_steps": 1, "save_strategy": "no", "report_to": []}


class Record(TrainerCallback):
    """Records the loss that Trainer logs after each step."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def on_log(self, args, state, control, logs, **kwargs):
        """Record a step; the last log has no loss."""
        if "loss" in logs:
            self.training.step(float(logs["loss"]))


def train(is_converted: bool) -> Training:
    """Train a Llama with two layers for a few steps."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA)).to(DEVICE)
    if "--lora" in sys.argv:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model.bfloat16(), LoraConfig(r=8, target_modules="all-linear"))
    text = inspect.getsource(torch.nn.functional).encode()[: BATCH * STEPS * LENGTH]
    tokens = torch.tensor(list(text)).view(-1, LENGTH)

    training = Training()
    if is_converted:
        batch = tokens[:BATCH].to(DEVICE)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=HAS_BFLOAT16):
            training.report = inplace_ops.convert(model, {"input_ids": batch, "labels": batch})
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            bf16=HAS_BFLOAT16,
            use_cpu=DEVICE == "cpu",
            per_device_train_batch_size=BATCH,
            **OPTIONS,
        )
        samples = [{"input_ids": each, "labels": each} for each in tokens]
        Trainer(model, arguments, train_dataset=samples, callbacks=[Record(training)]).train()
    return training


if __name__ == "__main__":
    before_after(train)
