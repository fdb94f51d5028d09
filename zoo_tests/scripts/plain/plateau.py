"""Lower the learning rate when the validation loss stops falling."""

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

torch.manual_seed(21)
config = BertConfig(vocab_size=101, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=36,
                    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
model = BertForSequenceClassification(config)
data = [{"input_ids": torch.randint(1, 101, (8,)), "labels": i % 2} for i in range(16)]
loader, valid_loader = DataLoader(data[:8], batch_size=4), DataLoader(data[8:], batch_size=4)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
for _ in range(4):
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        valid = sum(model(**batch).loss.item() for batch in valid_loader) / len(valid_loader)
    scheduler.step(valid)
    print(f"{valid:.10f} {optimizer.param_groups[0]['lr']:.8f}")
