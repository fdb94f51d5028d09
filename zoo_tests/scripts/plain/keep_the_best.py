"""Early stopping: remember the best weights, and go back to them."""

import copy

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

torch.manual_seed(17)
config = BertConfig(vocab_size=101, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=36,
                    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
model = BertForSequenceClassification(config)
data = [{"input_ids": torch.randint(1, 101, (8,)), "labels": i % 2} for i in range(24)]
loader, valid_loader = DataLoader(data[:16], batch_size=8, shuffle=True), DataLoader(data[16:], batch_size=8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
best, best_state = float("inf"), None
for epoch in range(4):
    model.train()
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        valid = sum(model(**batch).loss.item() for batch in valid_loader)
    print(f"{epoch} {loss.item():.10f} {valid:.10f}")
    if valid < best:
        best, best_state = valid, copy.deepcopy(model.state_dict())
model.load_state_dict(best_state)
with torch.no_grad():
    print(f"{sum(model(**batch).loss.item() for batch in valid_loader):.10f}")
