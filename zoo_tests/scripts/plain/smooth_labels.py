"""A loss of one's own on the logits: label smoothing."""

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM

torch.manual_seed(11)
config = BertConfig(vocab_size=101, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=36,
                    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
model = BertForMaskedLM(config)
data = []
for _ in range(16):
    ids = torch.randint(5, 101, (10,))
    masked = torch.rand(10) < 0.3
    masked[0] = True
    data.append((ids.masked_fill(masked, 4), ids.masked_fill(~masked, -100)))
loader = DataLoader(data, batch_size=4, shuffle=True)
loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1, reduction="sum")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for ids, labels in loader:
    logits = model(input_ids=ids).logits
    loss = loss_fn(logits.flatten(0, 1), labels.flatten()) / labels.numel()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"{loss.item():.10f}")
