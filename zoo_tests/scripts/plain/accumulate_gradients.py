"""Four small batches to one step."""

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(9)
config = LlamaConfig(vocab_size=91, hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, pad_token_id=0)  # fmt: skip
model = LlamaForCausalLM(config)
data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(1, 91, (32, 10))]
loader = DataLoader(data, batch_size=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
accumulation_steps = 4
for step, batch in enumerate(loader):
    loss = model(**batch).loss / accumulation_steps
    loss.backward()
    if (step + 1) % accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
    print(f"{step} {loss.item() * accumulation_steps:.10f}")
