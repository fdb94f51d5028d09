"""The head first, then a layer more each epoch."""

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

torch.manual_seed(16)
config = BertConfig(vocab_size=101, hidden_size=24, num_hidden_layers=3, num_attention_heads=4, intermediate_size=36,
                    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
model = BertForSequenceClassification(config)
for param in model.bert.encoder.parameters():
    param.requires_grad = False
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
data = [{"input_ids": torch.randint(1, 101, (8,)), "labels": i % 2} for i in range(8)]
loader = DataLoader(data, batch_size=4)
for epoch in range(3):
    if epoch > 0:
        for param in model.bert.encoder.layer[-epoch].parameters():
            param.requires_grad = True
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        print(f"{epoch} {loss.item():.10f}")
