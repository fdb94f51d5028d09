"""The head has an optimizer of its own."""

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

torch.manual_seed(40)
config = BertConfig(vocab_size=101, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=36,
                    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
model = BertForSequenceClassification(config)
data = [{"input_ids": torch.randint(1, 101, (8,)), "labels": i % 2} for i in range(16)]
loader = DataLoader(data, batch_size=4)
optimizer = torch.optim.AdamW(model.bert.parameters(), lr=1e-3)
head_optimizer = torch.optim.SGD(model.classifier.parameters(), lr=0.1)
for batch in loader:
    optimizer.zero_grad()
    head_optimizer.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    head_optimizer.step()
    print(f"{loss.item():.10f}")
