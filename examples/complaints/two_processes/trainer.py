"""transformers.Trainer on a tensor-parallel model

huggingface/transformers#41141 (open): users ask for one example that works. huggingface/transformers#39674 (open):
Trainer scaled the loss by the number of all processes, those of one tensor-parallel model too. In
huggingface/transformers#34194 (merged) users report that clipping and saving fail.

Nothing else is to be written. While all processes hold one parallel model, accelerate is shown one process. With `tp=2`
on 4 processes it is shown two replicas (docs/works_with.md).
"""

import copy
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import autotp

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64, num_attention_heads=4,
    tie_word_embeddings=True,
)  # fmt: skip
alone = LlamaForCausalLM(config)
model = autotp.parallelize(copy.deepcopy(alone))
tokens = torch.arange(16).view(2, 8)
rows = [{"input_ids": row, "labels": row} for row in tokens]

how = TrainingArguments(
    tempfile.mkdtemp(), per_device_train_batch_size=2, max_steps=1, logging_steps=1, save_strategy="no", report_to=[],
    use_cpu=True, disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(model, how, train_dataset=rows)
trainer.train()

loss = alone(tokens, labels=tokens).loss
loss.backward()
norm = torch.nn.utils.get_total_norm([p.grad for p in alone.parameters() if p.grad is not None])
found = [trainer.state.log_history[0][name] for name in ("loss", "grad_norm")]
torch.testing.assert_close(torch.tensor(found), torch.stack([loss.detach(), norm]), rtol=1e-5, atol=0)
