"""Watch the gradients of each layer, and scale those of the embedding down by hand."""

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

torch.manual_seed(38)
config = BertConfig(vocab_size=101, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=36,
                    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
model = BertForSequenceClassification(config)
data = [{"input_ids": torch.randint(1, 101, (8,)), "labels": i % 2} for i in range(16)]
loader = DataLoader(data, batch_size=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in loader:
    optimizer.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    total = 0.0
    for name, param in model.named_parameters():
        if param.grad is not None:
            if "embeddings" in name:
                param.grad.mul_(0.5)
            total += param.grad.norm().item() ** 2
    optimizer.step()
    print(f"{loss.item():.10f} {total**0.5:.10f}")
