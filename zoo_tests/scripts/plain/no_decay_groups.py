"""Biases and norms without weight decay: the two groups of the classic fine-tuning scripts."""

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_cosine_schedule_with_warmup

torch.manual_seed(13)
config = BertConfig(vocab_size=101, hidden_size=24, num_hidden_layers=3, num_attention_heads=4, intermediate_size=36,
                    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
model = BertForSequenceClassification(config)
no_decay = ["bias", "LayerNorm.weight"]
groups = [
    {"params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)], "weight_decay": 0.3},
    {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-8)
scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=1, num_training_steps=5)
data = [{"input_ids": torch.randint(1, 101, (8,)), "labels": i % 2} for i in range(20)]
train_dataloader = DataLoader(data, batch_size=4)
for step, batch in enumerate(train_dataloader):
    model.train()
    outputs = model(**batch)
    loss = outputs[0]
    loss.backward()
    optimizer.step()
    scheduler.step()
    model.zero_grad()
    print(f"{step} {loss.item():.10f}")
