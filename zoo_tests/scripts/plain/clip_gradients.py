"""Clip the global norm of the gradients, and log it."""

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(10)
config = LlamaConfig(vocab_size=91, hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4,
                     pad_token_id=0)  # fmt: skip
model = LlamaForCausalLM(config)
data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(1, 91, (16, 10))]
loader = DataLoader(data, batch_size=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for batch in loader:
    loss = model(**batch).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.10f} norm {norm.item():.10f}")
