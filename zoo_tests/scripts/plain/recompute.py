"""Gradient checkpointing, switched on as its page says."""

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(33)
config = LlamaConfig(vocab_size=91, hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4,
                     pad_token_id=0)  # fmt: skip
model = LlamaForCausalLM(config)
model.gradient_checkpointing_enable()
model.config.use_cache = False
data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(1, 91, (12, 10))]
loader = DataLoader(data, batch_size=4, drop_last=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in loader:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"{loss.item():.10f}")
