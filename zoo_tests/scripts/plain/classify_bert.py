"""Fine-tune an encoder on labelled sentences: the loop of every first course."""

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

torch.manual_seed(0)
config = BertConfig(
    vocab_size=101, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=36,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
)  # fmt: skip
model = BertForSequenceClassification(config)
data = [{"input_ids": torch.randint(1, 101, (9,)), "labels": i % 3} for i in range(32)]
loader = DataLoader(data, batch_size=8, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
scheduler = get_linear_schedule_with_warmup(optimizer, 2, 8)

model.train()
for epoch in range(2):
    for batch in loader:
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print(f"epoch {epoch} lr {scheduler.get_last_lr()[0]:.8f} loss {loss.item():.10f}")
