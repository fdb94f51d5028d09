"""Lower layers learn more slowly."""

import torch
from torch.utils.data import DataLoader
from transformers import ElectraConfig, ElectraForSequenceClassification

torch.manual_seed(14)
config = ElectraConfig(vocab_size=101, embedding_size=16, hidden_size=24, num_hidden_layers=3, num_attention_heads=4,
                       intermediate_size=36, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
model = ElectraForSequenceClassification(config)
lr, groups = 2e-3, [{"params": model.classifier.parameters(), "lr": 2e-3}]
for layer in reversed(model.electra.encoder.layer):
    lr *= 0.7
    groups.append({"params": layer.parameters(), "lr": lr})
groups.append({"params": model.electra.embeddings.parameters(), "lr": lr * 0.7})
optimizer = torch.optim.AdamW(groups)
data = [{"input_ids": torch.randint(1, 101, (8,)), "labels": i % 2} for i in range(16)]
loader = DataLoader(data, batch_size=4, shuffle=True)
for batch in loader:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"{loss.item():.10f}")
