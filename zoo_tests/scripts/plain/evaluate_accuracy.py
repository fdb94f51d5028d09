"""Train, then count right answers on held-out data."""

import torch
from torch.utils.data import DataLoader
from transformers import DistilBertConfig, DistilBertForSequenceClassification

torch.manual_seed(1)
config = DistilBertConfig(vocab_size=90, dim=24, n_layers=2, n_heads=4, hidden_dim=40, dropout=0.0,
                          attention_dropout=0.0, seq_classif_dropout=0.0, num_labels=2)  # fmt: skip
model = DistilBertForSequenceClassification(config)
data = [{"input_ids": torch.randint(1, 90, (7,)), "labels": i % 2} for i in range(24)]
train_loader = DataLoader(data[:16], batch_size=8, shuffle=True)
test_loader = DataLoader(data[16:], batch_size=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(3):
    model.train()
    for batch in train_loader:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
    model.eval()
    correct, total = 0, 0
    for batch in test_loader:
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"]).logits
        correct += (logits.argmax(-1) == batch["labels"]).sum().item()
        total += len(batch["labels"])
    print(f"epoch {epoch} loss {loss.item():.10f} accuracy {correct / total:.4f}")
