"""Rare classes count more, and are drawn more often."""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, WeightedRandomSampler
from transformers import BertConfig, BertForSequenceClassification

torch.manual_seed(12)
config = BertConfig(vocab_size=101, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=36,
                    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=2)  # fmt: skip
model = BertForSequenceClassification(config)
labels = [int(i % 5 == 0) for i in range(40)]
data = [{"input_ids": torch.randint(1, 101, (8,)), "labels": label} for label in labels]
counts = torch.bincount(torch.tensor(labels))
sampler = WeightedRandomSampler([1.0 / counts[label].item() for label in labels], num_samples=24)
loader = DataLoader(data, batch_size=8, sampler=sampler)
weight = counts.sum() / (2.0 * counts)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in loader:
    targets = batch.pop("labels")
    logits = model(**batch).logits
    loss = (F.cross_entropy(logits, targets, reduction="none") * weight.to(logits)[targets]).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"{loss.item():.10f}")
