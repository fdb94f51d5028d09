"""A reward model on pairs: the better answer scores higher."""

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForSequenceClassification

torch.manual_seed(27)
config = LlamaConfig(vocab_size=91, hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4,
                     pad_token_id=0, num_labels=1)  # fmt: skip
model = LlamaForSequenceClassification(config)
data = [(torch.randint(1, 91, (9,)), torch.randint(1, 91, (9,))) for _ in range(16)]
loader = DataLoader(data, batch_size=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for better, worse in loader:
    rewards = model(input_ids=torch.cat([better, worse])).logits.squeeze(-1)
    loss = -nn.functional.logsigmoid(rewards[: len(better)] - rewards[len(better) :]).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"{loss.item():.10f}")
